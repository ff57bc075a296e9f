"""Run the cells of the installed torch with an executor, and keep what is done as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_kv.evidence.records import provenance
from omni_kv.evidence.verdicts import torch_release
from omni_kv.experiments.atlas.cells import LAYOUTS, Cell, CellResult, all_cells, cell_of
from omni_kv.experiments.atlas.records import AtlasError, AtlasRecord, read, record_path, write
from omni_kv.experiments.atlas.run import run_cells
from omni_kv.upstream.fixes import FIXES
from omni_kv.upstream.install import fixed_sources

#: Cells that share the import of torch; a part of one layout, so that work can be dealt out evenly.
_BATCH = 5


@dataclass(frozen=True)
class Job:
    """What to run and how: the options of the command, under their names."""

    layouts: tuple[str, ...] = ()
    out: Path = Path("data/atlas")
    device: str = "cpu"
    shard: str | None = None
    executor: str = "process"
    workers: int = 2
    fixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.executor != "process" and not self.executor.startswith("dask://"):
            raise ValueError(f"unknown executor {self.executor!r}: process or dask://HOST:PORT")
        self.chosen()

    def chosen(self) -> list[str]:
        """The layouts of this job.

        Raises:
            ValueError: if the shard is not I/N with 1 <= I <= N.
        """
        layouts = list(self.layouts or LAYOUTS)
        if self.shard is None:
            return layouts
        first, _, of = self.shard.partition("/")
        if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
            raise ValueError(f"a shard is I/N with 1 <= I <= N, not {self.shard!r}")
        return layouts[int(first) - 1 :: int(of)]


def run_here(job: Job, command: str) -> Path:
    """Run the job with the torch of this interpreter; the path of the record.

    What is done lies in a file of its own until the record is whole; a run that is started again
    with the same code goes on there.

    Raises:
        AtlasError: if a file in the way cannot be read, or this torch does not have the lines that
            a fix changes.
    """
    from tqdm import tqdm

    release = torch_release()
    fixes = fixes_here(job.fixes)
    named = ("all",) if "all" in job.fixes else fixes
    path = record_path(job.out, release, job.device, job.shard, named)
    cells = list(all_cells(job.chosen(), job.device, fixes))
    here = provenance(job.device, command)
    if path.exists() and read(path).recorded.revision == here.revision:
        known = read(path).by_key()
        if all(cell.key in known for cell in cells):
            return path
    part = path.with_suffix(".part.json")
    done: dict[str, CellResult] = {}
    if part.exists():
        before = read(part)
        if before.recorded.revision == here.revision:
            done = before.by_key()
    todo = [cell for cell in cells if cell.key not in done]
    size = _BATCH if job.device == "cpu" else 1
    batches = [todo[i : i + size] for i in range(0, len(todo), size)]
    run = _through_dask if job.executor.startswith("dask://") else _in_processes
    with tqdm(total=len(cells), initial=len(done), desc=f"torch {release}") as bar:
        for results in run(batches, job):
            done |= {result.cell: result for result in results}
            bar.update(len(results))
            write(_record(release, job, here, cells, done), part)
    write(_record(release, job, here, cells, done), path)
    part.unlink(missing_ok=True)
    return path


def fixes_here(names: Sequence[str]) -> tuple[str, ...]:
    """The candidate fixes that the installed torch gets; ``all`` stands for those that fit it.

    Raises:
        AtlasError: if a fix does not fit, or none does.
    """
    found = [name for name in FIXES if "all" in names and _fits(name)]
    if "all" in names and not found:
        raise AtlasError("this torch does not have the lines that any fix changes")
    try:
        for name in names:
            if name != "all":
                fixed_sources(name)
    except RuntimeError as error:
        raise AtlasError(str(error)) from error
    return tuple(name for name in FIXES if name in (*names, *found))


def _fits(name: str) -> bool:
    try:
        fixed_sources(name)
    except RuntimeError:
        return False
    return True


def run_live(keys: Sequence[str], workers: int = 2) -> list[CellResult]:
    """Run some cells with the torch of this interpreter, dealt out to child processes.

    Args:
        keys: their keys.
        workers: how many children.
    """
    return run_chosen([cell_of(key) for key in keys], workers)


def run_chosen(cells: Sequence[Cell], workers: int = 2) -> list[CellResult]:
    """Run cells, dealt out to child processes, and return results in order.

    Args:
        cells: what to run, all on one device.
        workers: how many children.
    """
    hands = [cells[first::workers] for first in range(workers) if cells[first::workers]]
    with ThreadPoolExecutor(workers) as pool:
        done = [iter(hand) for hand in pool.map(run_cells, hands)]
    return [next(done[number % workers]) for number in range(len(cells))]


def _record(
    release: str, job: Job, here: Any, cells: list[Cell], done: dict[str, CellResult]
) -> AtlasRecord:
    results = [done[cell.key] for cell in cells if cell.key in done]
    seconds = round(sum(result.seconds for result in results), 1)
    return AtlasRecord(
        release=release,
        kind=job.device,
        recorded=here,
        fixes=list(cells[0].fixes) or None,
        seconds=seconds,
        cells=results,
    )


def _in_processes(batches: list[list[Cell]], job: Job) -> Iterator[list[CellResult]]:
    pool = ThreadPoolExecutor(job.workers)
    try:
        for done in as_completed([pool.submit(run_cells, batch) for batch in batches]):
            yield done.result()
    finally:  # after an interrupt, too: what has not begun does not begin
        pool.shutdown(cancel_futures=True)


def _through_dask(batches: list[list[Cell]], job: Job) -> Iterator[list[CellResult]]:
    """The same tasks on a Dask cluster; a task whose worker died runs again elsewhere."""
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise AtlasError("dask:// needs dask.distributed: pip install distributed") from error
    submit: Callable[..., Any]
    with distributed.Client("tcp://" + job.executor.removeprefix("dask://")) as client:
        others = set(client.run(torch_release).values()) - {torch_release()}
        if others:
            raise AtlasError(f"the workers have torch {', '.join(sorted(others))}")
        submit = client.submit
        futures = [submit(run_cells, batch, pure=False, retries=2) for batch in batches]
        for future in distributed.as_completed(futures):
            yield future.result()
