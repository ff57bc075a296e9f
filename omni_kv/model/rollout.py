"""Generate a video chunk by chunk: few-step denoising over a sink and a sliding window.

The window is kept as slots. The sink's frames stay in the first slots for ever; all later frames
share a ring behind them, just large enough for the window and the chunk, so that a chunk overwrites
exactly the frames that it no longer sees. Attention has no causal mask, so the order of keys does
not matter, and what a chunk sees is always the slots from 0 up to a length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Pools
from omni_kv.model.transformer import Rope, VideoTransformer, Window, require_no_grad, rope_3d


@dataclass(frozen=True)
class Chunk:
    """One generated chunk.

    Attributes:
        index: its number, from 0.
        latents: ``(frames_per_chunk, latent_channels, latent_height, latent_width)``, denoised.
        visible_tokens: keys that its queries attended to.
        seconds: wall-clock time of its passes, the device's work included.
    """

    index: int
    latents: torch.Tensor
    visible_tokens: int
    seconds: float


def ring_frame(geometry: Geometry, frame: int) -> int:
    """The place, counted in frames from slot 0, where a frame of the video is kept."""
    if frame < geometry.sink_frames:
        return frame
    ring = geometry.window_frames + geometry.frames_per_chunk
    return geometry.sink_frames + (frame - geometry.sink_frames) % ring


def frames_in_pool(geometry: Geometry, chunk: int) -> list[int | None]:
    """Which frame of the video lies at each place of the pool while a chunk is denoised.

    Args:
        geometry: the sizes.
        chunk: number of the chunk, from 0; its own frames are included.

    Returns:
        ``pool_frames`` entries; None where nothing has been written.
    """
    pool: list[int | None] = [None] * geometry.pool_frames
    for frame in range((chunk + 1) * geometry.frames_per_chunk):
        pool[ring_frame(geometry, frame)] = frame
    return pool


def window_of_chunk(
    geometry: Geometry,
    chunk: int,
    *,
    device: torch.device | str = "cpu",
    page_order: torch.Tensor | None = None,
) -> Window:
    """Slots of a chunk's tokens, and the pages and length that it sees.

    Args:
        geometry: the sizes.
        chunk: number of the chunk, from 0.
        device: where slots and block table go; lengths stay on the host.
        page_order: ``(num_blocks,)`` permutation, the physical page behind each logical one; by
            default pages lie in order and the window needs no block table.
    """
    first = chunk * geometry.frames_per_chunk
    frames = range(first, first + geometry.frames_per_chunk)
    within = torch.arange(geometry.tokens_per_frame)
    slots = torch.cat(
        [ring_frame(geometry, f) * geometry.tokens_per_frame + within for f in frames]
    )
    block_table = None
    if page_order is not None:
        slots = page_order[slots // geometry.block_size].long() * geometry.block_size + (
            slots % geometry.block_size
        )
        block_table = page_order.to(torch.int32).unsqueeze(0).to(device)
    visible = min(first + geometry.frames_per_chunk, geometry.visible_frames)
    return Window(
        slot_mapping=slots.to(device),
        block_table=block_table,
        query_start_loc=torch.tensor([0, geometry.tokens_per_chunk], dtype=torch.int32),
        seq_lens=torch.tensor([visible * geometry.tokens_per_frame], dtype=torch.int32),
    )


def random_text(geometry: Geometry, seed: int, device: torch.device | str) -> torch.Tensor:
    """Stand-in for encoded text, ``(text_tokens, text_dim)``."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(geometry.text_tokens, geometry.text_dim, generator=generator)
    return text.to(device, geometry.torch_dtype)


def random_latents(geometry: Geometry, seed: int, device: torch.device | str) -> torch.Tensor:
    """Noise of a chunk's shape, drawn on the host so that every device gets the same."""
    generator = torch.Generator().manual_seed(seed)
    shape = (
        geometry.frames_per_chunk,
        geometry.latent_channels,
        geometry.latent_height,
        geometry.latent_width,
    )
    return torch.randn(shape, generator=generator).to(device, geometry.torch_dtype)


def rollout(
    model: VideoTransformer,
    pools: Pools,
    *,
    chunks: int,
    seed: int = 0,
    page_order: torch.Tensor | None = None,
) -> Iterator[Chunk]:
    """Generate chunk after chunk, each as soon as it is done.

    Denoising follows the straight path ``x = (1 - s) * clean + s * noise`` of flow matching
    (arXiv:2209.03003): each step predicts the clean latents and adds fresh noise at the next,
    lower level. A last pass at level 0 commits the clean chunk's keys and values.

    Args:
        model: the model; its geometry and device are used throughout.
        pools: its KV cache; mutated.
        chunks: how many chunks to generate.
        seed: of text and noise.
        page_order: see ``window_of_chunk``.

    Raises:
        RuntimeError: if gradients are enabled.
    """
    require_no_grad()
    g = model.geometry
    device = model.head.weight.device
    text = model.text_kv(random_text(g, seed, device))
    levels = [1 - step / g.denoising_steps for step in range(g.denoising_steps)]
    for index in range(chunks):
        window = window_of_chunk(g, index, device=device, page_order=page_order)
        rope = rope_3d(g, index * g.frames_per_chunk, device)
        noises = [
            random_latents(g, seed + 1 + index * g.denoising_steps + step, device)
            for step in range(g.denoising_steps)
        ]
        _synchronize(device)
        start = time.perf_counter()
        latents = noises[0]
        for step, level in enumerate(levels):
            velocity = _step(model, latents, level, text, rope, pools, window)
            clean = latents - level * velocity
            if step + 1 < len(levels):
                following = levels[step + 1]
                latents = (1 - following) * clean + following * noises[step + 1]
        _step(model, clean, 0.0, text, rope, pools, window)
        _synchronize(device)
        seconds = time.perf_counter() - start
        yield Chunk(index, clean, int(window.seq_lens.sum()), seconds)


def _step(
    model: VideoTransformer,
    latents: torch.Tensor,
    level: float,
    text: list[tuple[torch.Tensor, torch.Tensor]],
    rope: Rope,
    pools: Pools,
    window: Window,
) -> torch.Tensor:
    timestep = torch.full((), 1000.0 * level, device=latents.device)
    velocity: torch.Tensor = model(latents, timestep, text, rope, pools, window)
    return velocity


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
