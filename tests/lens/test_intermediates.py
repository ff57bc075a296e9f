"""Mutated views of tensors that are made in the graph."""

from __future__ import annotations

import ast
import math

import audit_cases as cases
import pytest
import torch
import torch._inductor.config as inductor_config

from omni_kv.audits.findings import ops_of
from omni_kv.lens.capture import capture
from omni_kv.lens.clones import clones_of


def views(k, v, x, y, slots):
    rows = (y + 1)[8:]
    return torch.ops.audit_cases.write(k, v, (x * 2)[:, :, 4:], rows[:64], slots) + 1


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("dynamic", [None, True])
def test_views_that_are_written_in_place_are_not_called_shifted(v2, dynamic) -> None:
    k, v, slots = cases.tokens()
    args = (k, v, torch.randn(64, 2, 12), torch.randn(80, 2, 8), slots)
    with torch.no_grad(), inductor_config.patch(enable_auto_functionalized_v2=v2):
        (op,) = ops_of(capture(views, *args, dynamic=dynamic).graphs[0])
    assert [a.outcome for a in op.arguments] == ["reinplaced"] * 2
    assert not any(a.misled for a in op.arguments)


def halves(k, v, x, slots):
    both = torch.sin(x)
    return torch.ops.audit_cases.write(k, v, both[0], both[1], slots), both


def test_the_extent_of_a_clone_of_an_intermediate_is_held_against_what_the_code_allocates() -> None:
    k, v, slots = cases.tokens()
    x = torch.randn(2, 64, 2, 8)
    with torch.no_grad(), inductor_config.patch(enable_auto_functionalized_v2=False):
        graph = capture(halves, k, v, x, slots).graphs[0]
    (op,) = ops_of(graph)
    found = [a.clone for a in op.arguments if a.clone is not None]
    clones = clones_of(graph)
    assert found
    assert len(found) == len(clones)
    allocated = {c.result: c.arguments[0].text for c in graph.generated.calls if c.arguments}
    for clone, made in zip(found, clones, strict=True):
        assert clone.storage_last + 1 == math.prod(ast.literal_eval(allocated[made.read.buffer]))
        assert (clone.first, clone.last) == (made.read.first, made.read.last)
        assert clone.reads_outside == (clone.last > clone.storage_last)
