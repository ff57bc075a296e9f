"""The reproductions of ``upstream/``, run in child processes, with and without candidate fixes."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from omni_kv.evidence.paths import project_dir
from omni_kv.evidence.verdicts import torch_release
from omni_kv.sandbox.process import run_isolated
from omni_kv.upstream import installed

PASS = "torch._inductor.fx_passes.reinplace"


@dataclass(frozen=True)
class Ran:
    """How a reproduction ended.

    Attributes:
        exit_code: 0 is right, 1 is wrong; negative or another number: it ended otherwise.
        printed: what it printed.
    """

    exit_code: int
    printed: str


@dataclass(frozen=True)
class Means:
    """What PyTorch's own means say while a reproduction runs.

    Attributes:
        log: lines of the reinplace pass under ``TORCH_LOGS``, without their prefix.
        missed: opportunities to reinplace that it counted as missed, in the last compilation.
        counters: ``torch._dynamo.utils.counters`` after it, those of Inductor.
        artifacts: parts of the trace that ``tlparse`` makes pages of: name, and its lines that hold
            the word "clone".
    """

    log: list[str]
    missed: int
    counters: dict[str, int]
    artifacts: dict[str, list[str]]


def numbers() -> list[str]:
    """The numbers of the reproductions, in order."""
    return [path.name[:2] for path in sorted(_upstream().glob("[0-9][0-9]-*/"))]


def folder(number: str) -> Path:
    """The folder of that number.

    Raises:
        ValueError: if there is none.
    """
    found = sorted(_upstream().glob(f"{number}-*/")) if re.fullmatch(r"\d\d", number) else []
    if not found:
        raise ValueError(f"no reproduction {number!r}; there are: {', '.join(numbers())}")
    return found[0]


def fix_of(number: str) -> str | None:
    """The name of the candidate fix that the reproduction is held to; None without."""
    fix: str | None = _expected(number).get("fix", {}).get("name")
    return fix


def recorded(number: str, *, fixed: bool, release: str = "") -> int | None:
    """The exit code that was recorded of a release, by default the installed one; None if none."""
    expected = _expected(number)
    table = expected.get("fix", {}).get("exit_code", {}) if fixed else expected["exit_code"]
    code: int | None = table.get(release or torch_release())
    return code


def lines_of(number: str, *names: str) -> str:
    """The source of what a reproduction defines under these names, in the order of the file.

    Raises:
        ValueError: if it does not define one of them at its top.
    """
    source = (folder(number) / "repro.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            defined = [node.name]
        elif isinstance(node, ast.Assign):
            defined = [ast.unparse(target) for target in node.targets]
        else:
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        text = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
        for name in set(defined) & set(names):
            found[name] = text
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{number}: nothing is defined as {missing[0]!r}")
    # Two lines between functions, none between assignments that follow one another.
    text = "\n\n\n".join(found.values())
    return re.sub(r"(?m)^(\S.* = .*)\n\n\n(?=\S.* = )", r"\1\n", text)


def takes_device(number: str) -> bool:
    """Whether the reproduction takes the device as its argument; else it runs on a CPU only."""
    return "sys.argv[1]" in (folder(number) / "repro.py").read_text(encoding="utf-8")


def run(
    number: str, fix: str | None = None, timeout: float = 300.0, device: str | None = None
) -> Ran:
    """Run a reproduction in a child process, as ``python repro.py`` would.

    Args:
        number: of the reproduction.
        fix: name of a candidate fix to put in.
        timeout: seconds.
        device: its argument, if it takes one; None for none.

    Raises:
        RuntimeError: if the child did not come back, or the torch does not have the fix's lines.
    """
    argv = [str(folder(number) / "repro.py"), *([] if device is None else [device])]
    # One that takes no device forks, and beside a GPU what a fix imports makes forks of no use.
    env = {} if takes_device(number) else {"CUDA_VISIBLE_DEVICES": ""}
    return run_isolated(_script, argv, fix, timeout=timeout, env=env, fresh=True).unwrap()


def run_all(wanted: Sequence[str], workers: int = 2) -> dict[tuple[str, str | None], Ran]:
    """Run reproductions, and those whose fix fits here with it too: by number and fix.

    Args:
        wanted: their numbers.
        workers: how many at a time.
    """
    jobs: list[tuple[str, str | None]] = []
    for number in wanted:
        jobs.append((number, None))
        if recorded(number, fixed=True) is not None:
            jobs.append((number, fix_of(number)))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(jobs, pool.map(lambda job: run(*job), jobs), strict=True))


def own_means(number: str, timeout: float = 300.0) -> Means:
    """Run a reproduction with the log of the reinplace pass on, and a trace for ``tlparse``.

    Raises:
        RuntimeError: if the child did not come back.
    """
    script = str(folder(number) / "repro.py")
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as trace:
        env = {"TORCH_LOGS": f"+{PASS}", "TORCH_TRACE": trace}
        child = run_isolated(_script_and_counters, script, timeout=timeout, env=env, fresh=True)
        missed, counters = child.unwrap()
        text = "".join(p.read_text(errors="replace") for p in sorted(Path(trace).glob("*")))
    told = [line.partition("] ")[2] for line in child.stderr_tail.splitlines() if "einplac" in line]
    log = [line.partition("] ")[2] or line for line in told]
    return Means(log, missed, counters, trace_artifacts(text))


def trace_artifacts(text: str) -> dict[str, list[str]]:
    """The named parts of a trace, each with its lines that hold the word "clone".

    Args:
        text: what ``TORCH_TRACE`` wrote: a line of JSON a part, its payload indented below it.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        head = re.match(r"[VIWE]\d{4} .*?\] (\{.*\})$", line)
        if head:
            part = json.loads(head[1])
            kind = next(iter(part))
            inner = part[kind]
            name = inner.get("name", kind) if isinstance(inner, dict) else kind
            found.setdefault(name, [])
        elif name and re.search(r"\bclone\b|_clone_", line):
            found[name].append(line.strip())
    return found


def _upstream() -> Path:
    return project_dir() / "upstream"


def _expected(number: str) -> dict[str, dict]:  # type: ignore[type-arg]
    return tomllib.loads((folder(number) / "expected.toml").read_text(encoding="utf-8"))


def _script(argv: list[str], fix: str | None = None) -> Ran:
    printed = io.StringIO()
    sys.argv = argv
    with contextlib.ExitStack() as stack:
        if fix is not None:
            stack.enter_context(installed(fix))
        stack.enter_context(contextlib.redirect_stdout(printed))
        try:
            runpy.run_path(argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Ran(code, printed.getvalue())


def _script_and_counters(script: str) -> tuple[int, dict[str, int]]:
    _script([script])
    from torch._dynamo.utils import ReinplaceCounters, counters

    return ReinplaceCounters.get_total_missed(), dict(counters["inductor"])
