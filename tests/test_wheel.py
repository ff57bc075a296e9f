"""An installed wheel does from an empty folder what a checkout does, and stays as it was."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.compiles

CHECKOUT = Path(__file__).resolve().parent.parent
CASE = """
import torch

def make_case():
    def double(x):
        return x * 2
    return double, (torch.ones(4),)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel lays it out; built from a copy with no more than git's.

    Untracked files and caches of the checkout are copied as well, except for what git ignores.
    """
    root = tmp_path_factory.mktemp("wheel")
    source = root / "source"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "share")
    for name in ("omni_kv", "notebooks", "data", "report", "docs", "upstream"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root / "dist")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = (root / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


@pytest.fixture(scope="module")
def light(installed: Path) -> Path:
    """The Python of an environment that holds the wheel and what it requires, without extras.

    The packages are links to those of this environment: nothing is downloaded.
    """
    env = installed.parent / "light"
    venv.create(env, symlinks=True)
    (folder,) = env.glob("lib/python3.*/site-packages")
    for name in required("omni-kv", path=installed):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {
            "..",
            "__pycache__",
        }:
            there = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if there.exists() and not (folder / top).exists():
                (folder / top).symlink_to(there)
    return env / "bin" / "python"


def required(name: str, path: Path | None = None) -> set[str]:
    """The distributions that one needs, directly or not; not itself."""
    found: set[str] = set()
    options = {"path": [str(path)]} if path else {}
    (first,) = importlib.metadata.distributions(name=name, **options)
    waiting = [first]
    while waiting:
        for line in waiting.pop().requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if requirement.name in found or (marker and not marker.evaluate({"extra": ""})):
                continue
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                waiting.append(importlib.metadata.distribution(requirement.name))
                found.add(requirement.name)
    return found


def command(
    installed: Path, *arguments: str, cwd: Path, python: str | Path = sys.executable, **env: str
) -> subprocess.CompletedProcess:
    """Run `omni-kv` of the installed package; the rest comes from the environment of `python`."""
    return subprocess.run(
        [str(python), "-P", "-m", "omni_kv.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True,
        text=True,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_wheel_holds_notebooks_records_and_sources_of_the_site(installed) -> None:
    share = installed / "omni_kv" / "share"
    for folder, pattern in (("notebooks", "*.ipynb"), ("data", "**/*.json"), ("report", "*.md")):
        there = {p.relative_to(share / folder) for p in (share / folder).glob(pattern)}
        assert there == {
            p.relative_to(CHECKOUT / folder) for p in (CHECKOUT / folder).glob(pattern)
        }


def test_commands_work_from_an_empty_folder_and_leave_the_package_alone(
    installed, tmp_path, notebook_writer
) -> None:
    before = contents(installed)
    version = command(installed, "--version", cwd=tmp_path)
    assert version.returncode == 0, version.stderr
    shown = command(installed, "verdicts", "show", "02", cwd=tmp_path)
    assert "02.shared, guard after" in shown.stdout, shown.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / "other").mkdir()  # a notebook of seconds, without links to others
    notebook_writer(tmp_path / "other" / "01_a.ipynb", "x = 1")
    own = {"OMNI_KV_NOTEBOOKS": str(tmp_path / "other")}
    ran = command(installed, "run", "01", "--out", "out", cwd=tmp_path, **own)
    assert ran.returncode == 0, ran.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["01_a.ipynb"]
    built = command(installed, "report", "--executed", "other", "--out", "site", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "html" / "notebooks" / "01_a.html").is_file()
    assert contents(installed) == before


@pytest.mark.parametrize(
    "arguments", [["verdicts", "record", "00"], ["stored", "00"], ["figures"], ["record"]]
)
def test_what_would_write_into_the_package_is_refused(installed, tmp_path, arguments) -> None:
    before = contents(installed)
    done = command(installed, *arguments, cwd=tmp_path, OMNI_KV_DATA="")
    assert done.returncode == 2
    assert "belongs to the installed package and stays as it is; set OMNI_KV_" in done.stderr
    assert done.stderr.count("\n") == 1
    assert contents(installed) == before


def test_the_audit_needs_nothing_of_the_extras(installed, light, tmp_path) -> None:
    (tmp_path / "cases.py").write_text(CASE)
    done = command(installed, "audit", "--no-run", "cases:make_case", cwd=tmp_path, python=light)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = command(installed, "run", "00", cwd=tmp_path, python=light)
    assert refused.returncode == 2
    assert "pip install 'omni-kv[notebooks]'" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "build").exists()
