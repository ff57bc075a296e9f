import pytest

from omni_kv.experiments.hypotheses import HYPOTHESES, STAGES, clone_elements
from omni_kv.experiments.remedies import try_changes
from omni_kv.model.geometry import preset


@pytest.fixture(scope="module")
def trials():
    return {trial.change: trial for trial in try_changes()}


def test_what_keeps_the_halves_apart_for_the_pass_removes_the_clone(trials):
    for change in (
        "separate storages",
        "one tensor argument, sliced in the op",
        "an overlap check in the reinplace pass",
    ):
        assert (trials[change].clone_elements, trials[change].right) == (0, True), change


def test_an_offset_of_zero_leaves_a_clone_that_is_right(trials):
    trial = trials["a storage offset of zero: V in front of K"]
    assert (trial.clone_elements, trial.right) == (trial.of, True)


def test_what_acts_elsewhere_leaves_the_clone_and_the_outcome_as_they_were(trials):
    nothing = trials["nothing"]
    assert nothing.clone_elements == 2 * nothing.of
    for change in ("mark_static_address on both pools", "enable_auto_functionalized_v2=False"):
        trial = trials[change]
        assert trial.clone_elements == nothing.clone_elements, change
        assert (trial.guarded, trial.wrong) == (nothing.guarded, nothing.wrong), change


def test_dynamic_shapes_have_a_fault_whether_or_not_static_ones_have(trials):
    assert not trials["dynamic=True"].right


@pytest.mark.parametrize("static_address", [False, True])
def test_the_layers_clone_has_the_size_that_the_geometry_says(static_address):
    tiny = preset("tiny")
    assert clone_elements(tiny, static_address=static_address) == tiny.clone_numel


def test_each_hypothesis_acts_at_a_stage():
    assert [h.number for h in HYPOTHESES] == [1, 2, 3, 4, 5]
    assert all(h.acts_at in STAGES and h.would_show for h in HYPOTHESES)
