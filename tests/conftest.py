"""What all tests share: notebooks built on the spot, and folders of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from omni_kv.sandbox.process import CHILD_ENV

# Inductor reads these when it is imported: what is compiled in the tests' own process compiles as
# it does in a child, in seconds instead of half a minute.
for name, value in CHILD_ENV.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True, scope="session")
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compile cache does not see how inputs alias: never reuse one that is lying around."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compile-cache")))
        yield


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder in place of the checkout's."""
    folder = tmp_path / "data"
    monkeypatch.setenv("OMNI_KV_DATA", str(folder))
    for name in ("OMNI_KV_RECORD_VERDICTS", "OMNI_KV_DEVICE_RECORD"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty notebook folder in place of the checkout's."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("OMNI_KV_NOTEBOOKS", str(folder))
    return folder


def save_notebook(path: Path, *cells: str, parameters: str = "", stdout: str | None = None) -> Path:
    """Write a small notebook: a title, a `parameters` cell, if any, and then cells of code.

    `stdout` becomes the stored output of the last cell.
    """
    nb = nbformat.v4.new_notebook()
    nb.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nb.cells = [nbformat.v4.new_markdown_cell(f"# {path.stem}")]
    if parameters:
        nb.cells.append(nbformat.v4.new_code_cell(parameters))
        nb.cells[-1].metadata["tags"] = ["parameters"]
    nb.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    if stdout is not None:
        output = nbformat.v4.new_output("stream", name="stdout", text=stdout)
        nb.cells[-1].update(outputs=[output], execution_count=1)
    nbformat.write(nb, path)
    return path


@pytest.fixture
def write_notebook(notebooks: Path) -> Callable[..., Path]:
    """`save_notebook` into the folder that stands in for the checkout's."""

    def write(stem: str, *cells: str, **options: str) -> Path:
        return save_notebook(notebooks / f"{stem}.ipynb", *cells, **options)

    return write


@pytest.fixture(scope="session")
def notebook_writer() -> Callable[..., Path]:
    """`save_notebook`, for fixtures that live longer than a test."""
    return save_notebook
