"""The pull request's five hypotheses, each tried where it forbids what is seen.

A hypothesis says that the fault comes from something. Take that something away: if the compiler
still makes the clone, and the clone still does what it does, then the hypothesis is not the cause.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch

from omni_kv.audits.audit import audit
from omni_kv.evidence.cells import CrashRun
from omni_kv.evidence.records import EvidenceError, load
from omni_kv.experiments.layer import LayerCase, LayerRun, isolated_layers, layer_call
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import make_pools
from omni_kv.sandbox.process import Outcome

#: Stages of a compiled call, in order, as the figure of the hypotheses shows them.
STAGES = (
    "caching allocator",
    "Dynamo: guards, static or dynamic shapes",
    "AOTAutograd: functionalization",
    "post-grad passes: reinplace, decomposition",
    "Inductor: lowering of as_strided",
    "code generation: index type",
    "Triton: choosing a configuration",
)

#: Where the clone is decided on, and where its address goes wrong.
DECIDED_AT, ADDRESSED_AT = STAGES[3], STAGES[4]


@dataclass(frozen=True)
class Hypothesis:
    """One explanation that the pull request names.

    Attributes:
        number: as in the pull request's list, from 1.
        claim: what it says.
        would_show: what would have to be seen if it were true, written down before the run.
        acts_at: the stage at which it could have an effect.
        changes: what to change in the plain case to take its cause away; empty if the plain case
            is already free of it.
    """

    number: int
    claim: str
    would_show: str
    acts_at: str
    changes: Mapping[str, Any]


HYPOTHESES = (
    Hypothesis(
        1,
        "blocks that the caching allocator kept from loading fp32 weights get in the way",
        "no fault where no caching allocator hands out the pool",
        STAGES[0],
        {},
    ),
    Hypothesis(
        2,
        "dynamic=True makes several Triton configurations, and one of them is bad",
        "no fault with dynamic=False",
        STAGES[6],
        {"dynamic": False},
    ),
    Hypothesis(
        3,
        "the pools' addresses are not known to be static",
        "no clone once the pools are marked with mark_static_address",
        STAGES[1],
        {"static_address": True},
    ),
    Hypothesis(
        4,
        "memory runs short while kernels are autotuned",
        "no fault with far more memory free than the pool takes",
        STAGES[6],
        {},
    ),
    Hypothesis(
        5,
        "byte offsets beyond 2 GiB overflow 32 bits",
        "no fault with a pool far smaller than 2 GiB",
        STAGES[5],
        {},
    ),
)


@dataclass(frozen=True)
class Finding:
    """What was seen with a hypothesis' cause taken away.

    Attributes:
        hypothesis: which.
        condition: in what way the run was free of the cause, with its figures.
        clone_elements: elements that the compiled layer's clone of V reads; 0 without a clone.
        outcome: how the run over shared halves ended, an unmapped page behind the pool.
    """

    hypothesis: Hypothesis
    condition: str
    clone_elements: int
    outcome: Outcome[LayerRun]

    @property
    def verdict(self) -> str:
        """``ruled out``, or ``may be the cause``: what the hypothesis forbids is there or not."""
        return "ruled out" if self.clone_elements else "may be the cause"

    def summary(self) -> dict[str, Any]:
        """The finding in plain JSON types, free of figures that differ between machines."""
        return {
            "clone of V, elements": self.clone_elements,
            "behind an unmapped page": self.outcome.describe(),
            "verdict": self.verdict,
        }


def clone_elements(geometry: Geometry, *, static_address: bool = False, device: str = "cpu") -> int:
    """Elements that the compiled layer's clone of V reads over shared halves; 0 without a clone.

    Compiles as far as the generated code, and runs nothing.
    """
    block, arguments = layer_call(geometry, device=device)
    inputs = arguments(make_pools(geometry.replace(num_layers=1), "shared", device=device))
    if static_address:
        for pool in inputs[4:6]:
            torch._dynamo.mark_static_address(pool)
    with torch.no_grad():
        report = audit(block, inputs, run=False, dynamic=False)
    return sum(a.clone.elements for a in report.clones if a.clone)


def try_hypotheses(
    geometry: Geometry, seed: int = 0, device: str = "cpu"
) -> tuple[list[Finding], dict[str, Outcome[LayerRun]]]:
    """Try the five.

    Args:
        geometry: the sizes; one layer is run.
        seed: of weights, inputs and pool contents.
        device: where.

    Returns:
        A finding for each hypothesis, and the outcomes with ``dynamic=True`` by label: the second
        hypothesis is not the cause of this fault, but dynamic shapes have faults of their own.
    """
    plain = LayerCase(geometry, "shared", "guard after", seed=seed, device=device)
    cases = {h.number: replace(plain, **h.changes) for h in HYPOTHESES}
    dynamic = [
        replace(plain, layout=layout, memory="neighbour", dynamic=True)
        for layout in ("shared", "separate")
    ]
    distinct = list(dict.fromkeys([*cases.values(), *dynamic]))
    outcomes = dict(zip(distinct, isolated_layers(distinct), strict=True))
    clones = {
        static: clone_elements(geometry, static_address=static, device=device)
        for static in (False, True)
    }

    pool = 2 * geometry.pool_nbytes
    if device == "cpu":
        source, free = "mmap", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        source, free = "the driver", torch.cuda.mem_get_info(device)[0]
    conditions = {
        1: f"pools in memory straight from {source}: no caching allocator hands them out",
        2: "dynamic=False",
        3: "both pools marked",
        4: f"{pool / 2**10:,.0f} KiB of pool, {free / 2**30:,.1f} GiB of memory free",
        5: f"the last byte of the pool is at offset {pool:,}",
    }
    findings = [
        Finding(
            h,
            conditions[h.number],
            clones[cases[h.number].static_address],
            outcomes[cases[h.number]],
        )
        for h in HYPOTHESES
    ]
    return findings, {case.label: outcomes[case] for case in dynamic}


def findings_table(findings: list[Finding]) -> pd.DataFrame:
    """The findings as a table, one row a hypothesis."""
    rows = [
        {
            "hypothesis": f.hypothesis.claim,
            "if true": f.hypothesis.would_show,
            "tried": f.condition,
            "clone of V": f"{f.clone_elements:,} elements" if f.clone_elements else "none",
            "behind an unmapped page": f.outcome.describe(),
            "verdict": f.verdict,
        }
        for f in findings
    ]
    return pd.DataFrame(rows, index=pd.Index([f.hypothesis.number for f in findings], name="no."))


def recorded_table() -> tuple[str, pd.DataFrame]:
    """The same hypotheses on a GPU, from the record: a caption and a table.

    Returns:
        Where and when it was recorded, and one row a run. Without a record, the caption says so
        and the table is empty.
    """
    try:
        record = load("hypotheses")
    except EvidenceError as error:
        return f"not recorded: {error}", pd.DataFrame()
    rows = []
    for run in record.of(CrashRun).values():
        rows.append(
            {
                "run": run.name,
                "outcome": run.outcome,
                "V rows wrong": "" if run.rows_wrong is None else f"{run.rows_wrong} of {run.rows}",
                "buffers as large as V": ", ".join(run.clones) or "none",
                "released by empty_cache": _gib(run.released_bytes),
            }
        )
    return record.provenance.label, pd.DataFrame(rows).set_index("run")


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"
