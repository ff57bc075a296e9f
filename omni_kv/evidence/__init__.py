"""What was measured, as files, and the numbers and outcomes that are computed from them.

Records of GPU experiments, verdicts for each torch release, the ledger of claims. Imports ``model``
(for sizes). Public: every name without a leading underscore.
"""
