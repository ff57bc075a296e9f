import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kv.sandbox.memory import map_region
from omni_kv.sandbox.process import run_isolated


def touch(side, mapped, item):
    """Read the last mapped item beyond a tensor, then, if asked, the first unmapped one."""
    region = map_region((5, 7), torch.float32, guard=side, before=mapped, after=mapped)
    first = region.tensor.data_ptr()
    beyond = 4 * (35 + item) if side == "after" else -4 * (item + 1)
    return ctypes.c_float.from_address(first + beyond).value


@pytest.mark.parametrize("side", ["after", "before"])
@pytest.mark.parametrize("mapped", [0, 3])
@pytest.mark.compiles
def test_the_page_beyond_the_mapped_items_is_not_there(side, mapped):
    outcome = run_isolated(touch, side, mapped, mapped)
    assert outcome.describe() == "killed by SIGSEGV"


@pytest.mark.parametrize("side", ["after", "before"])
def test_the_last_mapped_item_is_there(side):
    assert touch(side, 3, 2) == 0.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    st.sampled_from(["after", "before"]),
    st.integers(0, 5_000),
    st.integers(0, 5_000),
)
def test_neighbours_adjoin_the_tensor_and_its_storage_holds_nothing_else(
    shape, dtype, guard, before, after
):
    region = map_region(shape, dtype, guard=guard, before=before, after=after)
    tensor = region.tensor
    assert tensor.shape == tuple(shape)
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    if before:
        assert region.before.data_ptr() + region.before.nbytes == tensor.data_ptr()
    if after:
        assert region.after.data_ptr() == tensor.data_ptr() + tensor.nbytes
    tensor.fill_(1)
    region.before.fill_(2)
    region.after.fill_(3)
    assert (tensor == 1).all()


def test_an_empty_tensor_is_refused():
    with pytest.raises(ValueError, match="non-empty"):
        map_region((0, 3), torch.float32)
