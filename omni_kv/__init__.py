"""Paged KV pools under torch.compile: what the compiler clones, reads and overwrites."""

__version__ = "0.1.0"
