"""What runs in the child process: compiled against eager, in memory whose surroundings are known.

The child compiles without running anything, then forks once for each run: a run that reads an
unmapped page kills its own fork and nothing else, and one compilation serves all of them. Within a
fork every tensor that enters a compiled graph is laid anew: storages keep their size, and tensors
that share one keep sharing it at their offsets. What lies around a storage is either unmapped or
filled with values that are recognised when they turn up in a result.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._inductor.config as inductor_config

from omni_kv.audits.backend import Backend, Hold
from omni_kv.audits.differences import bits_of, difference_of
from omni_kv.audits.errors import (
    OUT_OF_MEMORY,
    cause_line,
    first_line,
    hinted,
    out_of_memory,
    raised_here,
    surroundings,
)
from omni_kv.audits.jobs import CONFIGS, Job, Parcel
from omni_kv.audits.report import Comparison, Result, Run
from omni_kv.audits.state import Seen, named_tensors, seen_of, state_of
from omni_kv.audits.threads import CALLS, Machine, own_threads, repeated, shared_out
from omni_kv.lens.fresh import recompilable
from omni_kv.sandbox.memory import map_region
from omni_kv.sandbox.process import graph_caches_off, run_forked, share_precompiled_headers
from omni_kv.sandbox.relocate import MEMORIES, ORDINARY, Memory

T = TypeVar("T")
Compiled = Callable[..., Any]


def run_jobs(parcels: list[Parcel]) -> list[list[Comparison]]:
    """Do the jobs in turn, in a child process; one that fails leaves the others alone."""
    torch.set_num_threads(1)  # a process with a pool of threads must not fork
    done = []
    while parcels:
        # Gone from the list, so that its bytes do not lie beside the tensors made of them.
        parcel = parcels.pop(0)
        done.append(_guarded(parcel.labels, parcel.job))
    return done


def run_in_fork(jobs: list[Job], folder: Path) -> list[list[Comparison]]:
    """The same in a fork of the caller's process, where nothing need be sent.

    Scalar loops, one thread and a cache of its own, as a child process has from its environment.

    Args:
        jobs: what to do.
        folder: for temporary files; whoever forks removes it, since a fork may be killed.
    """
    torch.set_num_threads(1)
    folder.mkdir()
    share_precompiled_headers(folder)
    tempfile.tempdir = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    with Machine(1, False).compiling(), inductor_config.patch(compile_threads=1):
        return [
            _guarded(tuple(label for label in job.labels if label), partial(_itself, job))
            for job in jobs
        ]


def _itself(job: Job) -> Job:
    return job


def _guarded(labels: tuple[str, ...], get: Callable[[], Job]) -> list[Comparison]:
    try:
        job = get()
        with _as_the_caller(job):
            return _do(job)
    except Exception as error:
        traceback.print_exc()
        how = f"{type(error).__name__}: {error}"
        result: Result = "killed" if out_of_memory(how) else "raised"
        plain = surroundings(how) or hinted(cause_line(error))
        how = OUT_OF_MEMORY if result == "killed" else plain
        return [Comparison(label=name, result=result, how=how) for name in labels]


@contextlib.contextmanager
def _as_the_caller(job: Job) -> Iterator[None]:
    """The caller's settings of torch and of the compiler; no graphs out of caches."""
    with contextlib.ExitStack() as stack:
        for module, changes in job.config.items():
            stack.enter_context(CONFIGS[module].patch(changes))  # type: ignore[attr-defined]
        stack.enter_context(graph_caches_off())
        stack.enter_context(job.around.entered())
        yield


def _compiled(job: Job) -> tuple[Backend, Callable[..., Any]]:
    """The callable as the caller compiles it, from nothing; held before it runs."""
    backend = Backend(job.fn, job.settings)
    dynamic = job.settings.dynamic if job.dynamic is None else job.dynamic
    fresh, _ = recompilable(job.fn)
    return backend, torch.compile(fresh, backend=backend, dynamic=dynamic)


def _do(job: Job) -> list[Comparison]:
    """Compile for each call of the series, and compare those that have a label."""
    backend, compiled = _compiled(job)
    comparisons: list[Comparison] = []
    for (args, kwargs), label in zip(job.calls(), job.labels, strict=True):
        backend.memory = None
        backend.inputs.clear()
        call = _Call(job.fn, args, kwargs, backend)
        try:
            with contextlib.suppress(Hold):
                compiled(*args, **kwargs)
        except Exception as error:
            if raised_here(error):
                raise
            failed = call.not_compiled(error)
            left = [label for label in job.labels[len(comparisons) :] if label]
            return comparisons + [failed.model_copy(update={"label": name}) for name in left]
        if label is not None:
            machine, job.machine = job.machine, None
            comparison = call.compare(compiled, partial(_compiled, job), machine)
            comparisons.append(comparison.model_copy(update={"label": label}))
    return comparisons


class _Call:
    """One call, and what it can return or change."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backend: Backend,
    ) -> None:
        self.fn, self.args, self.kwargs, self.backend = fn, args, kwargs, backend
        self.broken = False

    def not_compiled(self, error: Exception) -> Comparison:
        """What to say of a call that does not compile: it matters whether eager works."""
        text = f"{type(error).__name__}: {error}"
        if around := surroundings(text):
            return Comparison(label="", result="raised", how=around)
        self._look()
        how = hinted(cause_line(error))
        status, expected = self._eagerly()
        if out_of_memory(text):
            return Comparison(label="", result="killed", how=OUT_OF_MEMORY)
        if expected is None:
            return Comparison(label="", result="raised", how=f"eager raises, too: {status}")
        how = f"compiled raises where eager works: {how}"
        return Comparison(label="", result="raised", how=how, eager_works=True)

    def compare(
        self,
        compiled: Callable[..., Any],
        again: Callable[[], tuple[Backend, Compiled]],
        machine: Machine | None,
    ) -> Comparison:
        """Run eagerly and compiled, each in a fork, and say where the two disagree."""
        self._look()
        status, expected = self._eagerly()
        note = ""
        if expected is not None and (blank := _blank(self.named, expected.values)):
            status, expected, note = self._filled(blank, status, expected)
        memories, unmappable = self._memories()
        if expected is None:
            return self._eager_raised(compiled, status, memories[0])
        notes = [note, unmappable]
        runs = []
        for memory in memories:
            if self.broken:
                notes.append(f"{memory}: not run, since the run before it left the GPU broken")
                continue
            self.backend.memory = memory
            run, told = self._judged(memory, compiled, expected)
            runs.append(run)
            notes += told
        if machine is not None and not self.on_gpu:
            runs.append(self._threaded(machine, again, expected))
            notes += [run.how for run in runs[-1:] if run.result == "not run"]
        note = "; ".join(dict.fromkeys(filter(None, notes)))
        comparison = _comparison(runs)
        if comparison.result == "differs" and self._draws(expected):
            how = "it draws random numbers: what differs cannot be told from the draw"
            comparison = Comparison(label="", result="not run", how=how, runs=runs)
        changed = [name for name in expected.values if name not in expected.places]
        return comparison.model_copy(update={"changed": changed, "note": note})

    def _threaded(
        self, machine: Machine, again: Callable[[], tuple[Backend, Compiled]], expected: Seen
    ) -> Run:
        """Compile again for the caller's machine, and call on equal inputs, a fork each."""
        backend, compiled = again()
        threads = own_threads()
        try:
            with machine.compiling() as codes, contextlib.suppress(Hold):
                compiled(*self.args, **self.kwargs)
        except Exception as error:
            how = f"it does not compile for {machine}: {cause_line(error)}"
            return Run(memory=ORDINARY, result="not run", how=how)
        if own_threads() > threads:
            how = "compiling for several threads started some, which a fork does not have"
            return Run(memory=ORDINARY, result="not run", how=how)
        backend.memory = ORDINARY

        def once() -> Run:
            return self._judged(ORDINARY, compiled, expected, machine)[0]

        return repeated(machine, once, CALLS if shared_out(codes) else 1)

    def _judged(
        self, memory: Memory, compiled: Compiled, expected: Seen, on: Machine | None = None
    ) -> tuple[Run, list[str]]:
        """One compiled call, judged where it is made: its values need not travel."""

        def work() -> tuple[Run, list[str]]:
            # A graph behind a graph break is compiled only now.
            with on.compiling() if on else contextlib.nullcontext():
                got = self._call(compiled)
            return _judge(memory, "", self.before, expected, got), expected.restrided(got)

        how, judged = self._apart(work)
        return judged or (_judge(memory, how, self.before, expected, None), [])

    def _look(self) -> None:
        """Name the tensors that the call can change, and keep their values."""
        self.named = {
            **state_of(self.fn),
            **self.backend.inputs,
            **named_tensors(self.fn, self.args, self.kwargs),
        }
        self._remember()

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU's memory is among what the call can change."""
        return any(tensor.is_cuda for tensor in self.named.values())

    def _memories(self) -> tuple[Sequence[Memory], str]:
        """What the compiled code runs in, and what there is to say of that."""
        if self.on_gpu:
            try:
                map_region((1,), torch.uint8, device="cuda")
            except OSError as error:
                return (ORDINARY,), f"compared in ordinary memory only: {error}"
        return MEMORIES, ""

    def _apart(self, work: Callable[[], T]) -> tuple[str, T | None]:
        """Do the work so that nothing of it stays, but what it saw.

        A GPU's context does not survive a fork: there it is done here, and every named tensor gets
        its value back. Nothing more can be done after an illegal access.

        Returns:
            How it ended if it did not return, and what the work returned.
        """
        if not self.on_gpu:
            return _fork(work)
        try:
            seen = work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            self.broken = "CUDA error" in str(error)
            return f"{first_line(str(error))} ({type(error).__name__})", None
        finally:
            if not self.broken:
                for name, value in self.before.items():
                    self.named[name].detach().copy_(value)
        return "", seen

    def _remember(self) -> None:
        self.before = {name: tensor.detach().clone() for name, tensor in self.named.items()}

    def _eagerly(self, seed: int = 0) -> tuple[str, Seen | None]:
        """Call without the compiler, also where a part of the callable was compiled before."""

        def work() -> Seen:
            with torch.compiler.set_stance("force_eager"):
                return self._call(self.fn, seed)

        return self._apart(work)

    def _call(self, fn: Callable[..., Any], seed: int = 0) -> Seen:
        torch.manual_seed(seed)
        return seen_of(fn(*self.args, **self.kwargs), self.named, self.before)

    def _draws(self, expected: Seen) -> bool:
        """Whether the eager call depends on the state of the random generator."""
        _, other = self._eagerly(seed=1)
        return other is not None and any(
            name not in other.values or not torch.equal(bits_of(value), bits_of(other.values[name]))
            for name, value in expected.values.items()
        )

    def _filled(
        self, blank: list[str], status: str, expected: Seen
    ) -> tuple[str, Seen | None, str]:
        """Fill pools that hold one value all over: foreign values could not be told from theirs.

        What was given stays where the callable does not take random numbers.
        """
        generator = torch.Generator().manual_seed(0)
        given = {name: self.named[name].detach().clone() for name in blank}
        for name in blank:
            values = torch.randn(self.named[name].shape, generator=generator)
            self.named[name].detach().copy_(values)
        self._remember()
        with_random, filled = self._eagerly()
        if filled is not None:
            return with_random, filled, ""
        for name, values in given.items():
            self.named[name].detach().copy_(values)
        self._remember()
        note = f"{', '.join(blank)} hold one value everywhere, and it takes no other: foreign "
        return status, expected, note + "zeros in there would not be seen"

    def _eager_raised(
        self, compiled: Callable[..., Any], status: str, memory: Memory
    ) -> Comparison:
        self.backend.memory = memory
        _, got = self._apart(partial(self._call, compiled))
        if got is not None and not status.startswith("SIG"):
            how = f"eager raises {status}, and compiled returns"
            return Comparison(label="", result="differs", how=how)
        if out_of_memory(status):
            return Comparison(label="", result="killed", how=f"{OUT_OF_MEMORY} ({status}) in eager")
        how = f"the eager call itself did not return: {status}"
        return Comparison(label="", result="raised", how=how)


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


def _comparison(runs: list[Run]) -> Comparison:
    order: tuple[Result, ...] = ("crashed", "differs", "killed", "raised")
    worst = next((r for r in order if any(run.result == r for run in runs)), "same")
    how = next((run.how for run in runs if run.result == worst), "")
    return Comparison(label="", result=worst, how=how, runs=runs)


def _fork(work: Callable[[], T]) -> tuple[str, T | None]:
    """Do the work in a fork; say how the fork ended, and what it saw if it lived."""
    outcome = run_forked(work)
    how = "" if outcome.status == "returned" else first_line(outcome.error or "")
    return outcome.signal or how, outcome.value


def _judge(
    memory: str,
    status: str,
    before: dict[str, torch.Tensor],
    expected: Seen,
    got: Seen | None,
) -> Run:
    if got is None and out_of_memory(status):
        return Run(memory=memory, result="killed", how=f"{OUT_OF_MEMORY} ({status})")
    if got is None:
        crashed = status.startswith(("SIG", "CUDA error"))
        return Run(memory=memory, result="crashed" if crashed else "raised", how=status)
    after = {**before, **expected.values}
    seen = {**before, **got.values}
    # What neither call touched is equal, and there may be much of it.
    touched = [name for name in after if name in expected.values or name in got.values]
    differences = [
        difference_of(name, after[name], seen[name], before, after)
        for name in touched
        if name in seen
    ]
    found = [difference for difference in differences if difference is not None]
    apart = expected.apart(got)
    result: Result = "differs" if found or apart else "same"
    return Run(memory=memory, result=result, how="; ".join(apart), differences=found)
