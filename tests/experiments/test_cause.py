from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kv.experiments.cause import (
    Measurement,
    Placement,
    measure,
    placements,
    predict,
    source_of,
)

SHAPES = st.tuples(st.integers(3, 200), st.integers(1, 4), st.integers(1, 16))


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.sampled_from(["float32", "bfloat16"]))
def test_a_clone_of_the_second_half_reads_as_much_outside_as_k_has(shape, dtype):
    halves = placements(shape, dtype)["halves, K first"]
    assert predict(halves, "data pointer").outside == halves.numel
    assert predict(halves, "data pointer").extent == 2 * halves.numel
    assert predict(halves, "storage start").outside == 0
    assert predict(halves, "data pointer").first_bad_byte == halves.numel * halves.itemsize


@settings(max_examples=200, deadline=None)
@given(SHAPES)
def test_what_is_read_outside_is_where_sources_lie_outside(shape):
    for p in placements(shape).values():
        if p.one_allocation:
            last = source_of(p, p.numel - 1, "data pointer")
            prediction = predict(p, "data pointer")
            assert prediction.outside == max(0, last + 1 - p.storage_numel)


@settings(max_examples=200, deadline=None)
@given(SHAPES)
def test_counting_from_the_storage_gives_each_element_its_own_value(shape):
    for p in placements(shape).values():
        assert source_of(p, 5, "storage start") == p.value_offset + 5


def test_separate_storages_are_not_cloned():
    assert not predict(placements((8, 2, 4))["separate"], "data pointer").cloned


# An odd size below a page of memory; notebook 05 measures others, in three dtypes.
CHOSEN = [((3, 1, 1), "float64")]


def generated(count):
    """Shapes and dtypes that hypothesis comes up with, the same ones on every run."""
    found = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(SHAPES, st.sampled_from(["float32", "bfloat16"]))
    def collect(shape, dtype):
        found.append((shape, dtype))

    collect()
    return found


@pytest.fixture(scope="module")
def measured():
    """All placements of the chosen shapes, and halves of generated ones."""
    cases = [p for shape, dtype in CHOSEN for p in placements(shape, dtype).values()]
    cases += [placements(shape, dtype)["halves, K first"] for shape, dtype in generated(2)]
    return measure(cases)


@pytest.mark.compiles
def test_each_run_in_a_child_of_its_own_says_the_same_as_a_fork(measured):
    """What a GPU needs, tried without one: ``cpu:0`` is the CPU, but not where forks are used."""
    (p,) = [m.placement for m in measured if m.placement.name == "halves and spare room"]
    (m,) = measure([p], device="cpu:0")
    assert m.confirms()
    assert m == next(other for other in measured if other.placement == p)


@pytest.mark.parametrize("ended", ["killed by SIGSEGV", "raised X: illegal memory access met"])
def test_a_run_confirms_by_dying_on_either_kind_of_device(ended):
    p = placements((3, 2, 4))["halves, K first"]
    m = Measurement(p, "data pointer", 2 * p.numel, "returned", ended, 8, 8, 8)
    assert m.confirms()
    assert not replace(m, one_earlier="returned").confirms()
    assert not replace(m, one_earlier=None).confirms()
    assert not replace(m, at_prediction=ended).confirms()


@pytest.mark.compiles
def test_every_prediction_is_confirmed_to_the_element(measured):
    assert len(measured) == 5 * len(CHOSEN) + 2
    assert [m for m in measured if not m.confirms()] == []


@pytest.mark.compiles
def test_all_kernels_of_a_release_count_from_the_same_place(measured):
    offset = [m.counts_from for m in measured if m.placement.value_offset and m.counts_from]
    assert len(offset) == 3 * len(CHOSEN) + 2
    assert len(set(offset)) == 1


@pytest.mark.compiles
def test_a_wrong_prediction_would_be_noticed(measured):
    """Move V by one element in what was predicted for: the same run no longer confirms it."""
    for m in measured:
        if m.counts_from is None:
            continue
        p = m.placement
        moved: Placement = replace(p, value_offset=p.value_offset + 1)
        assert not replace(m, placement=moved).confirms()
