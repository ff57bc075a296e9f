"""Recording goes on where it stopped, and never puts two machines into one record."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_kv.evidence.cells import CrashCase, Timing
from omni_kv.evidence.records import Provenance, read
from omni_kv.experiments.gpu import record as recorder
from omni_kv.experiments.gpu.crash import crash_run, mapped_behind, predict, sized
from omni_kv.experiments.gpu.record import Plan, RecordRefused, Unit, record
from omni_kv.experiments.gpu.sanitizer import few_tokens, read_sanitizer
from omni_kv.model.geometry import preset

HERE = Provenance(
    device="Some Card",
    platform="Linux x86_64",
    python="3.12.3",
    torch="2.11.0+cu130",
    date="2026-11-29",
    revision="abc",
    command="omni-kv record",
    card="11111111",
)
PLAN = Plan(preset("tiny"), "cpu", ("sdpa",))


class Runs(list):
    """Names of the units that ran, and those that shall fail."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()

    def unit(name: str, alone: bool = False) -> Unit:
        def run() -> list[Timing]:
            found.append(name)
            if name in found.broken:
                raise RuntimeError("the machine was taken away")
            return [Timing(name=name, seconds=[1.0])]

        return Unit(name, run, alone)

    known = {"a": [unit("a1"), unit("a2", alone=True)], "b": [unit("b1"), unit("b2")]}
    monkeypatch.setattr(recorder, "experiments", lambda plan: known)
    return found


def go(out: Path, origin: Provenance = HERE, names: tuple[str, ...] = ()) -> list[Path]:
    return record(PLAN, origin, out, names, say=lambda line: None)


def test_every_experiment_gets_one_record_and_no_partial_ones_stay(runs, tmp_path) -> None:
    assert go(tmp_path) == [tmp_path / "a.json", tmp_path / "b.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]
    assert read(tmp_path / "a.json").units == ["a1", "a2"]


def test_what_is_recorded_is_not_measured_again(runs, tmp_path) -> None:
    go(tmp_path)
    runs.clear()
    go(tmp_path)
    assert runs == []


def test_an_interrupted_recording_goes_on_where_it_stopped(runs, tmp_path) -> None:
    runs.broken.add("a2")
    assert go(tmp_path, names=("a",)) == []
    assert read(tmp_path / "a.partial.json").units == ["a1"]
    runs.clear()
    runs.broken.clear()
    go(tmp_path, names=("a",))
    assert runs == ["a2"]
    assert sorted(read(tmp_path / "a.json").of(Timing)) == ["a1", "a2"]
    assert not (tmp_path / "a.partial.json").exists()


@pytest.mark.parametrize("change", [{"card": "22222222"}, {"revision": "def"}, {"driver": "1"}])
def test_another_card_or_code_starts_an_interrupted_record_afresh(runs, tmp_path, change) -> None:
    runs.broken.add("a2")
    go(tmp_path, names=("a",))
    runs.clear()
    runs.broken.clear()
    there = HERE.model_copy(update=change)
    go(tmp_path, there, names=("a",))
    assert runs == ["a1", "a2"]
    assert read(tmp_path / "a.json").provenance == there


def test_a_folder_of_another_device_is_refused_and_left_alone(runs, tmp_path) -> None:
    go(tmp_path)
    runs.clear()
    with pytest.raises(RecordRefused, match="other-card"):
        go(tmp_path, HERE.model_copy(update={"device": "Other Card"}))
    assert runs == []


def test_an_unknown_experiment_is_refused_with_those_that_exist(runs, tmp_path) -> None:
    with pytest.raises(RecordRefused, match="'c'; known: a, b"):
        go(tmp_path, names=("c",))
    assert list(tmp_path.iterdir()) == []


def test_every_planned_unit_has_a_name_of_its_own() -> None:
    for name, units in recorder.experiments(PLAN).items():
        names = [unit.name for unit in units]
        assert len(names) == len(set(names)), name


@pytest.mark.parametrize(
    ("segments", "address", "mapped"),
    [
        ([], 100, 0),
        ([(0, 100)], 100, 0),
        ([(0, 150)], 100, 50),
        ([(150, 50), (0, 150)], 100, 100),
        ([(0, 150), (151, 50)], 100, 50),
        ([(100, 10), (105, 20)], 100, 25),
    ],
)
def test_memory_counts_as_mapped_up_to_the_first_gap(segments, address, mapped) -> None:
    assert mapped_behind(segments, address) == mapped


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ((0, 0, False), "right"),
        ((10, 10, False), "V corrupted"),
        ((10, 9, False), "illegal memory access"),
        ((10, 9, False, True), "V corrupted"),
        ((10, 9, False, False), "illegal memory access"),
        ((10, 10, True), "right"),
        ((10, 9, True), "illegal memory access"),
    ],
)
def test_the_map_of_the_memory_decides_between_crash_and_corruption(arguments, outcome) -> None:
    assert predict(*arguments) == outcome


def test_sizes_are_those_of_the_hypotheses() -> None:
    lingbot = preset("lingbot-480x768")
    assert sized(lingbot, "exact").clone_numel == 545_587_200
    assert 2 * sized(lingbot, "1.5x").pool_nbytes / 2**30 == pytest.approx(1.53, abs=0.01)
    assert sized(lingbot, "4x").pool_nbytes > 2**31
    assert few_tokens(lingbot).pool_numel == lingbot.pool_numel


SANITIZER = """
POOL 16384000 139966506598400
========= Invalid __global__ read of size 16 bytes
=========     at triton_poi_fused_as_strided_clone_2+0xa0 in cjt5.py:24
=========     by thread (64,0,0) in block (16769,0,0)
=========     Access to 0x7f4c7e000c00 is out of bounds
=========     and is 1,575,937 bytes after the nearest allocation at 0x7f4c7a000000 \
of size 65,536,000 bytes
========= ERROR SUMMARY: 169090 errors
"""


def test_the_sanitizers_report_is_read() -> None:
    run = read_sanitizer("memcheck", SANITIZER)
    assert run.kernel == "triton_poi_fused_as_strided_clone_2"
    assert (run.access_bytes, run.distance_bytes) == (16, 1_575_937)
    assert run.address == 0x7F4C7E000C00
    assert run.allocation_bytes == 65_536_000


def test_the_nearest_allocation_may_lie_behind_the_access() -> None:
    run = read_sanitizer("memcheck", SANITIZER.replace("bytes after the", "bytes before the"))
    assert run.distance_bytes == -1_575_937


def test_a_report_without_an_access_is_refused() -> None:
    with pytest.raises(RuntimeError, match="compute-sanitizer's output"):
        read_sanitizer("memcheck", "========= ERROR SUMMARY: 0 errors")


@pytest.mark.compiles
def test_a_neighbour_is_found_in_v_on_a_cpu_too_or_v_is_right() -> None:
    run = crash_run("x", CrashCase(neighbour=True), preset("tiny"), "cpu")
    assert run.outcome in ("V corrupted", "right", "killed")
    if run.outcome == "V corrupted":
        assert run.rows_wrong == run.rows - 48


@pytest.mark.compiles
def test_separate_pools_are_right_on_a_cpu() -> None:
    run = crash_run("x", CrashCase(layout="separate"), preset("tiny"), "cpu")
    assert (run.outcome, run.predicted, run.rows_wrong, run.clones) == ("right", "right", 0, [])
