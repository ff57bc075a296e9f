"""Ratios of paired compile times, computed from the samples of the record ``compile-time``."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from omni_kv.evidence.cells import Timing
from omni_kv.evidence.records import Record

#: Variants of a sample beside the names of fixes: no fix, and no fix once more.
WITHOUT, CONTROL = "without", "control"


@dataclass(frozen=True)
class Ratio:
    """The ratio of what belongs together, over several pairs.

    Attributes:
        median: of the ratios.
        low: the interval's lower end, one of the ratios.
        high: its upper end.
        coverage: probability that such an interval holds the true median, whatever the
            distribution; 0.95 or more from six pairs on, below that what all pairs give.
        pairs: how many.
    """

    median: float
    low: float
    high: float
    coverage: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f} with {self.coverage:.0%}, "
            f"{self.pairs} pairs)"
        )


def sample_name(graph: str, number: int, variant: str) -> str:
    """The name of one sample's cell."""
    return f"{graph}, round {number}: {variant}"


def share_name(graph: str, variant: str, part: str) -> str:
    """The name of a cell of the record ``compile-share``."""
    return f"{graph}: {variant}: {part}"


def share_lines(record: Record) -> list[str]:
    """One line a graph: what the functions that the fixes change take, with them and without.

    Of several compilations the shortest counts: what else runs on a machine only adds.
    """
    lines = []
    cells = record.of(Timing)
    for graph in dict.fromkeys(name.partition(": ")[0] for name in cells):
        variants = list(dict.fromkeys(n.split(": ")[1] for n in cells if n.startswith(graph + ":")))
        own = {v: min(cells[share_name(graph, v, "changed")].seconds) for v in variants}
        whole = min(cells[share_name(graph, WITHOUT, "all")].seconds)
        told = ", ".join(f"{1000 * seconds:.2f} ms {v}" for v, seconds in own.items())
        more = max(own[v] for v in own if v != WITHOUT) - own[WITHOUT]
        lines.append(f"{graph}: {told}, of {whole:.2f} s: {more / whole:+.3%} of compiling")
    return lines


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Median of second over first, with an interval from the order of the ratios alone.

    Args:
        pairs: what was measured together, all positive.

    Raises:
        ValueError: if there is no pair.
    """
    if not pairs:
        raise ValueError("no pair")
    ratios = sorted(second / first for first, second in pairs)
    n = len(ratios)

    def coverage(cut: int) -> float:
        """Of the interval that leaves out ``cut`` ratios at each end."""
        return 1 - 2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2**n

    cut = max((c for c in range((n + 1) // 2) if coverage(c) >= 0.95), default=0)
    return Ratio(
        statistics.median(ratios), ratios[cut], ratios[n - 1 - cut], max(0.0, coverage(cut)), n
    )


def compile_ratios(record: Record, clock: str = "seconds") -> dict[tuple[str, str], Ratio]:
    """Compile time of each variant over that without a fix: by graph and variant.

    Args:
        record: that of ``compile-time``; an unfinished one counts as far as it goes.
        clock: ``seconds`` or ``cpu_seconds``.
    """
    samples: dict[tuple[str, str], dict[int, float]] = {}
    for name, cell in record.of(Timing).items():
        found = re.fullmatch(r"(.+), round (\d+): (.+)", name)
        if found:
            graph, number, variant = found.groups()
            samples.setdefault((graph, variant), {})[int(number)] = getattr(cell, clock)[0]
    ratios = {}
    for (graph, variant), taken in samples.items():
        base = samples.get((graph, WITHOUT), {})
        pairs = [(base[number], taken[number]) for number in taken if number in base]
        if variant != WITHOUT and pairs:
            ratios[graph, variant] = paired_ratio(pairs)
    return dict(sorted(ratios.items()))


def ratio_lines(record: Record) -> list[str]:
    """One line a graph and variant, with the ratios by both clocks."""
    by_clock, by_cpu = (compile_ratios(record, clock) for clock in ("seconds", "cpu_seconds"))
    return [
        f"{graph}: {variant}: {ratio}; of processor time {by_cpu[graph, variant]}"
        for (graph, variant), ratio in by_clock.items()
    ]
