"""What the pictures of a compilation show, read from their text and from their artists."""

from __future__ import annotations

from dataclasses import replace

import audit_cases as cases
import matplotlib
import pytest
import torch

matplotlib.use("agg")

from omni_kv.audits.findings import ops_of, summary_of
from omni_kv.lens.capture import capture
from omni_kv.publish.figures.graph import kernel_source, side_by_side, stage_lines, storage_bar

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def graphs():
    made = {}
    with torch.no_grad():
        for name in ("shared", "separate", "interleaved"):
            for label, dynamic in (("static", None), ("dynamic", True)):
                fn, args = getattr(cases, f"make_{name}")()
                made[name, label] = capture(fn, *args, dynamic=dynamic).graphs[0]
    return made


def cloned(graph):
    return next(a for op in ops_of(graph) for a in op.arguments if a.clone is not None)


def test_only_the_pass_and_what_follows_it_differ_between_the_layouts(graphs) -> None:
    picture = side_by_side(
        graphs["shared", "static"], graphs["separate", "static"], ("shared", "separate")
    )
    marked = {stage: (sum(a for a, _ in x), sum(b for b, _ in y)) for stage, x, y in picture.rows()}
    for stage in ("Dynamo graph", "AOT forward graph", "post-grad before reinplace"):
        assert marked[stage] == (0, 0)
    assert marked["post-grad after reinplace"] == (1, 1)
    shared, separate = marked["post-grad after decomposition"]
    assert shared == separate + 3  # as_strided, clone, as_strided


def test_lines_use_the_callers_names_and_leave_out_what_has_nothing_to_do_with_the_pools(
    graphs,
) -> None:
    lines = stage_lines(graphs["shared", "static"], "post-grad after decomposition")
    text = "\n".join(lines)
    assert "value_pool.as_strided([2048], [1], 0)" in text
    assert "key_pool.copy_(key_pool)" in text
    assert "arg" not in text
    assert "mul" not in text
    merged = "\n".join(stage_lines(graphs["interleaved", "static"], "AOT forward graph"))
    assert "_all_bases=[key_pool+value_pool]" in merged
    with pytest.raises(KeyError):
        stage_lines(graphs["shared", "static"], "no such stage")


def test_the_picture_is_a_table_that_escapes_its_text(graphs) -> None:
    picture = side_by_side(graphs["shared", "static"], graphs["separate", "static"], ("<a>", "b"))
    page = picture._repr_html_()
    assert "&lt;a&gt;" in page
    assert page.count("<tr>") == page.count("</tr>") == 1 + 2 * len(picture.stages)
    assert str(picture) == repr(picture)


@pytest.mark.parametrize("label", ["static", "dynamic"])
def test_the_kernel_is_reduced_to_the_loop_of_the_clone_with_its_index(graphs, label) -> None:
    graph = graphs["shared", label]
    argument = cloned(graph)
    lines = kernel_source(graph, argument).data.splitlines()
    (load,) = (line for line in lines if "<--" in line)
    assert "value_pool" in lines[0]
    assert lines[1].startswith("for(")
    assert "static_cast" not in load
    assert ("-" in load.split("=")[1].split("//")[0]) == (argument.clone.first < 0)
    no_clone = argument.model_copy(update={"clone": None})
    assert kernel_source(graphs["separate", label], no_clone).data == ""


def test_of_a_triton_kernel_the_function_is_shown_as_python(graphs) -> None:
    kernel = """
import triton

@triton_heuristics.pointwise(size_hints={'x': 64})
@triton.jit
def triton_poi_fused_clone_0(in_ptr0, out_ptr0, xnumel):
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp0, xmask)
"""
    code = (
        f"triton_poi_fused_clone_0 = async_compile.triton('k', '''{kernel}''', device_str='cuda')"
    )
    graph = replace(graphs["shared", "static"], generated_code=code)
    argument = cloned(graphs["shared", "static"])
    call = ("triton_poi_fused_clone_0.run(arg, buf, 64)", "tmp0 = tl.load(in_ptr0 + (x0), xmask)")
    clone = argument.clone.model_copy(update={"kernel": call})
    shown = kernel_source(graph, argument.model_copy(update={"clone": clone}))
    lines = shown.data.splitlines()
    assert shown.language == "python"
    assert lines[:2] == ["# in_ptr0 is value_pool, out_ptr the clone", "@triton.jit"]
    assert [line for line in lines if "<--" in line] == [f"    {call[1]}  # <--"]


def test_the_bars_are_as_long_as_what_is_read_and_handed(graphs) -> None:
    static = graphs["shared", "static"]
    argument = cloned(static)
    figure = storage_bar({"static": static})
    (axes,) = figure.axes
    boxes = [(p.get_x(), p.get_width(), round(p.get_y() + 0.3)) for p in axes.patches]
    half = cases.SLOTS * cases.HEADS * cases.HEAD_DIM

    def extent(row):
        found = [(x, x + width) for x, width, r in boxes if r == row]
        return min(a for a, _ in found), max(b for _, b in found)

    assert extent(0) == (0, 2 * half)
    assert extent(1) == (half + argument.clone.first, half + argument.clone.last + 1)
    assert extent(2) == (half + argument.shift, 2 * half + argument.shift)
    hatched = sum(p.get_width() for p in axes.patches if p.get_hatch() and p.get_y() < 1.5)
    assert hatched == argument.clone.outside_after + argument.clone.outside_before
    matplotlib.pyplot.close(figure)


def test_nothing_cloned_is_said_instead_of_drawn(graphs) -> None:
    figure = storage_bar({"static": graphs["separate", "static"]})
    assert figure.axes[0].texts[0].get_text() == "nothing is cloned"
    matplotlib.pyplot.close(figure)


def test_the_summary_holds_plain_types_only(graphs) -> None:
    import json

    for graph in graphs.values():
        summary = summary_of(graph)
        assert json.loads(json.dumps(summary)) == summary
    assert summary_of(graphs["shared", "static"])["value_pool"]["elements cloned"] == 2048
