import pytest

from omni_kv.experiments.layer import LayerCase, crash_cases, isolated_layers, summary
from omni_kv.model.geometry import preset

pytestmark = pytest.mark.compiles

TINY = preset("tiny")
# Notebook 02 runs them all, also with dynamic shapes.
CASES = [case for case in crash_cases(TINY) if not case.dynamic]


@pytest.fixture(scope="module")
def outcomes():
    return dict(zip(CASES, isolated_layers(CASES), strict=True))


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.layout == "separate"], ids=lambda c: c.label
)
def test_separate_pools_run_and_agree_with_eager(outcomes, case):
    run = outcomes[case].unwrap()
    assert run.right
    assert run.rows == TINY.num_slots
    assert run.rows_written == TINY.tokens_per_chunk


def test_over_shared_halves_a_crash_and_foreign_values_are_one_fault(outcomes):
    """Where static shapes die at a guard page, the same read takes V's rows from the neighbour."""
    died = outcomes[LayerCase(TINY, "shared", "guard after")]
    run = outcomes[LayerCase(TINY, "shared", "neighbour")].unwrap()
    if died.status == "killed":
        assert died.signal == "SIGSEGV"
        assert run.value_origins.count("neighbour") == run.rows - run.rows_written
        assert summary(outcomes[LayerCase(TINY, "shared", "neighbour")])["their values"] == {
            "neighbour": run.rows - run.rows_written
        }
    else:
        assert died.unwrap().right
        assert run.right


def test_keys_are_never_touched(outcomes):
    assert all(o.value.key_rows_wrong == 0 for o in outcomes.values() if o.value)


def test_memory_that_a_device_has_not_is_refused():
    with pytest.raises(ValueError, match="'expandable segments' is not to be had on cpu"):
        LayerCase(TINY, "shared", "expandable segments")


def test_children_of_their_own_can_share_a_compile_cache():
    """What a GPU needs, tried without one: ``cpu:0`` is the CPU, but not where forks are used."""
    shared = LayerCase(TINY, "shared", "neighbour", device="cpu:0")
    # What the first leaves in the cache reads behind a pool of its own, or, on newer releases,
    # before it; with a cache of its own neither happens (the cases above, and notebook 02).
    after = [
        LayerCase(TINY, "separate", m, device="cpu:0") for m in ("guard after", "guard before")
    ]
    _, *stale = isolated_layers([shared, *after], keep_graphs=True)
    assert [outcome.status for outcome in stale].count("killed") == 1
