"""The command ``omni-kv audit``: its options, what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any

import click

# Imports stand inside the command: `--help` waits for nothing.


class _Refusal(click.ClickException):
    """One line on stderr; nothing was written."""

    exit_code = 2

    def __init__(self, told: str) -> None:
        super().__init__(" ".join(told.split()))


@click.command()
@click.argument("case", metavar="PACKAGE.MODULE:MAKE_CASE")
@click.option("--second", metavar="PACKAGE.MODULE:MAKE_CASE", help="Arguments of a second call.")
@click.option("-v", "--verbose", is_flag=True, help="Tell every op, argument and run, too.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif", "junit"]),
    default="text",
    show_default=True,
    help="What to print; docs/audit.md describes each.",
)
@click.option("--json", "form", flag_value="json", help="The same as --format json.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report in this format to a file, and print it as text.",
)
@click.option("--no-run", is_flag=True, help="Only compile: do not run compiled against eager.")
@click.option("--dynamic", default="both", metavar="both|true|false", help="Shapes to look at.")
@click.option("--mode", help="mode= of torch.compile, if not the one of the callable.")
@click.option("--backend", help="Backend, likewise; any but inductor is run, not looked into.")
@click.option("--grad", is_flag=True, help="Leave autograd on; it is off by default.")
@click.option("--inference-mode", "inference", is_flag=True, help="Do all in inference mode.")
@click.option("--threads", default="", metavar="N", help="Threads of the run that seeks races.")
@click.option("--min-bytes", default="", metavar="N", help="Copies of fewer bytes stay quiet.")
@click.pass_context
def audit(
    context: click.Context,
    case: str,
    second: str | None,
    verbose: bool,
    form: str,
    output: Path | None,
    no_run: bool,
    min_bytes: str,
    **options: Any,
) -> None:
    """Say what torch.compile does to the arguments that a callable mutates.

    MAKE_CASE is a function that returns the callable and its arguments.

    Exit code 0: clean. 1: findings. 2: it could not be audited.
    """
    # A process of one thread can be forked for the runs, which saves them their imports.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from omni_kv.audits import command
    from omni_kv.audits.command import BadMode, NoCase
    from omni_kv.audits.formats import FORMATS

    try:
        # What the module prints must not stand in front of the report.
        with contextlib.redirect_stdout(sys.stderr):
            say = functools.partial(click.echo, err=True)
            modes = command.modes_named(**options)
            least = command.bytes_named(min_bytes)
            report = command.audit_case(case, second, not no_run, modes, least, say)
        written = FORMATS[form](report)
        if output is not None:
            output.write_text(written + "\n", encoding="utf-8")
    except (BadMode, NoCase) as error:
        raise _Refusal(str(error)) from error
    except Exception as error:
        # A failure of the tool is no finding.
        if os.environ.get("OMNI_KV_DEBUG"):
            raise
        told = f"the audit itself failed: {type(error).__name__}: {error}"
        raise _Refusal(f"{told} (OMNI_KV_DEBUG=1 shows where)") from error
    as_text = form == "text" or output is not None
    click.echo(report.text(verbose=verbose) if as_text else written)
    context.exit(command.EXIT_CODES[report.verdict])
