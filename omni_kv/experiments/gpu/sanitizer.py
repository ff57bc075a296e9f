"""compute-sanitizer's verdict on the kernel that clones V."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from omni_kv.evidence.cells import SanitizerRun
from omni_kv.experiments.gpu.crash import OneLayerStep, sized
from omni_kv.model.geometry import Geometry, preset
from omni_kv.model.pools import make_pools
from omni_kv.model.transformer import make_model
from omni_kv.sandbox.process import run_isolated


def sanitizer_run(name: str, geometry: Geometry, timeout: float = 400.0) -> SanitizerRun:
    """Run the layer under compute-sanitizer and read its first report.

    The pool has the preset's size; the chunk has few tokens, since everything runs many times
    slower under the tool. Each tensor gets an allocation of its own, so that what lies behind the
    pool belongs to nobody, as far as the tool knows.

    Raises:
        RuntimeError: if the tool is not there or reports nothing.
    """
    return run_isolated(
        _sanitize,
        name,
        geometry,
        timeout=timeout,
        env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ).unwrap()


def _sanitize(name: str, geometry: Geometry) -> SanitizerRun:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise RuntimeError("compute-sanitizer is not on the PATH")
    code = (
        f"from omni_kv.experiments.gpu.sanitizer import _sanitized; _sanitized({geometry.name!r})"
    )
    command = [tool, "--tool", "memcheck", "--print-limit", "3", sys.executable, "-c", code]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return read_sanitizer(name, output)


@torch.no_grad()
def _sanitized(preset_name: str) -> None:
    g = few_tokens(preset(preset_name))
    pools = make_pools(g, "shared", device="cuda")
    end = pools.values[0].data_ptr() + pools.values[0].nbytes
    print(f"POOL {g.pool_numel} {end}", flush=True)
    step = OneLayerStep(make_model(g, backend="sdpa", device="cuda"), pools, "cuda")
    step.model.compile_layers()
    step.run()
    torch.cuda.synchronize()


def few_tokens(geometry: Geometry) -> Geometry:
    """One narrow layer with a pool of the preset's size and four tokens a frame."""
    g = sized(geometry, "page")
    frames = -(-geometry.num_slots // g.tokens_per_frame)
    return g.replace(pool_frames=frames, ffn_dim=geometry.head_dim)


def read_sanitizer(name: str, output: str) -> SanitizerRun:
    """Read memcheck's report of the first bad access.

    Args:
        name: what to call it in the record.
        output: what the tool printed, with the line that ``_sanitized`` prints.

    Raises:
        RuntimeError: if there is no such report.
    """
    plain = output.replace(",", "")
    patterns: Sequence[str] = (
        r"POOL (\d+) (\d+)",
        r"(Invalid __global__ \w+) of size (\d+) bytes",
        r"\n=+ +at (\w+)\+",
        r"(?:Access to|Address) 0x([0-9a-f]+) is out of bounds",
        r"is (\d+) bytes (after|before) the nearest allocation at 0x([0-9a-f]+) of size (\d+)",
        r"ERROR SUMMARY: (\d+) error",
    )
    matches = [re.search(pattern, plain) for pattern in patterns]
    if None in matches:
        missing = patterns[matches.index(None)]
        raise RuntimeError(f"no {missing!r} in compute-sanitizer's output:\n{output[-2000:]}")
    pool, verdict, kernel, address, nearest, errors = (m.groups() for m in matches if m)
    return SanitizerRun(
        name=name,
        verdict=f"{verdict[0]} of size {verdict[1]} bytes",
        kernel=kernel[0],
        access_bytes=int(verdict[1]),
        address=int(address[0], 16),
        distance_bytes=int(nearest[0]) if nearest[1] == "after" else -int(nearest[0]),
        allocation_address=int(nearest[2], 16),
        allocation_bytes=int(nearest[3]),
        pool_numel=int(pool[0]),
        value_pool_end=int(pool[1]),
        errors=int(errors[0]),
    )
