"""Reproductions do what their reports say, fixes mend them, and a report can be sent as it is."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from omni_kv.evidence.programs import ReproductionRun
from omni_kv.evidence.records import data_dir, read
from omni_kv.upstream import diff
from omni_kv.upstream.fixes import FIXES

FOLDERS = sorted((Path(__file__).parents[2] / "upstream").glob("[0-9]*/"))
RELEASE = version("torch").partition("+")[0]


def expected(folder: Path) -> dict:
    return tomllib.loads((folder / "expected.toml").read_text())


def run(*command: str) -> subprocess.CompletedProcess:
    # Each reproduction makes a compile cache of its own.
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env["CUDA_VISIBLE_DEVICES"] = ""  # see upstream/README.md
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=300
    )


def hold(folder: Path, table: dict[str, int], *command: str) -> None:
    """Hold the exit code of a reproduction against the recorded one; without one, report it."""
    done = run(*command, str(folder / "repro.py"))
    if RELEASE not in table:
        pytest.skip(f"torch {RELEASE}: exit code {done.returncode}, none is recorded")
    assert f"torch {RELEASE}" in done.stdout, done.stderr[-2000:]
    assert done.returncode == table[RELEASE], done.stdout + done.stderr[-2000:]


def by_name(folder: Path) -> str:
    return folder.name


@pytest.mark.compiles
@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_a_reproduction_ends_as_its_report_says(folder):
    hold(folder, expected(folder)["exit_code"])


@pytest.mark.compiles
@pytest.mark.parametrize("folder", [f for f in FOLDERS if "fix" in expected(f)], ids=by_name)
def test_a_reproduction_ends_with_its_fix_as_its_report_says(folder):
    fix = expected(folder)["fix"]
    hold(folder, fix["exit_code"], "-m", "omni_kv.upstream", fix["name"])


@pytest.mark.compiles
def test_without_a_clone_a_view_is_misplaced_as_the_report_says(tmp_path):
    (folder,) = (folder for folder in FOLDERS if folder.name.startswith("02"))
    _, _, text = (folder / "report.md").read_text().partition("### The same without a clone")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "program.py").write_text(found[1])
    done = run(str(tmp_path / "program.py"))
    written = expected(folder)["written"].get(RELEASE)
    if written is None:
        pytest.skip(f"torch {RELEASE}: {done.stdout}, none is recorded")
    assert f"written: {written}" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_a_reproduction_is_short_and_needs_nothing_but_torch(folder):
    source = (folder / "repro.py").read_text()
    assert len(source.splitlines()) < 60
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_a_report_can_be_sent_as_it_is(folder):
    report = (folder / "report.md").read_text()
    assert f"```python\n{(folder / 'repro.py').read_text().rstrip()}\n```" in report
    for part in ("### 🐛 Describe the bug", "**Expected:**", "### Mechanism", "### Versions"):
        assert part in report
    for release, code in expected(folder)["exit_code"].items():
        assert f"| {release} | {code} | {'wrong' if code else 'right'} |" in report
    assert not re.search(r"omni|TODO\b(?! this logic)|@[A-Z]+@|/(home|root|tmp|usr|work)/", report)


@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_a_report_shows_a_patch_that_lies_beside_it(folder):
    report = (folder / "report.md").read_text()
    patches = {patch.read_text().rstrip() for patch in folder.glob("fix-*.patch")}
    shown = re.findall(r"```diff\n(.*?)\n```", report, re.DOTALL)
    assert len(shown) == bool(patches)
    assert set(shown) <= patches


PATCHES = [patch for folder in FOLDERS for patch in folder.glob(f"fix-{RELEASE}.patch")]


@pytest.mark.skipif(not PATCHES, reason=f"no patches for torch {RELEASE}")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.parent.name)
def test_a_patch_is_the_change_that_the_context_manager_makes(patch):
    name = expected(patch.parent)["fix"]["name"]
    assert name in FIXES
    assert patch.read_text() == diff(name)


ON_A_GPU = read(data_dir() / "evidence" / "nvidia-h200-torch2.11.0" / "reproductions.json")


@pytest.mark.parametrize("folder", FOLDERS, ids=by_name)
def test_what_a_report_says_of_a_gpu_is_on_record(folder):
    runs = [r for r in ON_A_GPU.of(ReproductionRun).values() if r.number == folder.name[:2]]
    release = ON_A_GPU.provenance.torch.partition("+")[0]
    told = re.findall(
        r"`repro.py cuda` on an? ([^|]+) \| (\d) \|", (folder / "report.md").read_text()
    )
    seen = [(r.device, r.exit_code) for r in runs if r.fix is None]
    assert seen == [("cuda" if told else "cpu", expected(folder)["exit_code"][release])]
    assert told in ([], [(ON_A_GPU.provenance.device, str(seen[0][1]))])
    with_fix = [r.exit_code for r in runs if r.fix is not None]
    assert with_fix == ([expected(folder)["fix"]["exit_code"][release]] if told else [])
