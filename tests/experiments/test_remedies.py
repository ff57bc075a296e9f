import pytest

from omni_kv.evidence import outcomes
from omni_kv.evidence.verdicts import torch_release
from omni_kv.experiments.hypotheses import HYPOTHESES, STAGES, clone_elements
from omni_kv.experiments.remedies import _try_some
from omni_kv.model.geometry import preset
from omni_kv.sandbox.process import run_isolated

#: Elements of V in notebook 05, whose runs are held to these records on every release.
OF = 64 * 2 * 8


@pytest.fixture(params=outcomes.releases())
def trials(request):
    """What notebook 05 recorded of each change on a release: measured there, and once."""
    found = outcomes.recorded(request.param, "05.")
    return {name.removeprefix("05."): o for name, o in found.items() if "guarded" in o}


def right(trial):
    return trial["guarded"] == "returned" and trial["V elements wrong"] == 0


def test_what_keeps_the_halves_apart_for_the_pass_removes_the_clone(trials):
    for change in (
        "separate storages",
        "one tensor argument, sliced in the op",
        "an overlap check in the reinplace pass",
    ):
        assert (trials[change]["clone"], right(trials[change])) == (0, True), change


def test_an_offset_of_zero_leaves_a_clone_that_is_right(trials):
    trial = trials["a storage offset of zero: V in front of K"]
    assert (trial["clone"], right(trial)) == (OF, True)


def test_what_acts_elsewhere_leaves_the_clone_and_the_outcome_as_they_were(trials):
    nothing = trials["nothing"]
    assert nothing["clone"] == 2 * OF
    for change in ("mark_static_address on both pools", "enable_auto_functionalized_v2=False"):
        assert trials[change] == nothing, change


def test_dynamic_shapes_have_a_fault_whether_or_not_static_ones_have(trials):
    assert not right(trials["dynamic=True"])


@pytest.mark.compiles
def test_a_change_is_made_in_the_children_as_well_that_a_gpu_needs():
    # `cpu:0` is the CPU, but not where forks are used.
    changes = ["nothing", "an overlap check in the reinplace pass"]
    nothing, check = run_isolated(_try_some, (64, 2, 8), "cpu:0", changes).unwrap()
    assert (check.clone_elements, check.guarded, check.wrong) == (0, "returned", 0)
    found = outcomes.recorded(torch_release(), "05.nothing").get("05.nothing")
    if found is None:
        pytest.skip("this release has no record")
    assert (nothing.clone_elements, nothing.guarded) == (found["clone"], found["guarded"])
    assert nothing.wrong == found["V elements wrong"]


@pytest.mark.compiles
@pytest.mark.parametrize("static_address", [False, True])
def test_the_layers_clone_has_the_size_that_the_geometry_says(static_address):
    tiny = preset("tiny")
    assert clone_elements(tiny, static_address=static_address) == tiny.clone_numel


def test_each_hypothesis_acts_at_a_stage():
    assert [h.number for h in HYPOTHESES] == [1, 2, 3, 4, 5]
    assert all(h.acts_at in STAGES and h.would_show for h in HYPOTHESES)
