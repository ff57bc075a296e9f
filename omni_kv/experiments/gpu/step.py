"""Measurements on the whole model: one denoising step, its parts, and full rollouts.

Clocks drop under sustained load, so only figures of one process are compared with each other, and
variants take turns instead of running one after the other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from omni_kv.evidence.cells import (
    Agreement,
    ChunkSample,
    Clones,
    Kernel,
    Profile,
    RolloutRun,
    Timing,
)
from omni_kv.model.attention import FLASH_ATTN_PAGE
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Layout, Pools, make_pools
from omni_kv.model.rollout import random_latents, random_text, rollout, window_of_chunk
from omni_kv.model.transformer import VideoTransformer, make_model, rope_3d

MeasuredCell = Timing | Profile | Agreement | RolloutRun | Clones
Thunk = Callable[[], object]


def for_backend(geometry: Geometry, backend: str) -> Geometry:
    """The geometry with pages that the backend can take."""
    if backend == "flash-attn":
        return geometry.replace(block_size=FLASH_ATTN_PAGE)
    return geometry


class FullStep:
    """One pass of the model over the first chunk that sees the full window.

    The pools are filled with random numbers, so that attention has real work to do. Each pass
    writes the same rows again, so passes can be compared.
    """

    def __init__(
        self, model: VideoTransformer, pools: Pools, device: str, *, by_table: bool = False
    ) -> None:
        g = model.geometry
        chunk = g.first_full_chunk
        for pool in (*pools.keys, *pools.values):
            pool.normal_()
        order = torch.arange(g.num_blocks) if by_table else None
        self.model = model
        self.inputs = (
            random_latents(g, 1, device),
            torch.full((), 500.0, device=device),
            model.text_kv(random_text(g, 0, device)),
            rope_3d(g, chunk * g.frames_per_chunk, device),
            pools,
            window_of_chunk(g, chunk, device=device, page_order=order),
        )

    def __call__(self) -> torch.Tensor:
        """The predicted velocity, like the latents."""
        out: torch.Tensor = self.model(*self.inputs)
        return out


def eagerly(run: Thunk) -> Thunk:
    """The same, with everything that was compiled run eagerly."""

    def eager() -> object:
        with torch.compiler.set_stance("force_eager"):
            return run()

    return eager


def step_flop(geometry: Geometry) -> float:
    """Floating-point operations of one step's matrix products and attention, at a full window."""
    g = geometry
    kv_dim = g.num_kv_heads * g.head_dim
    weights = g.dim * (g.dim + 2 * kv_dim) + 3 * g.dim**2 + 2 * g.dim * g.ffn_dim
    products = 2 * g.tokens_per_chunk * weights
    return g.num_layers * (
        products + attention_flop(g) + 4 * g.tokens_per_chunk * g.text_tokens * g.dim
    )


def attention_flop(geometry: Geometry) -> float:
    """Floating-point operations of one layer's self-attention at a full window."""
    return 4.0 * geometry.tokens_per_chunk * geometry.visible_tokens * geometry.dim


def take_turns(runs: dict[str, Thunk], samples: int, device: str) -> dict[str, list[float]]:
    """Seconds of each, by name; in every round each runs twice, and the second run counts.

    Args:
        runs: what to time.
        samples: rounds after a first one that does not count.
        device: where it runs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(samples + 1):
        for name, run in runs.items():
            run()
            elapsed = timed(run, device)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def timed(run: Thunk, device: str) -> float:
    """Seconds of one run, on the device's own clock where it has one."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def ceilings(geometry: Geometry, device: str, samples: int = 9) -> list[MeasuredCell]:
    """What the device can do: copy 2 GiB, and multiply square matrices."""
    big = device != "cpu"
    dtype = geometry.torch_dtype
    source = torch.randn(2**29 if big else 2**16, device=device).to(dtype).repeat(2)
    target = torch.empty_like(source)
    n = 8192 if big else 64
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    runs: dict[str, Thunk] = {"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}
    seconds = take_turns(runs, samples, device)
    return [
        Timing(name="ceiling/copy", seconds=seconds["copy"], nbytes=2 * source.nbytes),
        Timing(name="ceiling/matmul", seconds=seconds["matmul"], flop=2 * n**3),
    ]


def profile(name: str, run: Thunk, device: str, most: int = 40) -> Profile:
    """Time of one run by kernel (by operator on a CPU), the ``most`` costly ones."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run()
    on_gpu = device != "cpu"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profiler(activities=[activity]) as trace:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    kernels: dict[str, tuple[int, float]] = {}
    for event in trace.events():
        if on_gpu and "CUDA" not in str(event.device_type):
            continue
        count, total = kernels.get(event.name, (0, 0.0))
        spent = event.device_time if on_gpu else event.self_cpu_time_total
        kernels[event.name] = (count + 1, total + spent)
    costly = sorted(kernels.items(), key=lambda kernel: -kernel[1][1])[:most]
    return Profile(
        name=name,
        kernels=[
            Kernel(name=name[:120], count=count, microseconds=round(total, 3))
            for name, (count, total) in costly
        ],
    )


def difference(a: torch.Tensor, b: torch.Tensor) -> float | str:
    """``norm(a - b) / norm(b)``, or ``nan``."""
    error = float((a.float() - b.float()).norm() / b.float().norm())
    return error if error == error else "nan"


def agreement(name: str, a: torch.Tensor, b: torch.Tensor) -> Agreement:
    """How far ``a`` is from ``b``."""
    return Agreement(name=name, relative_error=difference(a, b))  # type: ignore[arg-type]


@torch.no_grad()
def measure_step(
    geometry: Geometry, device: str, backend: str, layout: Layout, samples: int
) -> list[MeasuredCell]:
    """One step with one backend: eager and compiled, by kernel, and against each other."""
    g = for_backend(geometry, backend)
    model = make_model(g, backend=backend, device=device)
    model.compile_layers()
    pools = make_pools(g, layout, device=device)
    return ceilings(g, device) + _step_cells(model, pools, device, backend, samples)


def _step_cells(
    model: VideoTransformer, pools: Pools, device: str, backend: str, samples: int
) -> list[MeasuredCell]:
    step = FullStep(model, pools, device)
    eager = eagerly(step)
    expected = eager()
    assert isinstance(expected, torch.Tensor)
    label = f"{backend}/compiled {pools.layout}"
    cells: list[MeasuredCell] = [agreement(f"{label} against eager", step(), expected)]
    runs: dict[str, Thunk] = {f"{backend}/eager {pools.layout}": eager, label: step}
    for name, seconds in take_turns(runs, samples, device).items():
        cells.append(Timing(name=name, seconds=seconds, flop=step_flop(model.geometry)))
    cells.append(profile(label, step, device))
    return cells


@torch.no_grad()
def measure_live(
    geometry: Geometry, device: str, backend: str, samples: int, chunks: int
) -> list[MeasuredCell]:
    """One step and one rollout over separate pools, in little time: for a notebook."""
    g = for_backend(geometry, backend)
    model = make_model(g, backend=backend, device=device)
    model.compile_layers()
    pools = make_pools(g, "separate", device=device)
    cells = ceilings(g, device) + _step_cells(model, pools, device, backend, samples)
    return cells + _rollout_cells(model, pools, device, backend, chunks, 1, chunks)


@torch.no_grad()
def measure_error(
    geometry: Geometry, device: str, backends: Sequence[str], layers: int = 8
) -> list[MeasuredCell]:
    """Eager and compiled steps of the first layers against the same layers in float32."""
    cells: list[MeasuredCell] = []
    small = geometry.replace(num_layers=min(layers, geometry.num_layers))
    for backend in backends:
        g = for_backend(small, backend)
        model = make_model(g, backend=backend, device=device)
        pools = make_pools(g, "separate", device=device)
        step = FullStep(model, pools, device)
        exact = make_model(g.replace(dtype="float32"), backend="sdpa", device=device)
        exact.load_state_dict(model.state_dict())
        exact_pools = Pools(
            "separate",
            tuple(key.float() for key in pools.keys),
            tuple(value.float() for value in pools.values),
        )
        latents, timestep, text, rope, _, window = step.inputs
        text32 = [(key.float(), value.float()) for key, value in text]
        reference = exact(latents.float(), timestep, text32, rope, exact_pools, window)
        del exact, exact_pools
        cells.append(agreement(f"{backend}/eager against float32", step(), reference))
        model.compile_layers()
        cells.append(agreement(f"{backend}/compiled against float32", step(), reference))
    return cells


@torch.no_grad()
def measure_rollouts(
    geometry: Geometry,
    device: str,
    backend: str,
    layout: Layout,
    chunks: int,
    repeats: int,
    eager_chunks: int,
) -> list[MeasuredCell]:
    """Full rollouts with one backend, eager and compiled in turns.

    Args:
        geometry: the sizes.
        device: where.
        backend: attention backend.
        layout: of the pools.
        chunks: length of a compiled rollout.
        repeats: rollouts of each kind.
        eager_chunks: length of an eager rollout.
    """
    g = for_backend(geometry, backend)
    model = make_model(g, backend=backend, device=device)
    pools = make_pools(g, layout, device=device)
    model.compile_layers()
    return _rollout_cells(model, pools, device, backend, chunks, repeats, eager_chunks)


def _rollout_cells(
    model: VideoTransformer,
    pools: Pools,
    device: str,
    backend: str,
    chunks: int,
    repeats: int,
    eager_chunks: int,
) -> list[MeasuredCell]:
    list(rollout(model, pools, chunks=1))
    cells: list[MeasuredCell] = []
    expected: list[torch.Tensor] = []
    for repeat in range(repeats):
        run = functools.partial(_rollout, model, pools, device, backend, repeat)
        with torch.compiler.set_stance("force_eager"):
            latents, cell = run("eager", eager_chunks, [])
        expected = expected or latents
        cells += [cell, run("compiled", chunks, expected)[1]]
    return cells


def _rollout(
    model: VideoTransformer,
    pools: Pools,
    device: str,
    backend: str,
    repeat: int,
    mode: str,
    chunks: int,
    expected: list[torch.Tensor],
) -> tuple[list[torch.Tensor], RolloutRun]:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    samples, latents = [], []
    for chunk in rollout(model, pools, chunks=chunks):
        latents.append(chunk.latents)
        differs = None
        if chunk.index < len(expected):
            differs = difference(chunk.latents, expected[chunk.index])
        samples.append(
            ChunkSample(
                index=chunk.index,
                visible_tokens=chunk.visible_tokens,
                seconds=chunk.seconds,
                differs=differs,  # type: ignore[arg-type]
            )
        )
    cell = RolloutRun(
        name=f"{backend}/{mode} {pools.layout}/{repeat}",
        backend=backend,
        mode=mode,  # type: ignore[arg-type]
        layout=pools.layout,
        repeat=repeat,
        chunks=samples,
        peak_bytes=torch.cuda.max_memory_allocated() if device != "cpu" else 0,
    )
    return latents, cell
