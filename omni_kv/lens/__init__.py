"""Look inside one compilation: compile once, run nothing, keep what every stage made of it.

The decisions of the reinplace pass are read here. Imports nothing else of ``omni_kv``. Public:
``capture.capture`` and the records that it returns.
"""
