"""The command line: run the notebooks, store them, record verdicts, build the report."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omni_kv import __version__
from omni_kv.audits.entry import audit
from omni_kv.experiments.atlas.command import atlas

if TYPE_CHECKING:
    from omni_kv.publish.notebooks import Ran

# Imports stand inside the commands: `--help` waits for nothing.


#: The modules that the audit does without, and the extra that brings each.
MISSING = {
    "ipykernel": "notebooks",
    "jupyter_client": "notebooks",
    "matplotlib": "notebooks",
    "nbclient": "notebooks",
    "nbconvert": "notebooks",
    "nbformat": "notebooks",
    "pandas": "notebooks",
    "papermill": "notebooks",
    "docutils": "docs",
    "jinja2": "docs",
    "sphinx": "docs",
}


class Refusal(click.ClickException):
    """One line on stderr; nothing was written."""

    exit_code = 2


@contextlib.contextmanager
def _one_line(*also: type[Exception]) -> Iterator[None]:
    """Turn what is wrong with a request, or not installed, into a refusal.

    Args:
        also: exceptions that mean it, besides this package's own value errors.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = MISSING.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise Refusal(f"{error.name} is missing: pip install 'omni-kv[{extra}]'") from error
    except Exception as error:
        ours = isinstance(error, ValueError) and type(error).__module__.startswith("omni_kv.")
        if not (ours or isinstance(error, also)):
            raise
        raise Refusal(" ".join(str(error).split())) from error


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set environment variables, for the notebooks' kernels too; those that are None stay."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _records_of(device: str | None) -> Iterator[None]:
    """Read GPU records of this device, if one is named, here and in the notebooks.

    Raises:
        EvidenceError: if there are no records of it.
    """
    from omni_kv.evidence.records import DEVICE_VARIABLE, chosen_device

    with _environment(**{DEVICE_VARIABLE: device}):
        chosen_device()
        yield


parameter_option = click.option(
    "-p",
    "--parameter",
    "parameters",
    nargs=2,
    multiple=True,
    metavar="NAME VALUE",
    help="Set a notebook parameter; repeatable. Each notebook gets those that it has.",
)
device_record_option = click.option(
    "--device-record",
    metavar="NAME",
    help="Folder of data/evidence that GPU records are read from; data/evidence/default names it.",
)
notebooks_argument = click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="omni-kv")
def main() -> None:
    """What torch.compile does with a paged KV pool: run the notebooks and read what they found.

    A NOTEBOOK is a number (02), a name (02_reproduce_the_crash) or a path; none is all of them.
    """


@main.command()
@notebooks_argument
@parameter_option
@click.option("--all-in-order", is_flag=True, help="Every notebook; the same as naming none.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build/notebooks"),
    show_default=True,
    help="Folder for the executed notebooks.",
)
@click.option("--keep-going", is_flag=True, help="Go on with the next notebook after one failed.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True,
              help="Notebooks at a time.")  # fmt: skip
@device_record_option
def run(
    notebooks: tuple[str, ...],
    parameters: tuple[tuple[str, str], ...],
    all_in_order: bool,
    out: Path,
    keep_going: bool,
    workers: int,
    device_record: str | None,
) -> None:
    """Execute notebooks with papermill, in order.

    Exit code 0: all ran. 1: one failed; the last lines say which cell. 2: what was asked for cannot
    be run; nothing was written.
    """
    with _one_line(), _records_of(device_record):
        from omni_kv.publish import notebooks as nb
        from omni_kv.publish.parameters import Refused, plan

        if all_in_order and notebooks:
            raise Refused("--all-in-order and named notebooks exclude each other")
        jobs = plan(nb.select(notebooks), parameters)
        ran = nb.run(jobs, out, keep_going=keep_going, workers=workers)
        _report(ran, of=len(jobs))


@main.command()
@notebooks_argument
def stored(notebooks: tuple[str, ...]) -> None:
    """Execute notebooks in place, so that their stored outputs are fresh.

    What differs from run to run or from machine to machine (timings, paths, addresses) is left out.
    """
    with _one_line():
        from omni_kv.publish import notebooks as nb
        from omni_kv.publish.parameters import plan

        chosen = nb.select(notebooks)
        plan(chosen, ())
        _report(nb.store(chosen), of=len(chosen))


@main.group()
def verdicts() -> None:
    """The outcomes recorded for each torch release."""


@verdicts.command()
@notebooks_argument
@parameter_option
@device_record_option
def record(
    notebooks: tuple[str, ...],
    parameters: tuple[tuple[str, str], ...],
    device_record: str | None,
) -> None:
    """Run notebooks and record their outcomes for the installed torch release.

    Outcomes that did not change keep their entry.
    """
    with _one_line(), _records_of(device_record), tempfile.TemporaryDirectory() as folder:
        from omni_kv.evidence import verdicts as v
        from omni_kv.evidence.paths import to_write
        from omni_kv.evidence.records import DATA_VARIABLE, command_line
        from omni_kv.publish import notebooks as nb
        from omni_kv.publish.parameters import plan

        jobs = plan(nb.select(notebooks), parameters)
        path = to_write(v.verdict_file(v.load(v.torch_release()).torch), DATA_VARIABLE)
        with _environment(**{v.COMMAND_VARIABLE: command_line(), v.RECORD_VARIABLE: "1"}):
            _report(nb.run(jobs, Path(folder)), of=len(jobs), show_path=False)
        click.echo(f"recorded in {path}")


@verdicts.command()
@click.argument("prefix", default="")
def show(prefix: str) -> None:
    """Print the recorded outcomes whose name starts with PREFIX, one column a torch release."""
    with _one_line():
        from omni_kv.evidence.verdicts import verdict_table

        table = verdict_table(prefix)
        click.echo(table.to_string() if len(table) else "nothing recorded")


@main.command()
@click.option(
    "--executed",
    type=click.Path(path_type=Path),
    default=Path("build/notebooks"),
    show_default=True,
    help="Folder with the executed notebooks.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build/report"),
    show_default=True,
    help="Folder for the report.",
)
@device_record_option
def report(executed: Path, out: Path, device_record: str | None) -> None:
    """Build the report from executed notebooks."""
    with _one_line(), _records_of(device_record):
        from omni_kv.publish.site.build import build_report

        index = build_report(executed, out)
        click.echo(f"The report is ready: open {index.resolve().as_uri()}")


@main.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for the pictures; data/figures by default.",
)
def figures(out: Path | None) -> None:
    """Draw the pictures that the documents show: from the records, and from the imports.

    Without --out, what `docs/` holds of the code is written again, too: the list of PyTorch's
    private names, and the schema of the audit's JSON.
    """
    with _one_line():
        from omni_kv.evidence.paths import project_dir, to_write
        from omni_kv.evidence.records import DATA_VARIABLE, data_dir
        from omni_kv.publish.figures.packages import write_names, write_packages, write_schema
        from omni_kv.publish.figures.site import write_pictures

        folder = to_write(out or data_dir() / "figures", DATA_VARIABLE)
        for path in (*write_pictures(folder), write_packages(folder)):
            click.echo(path)
        if out is None:
            docs = to_write(project_dir() / "docs", DATA_VARIABLE)
            click.echo(write_names(docs))
            click.echo(write_schema(docs))


@main.command("record")
@click.option("--preset", default="lingbot-480x768", show_default=True, help="Sizes to measure.")
@click.option("--device", default="cuda", show_default=True, help="cpu is for trying it out.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for the records; by default data/evidence/<device>-torch<version>.",
)
@click.option(
    "--only", "names", multiple=True, metavar="EXPERIMENT", help="One experiment; repeatable."
)
@click.option("--pairs", type=click.IntRange(1), default=10, show_default=True,
              help="Of compile-time: compilations of each kind.")  # fmt: skip
def record_evidence(
    preset: str, device: str, out: Path | None, names: tuple[str, ...], pairs: int
) -> None:
    """Run the GPU experiments and write one evidence record each.

    Run again, it goes on where it stopped; what is recorded already stays. Exit code 1: something
    is still missing. 2: refused, nothing was measured.
    """
    with _one_line(ValueError):
        from omni_kv.evidence.paths import to_write
        from omni_kv.evidence.records import DATA_VARIABLE, data_dir
        from omni_kv.experiments.gpu.record import record_command

        to_write(out or data_dir(), DATA_VARIABLE)
        missing = record_command(preset, device, out, names, click.echo, pairs)
    if missing:
        click.echo(f"not complete: {', '.join(missing)}", err=True)
        raise SystemExit(1)


@main.command("bench")
@click.option("--preset", default="lingbot-480x768", show_default=True, help="Sizes to measure.")
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    help="Attention backend; repeatable. By default the fastest that can be had.",
)
@click.option("--samples", type=click.IntRange(1), default=10, show_default=True)
def bench_pieces(preset: str, device: str, backends: tuple[str, ...], samples: int) -> None:
    """Time the op and one layer against the floor measured in the same run."""
    with _one_line(ValueError):
        from omni_kv.experiments.gpu.bench import bench_command

        click.echo(bench_command(preset, device, backends, samples))


main.add_command(atlas)
main.add_command(audit)


def _report(done: list[Ran], *, of: int, show_path: bool = True) -> None:
    """Say how each notebook went; exit with 1 if one failed."""
    for ran in done:
        where = f" -> {ran.written}" if show_path and ran.written else ""
        state = "failed" if ran.failure else "ran"
        click.echo(f"{ran.notebook.stem}: {state} in {ran.seconds:.1f} s{where}")
    failures = [ran.failure for ran in done if ran.failure]
    for failure in failures:
        click.echo(f"FAILED {failure}", err=True)
    if len(done) < of:
        click.echo(f"{of - len(done)} not run", err=True)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
