"""A run as the caller's machine would do it: several threads, vector code, ordinary memory.

The other runs use one thread and scalar loops, which compile in a fraction of the time and read the
same addresses. What they cannot show is a race: a loop that writes into memory which other turns of
it still read is right in one order and wrong in another.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    def compiling(self) -> Iterator[None]:
        """Have Inductor generate code for this machine; no instruction set is probed."""
        # Inductor keeps the list of instruction sets that the first compilation made.
        forget = getattr(pytorch.VECTOR_SETS.get(), "cache_clear", lambda: None)
        forget()
        try:
            changes = {"cpp.threads": self.threads, "cpp.vec_isa_ok": self.vector}
            with inductor_config.patch(changes):
                yield
        finally:
            forget()


def callers_machine(threads: int | None = None) -> Machine:
    """The machine as this process uses it.

    Args:
        threads: instead of torch's own number.
    """
    vector = inductor_config.cpp.vec_isa_ok is not False
    return Machine(threads or torch.get_num_threads(), vector)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def repeated(machine: Machine, call: Callable[[], Run]) -> Run:
    """Call on equal inputs until enough is seen, and say in how many of the calls it was wrong.

    Args:
        machine: what the calls run on.
        call: one call, each from the same state.
    """
    runs: list[Run] = []
    start = time.monotonic()
    while len(runs) < CALLS and (len(runs) < 2 or time.monotonic() - start < SECONDS):
        runs.append(call())
    memory = f"{ORDINARY}, {machine}"
    order: tuple[Result, ...] = ("crashed", "differs", "killed", "raised")
    worst: Result = next((r for r in order if any(run.result == r for run in runs)), "same")
    bad = [run for run in runs if run.result == worst]
    if worst == "same":
        return Run(memory=memory, result="same")
    how = f"{worst} in {len(bad)} of {len(runs)} calls with {machine}"
    how += f": {bad[0].how}" if bad[0].how else ""
    return Run(memory=memory, result=worst, how=how, differences=bad[0].differences)
