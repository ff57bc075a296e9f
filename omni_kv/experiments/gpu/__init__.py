"""Experiments that need a GPU, and ``omni-kv record``, which runs them and writes their records.

Imports what ``experiments`` may import. Public: ``record.records_for`` and ``bench.bench_table``.
"""
