"""What ``omni-kv audit`` does: find a case by its name, audit it, and say how it ended."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from omni_kv.audits.audit import MIN_BYTES, Call, audit_all
from omni_kv.audits.modes import BadMode, Modes
from omni_kv.audits.report import AuditReport
from omni_kv.lens.capture import original

EXIT_CODES = {"clean": 0, "findings": 1, "could not run": 2}


class NoCase(Exception):
    """What was named is no case; the message is one plain sentence."""


def load_case(target: str) -> Call:
    """Import ``package.module:make_case`` and call it.

    It returns the callable and its arguments, ``(callable, (arg, ...))``, with a dict of keyword
    arguments behind them if need be; or a ``Call``.

    Raises:
        NoCase: if there is no such function, it raises, or it returns something else.
    """
    case = _made(target)
    if isinstance(case, Call):
        return case
    if (
        not isinstance(case, tuple)
        or len(case) not in (2, 3)
        or not callable(case[0])
        or not isinstance(case[1], Sequence)
    ):
        raise NoCase(f"{target} returned no (callable, arguments)")
    return Call(*case)


def _made(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise NoCase(f"name the case as package.module:function, not {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise NoCase(f"there is no module {error.name!r}") from error
    except AttributeError as error:
        raise NoCase(f"module {module_name!r} has no {name!r}") from error
    except Exception as error:
        raise NoCase(f"{module_name} cannot be imported: {error}") from error
    try:
        return make()
    except Exception as error:
        if not torch.cuda.is_available() and "NVIDIA driver" in str(error):
            raise NoCase(f"{target} needs a GPU, and there is none here") from error
        raise NoCase(f"{target} raised {type(error).__name__}: {error}") from error


def audit_case(
    target: str,
    second: str | None,
    run: bool,
    modes: Modes,
    min_bytes: int,
    say: Callable[[str], None],
) -> AuditReport:
    """Audit the case that ``target`` makes; ``second`` makes the one whose arguments come next.

    Args:
        target: as in ``load_case``.
        second: as in ``load_case``.
        run: as in ``audit``.
        modes: how the caller compiles and runs.
        min_bytes: as in ``audit``.
        say: is told what is about to be done.

    Raises:
        NoCase: if either is no case.
    """
    with _one_thread() as threads, modes.entered():
        modes = replace(modes, threads=modes.threads or threads)
        call = load_case(target)
        if second is not None:
            other = load_case(second)
            call.second, call.second_kwargs = other.args, other.kwargs
        call.make = partial(_make, target, second)
        report = audit_all([call], run=run, modes=modes, min_bytes=min_bytes, say=say)[0]
        report.place = _beginning(call.fn)
        return report


def _beginning(fn: Any) -> str | None:
    """Where a callable begins, as ``file:line``; None if it has no code of its own."""
    fn = original(fn)
    code = getattr(inspect.unwrap(getattr(fn, "forward", fn)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Keep torch from starting threads, so that this process can be forked; yields their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def modes_named(
    dynamic: str, mode: str | None, backend: str | None, grad: bool, inference: bool, threads: str
) -> Modes:
    """The modes that the options of the command line name.

    Raises:
        BadMode: if there is no such mode.
    """
    choices: dict[str, bool | Literal["both"]] = {"both": "both", "true": True, "false": False}
    if dynamic not in choices:
        raise BadMode(f"--dynamic is both, true or false, not {dynamic!r}")
    if threads and not threads.isdecimal():
        raise BadMode(f"--threads is a number of at least 1, not {threads!r}")
    number = int(threads) if threads else None
    return Modes(choices[dynamic], mode, backend, grad, inference, number)


def _make(
    target: str, second: str | None
) -> tuple[Any, list[tuple[Any, ...]], dict[str, Any], Any]:
    """Callable and arguments made anew, in a child process: nothing of them need be sent."""
    call = load_case(target)
    series, last = [tuple(call.args)], None
    if second is not None:
        other = load_case(second)
        series.append(tuple(other.args))
        last = other.kwargs
    return call.fn, series, call.kwargs, last


def bytes_named(text: str) -> int:
    """The number that ``--min-bytes`` names.

    Raises:
        BadMode: if it is none.
    """
    if text and not text.isdecimal():
        raise BadMode(f"--min-bytes is a number of bytes, not {text!r}")
    return int(text) if text else MIN_BYTES
