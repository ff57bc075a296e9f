"""Compile a callable as ``torch.compile`` would, but from nothing.

Dynamo keeps compiled code by the code object, and which sizes changed by the name of the code. A
copy of the function whose code has another name starts from nothing and leaves in place what
others compiled. A frame put around the callable would do the same, but changes the order in which
Dynamo meets the inputs, and with it the outcome.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_kv.lens import pytorch

_numbers = itertools.count()


@dataclass(frozen=True)
class Settings:
    """What ``torch.compile`` was told, as far as its result lets on.

    Attributes:
        dynamic: its ``dynamic=``.
        options: its ``mode=`` and ``options=`` as options of Inductor.
        backend: the backend; None if it is Inductor.
        known: whether the callable is a result of ``torch.compile`` that could be read.
    """

    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    backend: Any = None
    known: bool = False


def original(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable behind ``torch.compile(...)``; any other callable as it is."""
    if isinstance(fn, torch.nn.Module):
        return getattr(fn, pytorch.ORIG_MOD.name, fn)  # type: ignore[return-value]
    return getattr(fn, pytorch.ORIG_CALLABLE.name, fn)


def settings_of(fn: Callable[..., Any]) -> Settings:
    """What ``torch.compile`` was told when it made ``fn``; the defaults for any other callable."""
    tell = getattr(fn, pytorch.COMPILER_CONFIG.name, None)
    if original(fn) is fn or not isinstance(tell, types.FunctionType) or tell.__closure__ is None:
        return Settings()
    for cell in tell.__closure__:
        context = cell.cell_contents
        if callable(getattr(context, "callback", None)) and pytorch.INNERMOST_BACKEND.present:
            backend = pytorch.INNERMOST_BACKEND.get()(context.callback)
            # Any backend but Inductor stands inside an object that holds mode and options.
            backend = getattr(backend, pytorch.COMPILER_FN.name, backend)
            options = getattr(backend, "config", None)
            inductor = getattr(backend, "compiler_name", None) == "inductor"
            return Settings(
                dynamic=getattr(context, "_dynamic", None),
                options=dict(options) if inductor and isinstance(options, dict) else {},
                backend=None if inductor else backend,
                known=True,
            )
    return Settings()


def recompilable(fn: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Copy ``fn`` so that Dynamo has not seen it.

    A function gets a copy of its code, with the same globals, closure and defaults; a bound method
    and a module's ``forward`` likewise (the module is copied one level deep: it shares parameters,
    buffers, submodules and hooks).

    Returns:
        The copy, and whether a frame of ours stands around it. That is so for what is neither
        (such as ``functools.partial``), and for what Dynamo itself puts a frame around.
    """
    if isinstance(fn, torch.nn.Module):
        forward = getattr(fn, "forward", None)
        if isinstance(forward, types.MethodType) and not _skipped(forward):
            copy = object.__new__(type(fn))
            copy.__dict__.update(fn.__dict__)
            owner = copy if forward.__self__ is fn else forward.__self__
            method = types.MethodType(_renamed(forward.__func__), owner)
            copy.__dict__["forward"] = method
            return copy, False
    elif isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
        if not _skipped(fn):
            return types.MethodType(_renamed(fn.__func__), fn.__self__), False
    elif isinstance(fn, types.FunctionType) and not _skipped(fn):
        return _renamed(fn), False

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return _renamed(call), True


def _skipped(fn: Any) -> bool:
    """Whether Dynamo puts a frame of its own around ``fn``, since it does not look at its file."""
    if not isinstance(getattr(fn, "__func__", fn), types.FunctionType):
        return True
    return pytorch.SKIPPED.present and bool(pytorch.SKIPPED.get()(fn))


def _renamed(fn: Any) -> types.FunctionType:
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}_omni_kv_{next(_numbers)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
    copy.__dict__.update(fn.__dict__)
    return copy
