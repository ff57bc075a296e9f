"""Evidence: what was measured on a machine that the reader may not have, as typed records.

One file holds one experiment. It says where, when, with which versions and by which command it was
recorded, and holds raw samples; medians, ratios and verdicts are computed from them when they are
read. Records lie in ``data/evidence/<device>-torch<version>/<experiment>.json``, written by
``omni-kv record``.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from omni_kv.evidence.cells import (
    Agreement,
    AuditRun,
    Clones,
    CrashRun,
    GuardedRun,
    Profile,
    RolloutRun,
    SanitizerRun,
    Strict,
    Timing,
)
from omni_kv.evidence.paths import project_dir, to_write
from omni_kv.evidence.programs import NotebookRun, ReproductionRun, TestCounts

SCHEMA_VERSION = 1
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
DATA_VARIABLE = "OMNI_KV_DATA"
DEVICE_VARIABLE = "OMNI_KV_DEVICE_RECORD"
#: Names the commit where the code runs from a copy without its git folder.
REVISION_VARIABLE = "OMNI_KV_REVISION"


class EvidenceError(ValueError):
    """A record is not there or does not fit; the message names the file and the field."""


class Provenance(Strict):
    """Where, when, with what and by which command something was recorded.

    Attributes:
        device: name of the device, such as ``NVIDIA H200``.
        platform: operating system and processor.
        python: version.
        torch: version, with the local part.
        date: UTC, ``YYYY-MM-DD``.
        revision: commit of the checkout, with ``+`` where the code differed from it; outside one
            the package's version.
        command: what was typed.
        card: a digest that tells one card from another; None on a CPU.
        driver: version of the GPU driver; None on a CPU.
        cuda: version that torch was built for; None on a CPU.
        triton: version, if installed.
        flash_attn: version of flash-attn 2, if installed.
        flash_attn_3: package and version that FlashAttention 3 came from, if installed.
    """

    device: str
    platform: str
    python: str
    torch: str
    date: str = pydantic.Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    revision: str
    command: str
    card: str | None = None
    driver: str | None = None
    cuda: str | None = None
    triton: str | None = None
    flash_attn: str | None = None
    flash_attn_3: str | None = None

    @pydantic.model_serializer(mode="wrap")
    def _without_what_is_not_there(
        self, serialize: pydantic.SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    def same_machine(self, other: Provenance) -> bool:
        """Whether both come from one card with one set of versions and one state of the code."""
        leave_out = {"date", "command"}
        return self.model_dump(exclude=leave_out) == other.model_dump(exclude=leave_out)

    @property
    def label(self) -> str:
        """Device and date, as figures and tables carry them."""
        return f"recorded on {self.device}, torch {self.torch}, {self.date}"


Cell = Annotated[
    CrashRun
    | GuardedRun
    | NotebookRun
    | ReproductionRun
    | AuditRun
    | SanitizerRun
    | Clones
    | TestCounts
    | Timing
    | Profile
    | Agreement
    | RolloutRun,
    pydantic.Field(discriminator="kind"),
]
C = TypeVar("C", bound=Strict)


class Record(Strict):
    """All of one experiment.

    Attributes:
        schema_version: of this file's form.
        experiment: its name.
        provenance: where and when; the same for all cells.
        parameters: what was asked for.
        units: names of the parts that are complete, in the order in which they ran.
        cells: what came out.
    """

    schema_version: Literal[1] = 1
    experiment: str
    provenance: Provenance
    parameters: dict[str, str | int | float | bool | None]
    units: list[str]
    cells: list[Cell]

    @pydantic.field_validator("cells")
    @classmethod
    def _each_once(cls, cells: list[Any]) -> list[Any]:
        names = [(cell.kind, cell.name) for cell in cells]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"recorded twice: {' '.join(twice[0])}")
        return cells

    def of(self, kind: type[C]) -> dict[str, C]:
        """The cells of one kind, by name."""
        return {cell.name: cell for cell in self.cells if isinstance(cell, kind)}


def data_dir() -> Path:
    """The project's ``data`` folder, or what ``OMNI_KV_DATA`` names."""
    return Path(os.environ.get(DATA_VARIABLE) or project_dir() / "data")


def folder_name(provenance: Provenance) -> str:
    """The folder of a machine's records, such as ``nvidia-h200-torch2.11.0``."""
    device = re.sub(r"[^a-z0-9]+", "-", provenance.device.lower()).strip("-")
    return f"{device}-torch{provenance.torch.split('+')[0]}"


def devices() -> list[str]:
    """The folders that hold records."""
    return sorted({path.parent.name for path in (data_dir() / "evidence").glob("*/*.json")})


def chosen_device() -> str | None:
    """The folder that ``OMNI_KV_DEVICE_RECORD``, or else ``data/evidence/default``, names.

    Raises:
        EvidenceError: if the folder that the variable names holds no records.
    """
    named = os.environ.get(DEVICE_VARIABLE)
    if named and named not in devices():
        have = ", ".join(devices()) or "nothing recorded"
        raise EvidenceError(f"{DEVICE_VARIABLE}: no records of {named!r}; there are: {have}")
    try:
        default = (data_dir() / "evidence" / "default").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        default = ""
    return named or default or None


def load(experiment: str, device: str | None = None) -> Record:
    """Read the record of an experiment, of one device.

    Args:
        experiment: its name, such as ``hypotheses``.
        device: the folder that holds it, such as ``nvidia-h200-torch2.11.0``. By default the one
            that ``chosen_device`` names; if it names none, the first in name order that has it.

    Raises:
        EvidenceError: if there is no such record, or it does not fit.
    """
    root = data_dir() / "evidence"
    holders = [d for d in devices() if (root / d / f"{experiment}.json").exists()]
    device = device or chosen_device() or next(iter(holders), None)
    if device not in holders:
        where = f" on {device}" if device else ""
        have = f"recorded on: {', '.join(holders)}" if holders else "nothing recorded"
        raise EvidenceError(f"no record of experiment {experiment!r}{where}; {have}")
    return read(root / str(device) / f"{experiment}.json")


def read(path: Path) -> Record:
    """Read one record file.

    Raises:
        EvidenceError: if it cannot be read or does not fit; the message names the first field.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EvidenceError(f"{path}: not a readable JSON file: {error}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise EvidenceError(
            f"{path}: schema_version: {version}, but this code reads {SCHEMA_VERSION}; "
            "record the experiment again, or take the code that wrote it"
        )
    try:
        return Record.model_validate(content)
    except pydantic.ValidationError as error:
        raise EvidenceError(f"{path}: {first_error(error)}") from error


def first_error(error: pydantic.ValidationError, whole: str = "the whole file") -> str:
    """Field and message of the first thing that is wrong; `whole` stands for no single field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    return f"{field}: {first['msg']}"


def write(record: Record, path: Path) -> None:
    """Write a record in one step: an interrupted write leaves the old file."""
    text = json.dumps(record.model_dump(mode="json", exclude_none=True), indent=1)
    with replacing(path) as new:
        new.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place when the block ends well.

    Raises:
        InstalledFiles: if the path lies among the files of an installed package.
    """
    to_write(path, DATA_VARIABLE)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    new = Path(name)
    new.chmod(0o644)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def provenance(device: str, command: str) -> Provenance:
    """Where, when and with what this process runs.

    Args:
        device: ``cpu``, ``cuda``, ...
        command: what was typed, without absolute paths, as ``command_line`` gives it.
    """
    import torch

    on_gpu = device.startswith("cuda")
    return Provenance(
        device=torch.cuda.get_device_name(device) if on_gpu else _processor(),
        platform=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        revision=revision(),
        command=command,
        card=_card(device) if on_gpu else None,
        driver=_driver() if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
        triton=_version("triton"),
        flash_attn=_version("flash-attn"),
        flash_attn_3=_flash_attn_3(),
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"CPU ({line.split(':', 1)[1].strip()})"
    return f"CPU ({platform.machine()})"


def _card(device: str) -> str:
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(uuid.encode()).hexdigest()[:8]


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.partition("\n")[0] or None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flash_attn_3() -> str | None:
    """FlashAttention 3 has no one package; the module says which ones may have brought it."""
    names = importlib.metadata.packages_distributions().get("flash_attn_interface", [])
    found = [f"{name} {_version(name)}" for name in names]
    return found[0] if found else None


def revision() -> str:
    """The checkout's commit, with ``+`` where the code differs from it.

    Outside this project's own checkout, as in an installed wheel, it is the package's version; and
    ``unknown`` if it is not installed either.
    """
    if os.environ.get(REVISION_VARIABLE):
        return os.environ[REVISION_VARIABLE]
    git = ("git", "-C", str(PACKAGE_PARENT))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD") if _is_checkout() else ""
    changes = _output(*git, "status", "--porcelain", "--", "omni_kv", "notebooks")
    return commit + ("+" if changes else "") if commit else _version("omni-kv") or "unknown"


def _is_checkout() -> bool:
    """Whether the repository around the package is this project's, not one that holds it."""
    root = _output("git", "-C", str(PACKAGE_PARENT), "rev-parse", "--show-toplevel")
    if not root or Path(root).resolve() != PACKAGE_PARENT:
        return False
    try:
        project = tomllib.loads((PACKAGE_PARENT / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    return bool(project.get("project", {}).get("name") == "omni-kv")


def command_line() -> str:
    """What was typed to start this process, with the last part of each absolute path."""
    words = [re.sub(r"(^|=)/(?:.*/)?(.*)$", r"\1\2", word) for word in sys.argv]
    return shlex.join([Path(words[0]).name, *words[1:]])


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
