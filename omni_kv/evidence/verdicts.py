"""Verdicts: a measured outcome held against what was recorded for this torch release.

Torch releases differ in what they do with the same code, so there is no one right outcome. There is
one file of recorded outcomes for each release (`data/verdicts/torch-2.11.0.json`, ...), written by
`omni-kv verdicts record` and never by hand. A notebook ends an experiment with

    verdict("02.shared-halves", result, device=device, preset=preset)

and prints the same line on every release as long as the outcome is the recorded one.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from filelock import FileLock
from pydantic_core import to_jsonable_python

from omni_kv.evidence.cells import Strict
from omni_kv.evidence.paths import to_write
from omni_kv.evidence.records import (
    DATA_VARIABLE,
    Provenance,
    data_dir,
    first_error,
    provenance,
    replacing,
)

if TYPE_CHECKING:
    import pandas as pd

RECORD_VARIABLE = "OMNI_KV_RECORD_VERDICTS"
COMMAND_VARIABLE = "OMNI_KV_RECORD_COMMAND"


class VerdictChanged(AssertionError):
    """The measured outcome is another one than the record of this torch release."""


class VerdictFileError(ValueError):
    """A record file cannot be read; the message names the file and the field."""


class Verdict(Strict):
    """One recorded outcome of one experiment with one set of parameters."""

    name: str
    parameters: dict[str, Any]
    outcome: dict[str, Any]
    recorded: Provenance


class VerdictFile(Strict):
    """All recorded outcomes of one torch release."""

    torch: str
    verdicts: list[Verdict]

    @pydantic.field_validator("verdicts")
    @classmethod
    def _each_once(cls, verdicts: list[Verdict]) -> list[Verdict]:
        keys = [_key(v.name, v.parameters) for v in verdicts]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"recorded twice: {' '.join(twice[0])}")
        return verdicts


def verdict(name: str, outcome: object, **parameters: object) -> None:
    """Hold a measured outcome against the record of this torch release, and print what came of it.

    The record is found by torch release (its version without the local part), name and parameters.
    With `OMNI_KV_RECORD_VERDICTS=1` in the environment the outcome is recorded instead.

    Args:
        name: What was tried, starting with the notebook's number: `"02.shared-halves"`.
        outcome: A mapping, pydantic model or dataclass. Leave out times, addresses and paths: every
            value is compared for equality. NaN and infinities are kept as strings.
        **parameters: What the outcome depends on: device, preset, ...

    Raises:
        VerdictChanged: If the record holds another outcome.
        VerdictFileError: If the record file cannot be read.
        TypeError: If the outcome is no mapping or holds values that JSON has no form for.
    """
    measured, asked = _jsonable(outcome), _jsonable(parameters)
    release = torch_release()
    if os.environ.get(RECORD_VARIABLE) == "1":
        record(release, name, asked, measured)
        print(_as_recorded(name))
        return
    known = {_key(v.name, v.parameters): v for v in load(release).verdicts}
    entry = known.get(_key(name, asked))
    if entry is None:
        print(f"{name}: no record for torch {release} with {_flat(asked) or 'no parameters'}")
        print(f"measured: {_pretty(measured)}")
    elif _pretty(entry.outcome) == _pretty(measured):
        print(_as_recorded(name))
    else:
        message = _changed(entry, measured, release)
        print(message)
        raise VerdictChanged(message.splitlines()[0])


def torch_release() -> str:
    """The installed torch release, without the local part: `2.11.0` for `2.11.0+cu130`."""
    return importlib.metadata.version("torch").split("+")[0]


def verdict_file(release: str) -> Path:
    """The file that holds the recorded outcomes of one torch release."""
    return data_dir() / "verdicts" / f"torch-{release}.json"


def load(release: str) -> VerdictFile:
    """Read the recorded outcomes of one torch release; none recorded gives an empty file.

    Raises:
        VerdictFileError: If the file is there and cannot be read.
    """
    path = verdict_file(release)
    try:
        content = VerdictFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return VerdictFile(torch=release, verdicts=[])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise VerdictFileError(f"{path}: not a readable JSON file: {error}") from error
    except pydantic.ValidationError as error:
        raise VerdictFileError(f"{path}: {first_error(error)}") from error
    if content.torch != release:
        raise VerdictFileError(f"{path}: torch: holds records of {content.torch}, not of {release}")
    return content


def record(release: str, name: str, parameters: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Write one outcome into the release's file, in one step.

    An entry with the same outcome is left as it is, so recording again changes only what changed.
    Several processes may record at once: a lock beside the file lets one of them in at a time.

    Args:
        release: of torch.
        name: what was tried.
        parameters: what the outcome depends on.
        outcome: what came of it.

    Raises:
        InstalledFiles: If the file lies among those of an installed package.
        VerdictFileError: If the file is there and cannot be read.
    """
    path = to_write(verdict_file(release), DATA_VARIABLE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        _record(path, release, name, parameters, outcome)


def _record(
    path: Path, release: str, name: str, parameters: dict[str, Any], outcome: dict[str, Any]
) -> None:
    others = []
    for entry in load(release).verdicts:
        if _key(entry.name, entry.parameters) != _key(name, parameters):
            others.append(entry)
        elif _pretty(entry.outcome) == _pretty(outcome):
            return
    entry = Verdict(name=name, parameters=parameters, outcome=outcome, recorded=_here(parameters))
    entries = sorted([*others, entry], key=lambda v: _key(v.name, v.parameters))
    content = VerdictFile(torch=release, verdicts=entries).model_dump(mode="json")
    with replacing(path) as file:
        file.write_text(_pretty(content) + "\n", encoding="utf-8")


def verdict_table(prefix: str = "") -> pd.DataFrame:
    """All recorded outcomes whose name starts with `prefix`, one column a torch release.

    Args:
        prefix: A notebook's number, `"02"`, or more of a name.

    Returns:
        One row for each name, set of parameters and part of the outcome; an empty cell where a
        release has no such record.
    """
    import pandas as pd

    files = (data_dir() / "verdicts").glob("torch-*.json")
    releases = sorted((f.stem.removeprefix("torch-") for f in files), key=_by_number)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for release in releases:
        for entry in load(release).verdicts:
            if not entry.name.startswith(prefix):
                continue
            for part, value in entry.outcome.items():
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                row = rows.setdefault((entry.name, _flat(entry.parameters), part), {})
                row[f"torch {release}"] = shown
    names = ["verdict", "parameters", "outcome"]
    index = pd.MultiIndex.from_tuples(list(rows), names=names)
    columns = [f"torch {release}" for release in releases]
    return pd.DataFrame(list(rows.values()), index=index, columns=columns).fillna("").sort_index()


def _as_recorded(name: str) -> str:
    return f"{name}: as recorded for this torch release"


def _jsonable(value: object) -> dict[str, Any]:
    plain = to_jsonable_python(value, fallback=_scalar)
    if not isinstance(plain, dict):
        raise TypeError(f"an outcome is a mapping, a model or a dataclass, not {type(value)}")
    return json.loads(json.dumps(plain), parse_constant=str)  # NaN becomes "NaN", and equals itself


def _scalar(value: Any) -> Any:
    """A 0-d array's or tensor's number; dtypes and devices as text."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    if type(value).__module__.split(".")[0] == "torch" and not hasattr(value, "ndim"):
        return str(value)
    raise TypeError(f"a verdict cannot hold {type(value)}; give the number or text that counts")


def _key(name: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    return name, json.dumps(parameters, sort_keys=True)


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def _flat(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(parameters.items()))


def _by_number(release: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in release.split(".")]


def _changed(entry: Verdict, measured: dict[str, Any], release: str) -> str:
    origin = entry.recorded
    before, after = _pretty(entry.outcome).splitlines(), _pretty(measured).splitlines()
    lines = difflib.unified_diff(before, after, n=len(before) + len(after), lineterm="")
    head = f"{entry.name}: not as recorded for torch {release}"
    where = f"- recorded {origin.date} on {origin.device}, Python {origin.python}"
    return "\n".join([head, where, "+ measured now", *list(lines)[3:]])


def _here(parameters: Mapping[str, Any]) -> Provenance:
    command = os.environ.get(COMMAND_VARIABLE) or f"{RECORD_VARIABLE}=1"
    return provenance(str(parameters.get("device", "cpu")), command)
