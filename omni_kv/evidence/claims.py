"""The claims ledger: what the pull request and this investigation say, and what stands behind it.

Each entry of ``data/claims.toml`` names a statement, a verdict on it, and *checks*: fields of
recorded outcomes, with the values that they must have for the verdict to hold. A recorded outcome
that contradicts its claim fails the tests; the records themselves are held against live runs by the
notebooks' verdict cells.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pydantic

from omni_kv.evidence.records import data_dir, first_error

VerdictOnClaim = Literal["confirmed", "refined", "refuted", "not tested here"]


class ClaimsError(ValueError):
    """The ledger cannot be read, or a check cannot be made; the message names the entry."""


class Check(pydantic.BaseModel):
    """A field of a recorded outcome, and what it must be.

    Attributes:
        file: record file, relative to ``data/``; a JSON file.
        select: fields that single out one entry of the file's list ``verdicts`` or ``cells``.
        field: path to the value within the entry, its parts joined by ``/``. A list of numbers,
            such as the seconds of repeated runs, stands for its median.
        per: fields that single out another entry of the same file; the value is divided by its.
        equals: the value must equal this, if given.
        at_least: the value must be a number of at least this, if given.
        at_most: the value must be a number of at most this, if given.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    file: str
    select: dict[str, str]
    field: str
    per: dict[str, str] | None = None
    equals: Any = None
    at_least: float | None = None
    at_most: float | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Check:
        if self.equals is None and self.at_least is None and self.at_most is None:
            raise ValueError("a check needs equals, at_least or at_most")
        return self

    def found(self) -> Any:
        """The recorded value.

        Raises:
            ClaimsError: if there is no such file, entry or field.
        """
        value = self._value(self.select)
        return value if self.per is None else value / self._value(self.per)

    def _value(self, select: dict[str, str]) -> Any:
        path = data_dir() / self.file
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ClaimsError(f"{self.file}: cannot be read: {error}") from error
        entries = [
            entry
            for entry in content.get("verdicts") or content.get("cells") or []
            if all(entry.get(key) == value for key, value in select.items())
        ]
        if len(entries) != 1:
            raise ClaimsError(f"{self.file}: {len(entries)} entries with {select}, not 1")
        value: Any = entries[0]
        for part in self.field.split("/"):
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ClaimsError(f"{self.file}: {select}: no field {self.field!r}") from error
        if isinstance(value, list) and value and all(isinstance(v, float) for v in value):
            return statistics.median(value)
        return value

    def contradiction(self) -> str | None:
        """Say how the record contradicts the check; None if it does not.

        Raises:
            ClaimsError: if there is no such record.
        """
        value = self.found()
        where = f"{self.file}: {self.select}: {self.field} is {value!r}"
        if self.equals is not None and value != self.equals:
            return f"{where}, not {self.equals!r}"
        if self.at_least is not None and not value >= self.at_least:
            return f"{where}, less than {self.at_least}"
        if self.at_most is not None and not value <= self.at_most:
            return f"{where}, more than {self.at_most}"
        return None


class Claim(pydantic.BaseModel):
    """One statement and what came of it.

    Attributes:
        id: a short name.
        source: who says it.
        statement: what is said.
        verdict: what came of it.
        said: what was found, in a sentence or two; for ``not tested here``, why not.
        experiment: the notebook, and the function or verdict in it, that tests the statement.
        checks: what must stand in the records for the verdict to hold.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    id: str
    source: Literal["pull request", "this investigation"]
    statement: str
    verdict: VerdictOnClaim
    said: str
    experiment: str = ""
    checks: tuple[Check, ...] = ()

    @pydantic.model_validator(mode="after")
    def _has_an_experiment(self) -> Claim:
        if self.verdict != "not tested here" and not (self.experiment and self.checks):
            raise ValueError("a claim that was tested needs an experiment and checks")
        return self

    @property
    def evidence(self) -> list[str]:
        """The record files behind it."""
        return sorted({check.file for check in self.checks})

    def contradictions(self) -> list[str]:
        """How the records contradict the verdict; empty if they do not.

        Raises:
            ClaimsError: if a record that the claim rests on is missing.
        """
        return [text for check in self.checks if (text := check.contradiction())]


def load(path: Path | None = None) -> list[Claim]:
    """Read the ledger, in its order.

    Args:
        path: the file; ``data/claims.toml`` by default.

    Raises:
        ClaimsError: if it cannot be read or an entry does not fit; the message names it.
    """
    path = path or data_dir() / "claims.toml"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("claim", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ClaimsError(f"{path.name}: cannot be read: {error}") from error
    claims = []
    for entry in entries:
        try:
            claims.append(Claim.model_validate(entry))
        except pydantic.ValidationError as error:
            what = first_error(error, "the entry")
            raise ClaimsError(f"{path.name}: claim {entry.get('id')!r}: {what}") from error
    ids = [claim.id for claim in claims]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise ClaimsError(f"{path.name}: claim {twice[0]!r} stands there twice")
    return claims


def table(experiment: str = "") -> pd.DataFrame:
    """The claims whose experiment begins so, as a table.

    Args:
        experiment: a notebook's number, such as ``04``; empty for all claims.
    """
    rows = [
        {
            "who": claim.source,
            "statement": claim.statement,
            "verdict": claim.verdict,
            "what was found": claim.said,
            "experiment": claim.experiment,
        }
        for claim in load()
        if claim.experiment.startswith(experiment)
    ]
    return pd.DataFrame(rows)
