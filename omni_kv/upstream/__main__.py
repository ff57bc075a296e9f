"""The command: run a script with a fix put in, or print the fix as a patch."""

from __future__ import annotations

import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from omni_kv.upstream.fixes import FIXES
from omni_kv.upstream.install import diff, installed

USAGE = "usage: python -m omni_kv.upstream FIX SCRIPT [ARGUMENTS] | --diff FIX"


def main(arguments: list[str]) -> int:
    """Run a script with a fix put in, or print the fix as a patch.

    Args:
        arguments: ``FIX SCRIPT [ARGUMENTS]`` or ``--diff FIX``.

    Returns:
        0, or 2 where the fix or the script is not to be had. A script that exits ends the process.
    """
    show = arguments[:1] == ["--diff"]
    name, *rest = arguments[show:] or [""]
    if name not in FIXES or show == bool(rest):
        print(f"{USAGE}; fixes: {', '.join(FIXES)}", file=sys.stderr)
        return 2
    if rest and not Path(rest[0]).is_file():
        print(f"no script {rest[0]}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        try:
            if show:
                print(diff(name), end="")
                return 0
            stack.enter_context(installed(name))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
