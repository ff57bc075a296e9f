"""A causal video diffusion transformer whose self-attention reads a paged KV cache.

The family is that of the pull request's model: latent frames are cut into patches, conditioned on
the timestep (adaLN modulation) and on text (cross-attention), and denoised a chunk of frames at a
time; each chunk attends to the frames before it through the op. Weights are random: this model is
for measuring what the compiler does, not for making films. Inference only.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_kv.model.attention import choose_backend
from omni_kv.model.geometry import Geometry
from omni_kv.model.op import ar_diffusion_paged_write_attn
from omni_kv.model.pools import Pools


class Window(NamedTuple):
    """Where the current tokens go and what they see; the same for all layers.

    Attributes:
        slot_mapping: ``(num_tokens,)`` int64, the slot of each current token.
        block_table: ``(num_seqs, max_pages)`` int32, or None for pages 0, 1, 2, ... in order.
        query_start_loc: ``(num_seqs + 1,)`` int32 on the host.
        seq_lens: ``(num_seqs,)`` int32 on the host.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


class Rope(NamedTuple):
    """Rotary embedding of the current tokens, each part ``(num_tokens, 1, head_dim / 2)``."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_3d(geometry: Geometry, first_frame: int, device: torch.device | str) -> Rope:
    """Rotary embedding of a chunk's tokens by frame, row and column.

    The head's pairs are split in three: rows and columns get a third each, rounded down, and
    frames the rest. Source: RoFormer (arXiv:2104.09864), applied per axis.

    Args:
        geometry: the sizes.
        first_frame: number of the chunk's first latent frame in the video.
        device: where the result goes.
    """
    pairs = geometry.head_dim // 2
    per_axis = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    rows = geometry.latent_height // geometry.patch
    columns = geometry.latent_width // geometry.patch
    frames = torch.arange(first_frame, first_frame + geometry.frames_per_chunk)
    grid = torch.cartesian_prod(frames, torch.arange(rows), torch.arange(columns))
    angles = [
        grid[:, axis, None] * 10_000.0 ** (-torch.arange(n) / n) for axis, n in enumerate(per_axis)
    ]
    angle = torch.cat(angles, dim=-1).unsqueeze(1)
    return Rope(angle.cos().to(device), angle.sin().to(device))


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Apply the rotary embedding to ``(num_tokens, heads, head_dim)``, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """adaLN: normalise over the last axis, then scale and shift by what the timestep says."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def linear_gelu(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Linear, then GELU in its tanh form; on CUDA while the product is still in registers."""
    if x.is_cuda:
        # aten's name for cuBLAS's epilogue; saves a pass over the widest activation. On other
        # devices this op takes the erf form.
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
    return F.gelu(linear(x), approximate="tanh")


class Block(nn.Module):
    """One transformer layer: self-attention through the op, cross-attention to text, FFN."""

    def __init__(self, geometry: Geometry, backend: str) -> None:
        super().__init__()
        dim, kv_dim = geometry.dim, geometry.num_kv_heads * geometry.head_dim
        self.geometry = geometry
        self.backend = backend
        self.split = (dim, kv_dim, kv_dim)
        self.modulation = nn.Parameter(torch.empty(6, dim))
        self.qkv = nn.Linear(dim, sum(self.split))
        self.q_norm = nn.RMSNorm(dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(kv_dim, eps=1e-6)
        self.out = nn.Linear(dim, dim)
        self.cross_norm = nn.LayerNorm(dim, eps=1e-6)
        self.cross_q = nn.Linear(dim, dim)
        self.cross_q_norm = nn.RMSNorm(dim, eps=1e-6)
        self.cross_kv = nn.Linear(dim, 2 * dim)
        self.cross_k_norm = nn.RMSNorm(dim, eps=1e-6)
        self.cross_out = nn.Linear(dim, dim)
        self.ffn_in = nn.Linear(dim, geometry.ffn_dim)
        self.ffn_out = nn.Linear(geometry.ffn_dim, dim)

    def text_kv(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the text, ``(num_heads, text_tokens, head_dim)``, once a rollout."""
        key, value = self.cross_kv(text).chunk(2, dim=-1)
        heads = (-1, self.geometry.num_heads, self.geometry.head_dim)
        return (
            self.cross_k_norm(key).view(heads).transpose(0, 1).contiguous(),
            value.view(heads).transpose(0, 1).contiguous(),
        )

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        rope: Rope,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        window: Window,
    ) -> torch.Tensor:
        """Run the layer on a chunk's tokens; writes their keys and values into the pools.

        Args:
            x: ``(num_tokens, dim)``.
            timestep: ``(6, dim)``, the timestep's part of the modulation.
            text: what ``text_kv`` returned.
            rope: rotary embedding of the tokens.
            key_pool: ``(num_slots, num_kv_heads, head_dim)``; mutated.
            value_pool: ``(num_slots, num_kv_heads, head_dim)``; mutated.
            window: where the tokens go and what they see.

        Returns:
            ``(num_tokens, dim)``.
        """
        g = self.geometry
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation + timestep).unbind(0)

        query, key, value = self.qkv(modulate(x, shift_a, scale_a)).split(self.split, dim=-1)
        attended = ar_diffusion_paged_write_attn(
            rotate(self.q_norm(query).unflatten(-1, (g.num_heads, g.head_dim)), rope),
            rotate(self.k_norm(key).unflatten(-1, (g.num_kv_heads, g.head_dim)), rope),
            value.unflatten(-1, (g.num_kv_heads, g.head_dim)),
            key_pool,
            value_pool,
            window.slot_mapping,
            window.block_table,
            window.query_start_loc,
            window.seq_lens,
            g.block_size,
            g.head_dim**-0.5,
            self.backend,
        )
        x = x + gate_a * self.out(attended.flatten(1))

        query = self.cross_q_norm(self.cross_q(self.cross_norm(x)))
        query = query.unflatten(-1, (g.num_heads, g.head_dim)).transpose(0, 1)
        text_key, text_value = text
        attended = F.scaled_dot_product_attention(query[None], text_key[None], text_value[None])
        x = x + self.cross_out(attended[0].transpose(0, 1).flatten(1))

        hidden = linear_gelu(modulate(x, shift_f, scale_f), self.ffn_in)
        return x + gate_f * self.ffn_out(hidden)


class VideoTransformer(nn.Module):
    """The whole model: patches in, layers, velocity of the flow out."""

    def __init__(self, geometry: Geometry, backend: str) -> None:
        super().__init__()
        self.geometry = geometry
        dim = geometry.dim
        self.patch_numel = geometry.latent_channels * geometry.patch**2
        self.patch_in = nn.Linear(self.patch_numel, dim)
        self.text_in = nn.Sequential(
            nn.Linear(geometry.text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_in = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_out = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(Block(geometry, backend) for _ in range(geometry.num_layers))
        self.head_modulation = nn.Parameter(torch.empty(2, dim))
        self.head = nn.Linear(dim, self.patch_numel)

    def compile_layers(self, **options: object) -> None:
        """Compile each layer by itself; they share one compiled graph where guards allow.

        Args:
            options: passed on to ``torch.compile``.
        """
        for block in self.blocks:
            block.compile(**options)

    def text_kv(self, text: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values of the text ``(text_tokens, text_dim)``."""
        hidden = self.text_in(text)
        return [cast(Block, block).text_kv(hidden) for block in self.blocks]

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: list[tuple[torch.Tensor, torch.Tensor]],
        rope: Rope,
        pools: Pools,
        window: Window,
    ) -> torch.Tensor:
        """Predict the velocity of a chunk's latents; writes its keys and values into the pools.

        Args:
            latents: ``(frames_per_chunk, latent_channels, latent_height, latent_width)``.
            timestep: scalar tensor, from 0 (clean) to 1,000 (noise).
            text: what ``text_kv`` returned.
            rope: rotary embedding of the chunk's tokens.
            pools: the KV cache; mutated.
            window: where the tokens go and what they see.

        Returns:
            Like ``latents``.

        Raises:
            RuntimeError: if gradients are enabled.
        """
        require_no_grad()
        g = self.geometry
        x = self.patch_in(_to_patches(latents, g.patch))
        hidden = self.time_in(_sinusoids(timestep).to(x.dtype))
        modulation = self.time_out(hidden).view(6, g.dim)
        for layer, block in enumerate(self.blocks):
            x = block(
                x,
                modulation,
                text[layer],
                rope,
                pools.key_slots(layer),
                pools.value_slots(layer),
                window,
            )
        shift, scale = (self.head_modulation + hidden).unbind(0)
        return _from_patches(self.head(modulate(x, shift, scale)), latents.shape, g.patch)


def require_no_grad() -> None:
    """Raise RuntimeError if gradients are enabled: the op mutates its pools and has no backward."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "omni_kv is for inference only: the KV pools are mutated and there is no backward; "
            "call the model under torch.no_grad()"
        )


def make_model(
    geometry: Geometry,
    *,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> VideoTransformer:
    """Build the model with random weights.

    Weights are drawn with a standard deviation of ``1 / sqrt(fan_in)``, biases are zero, gains one.

    Args:
        geometry: the sizes.
        backend: attention backend, see ``omni_kv.model.attention.choose_backend``.
        device: where.
        seed: of the weights.

    Raises:
        BackendError: if the backend cannot be used here or for this geometry.
    """
    backend = choose_backend(backend, geometry, device)
    with torch.device("meta"):
        model = VideoTransformer(geometry, backend)
    model = model.to(geometry.torch_dtype).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    return model.eval()


def _to_patches(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """``(frames, channels, height, width)`` to ``(tokens, channels * patch * patch)``."""
    f, c, h, w = latents.shape
    x = latents.view(f, c, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, c * patch * patch)


def _from_patches(x: torch.Tensor, shape: torch.Size, patch: int) -> torch.Tensor:
    f, c, h, w = shape
    x = x.view(f, h // patch, w // patch, c, patch, patch)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def _sinusoids(timestep: torch.Tensor, width: int = 256) -> torch.Tensor:
    """Embed a scalar timestep as cosines and sines, ``(width,)``, in float32."""
    half = width // 2
    rates = 10_000.0 ** (-torch.arange(half, device=timestep.device) / half)
    angles = timestep.float() * rates
    return torch.cat([angles.cos(), angles.sin()])
