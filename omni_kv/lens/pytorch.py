"""Every private name of PyTorch that the instruments stand on, each with a probe.

None of these names is promised to stay. A name is looked up when it is needed; one that is gone
raises ``UnknownTorch`` from ``Name.get``, and whoever can do without it asks ``Name.present``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["object", "option", "local", "text"]


class UnknownTorch(RuntimeError):
    """The installed torch lacks a private name that an instrument needs."""


@dataclass(frozen=True)
class Name:
    """One private name.

    Attributes:
        module: the module of PyTorch that it is in.
        name: the name; ``function.variable`` for a local.
        kind: ``object`` and ``option`` are attributes of the module (an option's name may have
            dots), ``local`` is a local variable of a function, ``text`` is written in the module's
            source (a metadata key, an attribute that is set on other objects).
        used: the module of ``omni_kv`` that uses it.
        purpose: what for.
    """

    module: str
    name: str
    kind: Kind
    used: str
    purpose: str

    def __str__(self) -> str:
        return f"{self.module}: {self.name}"

    @property
    def present(self) -> bool:
        """Whether the installed torch has it; looked up once."""
        return _present(self)

    def get(self) -> Any:
        """The object itself.

        Raises:
            UnknownTorch: if the installed torch does not have it.
        """
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            raise UnknownTorch(
                f"this instrument does not know torch {torch.__version__}: {self} is gone"
            ) from None
        return found


@functools.cache
def _present(name: Name) -> bool:
    try:
        if name.kind in ("object", "option"):
            name.get()
            return True
        module = importlib.import_module(name.module)
        if name.kind == "text":
            return name.name in inspect.getsource(module)
        function, _, variable = name.name.partition(".")
        return any(
            not variable or variable in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
            for code in _codes(module)
            if code.co_name == function
        )
    except (UnknownTorch, ImportError, OSError, TypeError):
        return False


def _codes(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of a module's functions, and of the functions inside them."""
    waiting = [f.__code__ for f in vars(module).values() if isinstance(f, types.FunctionType)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]


def forget() -> None:
    """Look every name up again: for tests that take one away."""
    _present.cache_clear()


def names() -> list[Name]:
    """All names, in the order in which a compilation meets them."""
    return list(_NAMES)


def missing() -> list[str]:
    """The names that the installed torch does not have."""
    return [str(name) for name in _NAMES if not name.present]


_NAMES: list[Name] = []


def _name(module: str, name: str, kind: Kind, used: str, purpose: str) -> Name:
    _NAMES.append(Name(f"torch.{module}", name, kind, used, purpose))
    return _NAMES[-1]


_FRAME, _TRACING = "_dynamo.eval_frame", "_dynamo.trace_rules"
ORIG_MOD = _name(_FRAME, "_orig_mod", "text", "lens.fresh", "the module behind torch.compile")
ORIG_CALLABLE = _name(
    _FRAME, "_torchdynamo_orig_callable", "text", "lens.fresh", "the function behind torch.compile"
)
COMPILER_CONFIG = _name(
    _FRAME, "get_compiler_config", "text", "lens.fresh", "its closure holds the settings"
)
INNERMOST_BACKEND = _name(
    _FRAME, "innermost_backend", "object", "lens.fresh", "the backend with mode and options"
)
COMPILER_FN = Name("torch", "compiler_fn", "text", "lens.fresh", "the backend behind a wrapper")
_NAMES.append(COMPILER_FN)
SKIPPED = _name(
    _TRACING, "check", "object", "lens.fresh", "whether Dynamo puts a frame around a callable"
)
UNSUPPORTED = _name(
    "_dynamo.exc", "Unsupported", "object", "lens.capture", "what a graph break raises"
)
GRAPH_ARG = _name(
    "_dynamo.variables.builder",
    'meta["grapharg"]',
    "text",
    "lens.graph",
    "where the caller finds a graph input",
)
COMPILE_FX = _name(
    "_inductor.compile_fx", "compile_fx", "object", "lens.capture", "Inductor, as a backend"
)
COMPILE_FX_INNER = _name(
    "_inductor.compile_fx",
    "compile_fx_inner",
    "object",
    "lens.capture",
    "Inductor behind AOTAutograd, passed as inner_compile",
)
IS_BACKWARD = _name(
    "_inductor.compile_fx",
    "is_backward",
    "text",
    "lens.capture",
    "tells the backward graph from the forward one",
)
BOXED = _name(
    "_inductor.compile_fx",
    "_boxed_call",
    "text",
    "lens.capture",
    "the compiled function takes its arguments as one list",
)
DESCRIPTION = _name(
    "_functorch._aot_autograd.fx_utils",
    'meta["desc"]',
    "text",
    "lens.graph",
    "which input a placeholder of AOTAutograd stands for",
)
POST_GRAD = _name(
    "_inductor.compile_fx",
    "_recursive_post_grad_passes",
    "object",
    "lens.capture",
    "patched: the graph behind the post-grad passes",
)
REINPLACE = _name(
    "_inductor.fx_passes.post_grad",
    "reinplace_inplaceable_ops",
    "object",
    "lens.capture",
    "patched: the graph before and behind the reinplace pass",
)
_PASS = "_inductor.fx_passes.reinplace"
PASS_FILE = _name(_PASS, "__file__", "object", "lens.decisions", "the frames that are watched")
for _local, _purpose in (
    ("can_inplace.node", "the node that is asked about"),
    ("can_inplace.mutated_arg", "the tensor that is asked about"),
    ("can_inplace.unique_storages", "the storages of a list"),
    ("any_use_of_views_after_node.user", "the later user"),
    ("any_use_of_views_after_node.view", "the view that it uses"),
    ("tensor_with_same_storage_already_reinplaced.arg", "the tensor that is asked about"),
    ("reinplace_and_refine_tensors_to_clone.node", "the node whose tensors are asked about"),
    ("reinplace_and_refine_tensors_to_clone.kwargs", "its tensors"),
    ("reinplace_and_refine_tensors_to_clone.old_tensors_to_clone", "those that are asked about"),
    ("reinplace_and_refine_tensors_to_clone.tensors_to_clone", "those that are refused"),
):
    _name(_PASS, _local, "local", "lens.decisions", _purpose)
SHARED_VIEWS = _name(
    _PASS,
    "can_inplace.shared_view_nodes",
    "local",
    "lens.decisions",
    "the views that may overlap the tensor",
)
SAVE_CODE = _name(
    "_inductor.graph",
    "GraphLowering.save_output_code",
    "object",
    "lens.capture",
    "patched: the generated code",
)
PRE_FUSION = _name(
    "_inductor.config",
    "_pre_fusion_custom_pass",
    "option",
    "lens.capture",
    "a hook on the loops before fusion",
)
MEMORY_DEP = _name(
    "_inductor.dependencies", "MemoryDep", "object", "lens.graph", "one read or write of a loop"
)
FALLBACK_KERNEL = _name(
    "_inductor.ir", "FallbackKernel", "object", "lens.graph", "a call of a custom op"
)
READ_WRITES = _name(
    "_inductor.scheduler", "read_writes", "text", "lens.graph", "what a loop reads and writes"
)
GET_LAYOUT = _name(
    "_inductor.ir", "get_layout", "text", "lens.graph", "offset of a view that an op is handed"
)
BOUND = _name(
    "utils._sympy.value_ranges", "bound_sympy", "object", "lens.graph", "the extent of an index"
)
RANGES = _name(
    "utils._sympy.value_ranges", "ValueRanges", "object", "lens.graph", "the extent of an index"
)
KERNEL_TABLE = _name(
    "_higher_order_ops.triton_kernel_wrap",
    "kernel_side_table",
    "object",
    "audits.findings",
    "the name of a user's Triton kernel",
)
INDUCTOR_OPTIONS = [
    _name("_inductor.config", option, "option", "lens.capture", purpose)
    for option, purpose in (
        ("fx_graph_cache", "off: no cache is read or written"),
        ("fx_graph_remote_cache", "off: no cache is read or written"),
        ("cpp.vec_isa_ok", "off: scalar loops, whose index can be read"),
    )
]
FUNCTORCH_OPTIONS = [
    _name("_functorch.config", option, "option", "lens.capture", "off: no cache is read or written")
    for option in ("enable_autograd_cache", "enable_remote_autograd_cache")
]
CUSTOM_OPS = VECTOR_SETS = _name(
    "_inductor.cpu_vec_isa",
    "valid_vec_isa_list",
    "object",
    "audits.threads",
    "its cache, emptied so that vector code can follow scalar loops",
)
_name("_library.custom_ops", "OPDEFS", "object", "audits.compare", "the modules that define ops")
