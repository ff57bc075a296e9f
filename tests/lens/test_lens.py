"""The lens: every stage of a compilation, away from every cache, without running anything."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from pathlib import Path

import audit_cases as cases
import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from omni_kv.lens.capture import capture
from omni_kv.lens.decisions import target_name
from omni_kv.lens.fresh import original
from omni_kv.lens.graph import overlap

pytestmark = pytest.mark.compiles


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def only(captured):
    (graph,) = captured.graphs
    return graph


def targets(graph) -> list[str]:
    return [target_name(n.target) for n in graph.nodes if n.op == "call_function"]


def test_each_stage_shows_the_form_of_the_op_that_pytorch_gives_it_there() -> None:
    fn, args = cases.make_shared()
    graph = only(capture(fn, *args))
    assert list(graph.stages()) == [
        "Dynamo graph",
        "AOT forward graph",
        "post-grad before reinplace",
        "post-grad after reinplace",
        "post-grad after decomposition",
    ]
    assert "audit_cases.write.default" not in targets(graph.aot_forward_graph)
    for stage in (graph.aot_forward_graph, graph.post_grad_before_reinplace):
        (node,) = stage.find_nodes(
            op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
        )
        assert len(node.kwargs["_all_bases"]) == 2
        assert "only_clone_these_tensors" not in node.meta
    (node,) = graph.post_grad_after_reinplace.find_nodes(
        op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
    )
    assert node.meta["only_clone_these_tensors"] == [1]
    final = targets(graph.post_grad_after_decomposition)
    assert final.count("aten.clone.default") == 1
    assert final.count("audit_cases.write.default") == 1
    assert final.count("aten.copy_.default") == 2
    assert "audit_cases.write" in graph.generated_code


def test_decisions_are_the_ones_that_the_pass_itself_keeps() -> None:
    for make in (cases.make_shared, cases.make_separate, cases.make_two_calls):
        fn, args = make()
        graph = only(capture(fn, *args, until="graph"))
        nodes = graph.post_grad_after_reinplace.find_nodes(
            op="call_function", target=torch.ops.higher_order.auto_functionalized_v2
        )
        assert nodes
        for node in nodes:
            refused = [
                d.argument for d in graph.decisions if d.node == node.name and not d.reinplaced
            ]
            assert refused == node.meta["only_clone_these_tensors"]


def functional_index_put(k, pool, slots):
    return torch.index_put(pool, (slots,), k)[0]


@pytest.mark.parametrize(
    ("make", "v2", "causes"),
    [
        (cases.make_separate, True, ["reinplaced", "reinplaced"]),
        (cases.make_shared, True, ["reinplaced", "same storage already reinplaced"]),
        (cases.make_shared, False, ["reinplaced", "same storage already reinplaced"]),
        (cases.make_list_shared, False, ["list shares storage"]),
        (cases.make_same_twice, False, ["reinplaced", "same tensor twice"]),
        (cases.make_old_value_needed, True, ["used later", "reinplaced"]),
    ],
)
def test_causes_are_told_apart_by_the_frame_that_returned_the_refusal(make, v2, causes) -> None:
    fn, args = make()
    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        decisions = only(capture(fn, *args, until="graph")).decisions
    assert [d.cause for d in decisions] == causes
    for decision in decisions:
        # The line that is quoted is a line of the pass, and one that returns.
        assert decision.place is not None
        assert "return" in decision.place.text
    if "used later" in causes:
        user, _ = decisions[0].detail
        after = only(capture(fn, *args, until="graph")).post_grad_before_reinplace
        assert user in {n.name for n in after.nodes}


def test_a_functional_write_to_an_input_is_refused_for_want_of_a_copy_back() -> None:
    k, _, slots = cases.tokens()
    pool = cases.separate_pools()[0]
    graph = only(capture(functional_index_put, k, pool, slots, until="graph"))
    assert [d.cause for d in graph.decisions] == ["no copy-back"]


def test_a_view_of_an_input_is_refused_as_such_by_the_older_functionalisation() -> None:
    fn, args = cases.make_in_graph()
    with inductor_config.patch(enable_auto_functionalized_v2=False):
        graph = only(capture(fn, *args, until="graph"))
    causes = {d.cause for d in graph.decisions}
    assert causes & {"view of an input", "same storage already reinplaced"}
    assert "unknown" not in causes


def test_graph_speed_stops_before_code_and_code_speed_before_any_compiler(tmp_path) -> None:
    fn, args = cases.make_shared()
    folder = tmp_path / "cache"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        graph = only(capture(fn, *args, until="graph"))
        assert graph.generated_code is None
        assert graph.kernels == []
        assert only(capture(fn, *args, until="code")).kernels
    assert list(folder.rglob("*.so")) == []
    assert list(Path(folder).rglob("fxgraph")) == []


def test_nothing_is_run_and_no_input_changes() -> None:
    fn, args = cases.make_separate()
    before = [a.clone() for a in args]
    capture(fn, *args)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_what_was_compiled_before_stays_compiled_and_what_comes_after_is_not_affected() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(cases.layer, backend=counter)
    _, args = cases.make_separate()
    compiled(*args)
    assert counter.frame_count == 1
    for slots in (32, 48):
        capture(compiled, *cases.make_separate(slots)[1], until="graph")
    compiled(*args)
    assert counter.frame_count == 1


def test_a_second_capture_with_other_sizes_is_as_static_as_the_first() -> None:
    # Dynamo makes a size symbolic that it has seen change; the lens starts anew each time.
    for slots in (32, 48, 96):
        graph = only(capture(*_unpack(cases.make_separate(slots)), until="graph"))
        assert graph.sizes == {}
    assert only(capture(*_unpack(cases.make_separate()), dynamic=True, until="graph")).sizes


def _unpack(case):
    fn, args = case
    return fn, *args


@pytest.mark.parametrize("fails", [False, True])
def test_every_hook_is_taken_out_again(fails) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering

    def state():
        return (
            compile_fx._recursive_post_grad_passes,
            post_grad.reinplace_inplaceable_ops,
            GraphLowering.save_output_code,
            inductor_config._pre_fusion_custom_pass,
            inductor_config.fx_graph_cache,
            functorch_config.enable_autograd_cache,
        )

    before = state()
    fn, args = cases.make_does_not_compile() if fails else cases.make_shared()
    if fails:
        with pytest.raises(Exception, match="no_fake"):
            capture(fn, *args)
    else:
        capture(fn, *args)
    assert state() == before


def test_with_autograd_on_the_forward_graph_is_looked_at() -> None:
    fn, args = cases.make_index_copy()
    weight = torch.ones(cases.HEAD_DIM, requires_grad=True)

    def with_weight(k, pool, slots):
        return fn(k, pool, slots) + (k * weight).sum()

    with torch.enable_grad():
        graph = only(capture(with_weight, *args))
    assert {i.name for i in graph.inputs} == {"k", "pool", "slots", "weight"}
    assert graph.generated_code is not None


def test_inputs_have_the_callers_names() -> None:
    module, args = cases.make_buffer()
    assert {i.name for i in only(capture(module, *args, until="graph")).inputs} == {
        "k", "v", "slots", "fn.key_pool", "fn.value_pool",
    }  # fmt: skip
    fn, args = cases.make_several_layers()
    names = {i.name for i in only(capture(fn, *args, until="graph")).inputs}
    assert {"pools[0][0]", "pools[2][1]"} <= names


def test_the_callable_behind_torch_compile_is_found() -> None:
    assert original(torch.compile(cases.layer)) is cases.layer
    module, _ = cases.make_buffer()
    assert original(torch.compile(module)) is module
    assert original(module) is module


def test_inputs_that_aotautograd_merged_into_a_synthetic_base_are_marked() -> None:
    fn, args = cases.make_interleaved()
    graph = only(capture(fn, *args, until="graph"))
    merged = {i.name: i.aot for i in graph.inputs if i.merged}
    assert set(merged) == {"key_pool", "value_pool"}
    assert len(set(merged.values())) == 1
    fn, args = cases.make_shared()
    assert not any(i.merged for i in only(capture(fn, *args, until="graph")).inputs)


@pytest.mark.parametrize("dynamic", [None, True])
def test_kernel_reads_are_counted_from_the_pointer_that_the_generated_code_uses(dynamic) -> None:
    fn, args = cases.make_shared()
    graph = only(capture(fn, *args, dynamic=dynamic))
    value_pool = next(i for i in graph.inputs if i.name == "value_pool")
    (clone,) = (k for k in graph.kernels if [r.buffer for r in k.reads] == [value_pool.aot])
    (read,) = clone.reads
    assert read.last - read.first + 1 == value_pool.offset + value_pool.span
    # The index of the record is the index of the code: scalar loops show it.
    offset = read.first
    line = next(x for x in graph.generated_code.splitlines() if "auto tmp0 = in_ptr0[" in x)
    assert ("-" in line) == (offset < 0)


def plain(fn, args, dynamic=None) -> str:
    """Compile with torch.compile alone, and return the code at which it is stopped."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering

    class Stop(BaseException):
        pass

    found = []

    def stop(code):
        found.append(code)
        raise Stop

    torch._dynamo.reset()
    options = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp.vec_isa_ok": False}
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(options):
        patch.setattr(GraphLowering, "save_output_code", stop)
        with functorch_config.patch(enable_autograd_cache=False), contextlib.suppress(Stop):
            torch.compile(fn, backend=compile_fx, dynamic=dynamic)(*args)
    return found[0]


def without_number(code: str) -> str:
    return code.split("\n", 1)[1]  # the first line counts the graphs of the process


def keep(previous, state, delta):
    previous[:] = state[:]
    state.add_(delta)
    return delta * 2


def module_case():
    module, args = cases.make_buffer()
    return module, args


@pytest.mark.parametrize(
    "case",
    [
        cases.make_shared,
        cases.make_interleaved,
        module_case,
        lambda: (keep, (torch.zeros(8), torch.ones(8), torch.ones(8))),
        lambda: (torch.nn.Linear(4, 4), (torch.ones(2, 4),)),
    ],
)
def test_the_code_is_what_torch_compile_generates_without_the_lens(case) -> None:
    fn, args = case()
    seen = only(capture(fn, *args))
    assert without_number(seen.generated_code) == without_number(plain(fn, args))


def test_a_graph_break_is_reported_and_the_graph_before_it_kept() -> None:
    fn, args = cases.make_graph_break()
    captured = capture(fn, *args, until="graph")
    assert "graph_break" in captured.graph_break
    assert captured.graphs[0].decisions


def test_overlap_is_decided_by_elements_and_not_by_ranges() -> None:
    def inputs(make):
        graph = only(capture(*_unpack(make()), until="graph"))
        return [i for i in graph.inputs if "pool" in i.name or i.name == "window"]

    assert overlap(inputs(cases.make_interleaved)) is False
    assert overlap(inputs(cases.make_shared)) is False
    window = [i for i in inputs(cases.make_view_input) if i.name in ("key_pool", "window")]
    assert overlap(window) is True


def test_looking_costs_at_most_half_of_the_compilation_again() -> None:
    fn, args = cases.make_shared()

    def seconds(call) -> float:
        # Of this process alone: others run beside it.
        start = time.process_time()
        call()
        return time.process_time() - start

    def look() -> None:
        capture(fn, *args)

    def compile_alone() -> None:
        plain(fn, args)

    first = seconds(look)
    seconds(compile_alone)
    pairs = [(seconds(compile_alone), seconds(look)) for _ in range(5)]
    ratio = statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)
    assert ratio <= 1.5
    if (os.cpu_count() or 1) >= 2 and os.getloadavg()[0] <= 2:
        assert first < 5
    assert math.isfinite(first)
