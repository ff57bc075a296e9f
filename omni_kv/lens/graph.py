"""What the lens records of one graph: inputs, kernels, and the views that ops are handed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from omni_kv.lens.decisions import Decision, target_name


@dataclass(frozen=True)
class Input:
    """One tensor that enters the graph.

    Sizes and offsets count elements; ``storage`` is the size of the whole storage in elements of
    this dtype, ``span`` is one past the highest element that the tensor itself reaches, counted
    from its first. ``storage_id`` is equal for inputs that share a storage.
    """

    name: str
    dynamo: str
    aot: str | None
    merged: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    span: int
    storage: int
    dtype: torch.dtype
    device: str
    storage_id: int


@dataclass(frozen=True)
class Read:
    """One read of a kernel: from ``buffer``, at ``index``, counted from the buffer's pointer."""

    buffer: str
    index: str
    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Kernel:
    """One loop nest that Inductor will generate, before fusion.

    Attributes:
        writes: the buffer that it fills.
        origins: names of the post-grad nodes that it came from.
        reads: what it reads, by index expression.
    """

    writes: str
    origins: tuple[str, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class PassedView:
    """The view that the generated code hands to a custom op: ``offset`` into ``buffer``."""

    op: str
    order: int
    position: int
    buffer: str
    offset: int


@dataclass
class GraphCapture:
    """What each stage made of one graph; stages that were not reached are None."""

    dynamo_graph: fx.Graph
    inputs: list[Input] = field(default_factory=list)
    aot_forward_graph: fx.Graph | None = None
    post_grad_before_reinplace: fx.Graph | None = None
    post_grad_after_reinplace: fx.Graph | None = None
    post_grad_after_decomposition: fx.Graph | None = None
    decisions: list[Decision] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    passed_views: list[PassedView] = field(default_factory=list)
    generated_code: str | None = None
    is_inference: bool = True
    sizes: dict[Any, int] = field(default_factory=dict)

    def number(self, expression: Any) -> int:
        """Value of a size expression for the sizes of this call.

        Raises:
            ValueError: if it holds a symbol that no input determines.
        """
        return _number(expression, self.sizes)

    def stages(self) -> dict[str, fx.Graph]:
        """The graphs by stage, in the order in which they were made."""
        graphs = {
            "Dynamo graph": self.dynamo_graph,
            "AOT forward graph": self.aot_forward_graph,
            "post-grad before reinplace": self.post_grad_before_reinplace,
            "post-grad after reinplace": self.post_grad_after_reinplace,
            "post-grad after decomposition": self.post_grad_after_decomposition,
        }
        return {name: graph for name, graph in graphs.items() if graph is not None}

    def input_of(self, node: str) -> Input | None:
        """The input that a placeholder of the AOT or post-grad graphs stands for, if it is one."""
        return next((i for i in self.inputs if i.aot == node and not i.merged), None)


def read_scheduled(
    node: Any, loops: list[tuple[str, tuple[str, ...], list[Any]]], passed: list[PassedView]
) -> None:
    """Keep a scheduler node's reads (a loop nest) or the views that it passes on (a custom op)."""
    from torch._inductor import ir
    from torch._inductor.dependencies import MemoryDep

    buffer = node.node
    reads = [dep for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
    if reads and hasattr(buffer, "origins"):
        origins = tuple(sorted(origin.name for origin in buffer.origins))
        loops.append((buffer.get_name(), origins, sorted(reads, key=str)))
    if isinstance(buffer, ir.FallbackKernel) and buffer.op_overload is not None:
        op = target_name(buffer.op_overload)
        order = len({view.order for view in passed if view.op == op})
        tensors: Any = buffer.inputs
        for position, tensor in enumerate(tensors):
            # The offset may hold symbols still; numbers take their place once the inputs are known.
            offset: Any = tensor.get_layout().offset
            passed.append(PassedView(op, order, position, tensor.get_name(), offset))


def kernels_of(
    loops: list[tuple[str, tuple[str, ...], list[Any]]], graph: GraphCapture
) -> list[Kernel]:
    """The loop nests with numbers in place of symbols; reads whose index is data are left out."""
    return [
        Kernel(
            writes,
            origins,
            tuple(extent for dep in reads if (extent := _extent(dep, graph)) is not None),
        )
        for writes, origins, reads in loops
    ]


def _extent(dep: Any, graph: GraphCapture) -> Read | None:
    """Lowest and highest index of a read; None if the index depends on data."""
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    try:
        ranges = {var: graph.number(size) for var, size in dep.ranges.items()}
    except ValueError:
        return None
    index = sympy.sympify(dep.index).xreplace(
        {symbol: sympy.Integer(size) for symbol, size in graph.sizes.items()}
    )
    if not index.free_symbols <= set(ranges):
        return None
    limits = bound_sympy(index, {var: ValueRanges(0, size - 1) for var, size in ranges.items()})
    count = math.prod(ranges.values())
    return Read(dep.name, str(dep.index), int(limits.lower), int(limits.upper), count)


def read_inputs(graph: GraphCapture, values: tuple[Any, ...], names: list[str]) -> None:
    """Describe the real inputs of a graph, and note the numbers that its symbols stand for."""
    placeholders = graph.dynamo_graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, values, strict=True):
        _bind(node.meta.get("example_value"), value, graph.sizes)
    plain, bases = _aot_placeholders(graph, len(values))
    for index, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if not isinstance(value, torch.Tensor):
            continue
        storage = value.untyped_storage()
        base = [name for of, name in bases.items() if _same_storage(values[of], value)]
        merged = index not in plain and bool(base)
        graph.inputs.append(
            Input(
                name=names[index],
                dynamo=node.name,
                aot=base[0] if merged else plain.get(index),
                merged=merged,
                shape=tuple(value.shape),
                stride=tuple(value.stride()),
                offset=int(value.storage_offset()),
                span=span(value.shape, value.stride()),
                storage=storage.nbytes() // value.element_size(),
                dtype=value.dtype,
                device=str(value.device),
                storage_id=storage._cdata,
            )
        )


def _aot_placeholders(graph: GraphCapture, count: int) -> tuple[dict[int, str], dict[int, str]]:
    """Which AOT placeholder stands for which Dynamo input, and for which it is a synthetic base.

    AOTAutograd describes every placeholder in ``meta["desc"]``.
    """
    plain: dict[int, str] = {}
    bases: dict[int, str] = {}
    if graph.aot_forward_graph is None:
        return plain, bases
    for node in graph.aot_forward_graph.find_nodes(op="placeholder"):
        description = node.meta.get("desc")
        base_of = getattr(description, "base_of", None)
        if base_of is not None and hasattr(base_of, "idx"):
            bases[base_of.idx] = node.name
        elif description is not None and hasattr(description, "idx"):
            plain[description.idx] = node.name
    return plain, bases


def _same_storage(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def _bind(symbolic: Any, value: Any, sizes: dict[Any, int]) -> None:
    """Note the numbers that the symbols of an input stand for in this call."""
    if isinstance(symbolic, torch.Tensor) and isinstance(value, torch.Tensor):
        pairs = [
            *zip(symbolic.shape, value.shape, strict=True),
            *zip(symbolic.stride(), value.stride(), strict=True),
            (symbolic.storage_offset(), value.storage_offset()),
        ]
    else:
        pairs = [(symbolic, value)]
    for symbol, number in pairs:
        expression = getattr(getattr(symbol, "node", None), "expr", None)
        if isinstance(number, int) and getattr(expression, "is_Symbol", False):
            sizes.setdefault(expression, int(number))


def _number(expression: Any, sizes: dict[Any, int]) -> int:
    expression = getattr(getattr(expression, "node", None), "expr", expression)
    value: Any = expression if isinstance(expression, int) else expression.xreplace(sizes)
    if getattr(value, "free_symbols", None):
        raise ValueError(f"no input determines {value.free_symbols} in {expression}")
    return int(value)


def span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to behind the last one that a view of this layout reaches."""
    shape = list(shape)
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlap(inputs: list[Input]) -> bool | None:
    """Whether any element of a storage belongs to two of these inputs, by marking them.

    None if the inputs differ in element size or the storage is too large to mark (2^28 elements).
    """
    size = max(i.storage for i in inputs)
    if len({i.storage_id for i in inputs}) > 1:
        return False
    if len({i.dtype.itemsize for i in inputs}) > 1 or size > 2**28:
        return None
    taken = torch.zeros(size, dtype=torch.bool)
    for one in inputs:
        view = taken.as_strided(one.shape, one.stride, one.offset)
        if bool(view.any()):
            return True
        view.fill_(True)
    return False


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters of ``fn``; empty if it does not tell."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def input_name(node: fx.Node, fn: Callable[..., Any]) -> str:
    """Where the caller finds a graph input: ``key_pool``, ``pools[1]``, ``fn.layers.0.pool``."""
    parameters = parameter_names(fn)
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return node.name
    positional = re.match(r"L\['args'\]\[(\d+)\](.*)", name)
    if positional is not None:
        number = int(positional[1])
        known = number < len(parameters)
        return (parameters[number] if known else f"args[{number}]") + _path(positional[2])
    keyword = re.match(r"L\['kwargs'\]\['(\w+)'\](.*)", name)
    if keyword is not None:
        return keyword[1] + _path(keyword[2])
    free = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cell = re.match(r"L\['fn'\]\.__closure__\[(\d+)\]\.cell_contents(.*)", name)
    if cell is not None and int(cell[1]) < len(free):
        return free[int(cell[1])] + _path(cell[2])
    name = re.sub(r"G\['__import_[^']*'\]\.(\w+)", r"G['\1']", name)
    scope = re.match(r"[LG]\['(\w+)'\](.*)", name)
    return scope[1] + _path(scope[2]) if scope is not None else name


def _path(path: str) -> str:
    """Shorten a path of Dynamo's through modules and closures to what a person would write."""
    path = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
    return path
