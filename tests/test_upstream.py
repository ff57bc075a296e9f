"""The candidate fixes are put in and taken out again, and refuse what they do not know."""

import inspect
import operator
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kv.upstream import (
    aliasing_in_cache_key,
    diff,
    fixes,
    installed,
    overlap_check,
    view_storage_offset,
)
from omni_kv.upstream.__main__ import main
from omni_kv.upstream.install import fixed_sources


def test_the_pass_is_put_back_after_the_trial():
    from torch._inductor.fx_passes import reinplace

    original = reinplace.reinplace_inplaceable_ops_core
    with overlap_check():
        assert reinplace.reinplace_inplaceable_ops_core is not original
    assert reinplace.reinplace_inplaceable_ops_core is original


def left_to_clone(first, second) -> list[int]:
    """Bases that the reinplace pass leaves to clone, of an op that mutates two graph inputs."""
    import torch
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("first", "second")]
    op = torch.ops.aten._foreach_add_.List  # only its name is looked at
    functional = torch.ops.higher_order.auto_functionalized_v2
    node = graph.call_function(functional, (op,), {"_all_bases": inputs})
    for number, (node_in, value) in enumerate(zip(inputs, (first, second), strict=True)):
        node_in.meta["val"] = value
        written = graph.call_function(operator.getitem, (node, number + 1))
        graph.call_function(torch.ops.aten.copy_.default, (node_in, written))
    graph.output(())
    reinplace_inplaceable_ops_core(graph)
    return node.meta["only_clone_these_tensors"]


def test_with_the_overlap_check_only_arguments_that_overlap_are_cloned():
    import torch

    kv = torch.zeros(2, 8, 4)
    halves, overlapping = (kv[0], kv[1]), (kv.view(16, 4)[:9], kv.view(16, 4)[8:])
    interleaved = (kv.view(8, 2, 4)[:, 0], kv.view(8, 2, 4)[:, 1])
    assert left_to_clone(*halves) == [1]
    with overlap_check():
        assert left_to_clone(*halves) == []
        assert left_to_clone(*interleaved) == []
        assert left_to_clone(*overlapping) == [1]
        assert left_to_clone(kv, kv) == [1]
        assert left_to_clone(kv[0], torch.zeros(8, 4)) == []


def test_with_aliasing_in_the_key_inputs_that_share_a_storage_have_keys_of_their_own():
    import torch
    from torch._inductor import codecache

    kv = torch.zeros(2, 8, 4)
    separate = [torch.zeros(8, 4), torch.zeros(8, 4), 3]
    with aliasing_in_cache_key():
        aliasing = codecache.input_aliasing
        assert aliasing(separate) == [None, None, None]
        assert aliasing([kv[0], kv[1]]) == [(0, 0), (0, 32)]
        assert aliasing([kv[1], kv[0]]) == [(0, 32), (0, 0)]
        assert aliasing([3, kv[1]]) == [None, (1, 32)]


def test_a_lowering_that_a_fix_adds_is_taken_out_again():
    import torch
    from torch._inductor import lowering

    target = torch.ops.aten.sym_storage_offset.default
    before = dict(lowering.lowerings)
    with view_storage_offset():
        assert lowering.lowerings[target].__name__ == "sym_storage_offset"
    assert lowering.lowerings == before
    assert not hasattr(lowering, "sym_storage_offset")


def test_a_fallback_of_an_earlier_compilation_does_not_stand_in_the_way_of_a_fix(monkeypatch):
    import torch
    from torch._inductor import lowering

    target = torch.ops.aten.sym_storage_offset.default
    fallback = lowering.fallback_handler(target, add_to_fallback_set=False)
    monkeypatch.setitem(lowering.lowerings, target, fallback)
    with view_storage_offset():
        assert lowering.lowerings[target].__name__ == "sym_storage_offset"
    assert lowering.lowerings[target] is fallback


def test_a_lowering_that_a_fix_changes_is_the_one_that_is_used(monkeypatch):
    import torch
    from torch._inductor import lowering

    old = "def sym_numel(a):\n    return a.get_numel()\n"
    change = fixes.Change(lowering.__name__, old, old.replace("a.get_numel()", "12345"))
    monkeypatch.setitem(fixes.FIXES, "trial", ((change,),))
    with installed("trial"):
        assert lowering.lowerings[torch.ops.aten.sym_numel.default](None) == 12345


def test_what_is_compiled_with_a_fix_has_cache_keys_of_its_own():
    from torch.compiler import config

    before = config.cache_key_tag
    with overlap_check():
        assert config.cache_key_tag != before
    assert config.cache_key_tag == before


def test_a_fix_is_taken_out_when_the_trial_raises():
    from torch._inductor.fx_passes import reinplace

    original = reinplace.reinplace_inplaceable_ops_core
    with pytest.raises(ZeroDivisionError), overlap_check():
        raise ZeroDivisionError
    assert reinplace.reinplace_inplaceable_ops_core is original


@pytest.mark.parametrize("times", [0, 2])
def test_lines_that_are_not_there_exactly_once_are_refused(monkeypatch, times):
    from torch._inductor.fx_passes import reinplace

    lines = inspect.getsource(reinplace).splitlines(keepends=True)
    twice = next(line for line in lines if line.strip() and lines.count(line) >= 2)
    text = {0: "        no_such_line = 1\n", 2: twice}[times]
    change = fixes.Change(reinplace.__name__, text, "        pass\n")
    monkeypatch.setitem(fixes.FIXES, "trial", ((change,),))
    original = reinplace.reinplace_inplaceable_ops_core
    with pytest.raises(RuntimeError, match="does not have the lines"), installed("trial"):
        pass
    assert reinplace.reinplace_inplaceable_ops_core is original


def test_the_first_form_that_fits_is_used(monkeypatch):
    from torch._inductor.fx_passes import reinplace

    name = reinplace.__name__
    old = "def reinplace_inplaceable_ops_core(graph: torch.fx.Graph) -> None:\n"
    missing = fixes.Change(name, "no_such_line = 1\n", "")
    forms = ((missing,), (fixes.Change(name, old, f"# here\n{old}"),))
    monkeypatch.setitem(fixes.FIXES, "trial", forms)
    assert "+# here" in diff("trial")


def test_the_overlap_check_is_a_patch_that_gives_the_fixed_source(tmp_path):
    (before, after), *_ = fixed_sources("overlap-check").values()
    file = tmp_path / "torch/_inductor/fx_passes/reinplace.py"
    file.parent.mkdir(parents=True)
    file.write_text(before)
    patch = diff("overlap-check")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    assert file.read_text() == after != before


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-fix", "script.py"], ["overlap-check"], ["overlap-check", "no-such-script.py"]],
)
def test_a_bad_command_is_answered_in_one_line(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_a_fix_that_this_torch_does_not_know_is_refused_by_the_command(
    monkeypatch, capsys, tmp_path: Path
):
    change = fixes.Change("torch._inductor.lowering", "no_such_line = 1\n", "")
    monkeypatch.setitem(fixes.FIXES, "trial", ((change,),))
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('this script must not run')")
    assert main(["trial", str(script)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.compiles
def test_the_command_runs_the_script_with_its_arguments_and_exit_code(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(len(sys.argv))")
    command = [sys.executable, "-m", "omni_kv.upstream", "overlap-check", str(script), "a", "b"]
    assert subprocess.run(command, check=False).returncode == 3
