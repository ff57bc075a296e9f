"""Compiled against eager, in memory whose surroundings are known.

The child process compiles without running anything, then forks once for each run: a run that reads
an unmapped page kills its own fork and nothing else, and one compilation serves all of them. Within
a fork every tensor that enters a compiled graph is laid anew: storages keep their size, and tensors
that share one keep sharing it at their offsets. What lies around a storage is either unmapped or
filled with values that are recognised when they turn up in a result.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from omni_kv.audit_report import Comparison, Difference, Run
from omni_kv.guarded import map_region
from omni_kv.isolation import Outcome, run_all, run_isolated
from omni_kv.lens import fresh_frame, original

Memory = Literal["filled on both sides", "unmapped behind", "unmapped in front"]

#: In this order, since the first that fails says most about where foreign values come from.
MEMORIES: tuple[Memory, ...] = ("filled on both sides", "unmapped behind", "unmapped in front")

#: Bytes that surround storages in a filled neighbourhood. As bfloat16, float16, float32 and float64
#: both are finite and far from what a network holds; as integers they are large.
_BEHIND, _IN_FRONT = 0x5B, 0x6A

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class _Call:
    """What one fork saw: the call's tensors afterwards, by name, and the outputs."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def compare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    second: Sequence[Any] | None = None,
    dynamic: Sequence[bool | None] = (None, True),
    workers: int = 2,
    timeout: float = 300.0,
) -> list[Comparison]:
    """Run ``fn`` compiled and eager on equal inputs, and say where they disagree.

    Args:
        fn: the callable; it and its arguments must be picklable by cloudpickle.
        args: its arguments, on the CPU.
        kwargs: its keyword arguments.
        second: arguments of a second call of the same compiled callable, with other sizes; it is
            compared as ``second call`` (compiled with the default ``dynamic=None``).
        dynamic: what to pass as ``dynamic=``, one comparison each.
        workers: child processes at a time.
        timeout: seconds for each child.
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    labels = ["dynamic=True" if setting else "static" for setting in dynamic]
    jobs = [([tuple(args)], setting) for setting in dynamic]
    if second is not None:
        labels.append("second call")
        jobs.append(([tuple(args), tuple(second)], None))
    if any(t.device.type != "cpu" for t in tensors):
        how = "guarded memory is CPU memory, and the arguments are not on the CPU"
        return [Comparison(label=label, result="not run", how=how) for label in labels]
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    calls = []
    folders = [Path(tempfile.mkdtemp(prefix="omni-kv-compare-")) for _ in jobs]
    try:
        for (series, setting), folder in zip(jobs, folders, strict=True):
            child = (original(fn), series, kwargs or {}, setting, modes, str(folder))
            calls.append(partial(run_isolated, _child, *child, timeout=timeout, env=_CHILD_ENV))
        outcomes = run_all(calls, workers)
        return [
            _comparison(label, outcome) for label, outcome in zip(labels, outcomes, strict=True)
        ]
    finally:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


#: One thread, since a process with an OpenMP pool must not fork.
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _comparison(label: str, outcome: Outcome[list[Run]]) -> Comparison:
    if outcome.status == "timed out":
        return Comparison(label=label, result="timed out", how="the child ran out of time")
    if outcome.status == "killed":
        how = f"the child was killed by {outcome.signal} before it ran compiled code"
        return Comparison(label=label, result="raised", how=how)
    if outcome.value is None:
        return Comparison(label=label, result="raised", how=_first_line(outcome.error or ""))
    runs = outcome.value
    order = ("crashed", "differs", "raised", "timed out")
    worst = next((r for r in order if any(run.result == r for run in runs)), "same")
    how = next((run.how for run in runs if run.result == worst and run.how), "")
    return Comparison(label=label, result=worst, how=how, runs=runs)  # type: ignore[arg-type]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


# What follows runs in the child process.


class _Hold(BaseException):
    """Ends a call of the compiled callable before any compiled code has run."""


class _Backend:
    """Inductor, with a hand on the compiled function: held at first, then run in laid memory."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.inputs: dict[int, torch.Tensor] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(gm, example_inputs)

        def call(*inputs: Any) -> Any:
            if self.memory is None:
                for value in inputs:
                    if isinstance(value, torch.Tensor):
                        self.inputs[id(value)] = value
                raise _Hold
            laid, write_back = lay(inputs, self.memory)
            results = compiled(*laid)
            # What aliases an input must go back to the caller's memory with it.
            results = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, results)
            write_back()
            return results

        return call


def lay(values: Sequence[Any], memory: Memory) -> tuple[list[Any], Callable[[], None]]:
    """Copy tensors into memory whose surroundings are known, storages as they are shared.

    Args:
        values: graph inputs; what is not a CPU tensor stays as it is.
        memory: what surrounds each storage. A filled neighbourhood is as large as the storage on
            either side and ends at unmapped pages.

    Returns:
        The inputs over the new memory, and a function that copies every storage back.
    """
    regions: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    laid: list[Any] = []
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.numel():
            laid.append(value)
            continue
        storage = value.untyped_storage()
        if storage._cdata not in regions:
            source = torch.empty(0, dtype=torch.uint8).set_(storage)
            size = source.numel()
            if memory == "filled on both sides":
                region = map_region((size,), torch.uint8, before=size, after=size)
                region.before.fill_(_IN_FRONT)
                region.after.fill_(_BEHIND)
            else:
                guard: Literal["after", "before"] = (
                    "after" if memory == "unmapped behind" else "before"
                )
                region = map_region((size,), torch.uint8, guard=guard)
            region.tensor.copy_(source)
            regions[storage._cdata] = (source, region.tensor)
        target = regions[storage._cdata][1]
        tensor = torch.empty(0, dtype=value.dtype).set_(
            target.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )
        laid.append(tensor.requires_grad_(value.requires_grad))

    def write_back() -> None:
        for source, target in regions.values():
            source.copy_(target)

    return laid, write_back


def _child(
    fn: Callable[..., Any],
    series: list[tuple[Any, ...]],
    kwargs: dict[str, Any],
    dynamic: bool | None,
    modes: tuple[bool, bool],
    folder: str,
) -> list[Run]:
    """Compile for every call of the series, then run the last of them, eager and compiled."""
    torch.set_num_threads(1)
    grad, inference = modes
    backend = _Backend()
    compiled = torch.compile(fresh_frame(fn), backend=backend, dynamic=dynamic)
    with torch.set_grad_enabled(grad), torch.inference_mode(inference):
        for arguments in series:
            with contextlib.suppress(_Hold):
                compiled(*arguments, **kwargs)
        arguments = series[-1]
        named = _named_tensors(fn, arguments, kwargs, backend)
        before = {name: tensor.detach().clone() for name, tensor in named.items()}
        status, expected = _fork(partial(_call, fn, arguments, kwargs, named), folder, "eager")
        if expected is None:
            raise RuntimeError(f"the eager call itself did not return: {status}")
        runs = []
        for memory in MEMORIES:
            backend.memory = memory
            status, got = _fork(partial(_call, compiled, arguments, kwargs, named), folder, memory)
            runs.append(_judge(memory, status, before, expected, got))
    return runs


def _named_tensors(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: _Backend
) -> dict[str, torch.Tensor]:
    """Every tensor that a call may change: its arguments', its module's, and the graphs' inputs."""
    from omni_kv.lens_records import parameter_names

    named: dict[str, torch.Tensor] = {}
    names = parameter_names(fn)
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            place = getattr(path[1], "idx", None)
            if place is None:
                name = str(getattr(path[1], "key", path[1]))
            else:
                name = names[place] if place < len(names) else f"args[{place}]"
            named[name + pytree.keystr(path[2:])] = leaf
    if isinstance(fn, torch.nn.Module):
        named.update({f"fn.{name}": buffer for name, buffer in fn.named_buffers()})
    known_ids = {id(tensor) for tensor in named.values()}
    for number, (key, tensor) in enumerate(backend.inputs.items()):
        if key not in known_ids:
            named[f"graph input {number}"] = tensor
    return named


def _call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    named: dict[str, torch.Tensor],
) -> _Call:
    out = fn(*args, **kwargs)
    seen = _Call()
    leaves = pytree.tree_flatten_with_path(out)[0]
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            seen.tensors["output" + pytree.keystr(path)] = leaf.detach().clone()
    for name, tensor in named.items():
        seen.tensors[name] = tensor.detach().clone()
    return seen


def _fork(work: Callable[[], _Call], folder: str, name: str) -> tuple[str, _Call | None]:
    """Do the work in a fork; say how the fork ended, and what it saw if it lived."""
    result = Path(folder) / name.replace(" ", "-")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.save(work(), result, pickle_module=pickle)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            result.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name, None
    if not result.exists():
        note = result.with_suffix(".error")
        return _first_line(note.read_text()) if note.exists() else "it ended itself", None
    return "", torch.load(result, weights_only=False)


def _judge(
    memory: Memory,
    status: str,
    before: dict[str, torch.Tensor],
    expected: _Call,
    got: _Call | None,
) -> Run:
    if got is None:
        crashed = status.startswith("SIG")
        return Run(memory=memory, result="crashed" if crashed else "raised", how=status)
    differences = []
    for name, right in expected.tensors.items():
        seen = got.tensors.get(name)
        if seen is None:
            return Run(memory=memory, result="raised", how=f"{name} is missing from the result")
        difference = difference_of(name, right, seen, before, expected)
        if difference is not None:
            differences.append(difference)
    return Run(memory=memory, result="differs" if differences else "same", differences=differences)


def difference_of(
    name: str,
    right: torch.Tensor,
    seen: torch.Tensor,
    before: dict[str, torch.Tensor],
    expected: _Call,
) -> Difference | None:
    """Where two tensors disagree beyond rounding, and whose values stand there instead.

    Rounding is judged by dtype; whose values they are is judged bit by bit.
    """
    if right.shape != seen.shape or right.dtype != seen.dtype:
        return Difference(tensor=name, elements=right.numel(), of=right.numel(), first=[])
    if right.dtype.is_floating_point or right.dtype.is_complex:
        tolerance = _TOLERANCE.get(right.dtype, 1e-4)
        wide = torch.complex128 if right.dtype.is_complex else torch.float64
        a, b = right.to(wide), seen.to(wide)
        wrong = ~torch.isclose(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
        gap = (a - b).abs()[wrong]
        finite = gap[gap.isfinite()]
        largest = float(finite.max()) if finite.numel() else None
    else:
        wrong = right != seen
        largest = None
    count = int(wrong.sum())
    if not count:
        return None
    origins: dict[str, torch.Tensor] = {}
    for label, byte in (("the pattern behind", _BEHIND), ("the pattern in front of", _IN_FRONT)):
        pattern = torch.full((right.element_size(),), byte, dtype=torch.uint8).view(right.dtype)
        origins[f"{label} the storage"] = pattern.expand(right.shape)
    origins["its own old value"] = before.get(name, right.new_empty(0))
    for other, tensor in expected.tensors.items():
        if other != name and not other.startswith("output"):
            origins[f"{other} at the same place"] = tensor
    equal_to = {}
    for label, values in origins.items():
        if values.shape == right.shape and values.dtype == right.dtype:
            equal = int((_bits(values)[wrong] == _bits(seen)[wrong]).sum())
            if equal:
                equal_to[label] = equal
    first = torch.nonzero(wrong)[0].tolist() if wrong.dim() else []
    return Difference(
        tensor=name,
        elements=count,
        of=right.numel(),
        first=first,
        equal_to=equal_to,
        largest=largest,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    return tensor.contiguous().view(integers[size]) if size in integers else tensor
