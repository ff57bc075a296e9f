"""What an audit found, as records that print as text, show as HTML in Jupyter and save as JSON."""

from __future__ import annotations

import html
from typing import Literal

from pydantic import BaseModel, Field

Verdict = Literal["clean", "findings", "could not run"]
Result = Literal["same", "differs", "crashed", "raised", "killed", "timed out", "not run"]


class Clone(BaseModel):
    """A copy that the compiled code makes of a mutated argument, on every call.

    ``first`` and ``last`` say which elements the kernel reads, counted from the argument's own
    pointer; None if code was not generated or the kernel was not found in it. The storage around
    the argument spans ``storage_first`` to ``storage_last``.
    """

    elements: int
    bytes: int
    bytes_per_element: int
    argument_elements: int | None = None
    storage_first: int | None = None
    storage_last: int | None = None
    first: int | None = None
    last: int | None = None
    kernel: list[str] = Field(default_factory=list)

    @property
    def outside_before(self) -> int | None:
        """Elements read in front of the storage."""
        if self.first is None or self.storage_first is None or self.last is None:
            return None
        return max(0, min(self.storage_first, self.last + 1) - self.first)

    @property
    def outside_after(self) -> int | None:
        """Elements read behind the storage."""
        if self.first is None or self.storage_last is None or self.last is None:
            return None
        return max(0, self.last - max(self.storage_last, self.first - 1))

    @property
    def reads_outside(self) -> bool | None:
        """Whether the kernel reads outside the argument's storage; None if it is not known."""
        if self.outside_before is None or self.outside_after is None:
            return None
        return self.outside_before + self.outside_after > 0

    def extent(self) -> str:
        """Say in one sentence what the clone reads."""
        size = f"{self.elements:,} elements, {self.bytes:,} bytes a call"
        if self.argument_elements is not None:
            size += f"; the argument itself has {self.argument_elements:,}"
        if self.first is None or self.last is None:
            return size
        text = f"{size}; reads elements {self.first:,} to {self.last:,} from its pointer"
        if self.storage_first is None:
            return text
        text += f", its storage holds {self.storage_first:,} to {self.storage_last:,}"
        sides = [(self.outside_before, "in front of"), (self.outside_after, "behind")]
        outside = [
            f"{n:,} elements ({n * self.bytes_per_element:,} bytes) {side} the storage"
            for n, side in sides
            if n
        ]
        return text + (": READS OUTSIDE, " + " and ".join(outside) if outside else ": inside")


class Argument(BaseModel):
    """One mutated argument of one op.

    ``outcome`` is ``reinplaced`` (written in place), ``cloned`` (a copy is written) or
    ``written back`` (an ATen result is stored into the input, without a copy of the input).
    ``passed_offset`` is where the generated code lets the op's view begin, ``graph_offset`` where
    the graph says; both count elements from the buffer's pointer. ``shift`` is by how many elements
    what the op is handed lies off: it counts in where the clone began to read, so that two errors
    may cancel. ``sees`` says what lies there. They are None if not compared.
    """

    name: str
    input: str | None
    outcome: Literal["reinplaced", "cloned", "written back"]
    cause: str
    why: str
    decided_at: str | None = None
    clone: Clone | None = None
    passed_offset: int | None = None
    graph_offset: int | None = None
    shift: int | None = None
    sees: str | None = None
    advice: str | None = None

    @property
    def misled(self) -> bool:
        """Whether the generated code hands the op other elements than the argument's."""
        return bool(self.shift)

    def shifted(self) -> str:
        """Say where the elements lie that the op is handed."""
        side = "behind" if (self.shift or 0) > 0 else "in front of"
        text = f"the op is handed elements that lie {abs(self.shift or 0):,} {side} its own"
        return text + (f", {self.sees}" if self.sees else "")


class Op(BaseModel):
    """One call of a mutable op in a compiled graph."""

    name: str
    kind: str
    graph: int
    arguments: list[Argument]


class Alias(BaseModel):
    """Inputs that share a storage; ``overlap`` is None where it was not decided."""

    inputs: list[str]
    overlap: bool | None
    merged: bool


class Difference(BaseModel):
    """Where a compiled call and an eager call on equal inputs disagree."""

    tensor: str
    elements: int
    of: int
    first: list[int]
    equal_to: dict[str, int] = Field(default_factory=dict)
    largest: float | None = None

    def __str__(self) -> str:
        text = f"{self.tensor}: {self.elements:,} of {self.of:,} elements differ, the first at "
        text += str(self.first)
        if self.largest is not None:
            text += f", by up to {self.largest:.3g}"
        for origin, count in self.equal_to.items():
            text += f"; {count:,} of them equal {origin}"
        return text


class Run(BaseModel):
    """One compiled call in memory whose surroundings are known."""

    memory: str
    result: Result
    how: str = ""
    differences: list[Difference] = Field(default_factory=list)


class Comparison(BaseModel):
    """Compiled against eager, for one way to compile, in each kind of memory.

    ``changed`` names what the eager call changed. ``eager_works`` says that eager returns where
    compiled raises. ``note`` says what could not be told.
    """

    label: str
    result: Result
    how: str = ""
    eager_works: bool = False
    changed: list[str] = Field(default_factory=list)
    note: str = ""
    runs: list[Run] = Field(default_factory=list)


class Rewritten(BaseModel):
    """A mutated input that one call reads and writes more of than it changes.

    ``cause`` is ``clone by the pass``, ``scatter chain through views`` or ``copy back of a computed
    value``; the bytes are those of the input and of buffers made from it.
    """

    input: str
    cause: str
    reads: int
    writes: int
    changes: int

    def __str__(self) -> str:
        return (
            f"{self.input} is rewritten: reads {self.reads:,} bytes and writes {self.writes:,} to "
            f"change {self.changes:,} ({self.cause})"
        )


class Shapes(BaseModel):
    """What the compiler did with one setting of ``dynamic=``.

    ``problem`` says why it does not compile. ``instrument`` says what the lens could not look at:
    a failure of the instrument and none of the callable. ``loops_write_inputs`` says whether loops
    of the generated code write into the caller's tensors; None if it is not known.
    """

    label: str
    graphs: int = 0
    graph_break: str | None = None
    problem: str | None = None
    instrument: str | None = None
    loops_write_inputs: bool | None = None
    rewritten: list[Rewritten] = Field(default_factory=list)
    seconds: float = 0.0
    ops: list[Op] = Field(default_factory=list)
    aliases: list[Alias] = Field(default_factory=list)


class AuditReport(BaseModel):
    """The outcome of ``omni_kv.audit``.

    ``left_quiet`` counts the copies of less than ``min_bytes`` bytes a call, which are no findings.
    """

    callable: str
    torch: str
    device: str
    verdict: Verdict
    sentence: str
    findings: list[str] = Field(default_factory=list)
    min_bytes: int = 0
    left_quiet: int = 0
    shapes: list[Shapes] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def clones(self) -> list[Argument]:
        """Every cloned argument, in the order of shapes, graphs and ops."""
        arguments = [a for s in self.shapes for op in s.ops for a in op.arguments]
        return [a for a in arguments if a.outcome == "cloned"]

    @property
    def reads_outside(self) -> bool:
        """Whether any clone reads outside the storage of its argument."""
        return any(a.clone is not None and a.clone.reads_outside for a in self.clones)

    def comparison(self, label: str) -> Comparison:
        """The comparison with this label.

        Raises:
            KeyError: if none was made.
        """
        for comparison in self.comparisons:
            if comparison.label == label:
                return comparison
        raise KeyError(label)

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return _html(self)


NOT_COMPARED = (
    "not compared: whether results share memory with each other, values inside objects that are no "
    "data"
)


def _text(report: AuditReport) -> list[str]:
    lines = [
        f"audit of {report.callable}: {report.verdict}",
        f"  {report.sentence}",
        *(f"  ! {finding}" for finding in report.findings),
    ]
    for shapes in report.shapes:
        if shapes.problem == report.sentence:
            continue
        lines.append(f"{shapes.label} ({shapes.graphs} graph{'s' * (shapes.graphs != 1)})")
        if shapes.problem:
            lines.append(f"  {shapes.problem}")
        if shapes.instrument:
            lines.append(f"  {shapes.instrument}")
        if shapes.graph_break:
            lines.append(f"  graph break: {shapes.graph_break}")
        lines += [f"  {alias_sentence(alias)}" for alias in shapes.aliases]
        lines += [f"  {rewritten}" for rewritten in shapes.rewritten]
        for op in shapes.ops:
            lines.append(f"  {op.name}  [{op.kind}]")
            for argument in op.arguments:
                lines += [f"    {line}" for line in _argument_lines(argument)]
    for comparison in report.comparisons:
        lines.append(f"compiled against eager, {comparison.label}: {comparison.result}")
        if comparison.how:
            lines.append(f"  {comparison.how}")
        if comparison.note:
            lines.append(f"  {comparison.note}")
        for run in comparison.runs:
            lines.append(f"  {run.memory}: {run.result}{f', {run.how}' if run.how else ''}")
            lines += [f"    {difference}" for difference in run.differences]
    if report.comparisons:
        lines.append(NOT_COMPARED)
    lines.append(f"torch {report.torch}, {report.device}, {report.seconds:.1f} s")
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


def _html(report: AuditReport) -> str:
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
