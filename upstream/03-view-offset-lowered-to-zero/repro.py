"""Mutated views with a symbolic storage offset: does the op write where it should?

Exits with 0 if K and V hold what was written to them, with 1 if not. Takes a device, or the CPU.
"""

import os
import sys
import tempfile

cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name

import torch

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
COLS = 64


@torch.library.custom_op("repro::write", mutates_args=("keys", "values"))
def write(keys: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> None:
    keys[0] = x
    values[0] = -x


def on_views(keys, values, x):
    write(keys, values, x)


def in_graph(kv, x):
    write(kv[0], kv[1], x)


def pool(rows):
    storage = torch.zeros(3, rows, COLS, device=DEVICE).untyped_storage()[: 2 * rows * COLS * 4]
    kv = torch.empty(0, device=DEVICE).set_(storage, 0, (2, rows, COLS))
    kv[0], kv[1] = 1.0, 2.0
    return kv


def check(title, fn, sizes, dynamic=None):
    torch.compiler.reset()
    compiled = torch.compile(fn, dynamic=dynamic)
    for rows in sizes:
        kv = pool(rows)
        compiled(*(kv if fn is on_views else (kv,)), torch.full((COLS,), 5.0, device=DEVICE))
    print(f"{title}: K, V = {kv[0, :3, 0].tolist()}..., {kv[1, :3, 0].tolist()}...")
    expected = pool(rows)
    expected[0, 0], expected[1, 0] = 5.0, -5.0
    return torch.equal(kv, expected)


print(f"torch {torch.__version__}, {DEVICE}")
print("expected: K, V = [5.0, 1.0, 1.0]..., [-5.0, 2.0, 2.0]...")
results = [
    check("two halves as graph inputs, dynamic=True", on_views, [64], dynamic=True),
    check("two halves as graph inputs, default settings, second size", on_views, [64, 96]),
    check("halves taken inside the graph, dynamic=True", in_graph, [64], dynamic=True),
]
sys.exit(0 if all(results) else 1)
