"""Candidate fixes of the compiler, each put into the running torch by a context manager.

A fix changes the lines that it recognises in the installed torch and refuses any other.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.fx_passes import reinplace


@contextlib.contextmanager
def overlap_check() -> Iterator[None]:
    """Let the reinplace pass ask whether tensors overlap, instead of whether they share a storage.

    Its own TODO says so: "this logic can be made more precise using _overlap". The function that
    decides is nested in the pass, so the pass is rebuilt from its source with two lines changed.

    Raises:
        RuntimeError: if the pass of the installed torch does not contain these lines.
    """
    changes = {
        "return get_node_storage(mutated_arg) in storage_of_reinplaced_args": (
            "return _overlaps_any(mutated_arg, storage_of_reinplaced_args)"
        ),
        "storage_of_reinplaced_args.add(get_node_storage(mutated_arg))": (
            "storage_of_reinplaced_args.add(mutated_arg)"
        ),
    }
    original = reinplace.reinplace_inplaceable_ops_core
    source = inspect.getsource(original)
    for old, new in changes.items():
        if source.count(old) != 1:
            raise RuntimeError(f"this torch's reinplace pass has no line {old!r} to change")
        source = source.replace(old, new)
    scope = {**vars(reinplace), "_overlaps_any": _overlaps_any}
    exec(compile(source, "reinplace pass with an overlap check", "exec"), scope)
    reinplace.reinplace_inplaceable_ops_core = scope[original.__name__]
    try:
        yield
    finally:
        reinplace.reinplace_inplaceable_ops_core = original


def _overlaps_any(node: torch.fx.Node, others: Any) -> bool:
    from torch._functorch._aot_autograd.input_output_analysis import compute_overlapping_tensors

    with_same_storage = [
        other
        for other in others
        if reinplace.get_node_storage(other) == reinplace.get_node_storage(node)
    ]
    return any(
        compute_overlapping_tensors([node.meta["val"], other.meta["val"]], symbolic=False)
        for other in with_same_storage
    )
