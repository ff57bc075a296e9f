"""A copy of a callable that Dynamo has not seen, and what ``torch.compile`` was told."""

from __future__ import annotations

import functools

import audit_cases as cases
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from omni_kv.lens.capture import capture
from omni_kv.lens.fresh import recompilable, settings_of
from omni_kv.sandbox.process import run_isolated


def keep(previous, state, delta):
    previous[:] = state[:]
    state.add_(delta)
    return delta * 2


def run_keep(how: str) -> list[list[float]]:
    fn = {"plain": keep, "ours": recompilable(keep)[0]}[how]
    tensors = [torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)]
    out = torch.compile(fn)(*tensors)
    return [t.tolist() for t in (*tensors, out)]


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, scale=2.0):
        self.seen.add_(1)
        return self.linear(x) * scale


@pytest.mark.compiles
def test_plain_torch_compile_and_the_copy_agree() -> None:
    plain, ours = (run_isolated(run_keep, how) for how in ("plain", "ours"))
    assert plain.status == ours.status == "returned", (plain, ours)
    assert plain.value == ours.value


@pytest.mark.parametrize(
    "make",
    [
        lambda: cases.layer,
        lambda: Counted(),
        lambda: Counted().forward,
        lambda: functools.partial(Counted(), scale=3.0),
        lambda: torch.nn.Linear(4, 4),
    ],
    ids=["function", "module", "method", "partial", "a module of torch.nn"],
)
def test_a_copy_is_compiled_anew_and_gives_the_same(make) -> None:
    fn = make()
    args = cases.make_separate()[1] if fn is cases.layer else (torch.ones(2, 4),)
    expected = fn(*args)
    for _ in range(2):
        counter = CompileCounter()
        copy, wrapped = recompilable(fn)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(copy, backend=counter)(*args), expected)
        assert counter.frame_count == 1
        assert wrapped == isinstance(fn, (functools.partial, torch.nn.Linear))


def test_a_copied_module_shares_its_state_and_the_original_is_left_alone() -> None:
    module = Counted()
    before = dict(module.__dict__)
    copy, _ = recompilable(module)
    copy(torch.ones(2, 4))
    assert module.seen == 1
    assert copy.linear is module.linear
    assert module.__dict__ == before


def test_defaults_keywords_and_closures_are_kept() -> None:
    shift = torch.ones(3)

    def fn(x, scale=2, *, offset=5):
        return x * scale + shift + offset

    copy, wrapped = recompilable(fn)
    assert not wrapped
    assert torch.equal(copy(torch.ones(3)), fn(torch.ones(3)))
    assert torch.equal(copy(torch.ones(3), offset=1), fn(torch.ones(3), offset=1))
    assert copy.__code__ is not fn.__code__


def test_the_settings_of_torch_compile_are_read() -> None:
    options = {"max_autotune": False, "epilogue_fusion": False}
    for fn in (cases.layer, Counted()):
        told = settings_of(torch.compile(fn, options=options, dynamic=True))
        assert told.known
        assert told.dynamic is True
        assert told.backend is None
        assert options.items() <= told.options.items()
        assert settings_of(fn) == settings_of(len)
        assert not settings_of(fn).known
    counter = CompileCounter()
    assert settings_of(torch.compile(cases.layer, backend=counter)).backend is counter


def test_the_lens_compiles_with_the_settings_it_was_handed() -> None:
    fn, args = cases.make_shared()
    with torch.no_grad():
        plain = capture(fn, *args).graphs[0]
        told = capture(torch.compile(fn, options={"size_asserts": False}), *args)
        dynamic = capture(torch.compile(fn, dynamic=True), *args, until="graph")
    assert plain.generated_code is not None
    assert told.graphs[0].generated_code is not None
    assert "assert_size_stride(arg" in plain.generated_code
    assert "assert_size_stride(arg" not in told.graphs[0].generated_code
    assert dynamic.graphs[0].sizes


@pytest.mark.parametrize("dynamic", [None, True])
def test_inputs_of_every_kind_of_callable_have_the_callers_names(dynamic) -> None:
    def with_rest(k, *args, pool, **kwargs):
        pool[: len(k)] = k * args[0] + kwargs["shift"]
        return k + bias

    bias = torch.ones(4)
    x = torch.ones(4)
    with torch.no_grad():
        call = {"pool": torch.zeros(8), "shift": x.clone()}
        graph = capture(with_rest, x, x + 1, dynamic=dynamic, until="graph", **call).graphs[0]
        assert {i.name for i in graph.inputs} == {
            "k",
            "args[0]",
            "pool",
            "shift",
            "bias",
        }
        module = Counted()
        part = functools.partial(with_rest, x.clone(), x + 1, **call)
        captured = capture(part, until="graph")
        assert captured.wrapped
        inputs = {i.name for i in capture(module, torch.ones(2, 4), until="graph").graphs[0].inputs}
        assert inputs == {"x", "fn.seen", "fn.linear.weight", "fn.linear.bias"}
