"""Whose records are read, and what a record says of where it comes from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_kv.evidence import outcomes, records, tables
from omni_kv.experiments.hypotheses import recorded_table

H200 = "nvidia-h200-torch2.11.0"
EVIDENCE = Path(__file__).resolve().parents[2] / "data" / "evidence"


@pytest.fixture
def evidence(data: Path) -> Path:
    """The project's records in a folder of their own, with the file that names the default."""
    shutil.copytree(EVIDENCE.parent, data)
    return data / "evidence"


def second_device(evidence: Path, name: str) -> None:
    """Copy the device's records, as those of another card, half as fast."""
    (evidence / name).mkdir()
    for path in (evidence / H200).glob("*.json"):
        content = json.loads(path.read_text())
        content["provenance"]["device"] = "Another Card"
        for cell in content["cells"]:
            if cell["kind"] == "timing":
                cell["seconds"] = [2 * second for second in cell["seconds"]]
        (evidence / name / path.name).write_text(json.dumps(content))


def shown() -> list[object]:
    step = records.load("step")
    label, hypotheses = recorded_table()
    tabled = [tables.step_table(step), tables.parts_table(step), hypotheses]
    lines = outcomes.outcome_lines()
    return [step, label, lines, *(t.to_csv() for t in tabled)]


@pytest.mark.parametrize("name", ["aa-first-in-order", "zz-last-in-order"])
def test_records_of_a_second_device_leave_everything_as_it_is(evidence: Path, name: str) -> None:
    before = shown()
    second_device(evidence, name)
    assert name in records.devices()
    assert shown() == before


def test_an_argument_goes_before_the_variable_and_that_before_the_default(
    evidence: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_device(evidence, "aa")
    assert records.load("step").provenance.device == "NVIDIA H200"
    monkeypatch.setenv("OMNI_KV_DEVICE_RECORD", "aa")
    assert records.load("step").provenance.device == "Another Card"
    assert "recorded on Another Card" in outcomes.gpu_lines()[0]
    assert records.load("step", device=H200).provenance.device == "NVIDIA H200"


def test_without_a_default_the_only_holder_or_the_first_is_read(evidence: Path) -> None:
    (evidence / "default").unlink()
    assert records.load("step").provenance.device == "NVIDIA H200"
    second_device(evidence, "aa")
    (evidence / "aa" / "trials.json").unlink()
    assert records.load("step").provenance.device == "Another Card"
    assert records.load("trials").provenance.device == "NVIDIA H200"


def test_a_device_without_records_is_refused_and_the_others_named(
    evidence: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(records.EvidenceError, match=f"no record.*on other; recorded on: {H200}"):
        records.load("step", device="other")
    monkeypatch.setenv("OMNI_KV_DEVICE_RECORD", "other")
    with pytest.raises(records.EvidenceError, match=f"no records of 'other'; there are: .*{H200}"):
        records.load("step")


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A repository with one commit, and the package's place in it."""
    monkeypatch.delenv("OMNI_KV_REVISION", raising=False)

    def make(place: str, project: str | None) -> Path:
        parent = tmp_path / place
        (parent / "omni_kv").mkdir(parents=True)
        (parent / "omni_kv" / "code.py").write_text("")
        if project:
            (parent / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
        name = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        for words in (("init", "-q"), ("add", "."), (*name, "commit", "-qm", "All")):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
        monkeypatch.setattr(records, "PACKAGE_PARENT", parent)
        return parent

    return make


def test_the_revision_is_the_commit_of_this_projects_checkout(around) -> None:
    parent = around(".", "omni-kv")
    command = ["git", "-C", str(parent), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    assert records.revision() == commit
    (parent / "omni_kv" / "code.py").write_text("x = 1\n")
    assert records.revision() == f"{commit}+"


@pytest.mark.parametrize(
    ("place", "project"),
    [("lib/site-packages", None), (".", "another"), (".", None), ("vendored", "omni-kv")],
)
def test_another_projects_repository_around_the_package_does_not_count(
    around, place, project, monkeypatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1.2.3")
    around(place, project)
    assert records.revision() == "omni-kv 1.2.3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/opt/env/bin/omni-kv", "record", "--only", "step"], "omni-kv record --only step"),
        (["omni-kv", "record", "--out", "/srv/me/new"], "omni-kv record --out new"),
        (["omni-kv", "record", "--out=/srv/me/new"], "omni-kv record --out=new"),
        (["omni-kv", "record", "--out", "build/new"], "omni-kv record --out build/new"),
        (["omni-kv", "run", "-p", "text", "a b"], "omni-kv run -p text 'a b'"),
    ],
)
def test_the_command_is_what_was_typed_without_absolute_paths(monkeypatch, words, said) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert records.command_line() == said
