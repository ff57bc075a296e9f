"""Pictures of what the lens saw: the nodes that matter side by side, and the storage as a bar."""

from __future__ import annotations

import difflib
import html
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from IPython.display import Code
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import fx

from omni_kv.audits.findings import kernel_text, ops_of
from omni_kv.audits.report import Argument
from omni_kv.lens.decisions import target_name
from omni_kv.lens.graph import GraphCapture, Input
from omni_kv.publish.figures.pools import BLUE, DARK, GREEN, LIGHT, ORANGE, PINK, RED, SKY, STYLE

#: Ops that only pass a pool on, so that its way through the graph can be followed.
_PASS_ON = ("as_strided", "clone", "copy_", "getitem", "select", "slice", "alias")


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


def stage_lines(graph: GraphCapture, stage: str) -> list[str]:
    """The lines of one stage that deal with the mutated inputs, with the caller's names.

    Raises:
        KeyError: if there is no such stage.
    """
    nodes = graph.stages()[stage]
    mutated = {name for op in ops_of(graph) for a in op.arguments for name in _names(a)}
    inputs = {i.name: i for i in graph.inputs}
    names: dict[str, str] = {}
    for name in mutated:
        known = inputs.get(name)
        if known is not None:
            names[known.dynamo] = name
            names[known.aot or known.dynamo] = name
    names = {node: names[node] for node in names if not _is_merged(graph, names[node])} | {
        i.aot: "+".join(j.name for j in graph.inputs if j.aot == i.aot)
        for i in graph.inputs
        if i.merged and i.aot
    }
    follow = {n for n in nodes.nodes if n.op == "placeholder" and n.name in names}
    lines = []
    for node in nodes.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if not any(used in follow for used in node.all_input_nodes):
            continue
        if _passes_on(node) or _is_mutable_op(node):
            follow.add(node)
        else:
            continue
        lines.append(_line(node, follow, names))
    return lines


def _names(argument: Argument) -> list[str]:
    return argument.input.split(" + ") if argument.input else []


def _is_merged(graph: GraphCapture, name: str) -> bool:
    return any(i.merged for i in graph.inputs if i.name == name)


def _passes_on(node: fx.Node) -> bool:
    parts = target_name(node.target).split(".")
    return (parts[1] if parts[0] == "aten" else parts[0]) in _PASS_ON


def _is_mutable_op(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None) or getattr(
        getattr(node.target, "default", None), "_schema", None
    )
    mutable = schema is not None and schema.is_mutable
    return mutable or "functional" in target_name(node.target)


def _line(node: fx.Node, follow: set[fx.Node], names: dict[str, str]) -> str:
    """One node as a person would write it; arguments that are not on the pools' way are dots."""

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), torch.SymInt):
                return str(value.meta["val"])
            return names.get(value.name, value.name) if value in follow else "…"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(shown(v) for v in value)}]"
        return str(value)

    target = target_name(node.target)
    if node.target is operator.getitem:
        return f"{node.name} = {shown(node.args[0])}[{shown(node.args[1])}]"
    arguments = [shown(a) for a in node.args]
    keywords = {k: shown(v) for k, v in node.kwargs.items() if _tells(k, v, follow)}
    if target.startswith("aten."):
        call = f"{arguments[0]}.{target.split('.')[1]}({', '.join(arguments[1:])})"
        return call if target.startswith("aten.copy_") else f"{node.name} = {call}"
    parts = [*_shortened(arguments), *(f"{k}={v}" for k, v in keywords.items())]
    if len(keywords) < len(node.kwargs):
        parts.insert(len(_shortened(arguments)), "…")
    call = f"{node.name} = {target}({', '.join(parts)})"
    clones = node.meta.get("only_clone_these_tensors")
    return call if clones is None else f"{call}  # clone bases {list(clones)}"


def _tells(keyword: str, value: Any, follow: set[fx.Node]) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    on_the_way = any(isinstance(v, fx.Node) and v in follow for v in values)
    return on_the_way or keyword.startswith("_")


def _shortened(arguments: list[str]) -> list[str]:
    """Leave out repeated dots and plain numbers between the arguments that matter."""
    kept: list[str] = []
    for text in arguments:
        plain = text == "…" or re.fullmatch(r"None|-?[\d.]+(e-?\d+)?", text) is not None
        if not plain:
            kept.append(text)
        elif not kept or kept[-1] != "…":
            kept.append("…")
    return kept


def kernel_source(graph: GraphCapture, argument: Argument) -> Code:
    """The part of the generated kernel that makes the clone of an argument, to be displayed.

    For a CPU that is the loop around the load, in C++, without the casts; for a GPU, the function
    that Triton compiles. The line that loads from the argument is marked. Empty if there is no such
    kernel.
    """
    if argument.clone is None or not argument.clone.kernel or not graph.generated_code:
        return Code("")
    call, *loads = argument.clone.kernel
    lines = kernel_text(graph.generated_code, re.split(r"[.(]", call)[0])
    at = next(i for i, line in enumerate(lines) if line.strip() in loads)
    pointer = re.findall(r"\bin_ptr\d+\b", lines[at])[0]
    if call.startswith("triton"):
        start = lines.index("@triton.jit")
        body, comment, language = (
            [*lines[start:at], f"{lines[at]}  # <--", *lines[at + 1 :]],
            "#",
            "python",
        )
    else:
        body, comment, language = _loop_around(lines, at), "//", "c++"
    heading = f"{comment} {pointer} is {argument.input}, out_ptr the clone"
    return Code("\n".join([heading, *body]), language=language)


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
    cast = "static_cast<int64_t>("
    while cast in text:
        start = text.index(cast)
        open_at = start + len(cast)
        depth, end = 1, open_at
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = text[:start] + text[open_at : end - 1] + text[end:]
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
