"""What the exercises measure: each function tries an answer and says what it found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_kv.model.geometry import preset
from omni_kv.model.rollout import frames_in_pool
from omni_kv.publish.exercises.compiler import first_stage, one_allocation, spare_room

PULL_REQUEST = "lingbot-480x768"
#: The device that the exercises speak of, whichever one the notebooks show.
H200 = "nvidia-h200-torch2.11.0"


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        task: what is asked for.
        hints: from vague to nearly the answer.
        measure: tries an answer; returns whether it is right, and what was found, in a sentence.
    """

    task: str
    hints: tuple[str, ...]
    measure: Callable[[Any], tuple[bool, str]]


def copies_back(answer: Callable[..., Any]) -> tuple[bool, str]:
    """Count the copies into the inputs at the end of AOTAutograd's graph of a function of two."""
    from omni_kv.lens.capture import capture

    with torch.no_grad():
        graph = capture(answer, torch.ones(4), torch.ones(4), until="graph").graphs[0]
    aot = graph.aot_forward_graph
    assert aot is not None
    copies = aot.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found = len([node for node in copies if node.args[0].op == "placeholder"])
    return found == 2, f"AOTAutograd's graph of it ends with {found} copies into the inputs"


def no_clone(answer: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]) -> (
    tuple[bool, str]
):  # fmt: skip
    """Compile the op over the pools that the answer makes, and count clones."""
    pools = answer(64, 2, 32)
    shapes = [tuple(pool.shape) for pool in pools]
    if shapes != [(64, 2, 32)] * 2:
        return False, f"the pools have the shapes {shapes}, not (64, 2, 32) twice"
    cloned = _clones(*pools)
    told = ", ".join(f"{name} is cloned, {size:,} elements" for name, size in cloned.items())
    return not cloned, told or "both pools are written in place"


def clone_elements(answer: int) -> tuple[bool, str]:
    """Measure the clone over shared halves of 100 slots, 2 heads and 32 elements a head."""
    kv = torch.zeros(2, 100, 2, 32)
    (measured,) = _clones(kv[0], kv[1]).values()
    right = answer == measured
    return right, f"the compiler clones {measured:,} elements" if right else f"not {answer:,}"


def _clones(key_pool: torch.Tensor, value_pool: torch.Tensor) -> dict[str, int]:
    """Which of two pools the compiled op clones, and how many elements of it."""
    from omni_kv.lens.capture import capture
    from omni_kv.publish.figures.stages import clones

    def call(
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        slots: torch.Tensor,
        start: torch.Tensor,
        length: torch.Tensor,
    ) -> torch.Tensor:
        return torch.ops.omni_kv.ar_diffusion_paged_write_attn(
            query, query, query, key_pool, value_pool, slots, None, start, length, 4, 0.1, "sdpa"
        )

    query, tokens = torch.zeros(4, *key_pool.shape[1:]), torch.arange(4)
    start = torch.tensor([0, 4], dtype=torch.int32)
    with torch.no_grad():
        taken = capture(
            call, query, key_pool, value_pool, tokens, start, start[1:].clone(), until="graph"
        )
    return clones(taken.graphs[0])


def overwritten_places(answer: Any) -> tuple[bool, str]:
    """Hold places of the pool against those whose frame changes from chunk 7 to chunk 8."""
    geometry = preset(PULL_REQUEST)
    before, after = frames_in_pool(geometry, 7), frames_in_pool(geometry, 8)
    changed = {place for place, frame in enumerate(after) if before[place] != frame}
    given = set(answer)
    right = given == changed
    if right:
        return True, f"chunk 8 overwrites the frames {sorted(before[p] or 0 for p in changed)}"
    return False, f"{len(given & changed)} of your {len(given)} places change"


def page_of_both(answer: int) -> tuple[bool, str]:
    """Whether pages of this many slots fit both frame sizes, and no larger power of two does."""
    sizes = [preset(name).tokens_per_frame for name in (PULL_REQUEST, "lingbot-480x832")]
    if answer & (answer - 1) or answer < 1:
        return False, f"{answer} is no power of two"
    pages = ", ".join(f"{size / answer:g}" for size in sizes)
    if any(size % answer for size in sizes):
        return False, f"frames of {sizes[0]:,} and {sizes[1]:,} slots are {pages} pages long"
    if math.gcd(*sizes) % (2 * answer) == 0:
        return False, f"the frames are {pages} pages long, but pages of {2 * answer} fit as well"
    return True, f"the frames are {pages} pages long"


def bytes_past_the_end(answer: int) -> tuple[bool, str]:
    """Measure how far behind its allocation the clone of notebook 02's layer reads, here."""
    from omni_kv.experiments.layer import layer_call
    from omni_kv.lens.capture import capture
    from omni_kv.model.pools import make_pools

    geometry = preset("tiny").replace(num_layers=1)
    block, arguments = layer_call(geometry)
    with torch.no_grad():
        graph = capture(block, *arguments(make_pools(geometry, "shared"))).graphs[0]
    value = next(source for source in graph.inputs if source.name == "value_pool")
    last = max(
        read.last
        for kernel in graph.kernels
        if any(origin.startswith("clone") for origin in kernel.origins)
        for read in kernel.reads
        if read.buffer == value.aot
    )
    past = max(0, value.offset + last + 1 - value.storage) * value.dtype.itemsize
    told = f"on torch {torch.__version__} the kernel reads {past:,} bytes behind the allocation"
    return answer == past, told if answer == past else f"not {answer:,} bytes on this release"


def clone_milliseconds(answer: float) -> tuple[bool, str]:
    """Hold an estimate against the clone's time in the recorded profiles of a step."""
    from omni_kv.evidence import records as evidence
    from omni_kv.evidence import tables as gpu_tables
    from omni_kv.evidence.cells import Profile

    record = evidence.load("step", device=H200)
    row = gpu_tables.clone_table(record, preset(PULL_REQUEST)).loc["clone of K and V"]
    profiles = record.of(Profile).values()
    measured = [float(row[p.name]) for p in profiles if p.layout == "shared"]
    middle = sorted(measured)[len(measured) // 2]
    told = f"the profiles of a step {record.provenance.label} say {middle:.1f} ms"
    right = abs(answer - middle) <= 0.1 * middle
    return right, told if right else f"{answer:g} ms is off by more than a tenth"


ALL: dict[str, Exercise] = {
    "00.two-copies": Exercise(
        "write a function of two tensors whose graph ends with two copies into its inputs.",
        (
            "a copy into an input stands for a mutation of that input",
            "methods that end in an underscore mutate: x.mul_(2)",
            "mutate both arguments, x and y",
        ),
        copies_back,
    ),
    "00.clone-elements": Exercise(
        "K and V are halves of torch.zeros(2, 100, 2, 32). How many elements will the clone hold?",
        (
            "V has 100 x 2 x 32 elements. That is not the answer",
            "look at the figure: as_strided(value_pool, [30720], [1], 0), for a V of 15,360",
            "storage offset of V + elements of V",
        ),
        clone_elements,
    ),
    "01.overwritten": Exercise(
        "which places of the pool does chunk 8 overwrite, at the pull request's sizes?",
        (
            "chunk 8 is 3 frames long: the answer has 3 numbers",
            "the sink, places 0 to 8, is never overwritten; behind it lies a ring of 12 places",
            "frame 24 is the first of chunk 8: 9 + (24 - 9) % 12",
        ),
        overwritten_places,
    ),
    "01.page-of-both": Exercise(
        "which is the largest page, a power of two, that fits into frames of 1,440 and of 1,560?",
        (
            "it has to divide both numbers",
            "1,440 is 32 x 45 and 1,560 is 8 x 195",
            "math.gcd(1440, 1560) is 120, and 120 is 8 x 15",
        ),
        page_of_both,
    ),
    "02.past-the-end": Exercise(
        "how many bytes behind the allocation does the clone read here, with float32 and `tiny`?",
        (
            "did the run at the guard page die? If not, the answer is short",
            "from V's pointer to the end of the allocation there is just V, 240 x 2 x 32 elements",
            "if it counts from V's pointer: (storage offset + V - V) x 4 bytes; else nothing",
        ),
        bytes_past_the_end,
    ),
    "02.no-clone": Exercise(
        "write make(slots, heads, head_dim) that returns a key pool and a value pool that the "
        "compiled op does not clone.",
        (
            "the second pool is turned down because of the first one's storage",
            "torch.zeros called twice gives two storages",
            "return torch.zeros(slots, heads, head_dim), torch.zeros(slots, heads, head_dim)",
        ),
        no_clone,
    ),
    "03.one-allocation": Exercise(
        "write make(slots, heads, head_dim) that returns a key pool and a value pool in *one* "
        "allocation, and yet the compiled op clones neither.",
        (
            "AOTAutograd merges inputs whose memory interleaves into one synthetic base",
            "let K and V take turns in memory: slot by slot, or page by page",
            "kv = torch.zeros(slots, 2, heads, head_dim), and its views kv[:, 0] and kv[:, 1]",
        ),
        one_allocation,
    ),
    "04.first-stage": Exercise(
        "name the first stage whose graph holds a clone, as the lens names stages.",
        (
            "print(list(capture(...).graphs[0].stages())) lists them; any wrong answer does, too",
            "the reinplace pass only decides; it writes no node",
            "auto_functionalized_v2 is taken apart into clones and the op: decomposition",
        ),
        first_stage,
    ),
    "05.spare-room": Exercise(
        "K and V are halves of 1,024 elements each. How many elements of spare room behind V keep "
        "a clone that counts from V's pointer inside the allocation, and not one more than needed?",
        (
            "set the formula's outside to zero: 2 x storage offset + V - storage size = 0",
            "the storage offset of V is 1,024, and the storage size is 2,048 + the spare room",
            "2 x 1,024 + 1,024 - 2,048",
        ),
        spare_room,
    ),
    "07.clone-milliseconds": Exercise(
        "how many milliseconds do the clones of one step take on the H200, at 4,282 GB/s? A tenth "
        "more or less will do.",
        (
            "40 layers; each clone reads 545,587,200 elements of 2 bytes",
            "what is read is written, too: count the bytes twice",
            "2 x 40 x 545,587,200 x 2 bytes over 4.282e12 bytes a second",
        ),
        clone_milliseconds,
    ),
}
