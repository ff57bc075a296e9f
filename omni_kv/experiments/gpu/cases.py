"""The cases that the crash experiments run, by experiment and by name."""

from __future__ import annotations

from omni_kv.evidence.cells import CrashCase

#: Settings of ``PYTORCH_CUDA_ALLOC_CONF``.
EXPANDABLE = "expandable_segments:True"
ROUNDED = "roundup_power2_divisions:1"

#: An engine allocates the pools of all layers before it runs the first; three are enough to have
#: what is allocated later (the context's own memory, too) lie elsewhere than behind the first.
ENGINE = 3

CRASHES: dict[str, dict[str, CrashCase]] = {
    "crash": {
        "shared": CrashCase(pool_layers=ENGINE),
        "shared, CUDA_LAUNCH_BLOCKING=1": CrashCase(pool_layers=ENGINE, launch_blocking=True),
        "shared, eager": CrashCase(pool_layers=ENGINE, compiled=False),
        "separate": CrashCase(pool_layers=ENGINE, layout="separate"),
    },
    "segments": {
        "default, exact, one pool": CrashCase(),
        "default, exact": CrashCase(pool_layers=ENGINE),
        "default, exact, neighbour": CrashCase(neighbour=True),
        "default, exact, after 4 GiB freed": CrashCase(before="4 GiB freed"),
        "default, small": CrashCase(size="small"),
        "default, small, neighbour": CrashCase(size="small", neighbour=True),
        "default, page": CrashCase(size="page"),
        "default, 1.5x": CrashCase(size="1.5x"),
        "rounded to powers of 2, exact": CrashCase(pool_layers=ENGINE, allocator=ROUNDED),
        "expandable, exact": CrashCase(allocator=EXPANDABLE),
        "expandable, exact, neighbour": CrashCase(allocator=EXPANDABLE, neighbour=True),
        "expandable, small": CrashCase(allocator=EXPANDABLE, size="small"),
        "separate, default, exact": CrashCase(layout="separate"),
    },
    # One pool, no twin: what the allocator's segments alone can say, and where that is not enough.
    "segments-alone": {
        "default, exact": CrashCase(),
        "default, exact, neighbour": CrashCase(neighbour=True),
        "default, exact, host memory": CrashCase(host_neighbour=True),
        "default, exact, after 4 GiB freed": CrashCase(before="4 GiB freed"),
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
        "1: float32 load, blocks cached": CrashCase(pool_layers=ENGINE, before="float32 load"),
        "1: 4 GiB cached": CrashCase(pool_layers=ENGINE, before="4 GiB freed"),
        "1: float32 load, empty_cache": CrashCase(
            pool_layers=ENGINE, before="float32 load, empty_cache"
        ),
        "2: dynamic=None": CrashCase(pool_layers=ENGINE),
        "2: dynamic=False": CrashCase(pool_layers=ENGINE, dynamic=False),
        "2: dynamic=True": CrashCase(pool_layers=ENGINE, dynamic=True),
        "2: dynamic=True, separate": CrashCase(pool_layers=ENGINE, dynamic=True, layout="separate"),
        "2: one configuration": CrashCase(pool_layers=ENGINE, dynamic=False, one_config=True),
        "3: mark_static_address": CrashCase(pool_layers=ENGINE, static_address=True),
        "4: 4 GiB of headroom": CrashCase(pool_layers=ENGINE, headroom_gib=4),
        "4: 16 GiB of headroom": CrashCase(pool_layers=ENGINE, headroom_gib=16),
        "5: 1.53 GiB a layer": CrashCase(pool_layers=ENGINE, size="1.5x"),
        "5: 29 MiB a layer": CrashCase(pool_layers=ENGINE, size="small"),
        "5: 4 GiB a layer, separate": CrashCase(size="4x", layout="separate"),
        "control: separate": CrashCase(pool_layers=ENGINE, layout="separate"),
    },
}
