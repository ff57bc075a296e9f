"""One step of the full model with the candidate fix of the compiler: shared halves, no clone."""

from __future__ import annotations

import torch

from omni_kv.audits.findings import ops_of
from omni_kv.evidence.cells import Clones, Timing
from omni_kv.experiments.gpu.step import (
    FullStep,
    MeasuredCell,
    Thunk,
    agreement,
    ceilings,
    eagerly,
    for_backend,
    step_flop,
    take_turns,
)
from omni_kv.experiments.layer import layer_call
from omni_kv.lens.capture import capture
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import make_pools
from omni_kv.model.transformer import make_model
from omni_kv.upstream import overlap_check


def measure_overlap_check(
    geometry: Geometry, device: str, backend: str, samples: int
) -> list[MeasuredCell]:
    """One step over shared halves, compiled with the overlap check, beside separate pools.

    The model is compiled once, over shared halves; what was compiled then runs over separate pools
    too, so that the two take turns in one process with one code. That this code holds no clone is
    read from one layer's graph, with and without the check.

    Args:
        geometry: the sizes; memory for weights and two sets of pools is needed.
        device: where.
        backend: attention backend.
        samples: timed steps of each kind.
    """
    g = for_backend(geometry, backend)
    with torch.no_grad():
        cells: list[MeasuredCell] = [_clones("without the check", g, device, backend)]
        with overlap_check():
            cells.append(_clones("with the check", g, device, backend))
            model = make_model(g, backend=backend, device=device)
            model.compile_layers()
            steps = {
                layout: FullStep(model, make_pools(g, layout, device=device), device)
                for layout in ("shared", "separate")
            }
            for layout, step in steps.items():
                expected = eagerly(step)()
                assert isinstance(expected, torch.Tensor)
                cells.append(agreement(f"{layout}: compiled against eager", step(), expected))
            runs: dict[str, Thunk] = {f"compiled {layout}": step for layout, step in steps.items()}
            seconds = take_turns(
                {"eager shared": eagerly(steps["shared"]), **runs}, samples, device
            )
    cells += [
        Timing(name=f"{backend}/{name}", seconds=s, flop=step_flop(g))
        for name, s in seconds.items()
    ]
    return cells + ceilings(g, device)


def _clones(name: str, geometry: Geometry, device: str, backend: str) -> Clones:
    """What is cloned of one layer's pools, by the graph."""
    block, arguments = layer_call(geometry, device=device, backend=backend)
    pools = make_pools(geometry.replace(num_layers=1), "shared", device=device)
    seen = capture(block, *arguments(pools), until="graph")
    found = [a for graph in seen.graphs for op in ops_of(graph) for a in op.arguments if a.clone]
    return Clones(name=name, elements={a.name: a.clone.elements for a in found if a.clone})
