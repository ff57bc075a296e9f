"""Two mutated arguments that share a storage but do not overlap: is the second one cloned?

Exits with 0 if the custom op is handed both tensors themselves, with 1 if it is handed a copy.
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
    torch.compile(step)(keys, values, torch.ones(COLS))
    pointers = zip(("keys", "values"), received, (keys, values), strict=True)
    return [name for name, pointer, tensor in pointers if pointer != tensor.data_ptr()]


# Three times the bytes of one half: what is read behind the storage is memory of this process.
memory = bytearray(3 * ROWS * COLS * 4)
kv = torch.frombuffer(memory, dtype=torch.float32, count=2 * ROWS * COLS).view(2, ROWS, COLS)

separate = cloned(torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS))
halves = cloned(kv[0], kv[1])
missed = ReinplaceCounters.get_total_missed()  # of the last compilation
print(f"torch {torch.__version__}")
print(f"two allocations:              cloned: {separate or 'nothing'}")
print(f"two halves of one allocation: cloned: {halves or 'nothing'}")
print(f"counted as missed opportunities to reinplace: {missed}")
sys.exit(1 if halves else 0)
