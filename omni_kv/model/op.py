"""The custom op under investigation: write K and V into their slots, then attend over the pages.

It declares *two* mutated arguments. Where they are halves of one allocation, ``torch.compile``
keeps a copy of the second one; the rest of this package looks at what becomes of that copy.
"""

import torch

from omni_kv.model.attention import PagedWindow, attend


def write_slots(pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows into their slots of a pool.

    Args:
        pool: ``(num_slots, num_kv_heads, head_dim)``; mutated.
        slot_mapping: ``(num_tokens,)`` int64, the slot of each row.
        rows: ``(num_tokens, num_kv_heads, head_dim)``.
    """
    # index_copy_ moves one element a thread. With 16 bytes an element it takes a third of the time.
    if _in_sixteen_bytes(pool) and _in_sixteen_bytes(rows):
        pool, rows = pool.view(torch.complex128), rows.view(torch.complex128)
    pool.index_copy_(0, slot_mapping, rows)


def _in_sixteen_bytes(x: torch.Tensor) -> bool:
    """Whether a tensor is made of aligned runs of 16 bytes."""
    counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    steps = [n * x.element_size() for n in counts]
    return x.stride(-1) == 1 and all(n % 16 == 0 for n in (x.data_ptr(), *steps))


@torch.library.custom_op(
    "omni_kv::ar_diffusion_paged_write_attn", mutates_args=("key_pool", "value_pool")
)
def ar_diffusion_paged_write_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    softmax_scale: float,
    backend: str,
) -> torch.Tensor:
    """Write the current keys and values into the pools, then attend without a causal mask.

    Lengths are host tensors, not Python ints: an int that changes between calls is a guard and
    recompiles, and a length that lives on the device would have to be waited for.

    Args:
        query: ``(num_tokens, num_heads, head_dim)``.
        key: ``(num_tokens, num_kv_heads, head_dim)``, written to ``key_pool[slot_mapping]``.
        value: ``(num_tokens, num_kv_heads, head_dim)``, written to ``value_pool[slot_mapping]``.
        key_pool: ``(num_slots, num_kv_heads, head_dim)``; mutated.
        value_pool: ``(num_slots, num_kv_heads, head_dim)``; mutated.
        slot_mapping: ``(num_tokens,)`` int64, the slot of each token.
        block_table: ``(num_seqs, max_pages)`` int32, or None for pages 0, 1, 2, ... in order.
        query_start_loc: ``(num_seqs + 1,)`` int32 on the host.
        seq_lens: ``(num_seqs,)`` int32 on the host: keys to attend to, the current ones included.
        block_size: slots per page.
        softmax_scale: factor on the scores before the softmax.
        backend: a name from ``omni_kv.model.attention.BACKENDS``.

    Returns:
        ``(num_tokens, num_heads, head_dim)``, contiguous.
    """
    write_slots(key_pool, slot_mapping, key)
    write_slots(value_pool, slot_mapping, value)
    window = PagedWindow(block_table, query_start_loc, seq_lens, block_size, softmax_scale)
    return attend(backend, query, key_pool, value_pool, window)


@ar_diffusion_paged_write_attn.register_fake
def _(query, key, value, key_pool, value_pool, *args) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return torch.empty_like(query, memory_format=torch.contiguous_format)
