"""The caller's backend, held before compiled code runs, and run in memory that is laid anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_kv.lens.fresh import Settings
from omni_kv.lens.graph import input_name
from omni_kv.sandbox.relocate import ORDINARY, Memory, lay


class Hold(BaseException):
    """Ends a call of the compiled callable before any compiled code has run."""


class Backend:
    """The caller's backend, with a hand on what it compiles: held at first, then in laid memory."""

    def __init__(self, fn: Callable[..., Any], settings: Settings) -> None:
        self.fn = fn
        self.settings = settings
        self.memory: Memory | None = None
        self.inputs: dict[str, torch.Tensor] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph; what comes back holds its first calls, see ``memory``."""
        from torch._inductor.compile_fx import compile_fx

        nodes = gm.graph.find_nodes(op="placeholder")
        names = [input_name(node, self.fn) for node in nodes]
        if self.settings.backend is not None:
            compiled: Any = self.settings.backend(gm, example_inputs)
        else:
            patches = self.settings.options or None
            compiled = compile_fx(gm, example_inputs, config_patches=patches)

        def call(*inputs: Any) -> Any:
            if self.memory is None:
                tensors = zip(names, inputs, strict=True)
                self.inputs.update((n, t) for n, t in tensors if isinstance(t, torch.Tensor))
                raise Hold
            if self.memory == ORDINARY:
                return compiled(*inputs)
            laid, write_back = lay(inputs, self.memory)
            results = compiled(*laid)
            write_back()
            back = partial(_back, inputs=inputs, laid=laid)
            return pytree.tree_map_only(torch.Tensor, back, results)

        return call


def _back(result: torch.Tensor, inputs: Sequence[Any], laid: Sequence[Any]) -> torch.Tensor:
    """A result that lies in laid memory, as the same part of what was given."""
    pairs = [
        (given, copy)
        for given, copy in zip(inputs, laid, strict=True)
        if isinstance(copy, torch.Tensor) and copy is not given
    ]
    for given, copy in pairs:
        if result is copy:
            return given
    for given, copy in pairs:
        if result.untyped_storage()._cdata == copy.untyped_storage()._cdata:
            view = given if result.dtype == given.dtype else given.view(result.dtype)
            return view.as_strided(result.shape, result.stride(), result.storage_offset())
    return result
