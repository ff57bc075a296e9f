"""The exercises: right answers pass, wrong ones get what was measured and one more hint."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import torch

from omni_kv.publish.exercises import checking as exercises
from omni_kv.publish.exercises.measures import ALL

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CHECK = re.compile(r"exercises\.check\(\s*[\"']([^\"']+)[\"']")
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    exercises._tries.clear()


def asked(path: Path) -> list[tuple[str, str]]:
    """(exercise, worked answer) of a notebook: the answer is the fold below the check."""
    cells = nbformat.read(path, as_version=4).cells
    found = []
    for number, cell in enumerate(cells):
        for name in CHECK.findall(cell.source) if cell.cell_type == "code" else ():
            below = cells[number + 1].source if number + 1 < len(cells) else ""
            found.append((name, below))
    return found


WORKED = [(path.stem, name, text) for path in NOTEBOOKS for name, text in asked(path)]


@pytest.mark.parametrize(("stem", "name", "text"), WORKED, ids=[name for _, name, _ in WORKED])
@pytest.mark.compiles
def test_each_worked_answer_passes_its_own_check(
    stem: str, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in ALL, f"{stem} asks for {name}, which there is not"
    assert "Worked answer" in text and ":collapsible:" in text, f"{name}: no folded answer below it"
    (code,) = FENCE.findall(text)
    scope = {"torch": torch, "exercises": exercises}
    exec(compile(code, name, "exec"), scope)
    assert capsys.readouterr().out.startswith("Right: "), name


def test_every_exercise_is_asked_by_the_notebook_of_its_number() -> None:
    there = {name: stem for stem, name, _ in WORKED}
    assert set(there) == set(ALL)
    assert all(stem.startswith(name.split(".")[0]) for name, stem in there.items())


def test_without_an_answer_the_task_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    exercises.check("01.page-of-both")
    told = capsys.readouterr().out
    assert told.startswith("Your turn: which is the largest page") and "Hint" not in told


def test_wrong_answers_get_one_hint_more_each_and_then_the_worked_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in (1, 2, 3):
        exercises.check("01.page-of-both", 3)
        assert f"Hint {number} of 3" in capsys.readouterr().out
    exercises.check("01.page-of-both", 16)
    told = capsys.readouterr().out
    assert "worked answer" in told and "Hint" not in told
    assert "97.5" in told


def test_an_answer_that_raises_is_a_wrong_answer(capsys: pytest.CaptureFixture[str]) -> None:
    exercises.check("01.overwritten", 5)
    assert "that raised TypeError" in capsys.readouterr().out


def test_an_unknown_exercise_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no exercise 'x'; there are: 00\.two-copies"):
        exercises.check("x")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("01.page-of-both", 4), ("01.overwritten", [9, 10, 11]), ("00.clone-elements", 6_400)],
)
def test_plausible_but_wrong_answers_do_not_pass(
    name: str, answer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    exercises.check(name, answer)
    assert capsys.readouterr().out.startswith("Not yet: ")


def test_halves_of_one_allocation_do_not_pass_as_pools_without_a_clone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exercises.check("02.no-clone", lambda *size: tuple(torch.zeros(2, *size)))
    assert "value_pool is cloned, 8,192 elements" in capsys.readouterr().out
