"""How long compiling takes with the candidate fixes of the compiler, and without.

All fixes that fit the installed torch are in place together: what all cost bounds what one costs.

Every sample is a child process of its own with empty caches. A round takes one sample of each
variant; a pair is what two variants took in one round. ``evidence.compile_times`` computes ratios.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator

import torch

from omni_kv.evidence.cells import Strict, Timing
from omni_kv.evidence.compile_times import CONTROL, WITHOUT, sample_name
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.experiments.gpu.step import FullStep, for_backend
from omni_kv.experiments.layer import layer_call
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Layout, Pools, make_pools
from omni_kv.model.transformer import make_model
from omni_kv.sandbox.process import run_isolated
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
#: A child compiles on one core; as many leave each a core with its cache.
_LANES = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))


VARIANTS = (WITHOUT, CONTROL, WITH)


def compile_time_units(plan: Plan) -> list[Unit]:
    """One unit a sample, round after round; each round begins with another variant."""
    names = deque(VARIANTS)
    units = []
    for number in range(plan.pairs):
        for graph, (_, _, every) in GRAPHS.items():
            for variant in names if number % every == 0 else ():
                name = sample_name(graph, number, variant)
                units.append(Unit(name, functools.partial(_sample, plan, graph, variant, name)))
        names.rotate()
    return units


def compile_seconds(
    geometry: Geometry, device: str, backend: str, layers: int, layout: Layout, variant: str
) -> tuple[float, float]:
    """Compile layers of the model as one graph and run them once; for a child process.

    Args:
        geometry: the sizes of a layer.
        device: where it runs.
        backend: attention backend.
        layers: how many make up the graph. One stands alone, several are the model.
        layout: how K and V lie.
        variant: one of ``VARIANTS``.

    Returns:
        Seconds by the clock, and of processor time, from the call of the compiled function to its
        end.
    """
    torch.set_num_threads(1)
    g = for_backend(geometry, backend).replace(num_layers=layers)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for name in fitting() if variant == WITH else ():
            stack.enter_context(installed(name))
        pools = _pools(g, layout, device)
        if layers == 1:
            block, arguments = layer_call(g, device=device, backend=backend)
            compiled, inputs = torch.compile(block), arguments(pools)
        else:
            model = make_model(g, backend=backend, device=device)
            compiled, inputs = torch.compile(model), FullStep(model, pools, device).inputs
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


def _sample(plan: Plan, graph: str, variant: str, name: str) -> list[Strict]:
    _warm_up(plan)
    with _LANES:
        seconds, processor = _in_child(plan, graph, variant)
    return [Timing(name=name, seconds=[seconds], cpu_seconds=[processor])]


def _in_child(plan: Plan, graph: str, variant: str) -> tuple[float, float]:
    arguments = (plan.geometry, plan.device, plan.backends[-1], *GRAPHS[graph][:2], variant)
    return run_isolated(compile_seconds, *arguments, timeout=540.0).unwrap()


_WARM: set[str] = set()
_WARMING = threading.Lock()


def _warm_up(plan: Plan) -> None:
    """What children share, such as precompiled headers, is there before the first one counts."""
    with _WARMING:
        if plan.device not in _WARM:
            _in_child(plan, next(iter(GRAPHS)), WITHOUT)
            _WARM.add(plan.device)
