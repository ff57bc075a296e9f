"""The crash and the corruption at will: one small layer over memory with known surroundings."""

from __future__ import annotations

from omni_kv.evidence.cells import GuardedRun
from omni_kv.experiments.layer import LayerCase, crash_cases, isolated_layer, summary
from omni_kv.model.geometry import preset

#: Runs of each case.
REPEATS = 20


def guarded_cases(device: str) -> dict[str, LayerCase]:
    """The cases of notebook 02, by label, at the size of its preset."""
    return {case.label: case for case in crash_cases(preset("tiny"), device)}


def guarded_run(label: str, repeat: int, device: str) -> GuardedRun:
    """Run one case in a child process, with a fresh compile cache."""
    case = guarded_cases(device)[label]
    outcome = isolated_layer(case)
    run = outcome.value
    return GuardedRun(
        name=f"{label}, {repeat}",
        layout=case.layout,
        memory=case.memory,  # type: ignore[arg-type]
        dynamic=case.dynamic,
        repeat=repeat,
        ended=summary(outcome)["ended"],
        rows=run and run.rows,
        rows_written=run and run.rows_written,
        key_rows_wrong=run and run.key_rows_wrong,
        value_rows_wrong=run and run.value_rows_wrong,
        value_rows_neighbour=run and run.value_origins.count("neighbour"),
        value_rows_keys=run and run.value_origins.count("keys"),
        agrees=run and run.right,
        seconds=outcome.seconds,
    )
