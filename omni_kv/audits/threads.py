"""A run as the caller's machine would do it: several threads, vector code, ordinary memory.

The other runs use one thread and scalar loops, which compile in a fraction of the time and read the
same addresses. What they cannot show is a race: a loop that writes into memory which other turns of
it still read is right in one order and wrong in another.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config

from omni_kv.audits.report import Result, Run
from omni_kv.lens import pytorch
from omni_kv.sandbox.relocate import ORDINARY

#: Calls on equal inputs, as a race is not seen in each, and after how many seconds it is enough.
CALLS, SECONDS = 20, 4.0
ONE_CORE = "several threads were not looked at: this machine has one core"


@dataclass(frozen=True)
class Machine:
    """How many threads the caller's code runs with, and whether in vector code."""

    threads: int
    vector: bool

    def __str__(self) -> str:
        text = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return text + (" and vector code" if self.vector else "")

    @contextlib.contextmanager
    def compiling(self) -> Iterator[list[str]]:
        """Have Inductor generate code for this machine; no instruction set is probed.

        Torch has its number of threads, too: Dynamo compiles anew for another one.

        Yields:
            The code that is generated meanwhile.
        """
        # Inductor keeps the list of instruction sets that the first compilation made.
        forget = getattr(pytorch.VECTOR_SETS.get(), "cache_clear", lambda: None)
        forget()
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            changes = {"cpp.threads": self.threads, "cpp.vec_isa_ok": self.vector}
            with inductor_config.patch(changes), _code_kept() as codes:
                yield codes
        finally:
            torch.set_num_threads(before)
            forget()


@contextlib.contextmanager
def _code_kept() -> Iterator[list[str]]:
    """Keep the code that Inductor generates."""
    codes: list[str] = []
    if not pytorch.SAVE_CODE.present:
        yield codes
        return
    name, _, attribute = pytorch.SAVE_CODE.name.partition(".")
    owner: Any = getattr(importlib.import_module(pytorch.SAVE_CODE.module), name)
    before, hook = inspect.getattr_static(owner, attribute), getattr(owner, attribute)

    def keep(code: str) -> None:
        codes.append(code)
        if hook is not None:
            hook(code)

    setattr(owner, attribute, staticmethod(keep))
    try:
        yield codes
    finally:
        setattr(owner, attribute, before)


def shared_out(codes: list[str]) -> bool:
    """Whether generated code shares a loop out among threads; True if it could not be read."""
    return not codes or any("#pragma omp for" in code for code in codes)


def callers_machine(threads: int | None = None) -> Machine:
    """The machine as this process uses it.

    Args:
        threads: instead of the number that Inductor would take: its own setting's, or torch's.
    """
    vector = inductor_config.cpp.vec_isa_ok is not False
    own: int = inductor_config.cpp.threads
    return Machine(threads or (own if own > 0 else torch.get_num_threads()), vector)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def own_threads() -> int:
    """Threads of this process; the monitor of progress bars, which only sleeps, does not count."""
    monitors = sum(type(thread).__name__ == "TMonitor" for thread in threading.enumerate())
    return len(os.listdir("/proc/self/task")) - monitors


def repeated(machine: Machine, call: Callable[[], Run], most: int = CALLS) -> Run:
    """Call on equal inputs until enough is seen, and say in how many of the calls it was wrong.

    Args:
        machine: what the calls run on.
        call: one call, each from the same state.
        most: how often to call; what no threads share is the same in each call.
    """
    runs: list[Run] = []
    start = time.monotonic()
    while len(runs) < most and (len(runs) < 2 or time.monotonic() - start < SECONDS):
        runs.append(call())
    memory = f"{ORDINARY}, {machine}"
    order: tuple[Result, ...] = ("crashed", "differs", "killed", "raised")
    worst: Result = next((r for r in order if any(run.result == r for run in runs)), "same")
    bad = [run for run in runs if run.result == worst]
    if worst == "same":
        return Run(memory=memory, result="same")
    how = f"in {len(bad)} of {len(runs)} calls with {machine}"
    how += f": {bad[0].how}" if bad[0].how else ""
    return Run(memory=memory, result=worst, how=how, differences=bad[0].differences)
