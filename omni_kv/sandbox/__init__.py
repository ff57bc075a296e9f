"""Run what may die: functions in child processes, over memory whose surroundings are known.

Known surroundings are an unmapped page or a filled neighbourhood. Imports nothing else of
``omni_kv``. Public: every name without a leading underscore.
"""
