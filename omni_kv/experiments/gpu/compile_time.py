"""How long compiling takes with each candidate fix of the compiler, and without.

Every sample is a child process of its own with empty caches. A round takes one sample of each
variant; a pair is what two variants took in one round. ``evidence.compile_times`` computes ratios.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
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
#: What is compiled: layers in one graph, and how the pools lie.
GRAPHS: dict[str, tuple[int, Layout]] = {
    f"{count} layer{'s' * (count > 1)}, {layout}": (count, layout)
    for count in (1, MANY)
    for layout in ("separate", "shared")
}
#: A child compiles on one core; as many leave each a core with its cache.
_LANES = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))


def variants() -> list[str]:
    """No fix, no fix again, and every fix that fits the installed torch."""
    fits = []
    for name in FIXES:
        with contextlib.suppress(RuntimeError):
            fixed_sources(name)
            fits.append(name)
    return [WITHOUT, CONTROL, *fits]


def compile_time_units(plan: Plan) -> list[Unit]:
    """One unit a sample, round after round; each round begins with another variant."""
    names = variants()
    return [
        Unit(sample, functools.partial(_sample, plan, graph, variant, sample))
        for number in range(plan.pairs)
        for graph in GRAPHS
        for variant in (names[(number + i) % len(names)] for i in range(len(names)))
        for sample in [sample_name(graph, number, variant)]
    ]


def compile_seconds(
    geometry: Geometry, device: str, backend: str, layers: int, layout: Layout, fix: str
) -> tuple[float, float]:
    """Compile layers of the model as one graph and run them once; for a child process.

    Args:
        geometry: the sizes of a layer.
        device: where it runs.
        backend: attention backend.
        layers: how many make up the graph. One stands alone, several are the model.
        layout: how K and V lie.
        fix: name of the fix that is in place, ``without`` or ``control`` for none.

    Returns:
        Seconds by the clock, and of processor time, from the call of the compiled function to its
        end.
    """
    torch.set_num_threads(1)
    g = for_backend(geometry, backend).replace(num_layers=layers)
    none = fix in (WITHOUT, CONTROL)
    with torch.no_grad(), contextlib.nullcontext() if none else installed(fix):
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
    arguments = (plan.geometry, plan.device, plan.backends[-1], *GRAPHS[graph], variant)
    return run_isolated(compile_seconds, *arguments, timeout=540.0).unwrap()


_WARM: set[str] = set()
_WARMING = threading.Lock()


def _warm_up(plan: Plan) -> None:
    """What children share, such as precompiled headers, is there before the first one counts."""
    with _WARMING:
        if plan.device not in _WARM:
            _in_child(plan, next(iter(GRAPHS)), WITHOUT)
            _WARM.add(plan.device)
