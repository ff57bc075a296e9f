"""Nodes of a graph as a person would write them, reduced to the way of the mutated inputs."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from omni_kv.lens.clones import mutated_inputs
from omni_kv.lens.decisions import target_name
from omni_kv.lens.graph import GraphCapture

#: Ops that only pass a pool on, so that its way through the graph can be followed.
_PASS_ON = ("as_strided", "clone", "copy_", "getitem", "select", "slice", "alias")


def stage_lines(graph: GraphCapture, stage: str) -> list[str]:
    """The lines of one stage that deal with the mutated inputs, with the caller's names.

    Raises:
        KeyError: if there is no such stage.
    """
    nodes = graph.stages()[stage]
    names: dict[str, str] = {}
    for one in mutated_inputs(graph):
        if one.merged and one.aot:
            names[one.aot] = "+".join(i.name for i in graph.inputs if i.aot == one.aot)
        else:
            names[one.dynamo] = names[one.aot or one.dynamo] = one.name
    follow = {n for n in nodes.nodes if n.op == "placeholder" and n.name in names}
    lines = []
    for node in nodes.nodes:
        called = node.op in ("call_function", "call_method")
        on_the_way = any(used in follow for used in node.all_input_nodes)
        if called and on_the_way and (_passes_on(node) or _is_mutable_op(node)):
            follow.add(node)
            lines.append(node_line(node, follow, names))
    return lines


def _passes_on(node: fx.Node) -> bool:
    parts = target_name(node.target).split(".")
    return (parts[1] if parts[0] == "aten" else parts[0]) in _PASS_ON


def _is_mutable_op(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None) or getattr(
        getattr(node.target, "default", None), "_schema", None
    )
    mutable = schema is not None and schema.is_mutable
    return mutable or "functional" in target_name(node.target)


def node_line(node: fx.Node, follow: set[fx.Node], names: dict[str, str]) -> str:
    """One node as a line; arguments that are not in ``follow`` are dots."""

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), torch.SymInt):
                return str(value.meta["val"])
            return names.get(value.name, value.name) if value in follow else "…"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(shown(v) for v in value)}]"
        return str(value)

    target = target_name(node.target)
    if node.target is operator.getitem:
        return f"{node.name} = {shown(node.args[0])}[{shown(node.args[1])}]"
    arguments = [shown(a) for a in node.args]
    keywords = {k: shown(v) for k, v in node.kwargs.items() if _tells(k, v, follow)}
    if target.startswith("aten."):
        call = f"{arguments[0]}.{target.split('.')[1]}({', '.join(arguments[1:])})"
        return call if target.startswith("aten.copy_") else f"{node.name} = {call}"
    kept = shortened(arguments)
    dots = ["…"] if len(keywords) < len(node.kwargs) else []
    parts = [*kept, *dots, *(f"{k}={v}" for k, v in keywords.items())]
    call = f"{node.name} = {target}({', '.join(parts)})"
    clones = node.meta.get("only_clone_these_tensors")
    return call if clones is None else f"{call}  # clone bases {list(clones)}"


def _tells(keyword: str, value: Any, follow: set[fx.Node]) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    on_the_way = any(isinstance(v, fx.Node) and v in follow for v in values)
    return on_the_way or keyword.startswith("_")


def shortened(arguments: list[str]) -> list[str]:
    """Leave out repeated dots and plain numbers between the arguments that matter."""
    kept: list[str] = []
    for text in arguments:
        plain = text == "…" or re.fullmatch(r"None|-?[\d.]+(e-?\d+)?", text) is not None
        if not plain:
            kept.append(text)
        elif not kept or kept[-1] != "…":
            kept.append("…")
    return kept
