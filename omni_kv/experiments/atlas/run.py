"""Run cells: each in a process and with a cache folder of its own, in memory that is known.

The compiled code runs three times: once with filled neighbours, once with an unmapped page behind
each allocation, once with one in front. On a CPU the second and third run are forks, which may die.
A GPU's context does not survive a fork: there one process runs all three, and a run that leaves the
device broken is the last.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from omni_kv.experiments.atlas.cells import Cell, CellResult, Origin, Run, classify
from omni_kv.sandbox.process import Outcome, run_forked, run_isolated

SLOTS, OTHER_SLOTS, TOKENS, OTHER_TOKENS = 64, 96, 4, 6
Memory = Literal["filled", "after", "before"]


@dataclass(frozen=True)
class _Seen:
    """What one process saw of a cell."""

    runs: dict[Memory, Run]
    in_place: bool | None
    moved: tuple[int, int] | None
    missing: str | None


def run_cell(cell: Cell, timeout: float = 300.0) -> CellResult:
    """Run one cell in a child process of its own."""
    return run_cells([cell], timeout)[0]


def run_cells(cells: Sequence[Cell], timeout: float = 300.0) -> list[CellResult]:
    """Run cells and return results in order.

    On a CPU one child process imports torch and forks for every cell, which starts with no compiled
    code and an empty cache folder. If that child does not come back, each cell gets a child of
    its own.

    Args:
        cells: what to run, all on one device.
        timeout: seconds for each cell.
    """
    if cells[0].device != "cpu":
        return [_on_gpu(cell, timeout) for cell in cells]
    # A fork cannot use a GPU, and Inductor asks whether there is one.
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    together = run_isolated(_fork_for_each, list(cells), timeout=timeout * len(cells), env=no_gpu)
    if together.value is not None:
        return together.value
    if len(cells) > 1:
        return [run_cell(cell, timeout) for cell in cells]
    return [_result(cells[0], _ended(together), together.seconds)]


def pass_decisions(layouts: Sequence[str], timeout: float = 300.0) -> list[dict[str, Any]]:
    """What the reinplacing pass of the installed torch decides on each layout, static shapes.

    Nothing is compiled further than the graph, or run.

    Args:
        layouts: names.
        timeout: seconds for all of them.

    Returns:
        A row each: layout, decisions in their order, elements of each clone; in place of both why
        there is no graph.
    """
    return run_isolated(_decisions, list(layouts), timeout=timeout).unwrap()


def _decisions(names: list[str]) -> list[dict[str, Any]]:
    import torch

    from omni_kv.experiments.atlas import layouts
    from omni_kv.lens.capture import capture
    from omni_kv.lens.clones import clones_of

    told = []
    for name in names:
        layout = layouts.layout_of(name)
        call = _call(Cell(name), layout, "filled", SLOTS, TOKENS)
        with torch.no_grad():
            seen = capture(layout.layer, *call.arguments, dynamic=False, until="graph")
        decided = [d.cause for graph in seen.graphs for d in graph.decisions]
        clones = [clone.elements for graph in seen.graphs for clone in clones_of(graph)]
        told.append({"layout": name, "decisions": decided, "clones": clones})
    return told


def _fork_for_each(cells: list[Cell]) -> list[CellResult]:
    import torch
    import torch._inductor.compile_fx

    # What the children's environment says, for releases that do not read it there.
    torch._inductor.config.cpp.vec_isa_ok = False
    torch.set_num_threads(1)
    results = []
    for cell in cells:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            if cell.cache != "fresh":
                run_forked(partial(_observe_in, cache, _filler(cell), ("filled",)))
            seen = run_forked(partial(_observe_in, cache, cell, ("after", "before", "filled")))
        results.append(_result(cell, _ended(seen), time.monotonic() - start))
    return results


def _on_gpu(cell: Cell, timeout: float) -> CellResult:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        if cell.cache != "fresh":
            run_isolated(_observe, _filler(cell), ("filled",), timeout=timeout, cache_dir=cache)
        memories = ("after", "before", "filled")
        seen = run_isolated(_observe, cell, memories, timeout=timeout, cache_dir=cache)
    return _result(cell, _ended(seen), time.monotonic() - start)


def _filler(cell: Cell) -> Cell:
    """The cell that leaves the compile cache behind."""
    layout = cell.layout if cell.cache == "same_layout" else "shared_k_first"
    return replace(cell, layout=layout, cache="fresh")


def _observe_in(cache: str, cell: Cell, memories: tuple[Memory, ...]) -> _Seen:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return _observe(cell, memories)


def _ended(seen: Outcome[Any]) -> _Seen:
    """What was seen, or that the process died."""
    if seen.value is not None:
        return seen.value
    run = Run(ended=_short(seen.describe()))
    return _Seen({"filled": run}, None, None, "the process ended before it could report")


def _result(cell: Cell, seen: _Seen, seconds: float) -> CellResult:
    outcome, detail = classify(seen.runs["filled"], seen.runs.get("after"), seen.runs.get("before"))
    reads, writes = seen.moved or (None, None)
    row, tokens = 2 * 2 * 8 * 4, OTHER_TOKENS if cell.call == "second_tokens" else TOKENS
    needed = tokens * (row + (4 if cell.layout == "three_pools" else 0))
    in_place = seen.in_place
    if in_place is None and writes is not None:  # no op that could tell: what the code writes does
        in_place = writes <= needed
    return CellResult(
        cell=cell.key,
        outcome=outcome,
        detail=detail,
        in_place=in_place,
        reads_bytes=reads,
        writes_bytes=writes,
        needed_bytes=needed,
        missing=seen.missing,
        seconds=round(seconds, 2),
    )


def _short(text: str) -> str:
    """The first line that says something, without a machine's paths."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line[:200]


# What follows runs inside a child process.


@dataclass
class _Call:
    """One call of the compiled function: its allocations, their surroundings, its arguments."""

    regions: list[Any]
    memory: list[Any]
    arguments: tuple[Any, ...]


def _observe(cell: Cell, memories: tuple[Memory, ...]) -> _Seen:
    from omni_kv.upstream import installed

    with contextlib.ExitStack() as stack:
        for fix in cell.fixes:
            stack.enter_context(installed(fix))
        return _observe_here(cell, memories)


def _observe_here(cell: Cell, memories: tuple[Memory, ...]) -> _Seen:
    import torch

    from omni_kv.experiments.atlas import layouts

    layout = layouts.layout_of(cell.layout)
    dynamic = {"static": False, "dynamic": True, "mark_static_address": False}.get(cell.call)
    with torch.inference_mode() if cell.mode == "inference_mode" else torch.no_grad():
        compiled = torch.compile(layout.layer, dynamic=dynamic)
        if cell.call in ("second_pool", "second_tokens"):
            first = _call(cell, layout, "filled", SLOTS, TOKENS)
            refused = _raised(compiled, first.arguments)
            if refused is not None:
                return _Seen({"filled": refused}, None, None, None)
        runs, in_place = run_in_memories(cell, layout, compiled, memories)
        moved, missing = _moved(cell, layout, dynamic)
    return _Seen(runs, in_place, moved, missing)


def run_in_memories(
    cell: Cell, layout: Any, compiled: Any, memories: tuple[Memory, ...]
) -> tuple[dict[Memory, Run], bool | None]:
    """Run in the last memory here; if that is right, in the others, on a CPU in forks.

    A fork of a process that has compiled for this call does not compile again.

    Args:
        cell: what is run.
        layout: its layout.
        compiled: called as ``layout.layer`` is.
        memories: where.
    """
    runs: dict[Memory, Run] = {}
    runs[memories[-1]], in_place = _run(cell, layout, compiled, memories[-1])
    right = classify(runs[memories[-1]], None, None)[0] == "right"
    for memory in memories[:-1] if right else ():
        if cell.device != "cpu":
            runs[memory], _ = _run(cell, layout, compiled, memory)
            if runs[memory].ended != "returned":
                break
            continue
        guarded = run_forked(partial(_run, cell, layout, compiled, memory))
        died = Run(ended=_short(guarded.describe()))
        runs[memory] = guarded.value[0] if guarded.value else died
    return runs, in_place


def _sizes(cell: Cell) -> tuple[int, int]:
    slots = OTHER_SLOTS if cell.call == "second_pool" else SLOTS
    return slots, OTHER_TOKENS if cell.call == "second_tokens" else TOKENS


def _call(cell: Cell, layout: Any, memory: Memory, slots: int, tokens: int) -> _Call:
    """Arguments over pools in the memory asked for, with the same contents each time."""
    import torch

    from omni_kv.experiments.atlas.layouts import HEAD_DIM, HEADS
    from omni_kv.sandbox.memory import map_region

    regions = []
    for number, shape in enumerate(layout.shapes(slots)):
        count = 4 * torch.Size(shape).numel()
        rooms: dict[Memory, dict[str, Any]] = {
            "filled": {"before": count, "after": count},
            "after": {"guard": "after", "before": count},
            "before": {"guard": "before", "after": count},
        }
        region = map_region(shape, layout.dtype, device=cell.device, **rooms[memory])
        if memory == "filled":  # values that occur nowhere else
            for sign, neighbour in ((-1, region.before), (1, region.after)):
                floats = neighbour.view(torch.float32)
                many = torch.arange(floats.numel(), device=cell.device)
                floats.copy_(sign * (100_000.0 * (number + 1) + many))
        regions.append(region)
    generator = torch.Generator().manual_seed(0)
    tensors = [region.tensor for region in regions]
    for pool in layout.views(tensors):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    x = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(cell.device)
    slot_numbers = torch.arange(5, 5 + 7 * tokens, 7, device=cell.device)
    inputs = layout.inputs(tensors)
    if cell.call == "mark_dynamic":
        for pool in inputs:
            torch._dynamo.mark_dynamic(pool, layout.slots_dim)
    if cell.call == "mark_static_address":
        for pool in inputs:
            torch._dynamo.mark_static_address(pool)
    return _Call(regions, tensors, (x, slot_numbers, *inputs))


def _raised(compiled: Any, arguments: tuple[Any, ...]) -> Run | None:
    """Call and throw the result away; a run that says what was raised, if something was."""
    try:
        compiled(*arguments)
    except Exception as error:
        return _raising(error)
    return None


def _raising(error: Exception) -> Run:
    frames = traceback.extract_tb(error.__traceback__)
    # Dynamo takes its own frames out of the traceback: then the exception's class tells.
    compiling = type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) or any(
        frame.filename.endswith("_dynamo/convert_frame.py") for frame in frames
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[:2])[:200]
    if first.startswith("CUDA error"):  # the device is broken: as if the process had died
        return Run(ended=f"killed by {first}")
    return Run(ended=f"raised {type(error).__name__}: {first}", compiling=compiling)


def _run(cell: Cell, layout: Any, compiled: Any, memory: Memory) -> tuple[Run, bool | None]:
    """One run in one memory against eager; and whether the op got the storages themselves."""
    import torch

    from omni_kv.experiments.atlas import layouts

    sizes = _sizes(cell)
    eager = _call(cell, layout, "filled", *sizes)
    expected = layout.layer(*eager.arguments)
    call = _call(cell, layout, memory, *sizes)
    layouts.received.clear()
    try:
        out = compiled(*call.arguments)
        if cell.device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:
        return _raising(error), None
    own = {tensor.untyped_storage().data_ptr() for tensor in call.memory}
    in_place = set(layouts.received) <= own if layouts.received else None
    neighbours = [n for r in call.regions for n in (r.before, r.after) if n.numel()]
    foreign = torch.cat([n.view(torch.float32) for n in neighbours])
    got, want = layout.views(call.memory), layout.views(eager.memory)
    further = all(torch.allclose(g, w) for g, w in zip(got[2:], want[2:], strict=True))
    close = torch.allclose(out, expected, rtol=1e-3, atol=1e-3)
    return (
        Run(
            ended="returned",
            keys=_origins(got[0], want[0], want[1], foreign),
            values=_origins(got[1], want[1], want[0], foreign),
            output_right=further and close,
        ),
        in_place,
    )


def _origins(got: Any, want: Any, other: Any, foreign: Any) -> dict[Origin, int]:
    """Rows of a pool by where their values come from."""
    import torch

    def rows(pool: Any) -> Any:
        return pool.reshape(-1, pool.shape[-2] * pool.shape[-1])

    same = torch.isclose(rows(got), rows(want)).all(1)
    of_other = torch.isclose(rows(got), rows(other)).all(1) & ~same
    # Zeros of the guarded memories occur everywhere; filled neighbours have values of their own.
    outside = torch.isin(rows(got), foreign[foreign != 0]).any(1) & ~same
    rest = ~(same | of_other | outside)
    counted: dict[Origin, Any] = {
        "right": same, "other pool": of_other, "neighbour": outside, "other": rest
    }  # fmt: skip
    return {origin: int(which.sum()) for origin, which in counted.items()}


def _moved(
    cell: Cell, layout: Any, dynamic: bool | None
) -> tuple[tuple[int, int] | None, str | None]:
    """Bytes that the generated code reads and writes of the pools, as the lens has it."""
    if cell.call in ("second_pool", "second_tokens"):
        return None, "bytes: the lens compiles for a first call"
    if cell.cache != "fresh":
        return None, "bytes: the code may come from the cache, which the lens does not read"
    try:
        from omni_kv.lens.capture import capture
        from omni_kv.lens.traffic import traffic_of

        call = _call(cell, layout, "filled", *_sizes(cell))
        captured = capture(layout.layer, *call.arguments, dynamic=dynamic)
        traffic = [t for graph in captured.graphs for t in traffic_of(graph)]
        if not traffic:
            return None, "bytes: the lens saw no write to a pool"
        return (sum(t.reads_bytes for t in traffic), sum(t.writes_bytes for t in traffic)), None
    except Exception as error:
        return None, f"lens: {type(error).__name__}: {_short(str(error))}"
