"""The command ``omni-kv atlas``: run the cells of releases, and merge shards."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click


class _Refusal(click.ClickException):
    """One line on stderr; nothing was written."""

    exit_code = 2

    def __init__(self, error: Exception) -> None:
        super().__init__(" ".join(str(error).split()))


@click.group(invoke_without_command=True)
@click.option("--torch", "releases", multiple=True, metavar="V", help="A release; repeatable.")
@click.option("--here", is_flag=True, help="The torch of this interpreter; the same as no --torch.")
@click.option("--layout", "layouts", multiple=True, metavar="NAME", help="Repeatable.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("data/atlas"),
              show_default=True, help="Folder for the records.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--shard", metavar="I/N", help="Only every N-th layout, from the I-th on (1 to N).")
@click.option(
    "--executor", default="process", show_default=True, metavar="process|dask://HOST:PORT"
)
@click.option("--workers", type=click.IntRange(1), help="Children at a time: 2, or 8 with cuda.")
@click.option("--envs", type=click.Path(path_type=Path), default="~/.cache/omni-kv/atlas",
              show_default=True, help="Folder of the environments.")  # fmt: skip
@click.option("--fix", "fixes", multiple=True, metavar="NAME",
              help="With a candidate fix of omni_kv.upstream in place, in a record of its own; "
              "repeatable; all: every one that fits the torch.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Let environments that this command made stay together.")
@click.option("--remove", is_flag=True, help="Remove an environment that it made when it is done.")
@click.pass_context
def atlas(
    context: click.Context,
    releases: tuple[str, ...],
    here: bool,
    layouts: tuple[str, ...],
    out: Path,
    device: str,
    shard: str | None,
    executor: str,
    workers: int | None,
    envs: Path,
    fixes: tuple[str, ...],
    keep: bool,
    remove: bool,
) -> None:
    """Run every layout, called in every way, and write one record a torch release.

    Run again, it goes on at the cell where it stopped. Exit code 1: a release was skipped. 2:
    refused.
    """
    if context.invoked_subcommand is not None:
        return
    from omni_kv.experiments.atlas.cells import LAYOUTS
    from omni_kv.experiments.atlas.environments import run_releases
    from omni_kv.experiments.atlas.execute import Job, run_here
    from omni_kv.experiments.atlas.records import AtlasError
    from omni_kv.upstream.fixes import FIXES

    if here and releases:
        raise click.UsageError("--here and --torch exclude each other")
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown:
        raise click.UsageError(f"unknown layout {unknown[0]!r}; known: {', '.join(LAYOUTS)}")
    strange = [name for name in fixes if name not in (*FIXES, "all")]
    if strange:
        raise click.UsageError(f"unknown fix {strange[0]!r}; known: {', '.join(FIXES)}, all")
    typed = _typed(layouts, device, shard, fixes)
    workers = workers or (2 if device == "cpu" else 8)
    try:
        job = Job(layouts, out, device, shard, executor, workers, fixes)
        if not releases:
            given = os.environ.get("OMNI_KV_RECORD_COMMAND")
            path = run_here(job, given or shlex.join(["omni-kv", "atlas", *typed]))
            click.echo(path)
            return
        skipped = run_releases(releases, job, typed, envs.expanduser(), keep, remove)
    except (AtlasError, ValueError) as error:
        raise _Refusal(error) from error
    for release, why in skipped.items():
        click.echo(f"torch {release}: skipped: {why}", err=True)
    sys.exit(1 if skipped else 0)


@atlas.command()
@click.argument("shards", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The merged record.")
def merge(shards: tuple[Path, ...], out: Path) -> None:
    """Put the shards of one release together; two answers for one cell are refused."""
    from omni_kv.experiments.atlas import records

    try:
        records.write(records.merge([records.read(path) for path in shards]), out)
    except records.AtlasError as error:
        raise _Refusal(error) from error
    click.echo(out)


@atlas.command()
@click.argument("record", type=click.Path(path_type=Path))
@click.argument("fixed", required=False, type=click.Path(path_type=Path))
def compare(record: Path, fixed: Path | None) -> None:
    """Print the cells of RECORD that differ from the newest release that comes with the project.

    With FIXED, a record of the same release made with --fix: what became of each cell of RECORD.
    Exit code 1: a cell turned worse. 2: the records do not fit.
    """
    from omni_kv.experiments.atlas import effect, records

    try:
        if fixed is not None:
            plain, with_fixes = records.read(record), records.read(fixed)
            effects = effect.effects(plain, with_fixes)
            click.echo("\n".join(effect.lines(effects)))
            if len(plain.cells) > len(effects):
                click.echo(f"not run with the fixes: {len(plain.cells) - len(effects)} cells")
            sys.exit(1 if any(e.turned == "worse" for e in effects) else 0)
        new, known = records.read(record), records.records()
        if not known:
            raise records.AtlasError(f"nothing recorded in {records.atlas_dir()}")
    except records.AtlasError as error:
        raise _Refusal(error) from error
    for cell, (was, now) in records.differences(new.cells, known[-1]).items():
        click.echo(f"{cell}: {known[-1].release}: {was}; {new.release}: {now}")


def _typed(
    layouts: tuple[str, ...], device: str, shard: str | None, fixes: tuple[str, ...]
) -> list[str]:
    """The options that decide what is recorded, without paths."""
    words = [word for layout in layouts for word in ("--layout", layout)]
    words += ["--device", device] if device != "cpu" else []
    words += [word for fix in fixes for word in ("--fix", fix)]
    return words + (["--shard", shard] if shard else [])
