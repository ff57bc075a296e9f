"""Is a cached artifact reused for inputs that share their storages in another way?

Process 2 has the cache of 1. Exits with 0 if 2 and 3 survive with right results, else with 1.
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
    return torch.frombuffer(memory, dtype=torch.float32, count=HALF // 4, offset=HALF)


def run(layout, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    kv = torch.frombuffer(bytearray(3 * HALF), dtype=torch.float32, count=HALF // 2).view(2, -1)
    keys, values = kv if layout == "halves" else (guarded(), guarded())
    step(keys.view(ROWS, COLS), values.view(ROWS, COLS), torch.ones(COLS))
    sys.exit(0 if keys.sum() == COLS == -values.sum() else 1)


def exit_code(*args):
    process = multiprocessing.get_context("fork").Process(target=run, args=args)
    process.start()
    process.join()
    return process.exitcode


if __name__ == "__main__":
    print(f"torch {torch.__version__}; exit codes of the processes, negative: killed by a signal")
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
        print("1. halves of one allocation:", exit_code("halves", cache))
        print("2. two allocations, cache of process 1:", stale := exit_code("separate", cache))
        print("3. two allocations, empty cache:", fresh := exit_code("separate", empty))
    sys.exit(1 if stale or fresh else 0)
