"""Rows written into both halves of one tensor with ATen ops: is the whole tensor rewritten?

Four rows of 131,072 are written. Exits with 0 if the compiled function needs less than 20 times
as long over two halves taken in the graph as over the same two halves passed as inputs (which
writes the rows in place), with 1 if it needs longer.
"""

import os
import sys
import tempfile
import time

cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name

import torch

ROWS, COLS = 65536, 64


def in_graph(kv, rows, x):
    keys, values = kv.unbind(0)
    keys[rows] = x
    values[rows] = -x


def as_inputs(keys, values, rows, x):
    keys[rows] = x
    values[rows] = -x


def milliseconds(fn, *args):
    fn(*args)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        fn(*args)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


kv = torch.zeros(2, ROWS, COLS)
rows, x = torch.arange(4), torch.ones(4, COLS)
eager = milliseconds(in_graph, kv, rows, x)
inputs = milliseconds(torch.compile(as_inputs), kv[0], kv[1], rows, x)
graph = milliseconds(torch.compile(in_graph), kv, rows, x)
print(f"torch {torch.__version__}; {2 * ROWS} rows of {COLS} floats, {kv.nbytes >> 20} MiB")
print(f"eager:                                {eager:8.3f} ms")
print(f"compiled, halves passed as inputs:    {inputs:8.3f} ms")
print(f"compiled, halves taken in the graph:  {graph:8.3f} ms, {graph / inputs:.0f} times as long")
sys.exit(0 if graph < 20 * inputs else 1)
