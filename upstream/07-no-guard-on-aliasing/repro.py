"""Is a compiled function recompiled when its inputs no longer share a storage?

The two allocations lie in unmapped memory. Exits with 0 if results are right, else with 1.
"""

import ctypes
import mmap
import multiprocessing
import os
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children are forks, which could not use a GPU
import torch

ROWS, COLS, HALF = 256, 64, 256 * 64 * 4  # a half is 64 KiB, whole pages everywhere


@torch.library.custom_op("repro::write", mutates_args=("keys", "values"))
def write(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    keys[0] = x
    values[0] = -x


@torch.compile
def step(keys, values, x):
    write(keys, values, x)


def guarded():
    memory = mmap.mmap(-1, 3 * HALF)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + 2 * HALF):  # 0 is PROT_NONE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), HALF, 0) == 0
    return torch.frombuffer(memory, dtype=torch.float, offset=HALF, count=HALF // 4).view(ROWS, -1)


def run(cache, first):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    if first == "halves":
        kv = torch.frombuffer(bytearray(3 * HALF), dtype=torch.float32, count=HALF // 2)
        step(*kv.view(2, ROWS, COLS), torch.ones(COLS))
    step(keys := guarded(), values := guarded(), torch.ones(COLS))
    sys.exit(0 if keys.sum() == COLS == -values.sum() else 1)


def exit_code(first):
    with tempfile.TemporaryDirectory() as cache:
        process = multiprocessing.get_context("fork").Process(target=run, args=(cache, first))
        process.start()
        process.join()
    return process.exitcode


if __name__ == "__main__":
    print(f"torch {torch.__version__}; exit codes of the processes, negative: killed by a signal")
    print("two allocations:", alone := exit_code("nothing"))
    print("halves of one allocation, then two allocations:", after := exit_code("halves"))
    sys.exit(1 if alone or after else 0)
