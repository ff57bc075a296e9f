"""Is a cached artefact reused for inputs that share their storages in another way?

Process 1 compiles for two halves of one allocation. Process 2 finds its cache and runs over two
allocations with unmapped memory before and behind each. Process 3 does the same with an empty
cache. Exits with 0 if processes 2 and 3 survive with right results, with 1 if not.
"""

import ctypes
import mmap
import multiprocessing
import os
import sys
import tempfile

import torch

ROWS, COLS = 256, 64  # a half is 64 KiB, whole pages everywhere
HALF = ROWS * COLS * 4


@torch.library.custom_op("repro::write", mutates_args=("keys", "values"))
def write(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    keys[0] = x
    values[0] = -x


@torch.compile
def step(keys, values, x):
    write(keys, values, x)


def in_halves():
    return torch.frombuffer(bytearray(3 * HALF), dtype=torch.float32, count=HALF // 2).view(2, -1)


def guarded():
    memory = mmap.mmap(-1, 3 * HALF)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + 2 * HALF):  # 0 is PROT_NONE
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), HALF, 0) == 0
    return torch.frombuffer(memory, dtype=torch.float32, count=HALF // 4, offset=HALF)


def run(make_keys_and_values, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    keys, values = (half.view(ROWS, COLS) for half in make_keys_and_values())
    step(keys, values, torch.ones(COLS))
    sys.exit(0 if keys.sum() == COLS == -values.sum() else 1)


def exit_code(*args):
    process = multiprocessing.get_context("fork").Process(target=run, args=args)
    process.start()
    process.join()
    return process.exitcode


if __name__ == "__main__":
    print(f"torch {torch.__version__}; exit codes of the processes, negative: killed by a signal")
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
        print(f"1. halves of one allocation: {exit_code(in_halves, cache)}")
        stale = exit_code(lambda: (guarded(), guarded()), cache)
        print(f"2. two allocations, cache of process 1: {stale}")
        fresh = exit_code(lambda: (guarded(), guarded()), empty)
        print(f"3. two allocations, empty cache: {fresh}")
    sys.exit(1 if stale or fresh else 0)
