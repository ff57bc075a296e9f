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
from typing import Any, Literal

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
    workers_for,
)
from omni_kv.model.attention import PagedWindow, attend
from omni_kv.sandbox.process import run_apart, run_dealt
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


def try_changes(shape: tuple[int, int, int] = (64, 2, 8), device: str = "cpu") -> list[Trial]:
    """Try each change alone, in child processes.

    Args:
        shape: ``(num_slots, num_kv_heads, head_dim)`` of K, and of V.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeError: if a child did not return.
    """
    work = partial(_try_some, shape, device)
    return run_dealt(work, list(_changes(shape)), workers=workers_for(device), timeout=900)


#: Where K and V lie, what surrounds the compilation, and what else is changed.
Options = tuple[Literal["static address", "dynamic", "one tensor"], ...]
Change = tuple[Placement, AbstractContextManager[Any], Options]


def _changes(shape: tuple[int, int, int]) -> dict[str, Change]:
    layouts = placements(shape)
    halves, swapped = layouts["halves, K first"], layouts["halves, V first"]
    v1 = inductor_config.patch(enable_auto_functionalized_v2=False)
    return {
        "nothing": (halves, nullcontext(), ()),
        "mark_static_address on both pools": (halves, nullcontext(), ("static address",)),
        "enable_auto_functionalized_v2=False": (halves, v1, ()),
        "dynamic=True": (halves, nullcontext(), ("dynamic",)),
        "a storage offset of zero: V in front of K": (swapped, nullcontext(), ()),
        "separate storages": (layouts["separate"], nullcontext(), ()),
        "one tensor argument, sliced in the op": (halves, nullcontext(), ("one tensor",)),
        "an overlap check in the reinplace pass": (halves, overlap_check(), ()),
    }


def _try_some(shape: tuple[int, int, int], device: str, changes: list[str]) -> list[Trial]:
    torch.set_num_threads(1)
    return [_try(shape, device, change) for change in changes]


def _try(shape: tuple[int, int, int], device: str, change: str) -> Trial:
    p, context, options = _changes(shape)[change]
    with torch.no_grad(), context:
        arguments = (*_arguments(p, 0, device, options), inputs_for(p, device))
        report = audit(_op(options), arguments, run=False, dynamic="dynamic" in options)
    clones = [argument.clone.elements for argument in report.clones if argument.clone]
    wrong = partial(_wrong, shape, device, change)
    guarded = run_apart(partial(wrong, 0), device)
    mapped = run_apart(partial(wrong, 4 * p.storage_numel), device)
    return Trial(change, p.name, sum(clones), guarded.describe(), mapped.value, p.numel)


def _wrong(shape: tuple[int, int, int], device: str, change: str, mapped: int) -> int:
    """Elements of V that are not as after the same call without the compiler."""
    p, context, options = _changes(shape)[change]
    with torch.no_grad(), context:
        pools, expected = (_arguments(p, mapped, device, options) for _ in range(2))
        inputs, fn = inputs_for(p, device), _op(options)
        compiled_afresh(fn, "dynamic" in options)(*pools, inputs)
        fn(*expected, inputs)
        value, right = (ps[0][1] if len(ps) == 1 else ps[1] for ps in (pools, expected))
        return int((value != right).sum())


def _op(options: Options) -> Callable[..., torch.Tensor]:
    return _call_one_tensor if "one tensor" in options else call_op


def _arguments(p: Placement, mapped: int, device: str, options: Options) -> tuple[Any, ...]:
    """The pools, in memory with so many mapped elements on both sides."""
    key, value, region = pools_in(p, mapped, device)
    pools = (region.tensor.view(2, *p.shape),) if "one tensor" in options else (key, value)
    if "static address" in options:
        for pool in pools:
            torch._dynamo.mark_static_address(pool)
    return pools
