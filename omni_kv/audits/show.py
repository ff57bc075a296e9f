"""A report for people: as text, and as HTML in Jupyter."""

from __future__ import annotations

import html
from pathlib import Path

from omni_kv.audits.report import Alias, Argument, AuditReport, Comparison, Finding, Run, Shapes

NOT_COMPARED = (
    "not compared: whether results share memory with each other, values inside objects that are no "
    "data"
)


def text(report: AuditReport, *, verbose: bool = False) -> str:
    """The headline, the findings and what was not told; with ``verbose`` all of the rest."""
    lines = [report.headline, *_finding_lines(report.found)]
    if verbose:
        for shapes in report.shapes:
            if shapes.problem != report.sentence:
                lines += _shapes_lines(shapes)
        for comparison in report.comparisons:
            lines += _comparison_lines(comparison)
    else:
        lines += [f"  {c.label}: {c.note}" for c in report.comparisons if c.note]
    if report.comparisons:
        lines.append(NOT_COMPARED)
    lines.append(f"torch {report.torch}, {report.device}, {report.seconds:.1f} s")
    return "\n".join(lines)


def _finding_lines(found: list[Finding]) -> list[str]:
    """The findings, and then once for each place, where it is and what to do."""
    lines = [f"  ! {finding.message}" for finding in found]
    cures = dict.fromkeys((finding.place, finding.advice) for finding in found)
    cured = {place for place, advice in cures if advice is not None}
    for place, advice in cures:
        where = f", at {shown(place)}" if place is not None else ""
        if advice is not None:
            lines.append(f"  what to do{where}: {advice}")
        elif place is not None and place not in cured:
            lines.append(f"  at {shown(place)}")
    return lines


def shown(place: str) -> str:
    """A ``file:line`` with its path from the working folder, if it lies below."""
    path = Path(place)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _shapes_lines(shapes: Shapes) -> list[str]:
    lines = [f"{shapes.label} ({shapes.graphs} graph{'s' * (shapes.graphs != 1)})"]
    if shapes.problem:
        lines.append(f"  {shapes.problem}")
    if shapes.instrument:
        lines.append(f"  {shapes.instrument}")
    if shapes.graph_break:
        lines.append(f"  graph break: {shapes.graph_break}")
    lines += [f"  {alias_sentence(alias)}" for alias in shapes.aliases]
    lines += [f"  {rewritten}" for rewritten in shapes.rewritten]
    for op in shapes.ops:
        place = f", at {shown(op.place)}" if op.place else ""
        lines.append(f"  {op.name}  [{op.kind}]{place}")
        for argument in op.arguments:
            lines += [f"    {line}" for line in _argument_lines(argument)]
    return lines


def _comparison_lines(comparison: Comparison) -> list[str]:
    lines = [f"compiled against eager, {comparison.label}: {comparison.result}"]
    if comparison.how:
        lines.append(f"  {comparison.how}")
    if comparison.note:
        lines.append(f"  {comparison.note}")
    for run in comparison.runs:
        lines.append(f"  {run.memory}: {run.result}{f', {run.how}' if run.how else ''}")
        lines += [f"    {difference}" for difference in run.differences]
    return lines


def alias_sentence(alias: Alias) -> str:
    """Say in one sentence how inputs that share a storage lie, and what AOTAutograd made of it."""
    names = ", ".join(alias.inputs)
    how = {True: "and overlap", False: "and do not overlap", None: "(overlap not decided)"}
    text = f"{names} share a storage {how[alias.overlap]}"
    return text + ("; AOTAutograd merged them into one synthetic base" if alias.merged else "")


def _argument_lines(argument: Argument) -> list[str]:
    source = f" (input {argument.input})" if argument.input not in (None, argument.name) else ""
    lines = [f"{argument.name}{source}: {argument.outcome}. {argument.why}"]
    if argument.decided_at:
        lines.append(f"  decided at {argument.decided_at}")
    if argument.clone is not None:
        lines.append(f"  clone: {argument.clone.extent()}")
        lines += [f"  kernel: {line}" for line in argument.clone.kernel]
    if argument.misled:
        lines.append(f"  WRONG ELEMENTS: {argument.shifted()}")
    if argument.advice:
        lines.append(f"  what to do: {argument.advice}")
    return lines


_COLOURS = {"clean": "#1a7f37", "findings": "#b35900", "could not run": "#57606a"}
_BAD = "#b42318"


def page(report: AuditReport) -> str:
    """The report as HTML: the verdict and the findings, then tables of what they rest on."""
    colour = _COLOURS[report.verdict]
    findings = "".join(f"<li>{html.escape(f)}</li>" for f in report.findings)
    parts = [
        f'<div><p><strong style="color:{colour}">{html.escape(report.verdict)}</strong> '
        f"<code>{html.escape(report.callable)}</code>: {html.escape(report.sentence)}</p>",
        f"<ul>{findings}</ul>" if findings else "",
    ]
    rows = []
    for shapes in report.shapes:
        for op in shapes.ops:
            for a in op.arguments:
                head, *details = _argument_lines(a)
                detail = "<br>".join(html.escape(line.strip()) for line in details)
                name = html.escape(head.partition(": ")[0])
                cells = [
                    html.escape(shapes.label),
                    f"{name}<br><small>{html.escape(op.name)}</small>",
                    _coloured(a.outcome, bad=a.outcome == "cloned" or a.misled),
                    f"{html.escape(a.why)}<br><small>{detail}</small>",
                ]
                rows.append(cells)
    if rows:
        parts.append(_table(["shapes", "argument", "outcome", "why"], rows))
    rows = []
    for comparison in report.comparisons:
        nothing = Run(memory="", result=comparison.result, how=comparison.how)
        for run in comparison.runs or [nothing]:
            texts = [run.how, *map(str, run.differences)]
            rows.append(
                [
                    html.escape(comparison.label),
                    html.escape(run.memory),
                    _coloured(run.result, bad=run.result != "same"),
                    "<br>".join(html.escape(text) for text in texts if text),
                ]
            )
    if rows:
        parts.append(_table(["compiled against eager", "memory", "result", "where"], rows))
    parts.append(f"<small>torch {html.escape(report.torch)}, {html.escape(report.device)}</small>")
    return "".join(parts) + "</div>"


def _coloured(text: str, *, bad: bool) -> str:
    shown = html.escape(text)
    return f'<strong style="color:{_BAD}">{shown}</strong>' if bad else shown


def _table(heads: list[str], rows: list[list[str]]) -> str:
    """A table whose cells hold HTML, with text to the left, where Jupyter would put it right."""
    style = "text-align:left;vertical-align:top"
    head = "".join(f'<th style="{style}">{html.escape(h)}</th>' for h in heads)
    body = ""
    for *cells, last in rows:
        tags = "".join(f'<td style="{style}">{cell}</td>' for cell in cells)
        # Names of kernels are long: only the last column may break within a word.
        body += f'<tr>{tags}<td style="{style};overflow-wrap:anywhere">{last}</td></tr>'
    return f"<table><tr>{head}</tr>{body}</table>"
