"""The audit against cases whose outcome is known or measured, and against built-in faults.

What the torch releases disagree on is not asserted by release: it must follow from what the report
says itself, such as where the kernel reads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import audit_cases as cases
import pytest
import torch
from click.testing import CliRunner

import omni_kv
from omni_kv.audits import compare
from omni_kv.audits.audit import Call, audit, audit_all
from omni_kv.audits.modes import Modes
from omni_kv.audits.report import AuditReport, Clone
from omni_kv.cli import main
from omni_kv.testing import assert_compiles_faithfully, assert_no_clones

pytestmark = pytest.mark.compiles

STATIC = Modes(dynamic=False)

SAME_STORAGE = "same storage already reinplaced"

#: For each case, the arguments that are cloned with static and with dynamic shapes, and the cause.
CLONED = {
    "shared": {"value_pool": SAME_STORAGE},
    "shared_zeros": {"value_pool": SAME_STORAGE},
    "separate": {},
    "one_tensor": {},
    "in_graph": {},
    "interleaved": {},
    "list_shared": {"pools[1]": SAME_STORAGE},
    "list_separate": {},
    "same_twice": {},
    "view_used_again": {},
    "view_input": {},
    "two_calls": {"value_pool": SAME_STORAGE},
    "several_layers": {},
    "buffer": {},
    "buffer_shared": {"value_pool": SAME_STORAGE},
    "intermediate": {},
    "functional": {},
    "index_copy": {},
    "old_value_needed": {"key_pool": "used later"},
}
#: Cases with a second call over a pool of another size.
RESIZED = ("shared", "separate", "one_tensor", "in_graph", "interleaved")
#: Cases that are right and in place on every release, whatever the shapes.
SOUND = [
    name for name, cloned in CLONED.items() if not cloned and name not in ("in_graph", "functional")
]
#: The line of ``graph_break`` that breaks the graph.
BREAKS_AT = cases.graph_break.__code__.co_firstlineno + 2
BUILT_IN = ("differs", "peeks_behind", "peeks_in_front", "eager_raises")
OTHERS = ("interleaved_without_base",)


def made(name: str, *sizes: int):
    return getattr(cases, f"make_{name}")(*sizes)


@pytest.fixture(scope="module")
def reports() -> dict[str, AuditReport]:
    names = [*CLONED, *BUILT_IN, *OTHERS]
    calls = []
    for name in names:
        fn, args = made(name)
        second = made(name, 96)[1] if name in RESIZED else None
        calls.append(Call(fn, args, second=second))
    with torch.no_grad():
        return dict(zip(names, audit_all(calls), strict=True))


def shapes_and_comparisons(report: AuditReport):
    for shapes in report.shapes:
        assert shapes.problem is None
        yield shapes, report.comparison(shapes.label)


@pytest.mark.parametrize("name", CLONED)
def test_what_is_cloned_and_why(reports, name) -> None:
    for shapes, _ in shapes_and_comparisons(reports[name]):
        cloned = {
            a.name: a.cause for op in shapes.ops for a in op.arguments if a.outcome == "cloned"
        }
        assert cloned == CLONED[name]


@pytest.mark.parametrize("name", CLONED)
def test_a_run_is_right_exactly_if_every_op_is_handed_its_own_elements(reports, name) -> None:
    for shapes, comparison in shapes_and_comparisons(reports[name]):
        arguments = [a for op in shapes.ops for a in op.arguments if op.kind != "ATen"]
        if not any(i.merged for i in shapes.aliases):
            assert all(a.shift is not None for a in arguments)
        right = not any(a.misled for a in arguments)
        assert comparison.runs[0].memory == "filled on both sides"
        assert comparison.runs[0].result == ("same" if right else "differs")


@pytest.mark.parametrize("name", CLONED)
def test_a_run_crashes_exactly_if_a_clone_reads_into_the_unmapped_page(reports, name) -> None:
    for shapes, comparison in shapes_and_comparisons(reports[name]):
        clones = [a.clone for op in shapes.ops for a in op.arguments if a.clone is not None]
        runs = {run.memory: run.result for run in comparison.runs}
        behind = any(clone.outside_after for clone in clones)
        in_front = any(clone.outside_before for clone in clones)
        assert (runs["unmapped behind"] == "crashed") == behind
        assert (runs["unmapped in front"] == "crashed") == in_front


@pytest.mark.parametrize("name", SOUND)
def test_sound_layouts_are_clean_static_dynamic_and_resized(reports, name) -> None:
    report = reports[name]
    assert report.verdict == "clean"
    assert report.findings == []
    labels = [c.label for c in report.comparisons]
    assert labels == ["static", *(["second call"] if name in RESIZED else []), "dynamic=True"]
    assert {c.result for c in report.comparisons} == {"same"}
    assert all(len(c.runs) >= 3 for c in report.comparisons)
    assert all(op.arguments for shapes in report.shapes for op in shapes.ops)


def test_clone_of_the_second_half_is_as_large_as_both_halves(reports) -> None:
    for shapes in reports["shared"].shapes:
        (argument,) = (a for op in shapes.ops for a in op.arguments if a.outcome == "cloned")
        half = cases.SLOTS * cases.HEADS * cases.HEAD_DIM
        assert argument.clone.argument_elements == half
        assert argument.clone.elements == 2 * half
        assert argument.clone.bytes == 2 * half * 4
        assert argument.clone.kernel
        assert "same storage" in argument.why
        assert "do not overlap" in argument.why
        assert argument.advice


def test_the_kernel_of_the_clone_starts_at_the_pointer_or_at_the_storage(reports) -> None:
    static = reports["shared"].shapes[0]
    (clone,) = (a.clone for op in static.ops for a in op.arguments if a.clone is not None)
    assert clone.first in (0, clone.storage_first)
    assert clone.reads_outside == (clone.first == 0)
    result = reports["shared"].comparison("static").result
    assert result == ("crashed" if clone.reads_outside else "same")


def test_values_from_outside_are_traced_to_the_pattern_behind_the_storage(reports) -> None:
    shapes = reports["shared"].shapes[0]
    (argument,) = (a for op in shapes.ops for a in op.arguments if a.clone is not None)
    run = reports["shared"].comparison("static").runs[0]
    if not argument.misled:
        assert run.differences == []
        return
    found = {d.tensor: d for d in run.differences}
    assert argument.sees == "outside the storage"
    untouched = (cases.SLOTS - cases.TOKENS) * cases.HEADS * cases.HEAD_DIM
    assert found["value_pool"].equal_to == {"the pattern behind the storage": untouched}


def test_one_half_that_is_overwritten_by_the_other_is_named(reports) -> None:
    for name, other in (("shared", "key_pool"), ("list_shared", "pools[0]")):
        shapes = reports[name].shapes[1]
        run = reports[name].comparison("dynamic=True").runs[0]
        (argument,) = (a for op in shapes.ops for a in op.arguments if a.clone is not None)
        found = {d.tensor: d.equal_to for d in run.differences}
        if argument.misled:
            assert argument.sees == f"which is where {other} begins"
            assert f"{other} at the same place" in found[argument.input]
        else:
            assert found == {}


def test_a_slice_taken_in_the_graph_loses_its_offset_with_dynamic_shapes(reports) -> None:
    static, dynamic = reports["in_graph"].shapes
    assert not any(a.misled for op in static.ops for a in op.arguments)
    misled = [a.name for op in dynamic.ops for a in op.arguments if a.misled]
    differs = {c.label: c.result == "differs" for c in reports["in_graph"].comparisons}
    # The size that changed between the calls is as symbolic as one that was symbolic at first.
    assert differs == {"static": False, "dynamic=True": bool(misled), "second call": bool(misled)}
    assert misled in ([], ["value_pool"])


def test_a_resized_pool_makes_a_fault_of_dynamic_shapes_appear_without_asking_for_them(
    reports,
) -> None:
    report = reports["shared"]
    assert report.comparison("second call").result == report.comparison("dynamic=True").result


def test_views_are_compiled_with_the_bases_that_the_caller_gave_them(reports) -> None:
    # A common base and a merely common storage take different ways through AOTAutograd. Both are
    # right with static shapes; what does not compile is said to, and is said by the lens and the
    # run alike.
    report = reports["interleaved_without_base"]
    assert report.shapes[0].aliases[0].merged
    assert report.comparison("static").result == "same"
    for shapes in report.shapes:
        results = [c.result for c in report.comparisons if c.label == shapes.label]
        assert results == (["raised"] if shapes.problem else ["same"])
        if shapes.problem:
            assert "does not compile" in shapes.problem
            assert any(f.startswith(f"{shapes.label}: compiled raises") for f in report.findings)


def test_inputs_that_share_a_storage_are_listed_with_overlap_and_synthetic_base(reports) -> None:
    def alias(name):
        (found,) = reports[name].shapes[0].aliases
        return found.inputs, found.overlap, found.merged

    assert alias("shared") == (["key_pool", "value_pool"], False, False)
    assert sorted(alias("interleaved")[0]) == ["key_pool", "value_pool"]
    assert alias("interleaved")[1:] == (False, True)
    assert sorted(alias("view_input")[0]) == ["key_pool", "window"]
    assert alias("view_input")[1:] == (True, True)
    assert reports["separate"].shapes[0].aliases == []


def test_kinds_of_ops_are_told_apart(reports) -> None:
    def kinds(name):
        return {(op.name, op.kind) for shapes in reports[name].shapes for op in shapes.ops}

    assert kinds("separate") == {("audit_cases.write.default", "auto_functionalized_v2")}
    assert kinds("functional") == set()
    assert {kind for _, kind in kinds("index_copy")} == {"ATen"}
    assert len(reports["several_layers"].shapes[0].ops) == 3
    assert len(reports["two_calls"].shapes[0].ops) == 2
    (intermediate,) = reports["intermediate"].shapes[0].ops
    assert [a.input for a in intermediate.arguments] == [None, None]


def adds(pool):
    pool.add_(1)
    return pool * 2


def test_an_aten_result_that_is_stored_into_its_input_is_no_clone() -> None:
    with torch.no_grad():
        report = audit(adds, (torch.ones(4),), run=False)
    for shapes in report.shapes:
        (op,) = shapes.ops
        assert (op.kind, op.name) == ("ATen", "aten.add.Tensor")
        assert [(a.input, a.outcome) for a in op.arguments] == [("pool", "written back")]
    assert report.verdict == "clean"


def test_a_built_in_difference_is_found(reports) -> None:
    report = reports["differs"]
    assert report.verdict == "findings"
    for comparison in report.comparisons:
        assert comparison.result == "differs"
        for run in comparison.runs:
            (difference,) = run.differences
            assert difference.tensor == "pool"
            assert difference.elements == cases.TOKENS * cases.HEADS * cases.HEAD_DIM
            assert difference.first == [1, 0, 0]
            assert difference.largest == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "memory", "side"),
    [
        ("peeks_behind", "unmapped behind", "behind"),
        ("peeks_in_front", "unmapped in front", "in front of"),
    ],
)
def test_a_built_in_read_outside_crashes_and_its_value_is_recognised(
    reports, name, memory, side
) -> None:
    report = reports[name]
    assert report.verdict == "findings"
    for comparison in report.comparisons:
        assert comparison.result == "crashed"
        runs = {run.memory: run for run in comparison.runs}
        assert runs[memory].result == "crashed"
        assert runs[memory].how in ("SIGSEGV", "SIGBUS")
        found = {d.tensor: d for d in runs["filled on both sides"].differences}
        assert found["pool"].equal_to[f"the pattern {side} the storage"] == found["pool"].elements


def test_a_clone_that_reads_elsewhere_is_seen_by_exactly_how_far(monkeypatch) -> None:
    # The lowering of as_strided is made to start further on: the extent must follow.
    from torch._inductor import lowering

    as_strided = torch.ops.aten.as_strided.default
    right = lowering.lowerings[as_strided]

    def begins(fn, args) -> tuple[Clone, int]:
        with torch.no_grad():
            (shapes,) = audit(fn, args, run=False, dynamic=False).shapes
        (argument,) = (a for op in shapes.ops for a in op.arguments if a.clone is not None)
        return argument.clone, argument.shift

    fn, args = cases.make_shared()
    before, shift_before = begins(fn, args)
    further = 3 * cases.HEAD_DIM

    def faulty(x, size, stride, offset=None):
        clones = len(size) == 1 and offset == 0
        return right(x, size, stride, further if clones else offset)

    monkeypatch.setitem(lowering.lowerings, as_strided, faulty)
    after, shift_after = begins(fn, args)
    assert after.first - before.first == further
    assert after.outside_after - before.outside_after == further
    assert after.reads_outside
    assert shift_after - shift_before == further


def test_the_extent_outside_a_storage_is_counted_on_both_sides() -> None:
    def clone(first: int, last: int) -> Clone:
        return Clone(
            elements=last - first + 1, bytes=4, bytes_per_element=4,
            storage_first=-4, storage_last=3, first=first, last=last,
        )  # fmt: skip

    assert (clone(0, 7).outside_before, clone(0, 7).outside_after) == (0, 4)
    assert (clone(-8, -1).outside_before, clone(-8, -1).outside_after) == (4, 0)
    assert (clone(-4, 3).reads_outside, clone(-5, 4).reads_outside) == (False, True)
    assert (clone(10, 11).outside_after, clone(-11, -10).outside_before) == (2, 2)
    unknown = Clone(elements=1, bytes=4, bytes_per_element=4)
    assert unknown.reads_outside is None


def in_a_script(k, v, key_pool, value_pool, slots):
    return torch.ops.audit_cases.write(k, v, key_pool, value_pool, slots)


def with_a_lock(k, lock=threading.Lock()):  # noqa: B008
    return k + 1


def test_a_function_of_a_script_finds_its_ops_and_one_that_cannot_travel_says_so(
    monkeypatch,
) -> None:
    # By value, as a function of a notebook is pickled.
    in_a_script.__module__ = with_a_lock.__module__ = "__main__"
    calls = [Call(in_a_script, cases.make_separate()[1]), Call(with_a_lock, [torch.ones(2)])]
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            script, lock = audit_all(calls, modes=STATIC)
        assert script.verdict == "clean"
        assert lock.verdict == "could not run"
        assert "uses CUDA cannot be forked" in lock.sentence


def writes_with_a_lock(pool, lock=threading.Lock()):  # noqa: B008
    pool.add_(2 if torch.compiler.is_compiling() else 1)


def right_with_a_lock(pool, lock=threading.Lock()):  # noqa: B008
    pool.add_(1)


@pytest.mark.parametrize("alone", [True, False])
def test_what_cannot_travel_is_run_by_fork(monkeypatch, alone) -> None:
    monkeypatch.setattr(compare, "single_threaded", lambda: alone)
    pools = [torch.zeros(8), torch.zeros(8)]
    calls = [Call(writes_with_a_lock, pools[:1]), Call(right_with_a_lock, pools[1:])]
    for call in calls:
        call.fn.__module__ = "__main__"
    torch.ones(1 << 20).add_(1)  # so that there may be a pool of threads
    with torch.no_grad():
        wrong, right = audit_all(calls, modes=Modes(dynamic=False, threads=1))
    assert wrong.comparison("static").result == "differs"
    assert right.verdict == "clean", str(right)
    assert [pool.tolist() for pool in pools] == [[0.0] * 8] * 2
    assert ("several threads were not looked at" in str(right)) == (not alone)


def test_an_eager_call_that_raises_where_compiled_returns_is_a_finding(reports) -> None:
    report = reports["eager_raises"]
    assert report.verdict == "findings"
    assert any("eager raises ValueError: not in eager" in f for f in report.findings)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("does_not_compile", "does not compile"),
        ("no_graph", "makes no graph"),
        ("needs_a_gpu", "needs a GPU"),
        ("graph_break", f"breaks the graph.*audit_cases.py:{BREAKS_AT}"),
    ],
)
def test_what_cannot_be_audited_gets_a_plain_sentence(name, sentence) -> None:
    if name == "needs_a_gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fn, args = made(name)
    with torch.no_grad():
        report = audit(fn, args, run=False)
    assert report.verdict == "could not run"
    assert re.search(sentence, report.sentence)
    assert "\n" not in report.sentence
    assert "Traceback" not in str(report)


def test_small_copies_are_counted_and_left_quiet() -> None:
    fn, args = cases.make_old_value_needed()
    pool = 4 * cases.SLOTS * cases.HEADS * cases.HEAD_DIM
    with torch.no_grad():
        loud, quiet = (
            audit(fn, args, run=False, dynamic=False, min_bytes=least) for least in (pool, pool + 1)
        )
    assert loud.verdict == "findings" and loud.left_quiet == 0
    assert quiet.verdict == "clean" and quiet.left_quiet == 1
    assert "or is small" in quiet.sentence and f"less than {pool + 1:,} bytes: 1" in quiet.sentence
    fn, args = cases.make_shared()
    with torch.no_grad():
        outside = audit(fn, args, run=False, dynamic=False, min_bytes=1 << 30)
    reads = outside.reads_outside or any(a.misled for a in outside.clones)
    assert (outside.verdict == "findings") == reads, "what is wrong is never small"


def test_the_command_refuses_a_number_of_bytes_that_is_none() -> None:
    result = CliRunner().invoke(main, ["audit", "audit_cases:make_shared", "--min-bytes", "few"])
    assert result.exit_code == 2
    assert "--min-bytes" in result.stderr and result.stderr.count("\n") == 1


def test_reports_say_the_same_as_text_html_and_json(reports) -> None:
    report = reports["shared"]
    again = AuditReport.model_validate_json(report.model_dump_json())
    assert again == report
    page = report._repr_html_()
    for word in ("value_pool", "cloned", SAME_STORAGE.split()[0]):
        assert word in str(report)
        assert word in page
    assert "<td" in page
    assert page.count("<table") == page.count("</table>")


def test_a_compiled_callable_and_its_original_get_the_same_report() -> None:
    fn, args = cases.make_shared()
    with torch.no_grad():
        plain = audit(fn, args, run=False, until="graph")
        compiled = omni_kv.audit(torch.compile(fn), args, run=False, until="graph")
    assert [a.cause for a in plain.clones] == [a.cause for a in compiled.clones]
    assert plain.clones


def test_assert_no_clones_fails_with_the_report() -> None:
    with torch.no_grad():
        fn, args = cases.make_separate()
        assert_no_clones(fn, args)
        fn, args = cases.make_shared()
        with pytest.raises(AssertionError, match="same storage already reinplaced"):
            assert_no_clones(fn, args)
        fn, args = cases.make_graph_break()
        with pytest.raises(AssertionError, match="graph break"):
            assert_no_clones(fn, args)


def test_assert_compiles_faithfully_fails_with_the_report() -> None:
    with torch.no_grad():
        fn, args = cases.make_separate()
        assert_compiles_faithfully(fn, args, dynamic=False)
        fn, args = cases.make_differs()
        with pytest.raises(AssertionError, match="64 of 1,024 elements differ"):
            assert_compiles_faithfully(fn, args, dynamic=False)


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("make_separate", 0),
        ("make_functional", 0),
        ("make_shared", 1),
        ("make_no_graph", 2),
        ("make_graph_break", 2),
        ("make_does_not_compile", 2),
    ],
)
def test_the_command_ends_with_the_exit_code_of_its_verdict(case, code) -> None:
    result = CliRunner().invoke(main, ["audit", f"audit_cases:{case}", "--no-run"])
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_the_command_prints_json_that_is_the_report() -> None:
    script = [sys.executable, "-m", "omni_kv.cli", "audit", "audit_cases:make_shared", "--no-run"]
    done = subprocess.run(
        [*script, "--json"], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 1
    report = AuditReport.model_validate(json.loads(done.stdout))
    assert report.clones


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("audit_cases", "name the case as package.module:function"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("audit_cases:make_nothing", "has no 'make_nothing'"),
        ("audit_cases:tokens", "returned no (callable, arguments)"),
        ("audit_cases:made_wrong", "has no 'made_wrong'"),
    ],
)
def test_what_is_no_case_is_refused_in_one_line(target, said) -> None:
    result = CliRunner().invoke(main, ["audit", target])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def triton_without_a_gpu(monkeypatch):
    """Let Dynamo take Triton kernels without a device: graph passes need none."""
    pytest.importorskip("triton")
    import torch.utils._triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        launcher_cls = utils = None

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda **_: True)
    monkeypatch.setattr(driver, "_active", Driver())


def test_user_defined_triton_kernels_are_audited_as_far_as_the_graph(triton_without_a_gpu) -> None:
    import triton_cases

    def outcomes(x, y):
        with torch.no_grad():
            report = audit(triton_cases.add_one_to_both, (x, y), run=False, until="graph")
        for shapes in report.shapes:
            assert shapes.problem is None
        return [
            {a.name: a.cause for op in shapes.ops for a in op.arguments} for shapes in report.shapes
        ]

    halves = torch.randn(2, 64)
    shared = {"x_pointer": "reinplaced", "y_pointer": SAME_STORAGE}
    separate = {"x_pointer": "reinplaced", "y_pointer": "reinplaced"}
    assert outcomes(halves[0], halves[1]) == [shared, shared]
    assert outcomes(halves[0].clone(), halves[1].clone()) == [separate, separate]
