"""The caller's modes reach the run: a fault that shows in one mode alone is found in that one."""

from __future__ import annotations

import pytest
import torch
import trust_cases as cases
from click.testing import CliRunner

from omni_kv.audits.audit import audit
from omni_kv.audits.modes import BadMode, Modes
from omni_kv.cli import main

pytestmark = pytest.mark.compiles

x8 = torch.arange(8.0) + 1


@pytest.mark.parametrize(
    ("fn", "modes", "result"),
    [
        (cases.wrong_with_grad, {"grad": True}, "differs"),
        (cases.wrong_with_grad, {"grad": False}, "same"),
        (cases.wrong_in_inference_mode, {"inference_mode": True}, "differs"),
        (cases.wrong_in_inference_mode, {"inference_mode": False, "grad": False}, "same"),
        (cases.in_compiled_code, {"backend": "aot_eager"}, "differs"),
        (cases.returns_itself_right, {"backend": "aot_eager", "grad": False}, "same"),
        (cases.in_compiled_code, {"mode": "max-autotune-no-cudagraphs"}, "differs"),
        (cases.returns_itself_right, {"mode": "reduce-overhead", "grad": False}, "same"),
    ],
)
def test_a_fault_is_found_in_the_mode_that_it_shows_in(fn, modes, result) -> None:
    report = audit(fn, (x8.clone(),), dynamic=False, threads=1, **modes)
    assert report.comparison("static").result == result, str(report)
    assert (report.verdict == "findings") == (result == "differs")
    if "backend" in modes:
        assert "Inductor alone" in report.text(verbose=True)


def test_a_backend_that_the_callable_was_compiled_with_is_the_one_that_is_run() -> None:
    def times(gm, inputs):
        return lambda *args: tuple(2 * out for out in gm(*args))

    report = audit(torch.compile(cases.returns_less_right, backend=times), (x8,), dynamic=False)
    assert report.comparison("static").result == "differs", str(report)


def test_modes_add_to_what_the_callable_was_compiled_with() -> None:
    def fn(x):
        return x

    compiled = torch.compile(fn, options={"max_fusion_size": 3})
    options = Modes(mode="max-autotune-no-cudagraphs").settings(compiled).options
    assert options["max_fusion_size"] == 3 and options["max_autotune"] is True
    assert Modes().settings(compiled).options == {"max_fusion_size": 3}
    assert Modes(backend="eager").settings(compiled).backend is not None
    assert Modes(backend="inductor").settings(torch.compile(fn, backend="eager")).backend is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "fastest"], "no mode 'fastest'"),
        (["--backend", "none"], "no backend 'none'"),
        (["--backend", "eager", "--mode", "default"], "has no modes"),
        (["--dynamic", "maybe"], "both, true or false"),
        (["--threads", "0"], "at least 1"),
        (["--threads", "two"], "at least 1"),
        (["--grad", "--inference-mode"], "choose one"),
    ],
)
def test_a_mode_that_there_is_not_is_refused_in_one_line(options, said) -> None:
    result = CliRunner().invoke(main, ["audit", "trust_cases:make_wrong_with_grad", *options])
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_from_python_a_mode_that_there_is_not_is_a_value_error() -> None:
    with pytest.raises(BadMode, match="no mode"):
        audit(cases.in_compiled_code, (x8,), mode="fastest")


def test_the_command_takes_modes() -> None:
    command = ["audit", "trust_cases:make_wrong_with_grad", "--dynamic", "false", "--grad"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "dynamic=True" not in result.stdout
