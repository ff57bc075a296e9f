"""What candidate fixes make of the cells: a record with them held against one without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omni_kv.experiments.atlas.cells import CellResult
from omni_kv.experiments.atlas.records import AtlasError, AtlasRecord, label

#: ``changed``: the outcome is another one, and neither is better.
Turned = Literal["worse", "changed", "better", "stayed"]
_ORDER: tuple[Turned, ...] = ("worse", "changed", "better", "stayed")


@dataclass(frozen=True)
class Effect:
    """What became of one cell.

    Attributes:
        cell: its key.
        turned: for better or worse.
        before: what it was, in a few words.
        after: what it is with the fixes.
    """

    cell: str
    turned: Turned
    before: str
    after: str


def effects(plain: AtlasRecord, fixed: AtlasRecord) -> list[Effect]:
    """What became of every cell that ``fixed`` has, the worst first.

    Args:
        plain: recorded without fixes.
        fixed: recorded with fixes, the same release on the same kind of device.

    Raises:
        AtlasError: if the records are not such a pair.
    """
    if plain.fixes or not fixed.fixes:
        raise AtlasError("the first record must be one without fixes, the second one with fixes")
    for name in ("release", "kind"):
        if getattr(plain, name) != getattr(fixed, name):
            raise AtlasError(f"two of {name}: {getattr(plain, name)}, {getattr(fixed, name)}")
    known = plain.by_key()
    missing = [result.cell for result in fixed.cells if result.cell not in known]
    if missing or not fixed.cells:
        raise AtlasError(f"the record without fixes lacks {', '.join(missing) or 'every cell'}")
    found = [_effect(known[after.cell], after) for after in fixed.cells]
    return sorted(found, key=lambda e: _ORDER.index(e.turned))


def lines(found: Sequence[Effect]) -> list[str]:
    """One line a cell, and one with the counts."""
    counts = Counter(e.turned for e in found)
    told = [
        f"{e.turned}: {e.cell}: {e.before}" + (f" -> {e.after}" if e.after != e.before else "")
        for e in found
    ]
    return [*told, ", ".join(f"{counts[turned]} {turned}" for turned in _ORDER)]


def turned(before: CellResult, after: CellResult) -> Turned:
    """Whether a cell turned better or worse.

    Right is better than a refusal to compile, and that is better than every other outcome. Of two
    right ones that in place is better, and of two of these, or two that copy, the one that moves
    fewer bytes. Where that is not known of one, nothing is said of it.
    """
    was, now = _badness(before), _badness(after)
    if was == now == 0 and None not in (before.in_place, after.in_place):
        was, now = int(not before.in_place), int(not after.in_place)
    if was == now and label(before) == label(after) and before.outcome == "right":
        moved = [_moved(before), _moved(after)]
        was, now = (moved[0] or 0, moved[1] or 0) if None not in moved else (0, 0)
    if was != now:
        return "better" if now < was else "worse"
    return "stayed" if label(before) == label(after) else "changed"


def _effect(before: CellResult, after: CellResult) -> Effect:
    return Effect(before.cell, turned(before, after), _words(before), _words(after))


def _badness(result: CellResult) -> int:
    return {"right": 0, "refuses to compile": 1}.get(result.outcome, 2)


def _moved(result: CellResult) -> int | None:
    if result.reads_bytes is None or result.writes_bytes is None:
        return None
    return result.reads_bytes + result.writes_bytes


def _words(result: CellResult) -> str:
    moved = _moved(result)
    return label(result) + (f", {moved} bytes" if moved is not None else "")
