"""Audit a callable: does compiling it clone, read beyond or corrupt what it mutates?

``audit`` reads the findings off what the lens kept of each compilation, and has ``faithful`` run
compiled against eager. What it says of a cause rests on the pass' own decision, what it says of an
extent on the generated kernel's index, what it says of an outcome on a run; never on a version.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.compare import compare
from omni_kv.audits.errors import cause_line, raised_here, surroundings
from omni_kv.audits.findings import aliases_of, ops_of
from omni_kv.audits.jobs import Job, jobs_for
from omni_kv.audits.modes import Modes
from omni_kv.audits.report import AuditReport, Rewritten, Shapes
from omni_kv.audits.threads import ONE_CORE, callers_machine, cores
from omni_kv.audits.verdict import conclude
from omni_kv.lens.capture import Until, capture, original
from omni_kv.lens.graph import GraphCapture
from omni_kv.lens.pytorch import UnknownTorch
from omni_kv.lens.traffic import traffic_of

#: Copies of fewer bytes a call are no findings: a counter, a flag, a row of scales.
MIN_BYTES = 1024


@dataclass
class Call:
    """A callable to audit, with its arguments; the fields are those of ``audit``.

    ``second_kwargs`` are the keyword arguments of the second call, if they are others. ``make``
    makes callable and arguments anew in a child process, see ``jobs.Named``.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    second: Sequence[Any] | Callable[[], Sequence[Any]] | None = None
    second_kwargs: dict[str, Any] | None = None
    make: Callable[[], Any] | None = None


def audit(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    run: bool = True,
    second: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
    dynamic: bool | Literal["both"] = "both",
    mode: str | None = None,
    backend: str | None = None,
    grad: bool | None = None,
    inference_mode: bool | None = None,
    threads: int | None = None,
    until: Until = "code",
    min_bytes: int = MIN_BYTES,
) -> AuditReport:
    """Say what ``torch.compile`` does to the arguments that ``fn`` mutates.

    Args:
        fn: a function, a module, or what ``torch.compile`` made of one.
        args: its arguments, as a tuple or list. They are neither changed nor run through compiled
            code in this process.
        kwargs: its keyword arguments.
        run: also run compiled against eager, in child processes over guarded memory (CPU or GPU).
            Mutated tensors that hold one value everywhere are filled with random numbers there.
        second: arguments of a second call, with other sizes, or a function that makes them.
        dynamic: look at static shapes (False), ``dynamic=True`` (True), or both.
        mode: ``mode=`` of ``torch.compile``, if it is not the one that ``fn`` was compiled with.
        backend: name of the backend, likewise. Any but Inductor is run, and not looked into.
        grad: whether autograd records; by default as it is where ``audit`` is called.
        inference_mode: whether all happens in inference mode, likewise.
        threads: threads of the run that looks for races; by default as many as torch uses here.
        until: ``graph`` leaves out the generated code, and with it what a clone reads.
        min_bytes: copies of fewer bytes a call are no findings; they are counted.

    Returns:
        The report; a callable that cannot be audited gets one that says why, not an exception.

    Raises:
        TypeError: if ``args`` is no tuple or list, or ``kwargs`` no dict.
        ValueError: if there is no such mode; one line.
    """
    check_call(args, kwargs)
    modes = Modes(dynamic, mode, backend, grad, inference_mode, threads)
    call = Call(fn, args, kwargs or {}, second)
    return audit_all([call], run=run, modes=modes, until=until, min_bytes=min_bytes)[0]


def check_call(args: Any, kwargs: Any) -> None:
    """Refuse arguments that are not in the form of ``audit``.

    Raises:
        TypeError: in one line.
    """
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (dict, type(None))):
        raise TypeError(
            "give the callable's arguments as one tuple, and its keyword arguments as one dict: "
            "audit(fn, (x, y), {'scale': 2.0})"
        )


def audit_all(
    calls: Sequence[Call],
    *,
    run: bool = True,
    modes: Modes | None = None,
    until: Until = "code",
    workers: int = 2,
    min_bytes: int = MIN_BYTES,
    say: Callable[[str], None] = lambda _: None,
) -> list[AuditReport]:
    """Audit several callables; they share the child processes, whose start is half of the time.

    Args:
        calls: what to audit.
        run: as in ``audit``.
        modes: how the caller compiles and runs.
        until: as in ``audit``.
        workers: child processes at a time.
        min_bytes: as in ``audit``.
        say: is told what is about to be done, in one line each time.
    """
    modes = modes or Modes()
    with modes.entered():
        reports = _audit_all(calls, run, modes, until, workers, say)
    for report in reports:
        report.min_bytes = min_bytes
        conclude(report)
    return reports


def _audit_all(
    calls: Sequence[Call],
    run: bool,
    modes: Modes,
    until: Until,
    workers: int,
    say: Callable[[str], None],
) -> list[AuditReport]:
    reports = []
    for call in calls:
        start = time.perf_counter()
        say(f"compiling {_name(original(call.fn))}")
        report = AuditReport(
            callable=_name(original(call.fn)),
            torch=torch.__version__,
            device=_device(call),
            verdict="clean",
            sentence="",
            shapes=[_look(call, dynamic, until, modes) for dynamic in modes.shapes],
        )
        report.seconds = time.perf_counter() - start
        reports.append(report)
    if run:
        _run(calls, reports, modes, workers, say)
    return reports


def _run(
    calls: Sequence[Call],
    reports: Sequence[AuditReport],
    modes: Modes,
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Compare compiled and eager for every call that compiled, and file what came out."""
    jobs: list[tuple[AuditReport, Job]] = []
    for call, report in zip(calls, reports, strict=True):
        second = call.second() if callable(call.second) else call.second
        made = jobs_for(
            call.fn,
            call.args,
            call.kwargs,
            second=second,
            second_kwargs=call.second_kwargs,
            modes=modes,
        )
        jobs += [(report, replace(job, make=call.make)) for job in made]
        if jobs and _race_possible(report) and cores() > 1:
            jobs[-len(made)][1].machine = callers_machine(modes.threads)
    start = time.perf_counter()
    largest = sorted((job.memory() for _, job in jobs), reverse=True)[:workers]
    say(
        f"comparing compiled with eager, {len(largest)} at a time: "
        f"about {sum(largest) / 2**20:,.0f} MiB beside the processes themselves"
    )
    try:
        made_of_jobs = compare([job for _, job in jobs], workers)
    except OSError as error:
        how = surroundings(str(error)) or cause_line(error)
        made_of_jobs = [c for _, job in jobs for c in job.untested("raised", how)]
    comparisons = iter(made_of_jobs)
    for report, job in jobs:
        report.comparisons += [next(comparisons) for label in job.labels if label]
    for report in reports:
        _settle(report)
        if _race_possible(report) and cores() == 1 and report.comparisons:
            first = report.comparisons[0]
            first.note = "; ".join(filter(None, [first.note, ONE_CORE]))
    for report in {id(report): report for report, _ in jobs}.values():
        report.seconds += time.perf_counter() - start


def _race_possible(report: AuditReport) -> bool:
    """Whether threads may matter: only a loop that writes what others read can race."""
    return any(shapes.loops_write_inputs is not False for shapes in report.shapes)


def _look(call: Call, dynamic: bool | None, until: Until, modes: Modes) -> Shapes:
    """Compile under the lens; a failure of the lens is kept apart from one of the callable."""
    shapes = Shapes(label="dynamic=True" if dynamic else "static")
    settings = modes.settings(call.fn)
    if settings.backend is not None:
        name = getattr(settings.backend, "__name__", type(settings.backend).__name__)
        shapes.instrument = f"The lens looks into Inductor alone, and the backend is {name}."
        return shapes
    looked = functools.partial(capture, call.fn, *call.args, dynamic=dynamic, until=until)
    try:
        seen = looked(settings=settings, **call.kwargs)
    except UnknownTorch as error:
        shapes.instrument = f"The instrument failed: {error}."
        return shapes
    except Exception as error:
        if raised_here(error):
            shapes.instrument = _instrument(error)
        else:
            shapes.problem = _plain_problem(error)
        return shapes
    shapes.graphs, shapes.graph_break, shapes.seconds = (
        len(seen.graphs),
        seen.graph_break,
        seen.seconds,
    )
    if seen.missing:
        missing = ", ".join(seen.missing)
        shapes.instrument = f"The instrument does not know torch {torch.__version__}: {missing}."
    try:
        shapes.loops_write_inputs = _loops_write(seen.graphs)
        for number, graph in enumerate(seen.graphs):
            shapes.ops += ops_of(graph, number)
            shapes.aliases += aliases_of(graph)
            shapes.rewritten += _rewritten(graph)
    except Exception as error:
        shapes.instrument = _instrument(error)
    if not any(graph.post_grad_after_decomposition for graph in seen.graphs) and not seen.missing:
        shapes.problem = "It makes no graph: there is nothing in it to compile."
    return shapes


def _loops_write(graphs: Sequence[GraphCapture]) -> bool | None:
    """Whether loops of the generated code write into inputs; None if no code was generated."""
    if not graphs or any(graph.generated_code is None for graph in graphs):
        return None
    inputs = [{i.aot for i in graph.inputs} for graph in graphs]
    return any(
        kernel.into in given
        for graph, given in zip(graphs, inputs, strict=True)
        for kernel in graph.kernels
    )


def _rewritten(graph: GraphCapture) -> list[Rewritten]:
    """Mutated inputs that are rewritten through views, which no clone of an op shows."""
    return [
        Rewritten(
            input=t.input,
            cause=t.cause,
            reads=t.reads_bytes,
            writes=t.writes_bytes,
            changes=t.changed_bytes,
        )
        for t in traffic_of(graph)
        if t.cause == "scatter chain through views"
        and t.changed_bytes is not None
        and t.extra_bytes > 2 * t.changed_bytes
    ]


def _instrument(error: BaseException) -> str:
    return f"The instrument failed: {type(error).__name__}: {cause_line(error)}."


def _settle(report: AuditReport) -> None:
    """What compiles plainly in a child is no problem of the callable, whatever the lens met."""
    ran = {c.label for c in report.comparisons if c.result in ("same", "differs", "crashed")}
    for shapes in report.shapes:
        nothing = shapes.problem is not None and shapes.problem.startswith("It makes no graph")
        if shapes.problem and shapes.label in ran and not nothing:
            shapes.instrument = f"The instrument failed: {shapes.problem}"
            shapes.problem = None


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


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _device(call: Call) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ", ".join(sorted({t.device.type for t in tensors})) or "cpu"
