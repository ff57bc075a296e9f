"""A pytest plugin for tests that may kill their process: each outcome is a line of a file at once.

Imports nothing of torch by itself. ``pytorch_tests`` runs pytest with it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

#: Names the candidate fixes, by commas, under which the tests run.
FIX_VARIABLE = "OMNI_KV_FIX"
#: Names the file that gets the lines. Tests that have an outcome there do not run again.
LINES_VARIABLE = "OMNI_KV_TEST_LINES"


def pytest_configure(config: Any) -> None:
    """Put the fixes in for as long as the tests run."""
    from omni_kv.upstream import installed

    stack = contextlib.ExitStack()
    for fix in filter(None, os.environ.get(FIX_VARIABLE, "").split(",")):
        stack.enter_context(installed(fix))
    config.add_cleanup(stack.close)


def pytest_collectreport(report: Any) -> None:
    """Keep why a file could not be loaded."""
    if not report.passed:
        _add({"unloaded": _reason(report)})


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep what there is to run, and leave out what has run."""
    done = read_lines(Path(os.environ[LINES_VARIABLE]))
    if not items and not done:
        _add({"unloaded": "it defines no test on this device"})
    for item in items:
        _add({"test": _name(item.nodeid)})
    items[:] = [item for item in items if "outcome" not in done.get(_name(item.nodeid), {})]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Keep which test begins: where the process dies, it did so in this one."""
    _add({"test": _name(nodeid), "outcome": "begun"})


def pytest_runtest_logreport(report: Any) -> None:
    """Keep how a test ended: by its call, or by what went wrong around it."""
    if report.when == "call" or not report.passed:
        reason = "" if report.passed else _reason(report)
        _add({"test": _name(report.nodeid), "outcome": report.outcome, "reason": reason})


def read_lines(path: Path) -> dict[str, dict[str, str]]:
    """The last line about each test, by its name, and one about the file under ``""``."""
    found: dict[str, dict[str, str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # one that the process died in
            told = json.loads(line)
            known = found.get(told.get("test", ""), {})
            found[told.get("test", "")] = known | told
    return found


def add_line(path: Path, line: dict[str, str]) -> None:
    """Add what is known of a test."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _add(line: dict[str, str]) -> None:
    add_line(Path(os.environ[LINES_VARIABLE]), line)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _reason(report: Any) -> str:
    """The line that says what was raised."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr)
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if crash else lines[-1]) if lines else ""
