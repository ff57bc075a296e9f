"""Guarded and filled memory on a GPU; every test is skipped where there is none."""

import pytest
import torch

from omni_kv.sandbox.memory import map_region
from omni_kv.sandbox.process import run_isolated

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def read(side, mapped, item):
    """Let a kernel read one element beyond a tensor: mapped ones first, then one that is not."""
    region = map_region(
        (5, 7), torch.float32, guard=side, before=mapped, after=mapped, device="cuda"
    )
    from omni_kv.experiments.gpu.touch import touch_kernel

    sums = torch.zeros(1, dtype=torch.int32, device="cuda")
    start = 4 * (35 + item) if side == "after" else -4 * (item + 1)
    touch_kernel[(1,)](region.tensor.view(torch.uint8), sums, start, 1, 1, BLOCK=16)
    return int(sums)


@pytest.mark.parametrize("side", ["after", "before"])
@pytest.mark.parametrize("mapped", [0, 3])
def test_a_read_beyond_the_mapped_items_is_an_illegal_access(side, mapped):
    outcome = run_isolated(read, side, mapped, mapped)
    assert outcome.status == "raised"
    assert "illegal memory access" in outcome.error


@pytest.mark.parametrize("side", ["after", "before"])
def test_the_last_mapped_item_is_there(side):
    outcome = run_isolated(read, side, 3, 2)
    assert outcome.unwrap() == 0


def test_neighbours_adjoin_the_tensor_and_its_storage_holds_nothing_else():
    region = map_region((3, 5), torch.bfloat16, before=7, after=11, device="cuda")
    tensor = region.tensor
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert region.before.data_ptr() + region.before.nbytes == tensor.data_ptr()
    assert region.after.data_ptr() == tensor.data_ptr() + tensor.nbytes
    tensor.fill_(1)
    region.before.fill_(2)
    region.after.fill_(3)
    assert (tensor == 1).all()


def test_memory_is_given_back_with_its_last_tensor():
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        map_region((1 << 28,), torch.uint8, device="cuda").tensor.fill_(1)
    assert free - torch.cuda.mem_get_info()[0] < 2 << 28
