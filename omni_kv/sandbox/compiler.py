"""What Inductor does once a process, done before a process is forked."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile


@functools.cache
def compile_once() -> None:
    """Do what Inductor does once a process, so that no fork of it need do it again.

    Inductor reads all of its source for the key of its cache, traces its patterns, and asks the C++
    compiler what it can: together that takes longer than compiling a small function does. Compiles
    a function of no interest, and leaves nothing of it: no graph, no count, no file.
    """
    import torch
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import counters
    from torch._inductor import metrics
    from tqdm import tqdm

    if inductor_config.compile_threads != 1:  # it would start workers, which a fork has not
        return
    tqdm.monitor_interval = 0  # Inductor counts with it, and it would start a thread
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="omni-kv-") as cache, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        try:
            with contextlib.suppress(Exception):  # there is no C++ compiler, say
                torch.compile(lambda x: (x + 17).cos())(torch.zeros(3))
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    torch.compiler.reset()
    counters.clear()
    metrics.reset()
