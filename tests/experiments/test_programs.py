"""Whole programs as evidence: what a notebook's runs came to, and which reproductions run where."""

from __future__ import annotations

import nbformat
import pytest

from omni_kv.evidence.programs import NotebookRun, notebook_table
from omni_kv.experiments import reproductions
from omni_kv.experiments.gpu.plan import Plan
from omni_kv.experiments.gpu.programs import notebook_run, notebook_units, reproduction_units
from omni_kv.model.geometry import preset
from omni_kv.publish.notebooks import NOTEBOOKS_VARIABLE


def plan(device: str) -> Plan:
    return Plan(preset("tiny"), device, ("sdpa",))


@pytest.mark.compiles
def test_a_run_holds_what_the_notebook_came_to_or_why_it_did_not(tmp_path, monkeypatch):
    lines = [
        "from omni_kv.evidence.verdicts import verdict",
        'verdict("90.device", {"device": device, "rows": 3}, device=device)',
        'assert device == "meta", "only there"',
    ]
    cells = [nbformat.v4.new_code_cell('device = "cpu"', metadata={"tags": ["parameters"]})]
    cells += [nbformat.v4.new_code_cell(line) for line in lines]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "90_small.ipynb")
    monkeypatch.setenv(NOTEBOOKS_VARIABLE, str(tmp_path))
    run = notebook_run("90", 4, "cpu")
    assert run.outcomes == {"90.device": {"device": "cpu", "rows": 3}}
    assert (run.name, run.repeat) == ("90, 4", 4)
    assert "only there" in str(run.failure) and "cell 4 of 4" in str(run.failure)
    cells.pop()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "90_small.ipynb")
    assert notebook_run("90", 5, "cpu").failure is None


def test_every_notebook_of_the_series_takes_a_device():
    from omni_kv.publish.notebooks import select
    from omni_kv.publish.parameters import parameters_of

    units = [unit.name for unit in notebook_units(plan("cuda"))]
    numbers = {name.partition(",")[0] for name in units}
    assert len(units) == len(set(units)) == 20 * len(numbers)
    for notebook in select(sorted(numbers)):
        assert "device" in parameters_of(notebook)


def test_the_table_names_what_differs_between_runs():
    def run(notebook: str, repeat: int, outcomes: dict, failure: str | None = None) -> NotebookRun:
        return NotebookRun(
            name=f"{notebook}, {repeat}", notebook=notebook, repeat=repeat, outcomes=outcomes,
            failure=failure, seconds=1.0,
        )  # fmt: skip

    same = {"03.a": {"rows": 1}, "03.b": {"rows": 2}}
    runs = [run("03", 0, same), run("03", 1, same | {"03.b": {"rows": 3}}), run("04", 0, {}, "no")]
    table = notebook_table(runs)
    assert list(table["runs"]) == [2, 1]
    assert list(table["of these, failed"]) == [0, 1]
    assert list(table["that differ between runs"]) == ["03.b", "none"]


def test_reproductions_run_on_the_device_that_they_take():
    names = [unit.name for unit in reproduction_units(plan("cuda"))]
    assert len(names) == len(set(names))
    for number in reproductions.numbers():
        own = [name for name in names if name.startswith(number)]
        where = "cuda" if reproductions.takes_device(number) else "cpu"
        assert own and all(name.split(", ")[1] == where for name in own)
    assert not any("cuda" in unit.name for unit in reproduction_units(plan("cpu")))
    assert {reproductions.takes_device(number) for number in ("01", "04")} == {True, False}
