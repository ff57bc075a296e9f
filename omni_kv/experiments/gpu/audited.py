"""Callables to audit on a GPU: the model's layer, kernels over halves and over intermediates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from omni_kv.audits.audit import audit
from omni_kv.evidence.cells import AuditRun
from omni_kv.experiments.layer import layer_call
from omni_kv.model.geometry import preset
from omni_kv.model.pools import Layout, make_pools

Case = tuple[Callable[..., Any], tuple[Any, ...]]


@triton.jit
def _write_rows(rows, slots, keys, values, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one row into K and into V."""
    column = tl.arange(0, WIDTH)
    row = tl.load(rows + tl.program_id(0) * WIDTH + column)
    slot = tl.load(slots + tl.program_id(0))
    tl.store(keys + slot * WIDTH + column, row)
    tl.store(values + slot * WIDTH + column, -row)


@triton.jit
def _negate(part, stride, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Change the sign of one row of a view."""
    place = part + tl.program_id(0) * stride + tl.arange(0, WIDTH)
    tl.store(place, -tl.load(place))


def write_both(
    rows: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Write rows ``(tokens, 64)`` into two pools ``(slots, 64)`` with a Triton kernel."""
    _write_rows[(rows.shape[0],)](rows, slots, keys, values, WIDTH=64)
    return rows * 2


def negate_part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a kernel write to a view of an intermediate: x ``(16, 8)``."""
    doubled = x * 2
    part = doubled[:, 4:]
    _negate[(x.shape[0],)](part, part.stride(0), WIDTH=4)
    return doubled, part + 1


def _layer(geometry: str, layout: Layout) -> Case:
    block, arguments = layer_call(preset(geometry), device="cuda")
    pools = make_pools(preset(geometry).replace(num_layers=1), layout=layout, device="cuda")
    return block, arguments(pools)


def _kernel(shared: bool) -> Case:
    kv = torch.randn(2, 128, 64, device="cuda")
    keys, values = (kv[0], kv[1]) if shared else (kv[0].clone(), kv[1].clone())
    slots = torch.arange(3, 12, 3, device="cuda")
    return write_both, (torch.randn(3, 64, device="cuda"), slots, keys, values)


def _intermediate() -> Case:
    return negate_part, (torch.randn(16, 8, device="cuda"),)


#: What is audited, by name.
CASES: dict[str, Callable[[], Case]] = {
    "layer, tiny, shared": partial(_layer, "tiny", "shared"),
    "layer, tiny, separate": partial(_layer, "tiny", "separate"),
    "layer, lingbot-480x832, shared": partial(_layer, "lingbot-480x832", "shared"),
    "layer, lingbot-480x832, separate": partial(_layer, "lingbot-480x832", "separate"),
    "Triton kernel over halves": partial(_kernel, True),
    "Triton kernel over two tensors": partial(_kernel, False),
    "Triton kernel over a view of an intermediate": _intermediate,
}


def audit_run(name: str) -> AuditRun:
    """Audit one of the cases, with everything that the audit can do."""
    torch.manual_seed(0)
    with torch.no_grad():
        report = audit(*CASES[name]())
    return AuditRun(
        name=name,
        verdict=report.verdict,
        sentence=report.sentence,
        findings=report.findings,
        runs={
            f"{compared.label}, {run.memory}": f"{run.result} {run.how}".strip()
            for compared in report.comparisons
            for run in compared.runs
        },
        comparisons={c.label: f"{c.result} {c.how}".strip() for c in report.comparisons},
        seconds=round(report.seconds, 1),
    )
