"""Compiled against eager: deals the jobs out to child processes and gathers what they saw."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.child import run_in_fork, run_jobs
from omni_kv.audits.errors import OUT_OF_MEMORY, cause_line, first_line, out_of_memory, surroundings
from omni_kv.audits.jobs import OWN_MODULE, Job, Parcel, parcel_of
from omni_kv.audits.report import Comparison, Result
from omni_kv.audits.threads import own_threads
from omni_kv.sandbox.process import Fork, Outcome, run_all, run_isolated
from omni_kv.sandbox.relocate import DEVICES


def compare(jobs: Sequence[Job], workers: int = 2, timeout: float = 600.0) -> list[Comparison]:
    """Run every job compiled and eager on equal inputs, and say where they disagree.

    Jobs run in forks of this process where it has one thread, which saves them the imports, or in
    child processes that they are sent to. What cannot be sent is run by fork all the same.

    Args:
        jobs: what to run; they are dealt out to the processes in turn.
        workers: processes at a time.
        timeout: seconds for each process.

    Returns:
        One comparison a label, in the order of jobs and labels.
    """
    found: dict[int, list[Comparison]] = {}
    parcels: dict[int, Parcel] = {}
    to_fork: list[int] = []
    threads: dict[int, bool] = {}
    on_gpu: list[int] = []
    cuda = torch.cuda.is_initialized()
    for number, job in enumerate(jobs):
        leaves = pytree.tree_leaves((job.series, job.kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if devices - set(DEVICES):
            how = f"memory can be guarded on a CPU and on CUDA devices, not on {devices}"
            found[number] = job.untested("not run", how)
        elif not cuda and "cuda" not in devices and single_threaded():
            to_fork.append(number)
        else:
            try:
                parcels[number] = parcel_of(job)
            except Exception as error:
                if not cuda:
                    # The pool of threads does not come along into a fork, and is waited for there.
                    threads[number], job.machine = job.machine is not None, None
                    to_fork.append(number)
                    continue
                how = f"the call cannot be sent to a child process ({cause_line(error)}), and a "
                how += f"process that uses CUDA cannot be forked. {OWN_MODULE}"
                found[number] = job.untested("raised", how)
            else:
                on_gpu += [number] if "cuda" in devices else []
    # A GPU that a wrong read left broken is of no use to the next job: each has a child of its own.
    hands = _dealt(parcels.keys() - set(on_gpu), workers) + [[number] for number in on_gpu]
    calls = [_sent([parcels[n] for n in hand], timeout) for hand in hands]
    for hand, outcome in zip(hands, run_all(calls, workers), strict=True):
        found |= _filed(hand, jobs, outcome)
    hands = _dealt(to_fork, workers)
    with tempfile.TemporaryDirectory(prefix="omni-kv-", ignore_cleanup_errors=True) as folder:
        forks = [
            Fork(partial(run_in_fork, [jobs[n] for n in hand], Path(folder, str(hand[0]))))
            for hand in hands
        ]
        for hand, fork in zip(hands, forks, strict=True):
            found |= _filed(hand, jobs, fork.wait(timeout))
    for number, left_out in threads.items():
        if left_out:
            first = found[number][0]
            first.note = "; ".join(filter(None, [first.note, NO_THREADS]))
    return [comparison for number in sorted(found) for comparison in found[number]]


#: What is said of a callable that had to be run in a fork of a process with threads.
NO_THREADS = "several threads were not looked at: the callable cannot be sent to a child process"


def _dealt(numbers: Iterable[int], workers: int) -> list[list[int]]:
    every = sorted(numbers)
    return [hand for first in range(max(1, workers)) if (hand := every[first :: max(1, workers)])]


def _sent(parcels: list[Parcel], timeout: float) -> Callable[[], Outcome[list[list[Comparison]]]]:
    return partial(run_isolated, run_jobs, parcels, timeout=timeout)


def _filed(
    hand: list[int], jobs: Sequence[Job], outcome: Outcome[list[list[Comparison]]]
) -> dict[int, list[Comparison]]:
    if outcome.value is not None:
        return dict(zip(hand, outcome.value, strict=True))
    return {number: jobs[number].untested(*_why_no_outcome(outcome)) for number in hand}


def single_threaded() -> bool:
    """Whether this process has one thread, so that a fork of it is whole."""
    return own_threads() == 1


def _why_no_outcome(outcome: Outcome[Any]) -> tuple[Result, str]:
    if outcome.status == "timed out":
        return "timed out", "the child process ran out of time"
    if outcome.signal == "SIGKILL" or out_of_memory(outcome.error or ""):
        return "killed", f"{OUT_OF_MEMORY} (the child process, {outcome.describe()})"
    if outcome.status == "killed":
        return "raised", f"the child process was killed by {outcome.signal} while compiling"
    error = outcome.error or ""
    return "raised", surroundings(error) or first_line(error)
