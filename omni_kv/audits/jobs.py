"""What is compared, and how it travels to a child process: calls, modes and configuration."""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch.utils import _pytree as pytree

from omni_kv.audits.modes import Modes
from omni_kv.audits.report import Comparison, Result
from omni_kv.audits.settings import TorchSettings
from omni_kv.audits.threads import Machine
from omni_kv.lens.fresh import Settings, original
from omni_kv.sandbox.relocate import ROOM, View, map_leaves, pack


@dataclass
class Job:
    """A series of calls of one compiled callable.

    Attributes:
        fn: the callable; it and the arguments travel by cloudpickle.
        series: the arguments of each call, in order, on the CPU.
        labels: for each call, what to call its comparison; None compiles for it and goes on.
        kwargs: keyword arguments of every call, unless the last has ``second_kwargs``.
        dynamic: as in ``torch.compile``.
        second_kwargs: keyword arguments of the last call, if they are others.
        modes: how the caller compiles, where that is said.
        settings: what ``torch.compile`` is told.
        around: what the caller set in torch, autograd and inference mode among it.
        config: what the caller changed in the compiler's configuration, by module and name.
        machine: threads and vector code of a further run, in ordinary memory, of the first call
            that has a label; None if it is not made.
        make: makes callable and arguments anew, see ``Named``; None if only the caller can.
        buffers: the module's buffers that are views, by name; filled in for the journey.
    """

    fn: Callable[..., Any]
    series: list[tuple[Any, ...]]
    labels: list[str | None]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    second_kwargs: dict[str, Any] | None = None
    modes: Modes = field(default_factory=Modes)
    settings: Settings = field(default_factory=Settings)
    around: TorchSettings = field(default_factory=TorchSettings.here)
    config: dict[str, dict[str, Any]] = field(default_factory=lambda: changed_config())
    machine: Machine | None = None
    make: Callable[[], Any] | None = None
    buffers: dict[str, View] = field(default_factory=dict)

    def packed(self) -> Job:
        """The job as it travels: views with their bases, which pickling would lose."""
        buffers = {}
        if isinstance(self.fn, torch.nn.Module):
            packed = {name: pack(buffer) for name, buffer in self.fn.named_buffers()}
            buffers = {name: view for name, view in packed.items() if isinstance(view, View)}
        series, kwargs = map_leaves(pack, self.series), map_leaves(pack, self.kwargs)
        return replace(self, series=series, kwargs=kwargs, buffers=buffers, make=None)

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

    def calls(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments and keyword arguments of each call."""
        last = self.kwargs if self.second_kwargs is None else self.second_kwargs
        keywords = [self.kwargs] * (len(self.series) - 1) + [last]
        return list(zip(self.series, keywords, strict=True))

    def memory(self) -> int:
        """Bytes that running this takes at most, about, besides what a process needs anyway.

        The arguments lie in the child, beside a copy of them as they were. A call in a fork may
        change them, lays them anew between filled neighbours, and keeps what it changed.
        """
        leaves = pytree.tree_leaves((self.series[-1:], self.kwargs, self.second_kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if isinstance(self.fn, torch.nn.Module):
            tensors += [*self.fn.parameters(), *self.fn.buffers()]
        storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(COPIES * size + 2 * min(size, ROOM) for size in sizes.values())

    def untested(self, result: Result, how: str) -> list[Comparison]:
        """The comparisons of this job if none of them could be made."""
        return [Comparison(label=label, result=result, how=how) for label in self.labels if label]


def jobs_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    second: Sequence[Any] | None = None,
    second_kwargs: dict[str, Any] | None = None,
    modes: Modes | None = None,
) -> list[Job]:
    """The jobs that look at one callable: static, ``dynamic=True``, and a call of other sizes.

    Args:
        fn: the callable.
        args: its arguments.
        kwargs: its keyword arguments.
        second: arguments of a second call of what was compiled with the default ``dynamic=None``.
        second_kwargs: its keyword arguments, if they are others.
        modes: how the caller compiles.
    """
    modes = modes or Modes()
    dynamic, settings = modes.shapes, modes.settings(fn)
    jobs = []
    if None in dynamic or second is not None:
        calls: list[tuple[Any, ...]] = [tuple(args)]
        labels: list[str | None] = ["static" if None in dynamic else None]
        if second is not None:
            calls.append(tuple(second))
            labels.append("second call")
        last = second_kwargs if second is not None else None
        jobs.append(Job(original(fn), calls, labels, kwargs or {}, None, last, modes, settings))
    if True in dynamic:
        calls, labels = [tuple(args)], ["dynamic=True"]
        jobs.append(Job(original(fn), calls, labels, kwargs or {}, True, None, modes, settings))
    return jobs


#: Whose settings decide what is compiled.
CONFIGS = {
    "torch._dynamo.config": torch._dynamo.config,
    "torch._functorch.config": torch._functorch.config,
    "torch._inductor.config": torch._inductor.config,
}


def changed_config() -> dict[str, dict[str, Any]]:
    """What this process changed in the compiler's configuration, by module and name.

    What the environment sets is not among it: a child reads the environment itself. Values that
    cannot be pickled (hooks) stay behind.
    """
    found: dict[str, dict[str, Any]] = {}
    for module, config in CONFIGS.items():
        entries: dict[str, Any] = getattr(config, "_config", {})
        changed = {}
        for name, entry in entries.items():
            override = getattr(entry, "user_override", None)
            if isinstance(override, (bool, int, float, str)) and override != entry.default:
                changed[name] = override
        if changed:
            found[module] = changed
    return found


#: How often a storage is in memory while a call of it is compared.
COPIES = 6

OWN_MODULE = "Put the callable and its custom ops in a module that can be imported."


@dataclass(frozen=True)
class Parcel:
    """A job on its way to a child: an unreadable one must not take the others along."""

    content: bytes
    modules: tuple[str, ...]
    labels: tuple[str, ...]
    inference: bool = False

    def job(self) -> Job:
        """The job, on the child's side."""
        for module in self.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        # Tensors made in inference mode are of another kind, which pickling loses.
        with torch.inference_mode(self.inference):
            sent = torch.load(io.BytesIO(self.content), weights_only=False)
            return sent.unpacked() if isinstance(sent, Job) else sent()


@dataclass(frozen=True)
class Named:
    """A job whose callable and arguments the child makes itself, as the command line names them.

    Attributes:
        make: makes the calls of the job: the callable, each call's arguments, keyword arguments,
            and those of the last call.
        job: the rest of it.
    """

    make: Callable[[], tuple[Callable[..., Any], list[tuple[Any, ...]], dict[str, Any], Any]]
    job: Job

    def __call__(self) -> Job:
        """The job with its callable and arguments."""
        fn, series, kwargs, last = self.make()
        series = series[: len(self.job.labels)]
        settings = self.job.modes.settings(fn)
        return replace(
            self.job,
            fn=original(fn),
            series=series,
            kwargs=kwargs,
            second_kwargs=last if len(series) > 1 else None,
            settings=settings,
        )


def parcel_of(job: Job) -> Parcel:
    """Pickle a job by value, with the custom ops that it closes over, or else by its name.

    Raises:
        Exception: whatever pickling raises for what cannot be pickled, such as a lock.
    """
    import cloudpickle
    from torch._library.custom_ops import OPDEFS, CustomOpDef

    # A callable of a notebook or a script names its ops through torch.ops, which says nothing of
    # the modules that define them.
    copyreg.pickle(type(torch.ops), _reduce_ops)
    copyreg.pickle(CustomOpDef, _reduce_op)
    modules = {getattr(op._init_fn, "__module__", "__main__") for op in OPDEFS.values()}
    buffer = io.BytesIO()
    try:
        torch.save(job.packed(), buffer, pickle_module=cloudpickle)
    except Exception:
        if job.make is None:
            raise
        rest = replace(job, fn=len, series=[], kwargs={}, second_kwargs=None, settings=Settings())
        buffer = io.BytesIO()
        torch.save(Named(job.make, replace(rest, make=None)), buffer, pickle_module=cloudpickle)
    labels = tuple(label for label in job.labels if label)
    leaves = pytree.tree_leaves((job.series, job.kwargs))
    inference = any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in leaves)
    return Parcel(buffer.getvalue(), tuple(sorted(modules - {"__main__"})), labels, inference)


def _reduce_op(op: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A custom op by its name, and by the functions that define it where it is not known."""
    namespace, name = op._qualname.split("::")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    mutated = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    text = str(schema)
    text = text[text.index("(") :]
    return _custom_op, (op._qualname, text, mutated, op._init_fn, op._abstract_fn)


def _custom_op(qualname: str, schema: str, mutated: tuple[str, ...], fn: Any, fake: Any) -> Any:
    from torch._library.custom_ops import OPDEFS

    if qualname not in OPDEFS:
        op = torch.library.custom_op(qualname, fn, mutates_args=mutated, schema=schema)
        if fake is not None:
            op.register_fake(fake)
    return OPDEFS[qualname]


def _reduce_ops(_: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return getattr, (torch, "ops")
