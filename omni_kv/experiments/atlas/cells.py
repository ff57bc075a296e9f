"""The axes of the atlas as data, one cell of it, and the class that an observed cell belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pydantic

from omni_kv.evidence.cells import Strict

LAYOUTS = {
    "separate": "separate allocations",
    "shared_k_first": "shared halves, K first",
    "shared_v_first": "shared halves, V first",
    "shared_swapped": "shared halves, op takes V before K",
    "gap": "halves with a gap",
    "three_pools": "K, V and scales in one allocation",
    "byte_arena": "views of one byte arena",
    "interleaved_page": "interleaved per page",
    "interleaved_slot": "interleaved per slot",
    "one_tensor": "one tensor, sliced in the op",
    "sliced_in_graph": "one tensor, sliced in the graph",
    "list": "list of pools as one argument",
    "unbind_index_put": "unbind in the graph, index_put",
    "unbind_index_copy": "unbind in the graph, index_copy_",
}
CALLS = {
    "static": "static shapes",
    "dynamic": "dynamic=True",
    "second_pool": "default, then a pool of another size",
    "second_tokens": "default, then another number of tokens",
    "mark_dynamic": "mark_dynamic on the pool",
    "mark_static_address": "mark_static_address on the pool",
}
CACHES = {
    "fresh": "fresh",
    "shared_halves": "left behind by shared halves",
    "same_layout": "left behind by the same layout",
}
MODES = ("no_grad", "inference_mode")

OutcomeClass = Literal[
    "right",
    "reads outside",
    "foreign values",
    "other pool's values",
    "crash",
    "refuses to compile",
    "wrong otherwise",
]
Origin = Literal["right", "neighbour", "other pool", "other"]


@dataclass(frozen=True)
class Cell:
    """One combination of the axes, and the candidate fixes that it runs with.

    Attributes:
        layout: a key of ``LAYOUTS``.
        call: a key of ``CALLS``.
        cache: a key of ``CACHES``.
        mode: one of ``MODES``.
        device: ``cpu`` or ``cuda``.
        fixes: names of candidate fixes in ``omni_kv.upstream``; no part of the key.
    """

    layout: str
    call: str = "static"
    cache: str = "fresh"
    mode: str = "no_grad"
    device: str = "cpu"
    fixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = (LAYOUTS, CALLS, CACHES, MODES)
        for value, names in zip(
            (self.layout, self.call, self.cache, self.mode), known, strict=True
        ):
            if value not in names:
                raise ValueError(f"unknown {value!r}; known: {', '.join(names)}")

    @property
    def key(self) -> str:
        """The name of the cell within one release's record."""
        return "/".join((self.layout, self.call, self.cache, self.mode))


def cell_of(key: str, device: str = "cpu") -> Cell:
    """The cell of that key.

    Raises:
        ValueError: if it is no key of a cell.
    """
    parts = key.split("/")
    if len(parts) != 4:
        raise ValueError(f"a cell is LAYOUT/CALL/CACHE/MODE, not {key!r}")
    layout, call, cache, mode = parts
    return Cell(layout, call, cache, mode, device)


class Run(Strict):
    """How one run of the compiled function ended, held against eager.

    Attributes:
        ended: ``returned``, ``killed by SIGNAL``, ``timed out`` or ``raised TYPE: MESSAGE``.
        compiling: whether it raised before the compiled code ran.
        keys: rows of K by where their values come from.
        values: rows of V likewise.
        output_right: whether output and further pools agree with eager.
    """

    ended: str
    compiling: bool = False
    keys: dict[Origin, int] = pydantic.Field(default_factory=dict)
    values: dict[Origin, int] = pydantic.Field(default_factory=dict)
    output_right: bool = True


class CellResult(Strict):
    """What one cell gave.

    Attributes:
        cell: its key.
        outcome: its class.
        detail: what was seen, in a few words.
        in_place: whether pools were written where they lie; None where that is not known.
        reads_bytes: read of pools and of buffers made from them; None where not known.
        writes_bytes: written likewise.
        needed_bytes: what the writes of the call change.
        missing: what could not be said, and why.
        seconds: wall-clock time of the cell.
    """

    cell: str
    outcome: OutcomeClass
    detail: str
    in_place: bool | None = None
    reads_bytes: int | None = None
    writes_bytes: int | None = None
    needed_bytes: int
    missing: str | None = None
    seconds: float


def all_cells(
    layouts: Sequence[str] = (), device: str = "cpu", fixes: tuple[str, ...] = ()
) -> Iterator[Cell]:
    """Every combination that is meaningful, for the given layouts or all.

    Every call with a fresh cache under ``no_grad``; the other caches with static shapes, since
    there two layouts can share a graph; inference mode with static and with dynamic shapes.
    """
    for layout in layouts or LAYOUTS:
        for call in CALLS:
            yield Cell(layout, call, device=device, fixes=fixes)
        for cache in list(CACHES)[1:]:
            yield Cell(layout, cache=cache, device=device, fixes=fixes)
        for call in ("static", "dynamic"):
            yield Cell(layout, call, mode="inference_mode", device=device, fixes=fixes)


def classify(filled: Run, after: Run | None, before: Run | None) -> tuple[OutcomeClass, str]:
    """The class of a cell, and what was seen.

    Args:
        filled: the run whose neighbourhood is mapped and filled with known values.
        after: the run with an unmapped page behind each allocation; None if it was not run.
        before: the run with an unmapped page in front of each allocation; None if not run.
    """
    if filled.compiling:
        return "refuses to compile", filled.ended.removeprefix("raised ")
    if filled.ended.startswith(("killed", "timed out")):
        return "crash", f"{filled.ended} where the neighbourhood is mapped"
    if filled.ended != "returned":
        return "wrong otherwise", f"the compiled code {filled.ended}"
    wrong = {"K": _wrong(filled.keys), "V": _wrong(filled.values)}
    seen = "; ".join(
        f"{pool}: {count} rows {_WORDS[origin]}"
        for pool, rows in wrong.items()
        for origin, count in rows.items()
    )
    origins = {origin for rows in wrong.values() for origin in rows}
    if "neighbour" in origins:
        return "foreign values", seen
    if "other pool" in origins:
        return "other pool's values", seen
    if origins or not filled.output_right:
        return "wrong otherwise", seen or "the output or a further pool differs"
    guarded = {"behind": after, "in front of": before}
    dies = [
        f"{where} the allocation: {run.ended}"
        for where, run in guarded.items()
        if run is not None and run.ended != "returned"
    ]
    if dies:
        return "reads outside", "; ".join(dies)
    if any(run is not None and not _agrees(run) for run in guarded.values()):
        return "wrong otherwise", "differs beside an unmapped page"
    return "right", "agrees with eager in every memory"


_WORDS = {"neighbour": "foreign", "other pool": "of the other pool", "other": "wrong"}


def _wrong(rows: dict[Origin, int]) -> dict[Origin, int]:
    return {origin: count for origin, count in rows.items() if count and origin != "right"}


def _agrees(run: Run) -> bool:
    return run.output_right and not _wrong(run.keys) and not _wrong(run.values)
