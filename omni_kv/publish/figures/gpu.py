"""Figures from GPU records. Each takes records, says where they come from, and runs nothing."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from omni_kv.evidence.cells import RolloutRun
from omni_kv.evidence.records import Record
from omni_kv.evidence.tables import parts_table, spread, steady
from omni_kv.model.geometry import Geometry
from omni_kv.publish.figures.pools import CLONE, GREEN, LIGHT, PINK, SKY
from omni_kv.publish.figures.svg import RECORDED, STYLE, use_in_notebooks

use_in_notebooks()

#: Line style of each way of running; the colour says which attention.
LINES = {"eager": ":", "compiled separate": "-"}

#: Colours of a step's parts, in the order of ``evidence.tables.PARTS``: the clone has its own.
PART_COLORS = (CLONE, "#F6CF7C", GREEN, "#888888", PINK, SKY, LIGHT)


def latency_figure(record: Record, geometry: Geometry) -> Figure:
    """Seconds per chunk, chunk by chunk: rising until the window is full, then flat.

    Compiled runs over shared halves are left out: their results are wrong, and a time for a wrong
    result is none.
    """
    runs = [
        run
        for run in record.of(RolloutRun).values()
        if run.mode == "eager" or run.layout == "separate"
    ]
    backends = list(dict.fromkeys(run.backend for run in runs))
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 4))
        for run in runs:
            how = run.mode if run.mode == "eager" else f"{run.mode} {run.layout}"
            if run.repeat or len(run.chunks) < 3:
                continue
            ax.plot(
                [chunk.index for chunk in run.chunks],
                [chunk.seconds for chunk in run.chunks],
                LINES[how],
                marker="o",
                markersize=4,
                color=f"C{backends.index(run.backend)}",
                label=f"{run.backend}, {how}",
            )
        ax.axvline(geometry.first_full_chunk, color="0.6", linewidth=1)
        ax.axhline(geometry.chunk_seconds, color="0.6", linewidth=1)
        ax.text(0, geometry.chunk_seconds, " real time", va="bottom", color="0.4")
        ax.set(
            xlabel="chunk",
            ylabel="seconds a chunk",
            ylim=(0, None),
            title=_latency_title(runs, geometry),
        )
        fig.legend(loc="outside right upper", fontsize=8)
        _label(fig, record)
    return fig


def parts_figure(record: Record) -> Figure:
    """Device time of one step, split into parts; of a wrong step, its two copies alone."""
    table = parts_table(record)
    wrong = table.columns[table.isna().any()]
    parts = table.fillna(0.0)
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.5 * len(parts.columns) + 1.8))
        left = [0.0] * len(parts.columns)
        hatches = ("", "", "///", "", "\\\\\\", "xx", "")
        for number, (part, row) in enumerate(parts.iterrows()):
            ax.barh(
                list(parts.columns),
                row.tolist(),
                left=left,
                label=str(part),
                color=PART_COLORS[number],
                hatch=hatches[number],
                edgecolor="white",
            )
            left = [start + width for start, width in zip(left, row, strict=True)]
        for name in wrong:
            told = " wrong result: its two copies only"
            ax.text(parts[name].sum(), name, told, va="center", color="0.4")
        ax.invert_yaxis()
        ax.set(xlabel="ms of device time in one step", title=_parts_title(table))
        fig.legend(loc="outside lower center", ncols=3, fontsize=8)
        _label(fig, record)
    return fig


def memory_figure(record: Record) -> Figure:
    """Peak device memory of each rollout, as the difference from the smallest."""
    runs = [run for run in record.of(RolloutRun).values() if not run.repeat and len(run.chunks) > 2]
    names = [f"{run.backend}, {run.mode} {run.layout}" for run in runs]
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.32 * len(runs) + 1.2))
        peaks = [run.peak_bytes / 2**30 for run in runs]
        least = min(peaks)
        bars = ax.barh(names, [peak - least for peak in peaks], color=GREEN)
        ax.bar_label(bars, [f"{peak:.1f} GiB in all" for peak in peaks], padding=3)
        ax.invert_yaxis()
        ax.margins(x=0.2)
        ax.set(
            xlabel=f"peak memory beyond the smallest, {least:.1f} GiB; in GiB",
            title=_memory_title(runs),
        )
        _label(fig, record)
    return fig


def _latency_title(runs: list[RolloutRun], geometry: Geometry) -> str:
    full = [steady(r, geometry) for r in runs if (r.mode, r.layout) == ("compiled", "separate")]
    most = max((spread(seconds) for seconds in full if seconds), default=0.0)
    chunk = geometry.first_full_chunk
    return (
        f"From chunk {chunk} on the window is full;\ncompiled latency then stays within {most:.1%}"
    )


def _parts_title(parts: pd.DataFrame) -> str:
    totals = parts.dropna(axis="columns").sum()
    fastest = totals.idxmin()
    share = parts.loc[["attention", "matrix products"], fastest].sum() / totals[fastest]
    return f"Attention and matrix products take {share:.0%} of the device time of the fastest step"


def _memory_title(runs: list[RolloutRun]) -> str:
    peaks = {(run.backend, run.mode, run.layout): run.peak_bytes / 2**30 for run in runs}
    more = [
        peak - peaks[backend, "compiled", "separate"]
        for (backend, mode, layout), peak in peaks.items()
        if (mode, layout) == ("compiled", "shared") and (backend, mode, "separate") in peaks
    ]
    if more:
        return f"Compiled, shared halves take at least {min(more):.1f} GiB more at the peak"
    return "Peak memory of each rollout"


def _label(fig: Figure, record: Record) -> None:
    fig.text(0.995, -0.01, record.provenance.label, ha="right", va="top", size=7, color=RECORDED)
