"""The figures of the notebooks. Each function takes data, returns a figure, and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from omni_kv.experiments.layer import LayerRun, Origin
from omni_kv.model.geometry import Geometry
from omni_kv.model.rollout import frames_in_pool
from omni_kv.publish.figures.svg import STYLE, use_in_notebooks
from omni_kv.sandbox.process import Outcome

use_in_notebooks()

BLUE, ORANGE, GREEN, RED, PINK, SKY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
)
LIGHT, DARK = "#EEEEEE", "#222222"

#: What a figure shows has one colour in all of them.
KEY, VALUE, CLONE, OUTSIDE = BLUE, SKY, ORANGE, RED

#: Colour, hatch and meaning of each origin of a slot of V; hatches tell them apart in grey.
ORIGINS: dict[Origin, tuple[str, str, str]] = {
    "right": (VALUE, "", "right"),
    "neighbour": (OUTSIDE, "///", "memory outside the pool"),
    "keys": (KEY, "\\\\\\", "the same slot of K"),
    "other": (DARK, "", "something else"),
}


def window_over_chunks(geometry: Geometry, chunks: int) -> Figure:
    """Draw which frame of the video lies where in the pool while each chunk is denoised.

    Args:
        geometry: the sizes.
        chunks: how many chunks to draw, one row each.
    """
    used = geometry.visible_frames
    kinds = {
        "sink": (GREEN, "", "sink, never evicted"),
        "window": ("#9BD5C0", "", "window"),
        "current": (PINK, "///", "the chunk being denoised"),
        "empty": (LIGHT, "", "not written yet"),
    }
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.32 * chunks + 1.6))
        for chunk in range(chunks):
            first = chunk * geometry.frames_per_chunk
            for place, frame in enumerate(frames_in_pool(geometry, chunk)[:used]):
                if frame is None:
                    kind = "empty"
                elif frame >= first:
                    kind = "current"
                else:
                    kind = "sink" if frame < geometry.sink_frames else "window"
                color, hatch, _ = kinds[kind]
                ax.add_patch(
                    Rectangle((place, chunk), 1, 0.9, facecolor=color, hatch=hatch, edgecolor="w")
                )
                if frame is not None:
                    ax.text(place + 0.5, chunk + 0.45, str(frame), ha="center", va="center", size=8)
        ax.set(
            xlim=(0, used),
            ylim=(chunks, 0),
            xticks=range(0, used + 1, geometry.frames_per_chunk),
            yticks=[c + 0.45 for c in range(chunks)],
            yticklabels=[str(c) for c in range(chunks)],
            xlabel=f"place in the pool (latent frames of {geometry.tokens_per_frame:,} slots)",
            ylabel="chunk",
            title=_window_title(geometry, chunks),
        )
        handles = [
            Patch(facecolor=c, hatch=h, edgecolor="w", label=n) for c, h, n in kinds.values()
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


def _window_title(geometry: Geometry, chunks: int) -> str:
    pools = [frames_in_pool(geometry, chunk)[: geometry.visible_frames] for chunk in range(chunks)]
    overwrites = [
        chunk
        for chunk in range(1, chunks)
        if any(
            a is not None and a != b for a, b in zip(pools[chunk - 1], pools[chunk], strict=True)
        )
    ]
    title = f"Chunk {geometry.first_full_chunk} is the first that sees a full window"
    return f"{title}; chunk {overwrites[0]} the first that overwrites" if overwrites else title


def value_rows(outcomes: Mapping[str, Outcome[LayerRun]], written: Sequence[int] = ()) -> Figure:
    """Draw each run's V pool as a strip, one column a slot, coloured by where its values come from.

    Args:
        outcomes: runs by label; a run that died shows how.
        written: slots that the op itself wrote; marked by a line on top of each strip.
    """
    with plt.style.context(STYLE):
        fig, axes = plt.subplots(
            len(outcomes), 1, figsize=(8, 0.62 * len(outcomes) + 1.4), sharex=True, squeeze=False
        )
        most = max((o.value.rows for o in outcomes.values() if o.value), default=1)
        seen: set[Origin] = set()
        for ax, (label, outcome) in zip(axes[:, 0], outcomes.items(), strict=True):
            ax.set(xlim=(0, most), ylim=(0, 1), yticks=[])
            ax.spines["left"].set_visible(False)
            ax.set_ylabel(label, rotation=0, ha="right", va="center")
            if outcome.value is None:
                ax.text(most / 2, 0.5, outcome.describe(), ha="center", va="center", weight="bold")
                continue
            for origin, start, length in _stretches(outcome.value.value_origins):
                seen.add(origin)
                color, hatch, _ = ORIGINS[origin]
                ax.add_patch(
                    Rectangle((start, 0), length, 1, facecolor=color, hatch=hatch, edgecolor="w")
                )
            slots = [slot + 0.5 for slot in written]
            ax.plot(slots, [1.0] * len(slots), "s", color=DARK, markersize=3, clip_on=False)
        axes[-1, 0].set_xlabel("slot of the V pool")
        handles = [
            Patch(facecolor=c, hatch=h, edgecolor="w", label=name)
            for origin, (c, h, name) in ORIGINS.items()
            if origin in seen
        ]
        if handles:
            fig.legend(handles=handles, loc="outside lower center", ncols=4)
        fig.suptitle(_worst(outcomes), x=0.01, ha="left", weight="bold", size=11)
    return fig


def _worst(outcomes: Mapping[str, Outcome[LayerRun]]) -> str:
    """The finding of ``value_rows``, in one line."""
    runs = [o.value for o in outcomes.values() if o.value]
    died = sum(o.value is None for o in outcomes.values())
    wrong = max((run.value_rows_wrong for run in runs), default=0)
    parts = [f"{died} of {len(outcomes)} runs died"] if died else []
    if wrong:
        parts.append(f"up to {wrong} of {runs[0].rows} slots of V were overwritten")
    finding = "; ".join(parts) or "every slot of V is right"
    return finding[0].upper() + finding[1:]


def _stretches(origins: tuple[Origin, ...]) -> list[tuple[Origin, int, int]]:
    """Runs of equal neighbours, as (origin, start, length)."""
    stretches: list[tuple[Origin, int, int]] = []
    start = 0
    for i in range(1, len(origins) + 1):
        if i == len(origins) or origins[i] != origins[start]:
            stretches.append((origins[start], start, i - start))
            start = i
    return stretches
