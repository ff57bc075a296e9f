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

All of these names are private, and a release may lack one (``omni_kv.lens.pytorch``). Then the
stages that hang on it are left out, and the capture says which names are missing.

Nothing that was compiled is ever run: the inputs are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from omni_kv.lens import pytorch
from omni_kv.lens.decisions import watch_pass
from omni_kv.lens.fresh import Settings, original, recompilable, settings_of
from omni_kv.lens.graph import (
    GraphCapture,
    Scheduled,
    input_name,
    kernels_of,
    read_inputs,
    read_scheduled,
)

__all__ = ["Capture", "Until", "capture", "original"]

Until = Literal["graph", "code"]


#: A line of the caller's in PyTorch's message about a graph break.
_USER_LINE = re.compile(r'File "(.*)", line (\d+), in')


@dataclass
class Capture:
    """The outcome of one compilation.

    Attributes:
        graphs: one entry a graph; several only if the callable breaks the graph.
        graph_break: PyTorch's first sentence on why the graph breaks, and the line of the caller's
            where it does; None if it is whole.
        seconds: wall-clock time of the compilation.
        missing: private names that this torch lacks, and stages that could not be read, with why;
            empty where the lens saw everything.
        wrapped: whether a frame of ours had to be put around the callable; the order in which
            Dynamo meets the inputs may then differ from plain ``torch.compile``.
    """

    graphs: list[GraphCapture]
    graph_break: str | None
    seconds: float
    missing: list[str] = field(default_factory=list)
    wrapped: bool = False


class _Stop(BaseException):
    """Ends a compilation at the stage that was asked for; no Exception, so nobody catches it."""


def capture(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    until: Until = "code",
    settings: Settings | None = None,
    **kwargs: Any,
) -> Capture:
    """Compile ``fn(*args, **kwargs)`` with Inductor and keep what each stage produced.

    The inputs are neither run through the compiled code nor changed, no compile cache is read or
    written, and what the process compiled before stays compiled. CPU kernels are generated as
    scalar loops: they read the same addresses as vector loops, and their index expressions can be
    read. The mode of autograd is the caller's.

    Args:
        fn: a function, a module, or what ``torch.compile`` made of one; then with the ``mode=``,
            ``options=`` and ``dynamic=`` that it was given there.
        args: its arguments.
        dynamic: as in ``torch.compile``.
        until: ``graph`` stops behind the graph passes, ``code`` behind code generation (no C++
            or Triton compiler runs in either case).
        settings: what ``torch.compile`` is told instead of what it was told.
        kwargs: its keyword arguments.

    Raises:
        Exception: whatever ``torch.compile`` raises if it cannot compile ``fn``. A graph break is
            no such case: the graph before the break is kept, and ``graph_break`` says why.
    """
    settings = settings or settings_of(fn)
    if dynamic is None:
        dynamic = settings.dynamic
    fn = original(fn)
    recorder = _Recorder(fn, until, settings)
    start = time.perf_counter()
    graph_break = None
    unsupported = pytorch.UNSUPPORTED.get() if pytorch.UNSUPPORTED.present else ()
    with _patched(recorder):
        try:
            wrapped = _compile(fn, recorder, dynamic, True, args, kwargs)
        except unsupported as error:
            if recorder.graphs:
                raise
            graph_break = str(error).strip().splitlines()[0]
            places = _USER_LINE.findall(str(error).partition("from user code")[2])
            graph_break += f" at {places[-1][0]}:{places[-1][1]}" if places else ""
            wrapped = _compile(fn, recorder, dynamic, False, args, kwargs)
    missing = pytorch.missing() + recorder.unread
    return Capture(recorder.graphs, graph_break, time.perf_counter() - start, missing, wrapped)


def _compile(
    fn: Callable[..., Any],
    recorder: _Recorder,
    dynamic: bool | None,
    fullgraph: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Compile from nothing; returns whether a frame was put around ``fn``."""
    fresh, wrapped = recompilable(fn)
    compiled = torch.compile(fresh, backend=recorder.backend, dynamic=dynamic, fullgraph=fullgraph)
    with contextlib.suppress(_Stop), warnings.catch_warnings():
        # On a GPU Inductor recommends a faster product; nothing is run here.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        compiled(*args, **kwargs)
    return wrapped


class _Recorder:
    """Collects the stages of one compilation: the backend and the hooks that ``_patched`` sets."""

    def __init__(self, fn: Callable[..., Any], until: Until, settings: Settings) -> None:
        self.fn = fn
        self.until = until
        self.settings = settings
        self.graphs: list[GraphCapture] = []
        self.graph: GraphCapture
        self.sources: list[str] = []
        self.scheduled = Scheduled()
        self.unread: list[str] = []
        self.depth = 0

    def reads(self, stage: str, read: Callable[[], Any]) -> Any:
        """Read a stage; one that this torch keeps in another form is left out, and noted."""
        try:
            return read()
        except Exception as error:
            self.unread.append(f"{stage}: {type(error).__name__}: {error}")
            return None

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graph = graph = GraphCapture(dynamo_graph=_copy(gm.graph))
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.sources = [input_name(node, self.fn) for node in placeholders]
        self.scheduled = Scheduled()
        if pytorch.COMPILE_FX.present and pytorch.COMPILE_FX_INNER.present:
            pytorch.COMPILE_FX.get()(
                gm,
                example_inputs,
                inner_compile=self.inner_compile,
                config_patches=self.settings.options or None,
            )

        def stand_in(*inputs: Any) -> Any:
            # Dynamo may compile more than once before it is content: the graph that counts is run.
            self.graphs.append(graph)
            self.reads("inputs", lambda: read_inputs(graph, inputs, self.sources))
            graph.kernels = self.reads("kernels", lambda: kernels_of(self.scheduled, graph)) or []
            views = self.reads("views that ops are handed", lambda: self.passed_views(graph))
            graph.passed_views = views or []
            raise _Stop

        return stand_in

    def passed_views(self, graph: GraphCapture) -> list[Any]:
        return [replace(v, offset=graph.number(v.offset)) for v in self.scheduled.passed]

    def inner_compile(self, gm: fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
        def never_run(args: Any) -> Any:
            raise _Stop

        never_run._boxed_call = True  # type: ignore[attr-defined]
        if options.get("is_backward"):
            return never_run
        self.graph.aot_forward_graph = _copy(gm.graph)
        with contextlib.suppress(_Stop):
            pytorch.COMPILE_FX_INNER.get()(gm, example_inputs, **options)
        return never_run

    def reinplace(self, passes: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        graph = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Graph)), None)
        # Deeper is the graph of a higher-order op's branch.
        outermost = self.depth == 1 or not pytorch.POST_GRAD.present
        if graph is None or not outermost:
            return passes(*args, **kwargs)
        taken = self.graph
        taken.post_grad_before_reinplace = _copy(graph)
        with watch_pass() as decisions:
            passes(*args, **kwargs)
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
        self.graph.post_grad_after_decomposition = _copy(gm.graph)
        if self.until == "graph":
            raise _Stop

    def before_fusion(self, nodes: list[Any]) -> list[Any]:
        self.scheduled = Scheduled()
        self.reads("kernels", lambda: read_scheduled(nodes, self.scheduled))
        return nodes

    def code(self, code: str) -> None:
        self.graph.generated_code = code
        raise _Stop


@contextlib.contextmanager
def _patched(recorder: _Recorder) -> Iterator[None]:
    """Set the hooks for the time of one compilation: the only place where PyTorch is patched."""
    with contextlib.ExitStack() as stack:
        options = {name: False for name in pytorch.INDUCTOR_OPTIONS}
        options |= {name: False for name in pytorch.FUNCTORCH_OPTIONS}
        _set(stack, options)
        if pytorch.PRE_FUSION.present:
            before = pytorch.PRE_FUSION.get()
            hook = _chained(before, recorder.before_fusion)
            _set(stack, {pytorch.PRE_FUSION: hook})
        around: dict[pytorch.Name, Callable[..., None]] = {
            pytorch.POST_GRAD: recorder.post_grad,
            pytorch.REINPLACE: recorder.reinplace,
        }
        for name, wrap in around.items():
            if name.present:
                _replace(stack, name, functools.partial(wrap, name.get()))
        if pytorch.SAVE_CODE.present:
            _replace(stack, pytorch.SAVE_CODE, recorder.code)
        yield


def _chained(before: Any, then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Call a hook that was set by others first, if there is one."""
    return then if before is None else lambda nodes: then(before(nodes))


def _set(stack: contextlib.ExitStack, options: dict[pytorch.Name, Any]) -> None:
    """Set those options that this torch has."""
    for name, value in options.items():
        if name.present:
            config: Any = importlib.import_module(name.module)
            stack.enter_context(config.patch({name.name: value}))


def _replace(stack: contextlib.ExitStack, name: pytorch.Name, value: Any) -> None:
    """Put something in the place of a function."""
    owner: Any = importlib.import_module(name.module)
    *path, attribute = name.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    stack.callback(setattr, owner, attribute, inspect.getattr_static(owner, attribute))
    setattr(owner, attribute, value)


def _copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph with its nodes' names and metadata, before a pass changes it in place."""
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = new.node_copy(node, nodes.__getitem__)
        # Dynamo's record of an argument holds the caller's tensor alive.
        nodes[node].meta.pop("grapharg", None)
    return new
