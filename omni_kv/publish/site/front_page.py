"""What the site's own pages say, filled in from records: the templates are ``report/*.md``.

The front page is ``report/index.md``. A template is Jinja2; what it may use is ``context``.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from omni_kv.evidence import claims, outcomes, records, verdicts
from omni_kv.experiments.atlas import lookup
from omni_kv.experiments.atlas.cells import CACHES, CALLS, LAYOUTS, MODES
from omni_kv.experiments.atlas.records import atlas_dir
from omni_kv.experiments.atlas.records import read as read_atlas
from omni_kv.experiments.atlas.records import records as atlas_records
from omni_kv.publish.notebooks import notebooks_dir
from omni_kv.publish.site.pages import Run

#: Prose pages that come before the notebooks, and after them; the order on paper, too.
FIRST = ("in_short", "lookup")
LAST = (
    "statements",
    "records",
    "glossary",
    "docs/audit",
    "docs/architecture",
    "docs/pytorch_names",
)


def fill_in(source: Path, runs: Sequence[Run], *, paged: bool = False) -> None:
    """Render every template that lies in a folder, in place.

    Args:
        source: the staged sources of the site.
        runs: the executed notebooks, in order.
        paged: for the PDF, where all pages become one.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(source),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: " ".join(str(text).split()).replace("|", "\\|")
    given = context(runs, paged)
    for page in sorted(source.glob("*.md")):
        page.write_text(environment.get_template(page.name).render(given), encoding="utf-8")


def context(runs: Sequence[Run], paged: bool) -> dict[str, Any]:
    """What the templates may use, by name."""
    from omni_kv.publish.figures.site import what_the_clone_reads
    from omni_kv.publish.figures.svg import alt_text

    def to(number: str, text: str, heading: str = "") -> str:
        """A link to a notebook's heading, or the text alone if that notebook was not executed."""
        stem = next((run.stem for run in runs if run.stem.startswith(f"{number}_")), None)
        return f"[{text}](notebooks/{stem}.ipynb{heading and '#' + heading})" if stem else text

    def see(*numbers: str) -> str:
        """Links to the notebooks of these numbers, as far as they were executed."""
        chosen = [run for run in runs if run.stem.split("_")[0] in numbers]
        pages = [f"[{run.title}](notebooks/{run.stem}.ipynb)" for run in chosen]
        return f"*Shown in:* {', '.join(pages)}." if pages else ""

    links = (metadata("omni-kv").get_all("Project-URL") or []) if metadata("omni-kv") else []
    return {
        "paged": paged,
        "see": see,
        "to": to,
        "one_tensor": one_tensor(),
        "runs": runs,
        "first": FIRST,
        "last": LAST,
        "urls": dict(link.split(", ", 1) for link in links),
        "outcomes": outcomes.outcome_lines(),
        "atlas": _atlas(),
        "releases": outcomes.releases(),
        "clone_alt": alt_text(what_the_clone_reads()),
        "statements": _statements(runs),
        "live": [_live(run) for run in runs],
        "recorded": _recorded(),
        "revision": records.revision(),
        "torch": verdicts.torch_release(),
        "python": platform.python_version(),
    }


def one_tensor() -> str:
    """The op before and after, as notebook 05 runs it: the code that it keeps under that id."""
    import nbformat

    for path in notebooks_dir().glob("05_*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.id == "one-tensor":
                return str(cell.source.partition("\n\n\ndef ")[0])
    return ""


#: Layouts that stand in the front page's table; the lookup has them all.
FRONT_LAYOUTS = (
    "shared_k_first",
    "shared_v_first",
    "separate",
    "one_tensor",
    "interleaved_slot",
    "sliced_in_graph",
)


def _atlas() -> dict[str, Any]:
    """What the pages say of the atlas, from its records on a CPU."""
    known = atlas_records()
    return {
        "calls": lookup.SHORT_CALLS.values(),
        "table": lookup.outcome_table(known, FRONT_LAYOUTS),
        "key": lookup.KEY,
        "all_calls": CALLS.values(),
        "newest": lookup.newest_table(known),
        "releases": [record.release for record in known],
        "always": [LAYOUTS[name] for name in lookup.always_in_place(known)],
        "rows": lookup.rows(known),
        "layouts": LAYOUTS,
        "call_names": CALLS,
        "caches": CACHES,
        "modes": MODES,
    }


def _statements(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The ledger by source: how many claims got which verdict, and a row for each."""
    known = list(claims.load()) if (verdicts.data_dir() / "claims.toml").is_file() else []
    found: dict[str, dict[str, Any]] = {}
    for claim in known:
        source = "the pull request" if claim.source == "pull request" else claim.source
        part = found.setdefault(source, {"count": Counter(), "rows": []})
        part["count"][claim.verdict] += 1
        said = f"{claim.statement}<br>*{claim.said}* {_where(claim, runs)}"
        part["rows"].append((f"**{claim.verdict}**", said))
    return found


def _where(claim: Any, runs: Sequence[Run]) -> str:
    """The experiments behind a claim, each linked to its notebook if that was executed."""
    parts = []
    for text in filter(None, claim.experiment.split("; ")):
        stem, _, place = text.partition(": ")
        run = next((run for run in runs if run.stem == stem), None)
        page = f"[{run.title}](notebooks/{stem}.ipynb)" if run else f"`{stem}`"
        parts.append(f"{page}, {place}" if place else page)
    return f"({'; '.join(parts)})" if parts else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _live(run: Run) -> tuple[str, str]:
    """What ran for this report, and how its outcomes compare with the records."""
    told = f"live, for this report: {run.device}, torch {verdicts.torch_release()}"
    told += f", {run.date}" if run.date else ""
    told += f"; {_count(len(run.as_recorded), 'outcome')} as recorded" if run.as_recorded else ""
    told += f"; {_count(len(run.read), 'outcome')} read from a record" if run.read else ""
    told += f", {len(run.no_record)} without a record" if run.no_record else ""
    told += f", **{len(run.changed)} not as recorded**" if run.changed else ""
    told += ", **a cell failed**" if run.failed else ""
    return f"[{run.title}](notebooks/{run.stem}.ipynb)", told


def _recorded() -> list[tuple[str, str]]:
    """Every file of recorded outcomes and measurements, with where and when it was made."""
    rows = []
    for release in outcomes.releases():
        made = Counter(
            (v.recorded.device, v.recorded.date) for v in verdicts.load(release).verdicts
        )
        for (device, date), count in sorted(made.items()):
            told = f"recorded: {device}, torch {release}, {date}; {_count(count, 'outcome')}"
            rows.append((f"torch-{release}.json<br>in data/verdicts", told))
    for path in sorted((records.data_dir() / "evidence").glob("*/*.json")):
        record = records.read(path)
        label = re.sub("^recorded on", "recorded:", record.provenance.label)
        name = f"{path.name}<br>in data/evidence/{path.parent.name}"
        rows.append((name, f"{label}; {_count(len(record.cells), 'measurement')}"))
    for path in sorted(atlas_dir().glob("torch-*.json")):
        atlas = read_atlas(path)
        label = re.sub("^recorded on", "recorded:", atlas.recorded.label)
        rows.append((f"{path.name}<br>in data/atlas", f"{label}; {len(atlas.cells)} cells"))
    return rows
