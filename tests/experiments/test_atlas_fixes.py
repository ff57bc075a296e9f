"""Cells with a candidate fix in place: records of their own, held against those without."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from omni_kv.cli import main
from omni_kv.experiments.atlas import execute, run
from omni_kv.experiments.atlas.cells import Cell, CellResult, all_cells
from omni_kv.experiments.atlas.effect import effects, turned
from omni_kv.experiments.atlas.records import (
    AtlasError,
    AtlasRecord,
    fixed_records,
    merge,
    read,
    records,
    write,
)
from omni_kv.upstream import fixes

PROVENANCE = {
    "device": "CPU", "platform": "Linux", "python": "3.11", "torch": "9.9.0",
    "date": "2026-01-01", "revision": "abc", "command": "omni-kv atlas",
}  # fmt: skip


def result(cell="a", outcome="right", in_place=True, moved=None) -> CellResult:
    return CellResult(
        cell=cell, outcome=outcome, detail="", in_place=in_place, reads_bytes=moved,
        writes_bytes=moved, needed_bytes=1, seconds=1,
    )  # fmt: skip


def record_of(*cells: CellResult, fix: str | None = None, **more) -> AtlasRecord:
    known = {"release": "9.9.0", "kind": "cpu", "recorded": PROVENANCE, "seconds": 1}
    return AtlasRecord(**{**known, **more}, cells=list(cells), fixes=[fix] if fix else None)


WRONG, REFUSED = result(outcome="foreign values"), result(outcome="refuses to compile")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (result(), result(), "stayed"),
        (WRONG, result(in_place=False), "better"),
        (result(in_place=False), WRONG, "worse"),
        (result(in_place=False), result(), "better"),
        (result(), result(in_place=False), "worse"),
        (result(in_place=None), result(), "changed"),
        (result(in_place=None), WRONG, "worse"),
        (REFUSED, result(), "better"),
        (REFUSED, WRONG, "worse"),
        (WRONG, result(outcome="reads outside"), "changed"),
        (result(moved=8), result(moved=9), "worse"),
        (result(moved=8, in_place=False), result(moved=7, in_place=False), "better"),
        (result(moved=8), result(), "stayed"),
        (result(moved=8, outcome="crash"), result(moved=9, outcome="crash"), "stayed"),
        (result(in_place=False, moved=8), result(moved=9), "better"),
    ],
)
def test_each_pair_of_outcomes_turns_one_way(before, after, expected):
    assert turned(before, after) == expected


def test_the_worst_comes_first():
    plain = record_of(result("a"), result("b"), result("c", "crash"))
    fixed = record_of(result("a"), result("b", "crash"), result("c"), fix="x")
    found = [(e.cell, e.turned) for e in effects(plain, fixed)]
    assert found == [("b", "worse"), ("c", "better"), ("a", "stayed")]


@pytest.mark.parametrize(
    ("plain", "fixed", "message"),
    [
        (record_of(result()), record_of(result()), "the second one with fixes"),
        (record_of(result(), fix="x"), record_of(result(), fix="x"), "one without fixes"),
        (record_of(result()), record_of(result(), fix="x", release="1"), "two of release"),
        (record_of(result()), record_of(result(), fix="x", kind="cuda"), "two of kind"),
        (record_of(result()), record_of(result("b"), fix="x"), "lacks b"),
        (record_of(result()), record_of(fix="x"), "lacks every cell"),
    ],
)
def test_records_that_are_no_pair_are_refused(plain, fixed, message):
    with pytest.raises(AtlasError, match=message):
        effects(plain, fixed)


@pytest.fixture
def stub(monkeypatch):
    """Fixes ``one`` and ``two`` that fit, ``other`` that does not, and cells that say theirs."""
    line = "from __future__ import annotations\n"
    module = "omni_kv.upstream.fixes"
    fits = ((fixes.Change(module, line, line),),)
    known = {
        "one": fits,
        "two": fits,
        "other": ((fixes.Change(module, "no_such_line = 1\n", ""),),),
    }
    for name in list(fixes.FIXES):
        monkeypatch.delitem(fixes.FIXES, name)
    for name, forms in known.items():
        monkeypatch.setitem(fixes.FIXES, name, forms)

    def run_cells(cells):
        return [
            result(c.key, "right" if c.fixes else "crash").model_copy(
                update={"detail": " ".join(c.fixes)}
            )
            for c in cells
        ]

    monkeypatch.setattr(execute, "run_cells", run_cells)


def atlas(folder, *options):
    command = ["atlas", "--layout", "separate", "--out", str(folder), *options]
    return CliRunner().invoke(main, command)


def test_a_record_with_fixes_is_not_found_among_those_without(stub, tmp_path):
    assert atlas(tmp_path).exit_code == 0
    (plain,) = tmp_path.iterdir()
    assert atlas(tmp_path, "--fix", "two", "--fix", "one").exit_code == 0
    assert atlas(tmp_path, "--fix", "all").exit_code == 0
    names = {p.name.removeprefix(plain.stem) for p in tmp_path.iterdir()}
    assert names == {".json", "-fix-one+two.json", "-fix-all.json"}
    for path in tmp_path.iterdir():
        record = read(path)
        expected = None if path == plain else ["one", "two"]
        assert record.fixes == expected
        assert {c.detail for c in record.cells} == {" ".join(expected or [])}
    assert records(folder=tmp_path) == [read(plain)]


def test_records_with_fixes_are_found_by_release_and_device(stub, tmp_path):
    write(record_of(result(), fix="x"), tmp_path / "torch-9.9.0-cpu-fix-x.json")
    write(record_of(result(), fix="x", kind="cuda"), tmp_path / "torch-9.9.0-cuda-fix-x.json")
    write(record_of(result()), tmp_path / "torch-9.9.0-cpu.json")
    assert [r.kind for r in fixed_records("9.9.0", folder=tmp_path)] == ["cpu"]
    assert fixed_records("9.9.1", folder=tmp_path) == []


def test_chosen_cells_come_back_in_order_also_one_with_and_without_a_fix(stub):
    cells = [Cell("separate"), Cell("separate", fixes=("one",)), Cell("list", fixes=("two",))]
    found = [(r.cell.split("/")[0], r.detail) for r in execute.run_chosen(cells)]
    assert found == [("separate", ""), ("separate", "one"), ("list", "two")]


def test_a_record_with_fixes_under_the_name_of_one_without_is_left_out(tmp_path):
    write(record_of(result(), fix="one"), tmp_path / "torch-9.9.0-cpu.json")
    assert records(folder=tmp_path) == []


@pytest.mark.parametrize("name", ["other", "no-such-fix"])
def test_a_fix_that_cannot_be_had_is_named_and_nothing_is_written(stub, tmp_path, name):
    ran = atlas(tmp_path, "--fix", name)
    assert ran.exit_code == 2
    assert f"'{name}'" in ran.output.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_shards_with_and_without_a_fix_are_not_merged():
    with pytest.raises(AtlasError, match="two of fixes"):
        merge([record_of(result("a")), record_of(result("b"), fix="x")])


@pytest.mark.parametrize(("after", "code"), [("right", 0), ("crash", 1)])
def test_comparing_ends_with_1_where_a_cell_turned_worse(tmp_path, after, code):
    paths = [tmp_path / name for name in ("plain.json", "fixed.json")]
    write(record_of(result("a"), result("b", "crash"), result("c")), paths[0])
    write(record_of(result("a", after), result("b"), fix="x"), paths[1])
    ran = CliRunner().invoke(main, ["atlas", "compare", *map(str, paths)])
    assert ran.exit_code == code, ran.output
    assert "better: b: crash -> right" in ran.output
    assert "not run with the fixes: 1 cells" in ran.output


@pytest.mark.compiles
def test_the_fix_is_in_place_in_the_process_of_the_cell():
    layout = "shared_k_first"
    (cloned,) = run.run_cells([Cell(layout)])
    (fixed,) = run.run_cells([Cell(layout, fixes=("overlap-check",))])
    assert cloned.in_place is not True
    assert (fixed.outcome, fixed.in_place) == ("right", True)


def test_every_cell_gets_the_fixes():
    assert {c.fixes for c in all_cells(fixes=("x",))} == {("x",)}
