"""Compiled against eager: deals the jobs out to child processes and gathers what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.child import OUT_OF_MEMORY, first_line, out_of_memory, run_jobs
from omni_kv.audits.jobs import OWN_MODULE, Job, Parcel, parcel_of
from omni_kv.audits.report import Comparison, Result
from omni_kv.sandbox.process import Outcome, run_all, run_isolated


def compare(jobs: Sequence[Job], workers: int = 2, timeout: float = 600.0) -> list[Comparison]:
    """Run every job compiled and eager on equal inputs, and say where they disagree.

    Args:
        jobs: what to run; they are dealt out to the child processes in turn.
        workers: child processes.
        timeout: seconds for each child.

    Returns:
        One comparison a label, in the order of jobs and labels.
    """
    found: dict[int, list[Comparison]] = {}
    parcels: dict[int, Parcel] = {}
    hands: list[list[int]] = [[] for _ in range(max(1, min(workers, len(jobs))))]
    for number, job in enumerate(jobs):
        tensors = [t for t in pytree.tree_leaves(job.series) if isinstance(t, torch.Tensor)]
        if any(t.device.type != "cpu" for t in tensors):
            how = "guarded memory is CPU memory, and the arguments are not on the CPU"
            found[number] = job.untested("not run", how)
            continue
        try:
            parcels[number] = parcel_of(job)
        except Exception as error:
            how = f"the call cannot be sent to a child process: {error}. {OWN_MODULE}"
            found[number] = job.untested("raised", how)
        else:
            hands[number % len(hands)].append(number)
    hands = [hand for hand in hands if hand]
    options: Any = {"timeout": timeout, "env": _CHILD_ENV}
    calls = [
        partial(run_isolated, run_jobs, [parcels[n] for n in hand], **options) for hand in hands
    ]
    for hand, outcome in zip(hands, run_all(calls, workers), strict=True):
        for place, number in enumerate(hand):
            if outcome.value is not None:
                found[number] = outcome.value[place]
            else:
                found[number] = jobs[number].untested(*_why_no_outcome(outcome))
    return [comparison for number in sorted(found) for comparison in found[number]]


#: One thread, since a process with an OpenMP pool must not fork.
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _why_no_outcome(outcome: Outcome[Any]) -> tuple[Result, str]:
    if outcome.status == "timed out":
        return "timed out", "the child process ran out of time"
    if outcome.signal == "SIGKILL" or out_of_memory(outcome.error or ""):
        return "killed", f"{OUT_OF_MEMORY} (the child process, {outcome.describe()})"
    if outcome.status == "killed":
        return "raised", f"the child process was killed by {outcome.signal} while compiling"
    return "raised", first_line(outcome.error or "")
