"""The site's front page, as Markdown: the outcome, the statements, and where each comes from."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_kv.evidence import claims, outcomes, verdicts
from omni_kv.publish.site.pages import Run

HAPPENED = """\
A team compiled a video model with `torch.compile`. It crashed with an illegal memory access. Their
pull request, *Allocate K and V separately so the compiled path stops cloning the pool*, traced it
to the KV pool. A custom op writes to `key_pool` and `value_pool`; the two were halves of one
allocation; and the compiler cloned the pool in every layer and every step. With two allocations it
ran. The pull request stops there. *Why* is the clone made, why does copying memory crash, and what
happens where it does not crash? This report runs the same layer again, opens the compiler at each
stage, and holds every statement against a measurement."""


TITLE = "# torch.compile and a paged KV pool"

#: Prose pages that come before the notebooks.
FIRST = ("in_short",)

#: Pages of the code's own documentation, at the end.
CODE = ("docs/architecture", "docs/pytorch_names")


def front_page(runs: Sequence[Run], pages: Sequence[str]) -> str:
    """The site's front page.

    Args:
        runs: the executed notebooks, in order.
        pages: names of the prose pages.
    """
    return _joined(
        TITLE,
        HAPPENED,
        _picture(),
        "## The outcome",
        _list(outcomes.outcome_lines()),
        "How to read the figure, and what to do about it: {doc}`in_short`.",
        "## The notebooks",
        _notebooks(runs),
        *_ledger(runs),
        *_origins(runs),
        _toctree("Start", [page for page in pages if page in FIRST]),
        _toctree("Notebooks", [f"notebooks/{run.stem}" for run in runs]),
        _toctree("Reference", [*(page for page in pages if page not in FIRST), *CODE]),
    )


def paper_pages(runs: Sequence[Run], pages: Sequence[str]) -> dict[str, str]:
    """The same for the paged report: a first page with the contents, and the rest as chapters.

    What follows a section's heading on one page would become part of that section.

    Args:
        runs: the executed notebooks, in order.
        pages: names of the prose pages.

    Returns:
        Pages by name.
    """
    first, last = [page for page in pages if page in FIRST], [p for p in pages if p not in FIRST]
    ledger, origins = _joined(*_ledger(runs)), _joined(*_origins(runs))
    made = {"statements": ledger, "origins": origins}
    chapters = {name: text.replace("\n##", "\n#")[1:] for name, text in made.items() if text}
    order = [*first, *(f"notebooks/{run.stem}" for run in runs), *chapters, *last, *CODE]
    chapters["index"] = _joined(
        TITLE,
        HAPPENED,
        _picture(),
        "**The outcome**",
        _list(outcomes.outcome_lines()),
        "**Contents**",
        _list([f"{{doc}}`{name}`" for name in order]),
        _toctree("", order),
    )
    return chapters


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n" if any(parts) else ""


def fill_in(page: Path, runs: Sequence[Run]) -> None:
    """Put into a prose page what is computed: ``{{ outcomes }}``, and ``{{ see("02") }}``.

    The latter links to the notebooks of these numbers, as far as they were executed.
    """

    def see(found: re.Match[str]) -> str:
        numbers = re.findall(r'"(\d+)"', found[1])
        chosen = [run for run in runs if run.stem.split("_")[0] in numbers]
        pages = [f"[{run.title}](notebooks/{run.stem}.ipynb)" for run in chosen]
        return f"*Shown in:* {', '.join(pages)}." if pages else ""

    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\{\{ see\((.*?)\) \}\}", see, text)
    text = text.replace("{{ outcomes }}", _list(outcomes.outcome_lines()))
    page.write_text(text, encoding="utf-8")


def _picture() -> str:
    from omni_kv.publish.figures.site import what_the_clone_reads
    from omni_kv.publish.figures.svg import alt_text

    alt = alt_text(what_the_clone_reads())
    return f"```{{image}} pictures/what-the-clone-reads.svg\n:alt: {alt}\n```"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)) or (
        "Nothing is recorded yet."
    )


def _notebooks(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        time = re.split(r"[;.](?:\s|$)", run.time)[0]
        name = f"[{run.title}](notebooks/{run.stem}.ipynb)"
        rows.append((f"{name}<br>{time}" if time else name, run.question))
    return _table(("notebook", "its question"), rows)


def _ledger(runs: Sequence[Run]) -> list[str]:
    """The statements and their verdicts, if there is a ledger."""
    ledger = verdicts.data_dir() / "claims.toml"
    if not ledger.is_file():
        return []
    parts = [
        "## The statements, one by one",
        "Every statement of the pull request and of this investigation, what came of it, and the "
        "experiment that tests it.",
    ]
    known: list[Any] = list(claims.load())
    for source in dict.fromkeys(claim.source for claim in known):
        chosen = [claim for claim in known if claim.source == source]
        count = {
            v: sum(c.verdict == v for c in chosen) for v in dict.fromkeys(c.verdict for c in chosen)
        }
        parts.append(f"### From {'the pull request' if source == 'pull request' else source}")
        parts.append(f"{', '.join(f'{n} {verdict}' for verdict, n in count.items())}.")
        rows = [
            (f"**{c.verdict}**", f"{c.statement}<br>*{c.said}* {_where(c, runs)}") for c in chosen
        ]
        parts.append(_table(("verdict", "statement, *what we found*, experiment"), rows))
    return parts


def _where(claim: Any, runs: Sequence[Run]) -> str:
    """The experiments behind a claim, each linked to its notebook if that was executed."""
    parts = []
    for text in filter(None, claim.experiment.split("; ")):
        stem, _, place = text.partition(": ")
        run = next((run for run in runs if run.stem == stem), None)
        page = f"[{run.title}](notebooks/{stem}.ipynb)" if run else f"`{stem}`"
        parts.append(f"{page}, {place}" if place else page)
    return f"({'; '.join(parts)})" if parts else ""


def _origins(runs: Sequence[Run]) -> list[str]:
    """What ran on this machine for this report, and what was recorded elsewhere."""
    from omni_kv.evidence import records as evidence

    rows = []
    for run in runs:
        outcome = f"{len(run.as_recorded)} outcomes as recorded"
        outcome += f", {len(run.no_record)} without a record" if run.no_record else ""
        outcome += f", **{len(run.changed)} not as recorded**" if run.changed else ""
        outcome += ", **a cell failed**" if run.failed else ""
        where = f"live, for this report: {run.device}, torch {verdicts.torch_release()}"
        when = f", {run.date}" if run.date else ""
        rows.append((f"[{run.title}](notebooks/{run.stem}.ipynb)", f"{where}{when}; {outcome}"))
    for release in outcomes.releases():
        entries = verdicts.load(release).verdicts
        for device, date in sorted({(e.recorded.device, e.recorded.date) for e in entries}):
            count = sum((e.recorded.device, e.recorded.date) == (device, date) for e in entries)
            where = f"recorded: {device}, torch {release}, {date}"
            rows.append((f"torch-{release}.json<br>in data/verdicts", f"{where}; {count} outcomes"))
    for path in sorted((evidence.data_dir() / "evidence").glob("*/*.json")):
        record = evidence.read(path)
        name = f"{path.name}<br>in data/evidence/{path.parent.name}"
        label = record.provenance.label.replace("recorded on", "recorded:")
        rows.append((name, f"{label}; {len(record.cells)} measurements"))
    return [
        "## What ran, and what is on record",
        f"Built from revision `{verdicts._revision()}` with torch {verdicts.torch_release()} and "
        f"Python {platform.python_version()}.",
        _table(("what", "where it comes from"), rows),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in lines)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _toctree(caption: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    head = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(names) + "\n```"
