"""Benchmarks: what the floor is, and that the fast ways compute what the plain ways do."""

from __future__ import annotations

import pytest
import torch

from omni_kv.evidence.cells import RolloutRun, Timing
from omni_kv.evidence.tables import fix_verdict
from omni_kv.experiments.gpu.bench import bench_command, bench_table, floor_seconds, measure_pieces
from omni_kv.experiments.gpu.step import attention_flop, measure_live, step_flop
from omni_kv.experiments.gpu.trials import (
    EXPECTED,
    measure_trials,
    narrow_write,
    rotate_by_swapping,
)
from omni_kv.model.geometry import preset
from omni_kv.model.op import write_slots
from omni_kv.model.transformer import linear_gelu, rope_3d, rotate

CEILINGS = [
    Timing(name="ceiling/copy", seconds=[2.0, 1.0, 3.0], nbytes=200.0),
    Timing(name="ceiling/matmul", seconds=[1.0], flop=50.0),
]


@pytest.mark.parametrize(
    ("flop", "nbytes", "floor"), [(None, 300.0, 3.0), (500.0, None, 10.0), (500.0, 2000.0, 20.0)]
)
def test_the_floor_is_the_larger_of_operations_and_bytes(flop, nbytes, floor) -> None:
    cell = Timing(name="x", seconds=[40.0], flop=flop, nbytes=nbytes)
    assert floor_seconds(cell, CEILINGS) == floor
    assert bench_table([*CEILINGS, cell]).loc["x", "times the floor"] == 40.0 / floor


def test_a_step_of_the_pull_requests_model_is_about_212_tflop() -> None:
    g = preset("lingbot-480x768")
    assert step_flop(g) == pytest.approx(212e12, rel=0.005)
    assert attention_flop(g) == 4 * 4_320 * 30_240 * 5_120


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="--device cpu --preset tiny"):
        bench_command("tiny", "cuda", (), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 6, 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_slots_are_written_alike_whatever_the_alignment(dtype, head_dim, offset) -> None:
    torch.manual_seed(0)
    memory = torch.randn(20 * 2 * head_dim + offset).to(dtype)
    pool = memory[offset:].view(20, 2, head_dim)
    expected = pool.clone()
    wide = torch.randn(5, 3 * 2 * head_dim).to(dtype)
    rows = wide[:, 2 * head_dim : 4 * head_dim].unflatten(-1, (2, head_dim))
    slots = torch.tensor([3, 19, 0, 7, 8])
    write_slots(pool, slots, rows)
    narrow_write(expected, slots, rows)
    assert torch.equal(pool, expected)


def test_nan_and_signed_zero_are_copied_bit_by_bit() -> None:
    pool = torch.zeros(2, 1, 4)
    rows = torch.tensor([[[float("nan"), -0.0, float("inf"), 1e-45]]])
    write_slots(pool, torch.tensor([1]), rows)
    assert torch.equal(pool[1].view(torch.int32), rows[0].view(torch.int32))


def test_rotation_by_swapped_pairs_is_the_same_rotation() -> None:
    g = preset("tiny")
    rope = rope_3d(g, 3, "cpu")
    x = torch.randn(g.tokens_per_chunk, g.num_heads, g.head_dim)
    torch.testing.assert_close(rotate_by_swapping(x, rope), rotate(x, rope))


@torch.no_grad()
def test_linear_and_gelu_are_the_tanh_form() -> None:
    linear = torch.nn.Linear(16, 32)
    x = torch.randn(4, 16)
    expected = torch.nn.functional.gelu(linear(x), approximate="tanh")
    torch.testing.assert_close(linear_gelu(x, linear), expected)


@pytest.fixture(autouse=True)
def gradients_as_before():
    before = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(before)


@pytest.mark.compiles
def test_pieces_are_timed_beside_their_ceilings() -> None:
    cells = measure_pieces(preset("tiny"), "cpu", ["sdpa"], samples=2)
    assert torch.is_grad_enabled(), "a measurement leaves autograd as it was"
    assert [c.name for c in cells] == [
        "ceiling/copy",
        "ceiling/matmul",
        "sdpa/slot write",
        "sdpa/op",
        "sdpa/layer, eager",
        "sdpa/layer, compiled",
    ]
    assert all(len(c.seconds) == 2 for c in cells[2:])


@pytest.mark.compiles
def test_every_expectation_is_measured_where_it_can_be() -> None:
    cells = measure_trials(preset("tiny"), "cpu", "sdpa", samples=1)
    assert torch.is_grad_enabled()
    names = {c.name for c in cells if "ceiling" not in c.name}
    assert names == set(EXPECTED) - {"one CUDA graph a step"}


@pytest.mark.compiles
def test_a_live_measurement_holds_what_the_notebook_asks_for() -> None:
    from omni_kv.evidence.records import Record, provenance

    g = preset("tiny")
    cells = measure_live(g, "cpu", "sdpa", samples=1, chunks=g.first_full_chunk + 2)
    live = Record(
        experiment="live",
        provenance=provenance("cpu", "pytest"),
        parameters={},
        units=["sdpa"],
        cells=cells,
    )
    found = fix_verdict(live, live, g, "sdpa")
    assert found["the window is full from chunk"] == g.first_full_chunk == 3
    assert found["compiled agrees with eager within 2%"]
    assert len(live.of(RolloutRun)) == 2
