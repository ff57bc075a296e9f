"""The model under investigation: sizes, KV pools, the custom op, the transformer, rollouts.

Plain PyTorch; nothing here knows the compiler. Imports nothing else of ``omni_kv``. Public: every
name without a leading underscore.
"""
