"""How figures leave the code: as SVG that is the same in every run, with a text for who cannot see.

Importing ``figures.pools`` in a notebook is enough: ``use_in_notebooks`` is called there.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("report.mplstyle")

#: The colour of what comes from a record, as in the site's ``recorded.css``.
RECORDED = "#b45f06"


def describe(fig: Figure, text: str) -> Figure:
    """Give a figure its alternative text, where title, axes and legend do not say enough."""
    fig._omni_kv_text = text  # type: ignore[attr-defined]
    return fig


def alt_text(fig: Figure) -> str:
    """What to say to who cannot see the figure: as described, or titles, axes and legend."""
    described = getattr(fig, "_omni_kv_text", None)
    if described:
        return _one_line(described)
    heading = fig.get_suptitle() if hasattr(fig, "get_suptitle") else ""
    titles = [heading, *(ax.get_title(loc) for ax in fig.axes for loc in ("left", "center"))]
    across = [ax.get_xlabel() for ax in fig.axes]
    upwards = [ax.get_ylabel() for ax in fig.axes]
    legends = [*fig.legends, *(ax.get_legend() for ax in fig.axes)]
    entries = [text.get_text() for box in legends if box is not None for text in box.get_texts()]
    parts = [". ".join(_each_once(titles))]
    for name, words in (("Across", across), ("Upwards", upwards), ("Shown", entries)):
        if _each_once(words):
            parts.append(f"{name}: {'; '.join(_each_once(words))}")
    return ". ".join(part for part in parts if part)


def svg(fig: Figure) -> str:
    """The figure as SVG, without a date, its alternative text as the picture's title."""
    buffer = io.StringIO()
    about = {"Date": None} | ({"Title": text} if (text := alt_text(fig)) else {})
    with plt.style.context(STYLE):  # it also says how ids are made and texts are written
        fig.savefig(buffer, format="svg", bbox_inches="tight", metadata=about)
    return buffer.getvalue()


def save(fig: Figure, path: Path) -> Path:
    """Write a figure as PNG or SVG, by the file's name, the same bytes each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg(fig), encoding="utf-8")
    else:
        with plt.style.context(STYLE):
            fig.savefig(path, metadata={"Software": None, "Title": alt_text(fig)})
    return path


def use_in_notebooks() -> None:
    """In a notebook, show figures as ``svg`` makes them; elsewhere do nothing."""
    import sys

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        return
    from matplotlib_inline.config import InlineBackend

    # None of the formats that it would register itself: those win over a bundle.
    InlineBackend.instance(parent=shell).figure_formats = set()

    def bundle(fig: Figure, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"image/svg+xml": svg(fig), "text/plain": alt_text(fig)}

    shell.display_formatter.mimebundle_formatter.for_type(Figure, bundle)


def _each_once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(_one_line(word) for word in words if word.strip()))


def _one_line(text: str) -> str:
    return " ".join(text.split())
