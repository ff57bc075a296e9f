"""The lens: compile a callable once, away from every cache, and keep what each stage made of it.

The stages carry PyTorch's own names. What PyTorch offers a hook for is read through that hook:

* Dynamo's graph: a custom backend;
* AOTAutograd's forward graph: ``inner_compile=`` of Inductor's ``compile_fx``, with the input
  descriptors (``meta["desc"]``) that say which inputs became one synthetic base;
* the kernels' reads and writes: ``torch._inductor.config._pre_fusion_custom_pass``;
* the generated code: ``GraphLowering.save_output_code``.

There is no hook around the reinplace pass and none behind it, so two functions are replaced for
the time of one compilation, both in ``_patched``. The pass keeps no record of *why* it turned an
argument down either; ``watch_pass`` reads that from the pass' own frames as they return.

Nothing that was compiled is ever run: the inputs are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx

from omni_kv.lens.decisions import watch_pass
from omni_kv.lens.graph import (
    GraphCapture,
    PassedView,
    input_name,
    kernels_of,
    read_inputs,
    read_scheduled,
)

Until = Literal["graph", "code"]


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
    if isinstance(fn, torch.nn.Module):
        return getattr(fn, "_orig_mod", fn)  # type: ignore[return-value]
    return getattr(fn, "_torchdynamo_orig_callable", fn)


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
    with contextlib.suppress(_Stop), warnings.catch_warnings():
        # On a GPU Inductor recommends a faster product; nothing is run here.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
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
        self.graph: GraphCapture
        self.sources: list[str] = []
        self.loops: list[tuple[str, tuple[str, ...], list[Any]]] = []
        self.passed: list[PassedView] = []
        self.depth = 0

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.graph = graph = GraphCapture(dynamo_graph=_copy(gm.graph))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.sources = [input_name(node, self.fn) for node in placeholders]
        self.loops, self.passed = [], []
        compile_fx(gm, example_inputs, inner_compile=self.inner_compile)

        def stand_in(*inputs: Any) -> Any:
            # Dynamo may compile more than once before it is content: the graph that counts is run.
            self.graphs.append(graph)
            if self.lens:
                read_inputs(graph, inputs, self.sources)
                graph.kernels = kernels_of(self.loops, graph)
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
            self.graph.aot_forward_graph = _copy(gm.graph)
            self.graph.is_inference = bool(options.get("is_inference"))
        with contextlib.suppress(_Stop):
            compile_fx_inner(gm, example_inputs, **options)
        return never_run

    def reinplace(self, passes: Callable[..., None], updater: Any, graph: fx.Graph) -> None:
        if self.depth != 1 or not self.lens:  # the graph of a higher-order op's branch
            return passes(updater, graph)
        taken = self.graph
        taken.post_grad_before_reinplace = _copy(graph)
        with watch_pass() as decisions:
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
            self.graph.post_grad_after_decomposition = _copy(gm.graph)
        if self.until == "graph":
            raise _Stop

    def scheduled(self, nodes: list[Any]) -> list[Any]:
        if self.lens:
            self.loops, self.passed = [], []
            for node in nodes:
                read_scheduled(node, self.loops, self.passed)
        return nodes

    def code(self, code: str) -> None:
        self.graph.generated_code = code
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


def _copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with its nodes' names and metadata, before a pass changes it in place."""
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        # Dynamo's record of an argument holds the caller's tensor alive.
        nodes[node].meta.pop("grapharg", None)
    return new
