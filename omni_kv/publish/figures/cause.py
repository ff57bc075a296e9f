"""Figures of notebooks 04 and 05: where each hypothesis acts, and what each clone reads."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from omni_kv.experiments.cause import Measurement
from omni_kv.experiments.hypotheses import ADDRESSED_AT, DECIDED_AT, STAGES, Finding
from omni_kv.publish.figures.pools import CLONE, DARK, KEY, LIGHT, OUTSIDE, PINK, STYLE, VALUE


def hypothesis_stages(findings: Sequence[Finding]) -> Figure:
    """Draw the stages of a compiled call, where each hypothesis acts and where the fault arises.

    Args:
        findings: what came of the hypotheses.
    """
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.62 * len(STAGES) + 0.6))
        for row, stage in enumerate(STAGES):
            guilty = stage in (DECIDED_AT, ADDRESSED_AT)
            ax.add_patch(
                Rectangle(
                    (0, row + 0.08), 4, 0.84, facecolor=PINK if guilty else LIGHT, edgecolor=DARK
                )
            )
            ax.text(2, row + 0.5, stage, ha="center", va="center", fontsize=9)
            notes = [
                f"({f.hypothesis.number}) {f.verdict}: {_short(f.hypothesis.number)}"
                for f in findings
                if f.hypothesis.acts_at == stage
            ]
            if stage == DECIDED_AT:
                notes.append("here it is decided that V is cloned")
            if stage == ADDRESSED_AT:
                notes.append("here it is settled where the clone reads from")
            ax.text(
                4.15,
                row + 0.5,
                "\n".join(notes),
                va="center",
                fontsize=9,
                weight="bold" if guilty else "normal",
            )
            if row:
                ax.annotate("", (2, row + 0.08), (2, row - 0.08), arrowprops={"arrowstyle": "->"})
        ax.set(xlim=(0, 9), ylim=(len(STAGES), 0))
        ax.set_axis_off()
        ax.set_title("Where each hypothesis would have to act, and where the fault arises")
    return fig


def _short(number: int) -> str:
    return {
        1: "blocks kept by the allocator",
        2: "dynamic=True, several configurations",
        3: "addresses not known as static",
        4: "memory short while autotuning",
        5: "32-bit offsets overflow",
    }[number]


def measured_extents(measurements: Sequence[Measurement]) -> Figure:
    """Draw each placement's allocation, and under it what the clone of V reads.

    Args:
        measurements: runs over placements of one shape and dtype.
    """
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.85 * len(measurements) + 1.5))
        outside_most = 0.0
        for row, m in enumerate(measurements):
            p = m.placement
            unit = p.numel
            blocks = [(0.0, p.storage_numel / unit, LIGHT, "")]
            if p.one_allocation:
                blocks.append((p.key_offset / unit, 1.0, KEY, "K"))
            blocks.append((p.value_offset / unit, 1.0, VALUE, "V"))
            for start, length, color, name in blocks:
                ax.add_patch(Rectangle((start, row), length, 0.42, facecolor=color, edgecolor=DARK))
                ink = "w" if color == KEY else DARK
                ax.text(start + length / 2, row + 0.21, name, ha="center", va="center", color=ink)
            if m.counts_from is None:
                ax.text(0.02, row + 0.64, "no clone: written in place", va="center", fontsize=9)
                continue
            start = p.value_offset if m.counts_from == "data pointer" else 0
            end = start + m.extent
            inside = min(end, p.storage_numel)
            ax.add_patch(
                Rectangle((start / unit, row + 0.5), (inside - start) / unit, 0.26, facecolor=CLONE)
            )
            if end > inside:
                ax.add_patch(
                    Rectangle(
                        (inside / unit, row + 0.5),
                        (end - inside) / unit,
                        0.26,
                        facecolor=OUTSIDE,
                        hatch="///",
                        edgecolor="w",
                    )
                )
                outside_most = max(outside_most, (end - inside) / unit)
        ax.set(
            ylim=(len(measurements), -0.15),
            yticks=[row + 0.3 for row in range(len(measurements))],
            yticklabels=[m.placement.name for m in measurements],
            xlabel="elements from the start of V's storage, in units of V's size",
            title=_extents_title(outside_most),
        )
        ax.autoscale(axis="x")
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
        handles = [
            Patch(facecolor=CLONE, label="the clone reads"),
            Patch(
                facecolor=OUTSIDE, hatch="///", edgecolor="w", label="... outside the allocation"
            ),
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def _extents_title(outside_most: float) -> str:
    if not outside_most:
        return "Every clone stays inside its allocation"
    return f"Up to {outside_most:.3g} x V's size is read beyond the allocation"
