"""The command line: exit codes, one line for each refusal, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from omni_kv.cli import main


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.compiles
def test_help_loads_neither_torch_nor_papermill() -> None:
    check = "import sys, omni_kv.cli; sys.exit(any(m in sys.modules for m in sys.argv[1:]))"
    modules = ["torch", "papermill", "pandas", "nbformat", "pydantic"]
    subprocess.run([sys.executable, "-c", check, *modules], check=True)
    assert call("--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["07"], "no notebook '07'; there are: 01_a, 02_b"),
        (["-p", "sede", "1"], "no parameter 'sede' in any of these notebooks; known: device"),
        (["-p", "seed", "x"], "parameter 'seed' takes int, not 'x'"),
        (["-p", "preset", "huge"], "no preset 'huge'; there are: "),
        (["-p", "device", "cuda"], "device 'cuda' was asked for, but torch sees no CUDA GPUs"),
        (["01", "--all-in-order"], "exclude each other"),
    ],
)
def test_what_cannot_run_is_one_line_exit_code_2_and_nothing_written(
    write_notebook, tmp_path, monkeypatch, arguments, said
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_notebook("01_a", parameters='seed: int = 0\npreset = "tiny"')
    write_notebook("02_b", parameters='device = "cpu"')
    out = tmp_path / "out"
    result = call("run", *arguments, "--out", str(out))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_an_unknown_device_record_is_refused_before_anything_is_written(
    write_notebook, data, tmp_path, monkeypatch
) -> None:
    monkeypatch.delenv("OMNI_KV_DEVICE_RECORD", raising=False)
    write_notebook("01_a")
    out = ("--out", str(tmp_path / "out"))
    for words in (("run", "01", *out), ("verdicts", "record", "01"), ("report", *out)):
        result = call(*words, "--device-record", "other")
        assert result.exit_code == 2
        assert "no records of 'other'; there are: nothing recorded" in result.stderr
        assert not (tmp_path / "out").exists()
    assert "OMNI_KV_DEVICE_RECORD" not in os.environ


@pytest.mark.compiles
def test_the_named_device_record_reaches_the_notebook(write_notebook, data, tmp_path) -> None:
    (data / "evidence" / "other").mkdir(parents=True)
    (data / "evidence" / "other" / "step.json").write_text("{}")
    source = "import os\nassert os.environ['OMNI_KV_DEVICE_RECORD'] == 'other'"
    write_notebook("01_a", source)
    result = call("run", "01", "--out", str(tmp_path / "out"), "--device-record", "other")
    assert result.exit_code == 0, result.output


def test_an_output_folder_that_cannot_be_made_is_refused(write_notebook, tmp_path) -> None:
    write_notebook("01_a")
    (tmp_path / "file").write_text("")
    result = call("run", "01", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.compiles
def test_a_failing_run_exits_1_and_names_notebook_cell_and_exception(
    write_notebook, tmp_path
) -> None:
    write_notebook("01_a", "raise ValueError('first\\nlast')")
    write_notebook("02_b")
    result = call("run", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "FAILED 01_a: cell 2 of 2 (`raise ValueError('first\\nlast')`)" in result.stderr
    assert "ValueError: last" in result.stderr
    assert "1 not run" in result.stderr


@pytest.mark.compiles
def test_keep_going_still_exits_1(write_notebook, tmp_path) -> None:
    write_notebook("01_a", "1 / 0")
    write_notebook("02_b")
    result = call("run", "--keep-going", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "02_b: ran in" in result.output
    assert (tmp_path / "out" / "02_b.ipynb").exists()


@pytest.mark.compiles
def test_a_run_shows_progress_and_where_the_notebooks_are(write_notebook, tmp_path) -> None:
    write_notebook("01_a", "x = 1")
    result = call("run", "--all-in-order", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0
    assert "[1/1] 01_a" in result.stderr
    assert str(tmp_path / "out" / "01_a.ipynb") in result.stdout


@pytest.mark.compiles
def test_stored_executes_in_place(write_notebook) -> None:
    path = write_notebook("01_a", "print('fresh')")
    assert call("stored", "01").exit_code == 0
    assert "fresh" in path.read_text()


@pytest.mark.compiles
def test_recording_writes_the_releases_file_and_leaves_the_notebook_alone(
    write_notebook, data, monkeypatch
) -> None:
    source = (
        "from omni_kv.evidence.verdicts import verdict\nverdict('01.x', {'rows': rows}, rows=rows)"
    )
    path = write_notebook("01_a", source, parameters="rows = 3")
    before = path.read_text()
    arguments = ["verdicts", "record", "01", "-p", "rows", "4"]
    monkeypatch.setattr("sys.argv", ["/some/where/bin/omni-kv", *arguments])
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    (file,) = (data / "verdicts").glob("*.json")
    (entry,) = json.loads(file.read_text())["verdicts"]
    assert entry["outcome"] == {"rows": 4}
    assert entry["recorded"]["command"] == "omni-kv verdicts record 01 -p rows 4"
    assert str(file) in result.stdout
    assert path.read_text() == before
    shown = call("verdicts", "show", "01").stdout
    assert "01.x" in shown
    assert "rows=4" in shown


def test_a_corrupt_record_file_stops_the_recording_with_one_line(write_notebook, data) -> None:
    write_notebook("01_a")
    from omni_kv.evidence.verdicts import torch_release

    folder = data / "verdicts"
    folder.mkdir(parents=True)
    (folder / f"torch-{torch_release()}.json").write_text("{}")
    result = call("verdicts", "record")
    assert result.exit_code == 2
    assert "torch: Field required" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.compiles
def test_the_report_says_where_to_open_it(write_notebook, tmp_path: Path) -> None:
    write_notebook("01_a", "x = 1")
    out, report = tmp_path / "out", tmp_path / "report"
    call("run", "--out", str(out))
    result = call("report", "--executed", str(out), "--out", str(report))
    assert result.exit_code == 0, result.output
    assert "report" in result.stdout
    assert list(report.rglob("index.html"))
