"""What share of compiling the functions take that the candidate fixes change, with and without.

Compile times scatter by more than a fix costs. What a fix costs is spent in the functions that it
changes, so these are profiled: that resolves parts of a thousandth. Where the graph is the same
with and without, as over separate pools, nothing else can differ.
"""

from __future__ import annotations

import ast
import contextlib
import cProfile
import functools
import gc
import pstats
from collections.abc import Iterator

import torch

from omni_kv.evidence.cells import Strict, Timing
from omni_kv.evidence.compile_times import WITHOUT, share_name
from omni_kv.experiments.gpu.compile_time import GRAPHS, WITH, fitting, graph_call
from omni_kv.experiments.gpu.plan import Plan, Unit
from omni_kv.experiments.gpu.step import for_backend
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Layout
from omni_kv.sandbox.process import run_isolated
from omni_kv.upstream import installed
from omni_kv.upstream.install import definitions, fixed_sources

#: Compilations of each kind that are profiled, of a large graph fewer.
ROUNDS = 3

#: A function in a profile: module, name, first line.
Function = tuple[str, str, int]


def compile_share_units(plan: Plan) -> list[Unit]:
    """One unit a graph."""
    return [Unit(graph, functools.partial(_shares, plan, graph), alone=True) for graph in GRAPHS]


def _shares(plan: Plan, graph: str) -> list[Strict]:
    layers, layout, every = GRAPHS[graph]
    rounds = max(1, ROUNDS // every)
    arguments = (plan.geometry, plan.device, plan.backends[-1], layers, layout, rounds)
    found = run_isolated(profiled_seconds, *arguments, timeout=1800).unwrap()
    return [
        Timing(name=share_name(graph, variant, part), seconds=seconds)
        for (variant, part), seconds in found.items()
    ]


def profiled_seconds(
    geometry: Geometry, device: str, backend: str, layers: int, layout: Layout, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Profile compilations with every fix and without, in turns; for a child process.

    The caches of AOTAutograd are off. Inductor's are emptied before each compilation, so that the
    key is computed.

    Returns:
        Seconds under the profiler, by variant and part: ``changed`` is spent in the functions that
        a fix changes and in what they call, ``all`` is the whole.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.codecache import FxGraphCache

    torch.set_num_threads(1)
    g = for_backend(geometry, backend).replace(num_layers=layers)
    graphs = {"fx_graph_cache": True, "fx_graph_remote_cache": False}
    aot = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    changed = changed_functions()
    found: dict[tuple[str, str], list[float]] = {}
    with torch.no_grad(), inductor_config.patch(graphs), functorch_config.patch(aot):
        fn, inputs = graph_call(g, device, backend, layers, layout)
        for number in range(rounds + 1):  # the first one imports, and builds kernels
            for variant in (WITHOUT, WITH):
                FxGraphCache.clear()
                torch.compiler.reset()
                gc.collect()
                with contextlib.ExitStack() as stack:
                    for name in fitting() if variant == WITH else ():
                        stack.enter_context(installed(name))
                    compiled, profile = torch.compile(fn), cProfile.Profile()
                    profile.runcall(compiled, *inputs)
                if number:
                    own, whole = seconds_in(profile, changed)
                    found.setdefault((variant, "changed"), []).append(own)
                    found.setdefault((variant, "all"), []).append(whole)
    return found


def changed_functions() -> set[Function]:
    """The functions that the fixes which fit here change or add, before and after."""
    found: set[Function] = set()
    for fix in fitting():
        for module, (old, new) in fixed_sources(fix).items():
            before, after = (set(_functions(module, source)) for source in (old, new))
            # A function that only moved has another line, and the same text.
            moved = {text for *_, text in before} & {text for *_, text in after}
            found |= {(m, n, line) for m, n, line, text in before ^ after if text not in moved}
    return found


def _functions(module: str, source: str) -> Iterator[tuple[str, str, int, str]]:
    for _, _, node in definitions(source):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        yield module, node.name, first, ast.dump(node)


def seconds_in(profile: cProfile.Profile, functions: set[Function]) -> tuple[float, float]:
    """Seconds in these functions, with what they call, and in all; no call counts twice."""
    stats = pstats.Stats(profile)

    def known(entry: tuple[str, int, str]) -> bool:
        file, line, name = entry
        return any(
            (name, line) == (n, first) and (file.startswith(f"{m} ") or _is_file(file, m))
            for m, n, first in functions
        )

    own = sum(
        seconds
        for entry, (*_, callers) in stats.stats.items()  # type: ignore[attr-defined]
        if known(entry)
        for caller, (_, _, _, seconds) in callers.items()
        if not known(caller)
    )
    return own, stats.total_tt  # type: ignore[attr-defined]


def _is_file(file: str, module: str) -> bool:
    return file.endswith("/" + module.replace(".", "/") + ".py")
