"""The same cells through Dask: a worker that dies costs nothing but its task."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from omni_kv.experiments.atlas import execute
from omni_kv.experiments.atlas.cells import CellResult, all_cells
from omni_kv.experiments.atlas.records import read

distributed = pytest.importorskip("distributed")
LAYOUTS = ("separate", "shared_k_first", "list")


def quick(cells):
    return [
        CellResult(cell=c.key, outcome="right", detail=c.call, needed_bytes=1, seconds=0)
        for c in cells
    ]


@pytest.mark.compiles
def test_a_worker_killed_in_the_middle_leaves_the_same_record(tmp_path, monkeypatch):
    killed = tmp_path / "killed"

    def kill_once(cells, killed: str = str(killed)):
        time.sleep(0.2)
        if cells[0].layout == "shared_k_first" and not os.path.exists(killed):
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [
            CellResult(cell=c.key, outcome="right", detail=c.call, needed_bytes=1, seconds=0)
            for c in cells
        ]

    monkeypatch.setattr(execute, "run_cells", quick)
    alone = read(execute.run_here(execute.Job(LAYOUTS, tmp_path / "a"), "omni-kv atlas"))
    monkeypatch.setattr(execute, "run_cells", kill_once)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        job = execute.Job(LAYOUTS, tmp_path / "b", executor=address)
        shared = read(execute.run_here(job, "omni-kv atlas"))
    assert killed.exists()
    assert shared == alone
    assert [r.cell for r in shared.cells] == [c.key for c in all_cells(LAYOUTS)]
