"""The forms: small layers after the public designs, with their caches and their writes.

Each is one attention layer without positions or norms, float32, of random weights: what is looked
at is how the cache lies and how it is written. The classes are named after the projects whose
design they follow; no code is theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

#: Sizes of all forms: attention heads, elements a head, positions or slots of the cache.
HEADS, HEAD_DIM, SLOTS = 4, 16, 256
WIDTH = HEADS * HEAD_DIM


class Projections(nn.Module):
    """Query, key and value of a token, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x ``(tokens, WIDTH)``, q, k and v, each ``(tokens, HEADS, HEAD_DIM)``."""
        q, k, v = self.qkv(x).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        return q, k, v


class GptFastLayer(Projections):
    """A cache of two buffers, ``(1, heads, positions, head_dim)``, written at given positions."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.randn(1, HEADS, SLOTS, HEAD_DIM))
        self.register_buffer("v_cache", torch.randn(1, HEADS, SLOTS, HEAD_DIM))

    def update(self, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v ``(1, heads, tokens, head_dim)``, and return both caches."""
        self.k_cache[:, :, positions] = k
        self.v_cache[:, :, positions] = v
        return self.k_cache, self.v_cache

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attend from x ``(tokens, WIDTH)`` at ``positions`` to all positions up to its own."""
        q, k, v = (t.transpose(0, 1)[None] for t in self.split(x))
        keys, values = self.update(positions, k, v)
        seen = torch.arange(SLOTS) <= positions[:, None]
        y = scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(y[0].transpose(0, 1).reshape(-1, WIDTH))


class TorchtuneLayer(Projections):
    """The same buffers, and a third that counts where the next token goes."""

    k_cache: Tensor
    v_cache: Tensor
    cache_pos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.randn(1, HEADS, SLOTS, HEAD_DIM))
        self.register_buffer("v_cache", torch.randn(1, HEADS, SLOTS, HEAD_DIM))
        self.register_buffer("cache_pos", torch.arange(SLOTS))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v ``(1, heads, tokens, head_dim)`` where the cache stands; move it on."""
        tokens = k.shape[2]
        self.k_cache[:, :, self.cache_pos[:tokens]] = k
        self.v_cache[:, :, self.cache_pos[:tokens]] = v
        self.cache_pos.add_(tokens)
        return self.k_cache, self.v_cache

    def forward(self, x: Tensor) -> Tensor:
        """Attend from x ``(tokens, WIDTH)`` to all positions up to its own."""
        q, k, v = (t.transpose(0, 1)[None] for t in self.split(x))
        seen = torch.arange(SLOTS) <= self.cache_pos[: x.shape[0], None]
        keys, values = self.update(k, v)
        y = scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(y[0].transpose(0, 1).reshape(-1, WIDTH))


def attend(q: Tensor, keys: Tensor, values: Tensor, window: Tensor) -> Tensor:
    """From q ``(tokens, heads, head_dim)`` to the slots of ``window``, as the ops do it inside."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, keys[window], values[window]))
    return scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).contiguous()


@torch.library.custom_op("omni_kv_wild::write_attend_pool", mutates_args=("pool",))
def write_attend_pool(
    q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, window: Tensor
) -> Tensor:
    """Write k and v into the halves of one pool ``(2, slots, heads, head_dim)``, and attend."""
    keys, values = pool.unbind(0)
    keys[slots] = k
    values[slots] = v
    return attend(q, keys, values, window)


@torch.library.custom_op("omni_kv_wild::write_attend", mutates_args=("keys", "values"))
def write_attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, window: Tensor
) -> Tensor:
    """Write k and v into two pools ``(slots, heads, head_dim)``, and attend."""
    keys[slots] = k
    values[slots] = v
    return attend(q, keys, values, window)


@write_attend_pool.register_fake
@write_attend.register_fake
def _(q: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


class EngineLayer(Projections):
    """An engine's layer: the pool is an argument, a scheduler says which slots are whose."""

    def forward(self, x: Tensor, pool: Tensor, slots: Tensor, window: Tensor) -> Tensor:
        """One step.

        Args:
            x: ``(tokens, WIDTH)``.
            pool: ``(2, SLOTS, HEADS, HEAD_DIM)``, keys and values; mutated.
            slots: int64 ``(tokens,)``, where they go.
            window: int64, the slots to attend to.
        """
        q, k, v = self.split(x)
        return self.out(self.write_and_attend(q, k, v, pool, slots, window).reshape(-1, WIDTH))

    def write_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, window: Tensor
    ) -> Tensor:
        """The lines that the engines differ in."""
        raise NotImplementedError


class SlicedInside(EngineLayer):
    """The op takes the pool."""

    def write_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, window: Tensor
    ) -> Tensor:
        """Write k and v, and attend."""
        return torch.ops.omni_kv_wild.write_attend_pool(q, k, v, pool, slots, window)


class SlicedInGraph(EngineLayer):
    """The compiled code slices the pool, the op takes the halves."""

    def write_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, window: Tensor
    ) -> Tensor:
        """Write k and v, and attend."""
        keys, values = pool.unbind(0)
        return torch.ops.omni_kv_wild.write_attend(q, k, v, keys, values, slots, window)


class WrittenInGraph(EngineLayer):
    """The compiled code slices the pool and writes with PyTorch's own ops."""

    def write_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, window: Tensor
    ) -> Tensor:
        """Write k and v, and attend."""
        keys, values = pool.unbind(0)
        keys[slots] = k
        values[slots] = v
        return attend(q, keys, values, window)


class SlicedOutside(Projections):
    """The caller slices the pool, the compiled code gets the halves."""

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, slots: Tensor, window: Tensor
    ) -> Tensor:
        """One step; the arguments are those of ``EngineLayer``, with the halves of the pool."""
        q, k, v = self.split(x)
        y = torch.ops.omni_kv_wild.write_attend(q, k, v, keys, values, slots, window)
        return self.out(y.reshape(-1, WIDTH))
