"""What ``omni-kv record`` is asked for, and the parts that it is done in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_kv.evidence.cells import Strict
from omni_kv.model.geometry import Geometry


@dataclass(frozen=True)
class Unit:
    """A part of an experiment.

    Attributes:
        name: unique within the experiment.
        run: makes its cells.
        alone: whether nothing else may run beside it.
    """

    name: str
    run: Callable[[], Sequence[Strict]]
    alone: bool = False


@dataclass(frozen=True)
class Plan:
    """What to record.

    Attributes:
        geometry: the preset.
        device: ``cuda``; ``cpu`` is for trying the machinery.
        backends: attention backends to measure, the fastest last.
        samples: timed runs of each variant of a step.
        chunks: length of a rollout.
        repeats: rollouts of each kind.
        pairs: compilations of each kind whose time is taken.
    """

    geometry: Geometry
    device: str
    backends: tuple[str, ...]
    samples: int = 5
    chunks: int = 10
    repeats: int = 1
    pairs: int = 10
