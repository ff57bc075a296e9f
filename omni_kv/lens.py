"""The lens: compile a callable once, away from every cache, and keep what each stage made of it.

The stages carry PyTorch's own names. What PyTorch offers a hook for is read through that hook:

* Dynamo's graph: a custom backend;
* AOTAutograd's forward graph: ``inner_compile=`` of Inductor's ``compile_fx``, with the input
  descriptors (``meta["desc"]``) that say which inputs became one synthetic base;
* the kernels' reads and writes: ``torch._inductor.config._pre_fusion_custom_pass``;
* the generated code: ``GraphLowering.save_output_code``.

There is no hook around the reinplace pass and none behind it, so two functions are replaced for
the time of one compilation, both in ``_patched``. The pass keeps no record of *why* it turned an
argument down either; ``_watch_pass`` reads that from the pass' own frames as they return.

Nothing that was compiled is ever run: the inputs are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import math
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx

Until = Literal["graph", "code"]

#: Functions of the reinplace pass that are read as they return.
_DECIDERS = (
    "can_inplace",
    "any_use_of_views_after_node",
    "tensor_with_same_storage_already_reinplaced",
    "reinplace_and_refine_tensors_to_clone",
)


@dataclass(frozen=True)
class Place:
    """A line of the reinplace pass: where a decision fell."""

    function: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"reinplace.py:{self.line}, in {self.function}: {self.text}"


@dataclass(frozen=True)
class Decision:
    """What the reinplace pass decided about one mutated argument of one node.

    Attributes:
        node: name of the functional node (``auto_functionalized_v2``, ``index_put``, ...).
        target: what that node calls.
        argument: base number, argument name or position by which the node knows the tensor.
        tensors: names of the nodes that would be written in place.
        reinplaced: whether the pass allowed it.
        cause: a word for the cause, read from the deciding frame; see ``_cause``.
        detail: names of the nodes that tipped the scale, such as the later user.
        place: the line that decided; None where it was not seen.
    """

    node: str
    target: str
    argument: int | str
    tensors: tuple[str, ...]
    reinplaced: bool
    cause: str
    detail: tuple[str, ...]
    place: Place | None


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


@dataclass
class Capture:
    """The outcome of one compilation.

    Attributes:
        graphs: one entry a graph; several only if the callable breaks the graph.
        dynamic: what was passed as ``dynamic=``.
        graph_break: PyTorch's first sentence on why the graph breaks; None if it is whole.
        seconds: wall-clock time of the compilation.
    """

    graphs: list[GraphCapture]
    dynamic: bool | None
    graph_break: str | None
    seconds: float


class _Stop(BaseException):
    """Ends a compilation at the stage that was asked for; no Exception, so nobody catches it."""


def original(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable behind ``torch.compile(...)``; any other callable as it is."""
    inner: Callable[..., Any] | None = getattr(fn, "_torchdynamo_orig_callable", None)
    return inner or getattr(fn, "_orig_mod", fn)


def capture(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    until: Until = "code",
    lens: bool = True,
    **kwargs: Any,
) -> Capture:
    """Compile ``fn(*args, **kwargs)`` with Inductor and keep what each stage produced.

    The inputs are neither run through the compiled code nor changed, no compile cache is read or
    written, and what the process compiled before stays compiled. CPU kernels are generated as
    scalar loops: they read the same addresses as vector loops, and their index expressions can be
    read. The mode of autograd is the caller's.

    Args:
        fn: a function, a module, or what ``torch.compile`` made of one.
        args: its arguments.
        dynamic: as in ``torch.compile``.
        until: ``graph`` stops behind the graph passes, ``code`` behind code generation (no C++
            or Triton compiler runs in either case).
        lens: False compiles to the same point and keeps nothing (for timing).
        kwargs: its keyword arguments.

    Raises:
        Exception: whatever ``torch.compile`` raises if it cannot compile ``fn``. A graph break is
            no such case: the graph before the break is kept, and ``graph_break`` says why.
    """
    fn = original(fn)
    recorder = _Recorder(fn, until, lens)
    start = time.perf_counter()
    graph_break = None
    with _patched(recorder):
        try:
            _compile(fn, recorder, dynamic, True, args, kwargs)
        except torch._dynamo.exc.Unsupported as error:
            if recorder.graphs:
                raise
            graph_break = str(error).strip().splitlines()[0]
            _compile(fn, recorder, dynamic, False, args, kwargs)
    return Capture(recorder.graphs, dynamic, graph_break, time.perf_counter() - start)


def _compile(
    fn: Callable[..., Any],
    recorder: _Recorder,
    dynamic: bool | None,
    fullgraph: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    compiled = torch.compile(
        fresh_frame(fn), backend=recorder.backend, dynamic=dynamic, fullgraph=fullgraph
    )
    with contextlib.suppress(_Stop):
        compiled(*args, **kwargs)


_frames = itertools.count()


def fresh_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``fn`` in a frame that Dynamo has not seen.

    Dynamo keeps compiled code, and which sizes changed, by the code object and its name. A frame
    with a name of its own starts from nothing and leaves what others compiled in place.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    name = f"omni_kv_lens_{next(_frames)}"
    return types.FunctionType(
        call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__
    )


class _Recorder:
    """Collects the stages of one compilation: the backend and the hooks that ``_patched`` sets."""

    def __init__(self, fn: Callable[..., Any], until: Until, lens: bool) -> None:
        self.fn = fn
        self.until = until
        self.lens = lens
        self.graphs: list[GraphCapture] = []
        self.sources: list[str] = []
        self.loops: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self.passed: list[PassedView] = []
        self.depth = 0

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        graph = GraphCapture(dynamo_graph=_copy(gm.graph))
        self.graphs.append(graph)
        names = _parameter_names(self.fn)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.sources = [_input_name(node, names) for node in placeholders]
        self.loops, self.passed = [], []
        compile_fx(gm, example_inputs, inner_compile=self.inner_compile)

        def stand_in(*inputs: Any) -> Any:
            if self.lens:
                _read_inputs(graph, inputs, self.sources)
                graph.kernels = _kernels(self.loops, graph)
                graph.passed_views = [
                    replace(view, offset=graph.number(view.offset)) for view in self.passed
                ]
            raise _Stop

        return stand_in

    def inner_compile(self, gm: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        def never_run(args: Any) -> Any:
            raise _Stop

        never_run._boxed_call = True  # type: ignore[attr-defined]
        if options.get("is_backward"):
            return never_run
        if self.lens:
            self.graphs[-1].aot_forward_graph = _copy(gm.graph)
            self.graphs[-1].is_inference = bool(options.get("is_inference"))
        with contextlib.suppress(_Stop):
            compile_fx_inner(gm, example_inputs, **options)
        return never_run

    def reinplace(self, passes: Callable[..., None], updater: Any, graph: fx.Graph) -> None:
        if self.depth != 1 or not self.lens:  # the graph of a higher-order op's branch
            return passes(updater, graph)
        taken = self.graphs[-1]
        taken.post_grad_before_reinplace = _copy(graph)
        with _watch_pass() as decisions:
            passes(updater, graph)
        taken.decisions = decisions
        taken.post_grad_after_reinplace = _copy(graph)
        return None

    def post_grad(
        self, passes: Callable[..., None], gm: fx.GraphModule, *rest: Any, **kw: Any
    ) -> None:
        self.depth += 1
        try:
            passes(gm, *rest, **kw)
        finally:
            self.depth -= 1
        if self.depth:
            return
        if self.lens:
            self.graphs[-1].post_grad_after_decomposition = _copy(gm.graph)
        if self.until == "graph":
            raise _Stop

    def scheduled(self, nodes: list[Any]) -> list[Any]:
        if self.lens:
            self.loops, self.passed = [], []
            for node in nodes:
                _read_scheduled(node, self.loops, self.passed)
        return nodes

    def code(self, code: str) -> None:
        self.graphs[-1].generated_code = code
        raise _Stop


@contextlib.contextmanager
def _patched(recorder: _Recorder) -> Iterator[None]:
    """Set the hooks for the time of one compilation: the only place where PyTorch is patched."""
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering

    before = inductor_config._pre_fusion_custom_pass
    run_passes = compile_fx._recursive_post_grad_passes
    run_reinplace = post_grad.reinplace_inplaceable_ops
    save = GraphLowering.save_output_code
    options = {
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "cpp.vec_isa_ok": False,
        "_pre_fusion_custom_pass": lambda nodes: recorder.scheduled(
            before(nodes) if before is not None else nodes
        ),
    }
    no_aot_cache = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    with inductor_config.patch(options), functorch_config.patch(no_aot_cache):
        try:
            compile_fx._recursive_post_grad_passes = functools.partial(  # type: ignore[assignment]
                recorder.post_grad, run_passes
            )
            post_grad.reinplace_inplaceable_ops = functools.partial(  # type: ignore[assignment]
                recorder.reinplace, run_reinplace
            )
            GraphLowering.save_output_code = recorder.code  # type: ignore[assignment]
            yield
        finally:
            compile_fx._recursive_post_grad_passes = run_passes
            post_grad.reinplace_inplaceable_ops = run_reinplace
            GraphLowering.save_output_code = save


@contextlib.contextmanager
def _watch_pass() -> Iterator[list[Decision]]:
    """Collect the decisions of the reinplace pass from its frames, as they return.

    The pass logs which arguments it turned down, but not why; its local variables hold that.
    """
    from torch._inductor.fx_passes import reinplace

    decisions: list[Decision] = []
    returned: list[dict[str, Any]] = []

    def on_return(frame: types.FrameType, event: str, value: Any) -> Any:
        if event == "return":
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = Place(code.co_name, frame.f_lineno, text)
            seen = {"name": code.co_name, "value": value, "place": place, **frame.f_locals}
            if code.co_name == "reinplace_and_refine_tensors_to_clone":
                asked = [
                    f["name"] == "tensor_with_same_storage_already_reinplaced" for f in returned
                ]
                first = asked.index(True) if True in asked else len(returned)
                decisions.extend(_plain_decisions(returned[:first]))
                decisions.extend(_wrapped_decisions(seen, returned[first:]))
                returned.clear()
            else:
                returned.append(seen)
        return on_return

    def on_call(frame: types.FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        watched = code.co_name in _DECIDERS and code.co_filename == reinplace.__file__
        return on_return if watched else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield decisions
    finally:
        sys.settrace(before)
        decisions.extend(_plain_decisions(returned))


def _wrapped_decisions(seen: dict[str, Any], returned: list[dict[str, Any]]) -> list[Decision]:
    """Decisions on the mutated arguments of one auto_functionalized or Triton node."""
    # A tensor is asked about at most once before it is reinplaced or left, in order: the frames
    # that returned before the next "already reinplaced?" belong to the argument at hand.
    asked: list[list[dict[str, Any]]] = []
    for frame in returned:
        if frame["name"] == "tensor_with_same_storage_already_reinplaced":
            asked.append([])
        asked[-1].append(frame)
    node = seen.get("node")
    decisions: list[Decision] = []
    for argument, frames in itertools.zip_longest(seen["old_tensors_to_clone"], asked):
        if argument is None:
            continue
        tensor = seen["kwargs"][argument]
        earlier = [d for d in decisions if d.reinplaced]
        decisions.append(_decision(node, argument, tensor, frames or [], earlier))
        if decisions[-1].reinplaced == (argument in seen["tensors_to_clone"]):
            raise RuntimeError(f"the reinplace pass contradicts its frames on {argument}")
    return decisions


def _plain_decisions(returned: list[dict[str, Any]]) -> list[Decision]:
    """Decisions on ATen ops with an in-place variant, such as index_put."""
    decisions = []
    for number, frame in enumerate(returned):
        if frame["name"] == "can_inplace" and isinstance(frame["mutated_arg"], fx.Node):
            frames = returned[: number + 1]
            decisions.append(_decision(frame["node"], 0, frame["mutated_arg"], frames[-2:], []))
    return decisions


def _decision(
    node: Any,
    argument: int | str,
    tensor: Any,
    frames: list[dict[str, Any]],
    earlier: list[Decision],
) -> Decision:
    tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
    verdict = next((f for f in reversed(frames) if f["name"] == "can_inplace"), None)
    reinplaced = verdict is not None and verdict["value"] is True
    cause, detail, place = _cause(tensors, frames, verdict, earlier)
    return Decision(
        node=node.name if isinstance(node, fx.Node) else str(node),
        target=target_name(node.target) if isinstance(node, fx.Node) else "",
        argument=argument,
        tensors=tuple(getattr(t, "name", str(t)) for t in tensors),
        reinplaced=reinplaced,
        cause="reinplaced" if reinplaced else cause,
        detail=() if reinplaced else detail,
        place=place,
    )


def _cause(
    tensors: Any,
    frames: list[dict[str, Any]],
    verdict: dict[str, Any] | None,
    earlier: list[Decision],
) -> tuple[str, tuple[str, ...], Place | None]:
    """Name the cause of a refusal from the local variables of the frames that returned it."""
    if verdict is None:
        refused = [f for f in frames if f["value"] is True]
        place = refused[-1]["place"] if refused else None
        names = {t.name for t in tensors if isinstance(t, fx.Node)}
        same = [d for d in earlier if names & set(d.tensors)]
        if same:
            return "same tensor twice", same[0].tensors, place
        return (
            "same storage already reinplaced",
            tuple(n for d in earlier for n in d.tensors),
            place,
        )
    place = verdict["place"]
    argument = verdict["mutated_arg"]
    before = frames[: max(i for i, f in enumerate(frames) if f is verdict)]
    if isinstance(argument, (list, tuple)):
        if len(verdict.get("unique_storages", argument)) != len(argument):
            return "list shares storage", tuple(t.name for t in argument), place
        # The elements are asked in turn, up to the first that is refused.
        element = max(i for i, f in enumerate(before) if f["name"] == "can_inplace")
        return _cause(tensors, before[: element + 1], before[element], earlier)
    if "shared_view_nodes" not in verdict:
        return "no storage", (), place
    use = before[-1] if before and before[-1]["name"] == "any_use_of_views_after_node" else None
    if use is not None and use["value"] is True:
        return "used later", (use["user"].name, use["view"].name), use["place"]
    inputs = tuple(
        v.name for v in verdict["shared_view_nodes"] if v.op in ("placeholder", "get_attr")
    )
    if argument.op in ("placeholder", "get_attr"):
        return "no copy-back", (), place
    return ("view of an input" if inputs else "unknown"), inputs, place


def _read_scheduled(
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


def _kernels(
    loops: list[tuple[str, tuple[str, ...], list[Any]]], graph: GraphCapture
) -> list[Kernel]:
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
    index = dep.index.xreplace(graph.sizes)
    if not index.free_symbols <= set(ranges):
        return None
    limits = bound_sympy(index, {var: ValueRanges(0, size - 1) for var, size in ranges.items()})
    count = math.prod(ranges.values())
    return Read(dep.name, str(dep.index), int(limits.lower), int(limits.upper), count)


def _read_inputs(graph: GraphCapture, values: tuple[Any, ...], names: list[str]) -> None:
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
    if isinstance(expression, int):
        return expression
    value = expression.xreplace(sizes)
    if value.free_symbols:
        raise ValueError(f"no input determines {value.free_symbols} in {expression}")
    return int(value)


def span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to behind the last one that a view of this layout reaches."""
    shape = list(shape)
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def target_name(target: Any) -> str:
    """Name of what a node calls, such as ``aten.clone.default``."""
    if isinstance(target, str):
        return target
    name = str(target)
    return name if "object at" not in name else getattr(target, "__name__", name)


def _copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with its nodes' names and metadata, before a pass changes it in place."""
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        # Dynamo's record of an argument holds the caller's tensor alive.
        nodes[node].meta.pop("grapharg", None)
    return new


def _parameter_names(fn: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters of ``fn``; empty if it does not tell."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def _input_name(node: fx.Node, parameters: list[str]) -> str:
    """Where the caller finds a graph input: ``key_pool``, ``pools[1]``, ``fn.layers.0.pool``."""
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
    name = re.sub(r"G\['__import_[^']*'\]\.(\w+)", r"G['\1']", name)
    scope = re.match(r"[LG]\['(\w+)'\](.*)", name)
    return scope[1] + _path(scope[2]) if scope is not None else name


def _path(path: str) -> str:
    """Shorten a path of Dynamo's through modules and closures to what a person would write."""
    path = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", path)
    path = re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
    return path
