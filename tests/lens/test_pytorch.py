"""The private names of PyTorch: all there, and what is still said when one is gone."""

from __future__ import annotations

import re
from pathlib import Path

import audit_cases as cases
import pytest
import torch
import torch._inductor.config as inductor_config

import omni_kv.lens
from omni_kv.audits.findings import aliases_of, ops_of
from omni_kv.lens import decisions, pytorch
from omni_kv.lens.capture import capture
from omni_kv.lens.traffic import traffic_of


@pytest.fixture(autouse=True)
def looked_up_anew():
    pytorch.forget()
    with torch.no_grad():
        yield
    pytorch.forget()


@pytest.fixture
def gone(monkeypatch):
    """Rename a name in the table, as if the installed torch did not have it."""

    def rename(name):
        lacking = pytorch.Name(name.module, f"{name.name}_gone", name.kind, name.used, name.purpose)
        for variable, value in vars(pytorch).items():
            if value is name:
                monkeypatch.setattr(pytorch, variable, lacking)
            elif isinstance(value, list) and name in value:
                changed = [lacking if one is name else one for one in value]
                monkeypatch.setattr(pytorch, variable, changed)
        return lacking

    return rename


def seen(**options):
    fn, args = cases.make_shared()
    captured = capture(fn, *args, **options)
    (graph,) = captured.graphs
    for reader in (ops_of, aliases_of, traffic_of):
        reader(graph)
    return captured, graph


def test_the_installed_torch_has_every_name() -> None:
    assert pytorch.missing() == []
    assert seen()[0].missing == []
    assert len({str(name) for name in pytorch.names()}) == len(pytorch.names())
    assert all(name.purpose and name.used for name in pytorch.names())


def test_the_lens_imports_private_modules_in_one_place_only() -> None:
    folder = Path(omni_kv.lens.__file__).parent
    private = re.compile(r"^\s*(?:import|from) torch\.(?:_|\w+\._)", re.MULTILINE)
    assert [p.name for p in folder.glob("*.py") if private.search(p.read_text())] == []


def test_a_name_that_is_gone_is_told_with_the_release() -> None:
    for module in ("torch._inductor.compile_fx", "torch._no_such_module"):
        name = pytorch.Name(module, "no_such_name", "object", "here", "a test")
        assert not name.present
        with pytest.raises(pytorch.UnknownTorch, match=r"does not know torch .*no_such_name"):
            name.get()


@pytest.mark.parametrize(
    ("name", "kept", "lost"),
    [
        (pytorch.POST_GRAD, "decisions", "post_grad_after_decomposition"),
        (pytorch.REINPLACE, "post_grad_after_decomposition", "decisions"),
        (pytorch.PASS_FILE, "post_grad_before_reinplace", "decisions"),
        (pytorch.PRE_FUSION, "generated_code", "kernels"),
        (pytorch.MEMORY_DEP, "generated_code", "kernels"),
        (pytorch.BOUND, "passed_views", "kernels"),
        (pytorch.COMPILE_FX, "inputs", "aot_forward_graph"),
        (pytorch.COMPILE_FX_INNER, "inputs", "aot_forward_graph"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_without_a_name_the_other_stages_are_still_read(gone, name, kept, lost) -> None:
    lacking = gone(name)
    captured, graph = seen()
    assert str(lacking) in captured.missing
    assert getattr(graph, kept)
    assert not getattr(graph, lost)


def test_without_the_place_where_code_is_saved_nothing_is_run_all_the_same(gone) -> None:
    lacking = gone(pytorch.SAVE_CODE)
    fn, args = cases.make_separate()
    before = [a.clone() for a in args]
    captured = capture(fn, *args)
    assert str(lacking) in captured.missing
    assert captured.graphs[0].kernels
    assert captured.graphs[0].generated_code is None
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_an_option_that_is_gone_is_left_alone(gone) -> None:
    lacking = gone(pytorch.INDUCTOR_OPTIONS[0])
    captured, graph = seen(until="graph")
    assert str(lacking) in captured.missing
    assert graph.decisions


def test_a_hook_of_somebody_else_before_fusion_is_still_called() -> None:
    calls = []
    hook = lambda nodes: calls.append(len(nodes)) or nodes  # noqa: E731
    with inductor_config.patch(_pre_fusion_custom_pass=hook):
        assert seen()[1].kernels
    assert calls


@pytest.mark.parametrize(
    "variable",
    [
        "mutated_arg",
        "node",
        "kwargs",
        "old_tensors_to_clone",
        "shared_view_nodes",
        "user",
        "unique_storages",
    ],
)
def test_a_local_variable_that_is_gone_leaves_a_decision_without_a_known_cause(
    monkeypatch, variable
) -> None:
    read = decisions._Returned

    def without(function, value, place, variables):
        return read(function, value, place, {k: v for k, v in variables.items() if k != variable})

    monkeypatch.setattr(decisions, "_Returned", without)
    causes = []
    for make in (cases.make_shared, cases.make_list_shared, cases.make_old_value_needed):
        fn, args = make()
        with inductor_config.patch(
            enable_auto_functionalized_v2=make is not cases.make_list_shared
        ):
            (graph,) = capture(fn, *args, until="graph").graphs
        causes += [d.cause for d in graph.decisions]
    known = {
        "reinplaced", "same storage already reinplaced", "used later", "list shares storage",
        decisions.NOT_KNOWN,
    }  # fmt: skip
    assert set(causes) <= known
    if variable in ("kwargs", "old_tensors_to_clone"):
        assert causes == []  # which tensors were asked about is not known
    elif variable in ("user", "unique_storages", "mutated_arg"):
        assert decisions.NOT_KNOWN in causes


def test_a_stage_in_another_form_is_noted_and_the_rest_is_read(monkeypatch) -> None:
    from omni_kv.lens import capture as module

    def broken(*_):
        raise AttributeError("'Thing' object has no attribute 'ranges'")

    monkeypatch.setattr(module, "kernels_of", broken)
    captured, graph = seen()
    (note,) = captured.missing
    assert note.startswith("kernels: AttributeError")
    assert graph.decisions
    assert graph.passed_views
