"""Assertions for a test suite: compiled code must not clone what it mutates, and must be right.

A test that fails prints the audit's verdict in its first line, as the command line does, and then
the whole audit: what was cloned, why, what the clone reads, what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from omni_kv.audits.audit import audit


def assert_no_clones(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> None:
    """Fail if ``torch.compile`` clones an argument that ``fn`` mutates, static or dynamic.

    Takes a second or two: nothing is run.

    Args:
        fn: the callable.
        args: its arguments, as one tuple.
        kwargs: its keyword arguments.

    Raises:
        AssertionError: if anything is cloned, or if ``fn`` could not be looked at; the message is
            the report.
    """
    report = audit(fn, args, kwargs, run=False, until="graph")
    looked_at = all(
        not (shapes.problem or shapes.instrument or shapes.graph_break) for shapes in report.shapes
    )
    if report.clones or not looked_at:
        raise AssertionError(report.text(verbose=True))


def assert_compiles_faithfully(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    second: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    dynamic: bool | Literal["both"] = "both",
) -> None:
    """Fail if compiled and eager disagree, in an output or in what was mutated, or if one crashes.

    Compiles with static and with dynamic shapes in child processes and runs over guarded memory;
    takes some ten seconds. A clone is no failure, as long as it reads what it should.

    Args:
        fn: the callable.
        args: its arguments, as one tuple.
        kwargs: its keyword arguments.
        second: arguments of a second call, with other sizes, or a function that makes them.
        dynamic: compile with static shapes (False), ``dynamic=True`` (True), or both.

    Raises:
        AssertionError: if they disagree, or could not be compared; the message is the report.
    """
    report = audit(fn, args, kwargs, second=second, dynamic=dynamic)
    agree = report.comparisons and all(c.result == "same" for c in report.comparisons)
    if not agree or report.reads_outside:
        raise AssertionError(report.text(verbose=True))
