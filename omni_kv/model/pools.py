"""The KV pools of all layers, in two layouts: halves of one allocation, or separate tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from omni_kv.model.geometry import Geometry

Layout = Literal["shared", "separate"]
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Pools:
    """Keys and values of every layer.

    Attributes:
        layout: how K and V of a layer lie in memory.
        keys: per layer, ``(num_blocks, block_size, num_kv_heads, head_dim)``.
        values: likewise.
    """

    layout: Layout
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def key_cache(self, layer: int) -> torch.Tensor:
        """Keys of a layer, by page: ``(num_blocks, block_size, num_kv_heads, head_dim)``."""
        return self.keys[layer]

    def value_cache(self, layer: int) -> torch.Tensor:
        """Values of a layer, by page: ``(num_blocks, block_size, num_kv_heads, head_dim)``."""
        return self.values[layer]

    def key_slots(self, layer: int) -> torch.Tensor:
        """Keys of a layer, by slot: a ``(num_slots, num_kv_heads, head_dim)`` view."""
        return self.keys[layer].flatten(0, 1)

    def value_slots(self, layer: int) -> torch.Tensor:
        """Values of a layer, by slot: a ``(num_slots, num_kv_heads, head_dim)`` view."""
        return self.values[layer].flatten(0, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return sum(t.nbytes for t in (*self.keys, *self.values))


def make_pools(
    geometry: Geometry,
    layout: Layout,
    *,
    device: torch.device | str = "cpu",
    allocate: Allocate | None = None,
) -> Pools:
    """Allocate the pools of all layers, zero-filled.

    ``shared`` makes one ``(2, num_blocks, block_size, num_kv_heads, head_dim)`` tensor a layer, as
    the pull request found it; ``separate`` makes two tensors a layer, as the pull request left it.

    Args:
        geometry: the sizes.
        layout: ``shared`` or ``separate``.
        device: where; not looked at when ``allocate`` is given.
        allocate: makes one tensor from shape and dtype, in place of ``torch.zeros``.

    Raises:
        ValueError: if the layout is unknown.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(get_args(Layout))}")
    if allocate is None:

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

    half = (geometry.num_blocks, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    keys, values = [], []
    for _ in range(geometry.num_layers):
        if layout == "shared":
            kv = allocate((2, *half), geometry.torch_dtype)
            key, value = kv[0], kv[1]
        else:
            key, value = (allocate(half, geometry.torch_dtype) for _ in range(2))
        keys.append(key)
        values.append(value)
    assert math.prod(half) == geometry.pool_numel
    return Pools(layout, tuple(keys), tuple(values))
