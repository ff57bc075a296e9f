"""The documents' figure of the packages and list of names say what the code does."""

from __future__ import annotations

from html import unescape

import pytest

from omni_kv.evidence.paths import PACKAGE, project_dir
from omni_kv.lens.pytorch import names
from omni_kv.publish.figures.packages import imports, names_page, packages_figure, rows
from omni_kv.publish.figures.svg import alt_text

NOTED = {"tests": {"lib", "base"}, "lib": {"base"}, "other": {"base"}, "base": set()}


def drawn(imported: dict[str, set[str]]) -> tuple[set[str], int]:
    """The names in a figure, and the number of its arrows."""
    (ax,) = packages_figure(imported).axes
    arrows = [p for p in ax.patches if type(p).__name__ == "FancyArrowPatch"]
    return {text.get_text() for text in ax.texts}, len(arrows)


def test_a_package_stands_above_what_it_imports() -> None:
    assert rows(NOTED) == [["base"], ["other", "lib"], ["tests"]]


def test_packages_that_import_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="import each other: a, b"):
        rows({"a": {"b"}, "b": {"a"}, "c": set()})


def test_an_arrow_that_a_chain_says_already_is_left_out() -> None:
    assert drawn(NOTED) == (set(NOTED), 3)
    assert drawn({**NOTED, "lib": set()}) == (set(NOTED), 3)


def test_every_folder_with_code_is_drawn() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= imports().keys()
    assert "evidence" in imports()["publish"]
    assert imports()["lens"] == set()


def test_the_figure_in_the_documents_shows_the_imports_of_now() -> None:
    stored = (project_dir() / "data" / "figures" / "architecture.svg").read_text()
    assert alt_text(packages_figure()) in unescape(stored), "run `make figures`"


def test_the_list_in_the_documents_has_the_names_of_now() -> None:
    stored = (project_dir() / "docs" / "pytorch_names.md").read_text()
    assert stored == names_page(), "run `make figures`"
    assert stored.count("\n| `") == len(names()) > 0
