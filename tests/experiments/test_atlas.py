"""The atlas: axes, classification, cells that run, records and the command."""

from __future__ import annotations

import itertools
import json
from functools import partial

import pytest
from click.testing import CliRunner

from omni_kv.cli import main
from omni_kv.evidence.verdicts import VerdictChanged
from omni_kv.experiments.atlas import environments, execute
from omni_kv.experiments.atlas.cells import (
    CACHES,
    CALLS,
    LAYOUTS,
    MODES,
    Cell,
    CellResult,
    Run,
    all_cells,
    classify,
)
from omni_kv.experiments.atlas.layouts import layout_of
from omni_kv.experiments.atlas.lookup import always_in_place, changes, outcome_table, rows
from omni_kv.experiments.atlas.records import (
    AtlasError,
    AtlasRecord,
    hold,
    merge,
    read,
    records,
    write,
)
from omni_kv.experiments.atlas.run import _raising, run_cells, run_in_memories
from omni_kv.sandbox.process import run_forked, run_isolated

FINE = Run(ended="returned", keys={"right": 64}, values={"right": 64})
PROVENANCE = {
    "device": "CPU", "platform": "Linux", "python": "3.11", "torch": "9.9.0",
    "date": "2026-01-01", "revision": "abc", "command": "omni-kv atlas",
}  # fmt: skip


def with_values(**rows: int) -> Run:
    origins = {name.replace("_", " "): count for name, count in rows.items()}
    return FINE.model_copy(update={"values": origins})


def died(signal: str = "SIGSEGV") -> Run:
    return Run(ended=f"killed by {signal}")


def record_of(*cells: CellResult) -> AtlasRecord:
    return AtlasRecord(
        release="9.9.0", kind="cpu", recorded=PROVENANCE, seconds=1, cells=list(cells)
    )


def result(cell: str, outcome: str = "right") -> CellResult:
    return CellResult(
        cell=cell, outcome=outcome, detail="", in_place=True, needed_bytes=1, seconds=1
    )


@pytest.mark.parametrize(
    ("filled", "after", "before", "expected"),
    [
        (FINE, FINE, FINE, "right"),
        (FINE, died(), FINE, "reads outside"),
        (FINE, FINE, died("SIGBUS"), "reads outside"),
        (with_values(right=4, neighbour=60), FINE, FINE, "foreign values"),
        (with_values(right=4, other_pool=60), FINE, FINE, "other pool's values"),
        (with_values(other_pool=4, neighbour=60), None, None, "foreign values"),
        (with_values(right=4, other=60), FINE, FINE, "wrong otherwise"),
        (FINE.model_copy(update={"output_right": False}), FINE, FINE, "wrong otherwise"),
        (FINE, with_values(other=1), FINE, "wrong otherwise"),
        (died(), None, None, "crash"),
        (Run(ended="timed out"), None, None, "crash"),
        (Run(ended="raised X: y", compiling=True), None, None, "refuses to compile"),
        (Run(ended="raised X: y"), None, None, "wrong otherwise"),
    ],
)
def test_each_observation_has_its_class(filled, after, before, expected):
    assert classify(filled, after, before)[0] == expected


def test_an_exception_of_the_compiler_is_a_refusal_and_one_of_the_code_is_not():
    import torch._dynamo.exc

    refused = _raising(torch._dynamo.exc.Unsupported("a graph break"))
    assert classify(refused, None, None)[0] == "refuses to compile"
    assert classify(_raising(RuntimeError("no")), None, None)[0] == "wrong otherwise"
    assert classify(_raising(RuntimeError("CUDA error: x")), None, None)[0] == "crash"


def test_foreign_keys_count_like_foreign_values():
    filled = FINE.model_copy(update={"keys": {"neighbour": 3, "right": 61}})
    assert classify(filled, FINE, FINE) == ("foreign values", "K: 3 rows foreign")


def test_each_value_of_each_axis_meets_every_layout():
    cells = list(all_cells())
    for axis, values in (("call", CALLS), ("cache", CACHES), ("mode", MODES)):
        met = {(cell.layout, getattr(cell, axis)) for cell in cells}
        assert met == set(itertools.product(LAYOUTS, values))
    assert len({cell.key for cell in cells}) == len(cells)


def test_an_unknown_value_is_refused():
    with pytest.raises(ValueError, match="unknown 'diagonal'; known: separate"):
        Cell("diagonal")


def test_merging_refuses_two_answers_for_one_cell():
    a, b = result("separate/static/fresh/no_grad"), result("list/static/fresh/no_grad")
    assert [r.cell for r in merge([record_of(a), record_of(b)]).cells] == [a.cell, b.cell]
    with pytest.raises(AtlasError, match="two answers for separate/static"):
        merge([record_of(a, b), record_of(a)])


def test_merging_refuses_two_releases():
    other = record_of().model_copy(update={"release": "9.9.1"})
    with pytest.raises(AtlasError, match="two of release"):
        merge([record_of(), other])


def test_a_live_cell_that_is_not_as_recorded_is_loud():
    cell = "separate/static/fresh/no_grad"
    assert "as recorded" in hold([result(cell)], record_of(result(cell)))
    with pytest.raises(VerdictChanged, match=f"{cell}: recorded right, now crash"):
        hold([result(cell, "crash")], record_of(result(cell)))
    with pytest.raises(VerdictChanged, match="recorded not recorded"):
        hold([result(cell)], record_of())


def test_a_layout_with_a_cell_missing_or_wrong_is_not_in_place_everywhere():
    cells = [result(cell.key) for cell in all_cells(["separate"])]
    assert always_in_place([record_of(*cells)]) == ["separate"]
    assert always_in_place([record_of(*cells[1:])]) == []
    assert always_in_place([record_of(*cells[1:], result(cells[0].cell, "crash"))]) == []


def of_release(release: str, *results: CellResult) -> AtlasRecord:
    return record_of(*results).model_copy(update={"release": release})


def test_neighbouring_releases_that_agree_share_a_line_and_a_symbol():
    cell = "separate/static/fresh/no_grad"
    known = [
        of_release("1.0", result(cell)),
        of_release("1.1", result(cell)),
        of_release("1.2", result(cell, "crash")),
        of_release("1.3", result(cell)),
    ]
    told = [(row.releases, row.outcome) for row in rows(known)]
    assert told == [(("1.0", "1.1"), "right"), (("1.2",), "crash"), (("1.3",), "right")]
    table = outcome_table(known, ["separate"])
    assert table["separate allocations"] == [
        "✓ 1.0 to 1.1\n✗ dies 1.2\n✓ since 1.3", "·", "·", "·"
    ]  # fmt: skip
    assert changes(known) == [
        ("1.1", "1.2", "right", "crash", 1),
        ("1.2", "1.3", "crash", "right", 1),
    ]


def test_a_wrong_outcome_is_never_advised_as_fine():
    cells = [result("list/static/fresh/no_grad", "foreign values")]
    (row,) = rows([record_of(*cells)])
    assert row.advice.startswith("Do not run it compiled")


def test_shards_deal_out_every_layout_once():
    dealt = [execute.Job(shard=f"{i}/3").chosen() for i in (1, 2, 3)]
    assert sorted(itertools.chain(*dealt)) == sorted(LAYOUTS)


@pytest.mark.parametrize("options", [["--shard", "4/3"], ["--executor", "slurm"]])
def test_bad_options_are_one_line_and_write_nothing(options, tmp_path):
    ran = CliRunner().invoke(main, ["atlas", "--out", str(tmp_path), *options])
    assert ran.exit_code == 2
    assert len(ran.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_stopped_run_goes_on_at_the_cell_where_it_stopped(tmp_path, monkeypatch):
    ran: list[str] = []

    def stop_in_second_batch(cells):
        if ran:
            raise KeyboardInterrupt
        ran.extend(cell.key for cell in cells)
        return [result(cell.key) for cell in cells]

    def go_on(cells):
        ran.extend(cell.key for cell in cells)
        return [result(cell.key) for cell in cells]

    job = execute.Job(("separate",), tmp_path, workers=1)
    monkeypatch.setattr(execute, "run_cells", stop_in_second_batch)
    with pytest.raises(KeyboardInterrupt):
        execute.run_here(job, "omni-kv atlas")
    assert not list(tmp_path.glob("torch-*-cpu.json"))
    monkeypatch.setattr(execute, "run_cells", go_on)
    path = execute.run_here(job, "omni-kv atlas")
    assert ran == [cell.key for cell in all_cells(["separate"])]
    assert [r.cell for r in read(path).cells] == ran
    assert not list(tmp_path.glob("*.part.json"))


@pytest.mark.compiles
def test_a_release_that_cannot_be_installed_is_skipped_and_leaves_nothing(tmp_path, monkeypatch):
    import subprocess

    def refuse(folder, *packages):
        raise subprocess.CalledProcessError(1, ["pip"], stderr="no matching distribution")

    monkeypatch.setattr(environments, "_pip", refuse)
    skipped = environments.run_releases(["0.0.1"], execute.Job(), [], tmp_path, False, False)
    assert skipped == {"0.0.1": "the installation ended with code 1 no matching distribution"}
    assert not list(tmp_path.iterdir())


def test_an_environment_of_somebody_else_is_never_removed(tmp_path):
    (tmp_path / "torch-1" / "bin").mkdir(parents=True)
    (tmp_path / "torch-2").mkdir()
    (tmp_path / "torch-2" / environments._MARK).touch()
    environments._remove_made(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["torch-1"]


def test_a_record_that_does_not_fit_is_one_line(tmp_path):
    path = tmp_path / "torch-9.9.0-cpu.json"
    write(record_of(result("a")), path)
    content = json.loads(path.read_text())
    content["cells"][0]["outcome"] = "fine"
    path.write_text(json.dumps(content))
    with pytest.raises(AtlasError, match="outcome"):
        read(path)


def faulty(fault):
    """Stands in for compiled code: eager, and a fault of its own."""
    import ctypes

    layer = layout_of("separate").layer

    def call(x, slots, keys, values):
        out = layer(x, slots, keys, values)
        behind = values.data_ptr() + values.numel() * 4
        if fault in ("reads behind", "foreign"):
            foreign = ctypes.c_float.from_address(behind).value
        if fault == "foreign":
            values[7] = foreign
        if fault == "reads in front":
            ctypes.string_at(keys.data_ptr() - 4, 4)
        if fault == "other pool":
            values.copy_(keys)
        if fault == "dies":
            ctypes.string_at(0)
        if fault == "other":
            values[3] += 1
        if fault == "copies":
            keys, values = keys.clone(), values.clone()
            layer(x, slots, keys, values)
        return out + (fault == "output")

    return call


FAULTS = {
    "none": "right",
    "copies": "right",
    "reads behind": "reads outside",
    "reads in front": "reads outside",
    "foreign": "foreign values",
    "other pool": "other pool's values",
    "dies": "crash",
    "other": "wrong otherwise",
    "output": "wrong otherwise",
}


def observed(fault):
    return run_in_memories(
        Cell("separate"), layout_of("separate"), faulty(fault), ("after", "before", "filled")
    )


def observe_each():
    import torch

    torch.set_num_threads(1)
    return {fault: run_forked(partial(observed, fault)) for fault in FAULTS}


@pytest.mark.compiles
def test_each_built_in_fault_is_classified_by_running_it():
    children = run_isolated(observe_each).unwrap()
    found, in_place = {}, {}
    for fault, child in children.items():
        runs, in_place[fault] = child.value or ({"filled": Run(ended=child.describe())}, None)
        found[fault] = classify(runs["filled"], runs.get("after"), runs.get("before"))[0]
    assert found == FAULTS
    assert in_place == {fault: fault != "copies" for fault in FAULTS} | {"dies": None}


@pytest.mark.compiles
def test_separate_pools_are_right_and_in_place_and_move_no_more_than_needed():
    (cell,) = run_cells([Cell("separate")])
    assert (cell.outcome, cell.in_place) == ("right", True)
    assert cell.writes_bytes is None or cell.writes_bytes <= cell.needed_bytes


def test_in_short_names_what_is_right_and_in_place_on_every_release_with_a_fresh_cache():
    """The page recommends these two, and says so of all releases on record."""
    known = records()
    assert known
    for record in known:
        for cell in all_cells(["separate", "one_tensor"]):
            if cell.cache == "fresh":
                result = record.by_key()[cell.key]
                assert (result.outcome, result.in_place) == ("right", True), (record.release, cell)


def test_emptying_the_cache_is_advised_where_a_fresh_one_is_right():
    stale = [
        result("separate/static/shared_halves/no_grad", "foreign values"),
        result("list/static/shared_halves/no_grad", "foreign values"),
    ]
    fresh = [
        result("separate/static/fresh/no_grad"),
        result("list/static/fresh/no_grad", "foreign values"),
    ]
    told = {row.cell.key: row.advice for row in rows([record_of(*stale, *fresh)])}
    assert told[stale[0].cell].startswith("Empty the compile cache")
    assert told[stale[1].cell].startswith("Do not run it compiled")
