"""The examples of docs/audit.md, run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from sarif import SARIF

from omni_kv.audits.rules import RULES
from omni_kv.evidence.paths import project_dir


def page() -> str:
    return (project_dir() / "docs" / "audit.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A folder with the files of the page, each named by its first line."""
    for block in blocks("python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.compiles
def test_the_test_suite_of_the_documents_passes(example) -> None:
    done = run_in(example, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(example), ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


@pytest.mark.compiles
def test_the_workflow_of_the_documents_writes_what_it_uploads(example) -> None:
    (block,) = blocks("yaml")
    steps = yaml.safe_load(block)["jobs"]["audit"]["steps"]
    (line,) = [s["run"] for s in steps if s.get("run", "").startswith("omni-kv ")]
    (upload,) = [s for s in steps if "upload-sarif" in s.get("uses", "")]
    model = example / "mymodel.py"
    fault = "x = x + torch.compiler.is_compiling()\n    write("
    model.write_text(model.read_text().replace("    write(", f"    {fault}"))
    done = run_in(example, "omni_kv.cli", *shlex.split(line)[1:])
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("audit of step: ")
    log = json.loads((example / upload["with"]["sarif_file"]).read_text())
    jsonschema.Draft202012Validator(SARIF).validate(log)
    results = log["runs"][0]["results"]
    assert {result["ruleId"] for result in results} == {"compiled-differs"}
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert {p["artifactLocation"]["uri"] for p in places} == {"mymodel.py"}


def test_the_documents_list_the_kinds_of_the_code() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \| (error|warning) \| (.+) \|$", page(), re.MULTILINE)
    assert listed == [(kind, rule.level, rule.text) for kind, rule in RULES.items()]
