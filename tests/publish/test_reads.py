"""What the clone reads, frame by frame: where V's values come from, from numbers alone."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from omni_kv.publish.figures import reads
from omni_kv.publish.figures.pools import OUTSIDE


def copied(first: int, end: int, handed: int) -> reads.Copy:
    return reads.Copy("torch 9.1.0\nstatic shapes", 100, 100, first, end, handed)


@pytest.mark.parametrize(
    ("copy", "source"),
    [
        (copied(100, 300, 200), "foreign"),
        (copied(100, 300, 100), "V"),
        (copied(0, 200, 0), "K"),
    ],
)
def test_the_source_of_v_is_where_the_handed_elements_lie(copy, source) -> None:
    assert copy.source == source


@pytest.mark.parametrize(
    ("copy", "marked"), [(copied(100, 300, 200), True), (copied(0, 200, 0), False)]
)
def test_only_what_lies_outside_is_marked_as_outside(copy, marked) -> None:
    figure = reads.frames([copy])
    first = figure.axes[0]
    outside = [p for p in first.patches if to_hex(p.get_facecolor()).upper() == OUTSIDE]
    assert bool(outside) == marked
    assert all(p.get_x() >= 200 for p in outside)
    plt.close(figure)


def test_a_record_counts_from_the_pointer_and_a_copy_from_the_storage(monkeypatch) -> None:
    value = {
        "elements cloned": 200,
        "elements of its own": 100,
        "reads": [0, 199],
        "op is off by": -100,
    }
    monkeypatch.setattr(reads.outcomes, "releases", lambda: ["9.1.0"])
    monkeypatch.setattr(
        reads.outcomes, "recorded", lambda *_: {"03.shared, static": {"value_pool": value}}
    )
    (copy,) = reads.recorded_copies()
    assert (copy.first, copy.end, copy.handed, copy.source) == (100, 300, 0, "K")


def test_without_a_recorded_clone_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match="no clone is on record"):
        reads.frames([])
