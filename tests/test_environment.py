"""The files that make an environment agree with each other and name no machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parent.parent
LOCKS = sorted((CHECKOUT / "requirements").glob("torch-*.txt"))
ONLY_CONDA = {"python", "pip", "make", "gxx"}


def project() -> dict:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def wanted() -> dict[str, Requirement]:
    """What pyproject asks for: the dependencies and the extras that `make env` installs."""
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *extras["dev"], *extras["docs"]]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def locked(path: Path) -> list[Requirement]:
    lines = path.read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pinned(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "==", f"{requirement} is not pinned"
    return pin.version


def conda() -> tuple[list[str], list[str]]:
    entries = yaml.safe_load((CHECKOUT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in entries if isinstance(entry, dict)]
    return [entry for entry in entries if isinstance(entry, str)], pip


def test_environment_yml_has_the_names_of_pyproject() -> None:
    names, pip = conda()
    found = {canonicalize_name(Requirement(entry).name) for entry in names} - ONLY_CONDA
    found |= {canonicalize_name(Requirement(e).name) for e in pip if not e.startswith("-e")}
    assert found == set(wanted())


def test_environment_yml_asks_for_the_same_versions_as_pyproject() -> None:
    names, pip = conda()
    for entry in [*names, *(e for e in pip if not e.startswith("-e"))]:
        requirement = Requirement(entry)
        if requirement.name in ONLY_CONDA:
            continue
        asked = wanted()[canonicalize_name(requirement.name)].specifier
        if "==" in entry:
            assert asked.contains(pinned(requirement)), entry
        else:
            assert requirement.specifier == asked, entry


def test_environment_yml_allows_the_pythons_of_pyproject() -> None:
    (python,) = [Requirement(e) for e in conda()[0] if Requirement(e).name == "python"]
    lowest = project()["requires-python"].removeprefix(">=")
    assert python.specifier.contains(f"{lowest}.0")


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.stem)
def test_constraints_pin_the_torch_of_their_name(path: Path) -> None:
    (torch,) = [r for r in locked(path) if r.name == "torch"]
    assert path.stem == f"torch-{pinned(torch)}"


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.stem)
def test_constraints_hold_one_allowed_version_of_all_that_pyproject_names(
    path: Path, python: str
) -> None:
    on = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    here = [r for r in locked(path) if r.marker is None or r.marker.evaluate(on)]
    pins = {canonicalize_name(r.name): pinned(r) for r in here}
    assert len(pins) == len(here), "a name is pinned twice"
    for name, requirement in wanted().items():
        if requirement.marker is None or requirement.marker.evaluate(on):
            assert requirement.specifier.contains(pins[name]), requirement


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.stem)
def test_constraints_say_how_they_are_made_and_name_no_index_or_path(path: Path) -> None:
    text = path.read_text()
    assert "make lock" in text[:200]
    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links|^/| @ ", text, re.M)


def test_make_help_lists_every_target_that_has_a_description() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "-C", str(CHECKOUT)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for target in re.findall(r"^([a-z]+):.*## ", (CHECKOUT / "Makefile").read_text(), re.M):
        assert re.search(rf"^  {target} ", listed, re.M), target


def test_make_says_in_one_line_which_python_is_missing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((CHECKOUT / name).read_text())
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "env", "PYTHON=no-such-python"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "no-such-python was not found: install Python 3.10 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_the_command_of_the_readme_on_both_releases() -> None:
    script = (CHECKOUT / ".ci" / "run").read_text()
    assert "make test" in (CHECKOUT / "README.md").read_text()
    assert re.findall(r"^make test.*$", script, re.M) == ["make test", "make test TORCH=2.13.0"]
    subprocess.run(["bash", "-n", str(CHECKOUT / ".ci" / "run")], check=True)
