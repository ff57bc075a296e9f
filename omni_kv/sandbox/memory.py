"""Tensors over memory whose surroundings are known: an unmapped page, or a given neighbour.

Reading one element past a tensor is silent in ordinary memory. Here the tensor ends (or begins)
exactly where the address space does, so that such a read is a SIGSEGV; or the elements next to it
are mapped and filled by the caller, so that a foreign value is recognised when it turns up.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Guard = Literal["after", "before"]

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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
) -> Region:
    """Lay a zero-filled CPU tensor next to an unmapped page.

    With ``guard="after"`` the unmapped page begins exactly ``after`` elements behind the tensor;
    with ``guard="before"`` it ends exactly ``before`` elements in front of it. What lies on the
    other side is mapped for at least the elements asked for.

    Args:
        shape: shape of the tensor; at least one element.
        dtype: its dtype.
        guard: on which side the unmapped page lies.
        before: mapped elements in front of the tensor, zero-filled.
        after: mapped elements behind it, zero-filled.

    Raises:
        ValueError: if a size is negative or the tensor would be empty.
        OSError: if the page cannot be protected.
    """
    count = math.prod(shape)
    if count <= 0 or before < 0 or after < 0:
        raise ValueError(
            f"need a non-empty tensor and sizes of 0 or more, not shape {tuple(shape)}, "
            f"before={before}, after={after}"
        )
    item = dtype.itemsize
    page = mmap.PAGESIZE
    payload = (before + count + after) * item
    pages = -(-payload // page) * page
    memory = mmap.mmap(-1, pages + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    unmapped, start = (pages, pages - payload) if guard == "after" else (0, page)
    if _libc.mprotect(address + unmapped, page, _PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")

    def tensor(offset: int, elements: int) -> torch.Tensor:
        if elements == 0:
            return torch.empty(0, dtype=dtype)
        # frombuffer keeps `memory` alive for as long as the tensor lives.
        return torch.frombuffer(memory, dtype=dtype, count=elements, offset=start + offset * item)

    return Region(
        before=tensor(0, before),
        tensor=tensor(before, count).view(*shape),
        after=tensor(before + count, after),
    )
