"""Experiments on one layer: compile it over a pool layout, in memory whose surroundings are known.

``run_layer`` is what happens *inside* a child process and may crash it; ``isolated_layer`` is what
to call from a notebook or a test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Layout, Pools, make_pools
from omni_kv.model.rollout import random_text, window_of_chunk
from omni_kv.model.transformer import make_model, rope_3d
from omni_kv.sandbox.compiler import compile_once
from omni_kv.sandbox.memory import Region, map_region
from omni_kv.sandbox.process import (
    Outcome,
    graph_caches_off,
    run_all,
    run_dealt,
    run_forked,
    run_isolated,
)

Memory = Literal["guard after", "guard before", "neighbour", "default", "expandable segments"]
Origin = Literal["right", "neighbour", "keys", "other"]


@dataclass(frozen=True)
class LayerCase:
    """What to run.

    Attributes:
        geometry: the sizes; one layer of it is run.
        layout: how K and V lie in memory.
        memory: ``guard after`` ends each allocation at an unmapped page, ``guard before`` begins it
            at one, ``neighbour`` surrounds it with values that occur nowhere else. ``default`` is
            torch's allocator as it comes; on CUDA, ``expandable segments`` is that setting of it.
        dynamic: what ``torch.compile(dynamic=...)`` gets.
        seed: of weights, inputs and pool contents.
        device: where.
        static_address: whether the pools are marked with ``torch._dynamo.mark_static_address``.
    """

    geometry: Geometry
    layout: Layout
    memory: Memory
    dynamic: bool = False
    seed: int = 0
    device: str = "cpu"
    static_address: bool = False

    def __post_init__(self) -> None:
        known = get_args(Memory)
        fits = known[:4] if self.device == "cpu" else known
        if self.memory not in fits:
            raise ValueError(
                f"memory {self.memory!r} is not to be had on {self.device}; known: "
                + ", ".join(fits)
            )

    @property
    def label(self) -> str:
        """A short name, for tables and figures."""
        parts: list[str] = [self.layout, self.memory]
        parts += ["dynamic shapes"] * self.dynamic + ["static address"] * self.static_address
        return ", ".join(parts)


@dataclass(frozen=True)
class LayerRun:
    """What a compiled layer did, held against the same layer run eagerly on equal pools.

    A row is one slot of a pool: ``(num_kv_heads, head_dim)`` elements.

    Attributes:
        rows: slots of the pool.
        rows_written: slots that the op was asked to write.
        key_rows_wrong: slots of K that differ from the eager run.
        value_origins: for each slot of V, whether it is right, and else whose values it holds: the
            allocation's neighbour, the same slot of K, or something else.
        output_error: largest absolute difference of the layer's output, NaN if it is not a number.
        tolerance: the difference that rounding may explain, for this dtype at unit variance.
    """

    rows: int
    rows_written: int
    key_rows_wrong: int
    value_origins: tuple[Origin, ...]
    output_error: float
    tolerance: float

    @property
    def value_rows_wrong(self) -> int:
        """Slots of V that differ from the eager run."""
        return self.rows - self.value_origins.count("right")

    @property
    def right(self) -> bool:
        """Whether output and both pools agree with the eager run."""
        return (
            not self.value_rows_wrong
            and not self.key_rows_wrong
            and self.output_error < self.tolerance
        )


def isolated_layer(case: LayerCase, **options: Any) -> Outcome[LayerRun]:
    """Run one case in a child process of its own, which may die.

    Args:
        case: what to run.
        options: passed on to ``run_isolated``: ``timeout``, ``env``, ``cache_dir``.
    """
    env = dict(options.pop("env", None) or {})
    if case.memory == "expandable segments":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return run_isolated(run_layer, case, env=env, **options)


def isolated_layers(
    cases: Sequence[LayerCase], *, keep_graphs: bool = False
) -> list[Outcome[LayerRun]]:
    """Run several cases, each in a process of its own, and return outcomes in order.

    On a CPU two child processes import torch once each and fork for every case, without a look at
    the graphs that other cases left in the compile cache. On a GPU, which a fork cannot use, each
    case has a child process of its own, one after the other, since a pool may fill the card.

    Args:
        cases: what to run.
        keep_graphs: whether all have one compile cache, so that a case finds what those before it
            compiled.
    """
    if all(case.device == "cpu" for case in cases):
        fork = partial(_fork_for_each, keep_graphs=keep_graphs)
        return run_dealt(fork, cases, workers=1 if keep_graphs else 2)
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as cache:
        options = {"cache_dir": cache} if keep_graphs else {}
        return [isolated_layer(case, **options) for case in cases]


def _fork_for_each(cases: Sequence[LayerCase], keep_graphs: bool) -> list[Outcome[LayerRun]]:
    """Run each case in a fork; with ``keep_graphs`` one finds what those before it compiled."""
    torch.set_num_threads(1)
    compile_once()
    with nullcontext() if keep_graphs else graph_caches_off():
        return [run_forked(partial(run_layer, case)) for case in cases]


def crash_cases(geometry: Geometry, device: str = "cpu", seed: int = 0) -> list[LayerCase]:
    """The cases that reproduce the pull request's crash, and their controls.

    An unmapped page stands in for what may lie behind a pool, and a neighbour of known values for
    the case that nothing unmapped is near.
    """
    settings: list[tuple[Memory, bool]] = [
        ("guard after", False),
        ("neighbour", False),
        ("neighbour", True),
    ]
    return [
        LayerCase(geometry, layout, memory, dynamic, seed, device)
        for layout in get_args(Layout)
        for memory, dynamic in settings
    ]


def stale_cache(
    geometry: Geometry, seed: int = 0, device: str = "cpu"
) -> dict[str, Outcome[LayerRun]]:
    """Run separate pools with the compile cache that shared halves left behind.

    Every run is a process of its own that has compiled nothing of this.

    Args:
        geometry: the sizes.
        seed: of weights, inputs and pool contents.
        device: where.

    Returns:
        Outcomes by label. The first fills the cache; the last has a fresh one, for comparison.
    """
    plain = LayerCase(geometry, "shared", "neighbour", seed=seed, device=device)
    after = [replace(plain, layout="separate", memory=memory) for memory in get_args(Memory)[:3]]
    one_cache = partial(isolated_layers, [plain, *after], keep_graphs=True)
    fresh = partial(isolated_layers, after[-1:])
    (filled, *stale), (anew,) = run_all([one_cache, fresh])
    outcomes = {f"{plain.label}: fills the cache": filled}
    outcomes |= {f"{c.label}: stale cache": o for c, o in zip(after, stale, strict=True)}
    return outcomes | {f"{after[-1].label}: fresh cache": anew}


def summary(outcome: Outcome[LayerRun]) -> dict[str, Any]:
    """What matters of an outcome, in plain JSON types, free of times, paths and rounding."""
    if outcome.value is None:
        return {"ended": outcome.describe()}
    run = outcome.value
    wrong = {o: run.value_origins.count(o) for o in ("neighbour", "keys", "other")}
    return {
        "ended": outcome.describe(),
        "output": "agrees with eager" if run.output_error < run.tolerance else "differs from eager",
        "key rows wrong": f"{run.key_rows_wrong} of {run.rows}",
        "value rows wrong": f"{run.value_rows_wrong} of {run.rows}",
        "their values": {origin: count for origin, count in wrong.items() if count},
    }


def layer_call(
    geometry: Geometry, seed: int = 0, device: torch.device | str = "cpu", backend: str = "auto"
) -> tuple[torch.nn.Module, Callable[[Pools], tuple[Any, ...]]]:
    """One layer of the model, and a function from pools to the arguments of its ``forward``.

    The arguments are those of a chunk that sees the full window and wraps round in it.
    """
    g = geometry.replace(num_layers=1)
    model = make_model(g, seed=seed, device=device, backend=backend)
    block: torch.nn.Module = model.blocks[0]
    chunk = g.first_full_chunk + 1
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(
        g.tokens_per_chunk, g.dim, generator=generator, device=device, dtype=g.torch_dtype
    )
    timestep = torch.randn(6, g.dim, generator=generator, device=device, dtype=g.torch_dtype)
    text = model.text_kv(random_text(g, seed, device))[0]
    rope = rope_3d(g, chunk * g.frames_per_chunk, device)
    window = window_of_chunk(g, chunk, device=device)

    def arguments(pools: Pools) -> tuple[Any, ...]:
        return x, timestep, text, rope, pools.key_slots(0), pools.value_slots(0), window

    return block, arguments


def run_layer(case: LayerCase) -> LayerRun:
    """Run a layer eagerly and compiled on equal pools in like memory, and compare.

    Call it through ``isolated_layer``: where the compiled code reads out of bounds, this kills the
    process.
    """
    with torch.no_grad():
        g = case.geometry.replace(num_layers=1)
        block, arguments = layer_call(g, case.seed, case.device)
        eager, _ = _pools_in(case, g)
        pools, regions = _pools_in(case, g)
        expected = block(*arguments(eager))
        inputs = arguments(pools)
        if case.static_address:
            for pool in inputs[4:6]:
                torch._dynamo.mark_static_address(pool)
        out = torch.compile(block, dynamic=case.dynamic)(*inputs)
    rows_written = inputs[-1].slot_mapping.numel()
    keys_right = _same_rows(pools.key_slots(0), eager.key_slots(0))
    return LayerRun(
        rows=g.num_slots,
        rows_written=rows_written,
        key_rows_wrong=int((~keys_right).sum()),
        value_origins=_origins(pools, eager, regions[-1]),
        output_error=float((out - expected).abs().max()),
        tolerance=1e-3 if out.dtype == torch.float32 else 0.1,
    )


def _pools_in(case: LayerCase, geometry: Geometry) -> tuple[Pools, list[Region]]:
    """Pools in the memory that the case asks for, with the same random contents each time."""
    regions: list[Region] = []

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if case.memory in ("default", "expandable segments"):
            nothing = torch.empty(0, dtype=dtype, device=case.device)
            tensor = torch.zeros(shape, dtype=dtype, device=case.device)
            region = Region(nothing, tensor, nothing)
        elif case.memory == "neighbour":
            room = 2 * geometry.pool_numel
            region = map_region(shape, dtype, before=room, after=room, device=case.device)
            # Every element has a value of its own, far from what the model computes.
            for sign, neighbour in ((-1, region.before), (1, region.after)):
                neighbour.copy_(sign * (1_000 + torch.arange(neighbour.numel())))
        else:
            # Only one side is unmapped; on the other a stray read finds zeros, on every machine.
            room = 2 * geometry.pool_numel
            if case.memory == "guard after":
                region = map_region(shape, dtype, before=room, device=case.device)
            else:
                region = map_region(shape, dtype, guard="before", after=room, device=case.device)
        regions.append(region)
        return region.tensor

    pools = make_pools(geometry, case.layout, allocate=allocate)
    generator = torch.Generator().manual_seed(case.seed + 1)
    for cache in (pools.key_cache(0), pools.value_cache(0)):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return pools, regions


def _same_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which slots agree, up to rounding: ``(num_slots,)`` bool."""
    tolerance = 1e-4 if a.dtype == torch.float32 else 3e-2
    return torch.isclose(a, b, rtol=tolerance, atol=tolerance).flatten(1).all(1)


def _origins(pools: Pools, eager: Pools, region: Region) -> tuple[Origin, ...]:
    """For each slot of V, where its values come from."""
    value, key = pools.value_slots(0), pools.key_slots(0)
    foreign = torch.isin(value, torch.cat([region.before, region.after])).flatten(1).all(1)
    origins: list[Origin] = ["other"] * value.shape[0]
    checks: tuple[tuple[Origin, torch.Tensor], ...] = (
        ("keys", _same_rows(value, key)),
        ("neighbour", foreign),
        ("right", _same_rows(value, eager.value_slots(0))),
    )
    for origin, rows in checks:
        for row in rows.nonzero().flatten().tolist():
            origins[row] = origin
    return tuple(origins)
