"""Compile times are paired within a round, and ratios are computed from what is there."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from omni_kv.evidence.cells import Timing
from omni_kv.evidence.compile_times import compile_ratios, paired_ratio, ratio_lines, sample_name
from omni_kv.evidence.records import Provenance, Record, read
from omni_kv.experiments.gpu import compile_time
from omni_kv.experiments.gpu.plan import Plan
from omni_kv.experiments.gpu.record import record
from omni_kv.model.geometry import preset
from omni_kv.sandbox.process import Outcome, run_isolated

HERE = Provenance(
    device="CPU", platform="Linux", python="3.11", torch="9.9.0", date="2026-01-01",
    revision="abc", command="omni-kv record",
)  # fmt: skip


def plan(pairs: int) -> Plan:
    return Plan(preset("tiny"), "cpu", ("sdpa",), pairs=pairs)


def test_the_interval_leaves_out_what_ranks_alone_allow():
    ratio = paired_ratio([(2.0, 2.0 * r) for r in (1.3, 1.0, 1.1, 0.9, 1.2)])
    assert (ratio.median, ratio.low, ratio.high) == (1.1, 0.9, 1.3)
    assert ratio.coverage == pytest.approx(1 - 2 / 2**5)
    # The table of the sign test: of ten, the second to the ninth; of twenty, the sixth to the 15th.
    ten = paired_ratio([(1.0, float(i)) for i in range(1, 11)])
    twenty = paired_ratio([(1.0, float(i)) for i in range(1, 21)])
    assert (ten.low, ten.high, round(ten.coverage, 4)) == (2, 9, 0.9785)
    assert (twenty.low, twenty.high, round(twenty.coverage, 4)) == (6, 15, 0.9586)
    assert paired_ratio([(1.0, 1.0)]).coverage == 0
    with pytest.raises(ValueError, match="no pair"):
        paired_ratio([])


def test_a_sample_is_paired_with_its_own_round_only():
    def cell(number: int, variant: str, seconds: float) -> Timing:
        name = sample_name("1 layer, shared", number, variant)
        return Timing(name=name, seconds=[seconds], cpu_seconds=[1.0])

    cells = [
        cell(0, "without", 1.0), cell(1, "fix", 300.0), cell(2, "fix", 11.0),
        cell(2, "without", 10.0), cell(0, "fix", 1.2),
    ]  # fmt: skip
    taken = Record(experiment="x", provenance=HERE, parameters={}, units=[], cells=cells)
    (ratio,) = compile_ratios(taken).values()
    assert ratio.pairs == 2
    assert ratio.median == pytest.approx(1.15)
    assert compile_ratios(taken, "cpu_seconds")["1 layer, shared", "fix"].median == 1
    assert len(ratio_lines(taken)) == 1


def test_every_round_is_in_one_block_and_a_large_graph_has_fewer():
    found: dict[str, list[int]] = {}
    for unit in compile_time.compile_time_units(plan(20)):
        _, graph, rounds = unit.run.args
        assert unit.name == f"{graph}, rounds from {rounds[0]}"
        found.setdefault(graph, []).extend(rounds)
    assert found == {
        graph: list(range(0, 20, every)) for graph, (_, _, every) in compile_time.GRAPHS.items()
    }


def test_more_pairs_go_on_from_those_that_an_interrupted_recording_left(monkeypatch, tmp_path):
    ran = itertools.count()

    def isolated(fn, geometry, device, backend, layers, layout, rounds, timeout):
        if next(ran) == 2:
            raise RuntimeError("the machine was taken away")
        taken = {"without": (1.0, 1.0), "control": (1.5, 2.0), "every fix": (1.5, 2.0)}
        value = [(n, name, *seconds) for n in rounds for name, seconds in taken.items()]
        return Outcome("returned", value, None, None, 1.0, "")

    monkeypatch.setattr(compile_time, "run_isolated", isolated)
    record(plan(8), HERE, tmp_path, ["compile-time"], lambda line: None)
    before = read(tmp_path / "compile-time.partial.json").units
    assert len(before) == 2
    ran = itertools.count(-1000)
    said: list[str] = []
    record(plan(12), HERE, tmp_path, ["compile-time"], said.append)
    units = read(tmp_path / "compile-time.json").units
    assert units[:2] == before
    assert len(units) == len(compile_time.compile_time_units(plan(12)))
    ratios = [line for line in said if " pairs" in line]
    assert len(ratios) == len(compile_time.GRAPHS) * (len(compile_time.VARIANTS) - 1)
    assert all(": 1.500 " in line and "time 2.000 " in line for line in ratios)


@pytest.mark.parametrize("layers", [1, 2])
def test_fixes_are_in_place_while_the_clock_runs_and_rounds_begin_with_each_variant(
    monkeypatch, layers
):
    now: list[str] = []
    seen: list[list[str]] = []

    @contextmanager
    def installed(name):
        now.append(name)
        yield
        now.remove(name)

    def compiled(fn):
        return lambda *inputs: seen.append(list(now))

    monkeypatch.setattr(compile_time, "installed", installed)
    monkeypatch.setattr(compile_time, "fitting", lambda: ["a", "b"])
    monkeypatch.setattr(torch, "compile", compiled)
    threads = torch.get_num_threads()
    arguments = (preset("tiny"), "cpu", "sdpa", layers, "shared", [0, 1, 2])
    samples = compile_time.compile_seconds(*arguments)
    torch.set_num_threads(threads)
    plain, fixed = [], ["a", "b"]
    assert seen[:3] == [plain, plain, fixed]  # to warm up
    variants = [variant for _, variant, _, _ in samples]
    assert seen[3:] == [fixed if v == compile_time.WITH else plain for v in variants]
    assert sorted(variants[::3]) == sorted(compile_time.VARIANTS)
    assert [number for number, *_ in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.compiles
def test_a_child_tells_how_long_it_compiled():
    child = run_isolated(
        compile_time.compile_seconds, preset("tiny"), "cpu", "sdpa", 1, "shared", [0]
    )
    samples = child.unwrap()
    assert len(samples) == len(compile_time.VARIANTS)
    assert all(0 < seconds < child.seconds and cpu > 0 for _, _, seconds, cpu in samples)
