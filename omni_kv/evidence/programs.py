"""What came of whole programs: notebooks, reproductions, files of PyTorch's own tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from omni_kv.evidence.cells import Strict

if TYPE_CHECKING:
    import pandas as pd


class NotebookRun(Strict):
    """One run of a notebook in processes of its own, with a fresh compile cache.

    Attributes:
        name: unique within the record.
        notebook: its number.
        repeat: number of the run.
        outcomes: what each of its experiments came to, by the name of the verdict.
        failure: the last line that the command printed, if the notebook did not run to its end.
        seconds: wall-clock time.
    """

    kind: Literal["notebook"] = "notebook"
    name: str
    notebook: str
    repeat: int
    outcomes: dict[str, dict[str, Any]]
    failure: str | None = None
    seconds: float


class ReproductionRun(Strict):
    """How a reproduction of ``upstream/`` ended.

    Attributes:
        name: unique within the record.
        number: of its folder.
        device: that it was given.
        fix: name of the candidate fix that was in place; None without.
        exit_code: 0 is right, 1 is wrong.
        printed: what it printed.
    """

    kind: Literal["reproduction"] = "reproduction"
    name: str
    number: str
    device: str
    fix: str | None = None
    exit_code: int
    printed: list[str]


class TestCounts(Strict):
    """How one file of PyTorch's own tests ended, with and without candidate fixes.

    Attributes:
        name: of the file.
        sha256: first digits of the digest of the file that was run.
        tag: of the release whose file it is, as whoever ran it said.
        fixes: names of the fixes, which were in place together.
        without: how many tests ended how, without a fix.
        with_fix: the same with them.
        changed: tests that ended otherwise with the fixes: name, then how without and with them.
        reasons: outcome and message of tests that did not pass without a fix, and how many.
        unloaded: why the file could not be loaded; None if it was.
    """

    __test__ = False  # no test itself

    kind: Literal["tests"] = "tests"
    name: str
    sha256: str
    tag: str | None = None
    fixes: list[str]
    without: dict[str, int]
    with_fix: dict[str, int]
    changed: dict[str, tuple[str, str]] = pydantic.Field(default_factory=dict)
    reasons: dict[str, int] = pydantic.Field(default_factory=dict)
    unloaded: str | None = None


def notebook_table(runs: Sequence[NotebookRun]) -> pd.DataFrame:
    """One row a notebook: how often it ran, and which of its outcomes differ between runs."""
    import pandas as pd

    rows = []
    for notebook in sorted({run.notebook for run in runs}):
        first, *others = [run for run in runs if run.notebook == notebook]
        names = sorted({name for run in (first, *others) for name in run.outcomes})
        differ = [
            n for n in names if any(r.outcomes.get(n) != first.outcomes.get(n) for r in others)
        ]
        rows.append(
            {
                "notebook": notebook,
                "runs": 1 + len(others),
                "of these, failed": sum(run.failure is not None for run in (first, *others)),
                "outcomes in a run": len(names),
                "that differ between runs": ", ".join(differ) or "none",
            }
        )
    return pd.DataFrame(rows).set_index("notebook")
