"""The audit is never clean where plain compile is wrong, and blames nobody where it is right.

Each case has its fault built in: code that does something else while it is compiled.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import trust_cases as cases
from click.testing import CliRunner

from omni_kv.audits import audit as engine
from omni_kv.audits import compare
from omni_kv.audits.audit import Call, audit, audit_all
from omni_kv.audits.differences import wrong_elements
from omni_kv.audits.jobs import Job
from omni_kv.audits.modes import Modes
from omni_kv.audits.report import AuditReport
from omni_kv.audits.settings import TorchSettings
from omni_kv.audits.threads import ONE_CORE, Machine, callers_machine, cores
from omni_kv.cli import main
from omni_kv.lens import capture as lens
from omni_kv.sandbox.process import run_isolated

pytestmark = pytest.mark.compiles

STATIC = Modes(dynamic=False)

x8 = torch.arange(8.0) + 1
CALLS = {
    "keep": Call(*cases.make_keep()),
    "tiny values": Call(*cases.make_tiny_values()),
    "tiny values, right": Call(cases.tiny_values_right, cases.make_tiny_values()[1]),
    "dataclass": Call(cases.in_a_dataclass, (x8,)),
    "dataclass, right": Call(cases.in_a_dataclass_right, (x8,)),
    "result is an argument": Call(cases.returns_itself, (x8.clone(),)),
    "times one": Call(cases.times_one, (x8.clone(),)),
    "result is an argument, right": Call(cases.returns_itself_right, (x8.clone(),)),
    "missing result": Call(cases.returns_less, (x8,)),
    "missing result, right": Call(cases.returns_less_right, (x8,)),
    "strides": Call(cases.strides, (x8,)),
    "global": Call(cases.in_a_global, (x8,)),
    "global, right": Call(cases.in_a_global_right, (x8,)),
    "partly compiled": Call(cases.partly_compiled, (x8,)),
    "undeclared": Call(cases.undeclared, (x8.clone(),)),
    "positive": Call(*cases.make_grow()),
    "dropout": Call(cases.dropout, (torch.zeros(64), torch.ones(64))),
    "compile raises": Call(cases.compile_raises, (x8.clone(),)),
    "race": Call(*cases.make_slides_left()),
    "race, right": Call(*cases.make_slides_left_right()),
    "eager raises": Call(cases.beyond, (x8.clone(),)),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, AuditReport]:
    with torch.no_grad():
        made = audit_all(list(CALLS.values()), modes=Modes(dynamic=False, threads=2))
    return dict(zip(CALLS, made, strict=True))


def plainly(fn, args) -> list[torch.Tensor]:
    """The arguments after a call of what plain ``torch.compile`` makes, in this process."""
    given = [arg.clone() for arg in args]
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(fn)(*given)
    return given


def test_the_callers_own_program_is_compiled(reports) -> None:
    fn, args = cases.make_keep()
    expected = [arg.clone() for arg in args]
    fn(*expected)
    right = all(torch.equal(a, b) for a, b in zip(plainly(fn, args), expected, strict=True))
    assert reports["keep"].comparison("static").result == ("same" if right else "differs")


WITH_TWIN = ["tiny values", "dataclass", "global", "result is an argument", "missing result"]


@pytest.mark.parametrize("kind", WITH_TWIN)
def test_what_differs_is_found_and_its_twin_is_not_blamed(reports, kind) -> None:
    assert reports[kind].verdict == "findings"
    assert reports[kind].comparison("static").result == "differs"
    assert reports[f"{kind}, right"].comparison("static").result == "same"


several_cores = pytest.mark.skipif(cores() < 2, reason="a race needs two cores")


@pytest.fixture(scope="module")
def race_shows() -> bool:
    """Whether plain ``torch.compile`` is wrong in any of some calls with two threads."""
    env = {"OMP_NUM_THREADS": "2"}
    return run_isolated(calls_that_differ, *cases.make_slides_left(), env=env).unwrap() > 0


@several_cores
def test_a_race_of_two_threads_is_found_and_its_twin_is_not_blamed(reports, race_shows) -> None:
    *laid, threaded = reports["race"].comparison("static").runs
    assert {run.result for run in laid} == {"same"}
    assert (threaded.result == "differs") == race_shows
    if race_shows:
        assert "calls with 2 threads" in threaded.how
        assert any("calls with 2 threads" in finding for finding in reports["race"].findings)
    twin = reports["race, right"].comparison("static").runs
    assert len(twin) == 4 and {run.result for run in twin} == {"same"}


@several_cores
def test_the_command_line_finds_the_race_in_forks_of_its_own(race_shows) -> None:
    command = [sys.executable, "-m", "omni_kv.cli", "audit", "trust_cases:make_slides_left"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    found = (done.returncode, "calls with 2 threads" in done.stdout)
    assert found == (int(race_shows), race_shows), done.stdout + done.stderr


@several_cores
def test_the_calls_with_threads_compile_nothing_anew(tmp_path) -> None:
    """Dynamo compiles again where the number of threads is another: then it is other code."""

    def compiled(job: Job, told: Path) -> tuple[list[str], list[str]]:
        import torch._inductor.compile_fx as inductor

        from omni_kv.audits.child import run_in_fork

        before = inductor.compile_fx

        def counted(*args, **kwargs):
            told.write_text(told.read_text() + f"{torch.get_num_threads()}\n")
            return before(*args, **kwargs)

        inductor.compile_fx = counted
        told.touch()
        ((comparison,),) = run_in_fork([job], told.parent / "folder")
        return [run.memory for run in comparison.runs], told.read_text().split()

    fn, args = cases.make_slides_left()
    with torch.no_grad():
        job = Job(fn, [args], ["static"], dynamic=False, machine=Machine(2, True))
    memories, threads = run_isolated(compiled, job, tmp_path / "told").unwrap()
    assert memories[-1].endswith("2 threads and vector code")
    assert threads == ["1", "2"]


def test_the_callers_number_of_threads_is_the_one_that_inductor_would_take() -> None:
    assert callers_machine().threads == torch.get_num_threads()
    with torch._inductor.config.patch({"cpp.threads": 3}):
        assert (callers_machine().threads, callers_machine(5).threads) == (3, 5)


def test_settings_of_torch_are_those_of_the_caller_while_they_are_entered() -> None:
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.float16):
        theirs = TorchSettings.here()
    ours = TorchSettings.here()
    with theirs.entered():
        assert TorchSettings.here() == theirs != ours
        assert torch.zeros(1).device.type == "meta"
    assert TorchSettings.here() == ours


@pytest.fixture
def settings_of_the_caller():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("in_forks", [True, False])
def test_what_the_caller_set_in_torch_holds_where_it_runs(
    in_forks, settings_of_the_caller, monkeypatch
) -> None:
    monkeypatch.setattr(compare, "single_threaded", lambda: in_forks)
    report = audit(cases.only_as_set, (torch.ones(64),), dynamic=False)
    assert report.verdict == "clean", str(report)
    assert report.comparison("static").result == "same"


def calls_that_differ(fn, args, calls: int = 20) -> int:
    compiled, wrong = torch.compile(fn), 0
    torch.set_num_threads(2)
    expected = [arg.clone() for arg in args]
    fn(*expected)
    with torch.no_grad():
        for _ in range(calls):
            given = [arg.clone() for arg in args]
            compiled(*given)
            wrong += not all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    return wrong


def test_the_run_with_threads_is_made_where_loops_write_into_inputs(reports) -> None:
    assert len(reports["positive"].comparison("static").runs) == 3
    assert reports["positive"].shapes[0].loops_write_inputs is False
    assert reports["race"].shapes[0].loops_write_inputs is True


def test_a_machine_with_one_core_says_that_no_race_was_looked_for(monkeypatch) -> None:
    monkeypatch.setattr(engine, "cores", lambda: 1)
    with torch.no_grad():
        report = audit(cases.tiny_values_right, cases.make_tiny_values()[1], dynamic=False)
    assert len(report.comparison("static").runs) == 3
    assert ONE_CORE in str(report)


def test_where_a_result_lies_is_said(reports) -> None:
    finding = " ".join(reports["result is an argument"].findings)
    assert "is x itself in eager, and has memory of its own in compiled" in finding


def test_a_result_that_compiled_code_does_not_make_anew_is_a_finding(reports) -> None:
    x = x8.clone()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        aliases = torch.compile(cases.times_one)(x).data_ptr() == x.data_ptr()
    comparison = reports["times one"].comparison("static")
    assert comparison.result == ("differs" if aliases else "same")


def test_strides_are_said_and_are_no_finding(reports) -> None:
    assert "strides (4, 1) in eager, and (1, 2) in compiled" in str(reports["strides"])
    assert reports["strides"].verdict == "clean"


def test_the_reference_is_eager_where_a_part_was_compiled_before(reports) -> None:
    assert reports["partly compiled"].comparison("static").result == "differs"


def test_a_write_that_no_schema_names_is_a_finding(reports) -> None:
    assert reports["undeclared"].verdict == "findings"
    assert any("x" in f and "schema" in f for f in reports["undeclared"].findings)


def test_an_op_that_takes_no_random_numbers_keeps_what_it_was_given(reports) -> None:
    report = reports["positive"]
    assert report.verdict == "clean", str(report)
    assert "takes no other" in report.comparison("static").note


def test_randomness_is_not_called_a_difference(reports) -> None:
    comparison = reports["dropout"].comparison("static")
    assert comparison.result == "not run" and "random" in comparison.how
    assert reports["dropout"].verdict == "clean"


def test_compiled_that_raises_where_eager_works_is_a_finding(reports) -> None:
    assert reports["compile raises"].verdict == "findings"
    assert any("where eager works" in f for f in reports["compile raises"].findings)


def test_eager_that_raises_where_compiled_runs_on_is_a_finding(reports) -> None:
    assert reports["eager raises"].verdict == "findings"
    assert any("eager raises" in f for f in reports["eager raises"].findings)


def test_a_failure_of_the_lens_is_no_finding_and_the_run_still_speaks(monkeypatch) -> None:
    def fails(*args, **kwargs):
        raise ZeroDivisionError("a fault of the lens")

    monkeypatch.setattr(lens, "read_inputs", fails)
    fn, args = cases.tiny_values_right, cases.make_tiny_values()[1]
    with torch.no_grad():
        report = audit(fn, args, dynamic=False)
    assert report.verdict == "could not run"
    assert "a fault of the lens" in report.sentence and "compile" not in report.sentence
    assert report.comparison("static").result == "same"
    with torch.no_grad():
        report = audit(*cases.make_tiny_values(), dynamic=False)
    assert report.verdict == "findings"


def test_an_exception_in_the_tool_ends_with_code_2_and_one_line(monkeypatch) -> None:
    def fails(*args, **kwargs):
        raise ZeroDivisionError("a fault of the tool")

    monkeypatch.setattr(engine, "conclude", fails)
    result = CliRunner().invoke(main, ["audit", "trust_cases:make_tiny_values", "--no-run"])
    assert result.exit_code == 2
    assert "the audit itself failed: ZeroDivisionError" in result.output
    assert "Traceback" not in result.output


def test_the_callers_configuration_reaches_the_run() -> None:
    from audit_cases import make_shared

    fn, args = make_shared()
    with torch.no_grad(), torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        report = audit(fn, args, dynamic=False)
    cloned = next(a for a in report.clones if a.name == "value_pool")
    wrong = report.comparison("static").result != "same"
    assert wrong == bool(cloned.clone and cloned.clone.reads_outside)


def test_a_local_function_over_an_op_of_a_script_can_be_compared() -> None:
    @torch.library.custom_op("trust_local::add", mutates_args=("pool",))
    def add(pool: torch.Tensor, x: torch.Tensor) -> None:
        pool.add_(x)

    add.register_fake(lambda pool, x: None)
    with torch.no_grad():
        report = audit(lambda pool, x: add(pool, x), (torch.zeros(8), x8), dynamic=False)
    assert report.comparison("static").result == "same", str(report)


def test_the_command_line_need_not_send_what_cannot_be_pickled() -> None:
    command = [sys.executable, "-m", "omni_kv.cli", "audit", "trust_cases:make_with_a_lock"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree" in done.stdout


def test_arguments_in_the_old_form_are_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match="as one tuple"):
        audit(cases.keep, torch.ones(3))


@pytest.mark.parametrize(
    ("right", "seen", "wrong"),
    [
        (torch.full((4,), 1e-6), torch.full((4,), 2e-6), 4),
        (torch.full((4,), 1e-6), torch.full((4,), 1.00001e-6), 0),
        (torch.full((4,), 0.03, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16), 4),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), 1),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), 0),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0]), 1),
        (torch.tensor([[1e4, 1.0], [1e-3, 1e-3]]), torch.tensor([[1e4, 1.1], [1e-3, 0.0]]), 0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
    ],
)
def test_rounding_is_measured_in_the_scale_of_the_data(right, seen, wrong) -> None:
    assert int(wrong_elements(right, seen).sum()) == wrong


def test_memory_that_runs_out_is_no_finding_and_a_crash_is_one() -> None:
    hows = ("killed", "no memory", "child killed", "crashed")
    calls = [Call(cases.ends, (torch.zeros(8), how)) for how in hows]
    with torch.no_grad():
        reports = {
            how: audit_all([call], modes=STATIC)[0]
            for how, call in zip(hows, calls, strict=True)
        }  # fmt: skip
    for how in hows[:3]:
        assert reports[how].verdict == "could not run", str(reports[how])
        assert "out of memory" in reports[how].sentence
    assert reports["crashed"].verdict == "findings"
    assert "memory ran out" not in str(reports["crashed"])


def test_how_much_memory_the_runs_take_is_said_before_they_start() -> None:
    said: list[str] = []
    pool = torch.zeros(1 << 20)
    with torch.no_grad():
        audit_all([Call(cases.tiny_values, (pool, pool[:1]))], modes=STATIC, say=said.append)
    assert said[-1].startswith("comparing compiled with eager, 1 at a time: about 32 MiB")
