"""Benchmarks of the op and of one layer, against the floor measured in the same run.

The floor of a piece of work is the larger of its floating-point operations over the rate of a large
matrix product and its bytes over the rate of a large copy; both ceilings are measured beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd
import torch

from omni_kv.evidence.cells import Timing
from omni_kv.evidence.records import provenance
from omni_kv.experiments.gpu.step import (
    FullStep,
    Thunk,
    attention_flop,
    ceilings,
    eagerly,
    for_backend,
    step_flop,
    take_turns,
)
from omni_kv.model.attention import choose_backend
from omni_kv.model.geometry import Geometry, preset
from omni_kv.model.op import ar_diffusion_paged_write_attn, write_slots
from omni_kv.model.pools import make_pools
from omni_kv.model.transformer import make_model


@torch.no_grad()
def measure_pieces(
    geometry: Geometry, device: str, backends: Sequence[str], samples: int
) -> list[Timing]:
    """Time, with each backend, the op (write and attend), its write alone, and one whole layer.

    Args:
        geometry: the sizes; one layer of it is run, over a full window.
        device: where.
        backends: attention backends.
        samples: how often each is timed.
    """
    cells = [cell for cell in ceilings(geometry, device) if isinstance(cell, Timing)]
    for backend in backends:
        cells += _pieces(geometry, device, backend, samples)
    return cells


def _pieces(geometry: Geometry, device: str, backend: str, samples: int) -> list[Timing]:
    g = for_backend(geometry, backend).replace(num_layers=1)
    dtype, item = g.torch_dtype, g.torch_dtype.itemsize
    model = make_model(g, backend=backend, device=device)
    step = FullStep(model, make_pools(g, "separate", device=device), device)
    _, _, text, rope, pools, window = step.inputs
    keys, values = pools.key_slots(0), pools.value_slots(0)
    tokens, heads = g.tokens_per_chunk, g.num_heads
    query = torch.randn(tokens, heads, g.head_dim, device=device, dtype=dtype)
    key, value = (
        torch.randn(tokens, g.num_kv_heads, g.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )
    x = torch.randn(tokens, g.dim, device=device, dtype=dtype)
    modulation = torch.randn(6, g.dim, device=device, dtype=dtype)
    block = model.blocks[0]
    model.compile_layers()

    def write() -> None:
        write_slots(keys, window.slot_mapping, key)
        write_slots(values, window.slot_mapping, value)

    def op() -> torch.Tensor:
        return ar_diffusion_paged_write_attn(
            query,
            key,
            value,
            keys,
            values,
            *window,
            block_size=g.block_size,
            softmax_scale=g.head_dim**-0.5,
            backend=backend,
        )

    def layer() -> torch.Tensor:
        return block(x, modulation, text[0], rope, keys, values, window)

    runs: dict[str, Thunk] = {
        "slot write": write,
        "op": op,
        "layer, eager": eagerly(layer),
        "layer, compiled": layer,
    }
    moved = 4.0 * key.nbytes
    window_bytes = 2.0 * g.visible_tokens * g.num_kv_heads * g.head_dim * item
    weights = sum(p.nbytes for p in block.parameters())
    work: dict[str, tuple[float, float]] = {
        "slot write": (0.0, moved),
        "op": (attention_flop(g), moved + window_bytes + 2 * query.nbytes),
        "layer, eager": (step_flop(g), weights + window_bytes + 2 * x.nbytes),
    }
    work["layer, compiled"] = work["layer, eager"]
    cells = []
    for name, seconds in take_turns(runs, samples, device).items():
        flop, nbytes = work[name]
        cells.append(
            Timing(name=f"{backend}/{name}", seconds=seconds, flop=flop or None, nbytes=nbytes)
        )
    return cells


def floor_seconds(cell: Timing, cells: Sequence[Timing]) -> float:
    """The least time that a piece of work can take, by the ceilings among ``cells``."""
    copy, matmul = (next(c for c in cells if c.ceiling == which) for which in ("copy", "matmul"))
    assert copy.nbytes and matmul.flop
    bandwidth = copy.nbytes / statistics.median(copy.seconds)
    rate = matmul.flop / statistics.median(matmul.seconds)
    return max((cell.flop or 0.0) / rate, (cell.nbytes or 0.0) / bandwidth)


def bench_table(cells: list[Timing]) -> pd.DataFrame:
    """Median, spread, floor and ratio of each piece of work; times in milliseconds."""
    rows = {}
    for cell in cells:
        median = statistics.median(cell.seconds)
        floor = floor_seconds(cell, cells)
        rows[cell.name] = {
            "median ms": 1e3 * median,
            "min ms": 1e3 * min(cell.seconds),
            "max ms": 1e3 * max(cell.seconds),
            "floor ms": 1e3 * floor,
            "times the floor": median / floor,
            "TFLOP/s": (cell.flop or float("nan")) / median / 1e12,
            "GB/s": (cell.nbytes or float("nan")) / median / 1e9,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def bench_command(preset_name: str, device: str, backends: Sequence[str], samples: int) -> str:
    """The table that ``omni-kv bench`` prints, and where it was measured.

    Raises:
        ValueError: if there is no such preset, or a backend cannot be used.
    """
    geometry = preset(preset_name)
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"no device {device!r} here; take --device cpu --preset tiny")
    chosen = [
        choose_backend(name, for_backend(geometry, name), device) for name in backends or ("auto",)
    ]
    table = bench_table(measure_pieces(geometry, device, chosen, samples)).round(3)
    label = provenance(device, "omni-kv bench").label.replace("recorded on ", "")
    return f"{table.to_string()}\n{geometry.name}, {label}"
