"""The atlas as a map: releases across, layouts down, a panel a kind of call."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from omni_kv.experiments.atlas.cells import CALLS, LAYOUTS
from omni_kv.experiments.atlas.records import AtlasRecord, label
from omni_kv.publish.figures.svg import STYLE, use_in_notebooks

use_in_notebooks()

#: Letter and colour of each outcome; the letter says it without the colour.
MARKS = {
    "right": ("R", "#4c9f70"),
    "right, copies not known": ("r", "#8cc4a3"),
    "right, cloned": ("C", "#d9c65d"),
    "reads outside": ("O", "#e59a4a"),
    "foreign values": ("F", "#c8453b"),
    "other pool's values": ("V", "#a0408f"),
    "crash": ("X", "#3a3a3a"),
    "refuses to compile": ("N", "#9fa8b5"),
    "wrong otherwise": ("W", "#7a3020"),
}


def atlas_map(records: Sequence[AtlasRecord], calls: Sequence[str] = tuple(CALLS)) -> Figure:
    """One panel a kind of call, with a fresh cache and ``no_grad``; empty where not recorded."""
    across = min(3, len(calls))
    down = -(-len(calls) // across)
    met: set[str] = set()
    with plt.style.context(STYLE):
        width = 2.2 + across * (0.5 + 0.42 * len(records))
        size = (max(7.5, width), down * (1.2 + 0.24 * len(LAYOUTS)))
        fig, grid = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        for ax in grid.flat[len(calls) :]:
            ax.set_axis_off()
        for ax, call in zip(grid.flat, calls, strict=False):
            for column, record in enumerate(records):
                cells = record.by_key()
                for row, layout in enumerate(LAYOUTS):
                    result = cells.get(f"{layout}/{call}/fresh/no_grad")
                    if result is not None:
                        met.add(label(result))
                        _mark(ax, column, row, label(result))
            ax.set(
                xlim=(-0.5, len(records) - 0.5),
                ylim=(len(LAYOUTS) - 0.5, -0.5),
                xticks=range(len(records)),
                yticks=range(len(LAYOUTS)),
                xticklabels=[record.release for record in records],
                yticklabels=list(LAYOUTS.values()),
            )
            ax.set_title(textwrap.fill(CALLS[call], 20), fontsize=8)
            ax.tick_params(axis="x", rotation=90, labelsize=7)
            ax.tick_params(axis="y", labelsize=7)
        handles = [
            Patch(facecolor=colour, label=f"{letter}  {name}")
            for name, (letter, colour) in MARKS.items()
            if name in met
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    return fig


def _mark(ax: plt.Axes, column: int, row: int, outcome: str) -> None:
    letter, colour = MARKS[outcome]
    ax.add_patch(plt.Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour))
    light = outcome in ("foreign values", "other pool's values", "crash", "wrong otherwise")
    ax.text(column, row, letter, ha="center", va="center", fontsize=7, color="w" if light else "k")
