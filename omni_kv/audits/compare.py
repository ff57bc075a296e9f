"""Compiled against eager, in memory whose surroundings are known.

The child process compiles without running anything, then forks once for each run: a run that reads
an unmapped page kills its own fork and nothing else, and one compilation serves all of them. Within
a fork every tensor that enters a compiled graph is laid anew: storages keep their size, and tensors
that share one keep sharing it at their offsets. What lies around a storage is either unmapped or
filled with values that are recognised when they turn up in a result.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.differences import bits_of, difference_of
from omni_kv.audits.report import Comparison, Result, Run
from omni_kv.lens.fresh import original, recompilable
from omni_kv.lens.graph import input_name, parameter_names
from omni_kv.sandbox.process import Outcome, graph_caches_off, run_all, run_forked, run_isolated
from omni_kv.sandbox.relocate import MEMORIES, Memory, View, lay, map_leaves, pack


@dataclass
class Job:
    """A series of calls of one compiled callable.

    Attributes:
        fn: the callable; it and the arguments travel by cloudpickle.
        series: the arguments of each call, in order, on the CPU.
        labels: for each call, what to call its comparison; None compiles for it and goes on.
        kwargs: keyword arguments of every call.
        dynamic: as in ``torch.compile``.
        grad: whether autograd records; the caller's mode if not given.
        buffers: the module's buffers that are views, by name; filled in for the journey.
    """

    fn: Callable[..., Any]
    series: list[tuple[Any, ...]]
    labels: list[str | None]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    grad: bool = field(default_factory=torch.is_grad_enabled)
    buffers: dict[str, View] = field(default_factory=dict)

    def packed(self) -> Job:
        """The job as it travels: views with their bases, which pickling would lose."""
        buffers = {}
        if isinstance(self.fn, torch.nn.Module):
            packed = {name: pack(buffer) for name, buffer in self.fn.named_buffers()}
            buffers = {name: view for name, view in packed.items() if isinstance(view, View)}
        series, kwargs = map_leaves(pack, self.series), map_leaves(pack, self.kwargs)
        return replace(self, series=series, kwargs=kwargs, buffers=buffers)

    def unpacked(self) -> Job:
        """The job on the other side, with every view on its base again."""
        made: dict[int, torch.Tensor] = {}
        if isinstance(self.fn, torch.nn.Module):
            for path, view in self.buffers.items():
                owner, _, name = path.rpartition(".")
                self.fn.get_submodule(owner)._buffers[name] = view.tensor(made)

        def unpack(leaf: Any) -> Any:
            return leaf.tensor(made) if isinstance(leaf, View) else leaf

        series, kwargs = map_leaves(unpack, self.series), map_leaves(unpack, self.kwargs)
        return replace(self, series=series, kwargs=kwargs)

    def untested(self, result: Result, how: str) -> list[Comparison]:
        """The comparisons of this job if none of them could be made."""
        return [Comparison(label=label, result=result, how=how) for label in self.labels if label]


def jobs_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    second: Sequence[Any] | None = None,
    dynamic: Sequence[bool | None] = (None, True),
) -> list[Job]:
    """The jobs that look at one callable: static, ``dynamic=True``, and a call of other sizes.

    Args:
        fn: the callable.
        args: its arguments.
        kwargs: its keyword arguments.
        second: arguments of a second call of what was compiled with the default ``dynamic=None``.
        dynamic: what to pass as ``dynamic=``.
    """
    jobs = []
    if None in dynamic or second is not None:
        calls: list[tuple[Any, ...]] = [tuple(args)]
        labels: list[str | None] = ["static" if None in dynamic else None]
        if second is not None:
            calls.append(tuple(second))
            labels.append("second call")
        jobs.append(Job(original(fn), calls, labels, kwargs or {}))
    if True in dynamic:
        jobs.append(Job(original(fn), [tuple(args)], ["dynamic=True"], kwargs or {}, True))
    return jobs


def compare(jobs: Sequence[Job], workers: int = 2, timeout: float = 600.0) -> list[Comparison]:
    """Run every job compiled and eager on equal inputs, and say where they disagree.

    Args:
        jobs: what to run; they are dealt out to the child processes in turn.
        workers: child processes.
        timeout: seconds for each child.

    Returns:
        One comparison a label, in the order of jobs and labels.
    """
    found: dict[int, list[Comparison]] = {}
    parcels: dict[int, _Parcel] = {}
    hands: list[list[int]] = [[] for _ in range(max(1, min(workers, len(jobs))))]
    for number, job in enumerate(jobs):
        tensors = [t for t in pytree.tree_leaves(job.series) if isinstance(t, torch.Tensor)]
        if any(t.device.type != "cpu" for t in tensors):
            how = "guarded memory is CPU memory, and the arguments are not on the CPU"
            found[number] = job.untested("not run", how)
            continue
        try:
            parcels[number] = _parcel(job)
        except Exception as error:
            how = f"the call cannot be sent to a child process: {error}. {_OWN_MODULE}"
            found[number] = job.untested("raised", how)
        else:
            hands[number % len(hands)].append(number)
    hands = [hand for hand in hands if hand]
    options: Any = {"timeout": timeout, "env": _CHILD_ENV}
    calls = [partial(run_isolated, _child, [parcels[n] for n in hand], **options) for hand in hands]
    for hand, outcome in zip(hands, run_all(calls, workers), strict=True):
        for place, number in enumerate(hand):
            if outcome.value is not None:
                found[number] = outcome.value[place]
            else:
                found[number] = jobs[number].untested(*_why_no_outcome(outcome))
    return [comparison for number in sorted(found) for comparison in found[number]]


_OWN_MODULE = "Put the callable and its custom ops in a module that can be imported."


@dataclass(frozen=True)
class _Parcel:
    """A job on its way to a child: an unreadable one must not take the others along."""

    content: bytes
    modules: tuple[str, ...]
    labels: tuple[str, ...]


def _parcel(job: Job) -> _Parcel:
    import cloudpickle
    from torch._library.custom_ops import OPDEFS

    # A callable of a notebook or a script names its ops through torch.ops, which says nothing of
    # the modules that define them.
    copyreg.pickle(type(torch.ops), _reduce_ops)
    modules = {getattr(op._init_fn, "__module__", "__main__") for op in OPDEFS.values()}
    buffer = io.BytesIO()
    torch.save(job.packed(), buffer, pickle_module=cloudpickle)
    labels = tuple(label for label in job.labels if label)
    return _Parcel(buffer.getvalue(), tuple(sorted(modules - {"__main__"})), labels)


def _reduce_ops(_: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return getattr, (torch, "ops")


#: One thread, since a process with an OpenMP pool must not fork.
_CHILD_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _why_no_outcome(outcome: Outcome[Any]) -> tuple[Result, str]:
    if outcome.status == "timed out":
        return "timed out", "the child process ran out of time"
    if outcome.status == "killed":
        return "raised", f"the child process was killed by {outcome.signal} while compiling"
    return "raised", _first_line(outcome.error or "")


def cause_line(error: BaseException) -> str:
    """The line of an error that says what is wrong, without the compiler's advice around it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    for number, line in enumerate(lines):
        if "Explanation:" in line:
            return line.split("Explanation:", 1)[1].strip()
        if line.startswith("backend=") and number + 1 < len(lines):
            return lines[number + 1]
    return lines[0]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"


# What follows runs in the child process.


class _Hold(BaseException):
    """Ends a call of the compiled callable before any compiled code has run."""


class _Backend:
    """Inductor, with a hand on the compiled function: held at first, then run in laid memory."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.memory: Memory | None = None
        self.inputs: dict[str, torch.Tensor] = {}

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        nodes = gm.graph.find_nodes(op="placeholder")
        names = [input_name(node, self.fn) for node in nodes]
        compiled: Any = compile_fx(gm, example_inputs)

        def call(*inputs: Any) -> Any:
            if self.memory is None:
                tensors = zip(names, inputs, strict=True)
                self.inputs.update((n, t) for n, t in tensors if isinstance(t, torch.Tensor))
                raise _Hold
            laid, write_back = lay(inputs, self.memory)
            # A result may lie in the laid memory; a copy of it is enough to compare.
            results = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, compiled(*laid))
            write_back()
            return results

        return call


def _child(parcels: list[_Parcel]) -> list[list[Comparison]]:
    """Do the jobs in turn; one that fails leaves the others alone."""
    torch.set_num_threads(1)
    done = []
    for parcel in parcels:
        try:
            for module in parcel.modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            job = torch.load(io.BytesIO(parcel.content), weights_only=False)
            with graph_caches_off(), torch.set_grad_enabled(job.grad):
                done.append(_do(job.unpacked()))
        except Exception as error:
            traceback.print_exc()
            how = cause_line(error)
            if "_OpNamespace" in how:
                how += f". {_OWN_MODULE}"
            done.append([Comparison(label=n, result="raised", how=how) for n in parcel.labels])
    return done


def _do(job: Job) -> list[Comparison]:
    """Compile for each call of the series, and compare those that have a label.

    A mutated tensor that holds one value everywhere, as a pool does that was just allocated, is
    filled with random numbers first: foreign values could not be told from its own.
    """
    backend = _Backend(job.fn)
    compiled = torch.compile(recompilable(job.fn)[0], backend=backend, dynamic=job.dynamic)
    comparisons: list[Comparison] = []
    for args, label in zip(job.series, job.labels, strict=True):
        backend.memory = None
        backend.inputs.clear()
        try:
            with contextlib.suppress(_Hold):
                compiled(*args, **job.kwargs)
        except Exception as error:
            how = f"it does not compile: {cause_line(error)}"
            if "_OpNamespace" in how:
                how += f". {_OWN_MODULE}"
            return comparisons + [
                Comparison(label=left, result="raised", how=how)
                for left in job.labels[len(comparisons) :]
                if left
            ]
        if label is None:
            continue
        named = {**backend.inputs, **_named_tensors(job, args)}
        before = {name: tensor.detach().clone() for name, tensor in named.items()}

        def call(
            fn: Callable[..., Any],
            args: tuple[Any, ...] = args,
            named: dict[str, torch.Tensor] = named,
            before: dict[str, torch.Tensor] = before,
        ) -> dict[str, torch.Tensor]:
            return _changed(fn(*args, **job.kwargs), named, before)

        status, expected = _fork(partial(call, job.fn))
        if expected is not None and (blank := _blank(named, expected)):
            # A pool that is zero all over looks the same wherever it is read from.
            generator = torch.Generator().manual_seed(0)
            for name in blank:
                named[name].detach().copy_(torch.randn(named[name].shape, generator=generator))
            before.update({name: tensor.detach().clone() for name, tensor in named.items()})
            status, expected = _fork(partial(call, job.fn))
        if expected is None:
            raise RuntimeError(f"the eager call itself did not return: {status}")
        runs = []
        for memory in MEMORIES:
            backend.memory = memory
            status, got = _fork(partial(call, compiled))
            runs.append(_judge(memory, status, before, expected, got))
        comparisons.append(_comparison(label, runs))
    return comparisons


def _blank(named: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]) -> list[str]:
    """Mutated tensors of real numbers that hold one value everywhere."""
    return [
        name
        for name, tensor in named.items()
        if name in changed
        and tensor.dtype.is_floating_point
        and tensor.numel() > 1
        and bool((tensor == tensor.flatten()[0]).all())
    ]


def _comparison(label: str, runs: list[Run]) -> Comparison:
    order: tuple[Result, ...] = ("crashed", "differs", "raised")
    worst = next((r for r in order if any(run.result == r for run in runs)), "same")
    how = next((run.how for run in runs if run.result == worst), "")
    return Comparison(label=label, result=worst, how=how, runs=runs)


def _named_tensors(job: Job, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments and the module's buffers, by the caller's names."""
    named: dict[str, torch.Tensor] = {}
    names = parameter_names(job.fn)
    for path, leaf in pytree.tree_flatten_with_path((args, job.kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            place = getattr(path[1], "idx", None)
            if place is None:
                name = str(getattr(path[1], "key", path[1]))
            else:
                name = names[place] if place < len(names) else f"args[{place}]"
            named[name + pytree.keystr(path[2:])] = leaf
    if isinstance(job.fn, torch.nn.Module):
        named.update({f"fn.{name}": buffer for name, buffer in job.fn.named_buffers()})
    return named


def _changed(
    out: Any, named: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outputs of a call, and the named tensors that it changed."""
    seen = {
        "output" + pytree.keystr(path): leaf.detach().clone()
        for path, leaf in pytree.tree_flatten_with_path(out)[0]
        if isinstance(leaf, torch.Tensor)
    }
    for name, tensor in named.items():
        if not torch.equal(bits_of(tensor.detach()), bits_of(before[name])):
            seen[name] = tensor.detach().clone()
    return seen


def _fork(
    work: Callable[[], dict[str, torch.Tensor]],
) -> tuple[str, dict[str, torch.Tensor] | None]:
    """Do the work in a fork; say how the fork ended, and what it saw if it lived."""
    outcome = run_forked(work)
    how = "" if outcome.status == "returned" else _first_line(outcome.error or "")
    return outcome.signal or how, outcome.value


def _judge(
    memory: Memory,
    status: str,
    before: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    got: dict[str, torch.Tensor] | None,
) -> Run:
    if got is None:
        crashed = status.startswith("SIG")
        return Run(memory=memory, result="crashed" if crashed else "raised", how=status)
    after = {**before, **expected}
    seen = {**before, **got}
    # What neither call touched is equal, and there may be much of it.
    touched = [name for name in after if name in expected or name in got]
    differences = [difference_of(name, after[name], seen[name], before, after) for name in touched]
    found = [difference for difference in differences if difference is not None]
    return Run(memory=memory, result="differs" if found else "same", differences=found)
