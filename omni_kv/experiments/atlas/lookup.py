"""What a reader looks up in the atlas: an outcome, its reason, and what to do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omni_kv.experiments.atlas.cells import CALLS, LAYOUTS, Cell, CellResult, all_cells, cell_of
from omni_kv.experiments.atlas.records import AtlasRecord, label

#: How a table of symbols shows an outcome.
SYMBOLS = {
    "right": "✓",
    "right, cloned": "✓ copies",
    "right, copies not known": "✓ ?",
    "reads outside": "✗ reads outside",
    "refuses to compile": "✗ refuses",
    "crash": "✗ dies",
}
KEY = (
    "✓ right and in place; ✓ copies: right, and a pool is copied in every call; ✓ ?: right, and "
    "whether a pool is copied is not known; ✗ reads outside: right where memory is mapped around "
    "it, dead where it is not; ✗ wrong: a pool holds other values, and nothing is raised (where "
    "nothing is mapped it may die); "
    "✗ raises: it compiles, and the compiled code raises; ✗ refuses: it does not compile; "
    "· not on record."
)
#: Calls that the small tables show: key without layout and mode, and heading.
SHORT_CALLS = {
    "static/fresh": "static shapes",
    "dynamic/fresh": "dynamic shapes",
    "second_pool/fresh": "a second size",
    "static/shared_halves": "a cache left by halves",
}
_ELSE = "Two allocations, or one tensor that the op slices itself"
_ADVICE = {
    "right": "Nothing.",
    "right, cloned": f"{_ELSE}, save the copies.",
    "right, copies not known": "Measure the copies: omni-kv audit.",
    "refuses to compile": "Static shapes, or one tensor that the op slices itself.",
}


@dataclass(frozen=True)
class Row:
    """One line of the lookup: a cell, and neighbouring releases that agree on its outcome.

    Attributes:
        cell: what was run.
        releases: in order.
        outcome: the label that they share.
        seen: what was seen on the last of them.
        reason: what the compiled code does, as far as the cell shows it.
        advice: what to do.
    """

    cell: Cell
    releases: tuple[str, ...]
    outcome: str
    seen: str
    reason: str
    advice: str


def between(releases: Sequence[str]) -> str:
    """Neighbouring releases in a few words."""
    return releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"


def rows(known: Sequence[AtlasRecord]) -> list[Row]:
    """The lookup table, in the order of the axes.

    Args:
        known: records of one kind of device, by release.
    """
    found = []
    cells_of = {record.release: record.by_key() for record in known}
    for key in dict.fromkeys(result.cell for record in known for result in record.cells):
        results = [(release, of[key]) for release, of in cells_of.items() if key in of]
        for outcome, group in itertools.groupby(results, key=lambda pair: label(pair[1])):
            same = list(group)
            cell, last = cell_of(key), same[-1][1]
            advice = _ADVICE.get(outcome, f"Do not run it compiled. {_ELSE}, are right.")
            if cell.cache == "shared_halves" and last.outcome != "right":
                fresh = cells_of[same[-1][0]].get(replace(cell, cache="fresh").key)
                if fresh is not None and fresh.outcome == "right":
                    advice = "Empty the compile cache, and keep one for each layout."
            releases = tuple(release for release, _ in same)
            found.append(Row(cell, releases, outcome, last.detail, reason(cell, last), advice))
    return found


def reason(cell: Cell, result: CellResult) -> str:
    """What the compiled code does, as far as outcome and addresses of one cell show it."""
    outcome = result.outcome
    if outcome == "refuses to compile":
        return "The compiler raises."
    if _raises(result):
        return "It compiles, and the compiled code raises."
    if outcome == "right":
        return {
            True: "Every pool is written where it lies.",
            False: "A pool is copied, and the copy is written back.",
            None: "Whether a pool is copied is not known.",
        }[result.in_place]
    if cell.cache == "shared_halves" and cell.layout in ("separate", "shared_v_first"):
        return "The cache hands out code that was compiled for halves: its key does not see them."
    if result.in_place:
        return "A view of the pool loses its storage offset: one pool is written over the other."
    return "A pool is cloned, and the clone reads from another place than the pool."


def symbol(result: CellResult | None) -> str:
    """One outcome as the small tables show it."""
    if result is None:
        return "·"
    return "✗ raises" if _raises(result) else SYMBOLS.get(label(result), "✗ wrong")


def _raises(result: CellResult) -> bool:
    return result.detail.startswith("the compiled code raised")


def outcome_table(known: Sequence[AtlasRecord], layouts: Sequence[str]) -> dict[str, list[str]]:
    """Layouts down, kinds of call across; in each cell a line for neighbours that agree.

    Where all releases agree the symbol stands alone.

    Args:
        known: records by release.
        layouts: names.

    Returns:
        By each layout's text one text a call, its lines apart by line breaks.
    """
    return {
        LAYOUTS[name]: [_told(known, f"{name}/{call}/no_grad") for call in SHORT_CALLS]
        for name in layouts
    }


def _told(known: Sequence[AtlasRecord], key: str) -> str:
    seen = [(symbol(record.by_key().get(key)), record.release) for record in known]
    groups = [(told, [r for _, r in g]) for told, g in itertools.groupby(seen, lambda s: s[0])]
    if len(groups) == 1:
        return groups[0][0]
    lines = [f"{told} {between(releases)}" for told, releases in groups[:-1]]
    told, releases = groups[-1]
    return "\n".join([*lines, f"{told} since {releases[0]}"])


def newest_table(known: Sequence[AtlasRecord]) -> dict[str, list[str]]:
    """What the newest release does: one symbol a call, with a fresh cache, for each layout."""
    cells = known[-1].by_key() if known else {}
    return {
        text: [symbol(cells.get(f"{name}/{call}/fresh/no_grad")) for call in CALLS]
        for name, text in LAYOUTS.items()
    }


def always_in_place(known: Sequence[AtlasRecord]) -> list[str]:
    """Layouts that are right and in place in every cell, all of them on record for each release."""
    found = [record.by_key() for record in known]

    def good(layout: str) -> bool:
        keys = [cell.key for cell in all_cells([layout])]
        results = [cells.get(key) for cells in found for key in keys]
        return all(r is not None and r.outcome == "right" and bool(r.in_place) for r in results)

    return [layout for layout in LAYOUTS if found and good(layout)]


def changes(known: Sequence[AtlasRecord]) -> list[tuple[str, str, str, str, int]]:
    """What changed from one release to the next.

    Returns:
        For each pair of neighbours and each change of outcome: both releases, both outcomes, and
        the number of cells.
    """
    found = []
    for before, after in itertools.pairwise(known):
        was, now = before.by_key(), after.by_key()
        pairs = [(label(was[k]), label(now[k])) for k in was if k in now]
        changed = [pair for pair in pairs if pair[0] != pair[1]]
        found += [
            (before.release, after.release, *pair, changed.count(pair))
            for pair in dict.fromkeys(changed)
        ]
    return found
