"""The clone of a mutated graph input with a storage offset: does it read past the allocation?

The pool is the first part of a larger buffer whose rest is filled with 7, so that a read past the
pool's end is harmless and visible. Exits with 0 if the second half of the pool holds what was
written to it and zeros, with 1 if it holds anything else.
Takes the device as its argument, by default the CPU.
"""

import os
import sys
import tempfile

cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name

import torch

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
ROWS, COLS, BEHIND = 64, 64, 7.0


@torch.library.custom_op("repro::write", mutates_args=("keys", "values"))
def write(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    keys[0] = x
    values[0] = -x


@torch.compile
def step(keys, values, x):
    write(keys, values, x)


memory = torch.full((3, ROWS, COLS), BEHIND, device=DEVICE)
storage = memory.untyped_storage()[: 2 * ROWS * COLS * 4]
kv = torch.empty(0, device=DEVICE).set_(storage, 0, (2, ROWS, COLS)).zero_()
keys, values = kv
print(f"torch {torch.__version__}, {DEVICE}")
print(f"storage: {kv.untyped_storage().nbytes()} bytes; values start at {values.storage_offset()}")

step(keys, values, torch.ones(COLS, device=DEVICE))

expected = torch.zeros_like(values)
expected[0] = -1
foreign = int((values == BEHIND).all(1).sum())
wrong = int((values != expected).any(1).sum())
print(f"rows of values that are wrong: {wrong} of {ROWS}")
print(f"rows of values that hold what lies behind the storage: {foreign} of {ROWS}")
sys.exit(1 if wrong else 0)
