"""Comparing on a GPU: without forks, and from the same values each time."""

from __future__ import annotations

import pytest
import torch
import trust_cases as cases

from omni_kv.audits import child
from omni_kv.audits.audit import audit
from omni_kv.audits.jobs import Parcel, jobs_for, parcel_of
from omni_kv.audits.modes import Modes
from omni_kv.audits.report import Comparison
from omni_kv.sandbox import cuda
from omni_kv.sandbox.process import run_isolated

pytestmark = pytest.mark.compiles


def unmappable(*_: object) -> None:
    raise OSError("no such call in this driver")


def as_on_a_gpu(parcels: list[Parcel]) -> list[list[Comparison]]:
    """Compare as where a process cannot be forked, with a driver that cannot map memory."""
    child._Call.on_gpu = property(lambda _: True)  # type: ignore[method-assign, assignment]
    cuda.Block = unmappable  # type: ignore[misc, assignment]
    return child.run_jobs(parcels)


def add(pool: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    pool.add_(x)
    return pool * 2


def test_runs_without_forks_find_what_is_wrong_and_start_from_the_same_values() -> None:
    pool, x = torch.arange(8.0), torch.ones(8)
    calls = {"right": (add, (pool, x)), "wrong": (cases.in_a_dataclass, (x,))}
    jobs = {name: jobs_for(*call, modes=Modes(dynamic=False))[0] for name, call in calls.items()}
    outcome = run_isolated(as_on_a_gpu, [parcel_of(job) for job in jobs.values()])
    (right,), (wrong,) = outcome.unwrap()
    # A second run that began where the first ended would have added twice.
    assert right.result == "same" and right.changed == ["pool"]
    assert wrong.result == "differs"
    assert "compared in ordinary memory only: no such call in this driver" in right.note
    assert [run.memory for run in right.runs] == ["ordinary memory"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_halves_crash_on_a_gpu_and_two_tensors_do_not() -> None:
    from omni_kv.experiments.gpu.audited import CASES

    with torch.no_grad():
        halves = audit(*CASES["Triton kernel over halves"]())
        apart = audit(*CASES["Triton kernel over two tensors"]())
    assert halves.verdict == "findings"
    assert {c.result for c in halves.comparisons} == {"crashed"}
    assert apart.verdict == "clean"
