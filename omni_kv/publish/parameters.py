"""The notebooks' parameters: read from their cells, set from the command line, checked first."""

from __future__ import annotations

import ast
import contextlib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from pydantic import TypeAdapter, ValidationError


class Refused(ValueError):
    """What was asked for cannot be run; nothing has been written. The message is one line."""


@dataclass(frozen=True)
class Parameter:
    """One name that a notebook's `parameters` cell sets."""

    name: str
    annotation: str
    default: Any


@dataclass(frozen=True)
class Job:
    """One notebook and the parameters that it gets."""

    notebook: Path
    parameters: dict[str, Any]


def parameters_of(notebook: Path) -> dict[str, Parameter]:
    """The names that a notebook's `parameters` cell sets, with annotation and default.

    Read with `ast` because papermill's own inspection, a regular expression, misses annotations
    such as `int | None` and defaults that hold an equals sign.

    Raises:
        Refused: If the file is no notebook, or its `parameters` cell is no Python.
    """
    try:
        nb = nbformat.read(notebook, as_version=4)
        cells = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
        statements = ast.parse(cells[0].source).body if cells else []
    except SyntaxError as error:
        raise Refused(f"the parameters cell of {notebook.name} is not Python: {error}") from error
    except Exception as error:  # nbformat passes on whatever its readers raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Refused(f"{notebook} is not a readable notebook: {reason[0]}") from error
    found = {}
    for statement in statements:
        annotation = ""
        if isinstance(statement, ast.AnnAssign):
            target, annotation = statement.target, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]  # type: ignore[assignment]
        else:
            continue
        if isinstance(target, ast.Name) and statement.value is not None:
            default = _literal(statement.value)
            found[target.id] = Parameter(target.id, annotation.strip("'\""), default)
    return found


def _literal(value: ast.expr | str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return None


def plan(notebooks: Sequence[Path], given: Iterable[tuple[str, str]]) -> list[Job]:
    """Give each notebook those parameters that it has, as values of the type that it wants.

    Args:
        notebooks: The notebooks to run.
        given: Names and values as typed on the command line.

    Raises:
        Refused: If no notebook has a parameter of that name, or a value is of the wrong type, names
            no preset, or names a device that is not there.
    """
    known = {notebook: parameters_of(notebook) for notebook in notebooks}
    jobs = {notebook: Job(notebook, {}) for notebook in notebooks}
    for name, text in given:
        takers = [notebook for notebook in notebooks if name in known[notebook]]
        if not takers:
            names = sorted({parameter for has in known.values() for parameter in has})
            where = notebooks[0].stem if len(notebooks) == 1 else "any of these notebooks"
            raise Refused(
                f"no parameter {name!r} in {where}; known: {', '.join(names) or 'no parameters'}"
            )
        for notebook in takers:
            value = parse_value(known[notebook][name], text)
            if name == "preset":
                _check_preset(value)
            if name == "device":
                _check_device(value)
            jobs[notebook].parameters[name] = value
    return list(jobs.values())


def parse_value(parameter: Parameter, text: str) -> Any:
    """A value from the command line as the type that the notebook's parameter wants.

    The type is the annotation's, or else the default's; a parameter without either takes any
    Python literal, or text.

    Raises:
        Refused: If the text is no value of that type.
    """
    wanted = parameter.annotation or type(parameter.default).__name__
    adapter = TypeAdapter(_type(wanted))
    # `validate_strings` knows neither None nor lists, and takes 5 for text where int would do.
    literal = None if text.lower() == "none" else _literal(text)
    if isinstance(literal, str) or (literal is None and text.lower() != "none"):
        literal = text
    with contextlib.suppress(ValidationError):
        return adapter.validate_python(literal, strict=True)
    try:
        return adapter.validate_strings(text)
    except ValidationError as error:
        raise Refused(f"parameter {parameter.name!r} takes {wanted}, not {text!r}") from error


def _type(wanted: str) -> Any:
    """The type that an annotation names; any, where it names None alone or is not known here."""
    if wanted == "NoneType":
        return Any
    try:
        return eval(wanted, {**vars(typing), "typing": typing})
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


def _check_preset(value: Any) -> None:
    from omni_kv.model.geometry import PRESETS

    if value not in PRESETS:
        raise Refused(f"there is no preset {value!r}; there are: {', '.join(PRESETS)}")


def _check_device(value: Any) -> None:
    if value in (None, "cpu"):
        return
    import torch

    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise Refused(f"device {value!r} is not known to torch; try cpu or cuda") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise Refused(f"device {value!r} was asked for, but torch sees {count or 'no'} CUDA GPUs")
