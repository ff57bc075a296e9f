"""Put a fix into the running torch, or write it as a patch: both from the same replaced lines."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from omni_kv.upstream.fixes import FIXES


@contextlib.contextmanager
def installed(name: str) -> Iterator[None]:
    """Put a fix into the running torch, and take it out again.

    What is compiled meanwhile has cache keys of its own, since it depends on the fix.

    Args:
        name: a key of ``FIXES``.

    Raises:
        RuntimeError: if the installed torch does not have the lines to change.
    """
    import torch._inductor.lowering as lowering
    from torch.compiler import config as compiler_config

    fixed = fixed_sources(name)
    registered = dict(lowering.lowerings)
    put_back: list[tuple[Any, str, Any]] = []
    tag = f"{compiler_config.cache_key_tag}+{name}"
    try:
        with compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            for module_name, (old, new) in fixed.items():
                put_back += _replace_definitions(importlib.import_module(module_name), old, new)
            yield
    finally:
        for holder, attribute, value in reversed(put_back):
            if value is _ABSENT:
                delattr(holder, attribute)
            else:
                setattr(holder, attribute, value)
        lowering.lowerings.clear()
        lowering.lowerings.update(registered)


def fixed_sources(name: str) -> dict[str, tuple[str, str]]:
    """Source of each module that a fix changes, as installed and with the fix.

    Args:
        name: a key of ``FIXES``.

    Returns:
        By the module's dotted name: source before, source after.

    Raises:
        RuntimeError: if the installed torch does not have the lines to change.
    """
    for changes in FIXES[name]:
        sources: dict[str, tuple[str, str]] = {}
        for change in changes:
            before = _source_path(change.module).read_text(encoding="utf-8")
            old, new = sources.get(change.module, (before, before))
            if new.count("\n" + change.old) != 1:
                break
            sources[change.module] = (old, new.replace("\n" + change.old, "\n" + change.new))
        else:
            return sources
    raise RuntimeError(f"this torch does not have the lines that the fix {name!r} changes")


def diff(name: str) -> str:
    """A fix as a unified diff against the installed torch, with the paths of its repository.

    Args:
        name: a key of ``FIXES``.

    Raises:
        RuntimeError: if the installed torch does not have the lines to change.
    """
    text = ""
    for module, (old, new) in fixed_sources(name).items():
        path = module.replace(".", "/") + ".py"
        lines = (old.splitlines(keepends=True), new.splitlines(keepends=True))
        text += "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))
    return text


_ABSENT = object()


def _source_path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"this torch has no module {module}")
    return Path(spec.origin)


def _replace_definitions(module: ModuleType, old: str, new: str) -> list[tuple[Any, str, Any]]:
    """Define what differs between two sources of a module, and say what it replaced."""
    before = {key: ast.dump(node) for key, _, node in definitions(old)}
    changed = [d for d in definitions(new) if before.get(d[0]) != ast.dump(d[2])]
    _forget_lowerings(module, {node.name for _, _, node in changed})
    replaced = []
    for _, holder_name, node in changed:
        holder = getattr(module, holder_name) if holder_name else module
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        lines = new.splitlines(keepends=True)[first - 1 : node.end_lineno]
        # Leading blank lines keep line numbers, for tracebacks.
        source = "\n" * (first - 1) + textwrap.dedent("".join(lines))
        made: dict[str, Any] = {}
        exec(compile(source, f"{module.__name__} with a fix", "exec"), vars(module), made)
        replaced.append((holder, node.name, vars(holder).get(node.name, _ABSENT)))
        setattr(holder, node.name, made[node.name])
    return replaced


def _forget_lowerings(module: ModuleType, names: set[str]) -> None:
    """Take the lowerings of these names away: one that is there would not be registered anew.

    So would the fallback that an earlier compilation in this process made for an op without one.
    """
    registered: dict[Any, Any] = getattr(module, "lowerings", {})
    for target, function in list(registered.items()):
        own = function.__module__ == module.__name__
        fallback = own and function.__name__ == "handler" and f"{target}.".split(".")[1] in names
        if fallback or (own and function.__name__ in names):
            del registered[target]


def definitions(source: str) -> Iterator[tuple[tuple[str, str, int], str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes: key, class name or "", and node."""
    seen: dict[tuple[str, str], int] = {}
    for outer in ast.parse(source).body:
        inside = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        holder = outer.name if isinstance(outer, ast.ClassDef) else ""
        for node in inside:
            if isinstance(node, ast.FunctionDef):
                number = seen[holder, node.name] = seen.get((holder, node.name), -1) + 1
                yield (holder, node.name, number), holder, node
