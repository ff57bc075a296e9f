"""Pictures of the site, the README and links to the site: drawn from geometry and records."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from omni_kv.evidence import outcomes
from omni_kv.model.geometry import Geometry, preset
from omni_kv.publish.figures.pools import BLUE, DARK, LIGHT, ORANGE, RED, SKY, STYLE
from omni_kv.publish.figures.svg import describe, save

PULL_REQUEST = "lingbot-480x768"
READS = "03.shared, static"

#: First GiB that is read, from the start of the allocation, and how many.
Extent = tuple[float, float]


def clones_by_release(geometry: Geometry) -> list[tuple[str, Extent]]:
    """Each recorded release that clones V, and what the clone reads at a geometry's size.

    Notebook 03 records which elements are read, counted from V's pointer, and how many V has.
    """
    pool = geometry.pool_nbytes / 2**30
    found = []
    for release in outcomes.releases():
        value = outcomes.recorded(release, READS).get(READS, {}).get("value_pool", {})
        if "reads" in value:
            first, last = value["reads"]
            own = value["elements of its own"]
            # V begins where K ends.
            found.append((release, (pool * (1 + first / own), pool * (last - first + 1) / own)))
    return found


def what_the_clone_reads(geometry: Geometry | None = None) -> Figure:
    """Draw one layer's allocation at the pull request's sizes, and what the clone reads of it."""
    geometry = geometry or preset(PULL_REQUEST)
    with plt.style.context(STYLE):
        rows = clones_by_release(geometry)
        fig, ax = plt.subplots(figsize=(8, 1.5 + 0.55 * (len(rows) + 2)))
        _draw(ax, geometry, rows)
        pool = geometry.pool_nbytes / 2**30
        times = {round(length / pool, 2) for _, (_, length) in rows}
        twice = "Its clone is twice as long as V" if times == {2.0} else "What its clone reads"
        ax.set_title(f"V is one half of the allocation. {twice}")
    return describe(
        fig,
        f"A bar: the allocation of one layer, K and then V, {pool:.2f} GiB each. Below it, what is "
        f"copied. Needed would be V, {pool:.2f} GiB. "
        + " ".join(
            f"On torch {release} the clone reads {length:.2f} GiB from "
            + ("the start of the allocation" if first == 0 else f"{first:.2f} GiB on")
            + f", {max(0.0, first + length - 2 * pool):.2f} GiB of it behind the allocation."
            for release, (first, length) in rows
        ),
    )


def _draw(ax: Axes, geometry: Geometry, rows: list[tuple[str, Extent]]) -> None:
    pool = geometry.pool_nbytes / 2**30
    end = 2 * pool
    ax.axvspan(end, end + pool, color="#FBE9E2", zorder=0)
    ax.axvline(end, color=RED, lw=1.5, zorder=1)
    for start, name, color in ((0.0, "K", BLUE), (pool, "V", SKY)):
        ax.add_patch(Rectangle((start, 0), pool, 0.72, facecolor=color, edgecolor="w"))
        white = "w" if color == BLUE else DARK
        ax.text(
            start + pool / 2,
            0.36,
            f"{name}, {pool:.2f} GiB",
            ha="center",
            va="center",
            color=white,
            weight="bold",
        )
    ax.text(end + pool / 2, 0.36, "not in the allocation", ha="center", va="center", color=RED)
    labels = ["the allocation", "a copy of V needs"]
    bars = [((pool, pool), LIGHT)] + [(extent, ORANGE) for _, extent in rows]
    labels += [f"torch {release} copies" for release, _ in rows]
    for row, ((first, length), color) in enumerate(bars, 1):
        inside = min(first + length, end) - first
        ax.add_patch(Rectangle((first, row), inside, 0.72, facecolor=color, edgecolor="#888888"))
        if length > inside:
            ax.add_patch(
                Rectangle(
                    (end, row), length - inside, 0.72, facecolor=RED, hatch="///", edgecolor="w"
                )
            )
        whole = "K and V, " if first == 0 else "V, " if length > inside else ""
        ax.text(
            first + inside / 2, row + 0.36, f"{whole}{inside:.2f} GiB", ha="center", va="center"
        )
        if length > inside:
            ax.text(
                end + (length - inside) / 2,
                row + 0.36,
                f"{length - inside:.2f} GiB out of bounds",
                ha="center",
                va="center",
                weight="bold",
                size="small",
                bbox={"facecolor": "w", "edgecolor": "none", "pad": 2},
            )
    ax.set(
        xlim=(0, end + pool),
        ylim=(len(bars) + 1, -0.15),
        yticks=[row + 0.36 for row in range(len(labels))],
        yticklabels=labels,
        xlabel=f"GiB from the start of the allocation ({geometry.name}, one layer)",
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def link_preview() -> Figure:
    """Draw the picture that goes with links to the site: 1280 x 640 pixels."""
    geometry = preset(PULL_REQUEST)
    with plt.style.context(STYLE):
        plt.rcParams.update({"font.size": 11})
        fig = plt.figure(figsize=(8, 4), layout="none")
        fig.text(0.05, 0.87, "torch.compile and a paged KV pool", size=23, weight="bold")
        fig.text(0.05, 0.785, "Why the clone is made, why it crashes, and what to do", size=14)
        ax = fig.add_axes((0.24, 0.14, 0.71, 0.56))
        _draw(ax, geometry, clones_by_release(geometry))
    return describe(fig, "What the clone of V reads, at the pull request's sizes")


def write_pictures(folder: Path, suffix: str = ".png") -> list[Path]:
    """Draw the figure and the preview of links into a folder.

    Args:
        folder: made if need be.
        suffix: ``.png`` or ``.svg``, for the figure; the preview is a bitmap, as sites want it.
    """
    drawn = [
        save(what_the_clone_reads(), folder / f"what-the-clone-reads{suffix}"),
        save(link_preview(), folder / "link-preview.png"),
    ]
    plt.close("all")
    return drawn
