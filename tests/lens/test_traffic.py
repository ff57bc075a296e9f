"""Bytes moved to write a mutated input, against what the writes change."""

from __future__ import annotations

import audit_cases as cases
import pytest
import torch

from omni_kv.lens.capture import capture
from omni_kv.lens.traffic import traffic_of

pytestmark = pytest.mark.compiles

SLOTS, ROW, TOKENS = 32, 4 * 8, 4
POOL, TOKEN_BYTES = SLOTS * ROW * 4, TOKENS * ROW * 4


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def tensors():
    k = torch.randn(TOKENS, 4, 8)
    return torch.zeros(2, SLOTS, 4, 8), k, k + 1, torch.arange(TOKENS)


def only(fn, *args, dynamic=None):
    (graph,) = capture(fn, *args, dynamic=dynamic).graphs
    (found,) = traffic_of(graph)
    return found


def both_halves(kv, k, v, slots):
    keys, values = kv.unbind(0)
    keys[slots] = k
    values[slots] = v
    return k * 2


def both_parts(kv, k, v, slots):
    keys, values = kv.split(SLOTS)
    keys[slots] = k
    values[slots] = v
    return k * 2


def one_half(kv, k, v, slots):
    kv[0, slots] = k
    return k * 2


def index_write(pool, k, slots):
    pool[slots] = k
    return k * 2


def index_copy(pool, k, slots):
    pool.index_copy_(0, slots, k)
    return k * 2


def slice_write(pool, k, slots):
    pool[: len(k)] = k
    return k * 2


def slice_then_index(pool, k, slots):
    pool[: len(k)] = k
    pool[slots] = k + 1
    return k * 2


def all_anew(x):
    x.copy_(x * 2 + 1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("write", [index_write, index_copy, slice_write])
def test_a_single_write_moves_what_it_changes_and_no_more(write, dynamic) -> None:
    kv, k, _, slots = tensors()
    found = only(write, kv[0].clone(), k, slots, dynamic=dynamic)
    assert (found.input, found.cause, found.extra_bytes) == ("pool", None, 0)
    assert found.writes_bytes == found.changed_bytes == TOKEN_BYTES


@pytest.mark.parametrize(("write", "slots"), [(both_halves, (2, SLOTS)), (both_parts, (-1,))])
def test_writes_into_both_halves_of_one_tensor_rewrite_it_in_full(write, slots) -> None:
    kv, *others = tensors()
    found = only(write, kv.reshape(*slots, 4, 8).clone(), *others)
    assert found.cause == "scatter chain through views"
    assert found.changed_bytes == 2 * TOKEN_BYTES
    assert found.writes_bytes >= 2 * POOL
    assert found.reads_bytes >= 2 * POOL
    assert found.extra_bytes > 4 * POOL


def test_a_write_into_one_half_copies_that_half_there_and_back() -> None:
    found = only(one_half, *tensors())
    assert found.cause == "scatter chain through views"
    assert found.changed_bytes == TOKEN_BYTES
    assert 2 * POOL <= found.writes_bytes <= 2 * POOL + TOKEN_BYTES
    assert found.reads_bytes == 2 * POOL


def test_a_slice_write_and_then_an_index_write_copy_the_input() -> None:
    kv, k, _, slots = tensors()
    found = only(slice_then_index, kv[0].clone(), k, slots)
    assert found.cause == "scatter chain through views"
    assert found.changed_bytes == 2 * TOKEN_BYTES
    assert found.writes_bytes >= 2 * POOL


def test_a_value_that_is_computed_anew_is_written_once_and_nothing_is_extra() -> None:
    found = only(all_anew, torch.zeros(SLOTS))
    assert found.cause == "copy back of a computed value"
    assert found.reads_bytes == found.writes_bytes == found.changed_bytes == SLOTS * 4
    assert found.extra_bytes == 0


def slides(pool, k, slots):
    pool[:-1] = pool[1:].clone()
    return k * 2


def rolled(pool, k, slots):
    pool.copy_(pool.roll(1, 0))
    return k * 2


def test_rows_that_move_within_a_tensor_are_changed_though_their_values_come_from_it() -> None:
    kv, k, _, slots = tensors()
    found = only(slides, kv[0].clone(), k, slots)
    assert found.changed_bytes == POOL - ROW * 4
    assert found.extra_bytes <= 2 * found.changed_bytes


def test_a_value_read_elsewhere_in_the_tensor_is_a_copy_back_and_no_clone() -> None:
    kv, k, _, slots = tensors()
    found = only(rolled, kv[0].clone(), k, slots)
    assert found.cause == "copy back of a computed value"
    assert found.changed_bytes == POOL
    assert found.writes_bytes == 2 * POOL


def test_of_a_custom_op_the_clone_and_the_copy_back_are_counted() -> None:
    def of(make):
        fn, args = make()
        return {t.input: t for t in traffic_of(capture(fn, *args).graphs[0])}

    half = cases.SLOTS * cases.HEADS * cases.HEAD_DIM * 4
    shared = of(cases.make_shared)
    assert shared["key_pool"].extra_bytes == 0
    value = shared["value_pool"]
    assert value.cause == "clone by the pass"
    assert value.changed_bytes is None
    assert (value.reads_bytes, value.writes_bytes) == (3 * half, 3 * half)
    for make in (cases.make_separate, cases.make_one_tensor, cases.make_interleaved):
        assert [(t.cause, t.extra_bytes) for t in of(make).values()] == [(None, 0)] * len(of(make))
    assert set(of(cases.make_interleaved)) == {"key_pool + value_pool"}


def test_without_code_nothing_is_said() -> None:
    (graph,) = capture(both_halves, *tensors(), until="graph").graphs
    assert traffic_of(graph) == []
