"""How long compiling takes with the candidate fixes of the compiler, and without.

All fixes that fit the installed torch are in place together: what all cost bounds what one costs.

A child process compiles every variant once, which is not counted: imports are done then, and C++
or Triton kernels are built. After that it compiles in rounds, with empty graph caches; a round
takes one sample of each variant, and a pair is what two variants took in one round. So the time of
building kernels does not hide what a fix costs the compiler.
``evidence.compile_times`` computes ratios.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from omni_kv.evidence.cells import Strict, Timing
from omni_kv.evidence.compile_times import CONTROL, WITHOUT, sample_name
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.experiments.gpu.step import FullStep, for_backend
from omni_kv.experiments.layer import layer_call
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Layout, Pools, make_pools
from omni_kv.model.transformer import make_model
from omni_kv.sandbox.process import graph_caches_off, run_isolated
from omni_kv.upstream import installed
from omni_kv.upstream.fixes import FIXES
from omni_kv.upstream.install import fixed_sources

MANY = 40
#: What is compiled: layers in one graph, how the pools lie, and one round in how many.
GRAPHS: dict[str, tuple[int, Layout, int]] = {
    "1 layer, separate": (1, "separate", 1),
    "1 layer, shared": (1, "shared", 1),
    # Over halves the model's graph does not run without a fix on every release.
    f"{MANY} layers, separate": (MANY, "separate", 4),
}
#: The variant with every fix.
WITH = "every fix"
VARIANTS = (WITHOUT, CONTROL, WITH)
#: Rounds that share a child process.
BLOCK = 8
#: From here on a machine compiles several graphs side by side.
MANY_CORES = 16


def compile_time_units(plan: Plan) -> list[Unit]:
    """One unit a graph and block of rounds.

    A unit keeps one core busy. Where there are many cores and no GPU is measured, several run side
    by side: what that does to the times, the control shows.
    """
    alone = plan.device != "cpu" or (os.cpu_count() or 1) < MANY_CORES
    units = []
    for first in range(0, plan.pairs, BLOCK):
        for graph, (_, _, every) in GRAPHS.items():
            rounds = [r for r in range(first, min(first + BLOCK, plan.pairs)) if r % every == 0]
            name = f"{graph}, rounds from {first}"
            run = functools.partial(_samples, plan, graph, rounds)
            units.append(Unit(name, run, alone=alone))
    return units


def compile_seconds(
    geometry: Geometry, device: str, backend: str, layers: int, layout: Layout, rounds: list[int]
) -> list[tuple[int, str, float, float]]:
    """Compile layers of the model as one graph and run them once, in rounds; for a child process.

    Args:
        geometry: the sizes of a layer.
        device: where it runs.
        backend: attention backend.
        layers: how many make up the graph. One stands alone, several are the model.
        layout: how K and V lie.
        rounds: their numbers; each begins with another variant.

    Returns:
        For each sample the round, the variant, and seconds by the clock and of processor time,
        from the call of the compiled function to its end.
    """
    torch.set_num_threads(1)
    g = for_backend(geometry, backend).replace(num_layers=layers)
    samples = []
    with torch.no_grad(), graph_caches_off():
        fn, inputs = graph_call(g, device, backend, layers, layout)
        for variant in VARIANTS:
            _taken(fn, inputs, device, variant)
        for number in rounds:
            names = deque(VARIANTS)
            names.rotate(number)
            samples += [(number, name, *_taken(fn, inputs, device, name)) for name in names]
    return samples


def graph_call(
    geometry: Geometry, device: str, backend: str, layers: int, layout: Layout
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What is compiled, a layer or the model, and its inputs."""
    pools = _pools(geometry, layout, device)
    if layers == 1:
        block, arguments = layer_call(geometry, device=device, backend=backend)
        return block, arguments(pools)
    model = make_model(geometry, backend=backend, device=device)
    return model, FullStep(model, pools, device).inputs


def _taken(
    fn: Callable[..., Any], inputs: tuple[Any, ...], device: str, variant: str
) -> tuple[float, float]:
    """Seconds by the clock and of processor time that a first compiled call takes."""
    torch.compiler.reset()
    gc.collect()
    with contextlib.ExitStack() as stack:
        for name in fitting() if variant == WITH else ():
            stack.enter_context(installed(name))
        compiled = torch.compile(fn)
        with _clock() as taken:
            compiled(*inputs)
            if device != "cpu":
                torch.cuda.synchronize()
    return taken[0], taken[1]


def _pools(geometry: Geometry, layout: Layout, device: str) -> Pools:
    pools = make_pools(geometry, layout, device=device)
    if layout == "separate":
        return pools
    # V is the first half: its clone, if there is one, reads nothing outside on any release.
    return Pools(layout, pools.values, pools.keys)


def fitting() -> list[str]:
    """The fixes that fit the installed torch."""
    fits = []
    for name in FIXES:
        with contextlib.suppress(RuntimeError):
            fixed_sources(name)
            fits.append(name)
    return fits


@contextlib.contextmanager
def _clock() -> Iterator[list[float]]:
    """Fills the list with the seconds that the block takes, by the clock and of the processor."""
    taken: list[float] = []
    start, before = time.perf_counter(), os.times()
    yield taken
    after = os.times()
    taken += [time.perf_counter() - start, sum(after[:4]) - sum(before[:4])]


def _samples(plan: Plan, graph: str, rounds: list[int]) -> list[Strict]:
    arguments = (plan.geometry, plan.device, plan.backends[-1], *GRAPHS[graph][:2], rounds)
    timeout = 300.0 + 120.0 * len(VARIANTS) * len(rounds)
    samples = run_isolated(compile_seconds, *arguments, timeout=timeout).unwrap()
    return [
        Timing(name=sample_name(graph, number, variant), seconds=[seconds], cpu_seconds=[processor])
        for number, variant, seconds, processor in samples
    ]
