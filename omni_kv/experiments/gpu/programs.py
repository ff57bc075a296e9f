"""Whole programs on one device: notebooks, again and again, and the reproductions of faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from omni_kv.evidence import verdicts
from omni_kv.evidence.programs import NotebookRun, ReproductionRun
from omni_kv.evidence.records import DATA_VARIABLE, data_dir
from omni_kv.experiments import reproductions
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.sandbox.process import run_isolated

#: Those that take a device and run live on it; notebook 02's cases are the experiment "guarded".
NOTEBOOKS = ("03", "04", "05")
#: Runs of each.
REPEATS = 20


def notebook_units(plan: Plan) -> list[Unit]:
    """One unit a notebook and run; the slowest notebook first."""
    return [
        Unit(f"{notebook}, {repeat}", partial(_cells, notebook, repeat, plan.device))
        for repeat in range(REPEATS)
        for notebook in reversed(NOTEBOOKS)
    ]


def _cells(notebook: str, repeat: int, device: str) -> list[NotebookRun]:
    return [notebook_run(notebook, repeat, device)]


def notebook_run(notebook: str, repeat: int, device: str, timeout: float = 540.0) -> NotebookRun:
    """Run a notebook with its defaults on a device, and read what its experiments came to.

    The outcomes are recorded into a folder of the run's own; none is held against another.

    Args:
        notebook: its number.
        repeat: number of the run.
        device: ``cuda``, or ``cpu``.
        timeout: seconds.

    Raises:
        RuntimeError: if the notebook did not end in time.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as folder:
        data = Path(folder) / "data"
        shutil.copytree(data_dir(), data, ignore=shutil.ignore_patterns("verdicts"))
        env = {DATA_VARIABLE: str(data)}
        failure = run_isolated(_record, notebook, device, timeout=timeout, env=env).unwrap()
        file = data / "verdicts" / f"torch-{verdicts.torch_release()}.json"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = verdicts.VerdictFile.model_validate_json(text).verdicts if text else []
    outcomes = {entry.name: entry.outcome for entry in found}
    return NotebookRun(
        name=f"{notebook}, {repeat}",
        notebook=notebook,
        repeat=repeat,
        outcomes=outcomes,
        failure=failure,
        seconds=time.perf_counter() - start,
    )


def _record(notebook: str, device: str) -> str | None:
    """What ``omni-kv verdicts record`` says of a notebook that failed; for a child process."""
    command = [sys.executable, "-m", "omni_kv.cli", "verdicts", "record", notebook]
    done = subprocess.run(
        [*command, "-p", "device", device], env=os.environ, capture_output=True, text=True
    )
    said = (done.stdout + done.stderr).strip().splitlines() or ["nothing was printed"]
    return said[-1] if done.returncode else None


def reproduction_units(plan: Plan) -> list[Unit]:
    """On the plan's device, with the fix too; those that take no device on the CPU, without it."""
    units = []
    for number in reproductions.numbers():
        takes = reproductions.takes_device(number)
        device = plan.device if takes else "cpu"
        fixed = takes and reproductions.recorded(number, fixed=True) is not None
        for fix in (None, reproductions.fix_of(number)) if fixed else (None,):
            name = f"{number}, {device}" + (f", {fix}" if fix else "")
            run = partial(_reproduction, name, number, device, fix)
            units.append(Unit(name, run, alone=not takes))  # one takes times
    return units


def _reproduction(name: str, number: str, device: str, fix: str | None) -> list[ReproductionRun]:
    argument = device if reproductions.takes_device(number) else None
    ran = reproductions.run(number, fix, device=argument)
    return [
        ReproductionRun(
            name=name,
            number=number,
            device=device,
            fix=fix,
            exit_code=ran.exit_code,
            printed=ran.printed.splitlines(),
        )
    ]
