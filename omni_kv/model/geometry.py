"""The sizes of a model and of its KV pools, and what follows from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """Sizes of the video diffusion transformer and of its paged KV cache.

    Two units that are easy to mix up are kept apart: ``block_size`` is the *paging* unit (slots per
    page of the pool); a latent frame, ``tokens_per_frame`` slots, is the *eviction* unit.

    Attributes:
        name: what to call this geometry in messages.
        num_layers: transformer layers; each has pools of its own.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: elements per head; even.
        ffn_dim: inner width of the feed-forward network.
        latent_height: rows of a latent frame, before patching.
        latent_width: columns of a latent frame, before patching.
        latent_channels: channels of a latent frame.
        patch: side of a square patch of the latent frame; one patch is one token.
        text_tokens: length of the text conditioning.
        text_dim: width of the text conditioning.
        frames_per_chunk: latent frames that are denoised together.
        sink_frames: first frames of the video, which are never evicted.
        window_frames: most recent past frames that stay visible besides the sink.
        denoising_steps: passes that denoise a chunk; one more pass commits its clean keys/values.
        pool_frames: frames that one layer's pool has room for.
        block_size: slots per page.
        dtype: name of the dtype of weights, activations and pools.
        video_frames_per_latent_frame: temporal compression of the video autoencoder.
        fps: video frames per second.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    latent_height: int
    latent_width: int
    latent_channels: int
    patch: int
    text_tokens: int
    text_dim: int
    frames_per_chunk: int
    sink_frames: int
    window_frames: int
    denoising_steps: int
    pool_frames: int
    block_size: int
    dtype: str
    video_frames_per_latent_frame: int = 4
    fps: int = 16

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("sink_frames", "window_frames") else 1
            if isinstance(value, int) and value < least:
                raise ValueError(
                    f"geometry {self.name!r}: {field.name} must be at least {least}, not {value}"
                )
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"geometry {self.name!r}: {self.dtype!r} is no torch dtype")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"geometry {self.name!r}: num_heads={self.num_heads} is no multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"geometry {self.name!r}: head_dim={self.head_dim} must be even")
        if self.latent_height % self.patch or self.latent_width % self.patch:
            raise ValueError(
                f"geometry {self.name!r}: a latent frame of {self.latent_height} x "
                f"{self.latent_width} does not divide into patches of {self.patch}"
            )
        if self.pool_frames < self.visible_frames:
            raise ValueError(
                f"geometry {self.name!r}: pool_frames={self.pool_frames} has no room for sink, "
                f"window and chunk ({self.visible_frames} frames); raise pool_frames"
            )

    def replace(self, **changes: object) -> Geometry:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def dim(self) -> int:
        """Width of the residual stream, ``num_heads * head_dim``."""
        return self.num_heads * self.head_dim

    @property
    def tokens_per_frame(self) -> int:
        """Tokens, and so slots, of one latent frame."""
        return (self.latent_height // self.patch) * (self.latent_width // self.patch)

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens that one pass of the model takes."""
        return self.frames_per_chunk * self.tokens_per_frame

    @property
    def visible_frames(self) -> int:
        """Frames that a query attends to once the window is full: sink, window and chunk."""
        return self.sink_frames + self.window_frames + self.frames_per_chunk

    @property
    def visible_tokens(self) -> int:
        """Keys that a query attends to once the window is full."""
        return self.visible_frames * self.tokens_per_frame

    @property
    def first_full_chunk(self) -> int:
        """The first chunk, counted from 0, that sees the full window."""
        return -(-(self.sink_frames + self.window_frames) // self.frames_per_chunk)

    @property
    def num_blocks(self) -> int:
        """Pages of one pool: ``pool_frames`` frames, rounded up to whole pages."""
        return -(-self.pool_frames * self.tokens_per_frame // self.block_size)

    @property
    def num_slots(self) -> int:
        """Slots of one pool."""
        return self.num_blocks * self.block_size

    @property
    def pool_numel(self) -> int:
        """Elements of the keys, or of the values, of one layer."""
        return self.num_slots * self.num_kv_heads * self.head_dim

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the keys, or of the values, of one layer."""
        return self.pool_numel * self.torch_dtype.itemsize

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return 2 * self.num_layers * self.pool_nbytes

    @property
    def clone_numel(self) -> int:
        """Elements that the clone asks for when V is the second half of one allocation.

        ``clone_preserve_strides`` in ``torch/_prims_common/__init__.py`` takes the storage offset
        *plus* the required length: K's elements as well as V's.
        """
        return 2 * self.pool_numel

    @property
    def clone_nbytes_per_step(self) -> int:
        """Bytes that the clones of one pass through all layers copy."""
        return self.num_layers * self.clone_numel * self.torch_dtype.itemsize

    @property
    def clone_nbytes_per_chunk(self) -> int:
        """Bytes that the clones of a chunk's denoising steps copy.

        The pull request counts the denoising steps alone; the committing pass adds one more.
        """
        return self.denoising_steps * self.clone_nbytes_per_step

    @property
    def chunk_seconds(self) -> float:
        """Seconds of video in one chunk."""
        return self.frames_per_chunk * self.video_frames_per_latent_frame / self.fps


_LINGBOT = Geometry(
    name="lingbot-480x768",
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    ffn_dim=13_824,
    latent_height=60,
    latent_width=96,
    latent_channels=16,
    patch=2,
    text_tokens=512,
    text_dim=4_096,
    frames_per_chunk=3,
    sink_frames=9,
    window_frames=9,
    denoising_steps=4,
    pool_frames=37,
    block_size=16,
    dtype="bfloat16",
)

#: Geometries by name. ``tiny`` has the structure of the others and takes seconds on two cores;
#: its 24 tokens per frame are no multiple of its pages of 16.
PRESETS: dict[str, Geometry] = {
    "tiny": Geometry(
        name="tiny",
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        ffn_dim=128,
        latent_height=8,
        latent_width=12,
        latent_channels=4,
        patch=2,
        text_tokens=8,
        text_dim=32,
        frames_per_chunk=2,
        sink_frames=2,
        window_frames=4,
        denoising_steps=2,
        pool_frames=10,
        block_size=16,
        dtype="float32",
    ),
    "lingbot-480x768": _LINGBOT,
    # 1,560 tokens per latent frame: no multiple of 16.
    "lingbot-480x832": _LINGBOT.replace(name="lingbot-480x832", latent_width=104),
}


def preset(name: str) -> Geometry:
    """Return the geometry of that name.

    Raises:
        ValueError: if there is none; the message lists those that exist.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}") from None
