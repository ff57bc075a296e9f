"""The one way to find the clones of mutated tensors in a graph, and the inputs that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from omni_kv.lens.decisions import target_name
from omni_kv.lens.graph import GraphCapture, Input, Read


@dataclass(frozen=True)
class ClonedTensor:
    """A clone that the compiler puts in front of an op, so that the op writes into the copy.

    Attributes:
        node: the clone's name in the graph.
        source: the input that it copies; None if it copies an intermediate.
        elements: how many elements it copies.
        itemsize: bytes of one.
        base: name of the node whose memory it copies.
        read: what its kernel reads of that; None without code, or if there is no such kernel.
        writes: the buffer that the kernel fills; None likewise.
    """

    node: str
    source: Input | None
    elements: int
    itemsize: int
    base: str
    read: Read | None
    writes: str | None


def clones_of(graph: GraphCapture) -> list[ClonedTensor]:
    """The clones that undoing functionalization made in a graph, in their order.

    A clone that the caller wrote is none: the graph has it before the reinplace pass.
    """
    before, after = graph.post_grad_before_reinplace, graph.post_grad_after_decomposition
    if after is None:
        return []
    own = {node.name for node in before.nodes} if before is not None else set()
    clones = []
    for node in after.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        base = root_of(node.args[0])
        value = node.meta.get("val")
        if node.name in own or value is None:
            continue
        source = graph.input_of(base.name)
        kernels = [k for k in graph.kernels if node.name in k.origins and len(k.reads) == 1]
        made = next((k for k in kernels if source is None or k.reads[0].buffer == source.aot), None)
        clones.append(
            ClonedTensor(
                node=node.name,
                source=source,
                elements=graph.number(value.numel()),
                itemsize=value.element_size(),
                base=base.name,
                read=made.reads[0] if made is not None else None,
                writes=made.writes if made is not None else None,
            )
        )
    return clones


def mutated_inputs(graph: GraphCapture) -> list[Input]:
    """The inputs that a graph writes, from the copies at its end and what the pass was asked."""
    before = graph.post_grad_before_reinplace
    copies = before.nodes if before is not None else ()
    written = {str(n.args[0]) for n in copies if n.target is torch.ops.aten.copy_.default}
    written |= {tensor for d in graph.decisions for tensor in d.tensors}
    return [i for i in graph.inputs if i.aot in written]


#: ATen ops whose result is a view of their first argument.
_VIEWS = (
    "as_strided",
    "slice",
    "select",
    "view",
    "reshape",
    "alias",
    "permute",
    "expand",
    "detach",
    "unbind",
    "split",
    "squeeze",
    "unsqueeze",
    "transpose",
)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument."""
    if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
        return False
    name = target_name(node.target).split(".")
    if name[0] == "getitem":  # one of the views that unbind or split gives
        return is_view(node.args[0])  # type: ignore[arg-type]
    return name[0] == "aten" and name[1] in _VIEWS


def root_of(node: Any) -> fx.Node:
    """Follow views back to the node that holds the memory."""
    while is_view(node):
        node = node.args[0]
    return node
