"""The first cells of notebook 02 are a reproduction of their own."""

import ast
import sys

import nbformat

from omni_kv.publish.notebooks import notebooks_dir

BY_HAND = ("hand-op", "hand-memory", "hand-call", "hand-child", "hand-run")


def test_the_cells_by_hand_need_torch_and_the_standard_library_alone() -> None:
    cells = nbformat.read(notebooks_dir() / "02_reproduce_the_crash.ipynb", as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    first = [cell for cell in code if "parameters" not in cell.metadata.get("tags", [])][:5]
    assert tuple(cell.id for cell in first) == BY_HAND
    module = ast.parse("\n".join(cell.source for cell in first))
    imported = {
        name.split(".")[0]
        for node in ast.walk(module)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "torch" in imported
    assert imported - {"torch"} <= set(sys.stdlib_module_names)
    given = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    names = {
        target.id
        for node in ast.parse(given[0].source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    assert not names & used
