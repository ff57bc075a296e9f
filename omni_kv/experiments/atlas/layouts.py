"""The layouts: how the pools are allocated, what the compiled function takes, how it writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HEADS, HEAD_DIM, BLOCK = 2, 8, 4
Tensors = list[torch.Tensor]

#: Addresses of the storages that the op was handed, one entry a pool; filled as it runs.
received: list[int] = []


@dataclass(frozen=True)
class Layout:
    """One layout.

    Attributes:
        shapes: from the number of slots to the shapes of the allocations.
        dtype: of the allocations; the pools are float32.
        views: from the allocations to K, V and further pools.
        inputs: from the allocations to the pool arguments of the compiled function.
        slots_dim: the dimension of each pool argument that counts slots or pages.
        layer: the function to compile: ``layer(x, slots, *inputs)``, x and the result
            ``(tokens, HEADS, HEAD_DIM)`` float32, slots ``(tokens,)`` int64.
    """

    shapes: Callable[[int], list[tuple[int, ...]]]
    views: Callable[[Tensors], Tensors]
    inputs: Callable[[Tensors], Tensors]
    layer: Callable[..., torch.Tensor]
    slots_dim: int = 0
    dtype: torch.dtype = torch.float32


def layout_of(name: str) -> Layout:
    """The layout of that name. Its op is registered when it is first asked for."""
    return _LAYOUTS[name]()


def _write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    received.append(pool.untyped_storage().data_ptr())
    if pool.dim() == 4:  # pages of BLOCK slots
        pool[slots // BLOCK, slots % BLOCK] = rows
    else:
        pool[slots] = rows


def _attend(q: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor) -> torch.Tensor:
    keys, values = (p.reshape(-1, HEADS, HEAD_DIM) for p in (key_pool, value_pool))
    scores = torch.einsum("thd,shd->ths", q, keys) / HEAD_DIM**0.5
    # Contiguous, as the op's fake implementation says.
    return torch.einsum("ths,shd->thd", scores.softmax(-1), values).contiguous()


def _write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
) -> torch.Tensor:
    _write(key_pool, slots, k)
    _write(value_pool, slots, v)
    return _attend(k, key_pool, value_pool)


def _write_vk(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    value_pool: torch.Tensor,
    key_pool: torch.Tensor,
) -> torch.Tensor:
    return _write_kv(k, v, slots, key_pool, value_pool)


def _write_scaled(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    _write(scales, slots, v.abs().amax((1, 2)))
    return _write_kv(k, v, slots, key_pool, value_pool)


def _write_one(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor
) -> torch.Tensor:
    return _write_kv(k, v, slots, kv[0], kv[1])


def _write_list(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pools: list[torch.Tensor]
) -> torch.Tensor:
    return _write_kv(k, v, slots, pools[0], pools[1])


@functools.cache
def _op(name: str) -> Callable[..., torch.Tensor]:
    ops: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...], str]] = {
        "write_kv": (_write_kv, ("key_pool", "value_pool"), "Tensor(a!) {}, Tensor(b!) {}"),
        "write_vk": (_write_vk, ("value_pool", "key_pool"), "Tensor(a!) {}, Tensor(b!) {}"),
        "write_scaled": (
            _write_scaled,
            ("key_pool", "value_pool", "scales"),
            "Tensor(a!) {}, Tensor(b!) {}, Tensor(c!) {}",
        ),
        "write_one": (_write_one, ("kv",), "Tensor(a!) {}"),
        "write_list": (_write_list, ("pools",), "Tensor(a!)[] {}"),
    }
    body, mutates, schema = ops[name]
    # The schema is spelled out: inferring it from annotations differs between releases.
    op = torch.library.custom_op(
        f"omni_kv_atlas::{name}",
        body,
        mutates_args=mutates,
        schema=f"(Tensor k, Tensor v, Tensor slots, {schema.format(*mutates)}) -> Tensor",
    )

    @op.register_fake
    def _(k: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.empty_like(k)

    namespace = torch.ops.omni_kv_atlas
    found: Callable[..., torch.Tensor] = getattr(namespace, name).default
    return found


def _through(name: str, arrange: Callable[..., tuple[Any, ...]] = lambda *pools: pools) -> Any:
    """A layer around the op: a little work in front and behind, as in a model."""
    op = _op(name)

    def layer(x: torch.Tensor, slots: torch.Tensor, *pools: torch.Tensor) -> torch.Tensor:
        out = op(x * 0.5, x - 1.0, slots, *arrange(*pools))
        return out * 2.0 + x

    return layer


def _index_put(x: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    key_pool, value_pool = kv.unbind(0)
    key_pool[slots] = x * 0.5
    value_pool[slots] = x - 1.0
    return _attend(x * 0.5, key_pool, value_pool) * 2.0 + x


def _index_copy(x: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    key_pool, value_pool = kv.unbind(0)
    key_pool.index_copy_(0, slots, x * 0.5)
    value_pool.index_copy_(0, slots, x - 1.0)
    return _attend(x * 0.5, key_pool, value_pool) * 2.0 + x


def _halves(memory: Tensors) -> Tensors:
    return [memory[0][0], memory[0][1]]


def _pair(slots: int) -> list[tuple[int, ...]]:
    return [(2, slots, HEADS, HEAD_DIM)]


_GAP = 8


def _gap_views(memory: Tensors) -> Tensors:
    half = (memory[0].shape[0] - _GAP) // 2
    return [memory[0][:half], memory[0][half + _GAP :]]


def _scaled_views(memory: Tensors) -> Tensors:
    row = HEADS * HEAD_DIM
    slots = memory[0].numel() // (2 * row + 1)
    key_pool, value_pool, scales = memory[0].split([slots * row, slots * row, slots])
    return [p.view(slots, HEADS, HEAD_DIM) for p in (key_pool, value_pool)] + [scales]


def _arena_views(memory: Tensors) -> Tensors:
    halves = memory[0].chunk(2)
    return [half.view(torch.float32).view(-1, HEADS, HEAD_DIM) for half in halves]


def _same(memory: Tensors) -> Tensors:
    return list(memory)


def _in_pieces(
    shapes: Callable[[int], list[tuple[int, ...]]],
    views: Callable[[Tensors], Tensors],
    op: str = "write_kv",
    arrange: Callable[..., tuple[Any, ...]] = lambda *pools: pools,
    **more: Any,
) -> Layout:
    return Layout(shapes, views, views, _through(op, arrange), **more)


_ROW = HEADS * HEAD_DIM
_LAYOUTS: dict[str, Callable[[], Layout]] = {
    "separate": lambda: _in_pieces(lambda n: [(n, HEADS, HEAD_DIM)] * 2, _same),
    "shared_k_first": lambda: _in_pieces(_pair, _halves),
    "shared_v_first": lambda: _in_pieces(_pair, lambda m: [m[0][1], m[0][0]]),
    "shared_swapped": lambda: _in_pieces(_pair, _halves, "write_vk", lambda k, v: (v, k)),
    "gap": lambda: _in_pieces(lambda n: [(2 * n + _GAP, HEADS, HEAD_DIM)], _gap_views),
    "three_pools": lambda: _in_pieces(
        lambda n: [(n * (2 * _ROW + 1),)], _scaled_views, "write_scaled"
    ),
    "byte_arena": lambda: _in_pieces(
        lambda n: [(2 * n * _ROW * 4,)], _arena_views, dtype=torch.uint8
    ),
    "interleaved_page": lambda: _in_pieces(
        lambda n: [(n // BLOCK, 2, BLOCK, HEADS, HEAD_DIM)], lambda m: [m[0][:, 0], m[0][:, 1]]
    ),
    "interleaved_slot": lambda: _in_pieces(
        lambda n: [(n, 2, HEADS, HEAD_DIM)], lambda m: [m[0][:, 0], m[0][:, 1]]
    ),
    "one_tensor": lambda: Layout(_pair, _halves, _same, _through("write_one"), 1),
    "sliced_in_graph": lambda: Layout(
        _pair, _halves, _same, _through("write_kv", lambda kv: (kv[0], kv[1])), 1
    ),
    "list": lambda: _in_pieces(_pair, _halves, "write_list", lambda k, v: ([k, v],)),
    "unbind_index_put": lambda: Layout(_pair, _halves, _same, _index_put, 1),
    "unbind_index_copy": lambda: Layout(_pair, _halves, _same, _index_copy, 1),
}
