"""Exercises that check themselves: the answer is tried out or measured, not compared with a key.

    from omni_kv.publish.exercises import checking as exercises

    def mine(x, y): ...

    exercises.check("00.two-copies", mine)

Without an answer the task is printed. Each wrong answer prints what was measured and one more hint;
after the last hint comes a pointer to the worked answer, which is folded away below the cell.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from omni_kv.publish.exercises.measures import ALL

_tries: Counter[str] = Counter()


def check(name: str, answer: Any = ...) -> None:
    """Try an answer, and print what was found.

    Args:
        name: of the exercise, starting with the notebook's number: ``"00.two-copies"``.
        answer: a value or a function, as the task says; ``...`` prints the task.

    Raises:
        KeyError: if there is no such exercise; the message names those that there are.
    """
    if name not in ALL:
        raise KeyError(f"no exercise {name!r}; there are: {', '.join(ALL)}")
    exercise = ALL[name]
    if answer is ...:
        print(f"Your turn: {exercise.task}")
        print("Put your answer in place of the dots, and run the cell again.")
        return
    try:
        right, found = exercise.measure(answer)
    except Exception as error:
        right, found = False, f"that raised {type(error).__name__}: {_first_line(error)}"
    if right:
        print(f"Right: {found}.")
        return
    _tries[name] += 1
    print(f"Not yet: {found}.")
    if _tries[name] <= len(exercise.hints):
        number = _tries[name]
        print(f"Hint {number} of {len(exercise.hints)}: {exercise.hints[number - 1]}")
    else:
        print("Those were all the hints. The worked answer is below the cell.")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message").rstrip(".")
