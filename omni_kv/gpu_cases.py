"""The cases that the crash experiments run, by experiment and by name."""

from __future__ import annotations

from omni_kv.evidence_cells import CrashCase

#: Settings of ``PYTORCH_CUDA_ALLOC_CONF``.
EXPANDABLE = "expandable_segments:True"
ROUNDED = "roundup_power2_divisions:1"

CRASHES: dict[str, dict[str, CrashCase]] = {
    "crash": {
        "shared": CrashCase(),
        "shared, CUDA_LAUNCH_BLOCKING=1": CrashCase(launch_blocking=True),
        "shared, eager": CrashCase(compiled=False),
        "separate": CrashCase(layout="separate"),
    },
    "segments": {
        "default, exact": CrashCase(),
        "default, exact, neighbour": CrashCase(neighbour=True),
        "default, exact, after 4 GiB freed": CrashCase(before="4 GiB freed"),
        "default, exact, host memory": CrashCase(host_neighbour=True),
        "default, small": CrashCase(size="small"),
        "default, small, neighbour": CrashCase(size="small", neighbour=True),
        "default, small, host memory": CrashCase(size="small", host_neighbour=True),
        "default, page": CrashCase(size="page"),
        "default, 1.5x": CrashCase(size="1.5x"),
        "rounded to powers of 2, exact": CrashCase(allocator=ROUNDED),
        "expandable, exact": CrashCase(allocator=EXPANDABLE),
        "expandable, exact, neighbour": CrashCase(allocator=EXPANDABLE, neighbour=True),
        "expandable, small": CrashCase(allocator=EXPANDABLE, size="small"),
        "separate, default, exact": CrashCase(layout="separate"),
    },
    "expandable": {
        "shared": CrashCase(allocator=EXPANDABLE),
        "shared, neighbour": CrashCase(allocator=EXPANDABLE, neighbour=True),
        "separate, neighbour": CrashCase(layout="separate", allocator=EXPANDABLE, neighbour=True),
    },
    "hypotheses": {
        "1: float32 load, blocks cached": CrashCase(before="float32 load"),
        "1: 4 GiB cached": CrashCase(before="4 GiB freed"),
        "1: float32 load, empty_cache": CrashCase(before="float32 load, empty_cache"),
        "2: dynamic=None": CrashCase(),
        "2: dynamic=False": CrashCase(dynamic=False),
        "2: dynamic=True": CrashCase(dynamic=True),
        "2: dynamic=True, separate": CrashCase(dynamic=True, layout="separate"),
        "2: one configuration": CrashCase(dynamic=False, one_config=True),
        "3: mark_static_address": CrashCase(static_address=True),
        "4: 4 GiB of headroom": CrashCase(headroom_gib=4),
        "4: 16 GiB of headroom": CrashCase(headroom_gib=16),
        "5: 1.53 GiB a layer": CrashCase(size="1.5x"),
        "5: 29 MiB a layer": CrashCase(size="small"),
        "5: 4 GiB a layer, separate": CrashCase(size="4x", layout="separate"),
        "control: separate": CrashCase(layout="separate"),
    },
}
