"""The investigation's outcome in a few lines, each computed from what was recorded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from omni_kv.evidence import verdicts

if TYPE_CHECKING:
    from omni_kv.evidence.records import Record

DYNAMIC = "02.shared, neighbour, dynamic shapes"

#: What is asked of notebook 02's records, in the order in which the story goes.
QUESTIONS = (
    ("02.shared, guard after", "K and V as halves of one allocation, an unmapped page behind it"),
    ("02.shared, neighbour", "The same, with mapped memory behind it"),
    (DYNAMIC, "The same, compiled with dynamic shapes"),
)

ORIGINS = {"neighbour": "memory from outside the pool", "keys": "K", "other": "something else"}


def releases() -> list[str]:
    """The torch releases with recorded outcomes, oldest first."""
    files = (verdicts.data_dir() / "verdicts").glob("torch-*.json")
    found = [file.stem.removeprefix("torch-") for file in files]
    return sorted(found, key=lambda r: [int(n) if n.isdigit() else -1 for n in r.split(".")])


def recorded(release: str, prefix: str, device: str = "cpu") -> dict[str, dict[str, Any]]:
    """A release's recorded outcomes by name, for names that start with ``prefix``."""
    return {
        entry.name: entry.outcome
        for entry in verdicts.load(release).verdicts
        if entry.name.startswith(prefix) and entry.parameters.get("device", device) == device
    }


def count(text: str) -> int:
    """The number N of a recorded ``N of M``.

    Args:
        text: such as ``192 of 240``.

    Raises:
        ValueError: if it has another form.
    """
    found = re.fullmatch(r"(\d+) of \d+", text)
    if found is None:
        raise ValueError(f"{text!r} is not of the form 'N of M'")
    return int(found[1])


def in_words(outcome: Mapping[str, Any]) -> str:
    """How one layer ended, as notebook 02 records it."""
    if outcome["ended"] != "returned":
        return str(outcome["ended"])
    if set(outcome.get("their values", {})):
        (origin, _), *more = outcome["their values"].items()
        whose = "other values" if more else ORIGINS[origin]
        return f"nothing raised, and {outcome['value rows wrong']} slots of V hold {whose}"
    right = outcome["output"] == "agrees with eager" and count(outcome["key rows wrong"]) == 0
    return "right" if right else str(outcome["output"])


def _dies_dynamic(release: str) -> bool:
    """Whether dynamic shapes die at an unmapped page on this release, as notebook 05 records it."""
    found = recorded(release, "05.dynamic=True").get("05.dynamic=True")
    return found is not None and found["guarded"] != "returned"


def outcome_lines() -> list[str]:
    """What became of a compiled layer, one Markdown line a question, all releases in each."""
    lines = []
    for name, question in QUESTIONS:
        found = {r: recorded(r, name).get(name) for r in releases()}
        told = [f"torch {r}: {in_words(o)}" for r, o in found.items() if o is not None]
        if name == DYNAMIC:
            told += [f"torch {r} dies at an unmapped page, too" for r in found if _dies_dynamic(r)]
        if told:
            lines.append(f"**{question}.** {_sentence(told)}")
    separate = [o for r in releases() for o in recorded(r, "02.separate").values()]
    if separate:
        right = sum(in_words(outcome) == "right" for outcome in separate)
        every = "all" if right == len(separate) else f"{right} of"
        lines.append(
            f"**K and V as two tensors, all of the above.** {every.capitalize()} {len(separate)} "
            f"recorded runs right, on torch {' and '.join(releases())}."
        )
    return lines + gpu_lines()


def gpu_lines() -> list[str]:
    """What was recorded at the pull request's sizes on the GPU that records are read from.

    Returns:
        One line, or none if nothing is recorded.

    Raises:
        EvidenceError: if a record of that device does not fit.
    """
    from omni_kv.evidence import records as evidence

    device = evidence.chosen_device() or next(iter(evidence.devices()), "")
    folder = evidence.data_dir() / "evidence" / device
    found = [evidence.read(path) for path in sorted(folder.glob("*.json"))]
    told = [*_crashes(found), *_step(found)]
    if not told:
        return []
    where = found[0].provenance
    label = f"{where.device}, torch {where.torch.split('+')[0]}"
    return [f"**On a GPU, up to full size** (recorded on {label}). {' '.join(told)}"]


def _crashes(records: Sequence[Record]) -> Iterator[str]:
    """How the compiled layers over shared halves ended."""
    from omni_kv.evidence.cells import CrashRun

    for layout, told in (("shared", "one allocation"), ("separate", "two allocations")):
        found = [
            (record.experiment, run.outcome)
            for record in records
            for run in record.of(CrashRun).values()
            if run.case.compiled and run.case.layout == layout and run.case.cache == "fresh"
        ]
        if found:
            made = Counter(experiment for experiment, _ in found)
            ended = Counter(how for _, how in sorted(found, key=lambda run: run[1]))
            yield (
                f"Over {told}, {len(found)} compiled runs with a fresh cache "
                f"({', '.join(f'{n} of {name}' for name, n in made.items())}), chosen to differ in "
                "size, allocator and neighbours (no sample, so no odds): "
                f"{', '.join(f'{n} times {how}' for how, n in ended.items())}."
            )


def _step(records: Sequence[Record]) -> Iterator[str]:
    """What a denoising step over separate pools takes, in the fastest backend, and in eager."""
    from omni_kv.evidence.cells import Timing

    for record in records:
        if record.experiment != "step":
            continue
        separate = {
            (t.mode, t.backend): median(t.seconds) * 1e3
            for t in record.of(Timing).values()
            if t.layout == "separate"
        }
        compiled = {backend: ms for (mode, backend), ms in separate.items() if mode == "compiled"}
        if not compiled:
            continue
        fastest = min(compiled, key=lambda backend: compiled[backend])
        eager = separate.get(("eager", fastest))
        told = f"A denoising step over two allocations takes {compiled[fastest]:.0f} ms compiled"
        yield told + (f", {eager:.0f} ms in eager" if eager else "") + f" ({fastest})."


def _sentence(parts: list[str]) -> str:
    return "; ".join(parts) + "."
