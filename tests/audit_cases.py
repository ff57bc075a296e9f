"""The cases that the audit is held to: small callables over KV pools, each with its arguments.

Every ``make_*`` returns ``(callable, arguments)``, as ``omni-kv audit module:make_case`` wants it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

SLOTS, HEADS, HEAD_DIM, TOKENS = 64, 2, 8, 4


@torch.library.custom_op("audit_cases::write", mutates_args=("key_pool", "value_pool"))
def write(k: Tensor, v: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor) -> Tensor:
    """Write k and v into the pools, and return what the pools then hold of one feature."""
    key_pool[slots] = k
    value_pool[slots] = v
    return key_pool[:, 0, 0] + value_pool[:, 0, 0]


@write.register_fake
def _(k, v, key_pool, value_pool, slots):
    return k.new_empty(key_pool.shape[0])


@torch.library.custom_op("audit_cases::write_one", mutates_args=("pool",))
def write_one(k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """The same over one tensor ``(2, slots, heads, head_dim)`` that the op slices itself."""
    pool[0][slots] = k
    pool[1][slots] = v
    return pool[0, :, 0, 0] + pool[1, :, 0, 0]


@write_one.register_fake
def _(k, v, pool, slots):
    return k.new_empty(pool.shape[1])


@torch.library.custom_op("audit_cases::write_list", mutates_args=("pools",))
def write_list(k: Tensor, v: Tensor, pools: list[Tensor], slots: Tensor) -> Tensor:
    """The same over a list of pools."""
    pools[0][slots] = k
    pools[1][slots] = v
    return pools[0][:, 0, 0] + pools[1][:, 0, 0]


@write_list.register_fake
def _(k, v, pools, slots):
    return k.new_empty(pools[0].shape[0])


@torch.library.custom_op("audit_cases::functional", mutates_args=())
def functional(k: Tensor, pool: Tensor) -> Tensor:
    """Read only."""
    return pool[: k.shape[0]] + k


@functional.register_fake
def _(k, pool):
    return torch.empty_like(k)


def tokens(count: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """k, v ``(count, heads, head_dim)`` and the slots that they go to."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
    v = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
    return k, v, torch.arange(count) * 3 + 1


def shared_pools(slots: int = SLOTS) -> tuple[Tensor, Tensor]:
    """K and V as halves of one allocation."""
    kv = torch.randn(2, slots, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    return kv[0], kv[1]


def separate_pools(slots: int = SLOTS) -> tuple[Tensor, Tensor]:
    """K and V in allocations of their own."""
    key_pool, value_pool = shared_pools(slots)
    return key_pool.clone(), value_pool.clone()


def layer(k, v, key_pool, value_pool, slots):
    return torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots) + 1


def one_tensor_layer(k, v, pool, slots):
    return torch.ops.audit_cases.write_one(k * 2, v, pool, slots) + 1


def in_graph_layer(k, v, kv, slots):
    return torch.ops.audit_cases.write(k * 2, v, kv[0], kv[1], slots) + 1


def interleaved_layer(k, v, key_pool, value_pool, slots):
    return torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots) + 1


def list_layer(k, v, pools, slots):
    return torch.ops.audit_cases.write_list(k * 2, v, pools, slots) + 1


def view_used_again(k, v, key_pool, value_pool, slots):
    window = key_pool[:TOKENS]
    out = torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots)
    return out + 1, window * 2


def two_calls(k, v, key_pool, value_pool, slots):
    first = torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots)
    second = torch.ops.audit_cases.write(v, k + 1, key_pool, value_pool, slots + 1)
    return first + second


def several_layers(k, v, pools, slots):
    out = k
    for key_pool, value_pool in pools:
        rows = torch.ops.audit_cases.write(out * 2, v, key_pool, value_pool, slots)
        out = out + rows[:TOKENS, None, None]
    return out


def on_an_intermediate(k, v, key_pool, value_pool, slots):
    key_copy, value_copy = key_pool * 1.5, value_pool + 1
    return torch.ops.audit_cases.write(k * 2, v, key_copy, value_copy, slots) + 1


def read_only(k, pool):
    return torch.ops.audit_cases.functional(k * 2, pool) + 1


def index_copy(k, pool, slots):
    pool.index_copy_(0, slots, k * 2)
    return pool[:, 0, 0] + 1


def old_value_needed(k, v, key_pool, value_pool, slots):
    before = key_pool.clone()
    out = torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots)
    return out, before - key_pool


class Layer(nn.Module):
    """A layer that keeps its pools as buffers."""

    key_pool: Tensor
    value_pool: Tensor

    def __init__(self, shared: bool) -> None:
        super().__init__()
        key_pool, value_pool = shared_pools() if shared else separate_pools()
        self.register_buffer("key_pool", key_pool)
        self.register_buffer("value_pool", value_pool)

    def forward(self, k, v, slots):
        return torch.ops.audit_cases.write(k * 2, v, self.key_pool, self.value_pool, slots) + 1


def make_shared(slots: int = SLOTS):
    k, v, index = tokens()
    return layer, (k, v, *shared_pools(slots), index)


def make_shared_zeros():
    fn, (k, v, *_, index) = make_shared()
    kv = torch.zeros(2, SLOTS, HEADS, HEAD_DIM)
    return fn, (k, v, kv[0], kv[1], index)


def make_separate(slots: int = SLOTS):
    k, v, index = tokens()
    return layer, (k, v, *separate_pools(slots), index)


def make_one_tensor(slots: int = SLOTS):
    k, v, index = tokens()
    return one_tensor_layer, (k, v, torch.stack(shared_pools(slots)), index)


def make_in_graph(slots: int = SLOTS):
    k, v, index = tokens()
    return in_graph_layer, (k, v, torch.stack(shared_pools(slots)), index)


def make_interleaved(slots: int = SLOTS):
    k, v, index = tokens()
    kv = torch.stack(shared_pools(slots)).transpose(0, 1).contiguous()
    return interleaved_layer, (k, v, kv[:, 0], kv[:, 1], index)


def make_interleaved_without_base(slots: int = SLOTS):
    """Interleaved views that share a storage and do not know a common base tensor."""
    fn, (k, v, *pools, index) = make_interleaved(slots)
    pools = [
        torch.empty(0).set_(p.untyped_storage(), p.storage_offset(), p.shape, p.stride())
        for p in pools
    ]
    return fn, (k, v, *pools, index)


def make_list_shared():
    k, v, index = tokens()
    return list_layer, (k, v, list(shared_pools()), index)


def make_list_separate():
    k, v, index = tokens()
    return list_layer, (k, v, list(separate_pools()), index)


def make_same_twice():
    k, _, index = tokens()
    pool = separate_pools()[0]
    return layer, (k, k * 2, pool, pool, index)


def make_view_used_again():
    return view_used_again, make_separate()[1]


def make_view_input():
    k, v, index = tokens()
    key_pool, value_pool = separate_pools()
    return view_and_pool, (k, v, key_pool, value_pool, index, key_pool[: TOKENS + 4])


def view_and_pool(k, v, key_pool, value_pool, slots, window):
    out = torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots)
    return out + 1, window * 2


def make_two_calls(shared: bool = True):
    k, v, index = tokens()
    return two_calls, (k, v, *(shared_pools() if shared else separate_pools()), index)


def make_several_layers():
    k, v, index = tokens()
    return several_layers, (k, v, [separate_pools() for _ in range(3)], index)


def make_buffer(shared: bool = False):
    k, v, index = tokens()
    return Layer(shared), (k, v, index)


def make_buffer_shared():
    return make_buffer(shared=True)


def make_intermediate():
    return on_an_intermediate, make_separate()[1]


def make_functional():
    k, _, _ = tokens()
    return read_only, (k, separate_pools()[0])


def make_index_copy():
    k, _, index = tokens()
    return index_copy, (k, separate_pools()[0], index)


def make_old_value_needed():
    return old_value_needed, make_separate()[1]


def make_graph_break():
    return graph_break, make_separate()[1]


def graph_break(k, v, key_pool, value_pool, slots):
    out = torch.ops.audit_cases.write(k * 2, v, key_pool, value_pool, slots)
    torch._dynamo.graph_break()
    return out + 1


def make_no_graph():
    return (lambda x: x), (torch.ones(2),)


def make_does_not_compile():
    return undefined_op, (torch.ones(2),)


@torch.library.custom_op("audit_cases::no_fake", mutates_args=("x",))
def no_fake(x: Tensor) -> Tensor:
    """An op without a fake kernel, which torch.compile cannot trace."""
    x.add_(1)
    return x.clone()


def undefined_op(x):
    return torch.ops.audit_cases.no_fake(x) + 1


def make_needs_a_gpu():
    return on_a_gpu, (torch.ones(2),)


def on_a_gpu(x):
    return x.to("cuda") + 1


# Faults that are built in, so that the audit can be seen to find them on any torch release.


def adds_one_only_if_compiled(k, pool, slots):
    pool.index_copy_(0, slots, k + 1 if torch.compiler.is_compiling() else k)
    return k * 2


@torch.library.custom_op("audit_cases::peek", mutates_args=("pool",))
def peek(pool: Tensor, offset: int) -> Tensor:
    """Add to the pool what lies ``offset`` elements from its first element, wherever that is."""
    value = ctypes.c_float.from_address(pool.data_ptr() + offset * pool.element_size()).value
    pool[0] = value
    return pool.sum(0)


@peek.register_fake
def _(pool, offset):
    return torch.empty_like(pool[0])


def peeks_behind_only_if_compiled(pool):
    return torch.ops.audit_cases.peek(pool, pool.numel() if torch.compiler.is_compiling() else 0)


def peeks_in_front_only_if_compiled(pool):
    return torch.ops.audit_cases.peek(pool, -1 if torch.compiler.is_compiling() else 0)


def make_differs():
    k, _, index = tokens()
    return adds_one_only_if_compiled, (k, separate_pools()[0], index)


def make_peeks_behind():
    return peeks_behind_only_if_compiled, (separate_pools()[0],)


def make_peeks_in_front():
    return peeks_in_front_only_if_compiled, (separate_pools()[0],)


def make_eager_raises():
    return raises, (torch.ones(2),)


def raises(x):
    if torch.compiler.is_compiling():
        return x + 1
    raise ValueError("not in eager")
