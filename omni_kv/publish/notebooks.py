"""Runs the notebooks headless, keeps what they print, and says which cell failed."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nbformat

from omni_kv.evidence.paths import project_dir, to_write
from omni_kv.evidence.records import PACKAGE_PARENT
from omni_kv.publish.parameters import Job, Refused

NOTEBOOKS_VARIABLE = "OMNI_KV_NOTEBOOKS"

# Cells that papermill puts into the executed notebook.
INSERTED = {"injected-parameters", "papermill-error-cell-tag"}


@dataclass(frozen=True)
class Ran:
    """How one notebook went. `failure` is None, or one line with the cell and the exception."""

    notebook: Path
    written: Path | None
    seconds: float
    failure: str | None


def notebooks_dir() -> Path:
    """The project's `notebooks` folder, or what `OMNI_KV_NOTEBOOKS` names."""
    return Path(os.environ.get(NOTEBOOKS_VARIABLE) or project_dir() / "notebooks")


def select(asked: Sequence[str]) -> list[Path]:
    """The notebooks that were asked for, in the order asked; none asked is all, in reading order.

    Args:
        asked: Numbers (`"02"`, `"2"`), stems or paths.

    Raises:
        Refused: If there is no such notebook, or two of them have one file name.
    """
    stored = sorted(notebooks_dir().glob("*.ipynb"))
    if not asked:
        if not stored:
            raise Refused(f"there are no notebooks in {notebooks_dir()}")
        return stored
    chosen = list(dict.fromkeys(_find(name, stored) for name in asked))
    if len({path.name for path in chosen}) < len(chosen):
        raise Refused("two of these notebooks have the same file name; run them one by one")
    return chosen


def _find(name: str, stored: Sequence[Path]) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    for path in stored:
        number = path.stem.split("_")[0]
        same_number = name.isdigit() and number.isdigit() and int(name) == int(number)
        if name in (path.stem, path.name) or same_number:
            return path
    known = ", ".join(path.stem for path in stored) or "none"
    raise Refused(f"there is no notebook {name!r}; there are: {known}")


def run(jobs: Sequence[Job], out: Path, *, keep_going: bool = False, workers: int = 1) -> list[Ran]:
    """Execute notebooks with papermill, in order, each written to `out` as soon as it has ended.

    A notebook that failed is written too, up to its failing cell and with the error in it. The
    kernel is this interpreter, whatever kernels are installed, and works in the notebook's folder.

    Args:
        jobs: What to run.
        out: Folder for the executed notebooks; made if need be.
        keep_going: Go on with the next notebook after one failed.
        workers: Notebooks at a time.

    Raises:
        Refused: If `out` cannot be written to, or is the folder of a notebook to run.
    """
    if any(job.notebook.parent.resolve() == out.resolve() for job in jobs):
        raise Refused(f"{out} holds the stored notebooks; name another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"cannot write to {out}: {error.strerror}") from error
    failed = False
    call: Callable[..., Ran]

    def execute(number: int, job: Job) -> Ran | None:
        nonlocal failed
        if failed and not keep_going:
            return None
        title = f"[{number}/{len(jobs)}] {job.notebook.stem}"
        ran = call(_execute, job, out / job.notebook.name, title)
        failed = failed or ran.failure is not None
        return ran

    if workers == 1:
        call = _call
        done = [execute(*numbered) for numbered in enumerate(jobs, 1)]
    else:  # papermill changes the working directory, which threads would share
        spawn = get_context("spawn")
        with (
            ProcessPoolExecutor(workers, mp_context=spawn) as processes,
            ThreadPoolExecutor(workers) as pool,
        ):
            call = partial(_in_process, processes)
            done = list(pool.map(execute, range(1, len(jobs) + 1), jobs))
    return [ran for ran in done if ran is not None]


def _call(execute: Callable[..., Ran], *arguments: Any) -> Ran:
    return execute(*arguments)


def _in_process(
    processes: ProcessPoolExecutor, execute: Callable[..., Ran], *arguments: Any
) -> Ran:
    return processes.submit(execute, *arguments).result()


def store(notebooks: Sequence[Path]) -> list[Ran]:
    """Execute notebooks with their defaults and put the outputs into them, free of this machine.

    A notebook that fails stays as it was, and ends the run.

    Raises:
        InstalledFiles: If one of them belongs to an installed package.
    """
    for notebook in notebooks:
        to_write(notebook, NOTEBOOKS_VARIABLE)
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for number, notebook in enumerate(notebooks, 1):
            title = f"[{number}/{len(notebooks)}] {notebook.stem}"
            executed = Path(folder, notebook.name)
            ran = _execute(Job(notebook, {}), executed, title)
            if ran.failure is None:
                nb = strip(nbformat.read(executed, as_version=4))
                new = notebook.with_name(f".{notebook.name}.new")
                nbformat.write(nb, new)
                new.replace(notebook)
            done.append(Ran(notebook, notebook, ran.seconds, ran.failure))
            if ran.failure:
                break
    return done


def strip(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take out of a notebook what differs from run to run and from machine to machine.

    Timings, versions and widgets go; paths of the checkout, the environment, the home and the
    temporary folder become `<checkout>`, `<env>`, `~` and `<tmp>`, memory addresses `0x...`.
    """
    nb.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in nb.cells:
        for volatile in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(volatile, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = [_plain(output) for output in cell.outputs if not _is_progress(output)]
    return nb


def _is_progress(output: Mapping[str, Any]) -> bool:
    widget = "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    bar = output.get("name") == "stderr" and "\r" in output.get("text", "")
    return widget or bar


def _plain(value: Any) -> Any:
    """The same output with every path of this machine replaced, in all its texts."""
    if isinstance(value, dict):
        pictures = {k: v for k, v in value.items() if k.startswith("image/") and k[6:9] != "svg"}
        return nbformat.from_dict({k: _plain(v) for k, v in value.items()} | pictures)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, str):
        return value
    known = {
        str(PACKAGE_PARENT): "<checkout>",
        sys.prefix: "<env>",
        sys.base_prefix: "<python>",
        str(Path.home()): "~",
        tempfile.gettempdir(): "<tmp>",
    }
    for path in sorted(known, key=len, reverse=True):  # an environment lies inside its checkout
        value = re.sub(rf"{re.escape(path)}(?![\w.-])", known[path], value)
    return re.sub(r"\b0x[0-9a-f]{9,}\b", "0x...", value)


def _execute(job: Job, target: Path, title: str) -> Ran:
    """Run one notebook into a hidden file beside `target`, then move it there."""
    import papermill

    unfinished = target.with_name(f".running-{target.name}")
    live = sys.stderr.isatty()
    bar = {"desc": title, "mininterval": 0.1 if live else 60.0, "dynamic_ncols": live}
    failure, start = None, time.perf_counter()
    try:
        papermill.execute_notebook(
            str(job.notebook),
            str(unfinished),
            parameters=job.parameters,
            kernel_name="python3",
            language="python",
            cwd=str(job.notebook.parent),
            progress_bar=bar,
            kernel_manager_class=_this_interpreter(),
        )
    except Exception as error:  # a dead kernel, a cell's error, a time-out: all end one notebook
        failure = f"{job.notebook.stem}: {_failing_cell(unfinished)}: {_last_line(error)}"
    finally:
        written = unfinished.exists() and sys.exc_info()[0] is None
        if written:
            unfinished.replace(target)
        unfinished.unlink(missing_ok=True)
    return Ran(job.notebook, target if written else None, time.perf_counter() - start, failure)


def _this_interpreter() -> type:
    """A kernel manager that starts this interpreter, whatever kernel specs are installed."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            quiet = ["--log-level=ERROR"]  # its warnings would tear the progress bar
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict(quiet))

    return ThisInterpreter


def _failing_cell(executed: Path) -> str:
    """Number (from 1, as stored) and first line of the cell at which a run ended."""
    if not executed.exists():
        return "before its first cell"
    cells = nbformat.read(executed, as_version=4).cells
    cells = [cell for cell in cells if not INSERTED & set(cell.metadata.get("tags", []))]
    states = [cell.metadata.get("papermill", {}) for cell in cells]
    begun = [i for i, state in enumerate(states) if state.get("start_time")]
    raised = [i for i, state in enumerate(states) if state.get("exception")]
    at = max(raised or begun, default=-1)
    if at < 0:
        return "before its first cell"
    first_line = next(iter(cells[at].source.strip().splitlines()), "")
    return f"cell {at + 1} of {len(cells)} (`{first_line}`)"


def _last_line(error: Exception) -> str:
    name = getattr(error, "ename", None) or type(error).__name__
    text = str(getattr(error, "evalue", error)).strip().splitlines()
    return f"{name}: {text[-1].strip()}" if text else name
