"""Run every GPU experiment and write one evidence record each: the body of ``omni-kv record``.

An experiment is a list of units; a unit is what is run, or run again, as a whole. A finished unit
goes straight into ``<experiment>.partial.json``, which becomes the record when the last one is in.
Another machine, other versions or other code than the partial record's start it afresh.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from omni_kv.evidence.cells import CrashCase, Strict, Timing
from omni_kv.evidence.compile_times import ratio_lines
from omni_kv.evidence.records import (
    EvidenceError,
    Provenance,
    Record,
    command_line,
    data_dir,
    folder_name,
    load,
    provenance,
    read,
    write,
)
from omni_kv.experiments.gpu import bench, fixed
from omni_kv.experiments.gpu import step as gpu_measure
from omni_kv.experiments.gpu import trials as gpu_trials
from omni_kv.experiments.gpu.cases import CRASHES, ENGINE, EXPANDABLE
from omni_kv.experiments.gpu.compile_share import compile_share_units
from omni_kv.experiments.gpu.compile_time import compile_time_units
from omni_kv.experiments.gpu.crash import crash_run
from omni_kv.experiments.gpu.guarded import REPEATS, guarded_cases, guarded_run
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.experiments.gpu.programs import notebook_units, reproduction_units
from omni_kv.experiments.gpu.pytorch_tests import pytorch_tests_units
from omni_kv.experiments.gpu.sanitizer import sanitizer_run
from omni_kv.experiments.gpu.step import for_backend
from omni_kv.model.attention import BackendError, choose_backend
from omni_kv.model.geometry import Geometry, preset
from omni_kv.sandbox.process import run_isolated

#: What the audit is tried on, see ``audited``; its kernels need Triton, which not every torch has.
AUDITED = (
    "layer, tiny, shared",
    "layer, tiny, separate",
    "layer, lingbot-480x832, shared",
    "layer, lingbot-480x832, separate",
    "Triton kernel over halves",
    "Triton kernel over two tensors",
    "Triton kernel over a view of an intermediate",
)

#: Children that compile and crash side by side; measurements run alone.
WORKERS = 14
#: Recorded where they are named only: the notebook's short form of "step" and "rollout", and hours.
BY_NAME = ("live", "compile-time", "compile-share", "notebooks", "reproductions")


class RecordRefused(ValueError):
    """What was asked for cannot be recorded there; the message says why."""


def experiments(plan: Plan) -> dict[str, list[Unit]]:
    """Every experiment's units, by name."""
    fastest = plan.backends[-1]
    # The longest chain of children starts first.
    found = {"stale-cache": [Unit("in this order", functools.partial(_stale_cache, plan))]}
    found |= {
        name: [
            Unit(case_name, functools.partial(_crash, plan, case_name, case, name == "segments"))
            for case_name, case in cases.items()
        ]
        for name, cases in CRASHES.items()
    }
    found["guarded"] = [
        Unit(f"{label}, {repeat}", functools.partial(_guarded, plan, label, repeat))
        for repeat in range(REPEATS)
        for label in guarded_cases(plan.device)
    ]
    found["pytorch-tests"] = pytorch_tests_units(plan)
    if plan.device != "cpu":
        found["audit"] = [
            Unit(name, functools.partial(_audit, name), alone=True) for name in AUDITED
        ]
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
    found["overlap-check"] = [
        _measured(plan, fastest, "measure_overlap_check", fastest, plan.samples)
    ]
    found["bench"] = [_measured(plan, "pieces", "measure_pieces", plan.backends, 2 * plan.samples)]
    # Over shared halves the results are wrong: two chunks are enough to see by how much.
    found["rollout"] = [
        _measured(plan, f"{backend}, {layout}", "measure_rollouts", backend, layout, *lengths)
        for layout, backends, lengths in (
            ("separate", plan.backends, (plan.chunks, plan.repeats, plan.chunks)),
            ("shared", plan.backends, (plan.chunks, 1, 2)),
        )
        for backend in backends
    ]
    found["compile-time"] = compile_time_units(plan)
    found["compile-share"] = compile_share_units(plan)
    found["notebooks"] = notebook_units(plan)
    found["reproductions"] = reproduction_units(plan)
    found["live"] = [_measured(plan, fastest, "measure_live", fastest, plan.samples, plan.chunks)]
    return found


def records_for(device: str, preset_name: str, folder: str = "") -> dict[str, Record]:
    """What notebooks 06 and 07 show: on a CPU what was recorded, else what is measured now.

    The preset ``tiny`` is measured now on a CPU, too: it shows that the machinery works. What
    takes minutes (compute-sanitizer, the trials, the pieces) is always read from the record.

    Args:
        device: ``cpu``, ``cuda``, ...
        preset_name: name of the geometry.
        folder: where to keep what is measured; what lies there already is not measured again.

    Raises:
        EvidenceError: if something was never recorded, or with another preset.
        RuntimeError: if a measurement failed.
    """
    recorded = ("sanitizer", "segments-alone", "trials", "bench", "guarded", "overlap-check")
    measured = ("crash", "segments", "stale-cache")
    if device == "cpu" and preset_name != "tiny":
        return {
            name: _of_preset(load(name), preset_name)
            for name in (*measured, *recorded, "step", "rollout")
        }
    geometry = preset(preset_name)
    backend = choose_backend("auto", geometry, device)
    chunks = geometry.first_full_chunk + 3
    plan = Plan(geometry, device, (backend,), samples=3, chunks=chunks)
    command = f"notebooks 06 and 07, device={device}, preset={preset_name}"
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as temporary:
        out = Path(folder or temporary)
        record(plan, provenance(device, command), out, (*measured, "live"), _say)
        missing = [n for n in (*measured, "live") if not (out / f"{n}.json").exists()]
        if missing:
            raise RuntimeError(f"not measured: {', '.join(missing)}; the lines above say why")
        found = {name: read(out / f"{name}.json") for name in measured}
        live = read(out / "live.json")
    return found | {"step": live, "rollout": live} | {name: load(name) for name in recorded}


def _say(line: str) -> None:
    # One write: a notebook keeps what several threads print apart, also a line from its end.
    print(line + "\n", end="")


def record_command(
    preset_name: str,
    device: str,
    out: Path | None,
    names: Sequence[str],
    say: Callable[[str], None],
    pairs: int = 10,
) -> list[str]:
    """What ``omni-kv record`` does; the experiments that are not complete afterwards.

    Raises:
        ValueError: if there is no such preset, device or experiment, or the folder holds another
            machine's records.
    """
    geometry = preset(preset_name)
    if device != "cpu" and not torch.cuda.is_available():
        raise RecordRefused(f"no device {device!r} here; take --device cpu --preset tiny")
    origin = provenance(device, command_line())
    plan = Plan(geometry, device, _backends(geometry, device), pairs=pairs)
    folder = out or data_dir() / "evidence" / folder_name(origin)
    # Without test files there is nothing to record of them.
    wanted = names or [n for n, units in experiments(plan).items() if units and n not in BY_NAME]
    record(plan, origin, folder, wanted, say)
    return [name for name in wanted if not (folder / f"{name}.json").exists()]


def _backends(geometry: Geometry, device: str) -> tuple[str, ...]:
    """The attention backends that can be had here, the one that ``auto`` takes last."""
    fastest = choose_backend("auto", geometry, device)
    others = []
    for name in ("flash-attn", "sdpa", "flash-attn-3"):
        with contextlib.suppress(BackendError):
            others.append(choose_backend(name, for_backend(geometry, name), device))
    return (*(name for name in others if name != fastest), fastest)


def _of_preset(record: Record, preset_name: str) -> Record:
    if record.parameters.get("preset") != preset_name:
        raise EvidenceError(
            f"{record.experiment}: parameters.preset: recorded with "
            f"{record.parameters.get('preset')}, not {preset_name}; record it, or take that one"
        )
    return record


def record(
    plan: Plan,
    origin: Provenance,
    out: Path,
    names: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Record experiments; those that are there already are left alone.

    Args:
        plan: what to record.
        origin: where and with what this runs.
        out: folder of this machine's records.
        names: experiments to record; all but ``BY_NAME`` by default.
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
    _refuse_another_machine(out, origin)
    chosen = {name: known[name] for name in names or (n for n in known if n not in BY_NAME)}
    books = {name: _Book(out, name, units, plan, origin) for name, units in chosen.items()}
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
    for line in ratio_lines(books["compile-time"].known()) if "compile-time" in books else ():
        say(line)
    return [book.path for book in books.values() if book.path.exists()]


class _Book:
    """The record of one experiment while it grows."""

    def __init__(
        self, out: Path, name: str, units: list[Unit], plan: Plan, origin: Provenance
    ) -> None:
        self.name = name
        self.units = units
        self.path = out / f"{name}.json"
        self.partial = out / f"{name}.partial.json"
        self.lock = threading.Lock()
        self.record = Record(
            experiment=name,
            provenance=origin,
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
            same = earlier.provenance.same_machine(origin)
            if same and earlier.parameters == self.record.parameters:
                self.record = earlier

    def known(self) -> Record:
        """What is recorded so far."""
        return read(self.path) if self.path.exists() else self.record

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


def _refuse_another_machine(out: Path, origin: Provenance) -> None:
    for path in sorted(out.glob("*.json")):
        there = folder_name(read(path).provenance)
        if there != folder_name(origin):
            raise RecordRefused(
                f"{out} holds records of {there}, and this is {folder_name(origin)}; "
                "name another folder with --out"
            )


def _crash(plan: Plan, name: str, case: CrashCase, twin: bool) -> list[Strict]:
    return [crash_run(name, case, plan.geometry, plan.device, twin=twin)]


def _guarded(plan: Plan, label: str, repeat: int) -> list[Strict]:
    return [guarded_run(label, repeat, plan.device)]


def _audit(name: str) -> list[Strict]:
    from omni_kv.experiments.gpu.audited import audit_run

    return [audit_run(name)]


def _stale_cache(plan: Plan) -> list[Strict]:
    """Separate pools, with the compile cache that a run over shared halves left behind."""
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as folder:
        cases = {
            "shared": (CrashCase(pool_layers=ENGINE), Path(folder)),
            "separate, cache left behind": (
                CrashCase(pool_layers=ENGINE, layout="separate", cache="shared"),
                Path(folder),
            ),
            "separate, fresh cache": (CrashCase(pool_layers=ENGINE, layout="separate"), None),
        }
        return [
            crash_run(name, case, plan.geometry, plan.device, cache_dir=cache)
            for name, (case, cache) in cases.items()
        ]


def _sanitizer(plan: Plan) -> list[Strict]:
    return [sanitizer_run("memcheck", plan.geometry)]


def _measured(plan: Plan, name: str, function: str, *args: object) -> Unit:
    """A measurement in a child of its own; shared halves need the allocator that lets them run."""

    def run() -> list[Strict]:
        modules = (gpu_measure, gpu_trials, bench, fixed)
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
        if isinstance(cell, Timing) and cell.is_ceiling
        else cell
        for cell in cells
    ]
