"""Calls whose tensors are laid anew: views keep their bases, storages keep their sharing.

Pickling loses which tensor a view was taken of, and AOTAutograd treats inputs with a common base
otherwise than inputs that merely share a storage. So views travel with their bases, and whoever
lays inputs into other memory lays the bases there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from omni_kv.sandbox.memory import map_region

Memory = Literal["filled on both sides", "unmapped behind", "unmapped in front", "ordinary memory"]

#: In this order, since the first that fails says most about where foreign values come from.
MEMORIES: tuple[Memory, ...] = ("filled on both sides", "unmapped behind", "unmapped in front")

#: Where a GPU's driver cannot map memory at will: nothing is laid.
ORDINARY: Memory = "ordinary memory"

#: Bytes that surround storages in a filled neighbourhood. As bfloat16, float16, float32 and float64
#: both are finite and far from what a network holds; as integers they are large.
BEHIND, IN_FRONT = 0x5B, 0x6A


#: Devices whose memory can be laid.
DEVICES = ("cpu", "cuda")

#: Bytes of the largest filled neighbourhood, so that memory use stays in proportion.
ROOM = 1 << 26

#: Bytes to which a GPU's allocator aligns tensors, and Inductor expects them to be.
_ALIGNED = 16


@dataclass(frozen=True)
class View:
    """A view and its base: whether inputs have a common base decides how they are merged."""

    key: int
    base: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """The view; the same one for the same key."""
        if self.key not in made:
            made[self.key] = self.base.as_strided(self.shape, self.stride, self.offset)
        return made[self.key]


def pack(leaf: Any) -> Any:
    """A view with its base, as it can be pickled; anything else as it is."""
    base = leaf._base if isinstance(leaf, torch.Tensor) else None
    if base is None:
        return leaf
    shape, stride = tuple(leaf.shape), tuple(leaf.stride())
    return View(id(leaf), base, shape, stride, int(leaf.storage_offset()))


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Change every leaf of a nest of arguments, where a packed view is one leaf."""
    return pytree.tree_map(change, tree, is_leaf=lambda leaf: isinstance(leaf, View))


def lay(values: Sequence[Any], memory: Memory) -> tuple[list[Any], Callable[[], None]]:
    """Copy tensors into memory whose surroundings are known, storages as they are shared.

    Args:
        values: graph inputs; what is no tensor of a CPU or CUDA device stays as it is.
        memory: what surrounds each storage. A filled neighbourhood is as large as the storage on
            either side, up to ``ROOM``, and ends at unmapped pages.

    Returns:
        The inputs over the new memory, and a function that copies every storage back.
    """
    regions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    made: dict[int, torch.Tensor] = {}

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            base = tensor._base
            if base is not None:
                view = (tensor.shape, tensor.stride(), tensor.storage_offset())
                made[id(tensor)] = laid(base).as_strided(*view)
            else:
                storage = tensor.untyped_storage()
                if storage._cdata not in regions:
                    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    source.set_(storage)
                    regions[storage._cdata] = (source, _surround(source, memory))
                target = regions[storage._cdata][1].untyped_storage()
                over = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                over.set_(target, tensor.storage_offset(), tensor.shape, tensor.stride())
                made[id(tensor)] = over.requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    results = [
        laid(value)
        if isinstance(value, torch.Tensor)
        and value.device.type in ("cpu", "cuda")
        and value.numel()
        else value
        for value in values
    ]

    def write_back() -> None:
        for source, target in regions.values():
            source.copy_(target)

    return results, write_back


def _surround(source: torch.Tensor, memory: Memory) -> torch.Tensor:
    """A copy of the bytes of a storage, in memory of its own."""
    size = source.numel()
    # What is not to be unmapped is mapped for as far as the storage is large, so that a read there
    # never depends on what else the process has mapped; beyond ROOM it meets an unmapped page.
    room = min(size, ROOM)
    before = 0 if memory == "unmapped in front" else room
    after = 0 if memory == "unmapped behind" else room
    guard: Literal["after", "before"] = "before" if memory == "unmapped in front" else "after"
    if source.is_cuda and memory == "unmapped behind":
        after = -size % _ALIGNED  # Inductor copies inputs that begin elsewhere, and reads the copy
    elif source.is_cuda and memory == "filled on both sides":
        after += -(size + after) % _ALIGNED
    region = map_region(
        (size,), torch.uint8, guard=guard, before=before, after=after, device=source.device
    )
    region.before.fill_(IN_FRONT)
    region.after.fill_(BEHIND)
    return region.tensor.copy_(source)
