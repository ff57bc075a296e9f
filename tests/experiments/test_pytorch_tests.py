"""Whole files of tests run with and without fixes, also where a test kills its process."""

from __future__ import annotations

import sys

import pytest

from omni_kv.experiments.gpu.plan import Plan
from omni_kv.experiments.gpu.pytorch_tests import (
    _readable,
    compare_tests,
    pytorch_tests_units,
)
from omni_kv.experiments.gpu.pytorch_tests import test_files as files_of_folder
from omni_kv.model.geometry import preset

FILE = """
import os, time, unittest
from torch._inductor.fx_passes import reinplace

class Cases(unittest.TestCase):
    def test_dies(self):
        os.kill(os.getpid(), 11)

    def test_fails(self):
        raise ValueError(f"no {id(self):#x} at /some/where/file")

    def test_fixed(self):
        self.assertIn("with a fix", reinplace.reinplace_inplaceable_ops_core.__code__.co_filename)

    def test_passes(self):
        pass

    @unittest.skip("not here")
    def test_skipped(self):
        pass
"""


def compared(tmp_path, text, fixes=("overlap-check",), timeout=500.0):
    path = tmp_path / "test_trial.py"
    path.write_text(text)
    return compare_tests(path, fixes, "cpu", timeout)


@pytest.mark.compiles
def test_every_test_is_counted_and_those_that_end_otherwise_with_the_fix_are_named(tmp_path):
    found = compared(tmp_path, FILE)
    assert found.without == {"crashed": 1, "failed": 2, "passed": 1, "skipped": 1}
    assert found.with_fix == {"crashed": 1, "failed": 1, "passed": 2, "skipped": 1}
    assert found.changed == {"Cases::test_fixed": ("failed", "passed")}
    assert found.reasons["failed: ValueError: no 0x... at file"] == 1
    assert "skipped: Skipped: not here" in found.reasons
    assert found.unloaded is None


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from torch import no_such_name\n", "cannot import name 'no_such_name'"),
        ("import unittest\nraise unittest.SkipTest('no GPU here')\n", "no GPU here"),
        ("def helper(): pass\n", "it defines no test on this device"),
    ],
)
def test_a_file_that_does_not_load_counts_no_test_and_says_why(tmp_path, text, reason):
    found = compared(tmp_path, text, fixes=())
    assert (found.without, found.with_fix) == ({}, {})
    assert reason in found.unloaded


@pytest.mark.compiles
def test_a_run_out_of_time_says_in_which_test_and_what_was_left(tmp_path):
    slow = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\ndef test_c(): pass\n"
    found = compared(tmp_path, slow, fixes=(), timeout=10.0)
    assert found.without == {"passed": 1, "timed out": 1, "not run": 1}


@pytest.mark.compiles
def test_a_fix_that_does_not_fit_is_not_run_as_if_it_did(tmp_path):
    path = tmp_path / "test_trial.py"
    path.write_text("def test(): pass\n")
    with pytest.raises(RuntimeError, match="no test was run"):
        compare_tests(path, ["no-such-fix"], "cpu", 60.0)


def test_each_file_of_the_folder_is_a_unit_and_without_a_folder_there_is_none(
    tmp_path, monkeypatch
):
    plan = Plan(preset("tiny"), "cpu", ("sdpa",))
    monkeypatch.delenv("OMNI_KV_PYTORCH_TESTS", raising=False)
    assert pytorch_tests_units(plan) == []
    (tmp_path / "test_one.py").touch()
    (tmp_path / "helper.py").touch()
    monkeypatch.setenv("OMNI_KV_PYTORCH_TESTS", str(tmp_path))
    assert [unit.name for unit in pytorch_tests_units(plan)] == ["test_one.py"]


def test_a_folder_named_from_where_one_stands_is_found_from_everywhere(tmp_path, monkeypatch):
    (tmp_path / "test_one.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNI_KV_PYTORCH_TESTS", ".")
    assert files_of_folder() == {"test_one.py": tmp_path / "test_one.py"}


def test_a_reason_is_one_line_without_paths():
    assert _readable("cannot open /usr/lib/python/x.py, no\nmore") == "cannot open x.py, no"
    assert sys.executable not in _readable(f"from {sys.executable}")
    assert _readable("aten/op.default and a/b") == "aten/op.default and a/b"
