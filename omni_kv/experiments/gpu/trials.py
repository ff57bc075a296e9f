"""What each step towards the fast layer is worth: take it back, one at a time, and measure.

Every trial is the package's own layer with one thing exchanged, and all trials take turns in one
process. What was expected is written down here, not in the record of what came out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from omni_kv.evidence.cells import Timing
from omni_kv.experiments.gpu.step import FullStep, Thunk, ceilings, step_flop, take_turns
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Pools, make_pools
from omni_kv.model.transformer import Rope, VideoTransformer, make_model

#: Makes a context in which something is exchanged.
Exchange = Callable[[], AbstractContextManager[object]]

#: Change, and what it was expected to add to a step, in milliseconds, before it was measured. The
#: expectations count bytes over the rate of a copy and operations over the rates that
#: earlier prototypes reached; a layer's activations are 44 MB, which take 10 microseconds to read.
EXPECTED: dict[str, float] = {
    "as it is": 0.0,
    "scaled_dot_product_attention": 30.0,
    "scaled_dot_product_attention, window gathered": 42.0,
    "FlashAttention 3 by block table": 25.0,
    "slots written element by element": 4.4,
    "GELU as a kernel of its own": 4.4,
    "rotation by swapped pairs": -2.0,
    "Inductor: multi-kernel reductions": -2.0,
    "one CUDA graph a step": -1.6,
}


def narrow_write(pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """``omni_kv.model.op.write_slots`` as it was: one element a thread."""
    pool.index_copy_(0, slot_mapping, rows)


def separate_gelu(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """``omni_kv.model.transformer.linear_gelu`` as it was: GELU in a pass of its own."""
    return F.gelu(linear(x), approximate="tanh")


def rotate_by_swapping(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """``transformer.rotate`` without a concatenation, so that it can join the norm's pass."""
    pairs = x.float().unflatten(-1, (2, -1))
    cos = rope.cos.unsqueeze(-2)
    sin = torch.stack((-rope.sin, rope.sin), dim=-2)
    return (pairs * cos + pairs.flip(-2) * sin).flatten(-2).to(x.dtype)


@torch.no_grad()
def measure_trials(geometry: Geometry, device: str, backend: str, samples: int) -> list[Timing]:
    """Time one compiled step over separate pools with each change.

    Args:
        geometry: the sizes.
        device: where.
        backend: the fastest attention backend; on a CPU that is ``sdpa``.
        samples: how often each is timed.
    """
    with torch._dynamo.config.patch(recompile_limit=64):
        model = make_model(geometry, backend=backend, device=device)
        runs = _trials(model, make_pools(geometry, "separate", device=device), device)
        cells = [cell for cell in ceilings(geometry, device) if isinstance(cell, Timing)]
        seconds = take_turns(runs, samples, device)
    return cells + [
        Timing(
            name=name, seconds=seconds[name], flop=step_flop(geometry), predicted_ms=EXPECTED[name]
        )
        for name in EXPECTED
        if name in seconds
    ]


def _trials(model: VideoTransformer, pools: Pools, device: str) -> dict[str, Thunk]:
    """The step as it is and with each change, all of them compiled."""
    step = FullStep(model, pools, device)
    by_table = FullStep(model, pools, device, by_table=True)
    runs: dict[str, Thunk] = {
        "Inductor: multi-kernel reductions": _tuned(model, step, {"triton.multi_kernel": 1}),
    }
    model.compile_layers()
    sdpa = _of_all_blocks(model, "backend", ["sdpa"] * len(model.blocks))
    runs["as it is"] = step
    runs["scaled_dot_product_attention"] = _exchanged(sdpa, step)
    runs["scaled_dot_product_attention, window gathered"] = _exchanged(sdpa, by_table)
    runs["FlashAttention 3 by block table"] = by_table
    for change, target, replacement in (
        ("slots written element by element", "omni_kv.model.op.write_slots", narrow_write),
        ("GELU as a kernel of its own", "omni_kv.model.transformer.linear_gelu", separate_gelu),
        ("rotation by swapped pairs", "omni_kv.model.transformer.rotate", rotate_by_swapping),
    ):
        runs[change] = _exchanged(functools.partial(mock.patch, target, replacement), step)
    for run in runs.values():
        run()
    if device != "cpu":
        runs["one CUDA graph a step"] = _captured(step)
    return runs


def _exchanged(context: Exchange, run: Thunk) -> Thunk:
    """The same run within a context."""

    def inside() -> object:
        with context():
            return run()

    return inside


def _of_all_blocks(model: VideoTransformer, attribute: str, values: Sequence[object]) -> Exchange:
    """Exchange an attribute of the blocks, each for its own value."""

    def exchanged() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for block, value in zip(model.blocks, values, strict=True):
            stack.enter_context(mock.patch.object(block, attribute, value))
        return stack

    return exchanged


def _tuned(model: VideoTransformer, step: Thunk, options: dict[str, object]) -> Thunk:
    """The step, compiled anew with these options of Inductor's."""
    model.compile_layers(options=options)
    compiled = [block._compiled_call_impl for block in model.blocks]
    return _exchanged(_of_all_blocks(model, "_compiled_call_impl", compiled), step)


def _captured(step: Thunk) -> Thunk:
    """The step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
