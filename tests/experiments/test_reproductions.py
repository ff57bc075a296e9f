"""Reproductions are found, shown and run; a trace is read part by part."""

from __future__ import annotations

import pytest

from omni_kv.experiments import reproductions
from omni_kv.experiments.atlas.records import fixed_records

REPRO = '''"""A trial."""
import sys

COLS = 4
ROWS = 2

@sorted
def step(x):
    return x


left, right = 1, 2
print("seen:", sys.argv[1:], __name__)
'''


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A folder of reproductions with one in it; gets what the script ends with."""
    monkeypatch.setattr(reproductions, "_upstream", lambda: tmp_path)
    monkeypatch.setattr(reproductions, "torch_release", lambda: "9.9.0")
    folder = tmp_path / "07-trial"
    folder.mkdir()
    (tmp_path / "README.md").touch()

    def write(end: str = "", expected: str = '[exit_code]\n"9.9.0" = 1\n') -> None:
        (folder / "repro.py").write_text(REPRO.replace("@sorted\n", "") + end)
        (folder / "expected.toml").write_text(expected)

    write()
    (folder / "repro.py").write_text(REPRO)
    return write


def test_a_definition_is_shown_whole_and_in_the_order_of_the_file(trial):
    assert reproductions.numbers() == ["07"]
    shown = reproductions.lines_of("07", "step", "ROWS", "COLS", "(left, right)")
    assert shown == (
        "COLS = 4\nROWS = 2\n\n\n@sorted\ndef step(x):\n    return x\n\n\nleft, right = 1, 2"
    )
    with pytest.raises(ValueError, match="nothing is defined as 'right'"):
        reproductions.lines_of("07", "step", "right")


@pytest.mark.parametrize("number", ["08", "", "*"])
def test_an_unknown_number_is_refused_with_those_that_exist(trial, number):
    with pytest.raises(ValueError, match="there are: 07"):
        reproductions.folder(number)


def test_the_recorded_exit_code_is_that_of_the_release_with_or_without_the_fix(trial):
    assert reproductions.recorded("07", fixed=False) == 1
    assert reproductions.recorded("07", fixed=False, release="1.0") is None
    assert (reproductions.recorded("07", fixed=True), reproductions.fix_of("07")) == (None, None)
    fix = '[fix]\nname = "overlap-check"\n[fix.exit_code]\n"9.9.0" = 0\n'
    trial(expected='[exit_code]\n"9.9.0" = 1\n' + fix)
    assert reproductions.recorded("07", fixed=True) == 0
    assert reproductions.fix_of("07") == "overlap-check"


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)\n", 3), ("sys.exit()\n", 0), ("sys.exit('no')\n", 1)]
)
def test_a_reproduction_runs_as_a_script_and_its_exit_code_is_kept(trial, end, code):
    trial(end)
    ran = reproductions.run("07")
    assert ran == reproductions.Ran(code, "seen: [] __main__\n")


@pytest.mark.compiles
def test_a_reproduction_that_raises_is_no_exit_code(trial):
    trial("raise ZeroDivisionError\n")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        reproductions.run("07")


def test_a_fix_is_run_where_an_exit_code_with_it_is_on_record(trial, monkeypatch):
    monkeypatch.setattr(reproductions, "run", lambda *job: job)
    assert list(reproductions.run_all(["07"])) == [("07", None)]
    fix = '[fix]\nname = "overlap-check"\n[fix.exit_code]\n"{}" = 0\n'
    trial(expected='[exit_code]\n"9.9.0" = 1\n' + fix.format("9.9.1"))
    assert list(reproductions.run_all(["07"])) == [("07", None)]
    trial(expected='[exit_code]\n"9.9.0" = 1\n' + fix.format("9.9.0"))
    assert list(reproductions.run_all(["07"])) == [("07", None), ("07", "overlap-check")]


def test_a_clone_is_found_in_the_part_of_the_trace_that_holds_it():
    head = "V1201 04:00:00.000000 12 torch/x.py:7] "
    trace = "\n".join(
        [
            head + '{"artifact": {"name": "before", "encoding": "string"}, "has_payload": "a"}',
            "\tadd = aten.add(clones)",
            head + '{"inductor_post_grad_graph": {}, "has_payload": "b"}',
            "\tclone_1 = aten.clone.default(x)",
            "\tcpp_fused_clone_0(x)",
            head + '{"str": ["a clone of no part", 1]}',
        ]
    )
    assert reproductions.trace_artifacts(trace) == {
        "before": [],
        "inductor_post_grad_graph": ["clone_1 = aten.clone.default(x)", "cpp_fused_clone_0(x)"],
        "str": [],
    }


def test_unfinished_records_with_fixes_are_not_read(tmp_path):
    for name in ("fix-a.part", "fix-a.shard-1-of-2"):
        (tmp_path / f"torch-9.9.0-cpu-{name}.json").write_text("no record")
    assert fixed_records("9.9.0", folder=tmp_path) == []
