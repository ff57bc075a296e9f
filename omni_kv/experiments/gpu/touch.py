"""A Triton kernel that reads one byte in every so many: to find out whether memory is mapped."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def touch_kernel(base, sums, start, count, step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the bytes at ``base + start + i * step`` for ``i < count``; one sum a program."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offsets = start + index.to(tl.int64) * step
    values = tl.load(base + offsets, mask=index < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(values.to(tl.int32)))
