"""Paged KV pools under torch.compile: what the compiler clones, reads and overwrites."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Importing torch takes seconds, which the command line and the child processes need not wait.
    if name in ("audit", "AuditReport"):
        from omni_kv.audits import audit

        return getattr(audit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
