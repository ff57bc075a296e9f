"""Interleaved inputs without a ``_base``, one of them mutated: do they compile with dynamic shapes?

In inference mode views have no ``_base``. The backend is aot_eager: the failure comes before
Inductor. Exits with 0 if all four combinations compile and agree with eager, with 1 if not.
Takes the device as its argument, by default the CPU.
"""

import logging
import os
import sys
import tempfile

cache = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name

import torch

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
logging.getLogger("torch").setLevel(logging.CRITICAL)  # the traceback is printed below, once


def step(keys, values, x):
    keys.add_(x)
    values.sub_(x)


def run(mode, dynamic):
    torch.compiler.reset()
    with mode():
        pages = torch.zeros(8, 2, 16, 64, device=DEVICE)  # a page holds its keys, then its values
        expected = torch.ones_like(pages)
        expected[:, 1] = -1
        try:
            compiled = torch.compile(step, backend="aot_eager", dynamic=dynamic)
            compiled(pages[:, 0], pages[:, 1], torch.ones(64, device=DEVICE))
        except Exception as error:
            return next(line for line in str(error).splitlines() if "Error" in line)
        return "right" if torch.equal(pages, expected) else "WRONG"


print(f"torch {torch.__version__}, {DEVICE}")
outcomes = []
for mode in (torch.no_grad, torch.inference_mode):
    for dynamic in (False, True):
        outcomes.append(run(mode, dynamic))
        print(f"{mode.__name__}, dynamic={dynamic}: {outcomes[-1]}")
sys.exit(0 if set(outcomes) == {"right"} else 1)
