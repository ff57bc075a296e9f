"""Change one thing at a time, and see whether the fault is still there.

Each trial compiles the op over pools in one allocation, changes one thing, and asks three
questions: is V still cloned, does the compiled code survive an unmapped page behind the allocation,
and is V right when the memory behind it is mapped?
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor_config

from omni_kv.audits.audit import audit
from omni_kv.experiments.cause import (
    Placement,
    call_op,
    compiled_afresh,
    inputs_for,
    placements,
    pools_in,
)
from omni_kv.model.attention import PagedWindow, attend
from omni_kv.sandbox.process import run_dealt, run_forked
from omni_kv.upstream import overlap_check


@torch.library.custom_op("omni_kv::paged_write_attn_one_tensor", mutates_args=("kv_pool",))
def paged_write_attn_one_tensor(
    query: torch.Tensor,
    kv_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """The op with one mutated argument that it slices itself, for the trial of that name.

    Args:
        query: ``(num_tokens, num_heads, head_dim)``, written as keys and as values too.
        kv_pool: ``(2, num_slots, num_heads, head_dim)``, keys then values; mutated.
        slot_mapping: ``(num_tokens,)`` int64.
        query_start_loc: ``(num_seqs + 1,)`` int32 on the host.
        seq_lens: ``(num_seqs,)`` int32 on the host.
    """
    key_pool, value_pool = kv_pool.unbind(0)
    key_pool.index_copy_(0, slot_mapping, query)
    value_pool.index_copy_(0, slot_mapping, query)
    window = PagedWindow(None, query_start_loc, seq_lens, block_size=1, softmax_scale=1.0)
    return attend("sdpa", query, key_pool, value_pool, window)


@paged_write_attn_one_tensor.register_fake
def _(query, *args) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _call_one_tensor(kv_pool: torch.Tensor, inputs: Any) -> torch.Tensor:
    query, slots, starts, lengths = inputs
    return paged_write_attn_one_tensor(query, kv_pool, slots, starts, lengths)


@dataclass(frozen=True)
class Trial:
    """What one change did.

    Attributes:
        change: what was changed.
        layout: the placement that it was tried on.
        clone_elements: elements that the clone of a mutated argument reads; 0 without a clone.
        guarded: how the run with an unmapped page right behind the allocation ended.
        wrong: V elements that differ from an eager run, where the memory behind is mapped; None if
            that run did not return.
        of: V elements in all.
    """

    change: str
    layout: str
    clone_elements: int
    guarded: str
    wrong: int | None
    of: int

    @property
    def right(self) -> bool:
        """Whether the fault is gone."""
        return self.guarded == "returned" and self.wrong == 0


def try_changes(shape: tuple[int, int, int] = (64, 2, 8)) -> list[Trial]:
    """Try each change alone, in one of two child processes.

    Args:
        shape: ``(num_slots, num_kv_heads, head_dim)`` of K, and of V.

    Raises:
        RuntimeError: if a child did not return.
    """
    return run_dealt(partial(_try_some, shape), list(_changes(shape)), timeout=300)


#: Where K and V lie, what surrounds the compilation, and what else is changed.
Change = tuple[Placement, AbstractContextManager[Any], dict[str, Any]]


def _changes(shape: tuple[int, int, int]) -> dict[str, Change]:
    layouts = placements(shape)
    halves, swapped = layouts["halves, K first"], layouts["halves, V first"]
    v1 = inductor_config.patch(enable_auto_functionalized_v2=False)
    return {
        "nothing": (halves, nullcontext(), {}),
        "mark_static_address on both pools": (halves, nullcontext(), {"static_address": True}),
        "enable_auto_functionalized_v2=False": (halves, v1, {}),
        "dynamic=True": (halves, nullcontext(), {"dynamic": True}),
        "a storage offset of zero: V in front of K": (swapped, nullcontext(), {}),
        "separate storages": (layouts["separate"], nullcontext(), {}),
        "one tensor argument, sliced in the op": (halves, nullcontext(), {"one_tensor": True}),
        "an overlap check in the reinplace pass": (halves, overlap_check(), {}),
    }


def _try_some(shape: tuple[int, int, int], changes: list[str]) -> list[Trial]:
    torch.set_num_threads(1)
    done = []
    for change in changes:
        placement, context, options = _changes(shape)[change]
        with torch.no_grad(), context:
            done.append(_try(change, placement, **options))
    return done


def _try(
    change: str,
    p: Placement,
    *,
    static_address: bool = False,
    dynamic: bool = False,
    one_tensor: bool = False,
) -> Trial:
    inputs = inputs_for(p)
    fn: Callable[..., torch.Tensor] = _call_one_tensor if one_tensor else call_op

    def arguments(mapped: int) -> tuple[torch.Tensor, ...]:
        key, value, region = pools_in(p, mapped)
        pools = (region.tensor.view(2, *p.shape),) if one_tensor else (key, value)
        if static_address:
            for pool in pools:
                torch._dynamo.mark_static_address(pool)
        return pools

    report = audit(fn, (*arguments(0), inputs), run=False, dynamic=dynamic)
    clones = [argument.clone.elements for argument in report.clones if argument.clone]
    compiled = compiled_afresh(fn, dynamic)

    def wrong(mapped: int) -> int:
        pools = arguments(mapped)
        expected = arguments(mapped)
        compiled(*pools, inputs)
        fn(*expected, inputs)
        value, right = (ps[0][1] if one_tensor else ps[1] for ps in (pools, expected))
        return int((value != right).sum())

    guarded = run_forked(lambda: wrong(0))
    mapped = run_forked(lambda: wrong(4 * p.storage_numel))
    return Trial(change, p.name, sum(clones), guarded.describe(), mapped.value, p.numel)
