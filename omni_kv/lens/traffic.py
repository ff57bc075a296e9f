"""Bytes that the generated code moves to write a mutated input, against what the writes change.

The reads and writes of Inductor's loops are counted before fusion, without those of buffers that
fusion did away with. Loops are counted that the new value of the input comes from, as far as they
read the input itself or buffers made from it. What a custom op touches inside is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from omni_kv.lens.clones import is_view
from omni_kv.lens.decisions import target_name
from omni_kv.lens.graph import GraphCapture, Kernel

Cause = Literal["clone by the pass", "scatter chain through views", "copy back of a computed value"]


@dataclass(frozen=True)
class Traffic:
    """What one call moves in order to write one mutated input.

    Attributes:
        input: the caller's name; ``a + b`` for inputs that are merged into one.
        reads_bytes: read of the input and of buffers made from it.
        writes_bytes: written to the input and to buffers made from it.
        changed_bytes: what the graph's own writes change; None where a custom op decides that, or
            the data does.
        cause: why more is moved, or why the whole is written; None if it is written in place.
    """

    input: str
    reads_bytes: int
    writes_bytes: int
    changed_bytes: int | None
    cause: Cause | None

    @property
    def extra_bytes(self) -> int:
        """Bytes read and written that changing the input itself would not need.

        Computing a new value from the old one reads it once: that is counted as needed.
        """
        needed = self.changed_bytes or 0
        reads = needed if self.cause == "copy back of a computed value" else 0
        return max(0, self.writes_bytes - needed) + max(0, self.reads_bytes - reads)


def traffic_of(graph: GraphCapture) -> list[Traffic]:
    """The traffic of each mutated input, in the order of the copies at the end of the graph.

    Empty if no code was generated: then it is not known which loops there are.
    """
    before = graph.post_grad_before_reinplace
    if before is None or graph.generated is None:
        return []
    found = []
    for node in before.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args
        tensor = target.meta.get("val") if isinstance(target, fx.Node) else None
        if tensor is None or target.op != "placeholder" or not isinstance(value, fx.Node):
            continue
        size = tensor.element_size()
        reads, writes = _moved(graph, target.name)
        written = _Written(graph, target)
        reached = written.follow(value, target)
        changed = written.elements
        if not reached and not written.by_op:
            changed = graph.number(tensor.numel())
        found.append(
            Traffic(
                input=graph.name_of(target.name),
                reads_bytes=reads * size,
                writes_bytes=writes * size,
                changed_bytes=None if changed is None else changed * size,
                cause=_cause(written, reached, writes, changed),
            )
        )
    return found


def _cause(written: _Written, reached: bool, writes: int, changed: int | None) -> Cause | None:
    if written.by_op:
        return "clone by the pass" if writes else None
    if not reached:
        return "copy back of a computed value"
    if changed is None or writes <= changed:
        return None
    return "scatter chain through views" if written.through_views else "clone by the pass"


def _moved(graph: GraphCapture, target: str) -> tuple[int, int]:
    """Elements read and written by the loops that the new value of an input comes from."""
    assert graph.generated is not None
    there = {name for call in graph.generated.calls for name in call.buffers}
    made = _made_from(graph.kernels, target)
    upstream: list[Kernel] = []
    waiting, seen = [target], {target}
    while waiting:
        memory = waiting.pop()
        for kernel in graph.kernels:
            if kernel.into == memory:
                upstream.append(kernel)
                new = {r.buffer for r in kernel.reads if r.buffer in made} - seen
                seen |= new
                waiting += sorted(new)
    reads = sum(
        read.last - read.first + 1
        for kernel in upstream
        for read in kernel.reads
        if read.buffer in made and read.buffer in there
    )
    writes = sum(kernel.written or 0 for kernel in upstream if kernel.into in there)
    return reads, writes


def _made_from(kernels: list[Kernel], target: str) -> set[str]:
    """An input, and the buffers that are computed from it, directly or not."""
    made = {target}
    while True:
        new = {k.into for k in kernels if any(r.buffer in made for r in k.reads)} - made
        if not new:
            return made
        made |= new


class _Written:
    """Follows a new value back to the tensor that it replaces, and counts what changes on the way.

    Attributes:
        elements: what the writes change, so far; None once that is not known.
        through_views: whether a write goes through a view.
        by_op: whether a custom op or a Triton kernel writes.
        first: the first tensor on the way from ``until``, once that is reached.
    """

    def __init__(self, graph: GraphCapture, target: fx.Node) -> None:
        self.graph = graph
        self.target = target
        self.elements: int | None = 0
        self.through_views = False
        self.by_op = False
        self.first: fx.Node | None = None

    def follow(self, node: Any, until: fx.Node) -> bool:
        """Go back from ``node``; whether ``until`` is reached through writes and views alone."""
        while node is not until:
            if not isinstance(node, fx.Node) or node.op != "call_function":
                return False
            name = target_name(node.target)
            kind = name.split(".")[1] if name.startswith("aten.") else name
            if kind in ("index_put", "_unsafe_index_put"):
                self._add(_indexed(self.graph, node))
            elif kind.endswith("_scatter"):
                self._scatter(node)
            elif kind == "getitem" and "functional" in target_name(node.args[0].target):  # type: ignore[union-attr]
                self.by_op, self.elements = True, None
                return False
            elif not is_view(node):
                return False
            if isinstance(node.meta.get("val"), torch.Tensor):  # not the list that unbind gives
                self.first = node
            node = node.args[0]
        return True

    def _scatter(self, node: fx.Node) -> None:
        """A write through a view: only what was written into the view itself changes."""
        self.through_views = True
        base, source = node.args[0], node.args[1]
        inner = _Written(self.graph, self.target)
        reached = isinstance(base, fx.Node) and inner.follow(source, base)
        # What is read elsewhere in the base, and written here, moves.
        if reached and inner.first is not None and self._same_place(inner.first, node):
            self._add(inner.elements)
        elif isinstance(source, fx.Node):
            self._add(self.graph.number(source.meta["val"].numel()))

    def _same_place(self, view: fx.Node, scatter: fx.Node) -> bool:
        """Whether a view of a tensor is the part of it that a scatter writes."""
        base, _, *rest = (a.meta["val"] if isinstance(a, fx.Node) else a for a in scatter.args)
        kind = target_name(scatter.target).split(".")[1].removesuffix("_scatter")
        part, seen = getattr(torch.ops.aten, kind)(base, *rest), view.meta["val"]
        numbers = ([self.graph.number(n) for n in _layout(t)] for t in (part, seen))
        return next(numbers) == next(numbers)

    def _add(self, count: int | None) -> None:
        known = count is not None and self.elements is not None
        self.elements = self.elements + count if known else None  # type: ignore[operator]


def _layout(tensor: torch.Tensor) -> list[Any]:
    sizes = [n for pair in zip(tensor.shape, tensor.stride(), strict=True) for n in pair]
    return [tensor.dim(), tensor.storage_offset(), *sizes]


def _indexed(graph: GraphCapture, node: fx.Node) -> int | None:
    """Elements that an ``index_put`` writes; None if a mask of bools decides that."""
    base: Any = node.args[0]
    indices: Any = node.args[1]
    shape = list(base.meta["val"].shape)
    tensors = [i.meta["val"] for i in indices if i is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    left = [size for dim, size in enumerate(shape) if dim >= len(indices) or indices[dim] is None]
    sizes = [[graph.number(n) for n in t.shape] for t in tensors]
    counts = torch.broadcast_shapes(*(tuple(s) for s in sizes))
    return math.prod(counts) * math.prod(graph.number(n) for n in left)
