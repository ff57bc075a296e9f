"""Custom ops for random programs: each adds to the first rows of what it mutates."""

from __future__ import annotations

import torch


def _add(x: torch.Tensor, pool: torch.Tensor, factor: float) -> None:
    rows, columns = (min(a, b) for a, b in zip(x.shape, pool.shape, strict=True))
    pool[:rows, :columns] += factor * x[:rows, :columns]


@torch.library.custom_op("fuzz_ops::write1", mutates_args=("a",))
def write1(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Add ``x`` to ``a``; all are 2-D."""
    _add(x, a, 1.0)
    return x + a.sum()


@torch.library.custom_op("fuzz_ops::write2", mutates_args=("a", "b"))
def write2(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add ``x`` to ``a`` and twice ``x`` to ``b``."""
    _add(x, a, 1.0)
    _add(x, b, 2.0)
    return x + a.sum() - b.sum()


@torch.library.custom_op("fuzz_ops::write3", mutates_args=("a", "b", "c"))
def write3(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Add ``x`` to ``a``, twice ``x`` to ``b`` and three times ``x`` to ``c``."""
    _add(x, a, 1.0)
    _add(x, b, 2.0)
    _add(x, c, 3.0)
    return x + a.sum() - b.sum() + c.sum()


for op in (write1, write2, write3):
    op.register_fake(lambda x, *pools: torch.empty_like(x))
