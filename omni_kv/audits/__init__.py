"""The audit of any callable: what is cloned, why, what is read, and whether eager agrees.

Imports ``lens`` and ``sandbox``. Public: ``omni_kv.audit``, ``omni_kv.AuditReport`` and
``omni_kv.testing``; the rest is how they do it.
"""
