"""Faults of the surroundings are told as such, not as faults of the callable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from omni_kv.audits.errors import surroundings

pytestmark = pytest.mark.compiles

COMMAND = (sys.executable, "-m", "omni_kv.cli", "audit", "trust_cases:make_tiny_values")


def audited(folder: Path, *before: str) -> str:
    """What the command prints of a callable that is wrong, with temporary files in a folder."""
    env = {**os.environ, "TMPDIR": str(folder)}
    command = [*before, *COMMAND, "--dynamic", "false"]
    cwd = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode in (1, 2), done.stderr
    return f"{done.returncode} {done.stdout}"


def test_a_folder_with_a_space_is_named_and_one_without_finds_the_fault(tmp_path) -> None:
    spaced, plain = tmp_path / "a b", tmp_path / "ab"
    spaced.mkdir()
    plain.mkdir()
    said = audited(spaced)
    assert said.startswith("2 ") and "has a space" in said and "where eager works" not in said
    assert audited(plain).startswith("1 ")


def mounted(options: str) -> tuple[str, ...]:
    """A command in front of which a folder is a file system of its own, for that command alone."""
    script = f'mount -t tmpfs -o {options} none "$TMPDIR" && exec "$@"'
    return ("unshare", "-m", "sh", "-c", script, "sh")


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TMPDIR": folder}
        command = [*mounted("size=1m"), "true"]
        return subprocess.run(command, capture_output=True, env=env).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting takes a privilege")
@pytest.mark.parametrize(
    ("options", "told"), [("noexec,size=300m", "noexec"), ("size=24k", "is full")]
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, options, told) -> None:
    said = audited(tmp_path, *mounted(options))
    assert said.startswith("2 ") and told in said and "where eager works" not in said


def test_what_the_error_says_decides(monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/ab")
    assert surroundings("CppCompileError: C++ compile error") is None
    assert surroundings("ValueError: no such thing") is None
    assert "full" in str(surroundings("OSError: [Errno 28] No space left on device: 'x'"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/a b")
    assert "a space" in str(surroundings("CppCompileError: C++ compile error"))
