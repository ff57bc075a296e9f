"""Headless runs: which notebooks, parameters by type, what is written, what a failure says."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from omni_kv.publish import notebooks as nb
from omni_kv.publish.parameters import Parameter, Refused, parameters_of, parse_value, plan

PARAMETERS = """device = "cpu"  # where to run
preset: str = "tiny"
seed: int | None = None
frames = 4
scale: float = 1.0
flag = False
names = ["a", "b=c"]
"""


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs]
    return "".join(o.get("text", "") for o in outputs)


@pytest.fixture
def presets(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(PRESETS={"tiny": 1, "large": 2})
    monkeypatch.setitem(sys.modules, "omni_kv.model.geometry", fake)


def test_none_asked_is_all_in_reading_order(write_notebook) -> None:
    for stem in ("02_b", "00_c", "01_a"):
        write_notebook(stem)
    assert [path.stem for path in nb.select([])] == ["00_c", "01_a", "02_b"]


def test_a_number_a_stem_and_a_path_name_a_notebook(write_notebook) -> None:
    path = write_notebook("02_b")
    for name in ("02", "2", "02_b", "02_b.ipynb", str(path)):
        assert nb.select([name]) == [path], name


def test_a_notebook_named_twice_runs_once(write_notebook) -> None:
    path = write_notebook("02_b")
    assert nb.select(["02", "02_b"]) == [path]


def test_an_unknown_notebook_is_refused_with_those_that_exist(write_notebook) -> None:
    write_notebook("01_a"), write_notebook("02_b")
    with pytest.raises(Refused, match=r"no notebook '07'; there are: 01_a, 02_b"):
        nb.select(["07"])


def test_a_file_that_is_no_notebook_is_refused(notebooks) -> None:
    path = notebooks / "01_a.ipynb"
    path.write_text("no json")
    with pytest.raises(Refused, match="not a readable notebook"):
        plan([path], [])


def test_parameters_are_read_with_annotation_and_default(write_notebook) -> None:
    found = parameters_of(write_notebook("01", parameters=PARAMETERS))
    assert found["seed"] == Parameter("seed", "int | None", None)
    assert found["device"] == Parameter("device", "", "cpu")
    assert found["names"].default == ["a", "b=c"]
    assert list(found) == ["device", "preset", "seed", "frames", "scale", "flag", "names"]


def test_a_notebook_without_a_parameters_cell_has_none(write_notebook) -> None:
    assert parameters_of(write_notebook("01", "x = 1")) == {}


@pytest.mark.parametrize(
    ("annotation", "default", "text", "value"),
    [
        ("", 4, "7", 7),
        ("", 4, "-1", -1),
        ("", 1.0, "2", 2.0),
        ("", "cpu", "7", "7"),
        ("", False, "true", True),
        ("", False, "0", False),
        ("", [1], "[2, 3]", [2, 3]),
        ("", None, "3", 3),
        ("", None, "text", "text"),
        ("int | None", None, "none", None),
        ("int | None", None, "5", 5),
        ("Optional[int]", 1, "None", None),
        ("str | int", 1, "5", 5),
        ("list[int]", None, "[1]", [1]),
        ("Literal['a', 'b']", "a", "b", "b"),
    ],
)
def test_a_value_becomes_what_the_parameter_wants(annotation, default, text, value) -> None:
    parsed = parse_value(Parameter("p", annotation, default), text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "default", "text"),
    [
        ("", 4, "many"),
        ("", 4, "3.5"),
        ("", 1.0, "fast"),
        ("", True, "maybe"),
        ("", [1], "3"),
        ("int | None", None, "x"),
        ("Literal['a', 'b']", "a", "c"),
    ],
)
def test_a_value_of_another_type_is_refused(annotation, default, text) -> None:
    with pytest.raises(Refused, match=rf"parameter 'p' takes .*, not '{text}'"):
        parse_value(Parameter("p", annotation, default), text)


def test_each_notebook_gets_the_parameters_that_it_has(write_notebook) -> None:
    first = write_notebook("01", parameters="seed = 0")
    second = write_notebook("02", parameters="seed = 0\nsteps = 1")
    jobs = plan([first, second], [("steps", "3"), ("seed", "1")])
    assert [job.parameters for job in jobs] == [{"seed": 1}, {"steps": 3, "seed": 1}]


def test_a_parameter_that_no_notebook_has_is_refused_with_those_known(write_notebook) -> None:
    path = write_notebook("01", parameters="seed = 0\nsteps = 1")
    with pytest.raises(Refused, match="no parameter 'sed' in 01; known: seed, steps"):
        plan([path], [("sed", "1")])


def test_an_unknown_preset_is_refused_with_those_known(write_notebook, presets) -> None:
    path = write_notebook("01", parameters=PARAMETERS)
    assert plan([path], [("preset", "large")])[0].parameters == {"preset": "large"}
    with pytest.raises(Refused, match="no preset 'huge'; there are: tiny, large"):
        plan([path], [("preset", "huge")])


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "abacus"])
def test_a_device_that_is_not_there_is_refused(write_notebook, monkeypatch, device) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = write_notebook("01", parameters=PARAMETERS)
    with pytest.raises(Refused, match=f"device '{device}'"):
        plan([path], [("device", device)])


@pytest.mark.compiles
def test_a_run_writes_every_executed_notebook_with_its_parameters(write_notebook, tmp_path) -> None:
    first = write_notebook("01", "print(seed + 1)", parameters="seed = 0")
    second = write_notebook("02", "print('two')")
    out = tmp_path / "out"
    done = nb.run(plan([first, second], [("seed", "41")]), out)
    assert [ran.failure for ran in done] == [None, None]
    assert [ran.written for ran in done] == [out / "01.ipynb", out / "02.ipynb"]
    assert printed(out / "01.ipynb") == "42\n"
    assert printed(first) == ""
    assert sorted(path.name for path in out.iterdir()) == ["01.ipynb", "02.ipynb"]


@pytest.mark.compiles
def test_the_kernel_is_this_interpreter_and_works_in_the_notebooks_folder(
    write_notebook, tmp_path, monkeypatch
) -> None:
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["no-such-python"], "display_name": "wrong", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    path = write_notebook("01", "import os, sys\nprint(sys.executable, os.getcwd())")
    nb.run(plan([path], []), tmp_path / "out")
    assert printed(tmp_path / "out" / "01.ipynb") == f"{sys.executable} {path.parent}\n"


@pytest.mark.compiles
def test_a_failure_names_the_cell_and_ends_the_run(write_notebook, tmp_path) -> None:
    parameters = "seed = 0"
    bad = write_notebook("01", "x = 1", "# divide\nx / seed", "y = 2", parameters=parameters)
    jobs = plan([bad, write_notebook("02")], [("seed", "0")])
    done = nb.run(jobs, tmp_path / "out")
    assert [ran.failure for ran in done] == [
        "01: cell 4 of 5 (`# divide`): ZeroDivisionError: division by zero"
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["01.ipynb"]


@pytest.mark.compiles
def test_keep_going_runs_the_rest_after_a_failure(write_notebook, tmp_path) -> None:
    jobs = plan([write_notebook("01", "1 / 0"), write_notebook("02")], [])
    done = nb.run(jobs, tmp_path / "out", keep_going=True)
    assert [bool(ran.failure) for ran in done] == [True, False]


@pytest.mark.compiles
def test_a_kernel_that_dies_is_a_failure_of_its_cell(write_notebook, tmp_path) -> None:
    path = write_notebook("01", "x = 1", "import os; os.kill(os.getpid(), 9)", "y = 2")
    (ran,) = nb.run(plan([path], []), tmp_path / "out")
    assert ran.failure is not None
    assert "cell 3 of 4 (`import os; os.kill(os.getpid(), 9)`): DeadKernelError" in ran.failure


def test_the_stored_notebooks_are_never_the_output_folder(write_notebook, notebooks) -> None:
    path = write_notebook("01", "print(1)")
    before = path.read_text()
    with pytest.raises(Refused, match="name another folder"):
        nb.run(plan([path], []), notebooks)
    assert path.read_text() == before


@pytest.mark.compiles
def test_storing_fills_in_outputs_that_do_not_depend_on_the_machine(
    write_notebook, notebooks
) -> None:
    source = "import sys, os, tempfile\nprint(sys.prefix, os.getcwd(), tempfile.gettempdir())\n"
    path = write_notebook("01", f"{source}print(hex(id(10**40)), object())")
    (ran,) = nb.store([path])
    assert ran.failure is None
    text = path.read_text()
    for volatile in (sys.prefix, str(Path.home()), "papermill", "iopub", sys.version.split()[0]):
        assert volatile not in text, volatile
    assert "<env>" in printed(path)
    assert "object object at 0x..." in printed(path)
    assert [file.name for file in notebooks.iterdir()] == ["01.ipynb"]
    nb.store([path])
    assert path.read_text() == text


@pytest.mark.compiles
def test_a_notebook_that_fails_is_not_stored(write_notebook) -> None:
    path = write_notebook("01", "1 / 0")
    before = path.read_text()
    (ran,) = nb.store([path])
    assert "ZeroDivisionError" in (ran.failure or "")
    assert path.read_text() == before


@pytest.mark.compiles
def test_two_at_a_time_each_has_its_own_parameters_and_all_go_on_after_a_failure(
    write_notebook, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [
        write_notebook("01_a", "import time; time.sleep(1); print(seed)", parameters="seed = 1"),
        write_notebook("02_b", "raise ValueError('broken')", parameters="seed = 2"),
        write_notebook("03_c", "print(seed)", parameters="seed = 3"),
    ]
    done = nb.run(plan(paths, []), Path("all"), keep_going=True, workers=2)
    assert [ran.notebook for ran in done] == paths
    assert [bool(ran.failure) for ran in done] == [False, True, False]
    printed = nbformat.read(tmp_path / "all" / "01_a.ipynb", as_version=4).cells[-1].outputs
    assert printed[0].text == "1\n"


def test_two_at_a_time_a_failure_stops_what_has_not_begun(
    write_notebook, tmp_path, monkeypatch
) -> None:
    names = ("01_a", "02_b", "03_c", "04_d")
    jobs = plan([write_notebook(name, "print(seed)", parameters="seed = 1") for name in names], [])
    failed = threading.Event()

    def executed(processes, execute, job, written, title) -> nb.Ran:
        if job is jobs[1]:
            failed.set()
            return nb.Ran(job.notebook, written, 0.0, "ValueError: broken")
        assert failed.wait(60)
        time.sleep(0.5)  # until the other thread has taken note
        return nb.Ran(job.notebook, written, 0.0, None)

    monkeypatch.setattr(nb, "_in_process", executed)
    ended = nb.run(jobs, tmp_path / "some", workers=2)
    assert [ran.notebook.stem for ran in ended] == ["01_a", "02_b"]
