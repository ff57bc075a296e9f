"""The verdict of an audit: findings first, then what could not be looked at, then a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from omni_kv.audits.report import (
    Argument,
    AuditReport,
    Clone,
    Comparison,
    Finding,
    Kind,
    Rewritten,
    Shapes,
)
from omni_kv.audits.rules import ORDER

#: Results of a comparison that say nothing about the callable's values.
FAILED = ("raised", "killed", "timed out")
#: What to do about an input that is rewritten, where that is known.
REWRITTEN_ADVICE = {
    "scatter chain through views": (
        "write into tensors of their own, not into views that the compiled code takes of one tensor"
    ),
}


def conclude(report: AuditReport) -> None:
    """Gather the findings of a report, and say its verdict in one sentence."""
    report.found = _found(report)
    report.left_quiet = sum(_small(copy, report) for copy in _copies(report))
    obstacle = _obstacle(report)
    if report.found:
        count = len(report.found)
        report.verdict, report.sentence = "findings", f"{count} finding{'s' * (count != 1)}."
    elif obstacle:
        report.verdict, report.sentence = "could not run", obstacle
        return
    else:
        report.verdict, report.sentence = "clean", _praise(report)
    if report.left_quiet:
        report.sentence += f" Copies of less than {report.min_bytes:,} bytes: {report.left_quiet}."
    report.sentence += _compared(report)


def _found(report: AuditReport) -> list[Finding]:
    """The findings, the worst first; those that say the same are one."""
    found = [finding for shapes in report.shapes for finding in _of_shapes(shapes, report)]
    for comparison in report.comparisons:
        found += _of_comparison(comparison, report.shapes)
    told = {c.label for c in report.comparisons if c.eager_works}
    problems = [s for s in report.shapes if s.problem and s.label not in told]
    if len(problems) < len(report.shapes):
        # Some of it compiles: what does not is a finding about the rest.
        found += [_told("does-not-compile", s.label, str(s.problem)) for s in problems]
    if any(c.result == "same" for c in report.comparisons):
        found += [
            _told("could-not-compare", c.label, c.how)
            for c in report.comparisons
            if c.result in ("raised", "timed out") and not c.eager_works
        ]
    found += _unseen(report)
    distinct: dict[str, Finding] = {}
    for finding in found:
        distinct.setdefault(finding.message, finding)
    return sorted(distinct.values(), key=lambda finding: ORDER.index(finding.kind))


def _told(kind: Kind, label: str, what: str, place: str | None = None) -> Finding:
    return Finding(kind=kind, label=label, message=f"{label}: {what}", place=place)


def _copies(report: AuditReport) -> list[Clone | Rewritten]:
    """What is copied on every call."""
    clones = [a.clone for a in report.clones if a.clone is not None]
    return [*clones, *(rewritten for s in report.shapes for rewritten in s.rewritten)]


def _small(copy: Clone | Rewritten, report: AuditReport) -> bool:
    size = copy.bytes if isinstance(copy, Clone) else max(copy.reads, copy.writes)
    return size < report.min_bytes


def _of_shapes(shapes: Shapes, report: AuditReport) -> list[Finding]:
    found = []
    for op in shapes.ops:
        for argument in op.arguments:
            for kind, what in _of_argument(argument, report):
                finding = _told(kind, shapes.label, f"{op.name}, {argument.name}{what}", op.place)
                finding.op, finding.argument = op.name, argument.name
                finding.advice = argument.advice
                if argument.clone is not None:
                    finding.bytes = argument.clone.bytes
                found.append(finding)
    for rewritten in shapes.rewritten:
        if _small(rewritten, report):
            continue
        place = _place_of(rewritten.input, [shapes])
        finding = _told("input-rewritten", shapes.label, str(rewritten), place)
        finding.argument, finding.bytes = rewritten.input, rewritten.reads + rewritten.writes
        finding.advice = REWRITTEN_ADVICE.get(rewritten.cause)
        found.append(finding)
    return found


def _of_argument(a: Argument, report: AuditReport) -> list[tuple[Kind, str]]:
    found: list[tuple[Kind, str]] = []
    if a.outcome == "cloned" and not (a.clone is not None and _small(a.clone, report)):
        size = f", {a.clone.bytes:,} bytes a call" if a.clone is not None else ""
        found.append(("argument-cloned", f" is cloned{size} ({a.cause})"))
    if a.clone is not None and a.clone.reads_outside:
        outside = (a.clone.outside_before or 0) + (a.clone.outside_after or 0)
        what = f": the clone reads {outside:,} elements outside the storage"
        found.append(("clone-reads-outside", what))
    if a.misled:
        found.append(("wrong-elements", f": {a.shifted()}"))
    return found


def _of_comparison(comparison: Comparison, looked_at: Sequence[Shapes]) -> list[Finding]:
    if comparison.eager_works:
        return [_told("compiled-raises", comparison.label, comparison.how)]
    if comparison.result not in ("differs", "crashed"):
        return []
    kind: Kind = "compiled-differs" if comparison.result == "differs" else "compiled-crashed"
    how = f" ({comparison.how})" if comparison.how else ""
    what = f"compiled {comparison.result}{how}"
    differences = [d for run in comparison.runs for d in run.differences]
    if not differences:
        return [_told(kind, comparison.label, what)]
    place = _place_of(differences[0].tensor, looked_at)
    return [_told(kind, comparison.label, f"{what}; {differences[0]}", place)]


def _place_of(tensor: str, looked_at: Sequence[Shapes]) -> str | None:
    """The caller's line that writes an input last, if an op is known to write it."""
    places = [
        op.place
        for shapes in looked_at
        for op in shapes.ops
        for argument in op.arguments
        if argument.input == tensor and op.place
    ]
    return places[-1] if places else None


def _unseen(report: AuditReport) -> list[Finding]:
    """Inputs that the eager call changes though no op in any graph says that it writes."""
    if _mutated(report) or not _looked(report):
        return []
    changed = dict.fromkeys(name for c in report.comparisons for name in c.changed)
    if not changed:
        return []
    message = (
        f"the eager call changes {', '.join(changed)}, and no op in the graph says that it writes "
        "there: an op writes to an argument that its schema does not name, or state is made in the "
        "first call"
    )
    return [Finding(kind="undeclared-write", message=message)]


def _obstacle(report: AuditReport) -> str:
    """Why nothing can be said, in one sentence; empty if something can."""
    for shapes in report.shapes:
        if shapes.problem:
            return shapes.problem
    for shapes in report.shapes:
        if shapes.instrument:
            ran = " What was run showed no fault." if report.comparisons else ""
            return shapes.instrument + ran
    broken = next((s.graph_break for s in report.shapes if s.graph_break), None)
    if broken:
        return f"It breaks the graph, and what follows was not looked at: {broken}"
    failed = next((c for c in report.comparisons if c.result in FAILED), None)
    return f"Compiled and eager could not be compared: {failed.how}" if failed else ""


def _praise(report: AuditReport) -> str:
    if not _mutated(report):
        return "It mutates nothing: there is nothing to clone."
    outcomes = {a.outcome for s in report.shapes for op in s.ops for a in op.arguments}
    if "written back" in outcomes and not report.left_quiet:
        return "No mutated argument is cloned."
    if report.left_quiet:
        return "Every mutated argument is written in place, or is small."
    return "Every mutated argument is written in place."


def _compared(report: AuditReport) -> str:
    apart = next((c.how for c in report.comparisons if c.result == "not run"), None)
    if apart:
        return f" Compiled and eager were not compared: {apart}."
    agree = report.comparisons and all(c.result == "same" for c in report.comparisons)
    return " Compiled and eager agree." if agree else ""


def _mutated(report: AuditReport) -> int:
    return sum(len(op.arguments) for shapes in report.shapes for op in shapes.ops)


def _looked(report: AuditReport) -> bool:
    return all(not (s.problem or s.instrument or s.graph_break) for s in report.shapes)
