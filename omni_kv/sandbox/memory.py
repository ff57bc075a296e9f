"""Tensors over memory whose surroundings are known: an unmapped page, or a given neighbour.

Reading one element past a tensor is silent in ordinary memory. Here the tensor ends (or begins)
exactly where the mapped addresses do, so that such a read kills the process (SIGSEGV on a CPU, an
illegal memory access on a GPU); or the elements next to it are mapped and filled by the caller, so
that a foreign value is recognised when it turns up.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from omni_kv.sandbox import cuda

Guard = Literal["after", "before"]

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Pages:
    """Mapped pages of host memory with an unmapped page on both sides.

    Attributes:
        nbytes: their size, what was asked for rounded up to whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        self.nbytes = -(-nbytes // page) * page
        self._memory = mmap.mmap(
            -1, self.nbytes + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for unmapped in (address, address + page + self.nbytes):
            if _libc.mprotect(unmapped, page, _PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect failed")

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor over ``count`` elements from byte ``offset`` on, as long as its storage."""
        # frombuffer keeps the memory alive for as long as the tensor lives.
        start = mmap.PAGESIZE + offset
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


@dataclass(frozen=True)
class Region:
    """A tensor and its neighbourhood, which lies in one mapping.

    Attributes:
        before: 1-D tensor over the mapped elements just in front of ``tensor``.
        tensor: the tensor, zero-filled; its storage covers the tensor and nothing else.
        after: 1-D tensor over the mapped elements just behind ``tensor``.
    """

    before: torch.Tensor
    tensor: torch.Tensor
    after: torch.Tensor


def map_region(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    guard: Guard = "after",
    before: int = 0,
    after: int = 0,
    device: torch.device | str = "cpu",
) -> Region:
    """Lay a zero-filled tensor next to an unmapped page.

    With ``guard="after"`` the unmapped page begins exactly ``after`` elements behind the tensor;
    with ``guard="before"`` it ends exactly ``before`` elements in front of it. What lies on the
    other side is mapped for at least the elements asked for.

    Args:
        shape: shape of the tensor; at least one element.
        dtype: its dtype.
        guard: on which side the unmapped page lies.
        before: mapped elements in front of the tensor, zero-filled.
        after: mapped elements behind it, zero-filled.
        device: ``cpu`` or a CUDA device.

    Raises:
        ValueError: if a size is negative or the tensor would be empty.
        OSError: if the page cannot be protected, or a GPU's driver cannot map memory at will.
    """
    count = math.prod(shape)
    if count <= 0 or before < 0 or after < 0:
        raise ValueError(
            f"need a non-empty tensor and sizes of 0 or more, not shape {tuple(shape)}, "
            f"before={before}, after={after}"
        )
    device = torch.device(device)
    item = dtype.itemsize
    payload = (before + count + after) * item
    memory = _Pages(payload) if device.type == "cpu" else cuda.Block(payload, device)
    start = memory.nbytes - payload if guard == "after" else 0

    def tensor(offset: int, elements: int) -> torch.Tensor:
        if elements == 0:
            return torch.empty(0, dtype=dtype, device=device)
        return memory.tensor(start + offset * item, elements, dtype)

    return Region(
        before=tensor(0, before),
        tensor=tensor(before, count).view(*shape),
        after=tensor(before + count, after),
    )
