"""Verdicts compare a measured outcome with the record of the installed torch release."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pydantic
import pytest

from omni_kv.evidence import verdicts
from omni_kv.evidence.verdicts import VerdictChanged, VerdictFileError, verdict


@pytest.fixture
def recording(data: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Records one outcome."""

    def record(name: str, outcome: object, **parameters: object) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("OMNI_KV_RECORD_VERDICTS", "1")
            patch.setenv("OMNI_KV_RECORD_COMMAND", "omni-kv verdicts record 02")
            verdict(name, outcome, **parameters)

    return record


def the_file(data: Path) -> Path:
    (path,) = (data / "verdicts").glob("*.json")
    return path


def test_the_same_outcome_prints_one_line_without_the_release(recording, capsys) -> None:
    recording("02.shared", {"signal": 11}, device="cpu")
    verdict("02.shared", {"signal": 11}, device="cpu")
    line = "02.shared: as recorded for this torch release\n"
    assert capsys.readouterr().out == line * 2


def test_another_outcome_shows_both_and_raises(recording, capsys) -> None:
    recording("02.shared", {"signal": 11, "rows": 8}, device="cpu")
    with pytest.raises(VerdictChanged, match=r"02\.shared: not as recorded for torch"):
        verdict("02.shared", {"signal": None, "rows": 8}, device="cpu")
    out = capsys.readouterr().out
    assert '-  "signal": 11' in out
    assert '+  "signal": null' in out
    assert '   "rows": 8' in out


@pytest.mark.parametrize("parameters", [{}, {"device": "cuda"}, {"device": "cpu", "seed": 1}])
def test_other_parameters_have_no_record_and_say_so(recording, capsys, parameters) -> None:
    recording("02.shared", {"signal": 11}, device="cpu")
    capsys.readouterr()
    verdict("02.shared", {"signal": 9}, **parameters)
    out = capsys.readouterr().out
    assert out.startswith(f"02.shared: no record for torch {verdicts.torch_release()}")
    assert '"signal": 9' in out
    assert "as recorded" not in out


def test_another_release_has_no_record(recording, capsys, monkeypatch) -> None:
    recording("02.shared", {"signal": 11})
    monkeypatch.setattr(verdicts, "torch_release", lambda: "0.0.1")
    verdict("02.shared", {"signal": 11})
    assert "no record for torch 0.0.1" in capsys.readouterr().out


def test_the_order_of_parameters_and_keys_does_not_matter(recording, capsys) -> None:
    recording("x", {"a": 1, "b": 2}, device="cpu", seed=0)
    verdict("x", {"b": 2, "a": 1}, seed=0, device="cpu")
    assert "no record" not in capsys.readouterr().out


def test_the_release_is_the_version_without_its_local_part(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0+cu130")
    assert verdicts.torch_release() == "2.11.0"


class Ended(enum.Enum):
    KILLED = "killed"


class Model(pydantic.BaseModel):
    ended: Ended = Ended.KILLED
    shape: tuple[int, int] = (2, 3)


@dataclasses.dataclass
class Plain:
    ended: str = "killed"
    shape: tuple[int, int] = (2, 3)


@pytest.mark.parametrize("outcome", [Model(), Plain(), {"ended": "killed", "shape": [2, 3]}])
def test_models_dataclasses_and_mappings_are_the_same_outcome(recording, outcome) -> None:
    recording("x", {"ended": "killed", "shape": (2, 3)})
    verdict("x", outcome)


def test_numbers_of_arrays_and_tensors_are_numbers_and_nan_equals_nan(recording, data) -> None:
    import numpy as np
    import torch

    outcome = {
        "rows": torch.tensor(7),
        "share": np.float64(0.5),
        "worst": float("nan"),
        "far": torch.tensor(float("inf")),
        "dtype": torch.bfloat16,
    }
    recording("x", outcome)
    verdict("x", outcome)
    (entry,) = json.loads(the_file(data).read_text())["verdicts"]
    assert entry["outcome"] == {
        "rows": 7,
        "share": 0.5,
        "worst": "NaN",
        "far": "Infinity",
        "dtype": "torch.bfloat16",
    }


@pytest.mark.parametrize("outcome", [3, [1], "text", {"a": object()}])
def test_what_json_has_no_form_for_is_refused(data, outcome) -> None:
    with pytest.raises(TypeError):
        verdict("x", outcome)


def test_an_entry_says_where_when_and_how_it_was_recorded(recording, data) -> None:
    recording("02.shared", {"signal": 11}, device="cpu")
    content = json.loads(the_file(data).read_text())
    assert the_file(data).name == f"torch-{content['torch']}.json"
    (entry,) = content["verdicts"]
    origin = entry["recorded"]
    assert entry["parameters"] == {"device": "cpu"}
    assert origin["device"].startswith("CPU")
    assert origin["torch"].startswith(content["torch"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", origin["date"])
    assert origin["command"] == "omni-kv verdicts record 02"
    always = {"device", "platform", "python", "torch", "date", "revision", "command"}
    assert set(origin) - {"triton", "flash_attn", "flash_attn_3"} == always


def test_the_file_does_not_depend_on_the_order_of_recording(recording, data) -> None:
    recording("b", {"x": 1})
    recording("a", {"x": 1}, seed=2)
    recording("a", {"x": 1}, seed=1)
    first = the_file(data).read_text()
    the_file(data).unlink()
    recording("a", {"x": 1}, seed=1)
    recording("b", {"x": 1})
    recording("a", {"x": 1}, seed=2)
    assert the_file(data).read_text() == first
    left = {name for name in os.listdir(data / "verdicts") if not name.endswith(".lock")}
    assert left == {the_file(data).name}


def test_recording_the_same_outcome_again_leaves_the_entry_alone(recording, data) -> None:
    recording("a", {"x": 1})
    old = the_file(data).read_text().replace('"date": "2', '"date": "1')
    the_file(data).write_text(old)
    recording("a", {"x": 1})
    assert the_file(data).read_text() == old
    recording("a", {"x": 2})
    (entry,) = json.loads(the_file(data).read_text())["verdicts"]
    assert entry["outcome"] == {"x": 2}
    assert entry["recorded"]["date"].startswith("2")


RECORDING = """
import sys
from omni_kv.evidence import verdicts
verdicts.provenance = lambda device, command: verdicts.Provenance(
    device=device, platform="", python="", torch="", date="2026-12-01", revision="", command=""
)
print("ready", flush=True)
sys.stdin.readline()
for number in range(5):
    verdicts.record("2.11.0", f"{sys.argv[1]}.{number}", {}, {"x": number})
"""


def test_what_several_processes_record_at_once_is_all_there(data) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    names = [f"{n:02}" for n in range(6)]
    command = [sys.executable, "-c", RECORDING]
    started = [subprocess.Popen([*command, name], text=True, **pipes) for name in names]
    for child in started:
        assert child.stdout.readline() == "ready\n"
    for child in started:
        child.stdin.write("\n")
        child.stdin.flush()
    assert [child.wait(60) for child in started] == [0] * len(names)
    recorded = [entry.name for entry in verdicts.load("2.11.0").verdicts]
    assert recorded == [f"{name}.{number}" for name in names for number in range(5)]


def broken(data: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(the_file(data).read_text())
    change(content)
    the_file(data).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c["verdicts"][0].pop("outcome"), r"verdicts\.0\.outcome"),
        (lambda c: c["verdicts"][0]["recorded"].pop("date"), r"verdicts\.0\.recorded\.date"),
        (lambda c: c.update(torch="1.0"), "torch: holds records of 1.0"),
        (lambda c: c["verdicts"].append(c["verdicts"][0]), "verdicts: .*recorded twice: a"),
        (lambda c: c["verdicts"][0].update(extra=1), r"verdicts\.0\.extra"),
    ],
)
def test_a_corrupt_record_names_file_and_field(recording, data, change, field) -> None:
    recording("a", {"x": 1})
    broken(data, change)
    with pytest.raises(VerdictFileError, match=rf"torch-.*\.json: {field}"):
        verdict("a", {"x": 1})


def test_a_file_that_is_no_json_is_named(recording, data) -> None:
    recording("a", {"x": 1})
    the_file(data).write_text('{"torch": ')
    with pytest.raises(VerdictFileError, match=r"torch-.*\.json: not a readable JSON file"):
        verdict("a", {"x": 1})


def test_the_table_has_a_column_for_each_release_in_order(recording, data, monkeypatch) -> None:
    for release, signal in (("2.11.0", 11), ("2.9.1", 7)):
        monkeypatch.setattr(verdicts, "torch_release", lambda release=release: release)
        recording("02.shared", {"signal": signal, "ended": "killed"}, device="cpu")
    recording("03.other", {"x": 1})
    table = verdicts.verdict_table("02")
    assert list(table.columns) == ["torch 2.9.1", "torch 2.11.0"]
    assert list(table.loc[("02.shared", "device=cpu", "signal")]) == ["7", "11"]
    assert list(table.loc[("02.shared", "device=cpu", "ended")]) == ["killed", "killed"]
    assert len(table) == 2


def test_the_table_is_empty_when_nothing_is_recorded(data) -> None:
    assert len(verdicts.verdict_table("02")) == 0


CELL = """# NBVAL_CHECK_OUTPUT
from omni_kv.evidence.verdicts import verdict
verdict("{name}", {{"signal": 11}}, device="cpu")
"""
LINE = "{name}: as recorded for this torch release\n"


@pytest.fixture(scope="module")
def nbval_failures(tmp_path_factory, notebook_writer) -> dict[str, str]:
    """What nbval said about each of six notebooks, run at once; empty where it had no objection.

    A kernel spec that would win over the interpreter's own is lying around.
    """
    folder = tmp_path_factory.mktemp("nbval")
    for name in ("same", "record_changed", "outcome_changed", "no_record"):
        cell = CELL.format(name=name)
        if name == "outcome_changed":
            cell = cell.replace("11", "9")
        notebook_writer(folder / f"{name}.ipynb", cell, stdout=LINE.format(name=name))
    notebook_writer(folder / "raises.ipynb", "1 / 0")
    here = f"import sys\nassert sys.executable == {sys.executable!r}"
    notebook_writer(folder / "interpreter.ipynb", here)
    spec = {"argv": ["no-such-python"], "display_name": "wrong", "language": "python"}
    kernel = folder / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("OMNI_KV_DATA", str(folder))
        patch.setenv("OMNI_KV_RECORD_VERDICTS", "1")
        for name in ("same", "record_changed", "outcome_changed"):
            verdict(name, {"signal": 7 if name == "record_changed" else 11}, device="cpu")
        patch.delenv("OMNI_KV_RECORD_VERDICTS")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval-lax"]
        command += ["--nbval-current-env", "--rootdir", ".", "--junitxml", "result.xml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    cases = ElementTree.parse(folder / "result.xml").iter("testcase")
    said = {case.attrib["classname"]: case.findtext("failure", default="") for case in cases}
    return {name.removesuffix(".ipynb").split(".")[-1]: text for name, text in said.items()}


@pytest.mark.compiles
def test_nbval_passes_while_the_outcome_is_the_recorded_one(nbval_failures) -> None:
    assert nbval_failures["same"] == ""


@pytest.mark.compiles
def test_nbval_fails_when_the_record_changed(nbval_failures) -> None:
    assert "VerdictChanged" in nbval_failures["record_changed"]
    assert "record_changed: not as recorded for torch" in nbval_failures["record_changed"]


@pytest.mark.compiles
def test_nbval_fails_when_the_outcome_changed(nbval_failures) -> None:
    assert "VerdictChanged" in nbval_failures["outcome_changed"]
    assert "outcome_changed: not as recorded for torch" in nbval_failures["outcome_changed"]


@pytest.mark.compiles
def test_nbval_fails_when_there_is_no_record(nbval_failures) -> None:
    assert "no record for torch" in nbval_failures["no_record"]


@pytest.mark.compiles
def test_nbval_fails_when_a_cell_raises(nbval_failures) -> None:
    assert "ZeroDivisionError" in nbval_failures["raises"]


@pytest.mark.compiles
def test_nbval_uses_this_interpreter_whatever_kernel_is_installed(nbval_failures) -> None:
    assert nbval_failures["interpreter"] == ""
