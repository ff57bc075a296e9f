"""The files that make an environment agree with each other and name no machine."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parent.parent
LOCKS = sorted((CHECKOUT / "requirements").glob("torch-*.txt"))
ONLY_CONDA = {"python", "pip", "make", "gxx"}


def project() -> dict:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def wanted() -> dict[str, Requirement]:
    """What pyproject asks for: the dependencies and the extras that `make env` installs."""
    extras = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *extras["notebooks"], *extras["docs"], *extras["dev"]]
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


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
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
    assert "no-such-python was not found: install Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def releases() -> list[str]:
    return [path.stem.removeprefix("torch-") for path in LOCKS]


def test_ci_tests_every_pinned_release_and_stops_at_the_first_failure(tmp_path: Path) -> None:
    said = tmp_path / "said"
    make = tmp_path / "make"
    for code, expected in ((0, releases()), (1, releases()[:1])):
        make.write_text(f'#!/bin/sh\necho "$@" >> "{said}"\nexit {code}\n')
        make.chmod(0o755)
        said.write_text("")
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run([CHECKOUT / ".ci" / "run"], env={**os.environ, "PATH": path})
        assert done.returncode == code
        assert said.read_text().splitlines() == [f"test TORCH={torch}" for torch in expected]


def test_the_workflow_tests_every_pinned_release_and_the_oldest_and_newest_python() -> None:
    text = (CHECKOUT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {job["torch"] for job in matrix} == set(releases())
    allowed = [c.rpartition(" ")[2] for c in project()["classifiers"] if "Python :: 3." in c]
    assert {allowed[0], allowed[-1]} <= {job["python"] for job in matrix}


def test_the_lowest_python_is_the_first_of_the_classifiers_and_of_the_locks() -> None:
    lowest = project()["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in project()["classifiers"]
    assert f"--python-version {lowest} " in (CHECKOUT / "Makefile").read_text()


@pytest.mark.parametrize("where", ["package", "notebooks", "workflows"])
def test_contributing_names_every_environment_variable_that_the_code_reads(where: str) -> None:
    folders = {"package": "omni_kv", "notebooks": "notebooks", "workflows": ".github"}
    suffixes = {".py", ".ipynb", ".yml"}
    files = (p for p in (CHECKOUT / folders[where]).rglob("*") if p.suffix in suffixes)
    named = {name for p in files for name in re.findall(r"\bOMNI_KV_[A-Z_]+", p.read_text())}
    listed = set(re.findall(r"^\| `(\w+)`", (CHECKOUT / "CONTRIBUTING.md").read_text(), re.M))
    assert named <= listed, named - listed


def test_the_audit_asks_for_no_package_that_it_does_not_import() -> None:
    audit = ("cli.py", "testing.py", "audits", "lens", "sandbox", "evidence")
    roots = [CHECKOUT / "omni_kv" / name for name in audit]
    files = [p for root in roots for p in ([root] if root.suffix else root.glob("*.py"))]
    text = "\n".join(path.read_text() for path in files)
    for line in project()["dependencies"]:
        name = Requirement(line).name
        assert re.search(rf"^\s*(import|from) {name}\b", text, re.M), name
