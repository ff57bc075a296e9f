"""The atlas' records: one JSON file a release and kind of device, written and read here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pydantic

from omni_kv.evidence.cells import Strict
from omni_kv.evidence.records import Provenance, data_dir, replacing
from omni_kv.evidence.verdicts import VerdictChanged
from omni_kv.experiments.atlas.cells import CellResult


class AtlasError(ValueError):
    """A record cannot be read or does not fit another; one line."""


class AtlasRecord(Strict):
    """The cells of one torch release on one kind of device.

    Attributes:
        release: version of torch without the local part.
        kind: ``cpu`` or ``cuda``.
        recorded: where, when and by which command.
        fixes: names of the candidate fixes that were in place; None without.
        seconds: time that the cells took, added up over workers.
        cells: results, in the order of the axes.
    """

    release: str
    kind: str
    recorded: Provenance
    fixes: list[str] | None = None
    seconds: float
    cells: list[CellResult]

    def by_key(self) -> dict[str, CellResult]:
        """The results by the key of their cell."""
        return {result.cell: result for result in self.cells}


def atlas_dir() -> Path:
    """Where the records that come with the project lie."""
    return data_dir() / "atlas"


def record_path(
    folder: Path,
    release: str,
    kind: str,
    shard: str | None = None,
    fixes: Sequence[str] = (),
) -> Path:
    """The file of one release; shards of it, and records with fixes, have files of their own.

    ``records`` does not find those.
    """
    part = f".shard-{shard.replace('/', '-of-')}" if shard else ""
    fixed = f"-fix-{'+'.join(fixes)}" if fixes else ""
    return folder / f"torch-{release}-{kind}{fixed}{part}.json"


def read(path: Path) -> AtlasRecord:
    """Read one record.

    Raises:
        AtlasError: if it cannot be read or does not fit; the message names the file.
    """
    try:
        return AtlasRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AtlasError(f"{path}: not a readable JSON file: {error}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise AtlasError(f"{path}: {field}: {first['msg']}") from error


def write(record: AtlasRecord, path: Path) -> None:
    """Write a record in one step."""
    with replacing(path) as new:
        text = json.dumps(record.model_dump(mode="json", exclude_none=True), indent=1)
        new.write_text(text + "\n", encoding="utf-8")


def merge(records: Sequence[AtlasRecord]) -> AtlasRecord:
    """Put shards of one release together.

    Raises:
        AtlasError: if they are of two releases, devices or sets of fixes, or answer a cell twice.
    """
    first = records[0]
    cells: dict[str, CellResult] = {}
    for record in records:
        for name in ("release", "kind", "fixes"):
            if getattr(record, name) != getattr(first, name):
                raise AtlasError(f"two of {name}: {getattr(first, name)}, {getattr(record, name)}")
        if record.recorded.revision != first.recorded.revision:
            raise AtlasError("the shards were recorded by two revisions of the code")
        for result in record.cells:
            if result.cell in cells:
                raise AtlasError(f"two answers for {result.cell}")
            cells[result.cell] = result
    return first.model_copy(
        update={"cells": list(cells.values()), "seconds": sum(r.seconds for r in records)}
    )


def records(kind: str = "cpu", folder: Path | None = None) -> list[AtlasRecord]:
    """All records of one kind of device without fixes, by release."""
    found = [read(path) for path in (folder or atlas_dir()).glob(f"torch-*-{kind}.json")]
    return sorted((r for r in found if not r.fixes), key=lambda r: by_number(r.release))


def fixed_records(release: str, kind: str = "cpu", folder: Path | None = None) -> list[AtlasRecord]:
    """The whole records of one release that were made with fixes in place, by their fixes."""
    paths = sorted((folder or atlas_dir()).glob(f"torch-{release}-{kind}-fix-*.json"))
    return [read(path) for path in paths if path.stem.count(".") == release.count(".")]


def by_number(release: str) -> list[int]:
    """A release as numbers, to sort by."""
    return [int(part) if part.isdigit() else -1 for part in release.split(".")]


def label(result: CellResult) -> str:
    """The outcome, and for a right one whether pools were copied."""
    if result.outcome != "right":
        return result.outcome
    return {True: "right", False: "right, cloned", None: "right, copies not known"}[result.in_place]


def differences(live: Iterable[CellResult], record: AtlasRecord) -> dict[str, tuple[str, str]]:
    """Cells whose outcome is another one than recorded: by key, as recorded and as measured.

    A cell that the record does not hold counts as ``not recorded``.
    """
    known = record.by_key()
    pairs = {
        result.cell: (
            label(known[result.cell]) if result.cell in known else "not recorded",
            label(result),
        )
        for result in live
    }
    return {cell: pair for cell, pair in pairs.items() if pair[0] != pair[1]}


def hold(live: Iterable[CellResult], record: AtlasRecord) -> str:
    """Say that the cells are as recorded.

    Raises:
        VerdictChanged: if one is not; the message names every such cell with both outcomes.
    """
    live = list(live)
    changed = differences(live, record)
    if changed:
        lines = [f"{cell}: recorded {was}, now {now}" for cell, (was, now) in changed.items()]
        raise VerdictChanged(f"not as recorded for torch {record.release}: " + "; ".join(lines))
    return f"{len(live)} cells: as recorded for torch {record.release}"
