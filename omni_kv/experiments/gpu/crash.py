"""Run one compiled layer over a pool layout in a child process, and say how it ended.

A crash poisons its own CUDA context and nothing else, so every case gets a process, and a compile
cache, of its own. ``crash_run`` is what to call; ``_in_child`` may bring its process down.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from omni_kv.evidence.cells import CrashCase, CrashRun
from omni_kv.model.geometry import Geometry
from omni_kv.model.pools import Pools, make_pools
from omni_kv.model.rollout import random_latents, random_text, window_of_chunk
from omni_kv.model.transformer import VideoTransformer, make_model, rope_3d
from omni_kv.sandbox.process import run_isolated

#: What a neighbour is filled with; no row of V is made of it.
NEIGHBOUR = 7.0
_GIB = 2**30

#: A mapped stretch of device memory: first address, bytes.
Segment = tuple[int, int]


def sized(geometry: Geometry, size: str) -> Geometry:
    """One layer of a geometry, with the pool that ``CrashCase.size`` asks for."""
    patch = geometry.patch
    changes: dict[str, int] = {
        "exact": {},
        "small": {"latent_height": 5 * patch, "latent_width": 8 * patch},
        "page": {"latent_height": 2 * patch, "latent_width": 2 * patch},
        "1.5x": {"pool_frames": geometry.pool_frames * 3 // 2 + 1},
        "4x": {"pool_frames": geometry.pool_frames * 4},
    }[size]
    return geometry.replace(num_layers=1, **changes)


def mapped_behind(segments: Iterable[Segment], address: int) -> int:
    """How many bytes from ``address`` on are mapped without a gap.

    Args:
        segments: what is mapped, in any order.
        address: where to start.
    """
    end = address
    for start, size in sorted(segments):
        if start <= end < start + size:
            end = start + size
    return end - address


def predict(
    overread_bytes: int, mapped_bytes: int, clone_is_next: bool, readable: bool | None = None
) -> Literal["illegal memory access", "V corrupted", "right"]:
    """What the kernel that clones V will do, from the map of the memory alone.

    Args:
        overread_bytes: bytes that it will read behind V.
        mapped_bytes: bytes behind V that the allocator has mapped without a gap.
        clone_is_next: whether the clone's own buffer begins where V ends. Then what it reads behind
            V is what it has just written, V itself; launched again and again by the autotuner,
            it ends up right by accident.
        readable: whether that memory could be read in a twin process, if it was tried: what lies
            there may be mapped by somebody else than the allocator.
    """
    mapped = mapped_bytes >= overread_bytes
    if overread_bytes == 0 or (clone_is_next and mapped):
        return "right"
    return "V corrupted" if mapped or readable else "illegal memory access"


def crash_run(
    name: str,
    case: CrashCase,
    geometry: Geometry,
    device: str,
    *,
    cache_dir: Path | None = None,
    twin: bool = False,
    timeout: float = 240.0,
) -> CrashRun:
    """Run a case in a child process.

    Args:
        name: what to call it in the record.
        case: what to run.
        geometry: the preset; one layer of it is run.
        device: ``cuda`` or ``cpu``.
        cache_dir: compile cache to use and keep; a fresh one by default.
        twin: whether a twin process goes first, up to the point where the kernel would be launched,
            and touches the memory behind V, to find out whether it is mapped.
        timeout: seconds until a child is killed.
    """
    env = {"PYTORCH_CUDA_ALLOC_CONF": case.allocator} if case.allocator else {}
    if case.launch_blocking:
        env["CUDA_LAUNCH_BLOCKING"] = "1"
    child = functools.partial(
        run_isolated, _in_child, case, geometry, device, timeout=timeout, env=env
    )
    readable = None
    if twin and device != "cpu" and case.layout == "shared":
        readable = child(only_touch=True).unwrap()["readable"]
    outcome = child(readable=readable, cache_dir=cache_dir)
    found: dict[str, Any] = {"outcome": outcome.status, "error": outcome.describe()}
    if outcome.status == "returned":
        found = outcome.unwrap()
    found["seconds"] = round(outcome.seconds, 2)
    found.setdefault("pool_numel", sized(geometry, case.size).pool_numel)
    return CrashRun(name=name, case=case, **found)


class _Touched(Exception):
    """The memory behind V was touched; there is no need to go on."""


@torch.no_grad()
def _in_child(
    case: CrashCase,
    geometry: Geometry,
    device: str,
    *,
    readable: bool | None = None,
    only_touch: bool = False,
) -> dict[str, Any]:
    """Run the case here; the fields of its ``CrashRun``, as far as they are known."""
    g = sized(geometry, case.size)
    found: dict[str, Any] = {"pool_numel": g.pool_numel}
    if readable is not None:
        found["readable"] = readable
    with torch.device(device):
        found["released_bytes"], loaded = _before(case.before, g)
        # Weights before pools, as an inference engine does it.
        model = make_model(g, backend="sdpa", device=device)
        pools = make_pools(g.replace(num_layers=case.pool_layers), case.layout, device=device)
        neighbour = None
        if case.neighbour:
            neighbour = torch.full((2 * g.pool_numel,), NEIGHBOUR, dtype=g.torch_dtype)
    in_host_memory = None
    if case.host_neighbour:
        in_host_memory = torch.full((g.pool_numel,), NEIGHBOUR, dtype=g.torch_dtype)
    _limit_headroom(case.headroom_gib)
    step = OneLayerStep(model, pools, device)
    pools.keys[0].normal_()
    _fill(pools.values[0])
    if case.static_address:
        for view in (pools.key_slots(0), pools.value_slots(0)):
            torch._dynamo.mark_static_address(view)
    if case.layout == "separate":
        found["predicted"] = "right"
    _watch_kernels(pools.values[0], neighbour, found, only_touch)
    try:
        if case.compiled:
            step.model.compile_layers(dynamic=case.dynamic)
            if case.one_config:
                torch._inductor.config.triton.autotune_pointwise = False
        step.run()
        _synchronize(device)
    except _Touched:
        return found
    except Exception as error:
        illegal = "illegal memory access" in str(error)
        found["outcome"] = "illegal memory access" if illegal else "raised"
        found["error"] = _short(f"{type(error).__name__}: {error}".splitlines()[0])
        found["frames"] = _frames(error)
    else:
        wrong, foreign = _rows(step)
        found |= {"rows": g.num_slots, "rows_wrong": wrong, "rows_neighbour": foreign}
        found["outcome"] = "V corrupted" if wrong else "right"
    found["clones"] = _large_buffers(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), g.pool_numel)
    del loaded, neighbour, in_host_memory
    return found


class OneLayerStep:
    """One pass of a one-layer model over its first chunk, with the same inputs each time."""

    def __init__(self, model: VideoTransformer, pools: Pools, device: str) -> None:
        g = model.geometry
        self.model = model
        self.pools = pools
        self.window = window_of_chunk(g, 0, device=device)
        self.inputs = (
            random_latents(g, 1, device),
            torch.full((), 500.0, device=device),
            model.text_kv(random_text(g, 0, device)),
            rope_3d(g, 0, device),
            pools,
            self.window,
        )

    def run(self) -> torch.Tensor:
        """The predicted velocity, like the latents."""
        out: torch.Tensor = self.model(*self.inputs)
        return out


def _before(what: str, geometry: Geometry) -> tuple[int | None, list[torch.Tensor]]:
    """Leave cached blocks behind, as ``CrashCase.before`` says.

    Returns:
        Bytes that ``empty_cache()`` gave back, if it was called, and what has to be kept alive.
    """
    weights: list[torch.Tensor] = []
    if what == "4 GiB freed":
        torch.empty(4 * _GIB, dtype=torch.uint8)
    if what in ("float32 load", "float32 load, empty_cache"):
        with torch.device("meta"):
            shapes = [p.shape for p in VideoTransformer(geometry, "sdpa").parameters()]
        loaded = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        while loaded:
            weights.append(loaded.pop().to(geometry.torch_dtype))
    released = None
    if what == "float32 load, empty_cache" and torch.cuda.is_available():
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        released = reserved - torch.cuda.memory_reserved()
    return released, weights


def _limit_headroom(headroom_gib: float | None) -> None:
    """Let the process take this much device memory beyond what it holds, and no more."""
    if headroom_gib is None or not torch.cuda.is_available():
        return
    total = torch.cuda.get_device_properties(0).total_memory
    most = torch.cuda.memory_reserved() + headroom_gib * _GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))


def _watch_kernels(
    value: torch.Tensor, neighbour: torch.Tensor | None, found: dict[str, Any], only_touch: bool
) -> None:
    """Have Triton kernels looked at just before their first launch.

    Notes how many configurations of each are timed against each other. Of the kernel that clones V
    it is noted what the allocator has mapped behind V at that moment, and what follows from it.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    configs: dict[str, int] = {}
    found["configs"] = configs
    run, autotune = CachingAutotuner.run, CachingAutotuner.autotune_to_one_config

    def noted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        reads_v = any(t.data_ptr() == value.data_ptr() for t in tensors)
        clone = next((t for t in tensors if t.numel() > value.numel() and t.dim() == 1), None)
        if reads_v and clone is not None and "mapped_bytes" not in found:
            found.update(_look_behind(value, clone, neighbour, found.get("readable")))
            if only_touch:
                found["readable"] = touch(value, found["overread_bytes"])
                raise _Touched
        return run(self, *args, **kwargs)

    def noted_autotune(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs[getattr(self.fn, "__name__", "kernel")] = len(self.launchers)
        return autotune(self, *args, **kwargs)

    CachingAutotuner.run = noted_run  # type: ignore[method-assign]
    CachingAutotuner.autotune_to_one_config = noted_autotune  # type: ignore[method-assign]


def _look_behind(
    value: torch.Tensor,
    clone: torch.Tensor,
    neighbour: torch.Tensor | None,
    readable: bool | None,
) -> dict[str, Any]:
    end = value.data_ptr() + value.nbytes
    segments = [(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot()]
    mapped, overread = mapped_behind(segments, end), clone.nbytes - value.nbytes
    clone_is_next = clone.data_ptr() == end
    if clone_is_next:
        behind = "the clone"
    elif neighbour is not None and neighbour.data_ptr() == end:
        behind = "the neighbour"
    elif mapped >= overread:
        behind = "the allocator's memory"
    else:
        behind = "not the allocator's" if readable else "nothing"
    return {
        "overread_bytes": overread,
        "mapped_bytes": mapped,
        "behind": behind,
        "predicted_by_segments": predict(overread, mapped, clone_is_next),
        "predicted": predict(overread, mapped, clone_is_next, readable),
    }


def touch(value: torch.Tensor, nbytes: int) -> bool:
    """Whether the memory behind a tensor can be read; if not, this process' CUDA context is lost.

    Args:
        value: contiguous, on a CUDA device.
        nbytes: how far to go; one byte in every 4 KiB is read.
    """
    from omni_kv.experiments.gpu.touch import touch_kernel

    base = value.view(torch.uint8).flatten()
    step = 4096
    count = -(-nbytes // step)
    sums = torch.empty(-(-count // 1024), dtype=torch.int32, device=value.device)
    touch_kernel[(sums.numel(),)](base, sums, base.numel(), count, step, BLOCK=1024)
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _fill(value: torch.Tensor) -> torch.Tensor:
    """Fill V with random numbers, the same each time; no copy of them need be kept meanwhile."""
    return value.normal_(generator=torch.Generator(value.device).manual_seed(7))


def _rows(step: OneLayerStep) -> tuple[int, int]:
    """How many rows of V are wrong, and how many hold a neighbour's value.

    Rows that the step did not write must be as before; those that it wrote, as the eager layer
    writes them. Eager and compiled layers differ by rounding, so a row counts as wrong if it is off
    by more than a tenth of its norm, or is not finite.
    """
    value = step.pools.values[0]
    got = value.clone().flatten(0, 1)
    with torch.compiler.set_stance("force_eager"):
        step.run()
    slots = step.window.slot_mapping
    written = value.flatten(0, 1)[slots]
    expected = _fill(value).flatten(0, 1)
    expected[slots] = written
    wrong = foreign = 0
    for some, right in zip(got.split(4096), expected.split(4096), strict=True):
        a, b = some.float().flatten(1), right.float().flatten(1)
        close = (a - b).norm(dim=1) <= 0.1 * b.norm(dim=1)
        wrong += int((~close).sum())
        foreign += int((a == NEIGHBOUR).all(dim=1).sum())
    return wrong, foreign


def _large_buffers(cache: Path, numel: int) -> list[str]:
    """The flat buffers of the generated code that are as large as V or of symbolic size."""
    pattern = re.compile(r"empty_strided_\w+\(\(([^,()]+), \), \(1, \), torch\.(\w+)\)")
    found = []
    for path in sorted(cache.rglob("*.py")):
        for size, dtype in pattern.findall(path.read_text(encoding="utf-8")):
            if not size.isdigit() or int(size) >= numel:
                found.append(f"{size} {dtype}")
    return found


def _frames(error: BaseException) -> list[str]:
    """The stack of an exception, outermost first, without the frames of this module."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        where = _short(frame.filename)
        if not where.endswith("gpu_experiments.py"):
            frames.append(f"{where}:{frame.lineno} {frame.name}")
    return frames


def _short(text: str) -> str:
    """Text with its paths cut down to what is the same everywhere."""
    text = re.sub(r"[^\s'\"]*/site-packages/", "", text)
    text = re.sub(r"[^\s'\"]*/(omni_kv/[\w/]+\.py)", r"\1", text)
    return re.sub(
        r"[^\s'\"]*/omni-kv-[^\s'\":]*|[^\s'\"]*/torchinductor_[^\s'\":]*", "generated code", text
    )


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
