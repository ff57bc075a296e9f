"""What the kernel of the clone reads, frame by frame, as it is on record for each release."""

from __future__ import annotations

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from omni_kv.evidence import outcomes
from omni_kv.publish.figures.pools import CLONE, DARK, KEY, LIGHT, OUTSIDE, STYLE, VALUE
from omni_kv.publish.figures.svg import describe

#: Frames, from left to right.
FRAMES = ("1. the clone reads", "2. the op is handed, as V", "3. copied back, V holds")


class Copy(NamedTuple):
    """One recorded clone of V; all numbers are elements, counted from the start of the storage.

    Attributes:
        label: release, and static or dynamic shapes.
        offset: storage offset of V, which is as long as K.
        numel: elements of V.
        first: the first element that the clone reads.
        end: one behind the last one.
        handed: where the elements begin that the op is handed as V.
    """

    label: str
    offset: int
    numel: int
    first: int
    end: int
    handed: int

    @property
    def source(self) -> str:
        """Whose elements V holds afterwards, where the op did not write."""
        if self.handed == self.offset:
            return "V"
        return "K" if self.handed == 0 else "foreign"


def recorded_copies(prefix: str = "03.shared, ") -> list[Copy]:
    """The clones of V over shared halves that are on record, by release and kind of shapes."""
    found = []
    for release in outcomes.releases():
        for name, outcome in sorted(outcomes.recorded(release, prefix).items(), reverse=True):
            value: dict[str, Any] = outcome.get("value_pool", {})
            if "reads" in value:
                own = value["elements of its own"]
                offset = value["elements cloned"] - own
                first, last = value["reads"]
                label = f"torch {release}\n{name.removeprefix(prefix)} shapes"
                handed = offset + value["op is off by"]
                found.append(Copy(label, offset, own, offset + first, offset + last + 1, handed))
    return found


def frames(copies: list[Copy] | None = None) -> Figure:
    """Draw each clone in three frames: what it reads, what the op gets of it, what V then holds.

    Args:
        copies: what to draw; by default what is on record.

    Raises:
        ValueError: if there is nothing to draw.
    """
    copies = recorded_copies() if copies is None else copies
    if not copies:
        raise ValueError("no clone is on record")
    with plt.style.context(STYLE):
        fig, axes = plt.subplots(
            len(copies), 3, figsize=(9, 0.85 * len(copies) + 1.2), sharex=True, squeeze=False
        )
        for row, copy in zip(axes, copies, strict=True):
            taken = ((copy.first, copy.end), (copy.handed, copy.handed + copy.numel), None)
            for ax, part in zip(row, taken, strict=True):
                _draw(ax, copy, part)
            row[0].set_ylabel(copy.label, rotation=0, ha="right", va="center")
        for ax, title in zip(axes[0], FRAMES, strict=True):
            ax.set_title(title, size=10, loc="center")
        wrong = sum(copy.source != "V" for copy in copies)
        fig.suptitle(
            f"In {wrong} of these {len(copies)} recorded compilations V ends up with other values",
            x=0.01,
            ha="left",
            weight="bold",
            size=11,
        )
    return describe(fig, _alt(copies))


def _draw(ax: Axes, copy: Copy, part: tuple[int, int] | None) -> None:
    """The allocation and what lies behind it; ``part`` is marked, or V filled with its source."""
    end = copy.offset + copy.numel
    colors = {"K": (KEY, ""), "V": (VALUE, ""), "foreign": (OUTSIDE, "///")}
    blocks = [("K", 0, copy.offset), ("V", copy.offset, end), ("", end, end + copy.numel)]
    for name, start, stop in blocks:
        color, hatch = colors.get(
            copy.source if part is None and name == "V" else name, (LIGHT, "")
        )
        edge = "w" if hatch else DARK
        box = Rectangle((start, 0), stop - start, 1, facecolor=color, hatch=hatch, edgecolor=edge)
        ax.add_patch(box)
        text = copy.source if part is None and name == "V" else name or "outside"
        ink = "w" if color == KEY else DARK
        behind = {"facecolor": "w", "edgecolor": "none", "pad": 1} if hatch else None
        ax.text(
            (start + stop) / 2, 0.5, text, ha="center", va="center", color=ink, bbox=behind, size=9
        )
    if part is not None:
        first, last = part
        outside = last > end
        ax.add_patch(
            Rectangle(
                (first, -0.32),
                last - first,
                0.2,
                facecolor=OUTSIDE if outside and first >= end else CLONE,
            )
        )
        if outside and first < end:
            ax.add_patch(Rectangle((end, -0.32), last - end, 0.2, facecolor=OUTSIDE))
    ax.set(xlim=(-0.01 * end, end + 1.01 * copy.numel), ylim=(-0.45, 1.05), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _alt(copies: list[Copy]) -> str:
    """The same in words."""
    sentences = []
    for copy in copies:
        read = _elements(copy, copy.first, copy.end)
        handed = _elements(copy, copy.handed, copy.handed + copy.numel)
        label = copy.label.replace("\n", ", ")
        sentences.append(
            f"{label}: the clone reads {read}; the op is handed {handed}; V then holds "
            f"{'foreign memory' if copy.source == 'foreign' else copy.source}."
        )
    return " ".join(sentences)


def _elements(copy: Copy, first: int, end: int) -> str:
    outside = " beyond the allocation" if first >= copy.offset + copy.numel else ""
    partly = " and goes beyond the allocation" if first < copy.offset + copy.numel < end else ""
    return f"elements {first:,} to {end - 1:,}{outside}{partly}"
