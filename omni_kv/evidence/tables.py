"""Tables and verdicts from GPU records. Every figure is computed here, from raw samples."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from omni_kv.evidence.cells import (
    Agreement,
    Clones,
    CrashRun,
    GuardedRun,
    Profile,
    RolloutRun,
    SanitizerRun,
    Timing,
)
from omni_kv.evidence.records import Record
from omni_kv.model.geometry import Geometry

#: The pull request's measurements on one RTX PRO 6000 (sm_120), as published: seconds a chunk over
#: chunks 6 to 9, and real-time factor. None where it crashed.
PUBLISHED: dict[str, tuple[float, float] | None] = {
    "eager": (4.049, 5.40),
    "compiled, before this change": None,
    "compiled, after": (3.668, 4.89),
}

#: Parts of a step by what their kernels' names hold; the first that fits counts.
PARTS: dict[str, str] = {
    "clone of K and V": r"as_strided_clone",
    "copy back over V": r"as_strided_copy",
    "norms, rotation, gates, GELU": r"^triton_",
    "attention": r"flash|sdpa|fmha|scaled_dot",
    "matrix products": r"nvjet|gemm|cublas|addmm|aten::mm",
    "slot write": r"index_copy|index_elementwise",
    "other": r"",
}


#: What stands in place of the times of a run whose results are wrong.
WRONG = "wrong"

#: The parts that hold in such a run, too: a copy moves the same bytes whatever stands in them.
COPIES = ("clone of K and V", "copy back over V")


def crash_table(record: Record) -> pd.DataFrame:
    """How each compiled layer ended, and how much of V was lost."""
    rows = {}
    for run in record.of(CrashRun).values():
        rows[run.name] = {
            "outcome": run.outcome,
            "rows of V lost": _share(run.rows_wrong, run.rows),
            "of them a neighbour's": _share(run.rows_neighbour, run.rows),
            "flat buffers": ", ".join(run.clones) or "none",
            "configurations timed": max(
                (str(n) for name, n in run.configs.items() if "clone" in name), default=""
            ),
            "raised at": run.frames[-1] if run.frames else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def prediction_table(record: Record) -> pd.DataFrame:
    """What was predicted just before the kernel's first launch, and what came."""
    rows = {}
    for run in record.of(CrashRun).values():
        rows[run.name] = {
            "reads behind V": _mib(run.overread_bytes),
            "mapped behind V": _mib(run.mapped_bytes),
            "a twin could read it": "" if run.readable is None else str(run.readable).lower(),
            "what lies there": run.behind or "",
            "by the segments": run.predicted_by_segments or run.predicted or "",
            "predicted": run.predicted or "",
            "outcome": run.outcome,
            "rows of V lost": _share(run.rows_wrong, run.rows),
            "of them a neighbour's": _share(run.rows_neighbour, run.rows),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def stack_of(record: Record, name: str, last: int = 8) -> list[str]:
    """The innermost frames behind a run's exception, outermost first."""
    return record.of(CrashRun)[name].frames[-last:]


def sanitizer_table(record: Record) -> pd.Series:
    """compute-sanitizer's first report."""
    (run,) = record.of(SanitizerRun).values()
    return pd.Series(
        {
            "verdict": run.verdict,
            "kernel": run.kernel,
            "bytes past the end of V": run.address - run.value_pool_end,
            "nearest allocation": (
                f"{abs(run.distance_bytes):,} B "
                f"{'before' if run.distance_bytes > 0 else 'behind'} it, "
                f"{run.allocation_bytes:,} B long"
            ),
            "bytes of K and V together": 2 * 2 * run.pool_numel,
            "bad accesses": run.errors,
        },
        name="compute-sanitizer",
    )


def steady(run: RolloutRun, geometry: Geometry) -> list[float]:
    """Seconds of the chunks that see the full window."""
    return [c.seconds for c in run.chunks if c.index >= geometry.first_full_chunk]


def rollout_table(record: Record, geometry: Geometry) -> pd.DataFrame:
    """Latency of a chunk once the window is full, real-time factor, and memory.

    Where the results are wrong, ``WRONG`` stands in place of each time.
    """
    runs = record.of(RolloutRun)
    eager = {run.backend: run for run in runs.values() if run.mode == "eager"}
    eager |= {
        run.backend: run
        for run in runs.values()
        if run.mode == "eager" and run.layout == "separate"
    }
    rows = {}
    for run in runs.values():
        seconds = steady(run, geometry)
        if not seconds:
            continue
        median = statistics.median(seconds)
        reference = steady(eager[run.backend], geometry)
        results = _results(run)
        times = {
            "chunk, s": round(median, 3),
            "spread": f"{100 * spread(seconds):.2f}%",
            "RTF": round(median / geometry.chunk_seconds, 2),
            "against eager": f"{statistics.median(reference) / median:.2f}x",
        }
        rows[run.backend, _how(run)] = {
            **(dict.fromkeys(times, WRONG) if results == WRONG else times),
            "peak memory, GiB": round(run.peak_bytes / 2**30, 1),
            "results": results,
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index = pd.MultiIndex.from_tuples(list(rows), names=["attention", "mode"])
    return table


def published_table() -> pd.DataFrame:
    """The pull request's own table, RTX PRO 6000."""
    rows = {
        name: {
            "chunk, s": f"{figures[0]:.3f}" if figures else "crashed",
            "RTF": f"{figures[1]:.2f}" if figures else "",
        }
        for name, figures in PUBLISHED.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def step_table(record: Record) -> pd.DataFrame:
    """One denoising step, in milliseconds; ``WRONG`` where its result is."""
    rows: dict[str, dict[str, float | str]] = {}
    wrong = _wrong_steps(record)
    for cell in record.of(Timing).values():
        if cell.is_ceiling:
            continue
        median = statistics.median(cell.seconds)
        rows[cell.name] = {
            "median ms": round(1e3 * median, 1),
            "min ms": round(1e3 * min(cell.seconds), 1),
            "max ms": round(1e3 * max(cell.seconds), 1),
            "TFLOP/s": round((cell.flop or 0.0) / median / 1e12),
        }
        if cell.name in wrong:
            rows[cell.name] = dict.fromkeys(rows[cell.name], WRONG)
    return pd.DataFrame.from_dict(rows, orient="index")


def parts_table(record: Record) -> pd.DataFrame:
    """Device time of one step by part, in milliseconds, from the profiler.

    Of a step whose result is wrong only the ``COPIES`` are given, and NaN for the rest.
    """
    columns = {}
    wrong = _wrong_steps(record)
    for profile in record.of(Profile).values():
        parts = dict.fromkeys(PARTS, 0.0)
        for kernel in profile.kernels:
            part = next(p for p, pattern in PARTS.items() if re.search(pattern, kernel.name))
            parts[part] += kernel.microseconds / 1e3
        if profile.name in wrong:
            parts = {part: parts[part] if part in COPIES else math.nan for part in parts}
        columns[profile.name] = parts
    return pd.DataFrame(columns).round(1)


def clone_table(record: Record, geometry: Geometry) -> pd.DataFrame:
    """The two copies that shared halves cost, against their bytes over the copy bandwidth."""
    copies = [cell for cell in record.of(Timing).values() if cell.ceiling == "copy"]
    bandwidth = statistics.median(
        [(cell.nbytes or 0.0) / statistics.median(cell.seconds) for cell in copies]
    )
    sizes = (geometry.clone_nbytes_per_step, geometry.num_layers * geometry.pool_nbytes)
    nbytes = {part: 2.0 * size for part, size in zip(COPIES, sizes, strict=True)}
    parts = parts_table(record)
    shared = [p.name for p in record.of(Profile).values() if p.layout == "shared"]
    rows = {}
    for part, moved in nbytes.items():
        rows[part] = {
            "GB read and written": round(moved / 1e9, 1),
            "expected ms": round(1e3 * moved / bandwidth, 1),
            **{name: parts.loc[part, name] for name in shared},
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def trials_table(record: Record) -> pd.DataFrame:
    """What each change to the step was expected to cost, and what it cost, in milliseconds."""
    cells = {n: c for n, c in record.of(Timing).items() if not c.is_ceiling}
    base = statistics.median(cells["as it is"].seconds)
    rows = {}
    for name, cell in cells.items():
        median = statistics.median(cell.seconds)
        rows[name] = {
            "step, ms": round(1e3 * median, 1),
            "min": round(1e3 * min(cell.seconds), 1),
            "max": round(1e3 * max(cell.seconds), 1),
            "expected change": cell.predicted_ms,
            "measured change": round(1e3 * (median - base), 1),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def agreement_table(record: Record) -> pd.DataFrame:
    """Relative differences between outputs."""
    errors = {a.name: _number(a.relative_error) for a in record.of(Agreement).values()}
    return pd.DataFrame({"relative difference": errors}).round(4)


def spread(seconds: Sequence[float]) -> float:
    """Largest less smallest, over the median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def outcomes(record: Record) -> dict[str, str]:
    """Each run's outcome, by name: what a verdict on crashes holds."""
    return {name: run.outcome for name, run in sorted(record.of(CrashRun).items())}


def predictions(record: Record) -> dict[str, Any]:
    """How many outcomes were as predicted, and which were not."""
    runs = [run for run in record.of(CrashRun).values() if run.predicted is not None]
    wrong = sorted(run.name for run in runs if run.predicted != run.outcome)
    by_segments = [
        run for run in runs if (run.predicted_by_segments or run.predicted) != run.outcome
    ]
    return {
        "predicted": len(runs),
        "otherwise": wrong,
        "otherwise, by the segments alone": sorted(run.name for run in by_segments),
    }


def fix_verdict(step: Record, rollout: Record, geometry: Geometry, backend: str) -> dict[str, Any]:
    """What holds of the fix, with one backend."""
    eager, compiled = (
        step.of(Timing)[f"{backend}/{mode} separate"].seconds for mode in ("eager", "compiled")
    )
    (run,) = (
        r
        for r in rollout.of(RolloutRun).values()
        if (r.backend, r.mode, r.layout, r.repeat) == (backend, "compiled", "separate", 0)
    )
    seen = [chunk.visible_tokens for chunk in run.chunks]
    differs = [_number(c.differs) for c in run.chunks if c.differs is not None]
    return {
        "compiled over separate pools is faster than eager": statistics.median(compiled)
        < statistics.median(eager),
        "a step takes at most 350 ms": statistics.median(compiled) <= 0.350,
        "the window is full from chunk": seen.index(geometry.visible_tokens),
        "from there latency is flat within 2%": spread(steady(run, geometry)) <= 0.02,
        "compiled agrees with eager within 2%": max(differs) <= 0.02,
    }


def _how(run: RolloutRun) -> str:
    return run.mode if run.mode == "eager" else f"compiled, {run.layout}"


def _results(run: RolloutRun) -> str:
    differs = [_number(c.differs) for c in run.chunks if c.differs is not None]
    if not differs:
        return ""
    right = all(d <= 0.02 for d in differs)
    return f"as eager, within {max(differs):.1%}" if right else WRONG


def _wrong_steps(record: Record) -> set[str]:
    """The steps whose output is not that of eager."""
    against = " against eager"
    return {
        a.name.removesuffix(against)
        for a in record.of(Agreement).values()
        if a.name.endswith(against) and not _number(a.relative_error) <= 0.02
    }


def _number(error: float | str) -> float:
    return float(error)


def _share(count: int | None, rows: int | None) -> str:
    return "" if count is None or not rows else f"{count:,} of {rows:,}"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f} MiB"


def guarded_table(record: Record) -> pd.DataFrame:
    """Runs over memory with known surroundings, one row a case and a way to end."""
    runs = pd.DataFrame([run.model_dump() for run in record.of(GuardedRun).values()])
    runs["shapes"] = runs.dynamic.map({True: "dynamic", False: "static"})
    runs["rows of V wrong"] = runs.value_rows_wrong.astype("Int64")
    runs["of these, the neighbour's"] = runs.value_rows_neighbour.astype("Int64")
    by = ["layout", "memory", "shapes", "ended", "rows of V wrong", "of these, the neighbour's"]
    return runs.groupby(by, dropna=False).size().to_frame("runs").reset_index().set_index("layout")


def guarded_outcomes(record: Record) -> dict[str, list[str]]:
    """How the runs of each case ended, each way once."""
    found: dict[str, list[str]] = {}
    for run in record.of(GuardedRun).values():
        shapes = ", dynamic shapes" if run.dynamic else ""
        if run.ended != "returned":
            how = run.ended
        elif run.agrees:
            how = "agrees with eager"
        else:
            how = f"{run.value_rows_neighbour} of {run.rows} rows of V are the neighbour's"
        ways = found.setdefault(f"{run.layout}, {run.memory}{shapes}", [])
        ways += [how] if how not in ways else []
    return dict(sorted(found.items()))


def overlap_check_table(record: Record) -> pd.DataFrame:
    """One step with the overlap check, over shared halves and over separate pools."""
    errors = {n: _number(a.relative_error) for n, a in record.of(Agreement).items()}
    rows: dict[str, dict[str, float | None]] = {
        f"{timing.mode} {timing.layout}": {
            "median ms": round(statistics.median(timing.seconds) * 1e3, 1),
            "fastest ms": round(min(timing.seconds) * 1e3, 1),
            "slowest ms": round(max(timing.seconds) * 1e3, 1),
        }
        for timing in record.of(Timing).values()
        if not timing.is_ceiling
    }
    for name, row in rows.items():
        row["off eager by"] = errors.get(
            f"{name.removeprefix('compiled ')}: compiled against eager"
        )
    return pd.DataFrame(rows).T


def overlap_check_verdict(record: Record) -> dict[str, Any]:
    """Whether the check removes the clone at full size, agrees with eager and costs nothing."""
    clones = {name: cell.elements for name, cell in record.of(Clones).items()}
    table = overlap_check_table(record)
    shared, separate = (table["median ms"][f"compiled {name}"] for name in ("shared", "separate"))
    return {
        "clones": clones,
        "agrees with eager within 2%": bool(table["off eager by"].dropna().max() < 0.02),
        "shared halves as fast as separate pools within 2%": bool(shared < 1.02 * separate),
    }
