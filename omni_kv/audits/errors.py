"""How the end of a run is told: the line that matters, and what is no fault of the callable."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import traceback

from omni_kv.audits.jobs import OWN_MODULE

#: How torch, Python and the kernel say that there is no more memory.
_NO_MEMORY = ("SIGKILL", "MemoryError", "OutOfMemoryError", "t allocate memory", "annot allocate")
OUT_OF_MEMORY = "out of memory"
#: Part of the path of the instruments' own frames in a traceback.
_OWN = re.compile(r"[/\\]omni_kv[/\\](lens|audits|sandbox)[/\\]")


def out_of_memory(how: str) -> bool:
    """Whether an end means that memory ran out: the kernel takes a process by SIGKILL then.

    A wrong read never ends so.
    """
    return any(sign in how for sign in _NO_MEMORY)


_FOLDER = "the folder for temporary files"
_ELSEWHERE = "; set TMPDIR to another"
#: Faults of the surroundings, by what the error says.
_SURROUNDINGS = {
    "failed to map segment": f"{_FOLDER} does not let programs run (noexec){_ELSEWHERE}",
    "No space left on device": f"{_FOLDER} is full{_ELSEWHERE}",
    "Read-only file system": f"{_FOLDER} cannot be written{_ELSEWHERE}",
    "InvalidCxxCompiler": "there is no C++ compiler that works",
}


def surroundings(text: str) -> str | None:
    """What is wrong around the callable, where an error says so; None if nothing is.

    Args:
        text: type and message of an error; empty where not even that could be written.
    """
    if not text.strip() and shutil.disk_usage(tempfile.gettempdir()).free < 1 << 20:
        return _SURROUNDINGS["No space left on device"]
    # Inductor's commands take a path apart at its spaces.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if "CppCompileError" in text and " " in cache:
        return f"the path of {_FOLDER} has a space, with which nothing compiles{_ELSEWHERE}"
    return next((told for sign, told in _SURROUNDINGS.items() if sign in text), None)


def cause_line(error: BaseException) -> str:
    """The line of an error that says what is wrong, without the compiler's advice around it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    for number, line in enumerate(lines):
        if "Explanation:" in line:
            return line.split("Explanation:", 1)[1].strip()
        if line.startswith("backend=") and number + 1 < len(lines):
            return lines[number + 1]
    return lines[0]


def first_line(text: str) -> str:
    """The first line of a message."""
    return text.strip().splitlines()[0] if text.strip() else "no message"


def hinted(how: str) -> str:
    """What an error says, with advice where a custom op is not known in a child process."""
    return f"{how}. {OWN_MODULE}" if "_OpNamespace" in how else how


def raised_here(error: BaseException) -> bool:
    """Whether an exception, or what caused it, was raised by a line of the instruments."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    frames = [traceback.extract_tb(cause.__traceback__) for cause in causes]
    return any(stack and _OWN.search(stack[-1].filename) for stack in frames)
