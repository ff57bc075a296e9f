"""The road of one call through torch.compile, from a real compilation, as stops and as a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import fx

from omni_kv.lens.capture import Capture
from omni_kv.lens.clones import clones_of, mutated_inputs
from omni_kv.lens.generated import Call
from omni_kv.lens.graph import GraphCapture
from omni_kv.lens.printing import shortened, stage_lines
from omni_kv.publish.figures.pools import BLUE, DARK, LIGHT, RED, STYLE
from omni_kv.publish.figures.svg import describe

OP = "ar_diffusion_paged_write_attn"


@dataclass(frozen=True)
class Stop:
    """One stage of the compiler.

    Attributes:
        name: as PyTorch names it.
        does: what it does, in a few words.
        size: how much came out of it.
        lines: what came out, as far as it concerns the op.
        marked: whether the copy is decided or made here.
        notebooks: numbers of the notebooks that look closer.
        source: where the stage is in PyTorch.
    """

    name: str
    does: str
    size: str
    lines: tuple[str, ...]
    marked: bool
    notebooks: tuple[str, ...]
    source: str


RUN = Stop(
    "The run",
    "a C++ compiler or Triton makes machine code; Triton first times several versions",
    "every call",
    ("guards are checked; then the generated code is called with your tensors",),
    False,
    ("02",),
    "torch/_inductor/runtime/triton_heuristics.py",
)


def road(capture: Capture, python: str) -> list[Stop]:
    """The stops of a captured compilation of one layer.

    Args:
        capture: from ``omni_kv.lens.capture.capture(..., until="code")``.
        python: the line of Python that calls the op.
    """
    graph = capture.graphs[0]
    code = graph.generated_code or ""
    turned_down = [d for d in graph.decisions if not d.reinplaced]
    return [
        Stop("Python", "what you wrote", "one call", (python,), False, ("01",), "your own file"),
        Stop(
            "Dynamo",
            "runs your bytecode once and notes the tensor operations in a graph",
            _count(graph.dynamo_graph),
            _shown(graph, "Dynamo graph"),
            False,
            ("03",),
            "torch/_dynamo/convert_frame.py",
        ),
        Stop(
            "AOTAutograd",
            "functionalizes: nothing is mutated until the copies at the end",
            _count(graph.aot_forward_graph),
            _shown(graph, "AOT forward graph"),
            False,
            ("03",),
            "torch/_functorch/_aot_autograd/graph_capture.py",
        ),
        Stop(
            "Inductor: reinplacing",
            "asks of each mutated tensor whether it can be written in place after all",
            f"{len(graph.decisions)} decisions",
            tuple(_decision(graph, d) for d in graph.decisions),
            bool(turned_down),
            ("03", "04"),
            "torch/_inductor/fx_passes/reinplace.py",
        ),
        Stop(
            "Inductor: decomposition",
            "gives the op its arguments back, and a clone of each that was turned down",
            _count(graph.post_grad_after_decomposition),
            _shown(graph, "post-grad after decomposition"),
            bool(clones(graph)),
            ("03", "05"),
            "torch/_inductor/fx_passes/post_grad.py",
        ),
        Stop(
            "Inductor: code generation",
            "fuses what is left into loops and writes them as C++ or Triton",
            f"{len(graph.kernels)} loops, {len(code.splitlines())} lines",
            _generated(graph),
            bool(clones(graph)),
            ("03", "05"),
            "torch/_inductor/graph.py, torch/_inductor/codegen/",
        ),
        RUN,
    ]


def clones(graph: GraphCapture) -> dict[str, int]:
    """The pools that are cloned in the compiled graph, each with the elements of its clone."""
    return {c.source.name: c.elements for c in clones_of(graph) if c.source is not None}


def draw(stops: Sequence[Stop]) -> Figure:
    """Draw the road: one box a stop, with what came out of it; marked ones make the copy."""
    wrapped = [
        [line for text in stop.lines for line in textwrap.wrap(text, 110, subsequent_indent="    ")]
        for stop in stops
    ]
    heights = [0.52 + 0.16 * len(lines) for lines in wrapped]
    total = sum(heights) + 0.24 * len(stops)
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, total + 0.3))
        y = 0.0
        for number, (stop, lines, height) in enumerate(zip(stops, wrapped, heights, strict=True)):
            color = RED if stop.marked else BLUE
            box = FancyBboxPatch(
                (0, y), 8, height, boxstyle="round,pad=0,rounding_size=0.06", lw=1.6,
                edgecolor=color, facecolor="#FBE9E2" if stop.marked else LIGHT, mutation_aspect=1,
            )  # fmt: skip
            ax.add_patch(box)
            ax.text(0.12, y + 0.17, stop.name, weight="bold", size=9.5, color=color, va="center")
            ax.text(7.88, y + 0.17, stop.size, size=8, va="center", ha="right", color=DARK)
            ax.text(0.12, y + 0.36, stop.does, size=8, va="center", color=DARK)
            for i, line in enumerate(lines):
                ax.text(0.12, y + 0.55 + 0.16 * i, line, size=7.5, family="monospace", va="center")
            if number < len(stops) - 1:
                ax.annotate(
                    "", (4, y + height + 0.24), (4, y + height),
                    arrowprops={"arrowstyle": "-|>", "color": DARK, "lw": 1.2},
                )  # fmt: skip
            y += height + 0.24
        ax.set(xlim=(-0.03, 8.03), ylim=(total - 0.2, -0.03))
        ax.axis("off")
        ax.set_title(finding(stops))
    return describe(
        fig,
        f"{finding(stops)}. From top to bottom: "
        + " ".join(f"{s.name} ({s.size}): {s.does}." for s in stops),
    )


def finding(stops: Sequence[Stop]) -> str:
    """What the road shows, in one line."""
    marked = [stop.name for stop in stops if stop.marked]
    if not marked:
        return "From Python to kernel: every pool stays where it is"
    return "From Python to kernel: where one of the two pools gets its copy"


def links(stops: Sequence[Stop], folder: Path) -> str:
    """A Markdown table of the stops: where this investigation and PyTorch's source go on.

    Args:
        stops: the road.
        folder: the notebooks' folder; those that are not there are left out.
    """
    rows = ["| stage | look closer | in PyTorch's source |", "| --- | --- | --- |"]
    for stop in stops:
        pages = [path.name for n in stop.notebooks for path in sorted(folder.glob(f"{n}_*.ipynb"))]
        named = [f"[{_title(page)}]({page})" for page in pages]
        rows.append(f"| {stop.name} | {', '.join(named)} | `{stop.source}` |")
    return "\n".join(rows)


def _title(page: str) -> str:
    return page.removesuffix(".ipynb").partition("_")[2].replace("_", " ")


def _count(graph: fx.Graph | None) -> str:
    return f"{len(graph.nodes)} nodes" if graph is not None else "not reached"


def _shown(graph: GraphCapture, stage: str) -> tuple[str, ...]:
    """The lines of a stage that deal with the pools; none if it was not reached."""
    lines = stage_lines(graph, stage) if stage in graph.stages() else []
    return tuple(line.replace("omni_kv.", "").replace(".default", "") for line in lines)


def _decision(graph: GraphCapture, decision: Any) -> str:
    tensors = [source.name if (source := graph.input_of(t)) else t for t in decision.tensors]
    told = "written in place" if decision.reinplaced else f"NOT in place: {decision.cause}"
    return f"{', '.join(tensors)}: {told}"


def _generated(graph: GraphCapture) -> tuple[str, ...]:
    """The generated calls that make room for the clone, fill it, and hand it to the op."""
    cloned = {c.writes for c in clones_of(graph) if c.writes is not None}
    pools = {i.aot: i.name for i in mutated_inputs(graph) if i.aot}
    lines = []
    for call in graph.generated.calls if graph.generated is not None else ():
        if call.result in cloned:
            lines.append(call.text)
        elif OP in call.target or cloned & set(call.buffers):
            lines.append(_call_line(call, pools, cloned))
    return tuple(lines)


def _call_line(call: Call, pools: dict[str, str], cloned: set[str]) -> str:
    """A generated call with its pools and clones by name and the other arguments left out."""
    head = call.target.replace("torch.ops.omni_kv.", "").removesuffix(".default")
    if len(head) > 30 and OP not in head:
        head = head[:18] + "…"
    shown = [
        pools.get(a.buffer or "", a.text if a.buffer in cloned else "…") for a in call.arguments
    ]
    left = f"{call.result} = " if call.result else ""
    return f"{left}{head}({', '.join(shortened(shown))})"
