"""What the documents show of the code: its imports, PyTorch's names, the report's schema."""

from __future__ import annotations

import ast
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from omni_kv.audits.formats import SCHEMA_NAME, schema
from omni_kv.evidence.paths import PACKAGE
from omni_kv.lens.pytorch import names
from omni_kv.publish.figures.svg import STYLE, describe, save

NAMES = """\
# Private names of PyTorch

What the lens and the audit read of PyTorch that nobody promised to keep, in the order in which a
compilation meets it. Written by `omni-kv figures` from `omni_kv/lens/pytorch.py`.
"""
#: Packages from the ground up; those of one row do not import each other.
Rows = list[list[str]]


def imports() -> dict[str, set[str]]:
    """For each module or folder at the root of the package, those whose modules it imports.

    Imports inside functions count; those for the type checker alone count, too.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in ("__init__", "share"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.setdefault(parts[0], set()).update(
            name.split(".")[1]
            for node in ast.walk(tree)
            for name in _imported(node)
            if name.startswith("omni_kv.")
        )
    return {
        name: {other for other in others if other in found and other != name}
        for name, others in found.items()
    }


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def rows(imported: dict[str, set[str]]) -> Rows:
    """Lay packages out so that each stands above all that it imports, as low as it can.

    Raises:
        ValueError: if packages import each other in a circle.
    """
    left, laid = dict(imported), []
    while left:
        row = [name for name, others in left.items() if not others & left.keys()]
        if not row:
            raise ValueError(f"packages import each other: {', '.join(sorted(left))}")
        laid.append(sorted(row, key=lambda name: (_importers(imported, name), name)))
        left = {name: others for name, others in left.items() if name not in row}
    return laid


def _importers(imported: dict[str, set[str]], name: str) -> list[str]:
    """Who imports it: neighbours in a row that share an importer draw fewer crossings."""
    return sorted(other for other, others in imported.items() if name in others)


def packages_figure(imported: dict[str, set[str]] | None = None) -> Figure:
    """Draw the packages in rows, an arrow from each to those that it imports.

    An arrow is left out where a chain of others says the same.

    Args:
        imported: which package imports which; by default, read from the code.
    """
    imported = imports() if imported is None else imported
    laid = rows(imported)
    with plt.style.context(STYLE):
        fig, ax = plt.subplots(figsize=(8, 0.9 * len(laid)))
        centre = {
            name: ((number + 0.5) * 12 / len(row), float(height))
            for height, row in enumerate(laid)
            for number, name in enumerate(row)
        }
        for name, others in imported.items():
            _box(ax, name, *centre[name])
            for other in sorted(_direct(imported, others)):
                _arrow(ax, centre[name], centre[other])
        ax.set(xlim=(0, 12), ylim=(-0.5, len(laid) - 0.5))
        ax.axis("off")
        ax.set_title("Which sub-package imports which")
    text = "; ".join(
        f"{name} imports {', '.join(sorted(others)) or 'nothing of ours'}"
        for row in laid
        for name in row
        for others in (imported[name],)
    )
    return describe(fig, f"The sub-packages, from the ground up: {text}.")


def _direct(imported: dict[str, set[str]], others: set[str]) -> set[str]:
    """Those of the imported that none of the others imports, directly or not."""

    def reached(name: str) -> set[str]:
        return imported[name].union(*(reached(other) for other in imported[name]))

    return others - set().union(*(reached(other) for other in others))


def _box(ax: Axes, name: str, x: float, y: float) -> None:
    ax.add_patch(
        Rectangle((x - 0.85, y - 0.2), 1.7, 0.4, facecolor="#EEF3F8", edgecolor="#4A6A8A", zorder=2)
    )
    ax.text(x, y, name, ha="center", va="center", zorder=3)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    arrow = FancyArrowPatch(
        (start[0], start[1] - 0.2),
        (end[0], end[1] + 0.2),
        arrowstyle="-|>",
        mutation_scale=9,
        color="#666666",
        lw=0.9,
        zorder=1,
    )
    ax.add_patch(arrow)


def write_packages(folder: Path) -> Path:
    """Draw the figure as ``architecture.svg`` into a folder."""
    path = save(packages_figure(), folder / "architecture.svg")
    plt.close("all")
    return path


def write_names(folder: Path) -> Path:
    """Write the page of names as ``pytorch_names.md`` into a folder."""
    path = folder / "pytorch_names.md"
    path.write_text(names_page(), encoding="utf-8")
    return path


def write_schema(folder: Path) -> Path:
    """Write the JSON schema of the audit's report into a folder."""
    path = folder / SCHEMA_NAME
    path.write_text(schema(), encoding="utf-8")
    return path


def names_page() -> str:
    """The page of PyTorch's private names that the code stands on, as Markdown.

    It is the same for every release: whether the installed one has them, the audit says.
    """
    lines = [NAMES, "| PyTorch's name | in | used by | for |", "| --- | --- | --- | --- |"]
    for name in names():
        shown = name.name.replace("|", "\\|")
        lines.append(f"| `{shown}` | `{name.module}` | `{name.used}` | {name.purpose} |")
    return "\n".join(lines) + "\n"
