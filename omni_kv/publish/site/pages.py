"""From an executed notebook to a page: what was run, with which parameters, and a clean copy."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from omni_kv.publish.notebooks import strip
from omni_kv.publish.parameters import parameters_of

AS_RECORDED = re.compile(r"^(\S.*): as recorded for this torch release$", re.MULTILINE)
NO_RECORD = re.compile(r"^(\S.*): no record for torch ", re.MULTILINE)
CHANGED = re.compile(r"^(\S.*): not as recorded for torch ", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One executed notebook.

    Attributes:
        stem: its file name, without the suffix.
        title: its first heading.
        question: what follows "The question." in its first cell.
        time: what follows "Time." there.
        parameters: what it ran with: the defaults of its parameters cell and what papermill set.
        seconds: how long it ran, if papermill noted it.
        date: when it ran, ``YYYY-MM-DD``; empty if unknown.
        as_recorded: verdicts of what ran that came out as recorded.
        read: verdicts of what was read from a record and not run.
        no_record: verdicts without a record to hold them against.
        changed: verdicts that came out differently.
        failed: whether a cell raised.
    """

    stem: str
    title: str
    question: str
    time: str
    parameters: dict[str, Any]
    seconds: float | None
    date: str
    as_recorded: tuple[str, ...]
    read: tuple[str, ...]
    no_record: tuple[str, ...]
    changed: tuple[str, ...]
    failed: bool

    @property
    def device(self) -> str:
        """Where it ran: what its parameters say, a GPU by its name if it is still there."""
        device = str(self.parameters.get("device") or "cpu")
        if device.startswith("cuda"):
            import torch

            return torch.cuda.get_device_name(device) if torch.cuda.is_available() else device
        return device

    @property
    def short_time(self) -> str:
        """What the notebook says of its time, up to the first full stop."""
        return re.split(r"[;.](?:\s|$)", self.time)[0]


def run_of(path: Path) -> Run:
    """Read what an executed notebook says of itself and of its run."""
    nb = nbformat.read(path, as_version=4)
    first = next((cell.source for cell in nb.cells if cell.cell_type == "markdown"), "")
    heading = re.search(r"^# +(.+)$", first, re.MULTILINE)
    notes = nb.metadata.get("papermill", {})
    defaults = {name: p.default for name, p in parameters_of(path).items()}
    parameters = defaults | dict(notes.get("parameters", {}))
    cells = [cell for cell in nb.cells if cell.cell_type == "code"]
    read = _printed([cell for cell in cells if _is_recorded(cell, parameters)])
    ran = _printed([cell for cell in cells if not _is_recorded(cell, parameters)])
    errors = [o for c in nb.cells for o in c.get("outputs", []) if o.output_type == "error"]
    return Run(
        stem=path.stem,
        title=heading[1].strip() if heading else path.stem,
        question=_paragraph(first, "The question."),
        time=_paragraph(first, "Time."),
        parameters=parameters,
        seconds=notes.get("duration"),
        date=str(notes.get("start_time") or "")[:10],
        as_recorded=tuple(AS_RECORDED.findall(ran)),
        read=tuple(AS_RECORDED.findall(read)),
        no_record=tuple(NO_RECORD.findall(ran + read)),
        changed=tuple(CHANGED.findall(ran + read)),
        failed=bool(errors),
    )


def _printed(cells: Sequence[nbformat.NotebookNode]) -> str:
    """What cells printed, a line a line."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(f"{o.text}\n" for o in outputs if o.output_type == "stream")


def _is_recorded(cell: nbformat.NotebookNode, parameters: dict[str, Any]) -> bool:
    """Whether a cell shows what was recorded, by its tag and what the notebook ran with.

    Notebooks 06 and 07 measure themselves on a GPU, and with the preset ``tiny``.
    """
    tags = cell.metadata.get("tags", [])
    device, preset = (str(parameters.get(name, "")) for name in ("device", "preset"))
    without = "recorded-without-gpu" in tags and device == "cpu" and preset != "tiny"
    return "recorded" in tags or without


def _paragraph(text: str, label: str) -> str:
    """What follows a bold label, up to the next empty line."""
    found = re.search(rf"\*\*{re.escape(label)}\*\*\s*(.+?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def for_site(path: Path, run: Run, target: Path, *, paged: bool = False) -> None:
    """Write a copy of an executed notebook for Sphinx, with the run's parameters below its title.

    What is of this machine alone (paths, addresses, progress bars) is left out. On paper there is
    nothing to download.
    """
    nb = strip(nbformat.read(path, as_version=4))
    for cell in nb.cells:
        _texts_of_pictures(cell)
        _settle_tags(cell, run)
    at = next((i for i, cell in enumerate(nb.cells) if cell.cell_type == "markdown"), -1) + 1
    # An id of its own would differ in every build.
    recorded = any("recorded" in cell.metadata.get("tags", []) for cell in nb.cells)
    box = _box(run, recorded, download=not paged)
    nb.cells.insert(at, nbformat.v4.new_markdown_cell(box, id="this-run"))
    nbformat.write(nb, target)


def _settle_tags(cell: nbformat.NotebookNode, run: Run) -> None:
    """Make ``recorded-without-gpu`` into ``recorded``, or drop it where the run measured itself.

    A tag becomes a class of HTML, which the site shows (``recorded.css``).
    """
    recorded = _is_recorded(cell, run.parameters)
    if "recorded-without-gpu" in cell.metadata.get("tags", []):
        cell.metadata.tags.remove("recorded-without-gpu")
        cell.metadata.tags += ["recorded"] if recorded else []


def _texts_of_pictures(cell: nbformat.NotebookNode) -> None:
    """Take a picture's alternative text from its plain form, which says what it shows."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = data.get("text/plain", "")
        pictured = "image/png" in data or "image/svg+xml" in data
        if pictured and text and not text.startswith("<"):
            cell.metadata["mystnb"] = {"image": {"alt": " ".join(text.split())}}


def _box(run: Run, recorded: bool, download: bool) -> str:
    parameters = ", ".join(f"`{name} = {_short(v)}`" for name, v in run.parameters.items())
    lines = [
        ":::{admonition} This run",
        ":class: this-run no-glossary",
        f"torch {importlib.metadata.version('torch')}, on {run.device}"
        + (f", {run.date}" if run.date else "")
        + (f", in {run.seconds:.0f} s" if run.seconds else "")
        + ".",
        f"Parameters: {parameters}." if parameters else "No parameters.",
        _verdicts(run),
        "Behind a rule headed *recorded* stands what a record says; all else ran for this page."
        if recorded
        else "",
        f"{{download}}`The executed notebook <{run.stem}.ipynb>`." if download else "",
        ":::",
    ]
    return "\n".join(line for line in lines if line)


def _short(value: Any) -> str:
    """A parameter's value in one line; of a text of several lines how many they are."""
    if isinstance(value, str) and "\n" in value.strip():
        return f"({len(value.strip().splitlines())} lines, below)"
    return repr(value)


def _verdicts(run: Run) -> str:
    parts = []
    for names, words in (
        (run.as_recorded, "as recorded for this torch release"),
        (run.read, "read from a record"),
        (run.no_record, "without a record"),
        (run.changed, "**not as recorded**"),
    ):
        if names:
            parts.append(f"{len(names)} {words}")
    if run.failed:
        parts.append("**a cell failed**")
    return f"Outcomes: {', '.join(parts)}." if parts else ""
