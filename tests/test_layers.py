"""The layers of the sub-packages hold, and the check that holds them would see a breach."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiles

CHECKOUT = Path(__file__).resolve().parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess:
    """Run import-linter with the checkout's contracts over the package that lies in a folder."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    options = ["--no-cache", "--config", str(folder / "pyproject.toml")]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("lens/capture.py", "omni_kv.audits.audit"),
        ("model/op.py", "omni_kv.sandbox.memory"),
        ("evidence/records.py", "omni_kv.lens.capture"),
        ("audits/audit.py", "omni_kv.model.op"),
        ("experiments/layer.py", "omni_kv.publish.notebooks"),
    ],
)
def test_an_import_against_the_layers_is_found(tmp_path: Path, module: str, forbidden: str) -> None:
    shutil.copytree(CHECKOUT / "omni_kv", tmp_path / "omni_kv")
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    planted = tmp_path / "omni_kv" / module
    planted.write_text(planted.read_text() + f"\nimport {forbidden}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert forbidden in done.stdout


def test_the_layers_hold() -> None:
    done = lint(CHECKOUT)
    assert done.returncode == 0, done.stdout + done.stderr
