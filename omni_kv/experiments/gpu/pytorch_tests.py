"""PyTorch's own tests of the passes, with and without the candidate fixes of the compiler.

The tests are not part of this project: whoever runs this fetches the files at a release's tag
(``test/inductor/test_inplacing_pass.py`` and others) into one folder, which the environment
variable ``OMNI_KV_PYTORCH_TESTS`` names. They need the package ``expecttest``.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omni_kv.evidence.programs import TestCounts
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.experiments.gpu.tests_plugin import FIX_VARIABLE, LINES_VARIABLE, add_line, read_lines
from omni_kv.upstream.fixes import FIXES
from omni_kv.upstream.install import fixed_sources

TESTS_VARIABLE = "OMNI_KV_PYTORCH_TESTS"
TAG_VARIABLE = "OMNI_KV_PYTORCH_TAG"
#: Seconds for one file's tests. A command on a GPU machine may have ten minutes.
TIMEOUT = {"cuda": 480.0, "cpu": 5400.0}


def test_files() -> dict[str, Path]:
    """The test files in the folder that the environment names, by name; none without it."""
    named = os.environ.get(TESTS_VARIABLE)
    found = sorted(Path(named).resolve().glob("test_*.py")) if named else []
    return {path.name: path for path in found}


def pytorch_tests_units(plan: Plan) -> list[Unit]:
    """One unit a file; none without a folder."""
    fixes = [name for name in FIXES if _fits(name)]
    return [
        Unit(name, functools.partial(_compare, path, fixes, plan.device))
        for name, path in test_files().items()
    ]


def compare_tests(path: Path, fixes: Sequence[str], device: str, timeout: float) -> TestCounts:
    """Run one file of tests with and without fixes, side by side, in processes of their own.

    Args:
        path: the file.
        fixes: names of candidate fixes, which are in place together.
        device: ``cpu`` hides every GPU.
        timeout: seconds for each of the two runs. A test that is running then counts as
            ``timed out``, what comes after it as ``not run``.

    Raises:
        RuntimeError: if pytest did not get as far as loading the file.
    """
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_run, path, chosen, device, timeout) for chosen in ((), fixes)]
        without, with_fix = (run.result() for run in runs)
    names = sorted((without.keys() | with_fix.keys()) - {""})
    outcomes = [{name: _outcome(run, name) for name in names} for run in (without, with_fix)]
    before, after = outcomes
    reasons = Counter(
        f"{before[name]}: {reason}"
        for name in names
        if before[name] != "passed" and (reason := _readable(without[name].get("reason", "")))
    )
    return TestCounts(
        name=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        tag=os.environ.get(TAG_VARIABLE),
        fixes=list(fixes),
        without=dict(Counter(before.values())),
        with_fix=dict(Counter(after.values())),
        changed={n: (before[n], after[n]) for n in names if before[n] != after[n]},
        reasons=dict(reasons.most_common(20)),
        unloaded=_readable(without.get("", with_fix.get("", {})).get("unloaded", "")) or None,
    )


def _compare(path: Path, fixes: Sequence[str], device: str) -> list[TestCounts]:
    return [compare_tests(path, fixes, device, TIMEOUT.get(device, TIMEOUT["cuda"]))]


def _fits(fix: str) -> bool:
    try:
        fixed_sources(fix)
    except RuntimeError:
        return False
    return True


def _run(
    path: Path, fixes: Sequence[str], device: str, timeout: float
) -> dict[str, dict[str, str]]:
    """What the plugin kept of each test. A process that died goes on behind the test it died in."""
    end = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as folder:
        lines = Path(folder) / "lines"
        plugin = ["-p", "omni_kv.experiments.gpu.tests_plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, str(path)]
        env = {
            **os.environ,
            FIX_VARIABLE: ",".join(fixes),
            LINES_VARIABLE: str(lines),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        }
        output = Path(folder) / "output"
        while True:
            with output.open("wb") as file:
                ended = _ended(command, env, folder, file, end - time.monotonic())
            found = read_lines(lines)
            if not found:
                tail = output.read_text(errors="replace")[-500:]
                raise RuntimeError(f"{path.name}: no test was run: {tail}")
            begun = [n for n, told in found.items() if told.get("outcome") == "begun"]
            for name in begun:
                add_line(lines, {"test": name, "outcome": "crashed" if ended else "timed out"})
            found = read_lines(lines)
            left = any(_outcome(found, name) == "not run" for name in found if name)
            if not (begun and ended and left):
                return found


def _ended(command: list[str], env: dict[str, str], cwd: str, output: object, left: float) -> bool:
    """Whether the process ended by itself within the seconds that are left."""
    try:
        subprocess.run(
            command, env=env, cwd=cwd, timeout=max(left, 1.0), stdout=output, stderr=output
        )  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return False
    return True


def _outcome(found: dict[str, dict[str, str]], name: str) -> str:
    return found.get(name, {}).get("outcome", "not run" if name in found else "missing")


def _readable(reason: str) -> str:
    """One line without this machine's paths and addresses."""
    line = (reason.splitlines() or [""])[0]
    line = re.sub(r"(?<![\w.])/[^\s'\")]*/", "", line)
    return re.sub(r"0x[0-9a-f]+", "0x...", line)[:160]
