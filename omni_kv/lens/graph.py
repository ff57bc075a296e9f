"""What the lens records of one graph: inputs, kernels, and the views that ops are handed."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from omni_kv.lens import pytorch
from omni_kv.lens.decisions import Decision, target_name
from omni_kv.lens.generated import Generated, parse


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
    storage_id: int


@dataclass(frozen=True)
class Read:
    """One read of a kernel: from ``buffer``, at ``index``, counted from the buffer's pointer."""

    buffer: str
    index: str
    first: int
    last: int


@dataclass(frozen=True)
class Kernel:
    """One loop nest that Inductor will generate, before fusion.

    Attributes:
        writes: the buffer that it fills.
        into: the buffer whose memory that is: another one, or an input, if it is written in place.
        origins: names of the post-grad nodes that it came from.
        reads: what it reads, by index expression.
        written: how many elements it writes; None if that depends on data.
    """

    writes: str
    into: str
    origins: tuple[str, ...]
    reads: tuple[Read, ...]
    written: int | None


@dataclass(frozen=True)
class PassedView:
    """The view that the generated code hands to a custom op: ``offset`` into ``buffer``."""

    op: str
    order: int
    buffer: str
    offset: int


@dataclass
class Scheduled:
    """What the scheduler's nodes say, while sizes are still symbols.

    Attributes:
        loops: buffer, origins, reads and writes of each loop nest.
        passed: the views that custom ops are handed.
        same: for a buffer that stands for another one after a write, that other one.
    """

    loops: list[tuple[str, tuple[str, ...], list[Any], list[Any]]] = field(default_factory=list)
    passed: list[PassedView] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)

    def memory_of(self, buffer: str) -> str:
        """The buffer or input whose memory a buffer is."""
        seen = set()
        while buffer in self.same and buffer not in seen:
            seen.add(buffer)
            buffer = self.same[buffer]
        return buffer


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
    sizes: dict[Any, int] = field(default_factory=dict)

    @functools.cached_property
    def generated(self) -> Generated | None:
        """The generated code, parsed; None if there is none."""
        return parse(self.generated_code)

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

    def name_of(self, node: str) -> str:
        """The caller's name for a placeholder, ``a + b`` for a synthetic base; else the node's."""
        return " + ".join(i.name for i in self.inputs if i.aot == node) or node


def read_scheduled(nodes: list[Any], scheduled: Scheduled) -> None:
    """Keep what the scheduler's nodes read (loop nests) or pass on as views (custom ops)."""
    for node in nodes:
        _read_node(node, scheduled)


def _read_node(node: Any, scheduled: Scheduled) -> None:
    memory_dep, fallback = pytorch.MEMORY_DEP.get(), pytorch.FALLBACK_KERNEL.get()
    buffer = node.node
    for output in node.get_outputs():
        for changed in output.get_mutations():
            scheduled.same[output.get_name()] = changed
    reads, writes = (
        sorted((dep for dep in deps if isinstance(dep, memory_dep)), key=str)
        for deps in (node.read_writes.reads, node.read_writes.writes)
    )
    if (reads or writes) and hasattr(buffer, "origins"):
        origins = tuple(sorted(origin.name for origin in buffer.origins))
        scheduled.loops.append((buffer.get_name(), origins, reads, writes))
    if isinstance(buffer, fallback) and buffer.op_overload is not None:
        op = target_name(buffer.op_overload)
        order = len({view.order for view in scheduled.passed if view.op == op})
        for tensor in buffer.inputs:
            # The offset may hold symbols still; numbers take their place once the inputs are known.
            view = PassedView(op, order, tensor.get_name(), tensor.get_layout().offset)
            scheduled.passed.append(view)


def kernels_of(scheduled: Scheduled, graph: GraphCapture) -> list[Kernel]:
    """The loop nests with numbers in place of symbols; reads whose index is data are left out."""
    kernels = []
    for writes, origins, reads, written in scheduled.loops:
        try:
            counts = [math.prod(graph.number(n) for n in dep.ranges.values()) for dep in written]
            elements: int | None = max(counts, default=None)
        except ValueError:
            elements = None
        extents = tuple(e for dep in reads if (e := _extent(dep, graph, scheduled)) is not None)
        kernels.append(Kernel(writes, scheduled.memory_of(writes), origins, extents, elements))
    return kernels


def _extent(dep: Any, graph: GraphCapture, scheduled: Scheduled) -> Read | None:
    """Lowest and highest index of a read; None if the index depends on data."""
    try:
        ranges = {var: graph.number(size) for var, size in dep.ranges.items()}
    except ValueError:
        return None
    index = sympy.sympify(dep.index).xreplace(
        {symbol: sympy.Integer(size) for symbol, size in graph.sizes.items()}
    )
    if not index.free_symbols <= set(ranges):
        return None
    value_ranges = pytorch.RANGES.get()
    bounds = {var: value_ranges(0, size - 1) for var, size in ranges.items()}
    limits = pytorch.BOUND.get()(index, bounds)
    buffer = scheduled.memory_of(dep.name)
    return Read(buffer, str(dep.index), int(limits.lower), int(limits.upper))


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
    """Where the caller finds a graph input: ``key_pool``, ``pools[1]``, ``fn.layers.0.pool``.

    ``fn`` is the callable itself where the tensor hangs on a module or on a method's object.
    """
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", None)
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return node.name
    # Where a frame stands around the callable, Dynamo knows its arguments by number.
    positional = re.match(r"L\['args'\]\[(\d+)\](.*)", name)
    if positional is not None:
        number, parameters = int(positional[1]), parameter_names(fn)
        known = number < len(parameters) and not _has_own_args(fn)
        return (parameters[number] if known else f"args[{number}]") + _path(positional[2])
    keyword = re.match(r"L\['kwargs'\]\['(\w+)'\](.*)", name)
    if keyword is not None:
        return keyword[1] + _path(keyword[2])
    name = re.sub(r"G\['__import_[^']*'\]\.(\w+)", r"G['\1']", name)
    scope = re.match(r"[LG]\['(\w+)'\](.*)", name)
    if scope is None:
        return name
    bound = isinstance(fn, torch.nn.Module) or inspect.ismethod(fn)
    return ("fn" if bound and scope[1] == "self" else scope[1]) + _path(scope[2])


def _has_own_args(fn: Callable[..., Any]) -> bool:
    code = getattr(getattr(fn, "forward", fn), "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_VARARGS)


def _path(path: str) -> str:
    """Shorten a path of Dynamo's through modules and closures to what a person would write."""
    path = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
    return path
