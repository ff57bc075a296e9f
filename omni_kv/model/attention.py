"""Attention over a paged window, without a causal mask: the backends behind the op.

Every backend is a function ``(query, key_pool, value_pool, window) -> output``; see ``attend`` for
the shapes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from omni_kv.model.geometry import Geometry

#: flash-attn 2 takes pages whose size is a multiple of this (its block-table kernels).
FLASH_ATTN_PAGE = 256
#: Compute capability of the chips that FlashAttention 3 is written for.
HOPPER = (9, 0)


class PagedWindow(NamedTuple):
    """What each sequence attends to, and how.

    Attributes:
        block_table: ``(num_seqs, max_pages)`` int32, the pages of each sequence in order; or None
            when the one sequence lies in pages 0, 1, 2, ..., so that nothing need be gathered.
        query_start_loc: ``(num_seqs + 1,)`` int32 on the host, where each sequence's queries start.
        seq_lens: ``(num_seqs,)`` int32 on the host, how many keys each sequence has.
        block_size: slots per page.
        softmax_scale: factor on the scores before the softmax.
    """

    block_table: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    softmax_scale: float


class BackendError(ValueError):
    """An attention backend is not there, or cannot take this geometry."""


def attend(
    backend: str,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> torch.Tensor:
    """Attend from each sequence's queries to the keys in its pages.

    Args:
        backend: a name from ``BACKENDS``.
        query: ``(num_tokens, num_heads, head_dim)``.
        key_pool: ``(num_slots, num_kv_heads, head_dim)``.
        value_pool: ``(num_slots, num_kv_heads, head_dim)``.
        window: which keys each sequence attends to.

    Returns:
        ``(num_tokens, num_heads, head_dim)``, contiguous.
    """
    return BACKENDS[backend](query, key_pool, value_pool, window)


def _windows(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each sequence's queries, keys and values, ``(1, heads, length, head_dim)``."""
    block_table, query_start_loc, seq_lens, block_size, _ = window
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        if block_table is None:
            key, value = key_pool[:length], value_pool[:length]
        else:
            pages = block_table[i, : -(-length // block_size)]
            by_page = (-1, block_size, *key_pool.shape[1:])
            key = key_pool.view(by_page)[pages].flatten(0, 1)[:length]
            value = value_pool.view(by_page)[pages].flatten(0, 1)[:length]
        q = query[starts[i] : starts[i + 1]]
        yield (
            q.transpose(0, 1).unsqueeze(0),
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
        )


def _joined(outputs: list[torch.Tensor]) -> torch.Tensor:
    parts = [out.squeeze(0).transpose(0, 1) for out in outputs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def _sdpa(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> torch.Tensor:
    """PyTorch's ``scaled_dot_product_attention`` over the gathered window."""
    gqa = query.shape[1] != key_pool.shape[1]
    return _joined(
        [
            F.scaled_dot_product_attention(q, k, v, scale=window.softmax_scale, enable_gqa=gqa)
            for q, k, v in _windows(query, key_pool, value_pool, window)
        ]
    )


def _reference(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> torch.Tensor:
    """Softmax of scaled products, written out in float32: what the others are tested against."""
    groups = query.shape[1] // key_pool.shape[1]
    outputs = []
    for q, k, v in _windows(query, key_pool, value_pool, window):
        key, value = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
        scores = q.float() @ key.transpose(-1, -2) * window.softmax_scale
        outputs.append((scores.softmax(-1) @ value).to(query.dtype))
    return _joined(outputs)


def _flash_attn(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> torch.Tensor:
    """flash-attn 2, which follows the block table itself."""
    from flash_attn import flash_attn_varlen_func

    block_table, query_start_loc, seq_lens, block_size, softmax_scale = window
    if block_table is None:
        block_table = _pages_in_order(key_pool.shape[0] // block_size, query.device)
    by_page = (-1, block_size, *key_pool.shape[1:])
    key_start_loc = F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    queries_per_seq = query_start_loc.diff()
    out: torch.Tensor = flash_attn_varlen_func(
        q=query,
        k=key_pool.view(by_page),
        v=value_pool.view(by_page),
        cu_seqlens_q=query_start_loc.to(query.device, non_blocking=True),
        cu_seqlens_k=key_start_loc.to(query.device, non_blocking=True),
        max_seqlen_q=int(queries_per_seq.max()),
        max_seqlen_k=int(seq_lens.max()),
        softmax_scale=softmax_scale,
        block_table=block_table,
    )
    return out


def _flash_attn_3(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    window: PagedWindow,
) -> torch.Tensor:
    """FlashAttention 3 for Hopper: follows a block table of any page size; faster without one."""
    from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

    block_table, query_start_loc, seq_lens, block_size, softmax_scale = window
    out: torch.Tensor
    if block_table is None:
        length = int(seq_lens)
        out = flash_attn_func(
            query[None],
            key_pool[None, :length],
            value_pool[None, :length],
            softmax_scale=softmax_scale,
        )
        return out[0]
    by_page = (-1, block_size, *key_pool.shape[1:])
    out = flash_attn_with_kvcache(
        query,
        key_pool.view(by_page),
        value_pool.view(by_page),
        cache_seqlens=seq_lens.to(query.device, non_blocking=True),
        page_table=block_table,
        cu_seqlens_q=query_start_loc.to(query.device, non_blocking=True),
        max_seqlen_q=int(query_start_loc.diff().max()),
        softmax_scale=softmax_scale,
        num_splits=1,
    )
    return out


@functools.lru_cache(maxsize=4)
def _pages_in_order(num_blocks: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)


#: The attention functions by name.
BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "flash-attn": _flash_attn,
    "flash-attn-3": _flash_attn_3,
    "sdpa": _sdpa,
    "reference": _reference,
}


def choose_backend(name: str, geometry: Geometry, device: torch.device | str) -> str:
    """Return the backend to use, or say why the one asked for cannot be used.

    ``auto`` takes ``flash-attn-3`` where it is installed and the chip is one that it is written for
    (the fastest on the H200, see data/evidence), and else ``sdpa``, which takes pages of any size
    and runs everywhere.

    Args:
        name: a name from ``BACKENDS``, or ``auto``.
        geometry: what it shall attend over.
        device: where.

    Raises:
        BackendError: if there is no such backend, it is not installed, or it cannot take the
            geometry's page size, dtype or the device.
    """
    device = torch.device(device)
    if name == "auto":
        refusal = _refusal("flash-attn-3", geometry, device)
        return "sdpa" if refusal else "flash-attn-3"
    if name not in BACKENDS:
        raise BackendError(
            f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}"
        )
    refusal = _refusal(name, geometry, device)
    if refusal:
        where = f"attention backend {name!r} for geometry {geometry.name!r}"
        raise BackendError(f"{where} {refusal}, or take 'sdpa'")
    return name


def _refusal(name: str, geometry: Geometry, device: torch.device) -> str | None:
    """Why a flash-attn backend cannot be used, and what would help; None if it can."""
    if name not in ("flash-attn", "flash-attn-3"):
        return None
    module, package = (
        ("flash_attn", "'omni-kv[cuda]'")
        if name == "flash-attn"
        else ("flash_attn_interface", "a build of FlashAttention 3, such as tokenspeed-fa3")
    )
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}; move the model there"
    if name == "flash-attn-3" and torch.cuda.get_device_capability(device) != HOPPER:
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        return f"needs a chip of compute capability 9.0, not {capability}; take 'flash-attn'"
    if importlib.util.find_spec(module) is None:
        return f"is not installed; pip install {package}"
    if geometry.torch_dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {geometry.dtype}; change the dtype"
    if name == "flash-attn" and geometry.block_size % FLASH_ATTN_PAGE:
        return (
            f"takes pages of a multiple of {FLASH_ATTN_PAGE} slots, not "
            f"block_size={geometry.block_size}; set block_size={FLASH_ATTN_PAGE}"
        )
    return None
