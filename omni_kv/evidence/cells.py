"""The parts that records are made of: what was asked for in one run, and what came out of it."""

from __future__ import annotations

import re
from typing import Literal

import pydantic


class Strict(pydantic.BaseModel):
    """Base of all records: no unknown fields, no changes, no NaN in place of a number."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CrashCase(Strict):
    """One compiled layer to be run in a process of its own.

    Attributes:
        layout: how K and V lie in memory.
        size: ``exact`` is the preset's pool; ``small`` has 40 tokens a frame, ``page`` has 4;
            ``1.5x`` and ``4x`` have that many times the frames.
        compiled: False runs it eagerly.
        dynamic: what ``torch.compile(dynamic=...)`` gets.
        allocator: value of ``PYTORCH_CUDA_ALLOC_CONF``; empty is torch's default.
        launch_blocking: whether ``CUDA_LAUNCH_BLOCKING=1`` is set.
        pool_layers: of how many layers pools are allocated, one after the other; the first is run.
        neighbour: whether a tensor filled with 7 is allocated just after the pools.
        host_neighbour: whether host memory of V's size, filled with 7, is allocated after them.
        before: what happens first: nothing; 4 GiB are allocated and freed; weights are loaded as
            float32 and converted; the same and then ``empty_cache()``.
        static_address: whether ``mark_static_address`` is called on the pools.
        one_config: whether Inductor is kept from trying several configurations of a kernel.
        headroom_gib: how much device memory the process may take beyond its weights and pools; None
            for all there is.
        cache: the compile cache: a fresh one, or the one left by the run of that name.
    """

    layout: Literal["shared", "separate"] = "shared"
    size: Literal["exact", "small", "page", "1.5x", "4x"] = "exact"
    compiled: bool = True
    dynamic: bool | None = None
    allocator: str = ""
    launch_blocking: bool = False
    neighbour: bool = False
    host_neighbour: bool = False
    pool_layers: int = 1
    before: Literal["nothing", "4 GiB freed", "float32 load", "float32 load, empty_cache"] = (
        "nothing"
    )
    static_address: bool = False
    one_config: bool = False
    headroom_gib: float | None = None
    cache: str = "fresh"


Behind = Literal[
    "nothing", "the clone", "the neighbour", "the allocator's memory", "not the allocator's"
]
CrashOutcome = Literal[
    "right", "V corrupted", "illegal memory access", "raised", "killed", "timed out"
]


class CrashRun(Strict):
    """How a ``CrashCase`` ended.

    Attributes:
        name: unique within the record.
        case: what was run.
        outcome: ``right`` if every row of V is as after the eager layer.
        error: first line of the exception, or the signal.
        frames: the stack behind the exception, outermost first; files by package-relative path.
        pool_numel: elements of K, or of V.
        clones: per buffer of the generated code that is as large as V or larger: its size.
        configs: how many configurations of each Triton kernel were timed against each other.
        rows: rows of V.
        rows_wrong: rows of V that differ from the eager layer's; None if the run did not end.
        rows_neighbour: rows of V that hold a neighbour's value.
        released_bytes: what ``empty_cache()`` gave back.
        overread_bytes: bytes behind V that the kernel that clones V is about to read.
        mapped_bytes: bytes behind V without a gap, by the allocator's segments at that moment.
        readable: whether a twin process could read all of these bytes, if one tried.
        behind: what lies there.
        predicted_by_segments: from the allocator's segments alone, before the kernel has run.
        predicted: from the segments and the twin; for separate pools, from the layout.
        seconds: wall-clock time of the child.
    """

    kind: Literal["crash"] = "crash"
    name: str
    case: CrashCase
    outcome: CrashOutcome
    error: str | None = None
    frames: list[str] = []
    pool_numel: int
    clones: list[str] = []
    configs: dict[str, int] = {}
    rows: int | None = None
    rows_wrong: int | None = None
    rows_neighbour: int | None = None
    released_bytes: int | None = None
    overread_bytes: int | None = None
    mapped_bytes: int | None = None
    readable: bool | None = None
    behind: Behind | None = None
    predicted_by_segments: Literal["illegal memory access", "V corrupted", "right"] | None = None
    predicted: Literal["illegal memory access", "V corrupted", "right"] | None = None
    seconds: float


class AuditRun(Strict):
    """What the audit said of one callable.

    Attributes:
        name: the callable and its arguments.
        verdict: ``clean``, ``findings`` or ``could not run``.
        sentence: the audit's one sentence.
        findings: what it found.
        comparisons: by kind of call, how compiled compares with eager.
        runs: the same by kind of call and memory.
        seconds: wall-clock time of the audit.
    """

    kind: Literal["audit"] = "audit"
    name: str
    verdict: Literal["clean", "findings", "could not run"]
    sentence: str
    findings: list[str]
    comparisons: dict[str, str]
    runs: dict[str, str]
    seconds: float


class GuardedRun(Strict):
    """How one compiled layer over memory with known surroundings ended, held against eager.

    Attributes:
        name: unique within the record.
        layout: how K and V lie in memory.
        memory: what surrounds each allocation: an unmapped page behind it, or a neighbour.
        dynamic: what ``torch.compile(dynamic=...)`` got.
        repeat: number of the run; every run is a process of its own with a fresh compile cache.
        ended: ``returned``, or the first line of what ended the process.
        rows: slots of the pool; None, like the counts that follow, if the run did not return.
        rows_written: slots that the op was asked to write.
        key_rows_wrong: slots of K that differ from the eager run.
        value_rows_wrong: slots of V that differ from the eager run.
        value_rows_neighbour: how many of these hold the neighbour's values.
        value_rows_keys: how many of these hold the same slot of K.
        agrees: whether output and both pools agree with the eager run.
        seconds: wall-clock time of the child.
    """

    kind: Literal["guarded"] = "guarded"
    name: str
    layout: Literal["shared", "separate"]
    memory: Literal["guard after", "guard before", "neighbour"]
    dynamic: bool
    repeat: int
    ended: str
    rows: int | None = None
    rows_written: int | None = None
    key_rows_wrong: int | None = None
    value_rows_wrong: int | None = None
    value_rows_neighbour: int | None = None
    value_rows_keys: int | None = None
    agrees: bool | None = None
    seconds: float


class Clones(Strict):
    """The clones of mutated arguments in one compiled graph.

    Attributes:
        name: what was compiled.
        elements: of each clone, by the argument's name.
    """

    kind: Literal["clones"] = "clones"
    name: str
    elements: dict[str, int]


class SanitizerRun(Strict):
    """What compute-sanitizer's memcheck said of the first bad access.

    Attributes:
        name: unique within the record.
        verdict: kind and size of the access, in the tool's words.
        kernel: that made it.
        access_bytes: its size.
        address: where it went.
        distance_bytes: from the end of the nearest allocation, or, negative, to its beginning.
        allocation_address: of the nearest allocation.
        allocation_bytes: its size.
        pool_numel: elements of V.
        value_pool_end: address of the first byte behind V.
        errors: how many accesses were bad.
    """

    kind: Literal["sanitizer"] = "sanitizer"
    name: str
    verdict: str
    kernel: str
    access_bytes: int
    address: int
    distance_bytes: int
    allocation_address: int
    allocation_bytes: int
    pool_numel: int
    value_pool_end: int
    errors: int


#: How the variants of a step are called: backend, mode and layout of the pools.
_VARIANT = re.compile(r"(?P<backend>[^/]+)/(?P<mode>eager|compiled) (?P<layout>shared|separate)")


class _Named(Strict):
    """A cell whose name says what was run, such as ``sdpa/compiled separate``.

    Each part is None where the name does not say it.
    """

    kind: str
    name: str

    @property
    def backend(self) -> str | None:
        """The attention backend."""
        return self._part("backend")

    @property
    def mode(self) -> str | None:
        """``eager`` or ``compiled``."""
        return self._part("mode")

    @property
    def layout(self) -> str | None:
        """``shared`` or ``separate``: how K and V lie in memory."""
        return self._part("layout")

    def _part(self, part: str) -> str | None:
        found = _VARIANT.fullmatch(self.name)
        return found[part] if found else None


class Timing(_Named):
    """Seconds of repeated runs of one thing, and the work that it does.

    Attributes:
        name: unique within the record.
        seconds: one entry a run, warm-up left out.
        flop: floating-point operations of one run, if they are what it spends its time on.
        nbytes: bytes that one run has to read and write.
        note: what was changed or what is special.
        predicted_ms: what the change was expected to add to a step, in milliseconds.
        cpu_seconds: processor time of each run, in the process and those that it started.
    """

    kind: Literal["timing"] = "timing"
    name: str
    seconds: list[float] = pydantic.Field(min_length=1)
    flop: float | None = None
    nbytes: float | None = None
    note: str = ""
    predicted_ms: float | None = None
    cpu_seconds: list[float] | None = None

    @property
    def ceiling(self) -> str | None:
        """Which ceiling of the device was timed, ``copy`` or ``matmul``; None for other work."""
        found = re.search(r"(?:^|: )ceiling/(\w+)$", self.name)
        return found[1] if found else None

    @property
    def is_ceiling(self) -> bool:
        """Whether it is what the device can do, and no part of the model."""
        return self.ceiling is not None


class Kernel(Strict):
    """A kernel in a profile."""

    name: str
    count: int
    microseconds: float


class Profile(_Named):
    """The device time of one step, by kernel."""

    kind: Literal["profile"] = "profile"
    name: str
    kernels: list[Kernel]


class Agreement(Strict):
    """How far one output is from another: ``norm(a - b) / norm(b)``."""

    kind: Literal["agreement"] = "agreement"
    name: str
    relative_error: float | Literal["nan"]


class ChunkSample(Strict):
    """One chunk of a rollout.

    Attributes:
        index: its number, from 0.
        visible_tokens: keys that its queries attended to.
        seconds: wall-clock time.
        differs: relative difference of its latents from those of the eager rollout, if compared.
    """

    index: int
    visible_tokens: int
    seconds: float
    differs: float | Literal["nan"] | None = None


class RolloutRun(Strict):
    """One rollout from its first chunk on."""

    kind: Literal["rollout"] = "rollout"
    name: str
    backend: str
    mode: Literal["eager", "compiled"]
    layout: Literal["shared", "separate"]
    repeat: int
    chunks: list[ChunkSample] = pydantic.Field(min_length=1)
    peak_bytes: int
