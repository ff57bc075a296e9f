"""Audit a callable: does compiling it clone, read beyond or corrupt what it mutates?

``audit`` reads the findings off what the lens kept of each compilation, and has ``faithful`` run
compiled against eager. What it says of a cause rests on the pass' own decision, what it says of an
extent on the generated kernel's index, what it says of an outcome on a run; never on a version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.compare import Job, cause_line, compare, jobs_for
from omni_kv.audits.findings import aliases_of, ops_of
from omni_kv.audits.report import AuditReport, Shapes
from omni_kv.lens.capture import Until, capture, original


@dataclass
class Call:
    """A callable to audit, with its arguments; the fields are those of ``audit``."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    second: Sequence[Any] | Callable[[], Sequence[Any]] | None = None


def audit(
    fn: Callable[..., Any],
    *args: Any,
    run: bool = True,
    second: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    dynamic: bool | Literal["both"] = "both",
    until: Until = "code",
    **kwargs: Any,
) -> AuditReport:
    """Say what ``torch.compile`` does to the arguments that ``fn`` mutates.

    Args:
        fn: a function, a module, or what ``torch.compile`` made of one.
        args: its arguments. They are neither changed nor run through compiled code in this process.
        run: also run compiled against eager, in child processes over guarded memory (CPU tensors).
            Mutated tensors that hold one value everywhere are filled with random numbers there.
        second: arguments of a second call, with other sizes, or a function that makes them.
        dynamic: look at static shapes (False), ``dynamic=True`` (True), or both.
        until: ``graph`` leaves out the generated code, and with it what a clone reads.
        kwargs: the callable's keyword arguments.

    Returns:
        The report; a callable that cannot be audited gets one that says why, not an exception.
    """
    return audit_all([Call(fn, args, kwargs, second)], run=run, dynamic=dynamic, until=until)[0]


def audit_all(
    calls: Sequence[Call],
    *,
    run: bool = True,
    dynamic: bool | Literal["both"] = "both",
    until: Until = "code",
    workers: int = 2,
) -> list[AuditReport]:
    """Audit several callables; they share the child processes, whose start is half of the time.

    Args:
        calls: what to audit.
        run: as in ``audit``.
        dynamic: as in ``audit``.
        until: as in ``audit``.
        workers: child processes at a time.
    """
    settings = {"both": (None, True), False: (None,), True: (True,)}[dynamic]
    reports = []
    for call in calls:
        start = time.perf_counter()
        report = AuditReport(
            callable=_name(original(call.fn)),
            torch=torch.__version__,
            device=_device(call),
            verdict="clean",
            sentence="",
            shapes=[_look(call, setting, until) for setting in settings],
        )
        report.seconds = time.perf_counter() - start
        reports.append(report)
    if run:
        _run(calls, reports, settings, workers)
    for report in reports:
        _conclude(report)
    return reports


def _run(
    calls: Sequence[Call],
    reports: Sequence[AuditReport],
    settings: Sequence[bool | None],
    workers: int,
) -> None:
    """Compare compiled and eager for every call that compiled, and file what came out."""
    jobs: list[tuple[AuditReport, Job]] = []
    for call, report in zip(calls, reports, strict=True):
        sound = [
            setting
            for setting, shapes in zip(settings, report.shapes, strict=True)
            if not shapes.problem
        ]
        if sound:
            second = call.second() if callable(call.second) else call.second
            made = jobs_for(call.fn, call.args, call.kwargs, second=second, dynamic=sound)
            jobs += [(report, job) for job in made]
    start = time.perf_counter()
    comparisons = iter(compare([job for _, job in jobs], workers))
    for report, job in jobs:
        report.comparisons += [next(comparisons) for label in job.labels if label]
    for report in {id(report): report for report, _ in jobs}.values():
        report.seconds += time.perf_counter() - start


def _look(call: Call, dynamic: bool | None, until: Until) -> Shapes:
    label = "dynamic=True" if dynamic else "static"
    try:
        seen = capture(call.fn, *call.args, dynamic=dynamic, until=until, **call.kwargs)
    except Exception as error:
        return Shapes(label=label, problem=_plain_problem(error))
    shapes = Shapes(
        label=label,
        graphs=len(seen.graphs),
        graph_break=seen.graph_break,
        seconds=seen.seconds,
        ops=[op for number, graph in enumerate(seen.graphs) for op in ops_of(graph, number)],
        aliases=[alias for graph in seen.graphs for alias in aliases_of(graph)],
    )
    if not any(graph.post_grad_after_decomposition for graph in seen.graphs):
        shapes.problem = "It makes no graph: there is nothing in it to compile."
    return shapes


#: What PyTorch says when CUDA was asked for and is not there.
_NO_GPU = (
    "NVIDIA driver",
    "support for cuda",
    "not compiled with CUDA",
    "CUDA device",
    "active drivers",
)


def _plain_problem(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    if not torch.cuda.is_available() and any(sign in text for sign in _NO_GPU):
        return "It needs a GPU, and there is none here."
    if isinstance(error, TypeError) and "argument" in text:
        return f"It cannot be called with these arguments: {first}"
    return f"It does not compile: {cause_line(error)}"


def _conclude(report: AuditReport) -> None:
    """Gather the findings, and say the verdict in one sentence."""
    for shapes in report.shapes:
        for op in shapes.ops:
            for a in op.arguments:
                where = f"{shapes.label}: {op.name}, {a.name}"
                if a.outcome == "cloned":
                    size = f", {a.clone.bytes:,} bytes a call" if a.clone is not None else ""
                    report.findings.append(f"{where} is cloned{size} ({a.cause})")
                if a.clone is not None and a.clone.reads_outside:
                    outside = (a.clone.outside_before or 0) + (a.clone.outside_after or 0)
                    report.findings.append(
                        f"{where}: the clone reads {outside:,} elements outside the storage"
                    )
                if a.misled:
                    report.findings.append(f"{where}: {a.shifted()}")
    for comparison in report.comparisons:
        if comparison.result in ("differs", "crashed"):
            how = f" ({comparison.how})" if comparison.how else ""
            report.findings.append(f"{comparison.label}: compiled {comparison.result}{how}")
    problems = [shapes for shapes in report.shapes if shapes.problem]
    failed = [c for c in report.comparisons if c.result in ("raised", "timed out")]
    if len(problems) < len(report.shapes):
        # Some of it compiles: what does not is a finding about the rest.
        report.findings += [f"{shapes.label}: {shapes.problem}" for shapes in problems]
    if any(c.result == "same" for c in report.comparisons):
        report.findings += [f"{c.label}: {c.how}" for c in failed]
    broken = next((s.graph_break for s in report.shapes if s.graph_break), None)
    mutated = sum(len(op.arguments) for s in report.shapes for op in s.ops)
    if report.findings:
        report.verdict = "findings"
        count = len(report.findings)
        report.sentence = f"{count} finding{'s' * (count != 1)}."
    elif problems:
        report.verdict, report.sentence = "could not run", problems[0].problem or ""
    elif broken:
        report.verdict = "could not run"
        report.sentence = f"It breaks the graph, and what follows was not looked at: {broken}"
    elif failed:
        report.verdict = "could not run"
        report.sentence = f"Compiled and eager could not be compared: {failed[0].how}"
    elif not mutated:
        report.sentence = "It mutates nothing: there is nothing to clone."
    else:
        report.sentence = "Every mutated argument is written in place."
        if any(
            a.outcome == "written back" for s in report.shapes for o in s.ops for a in o.arguments
        ):
            report.sentence = "No mutated argument is cloned."
    apart = next((c.how for c in report.comparisons if c.result == "not run"), None)
    if apart and report.verdict != "could not run":
        report.sentence += f" Compiled and eager were not compared: {apart}."
    agree = report.comparisons and all(c.result == "same" for c in report.comparisons)
    if agree and report.verdict != "could not run":
        report.sentence += " Compiled and eager agree."


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _device(call: Call) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ", ".join(sorted({t.device.type for t in tensors})) or "cpu"
