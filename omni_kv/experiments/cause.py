"""Why the clone reads outside: a prediction from the layout alone, and the runs that test it.

``predict`` knows where K and V lie and nothing else. ``measure`` compiles the op over such pools
and runs it next to an unmapped page that lies exactly where the prediction says the reading ends,
and then one element earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import pandas as pd
import torch

from omni_kv.audits.audit import audit
from omni_kv.model.op import ar_diffusion_paged_write_attn
from omni_kv.sandbox.memory import Region, map_region
from omni_kv.sandbox.process import graph_caches_off, run_apart, run_dealt

CountsFrom = Literal["data pointer", "storage start"]


@dataclass(frozen=True)
class Placement:
    """Where K and V lie; all numbers are elements.

    Attributes:
        name: what to call it.
        shape: shape of K, and of V: ``(num_slots, num_kv_heads, head_dim)``.
        dtype: name of their dtype.
        key_offset: storage offset of K.
        value_offset: storage offset of V.
        storage_numel: size of the storage that V lies in.
        one_allocation: whether K lies in the same storage.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    key_offset: int
    value_offset: int
    storage_numel: int
    one_allocation: bool

    @property
    def numel(self) -> int:
        """Elements of K, or of V."""
        slots, heads, dim = self.shape
        return slots * heads * dim

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return getattr(torch, self.dtype).itemsize  # type: ignore[no-any-return]


def placements(shape: tuple[int, int, int], dtype: str = "float32") -> dict[str, Placement]:
    """The layouts that the notebook compares, by name.

    Args:
        shape: ``(num_slots, num_kv_heads, head_dim)``.
        dtype: name of the dtype.
    """
    n = shape[0] * shape[1] * shape[2]
    row = shape[1] * shape[2]
    offsets = {
        # name: (offset of K, offset of V, size of the storage, one allocation?)
        "halves, K first": (0, n, 2 * n, True),
        "halves, V first": (n, 0, 2 * n, True),
        "halves behind a header": (3 * row, 3 * row + n, 3 * row + 2 * n, True),
        "halves and spare room": (0, n, 2 * n + n // 2, True),
        "separate": (0, 0, n, False),
    }
    return {name: Placement(name, shape, dtype, *where) for name, where in offsets.items()}


@dataclass(frozen=True)
class Prediction:
    """What the clone of V will read, if there is one.

    Attributes:
        cloned: whether the reinplace pass leaves a clone of V.
        extent: elements that the clone reads.
        outside: elements of these beyond the end of V's allocation.
        first_bad_byte: first byte read outside, counted from V's data pointer; None if none is.
    """

    cloned: bool
    extent: int
    outside: int
    first_bad_byte: int | None

    def nbytes_outside(self, placement: Placement) -> int:
        """Bytes read beyond the end of the allocation."""
        return self.outside * placement.itemsize


def predict(placement: Placement, counts_from: CountsFrom) -> Prediction:
    """Say what the clone of V will read, from the layout alone.

    The reinplace pass leaves a clone of the second mutated argument if the first has the same
    storage. ``clone_preserve_strides`` (``torch/_prims_common/__init__.py``) gives it an extent of
    ``storage_offset + required length``. The only thing that the layout does not tell is where the
    generated kernel counts from: that is read from the kernel, see ``counts_from``.

    Args:
        placement: where K and V lie.
        counts_from: where the kernel's index 0 is.
    """
    if not placement.one_allocation:
        return Prediction(cloned=False, extent=0, outside=0, first_bad_byte=None)
    extent = placement.value_offset + placement.numel
    start = placement.value_offset if counts_from == "data pointer" else 0
    outside = max(0, start + extent - placement.storage_numel)
    to_the_end = placement.storage_numel - placement.value_offset
    return Prediction(True, extent, outside, to_the_end * placement.itemsize if outside else None)


def source_of(placement: Placement, element: int, counts_from: CountsFrom) -> int:
    """Where in memory the value of a V element comes from, once V has been copied back.

    The op gets the clone's elements from V's storage offset on, and the clone's element ``i`` was
    read ``i`` elements behind the kernel's start.

    Args:
        placement: where K and V lie.
        element: index into V, flat.
        counts_from: where the kernel's index 0 is.

    Returns:
        Elements from the start of V's storage; ``storage_numel`` or more lies outside.
    """
    start = placement.value_offset if counts_from == "data pointer" else 0
    return start + placement.value_offset + element


@dataclass(frozen=True)
class Measurement:
    """What the compiled op did over one placement.

    Attributes:
        placement: where K and V lie.
        counts_from: where the generated kernel's index 0 is, read from the kernel; None without a
            clone.
        extent: elements that the clone reads, read from the kernel; 0 without a clone.
        at_prediction: how a run ended with the unmapped page exactly where reading should end.
        one_earlier: the same with the page one element earlier (on a GPU 16 bytes, see
            ``ALIGNED``); None where nothing is read outside.
        elements: V elements that the op did not write.
        explained: how many of them held, after the first run, the value that lay where
            ``source_of`` says.
        foreign: how many of these came from outside the allocation.
    """

    placement: Placement
    counts_from: CountsFrom | None
    extent: int
    at_prediction: str
    one_earlier: str | None
    elements: int
    explained: int
    foreign: int

    def confirms(self) -> bool:
        """Whether the runs did what the prediction says."""
        p, counts_from = self.placement, self.counts_from or "storage start"
        prediction = predict(p, counts_from)
        unwritten = range(p.numel - self.elements, p.numel)
        foreign = sum(source_of(p, i, counts_from) >= p.storage_numel for i in unwritten)
        return (
            (self.counts_from is not None) == prediction.cloned
            and self.extent == prediction.extent
            and self.at_prediction == "returned"
            and (self.one_earlier is not None) == bool(prediction.outside)
            and (self.one_earlier is None or died_outside(self.one_earlier))
            and self.explained == self.elements > 0
            and self.foreign == foreign
        )


def measurements_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """Predictions and runs side by side, one row a placement."""
    rows = []
    for m in measurements:
        p = m.placement
        prediction = predict(p, m.counts_from or "storage start")
        rows.append(
            {
                "layout": p.name,
                "shape": p.shape,
                "dtype": p.dtype,
                "kernel counts from": m.counts_from or "no clone",
                "clone reads": m.extent,
                "predicted outside": f"{prediction.nbytes_outside(p):,} bytes",
                "first bad byte": prediction.first_bad_byte,
                "page at the prediction": m.at_prediction,
                "one element earlier": m.one_earlier or "not tried: nothing is outside",
                "explained": m.explained,
                "of": m.elements,
                "from outside": m.foreign,
                "prediction": "confirmed" if m.confirms() else "CONTRADICTED",
            }
        )
    return pd.DataFrame(rows).astype({"first bad byte": "Int64"}).set_index("layout")


#: The op writes this many slots in ``measure``, the first ones.
WRITTEN = 2

#: On a GPU compiled code copies an input that does not lie as it did when it was compiled, up to so
#: many bytes, and no longer reads the input itself. So the page moves there by as much at a time.
ALIGNED = 16


def workers_for(device: str) -> int:
    """How many children work side by side; on a GPU each of them waits for one of its own."""
    return 2 if device == "cpu" else max(2, len(os.sched_getaffinity(0)) - 1)


def died_outside(ended: str) -> bool:
    """Whether a run ended, as ``Outcome.describe`` says it, since it touched unmapped memory."""
    return ended == "killed by SIGSEGV" or "illegal memory access" in ended


def measure(cases: Sequence[Placement], device: str = "cpu") -> list[Measurement]:
    """Compile the op over each placement in child processes, and run it where it may die.

    On a CPU that is a fork of the child that compiled; on a GPU a child that compiles once more.

    Args:
        cases: the placements; the storage must hold nothing in front of K and V but a header.
        device: ``cpu`` or ``cuda``.

    Raises:
        RuntimeError: if a child did not return.
    """
    work = partial(_measure_all, device)
    return run_dealt(work, cases, workers=workers_for(device), timeout=900)


def _measure_all(device: str, cases: list[Placement]) -> list[Measurement]:
    torch.set_num_threads(1)
    with torch.no_grad():
        return [_measure(case, device) for case in cases]


def call_op(key_pool: torch.Tensor, value_pool: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Call the op, and nothing else, with what ``inputs_for`` made."""
    query, slots, starts, lengths = inputs
    return ar_diffusion_paged_write_attn(
        query, query, query, key_pool, value_pool, slots, None, starts, lengths, 1, 1.0, "sdpa"
    )


def _measure(p: Placement, device: str) -> Measurement:
    counts_from, extent = clone_of(*pools_in(p, 0, device)[:2], inputs_for(p, device))
    prediction = predict(p, counts_from or "storage start")
    run = partial(_explained_in, p, prediction.outside, counts_from or "storage start", device)
    if device == "cpu":
        _compiled_with_room(p, prediction.outside, device)  # forks have it from here
    step = 1 if device == "cpu" else max(1, ALIGNED // p.itemsize)
    at = run_apart(partial(run, prediction.outside), device)
    earlier = (
        run_apart(partial(run, prediction.outside - step), device) if prediction.outside else None
    )
    explained, foreign = at.value if at.value else (0, 0)
    return Measurement(
        placement=p,
        counts_from=counts_from,
        extent=extent,
        at_prediction=at.describe(),
        one_earlier=earlier.describe() if earlier else None,
        elements=p.numel - WRITTEN * p.shape[1] * p.shape[2],
        explained=explained,
        foreign=foreign,
    )


@lru_cache(maxsize=1)
def _compiled_with_room(p: Placement, outside: int, device: str) -> Callable[..., Any]:
    """The op, compiled and run once with room on both sides, and aligned as in the run to come."""
    compiled = compiled_afresh(call_op)
    room = outside + ALIGNED * p.storage_numel
    compiled(*pools_in(p, room, device)[:2], inputs_for(p, device))
    return compiled


def _explained_in(
    p: Placement, outside: int, counts_from: CountsFrom, device: str, mapped: int
) -> tuple[int, int]:
    """Run the compiled op with so many mapped elements around it, and explain what it did."""
    with torch.no_grad():
        compiled = _compiled_with_room(p, outside, device)
        key, value, region = pools_in(p, mapped, device)
        memory = torch.cat([region.tensor, region.after])
        compiled(key, value, inputs_for(p, device))
        return _explained(p, counts_from, memory, value)


def inputs_for(p: Placement, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """The op's other inputs: query, slot mapping, query starts and lengths (these on the host)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(WRITTEN, *p.shape[1:], generator=generator)
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, WRITTEN], [p.shape[0]]))
    slots = torch.arange(WRITTEN, device=device)
    return query.to(device, getattr(torch, p.dtype)), slots, starts, lengths


def compiled_afresh(fn: Callable[..., torch.Tensor], dynamic: bool = False) -> Callable[..., Any]:
    """Compile a function without a look at what was compiled before, in memory or on disk."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=dynamic)

    def call(*args: Any) -> Any:
        with graph_caches_off():
            return compiled(*args)

    return call


def pools_in(
    p: Placement, mapped: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, Region]:
    """K and V in random data, with so many mapped elements behind V's allocation, then no page."""
    dtype = getattr(torch, p.dtype)
    region = map_region((p.storage_numel,), dtype, after=mapped, before=mapped, device=device)
    # Whole numbers that bfloat16 holds exactly; neighbours in memory differ.
    for flat, sign in ((region.after, 1), (region.before, -1)):
        flat.copy_(sign * (128 + torch.arange(flat.numel()) % 128))
    generator = torch.Generator().manual_seed(1)
    region.tensor.copy_(torch.rand(p.storage_numel, generator=generator))
    value = region.tensor[p.value_offset : p.value_offset + p.numel].view(p.shape)
    keys = region.tensor if p.one_allocation else torch.rand(p.storage_numel).to(device, dtype)
    key = keys[p.key_offset : p.key_offset + p.numel].view(p.shape)
    return key, value, region


def _explained(
    p: Placement, counts_from: CountsFrom, memory: torch.Tensor, value: torch.Tensor
) -> tuple[int, int]:
    """How many unwritten V elements hold what lay at their source, and how many of them outside.

    ``memory`` is the allocation of V and what was mapped behind it, before the run.
    """
    lay, now = memory.tolist(), value.flatten().tolist()
    explained = foreign = 0
    for i in range(WRITTEN * p.shape[1] * p.shape[2], p.numel):
        source = source_of(p, i, counts_from)
        if source < len(lay) and now[i] == lay[source]:
            explained += 1
            foreign += source >= p.storage_numel
    return explained, foreign


def clone_of(
    key_pool: torch.Tensor, value_pool: torch.Tensor, inputs: Any
) -> tuple[CountsFrom | None, int]:
    """Read from the generated kernel whether V is cloned, from where, and how many elements.

    Args:
        key_pool: ``(num_slots, num_kv_heads, head_dim)``.
        value_pool: likewise.
        inputs: the other arguments of the op.

    Returns:
        Where the kernel counts from and the clone's extent, or None and 0 if nothing is cloned.
    """
    report = audit(call_op, (key_pool, value_pool, inputs), run=False, dynamic=False)
    if not report.clones:
        return None, 0
    (clone,) = (argument.clone for argument in report.clones)
    if clone is None or clone.first is None or clone.last is None:
        raise RuntimeError(f"the kernel of the clone was not found:\n{report}")
    # With a storage offset of zero both are the same place.
    at_pointer = clone.first == 0 and value_pool.storage_offset() > 0
    return "data pointer" if at_pointer else "storage start", clone.last - clone.first + 1
