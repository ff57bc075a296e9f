"""Pictures of what the lens saw: the nodes that matter side by side, and the storage as a bar."""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from IPython.display import Code
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from omni_kv.audits.findings import ops_of
from omni_kv.audits.report import Argument
from omni_kv.lens.graph import GraphCapture, Input
from omni_kv.lens.printing import stage_lines
from omni_kv.publish.figures.pools import BLUE, DARK, GREEN, LIGHT, ORANGE, PINK, RED, SKY, STYLE


@dataclass(frozen=True)
class SideBySide:
    """The same stages of two compilations, a row a stage; shows as a table in Jupyter."""

    titles: tuple[str, str]
    stages: dict[str, tuple[list[str], list[str]]]

    def rows(self) -> Iterator[tuple[str, list[tuple[bool, str]], list[tuple[bool, str]]]]:
        """Each stage with its lines, and whether a line has no equal on the other side."""
        for stage, (left, right) in self.stages.items():
            same = difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
            on_left = {block.a + i for block in same for i in range(block.size)}
            on_right = {block.b + i for block in same for i in range(block.size)}
            yield (
                stage,
                [(i not in on_left, line) for i, line in enumerate(left)],
                [(i not in on_right, line) for i, line in enumerate(right)],
            )

    def __str__(self) -> str:
        lines = []
        for stage, *sides in self.rows():
            lines.append(stage)
            for title, side in zip(self.titles, sides, strict=True):
                lines.append(f"  {title}")
                lines += [f"  {'>' if only else ' '} {line}" for only, line in side]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = 'style="text-align:left;vertical-align:top"'
        head = "".join(f"<th {cell}>{html.escape(t)}</th>" for t in self.titles)
        rows = [f"<tr>{head}</tr>"]
        for stage, left, right in self.rows():
            rows.append(f'<tr><th colspan="2" {cell}>{html.escape(stage)}</th></tr>')
            cells = "".join(f"<td {cell}>{_marked(side)}</td>" for side in (left, right))
            rows.append(f"<tr>{cells}</tr>")
        return f"<table>{''.join(rows)}</table>"


def _marked(lines: list[tuple[bool, str]]) -> str:
    """Lines of code as HTML; those that the other side lacks are bold and have a bar in front."""
    shown = []
    for only, line in lines:
        text = html.escape(line)
        if only:
            style = f"border-left:4px solid {ORANGE};padding-left:4px;font-weight:bold"
            text = f'<span style="{style}">{text}</span>'
        shown.append(text)
    style = "white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-family:monospace"
    return f'<pre style="{style}">{"<br>".join(shown)}</pre>'


def side_by_side(
    left: GraphCapture, right: GraphCapture, titles: tuple[str, str], *stages: str
) -> SideBySide:
    """Put stages of two compilations next to each other, reduced to the way of the mutated pools.

    Args:
        left: one graph, as the lens kept it.
        right: the other.
        titles: what to call them.
        stages: names of stages as in ``GraphCapture.stages``; all that both have if none is named.
    """
    names = stages or tuple(name for name in left.stages() if name in right.stages())
    return SideBySide(
        titles, {name: (stage_lines(left, name), stage_lines(right, name)) for name in names}
    )


def kernel_source(graph: GraphCapture, argument: Argument) -> Code:
    """The part of the generated kernel that makes the clone of an argument, to be displayed.

    For a CPU that is the loop around the load, in C++, without the casts; for a GPU, the function
    that Triton compiles. The line that loads from the argument is marked. Empty if there is no such
    kernel.
    """
    clone, code = argument.clone, graph.generated
    if clone is None or not clone.kernel or code is None:
        return Code("")
    call, *loads = clone.kernel
    kernel = code.kernels.get(re.split(r"[.(]", call)[0])
    lines = list(kernel.lines) if kernel is not None else []
    at = next((i for i, line in enumerate(lines) if line.strip() in loads), None)
    if at is None:
        return Code("")
    pointer = "".join(re.findall(r"\bin_ptr\d+\b", lines[at])[:1])
    triton = next((i for i, line in enumerate(lines) if line.startswith("@triton.jit")), None)
    if triton is not None:
        marked = [*lines[triton:at], f"{lines[at]}  # <--", *lines[at + 1 :]]
        return Code(
            "\n".join([f"# {pointer} is {argument.input}, out_ptr the clone", *marked]),
            language="python",
        )
    loop = _loop_around(lines, at)
    return Code(
        "\n".join([f"// {pointer} is {argument.input}, out_ptr the clone", *loop]), language="c++"
    )


def _loop_around(lines: list[str], at: int) -> list[str]:
    """The loops that enclose a line, and the statements that stand beside it."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    loops: list[str] = []
    limit = indent(lines[at])
    for line in reversed(lines[:at]):
        if line.lstrip().startswith("for(") and indent(line) < limit:
            limit = indent(line)
            loops.insert(0, line.strip())
    beside = [f"{lines[at].strip()}    // <--"]
    for line in lines[at + 1 :]:
        if line.strip() == "}":
            break
        beside.append(line.strip())
    depth = [*loops, *beside]
    return ["    " * min(i, len(loops)) + _without_casts(text) for i, text in enumerate(depth)]


def _without_casts(text: str) -> str:
    """C++ without ``static_cast<int64_t>(...)``: what stands in the parentheses stays."""
    before, cast, rest = text.partition("static_cast<int64_t>(")
    if not cast:
        return text
    depth = 1
    for end, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return before + _without_casts(rest[:end] + rest[end + 1 :])
    return text


def storage_bar(graphs: Mapping[str, GraphCapture]) -> Figure:
    """Draw the storage, the inputs in it, and what each compilation reads and hands to the op.

    One bar for the storage, then two for each compilation whose op had an argument cloned: the
    elements that the clone reads, and those that the op is handed as that argument.

    Args:
        graphs: compilations by label, of the same inputs.
    """
    found = [(label, graph, a) for label, graph in graphs.items() if (a := _cloned(graph))]
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 1.5 + 0.62 * (1 + 2 * len(found))))
        if not found:
            ax.text(0.5, 0.5, "nothing is cloned", ha="center", va="center")
            ax.set_axis_off()
            return fig
        _, first, argument = found[0]
        own = next(i for i in first.inputs if i.name == argument.input)
        inside = [i for i in first.inputs if i.storage_id == own.storage_id]
        rows = [f"storage ({own.storage:,} elements)"]
        owners = [(i, color) for i, color in zip(inside, (BLUE, SKY, GREEN, PINK), strict=False)]
        _elements(ax, 0, 0, own.storage, owners, own.storage, named=True)
        lowest, highest = 0, own.storage
        for label, _, a in found:
            begin, count = _read_of(a, own)
            handed = own.offset + (a.shift or 0)
            rows += [f"clone reads, {label}", f"op is handed, {label}"]
            _elements(ax, len(rows) - 2, begin, count, owners, own.storage)
            _elements(ax, len(rows) - 1, handed, own.span, owners, own.storage)
            lowest = min(lowest, begin, handed)
            highest = max(highest, begin + count, handed + own.span)
        ax.axvline(own.offset, color=DARK, linestyle=":", zorder=3)
        ax.annotate(f" pointer of {own.name}", (own.offset, -0.75), va="bottom", color=DARK)
        margin = 0.03 * (highest - lowest)
        ax.set(xlim=(lowest - margin, highest + margin), ylim=(len(rows) - 0.4, -0.85))
        ax.set_yticks(range(len(rows)), rows)
        ax.set_xlabel("element of the storage")
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        handles = [Patch(facecolor=c, edgecolor=DARK, label=i.name) for i, c in owners]
        if lowest < 0 or highest > own.storage:
            outside = Patch(facecolor=RED, hatch="///", edgecolor="w", label="outside the storage")
            handles.append(outside)
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
        fig.suptitle(_finding(found), x=0.01, ha="left", weight="bold", size=11)
    return fig


def _cloned(graph: GraphCapture) -> Argument | None:
    arguments = [a for op in ops_of(graph) for a in op.arguments]
    return next((a for a in arguments if a.clone is not None and a.clone.first is not None), None)


def _read_of(argument: Argument, own: Input) -> tuple[int, int]:
    clone = argument.clone
    if clone is None or clone.first is None or clone.last is None:
        return own.offset, 0
    return own.offset + clone.first, clone.last - clone.first + 1


def _elements(
    ax: Any,
    row: int,
    begin: int,
    count: int,
    owners: list[tuple[Input, str]],
    storage: int,
    named: bool = False,
) -> None:
    """One bar over elements of a storage: each owner's in its colour, those outside hatched."""
    end = begin + count
    parts = [(max(begin, 0), min(end, storage), LIGHT, "", "")]
    for one, color in owners:
        reach = (max(begin, one.offset), min(end, one.offset + one.span))
        parts.append((*reach, color, "", one.name if named else ""))
    parts += [(begin, min(end, 0), RED, "///", ""), (max(begin, storage), end, RED, "///", "")]
    for start, stop, color, hatch, name in parts:
        if stop > start:
            edge = "w" if hatch else DARK
            box = Rectangle(
                (start, row - 0.3), stop - start, 0.6, facecolor=color, hatch=hatch, edgecolor=edge
            )
            ax.add_patch(box)
            ink = "w" if color == BLUE else DARK
            ax.text((start + stop) / 2, row, name, ha="center", va="center", color=ink)


def _finding(found: list[tuple[str, GraphCapture, Argument]]) -> str:
    """What the bars show, in one line."""
    outside = [label for label, _, a in found if a.clone is not None and a.clone.reads_outside]
    misled = [f"{label}: {a.sees}" for label, _, a in found if a.misled and a.sees]
    name = found[0][2].name
    if outside:
        return f"The clone of {name} reads outside the storage ({', '.join(outside)})"
    if misled:
        return f"As {name} the op gets other elements ({'; '.join(misled)})"
    return f"The clone of {name} copies the whole storage"
