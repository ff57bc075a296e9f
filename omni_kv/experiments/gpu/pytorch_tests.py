"""PyTorch's own tests of the passes, with and without a candidate fix of the compiler.

The tests are not part of this project: whoever runs this fetches the files at a release's tag
(``test/inductor/test_inplacing_pass.py`` and others) into one folder, which the environment
variable ``OMNI_KV_PYTORCH_TESTS`` names. They need the package ``expecttest``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from omni_kv import upstream
from omni_kv.evidence.cells import TestCounts

TESTS_VARIABLE = "OMNI_KV_PYTORCH_TESTS"
#: Names the fix under which this module, as a pytest plugin, lets the tests run.
FIX_VARIABLE = "OMNI_KV_FIX"


def test_files() -> dict[str, Path]:
    """The test files in the folder that the environment names, by name; none without it."""
    folder = os.environ.get(TESTS_VARIABLE)
    return {path.name: path for path in sorted(Path(folder).glob("test_*.py"))} if folder else {}


def compare_tests(path: Path, fix: str, timeout: float = 480.0) -> TestCounts:
    """Run one file of tests with and without a fix, each in a process of its own.

    Args:
        path: the file.
        fix: name of a context manager in ``omni_kv.upstream``.
        timeout: seconds for each of the two runs.

    Raises:
        subprocess.TimeoutExpired: if a run takes longer.
        RuntimeError: if no test could be run.
    """
    without, with_fix = (_outcomes(path, name, timeout) for name in ("", fix))
    names = sorted(without.keys() | with_fix.keys())
    pairs = {name: (without.get(name, "missing"), with_fix.get(name, "missing")) for name in names}
    return TestCounts(
        name=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        fix=fix,
        without=dict(Counter(without.values())),
        with_fix=dict(Counter(with_fix.values())),
        changed={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
    )


def _outcomes(path: Path, fix: str, timeout: float) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as folder:
        report = Path(folder) / "report.xml"
        plugin = ["-p", "omni_kv.experiments.gpu.pytorch_tests", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, f"--junitxml={report}", str(path)]
        env = {
            **os.environ,
            FIX_VARIABLE: fix,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(
            command, env=env, cwd=folder, timeout=timeout, capture_output=True, text=True
        )
        if not report.exists():
            raise RuntimeError(f"{path.name}: no test was run: {done.stdout[-500:]}")
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{c.get('classname')}.{c.get('name')}": _outcome(c) for c in cases}


def _outcome(case: ElementTree.Element) -> str:
    found = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
    return {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(
        found[0] if found else "", "passed"
    )


def pytest_configure(config: object) -> None:
    """As a pytest plugin: put the fix in for as long as the tests run."""
    fix = os.environ.get(FIX_VARIABLE)
    if fix:
        stack = contextlib.ExitStack()
        stack.enter_context(getattr(upstream, fix)())
        config.add_cleanup(stack.close)  # type: ignore[attr-defined]
