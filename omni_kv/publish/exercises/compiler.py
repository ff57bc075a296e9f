"""What the exercises of notebooks 03 to 05 measure, inside the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from omni_kv.experiments.cause import call_op, inputs_for, measure, placements, predict


def one_allocation(
    answer: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[bool, str]:
    """Whether two pools share one storage, do not overlap, and are both written in place."""
    from omni_kv.audits.audit import audit

    slots, heads, dim = 64, 2, 8
    key, value = answer(slots, heads, dim)
    shapes = [tuple(pool.shape) for pool in (key, value)]
    if shapes != [(slots, heads, dim)] * 2:
        return False, f"the pools have the shapes {shapes}, not (64, 2, 8) twice"
    if key.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
        return False, "the pools have two storages"
    key.fill_(0.0)
    value.fill_(1.0)
    if key.any():
        return False, "the pools overlap: filling V changed K"
    with torch.no_grad():
        inputs = inputs_for(placements((slots, heads, dim))["separate"])
        report = audit(call_op, (key, value, inputs), run=False, dynamic=False)
    if report.clones:
        told = ", ".join(f"{a.name} is cloned: {a.cause}" for a in report.clones)
        return False, told
    merged = any(alias.merged for alias in report.shapes[0].aliases)
    how = "they reach the compiler as one synthetic base" if merged else "each is a base of its own"
    return True, f"one storage, and both pools are written in place; {how}"


def first_stage(answer: str) -> tuple[bool, str]:
    """Whether this is the first stage whose graph copies a pool, for shared halves."""
    from omni_kv.lens.capture import capture

    kv = torch.zeros(2, 64, 2, 8)
    with torch.no_grad():
        inputs = inputs_for(placements((64, 2, 8))["separate"])
        graph = capture(call_op, kv[0], kv[1], inputs, until="graph").graphs[0]
    stages = graph.stages()
    if answer not in stages:
        return False, f"the stages are {', '.join(stages)}"
    clones = {
        name: len(g.find_nodes(op="call_function", target=torch.ops.aten.clone.default))
        for name, g in stages.items()
    }
    first = next((name for name, count in clones.items() if count), None)
    return answer == first, f"the graph of this stage has {clones[answer]} clones"


def spare_room(answer: int) -> tuple[bool, str]:
    """Put so many elements of spare room behind V, and read next to an unmapped page."""
    halves = placements((64, 2, 8))["halves, K first"]
    roomy = replace(halves, storage_numel=halves.storage_numel + answer)
    outside = predict(roomy, "data pointer").outside
    less = replace(halves, storage_numel=roomy.storage_numel - 1)
    (measured,) = measure([roomy])
    if outside:
        return (
            False,
            f"a kernel that counts from V's pointer still reads {outside} elements outside",
        )
    if not predict(less, "data pointer").outside:
        return False, "that is enough, but one element less would do as well"
    return measured.confirms(), "nothing is read outside, and the run next to the page agrees"
