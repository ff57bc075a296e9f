"""Links into PyTorch's source as it was released; files and lines are those that are installed."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from IPython.display import Markdown

from omni_kv.evidence.verdicts import torch_release

REPOSITORY = "https://github.com/pytorch/pytorch/blob"


def url(path: str, line: int, release: str = "") -> str:
    """The address of a line.

    Args:
        path: of the file in the repository, such as ``torch/_inductor/lowering.py``.
        line: its number, from 1.
        release: of torch; by default the installed one, by its commit if it is no release.
    """
    tag = release or torch_release()
    plain = re.fullmatch(r"[\d.]+", tag)
    return f"{REPOSITORY}/{f'v{tag}' if plain else torch.version.git_version}/{path}#L{line}"


def place(name: str, text: str = "") -> tuple[str, int]:
    """Where a name stands in the installed source: file, as in the repository, and line.

    Args:
        name: such as ``torch._inductor.lowering:as_strided``.
        text: part of the line that is meant; by default the first line.

    Raises:
        LookupError: if the installed torch does not have it.
    """
    try:
        found = inspect.unwrap(pkgutil.resolve_name(name))
        lines, first = inspect.getsourcelines(found)
        file = Path(inspect.getsourcefile(found) or "")
        offset = next(number for number, line in enumerate(lines) if text in line)
    except (ImportError, AttributeError, OSError, TypeError, StopIteration):
        raise LookupError(f"torch {torch_release()} does not have {name} {text}".strip()) from None
    return file.relative_to(Path(torch.__file__).parent.parent).as_posix(), first + offset


def link(name: str, text: str = "") -> str:
    """A Markdown link to that line, called by file and name; where it is gone, a word on that."""
    said = text or name.partition(":")[2]
    try:
        path, line = place(name, text)
    except LookupError as gone:
        return f"{gone}"
    return f"[`{path}`, line {line}]({url(path, line)}): `{said.strip()}`"


def read_next(places: Mapping[str, str]) -> Markdown:
    """The list that ends a notebook.

    Args:
        places: by name, as ``place`` takes it, what is to be seen there. A name may go on with
            ``#`` and the text of a line.
    """
    rows = [f"- {link(*name.split('#', 1))}. {why}" for name, why in places.items()]
    head = f"**Read next in PyTorch's source**, as of torch {torch_release()}:"
    return Markdown("\n".join([head, "", *rows]))


def frame(text: str, release: str) -> str:
    """A recorded frame, ``file:line function``; a link into that release if it is PyTorch's."""
    path, _, rest = text.partition(":")
    number, _, function = rest.partition(" ")
    if not path.startswith("torch/"):
        return f"`{text}`"
    return f"[`{path}`, line {number}]({url(path, int(number), release)}): `{function}`"
