"""Two mutated arguments that share a storage but do not overlap: is the second one cloned?

Exits with 0 if the custom op is handed both tensors themselves, with 1 if it is handed a copy.
Takes the device as its argument, by default the CPU.
"""

import os
import sys
import tempfile

cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name
# Its key is the same for both cases: the second would get the graph compiled for the first.
os.environ.update(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0")

import torch
from torch._dynamo.utils import ReinplaceCounters

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
ROWS, COLS = 64, 64
received = []


@torch.library.custom_op("repro::write", mutates_args=("keys", "values"))
def write(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    received[:] = [keys.data_ptr(), values.data_ptr()]
    keys[0] = x
    values[0] = -x


def step(keys, values, x):
    write(keys, values, x)


def cloned(keys, values):
    """Names of the arguments of which the compiled function hands a copy to the op."""
    torch.compiler.reset()
    torch.compile(step)(keys, values, torch.ones(COLS, device=DEVICE))
    pointers = zip(("keys", "values"), received, (keys, values), strict=True)
    return [name for name, pointer, tensor in pointers if pointer != tensor.data_ptr()]


# The storage is a part of a larger one: what is read behind it is memory of this process.
storage = torch.zeros(3, ROWS, COLS, device=DEVICE).untyped_storage()[: 2 * ROWS * COLS * 4]
kv = torch.empty(0, device=DEVICE).set_(storage, 0, (2, ROWS, COLS))

separate = cloned(*(torch.zeros(ROWS, COLS, device=DEVICE) for _ in range(2)))
halves = cloned(kv[0], kv[1])
missed = ReinplaceCounters.get_total_missed()  # of the last compilation
print(f"torch {torch.__version__}, {DEVICE}")
print(f"two allocations:              cloned: {separate or 'nothing'}")
print(f"two halves of one allocation: cloned: {halves or 'nothing'}")
print(f"counted as missed opportunities to reinplace: {missed}")
sys.exit(1 if halves else 0)
