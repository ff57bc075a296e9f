"""Run every GPU experiment and write one evidence record each: the body of ``omni-kv record``.

An experiment is a list of units; a unit is what is run, or run again, as a whole. A finished unit
goes straight into ``<experiment>.partial.json``, which becomes the record when the last one is in.
Another machine, other versions or other code than the partial record's start it afresh.
"""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_kv.evidence import Provenance, Record, folder_name, read, write
from omni_kv.evidence_cells import CrashCase, Strict
from omni_kv.geometry import Geometry

EXPANDABLE = "expandable_segments:True"
ROUNDED = "roundup_power2_divisions:1"
#: Children that compile and crash side by side; measurements run alone.
WORKERS = 14


class RecordRefused(ValueError):
    """What was asked for cannot be recorded there; the message says why."""


@dataclass(frozen=True)
class Unit:
    """A part of an experiment.

    Attributes:
        name: unique within the experiment.
        run: makes its cells.
        alone: whether nothing else may run beside it.
    """

    name: str
    run: Callable[[], Sequence[Strict]]
    alone: bool = False


@dataclass(frozen=True)
class Plan:
    """What to record.

    Attributes:
        geometry: the preset.
        device: ``cuda``; ``cpu`` is for trying the machinery.
        backends: attention backends to measure, the fastest last.
        samples: timed runs of each variant of a step.
        chunks: length of a rollout.
        repeats: rollouts of each kind.
    """

    geometry: Geometry
    device: str
    backends: tuple[str, ...]
    samples: int = 5
    chunks: int = 10
    repeats: int = 1


CRASHES: dict[str, dict[str, CrashCase]] = {
    "crash": {
        "shared": CrashCase(),
        "shared, CUDA_LAUNCH_BLOCKING=1": CrashCase(launch_blocking=True),
        "shared, eager": CrashCase(compiled=False),
        "separate": CrashCase(layout="separate"),
    },
    "segments": {
        "default, exact": CrashCase(),
        "default, exact, neighbour": CrashCase(neighbour=True),
        "default, exact, after 4 GiB freed": CrashCase(before="4 GiB freed"),
        "default, exact, host memory": CrashCase(host_neighbour=True),
        "default, small": CrashCase(size="small"),
        "default, small, neighbour": CrashCase(size="small", neighbour=True),
        "default, small, host memory": CrashCase(size="small", host_neighbour=True),
        "default, page": CrashCase(size="page"),
        "default, 1.5x": CrashCase(size="1.5x"),
        "rounded to powers of 2, exact": CrashCase(allocator=ROUNDED),
        "expandable, exact": CrashCase(allocator=EXPANDABLE),
        "expandable, exact, neighbour": CrashCase(allocator=EXPANDABLE, neighbour=True),
        "expandable, small": CrashCase(allocator=EXPANDABLE, size="small"),
        "separate, default, exact": CrashCase(layout="separate"),
    },
    "expandable": {
        "shared": CrashCase(allocator=EXPANDABLE),
        "shared, neighbour": CrashCase(allocator=EXPANDABLE, neighbour=True),
        "separate, neighbour": CrashCase(layout="separate", allocator=EXPANDABLE, neighbour=True),
    },
    "hypotheses": {
        "1: float32 load, blocks cached": CrashCase(before="float32 load"),
        "1: 4 GiB cached": CrashCase(before="4 GiB freed"),
        "1: float32 load, empty_cache": CrashCase(before="float32 load, empty_cache"),
        "2: dynamic=None": CrashCase(),
        "2: dynamic=False": CrashCase(dynamic=False),
        "2: dynamic=True": CrashCase(dynamic=True),
        "2: dynamic=True, separate": CrashCase(dynamic=True, layout="separate"),
        "2: one configuration": CrashCase(dynamic=False, one_config=True),
        "3: mark_static_address": CrashCase(static_address=True),
        "4: 4 GiB of headroom": CrashCase(headroom_gib=4),
        "4: 16 GiB of headroom": CrashCase(headroom_gib=16),
        "5: 1.53 GiB a layer": CrashCase(size="1.5x"),
        "5: 29 MiB a layer": CrashCase(size="small"),
        "5: 4 GiB a layer, separate": CrashCase(size="4x", layout="separate"),
        "control: separate": CrashCase(layout="separate"),
    },
}


def experiments(plan: Plan) -> dict[str, list[Unit]]:
    """Every experiment's units, by name."""
    fastest = plan.backends[-1]
    # The longest chain of children starts first.
    found = {"stale-cache": [Unit("in this order", functools.partial(_stale_cache, plan))]}
    found |= {
        name: [
            Unit(case_name, functools.partial(_crash, plan, case_name, case))
            for case_name, case in cases.items()
        ]
        for name, cases in CRASHES.items()
    }
    if plan.device != "cpu":
        found["sanitizer"] = [Unit("memcheck", functools.partial(_sanitizer, plan))]
    found["step"] = [
        *(
            _measured(plan, f"{backend}, {layout}", "measure_step", backend, layout, plan.samples)
            for layout in ("separate", "shared")
            for backend in plan.backends
        ),
        _measured(plan, "error", "measure_error", plan.backends),
    ]
    found["trials"] = [_measured(plan, fastest, "measure_trials", fastest, plan.samples)]
    found["bench"] = [_measured(plan, "pieces", "measure_pieces", plan.backends, 2 * plan.samples)]
    # Over shared halves the results are wrong: two chunks are enough to see by how much.
    found["rollout"] = [
        _measured(plan, f"{backend}, {layout}", "measure_rollouts", backend, layout, *lengths)
        for layout, backends, lengths in (
            ("separate", plan.backends, (plan.chunks, plan.repeats, plan.chunks)),
            ("shared", plan.backends[:2], (plan.chunks, 1, 2)),
        )
        for backend in backends
    ]
    return found


def record(
    plan: Plan,
    provenance: Provenance,
    out: Path,
    names: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Record experiments; those that are there already are left alone.

    Args:
        plan: what to record.
        provenance: of this run.
        out: folder of this machine's records.
        names: experiments to record; all by default.
        say: gets a line for every finished unit.

    Returns:
        The records' files.

    Raises:
        RecordRefused: if an experiment is unknown, or the folder holds another machine's records.
        EvidenceError: if a record that is there cannot be read.
    """
    known = experiments(plan)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise RecordRefused(f"unknown experiment {unknown[0]!r}; known: {', '.join(known)}")
    _refuse_another_machine(out, provenance)
    chosen = {name: known[name] for name in names or known}
    books = {name: _Book(out, name, units, plan, provenance) for name, units in chosen.items()}
    todo = [(book, unit) for book in books.values() for unit in book.missing()]

    def run(book: _Book, unit: Unit) -> None:
        try:
            book.add(unit, unit.run())
            say(f"{book.name}: {unit.name}")
        except Exception as error:
            # One that fails stays missing; the others go on.
            say(f"{book.name}: {unit.name} FAILED: {type(error).__name__}: {error}")

    with ThreadPoolExecutor(WORKERS) as pool:
        started = [pool.submit(run, book, unit) for book, unit in todo if not unit.alone]
        for future in as_completed(started):
            future.result()
    for book, unit in todo:
        if unit.alone:
            run(book, unit)
    return [book.path for book in books.values() if book.path.exists()]


class _Book:
    """The record of one experiment while it grows."""

    def __init__(
        self, out: Path, name: str, units: list[Unit], plan: Plan, provenance: Provenance
    ) -> None:
        self.name = name
        self.units = units
        self.path = out / f"{name}.json"
        self.partial = out / f"{name}.partial.json"
        self.lock = threading.Lock()
        self.record = Record(
            experiment=name,
            provenance=provenance,
            parameters={
                "preset": plan.geometry.name,
                "device": plan.device,
                "samples": plan.samples,
                "chunks": plan.chunks,
                "repeats": plan.repeats,
            },
            units=[],
            cells=[],
        )
        if self.partial.exists():
            earlier = read(self.partial)
            same = earlier.provenance.same_machine(provenance)
            if same and earlier.parameters == self.record.parameters:
                self.record = earlier

    def missing(self) -> list[Unit]:
        if self.path.exists():
            return []
        return [unit for unit in self.units if unit.name not in self.record.units]

    def add(self, unit: Unit, cells: Sequence[Any]) -> None:
        with self.lock:
            grown = self.record.model_copy(
                update={
                    "units": [*self.record.units, unit.name],
                    "cells": [*self.record.cells, *cells],
                }
            )
            self.record = Record.model_validate(grown.model_dump())
            if self.missing():
                write(self.record, self.partial)
            else:
                write(self.record, self.path)
                self.partial.unlink(missing_ok=True)


def _refuse_another_machine(out: Path, provenance: Provenance) -> None:
    for path in sorted(out.glob("*.json")):
        there = folder_name(read(path).provenance)
        if there != folder_name(provenance):
            raise RecordRefused(
                f"{out} holds records of {there}, and this is {folder_name(provenance)}; "
                "name another folder with --out"
            )


def _crash(plan: Plan, name: str, case: CrashCase) -> list[Strict]:
    from omni_kv.gpu_experiments import crash_run

    return [crash_run(name, case, plan.geometry, plan.device)]


def _stale_cache(plan: Plan) -> list[Strict]:
    """Separate pools, with the compile cache that a run over shared halves left behind."""
    from omni_kv.gpu_experiments import crash_run

    with tempfile.TemporaryDirectory(prefix="omni-kv-") as folder:
        cases = {
            "shared": (CrashCase(), Path(folder)),
            "separate, cache left behind": (
                CrashCase(layout="separate", cache="shared"),
                Path(folder),
            ),
            "separate, fresh cache": (CrashCase(layout="separate"), None),
        }
        return [
            crash_run(name, case, plan.geometry, plan.device, cache)
            for name, (case, cache) in cases.items()
        ]


def _sanitizer(plan: Plan) -> list[Strict]:
    from omni_kv.gpu_sanitizer import sanitizer_run

    return [sanitizer_run("memcheck", plan.geometry)]


def _measured(plan: Plan, name: str, function: str, *args: object) -> Unit:
    """A measurement in a child of its own; shared halves need the allocator that lets them run."""

    def run() -> list[Strict]:
        import os

        from omni_kv import bench, gpu_measure, gpu_trials
        from omni_kv.isolation import run_isolated

        modules = (gpu_measure, gpu_trials, bench)
        measure = next(getattr(m, function) for m in modules if hasattr(m, function))
        env = {"TORCHINDUCTOR_COMPILE_THREADS": str(min(16, os.cpu_count() or 1))}
        if "shared" in args:
            env["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE
        outcome = run_isolated(measure, plan.geometry, plan.device, *args, timeout=540.0, env=env)
        return _renamed(name, outcome.unwrap())

    return Unit(name, run, alone=True)


def _renamed(unit: str, cells: list[Any]) -> list[Any]:
    """Ceilings are measured in every unit: their names say in which."""
    return [
        cell.model_copy(update={"name": f"{unit}: {cell.name}"})
        if cell.name.startswith("ceiling/")
        else cell
        for cell in cells
    ]
