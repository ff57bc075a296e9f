"""What the fixes cost while compiling: only their own functions count, and each call once."""

from __future__ import annotations

import cProfile
import types

import pytest

from omni_kv.evidence.cells import Timing
from omni_kv.evidence.compile_times import WITHOUT, share_lines, share_name
from omni_kv.evidence.records import Provenance, Record
from omni_kv.experiments.gpu import compile_share
from omni_kv.experiments.gpu.compile_time import WITH
from omni_kv.model.geometry import preset
from omni_kv.sandbox.process import run_isolated

SOURCE = """
def inner(sleep):
    sleep(0.02)

def outer(sleep):
    inner(sleep)
    sleep(0.01)

def other(sleep):
    sleep(0.03)
    inner(sleep)
"""


def test_seconds_of_nested_calls_count_once_and_others_not():
    module = types.ModuleType("some")
    exec(compile(SOURCE, "/site/torch/some.py", "exec"), vars(module))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    profile = cProfile.Profile(lambda: now)
    profile.runcall(lambda: [module.outer(sleep), module.other(sleep)])
    known = {("torch.some", "inner", 2), ("torch.some", "outer", 5)}
    own, whole = compile_share.seconds_in(profile, known)
    # outer with its inner, and the inner that other calls.
    assert (own, whole) == (pytest.approx(0.05), pytest.approx(0.08))
    elsewhere = {("torch.thing", "outer", 5), ("torch.some", "outer", 6)}
    assert compile_share.seconds_in(profile, elsewhere)[0] == 0


def test_changed_functions_are_those_of_the_fixes_before_and_after():
    names = {name for _, name, _ in compile_share.changed_functions()}
    assert {"reinplace_inplaceable_ops_core", "input_aliasing", "sym_storage_offset"} <= names
    assert "clone" not in names and len(names) < 12


def test_a_line_says_what_a_fix_adds_at_least_noise():
    seconds = {
        (WITHOUT, "changed"): [0.03, 0.01], (WITH, "changed"): [0.012, 0.4],
        (WITHOUT, "all"): [2.0, 3.0], (WITH, "all"): [9.0, 9.0],
    }  # fmt: skip
    cells = [Timing(name=share_name("a graph", *k), seconds=v) for k, v in seconds.items()]
    origin = Provenance(
        device="CPU", platform="Linux", python="3.11", torch="9.9.0", date="2026-01-01",
        revision="abc", command="omni-kv record",
    )  # fmt: skip
    record = Record(experiment="x", provenance=origin, parameters={}, units=[], cells=cells)
    (line,) = share_lines(record)
    assert line == (
        "a graph: 10.00 ms without, 12.00 ms every fix, of 2.00 s: +0.100% of compiling"
    )


@pytest.mark.compiles
def test_a_child_profiles_both_kinds():
    found = run_isolated(
        compile_share.profiled_seconds, preset("tiny"), "cpu", "sdpa", 1, "shared", 1
    ).unwrap()
    for variant in (WITHOUT, WITH):
        (own,), (whole,) = found[variant, "changed"], found[variant, "all"]
        assert 0 < own < whole / 10
