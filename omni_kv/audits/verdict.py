"""The verdict of an audit: findings first, then what could not be looked at, then a sentence."""

from __future__ import annotations

from omni_kv.audits.report import Argument, AuditReport, Clone, Comparison, Rewritten, Shapes

#: Results of a comparison that say nothing about the callable's values.
FAILED = ("raised", "killed", "timed out")


def conclude(report: AuditReport) -> None:
    """Gather the findings of a report, and say its verdict in one sentence."""
    report.findings = _findings(report)
    report.left_quiet = sum(_small(copy, report) for copy in _copies(report))
    obstacle = _obstacle(report)
    if report.findings:
        count = len(report.findings)
        report.verdict, report.sentence = "findings", f"{count} finding{'s' * (count != 1)}."
    elif obstacle:
        report.verdict, report.sentence = "could not run", obstacle
        return
    else:
        report.verdict, report.sentence = "clean", _praise(report)
    if report.left_quiet:
        report.sentence += f" Copies of less than {report.min_bytes:,} bytes: {report.left_quiet}."
    report.sentence += _compared(report)


def _findings(report: AuditReport) -> list[str]:
    found = [text for shapes in report.shapes for text in _of_shapes(shapes, report)]
    found += [text for comparison in report.comparisons for text in _of_comparison(comparison)]
    told = {c.label for c in report.comparisons if c.eager_works}
    problems = [s for s in report.shapes if s.problem and s.label not in told]
    if len(problems) < len(report.shapes):
        # Some of it compiles: what does not is a finding about the rest.
        found += [f"{shapes.label}: {shapes.problem}" for shapes in problems]
    if any(c.result == "same" for c in report.comparisons):
        found += [
            f"{c.label}: {c.how}"
            for c in report.comparisons
            if c.result in ("raised", "timed out") and not c.eager_works
        ]
    return list(dict.fromkeys(found + _unseen(report)))


def _copies(report: AuditReport) -> list[Clone | Rewritten]:
    """What is copied on every call."""
    clones = [a.clone for a in report.clones if a.clone is not None]
    return [*clones, *(rewritten for s in report.shapes for rewritten in s.rewritten)]


def _small(copy: Clone | Rewritten, report: AuditReport) -> bool:
    size = copy.bytes if isinstance(copy, Clone) else max(copy.reads, copy.writes)
    return size < report.min_bytes


def _of_shapes(shapes: Shapes, report: AuditReport) -> list[str]:
    found = []
    for op in shapes.ops:
        for a in op.arguments:
            where = f"{shapes.label}: {op.name}, {a.name}"
            found += [where + text for text in _of_argument(a, report)]
    large = [rewritten for rewritten in shapes.rewritten if not _small(rewritten, report)]
    return found + [f"{shapes.label}: {rewritten}" for rewritten in large]


def _of_argument(a: Argument, report: AuditReport) -> list[str]:
    found = []
    if a.outcome == "cloned" and not (a.clone is not None and _small(a.clone, report)):
        size = f", {a.clone.bytes:,} bytes a call" if a.clone is not None else ""
        found.append(f" is cloned{size} ({a.cause})")
    if a.clone is not None and a.clone.reads_outside:
        outside = (a.clone.outside_before or 0) + (a.clone.outside_after or 0)
        found.append(f": the clone reads {outside:,} elements outside the storage")
    if a.misled:
        found.append(f": {a.shifted()}")
    return found


def _of_comparison(comparison: Comparison) -> list[str]:
    if comparison.eager_works:
        return [f"{comparison.label}: {comparison.how}"]
    if comparison.result not in ("differs", "crashed"):
        return []
    how = f" ({comparison.how})" if comparison.how else ""
    return [f"{comparison.label}: compiled {comparison.result}{how}"]


def _unseen(report: AuditReport) -> list[str]:
    """Inputs that the eager call changes though no op in any graph says that it writes."""
    if _mutated(report) or not _looked(report):
        return []
    changed = dict.fromkeys(name for c in report.comparisons for name in c.changed)
    if not changed:
        return []
    return [
        f"the eager call changes {', '.join(changed)}, and no op in the graph says that it writes "
        "there: an op writes to an argument that its schema does not name, or state is made in the "
        "first call"
    ]


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
