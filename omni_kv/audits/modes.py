"""How the caller compiles and runs: the settings of ``torch.compile``, autograd, threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from omni_kv.lens.fresh import Settings, settings_of


class BadMode(ValueError):
    """A mode that there is not; the message is one line."""


@dataclass(frozen=True)
class Modes:
    """The modes of an audit.

    Attributes:
        dynamic: look at static shapes (False), ``dynamic=True`` (True), or both.
        mode: ``mode=`` of ``torch.compile``; None leaves what the callable was compiled with.
        backend: name of the backend; None leaves what the callable was compiled with.
        grad: whether autograd records; None leaves what the caller has set.
        inference: whether all happens in inference mode; None leaves what the caller has set.
        threads: threads of the run that looks for races; None for as many as torch uses here.

    Raises:
        BadMode: if one of them is none.
    """

    dynamic: bool | Literal["both"] = "both"
    mode: str | None = None
    backend: str | None = None
    grad: bool | None = None
    inference: bool | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.dynamic not in ("both", True, False):
            raise BadMode(f"dynamic is 'both', True or False, not {self.dynamic!r}")
        if self.mode is not None:
            known = list(torch._inductor.list_mode_options())
            if self.mode not in known:
                raise BadMode(f"there is no mode {self.mode!r}: {', '.join(known)}")
            if self.backend not in (None, "inductor"):
                raise BadMode(f"the backend {self.backend} has no modes, Inductor alone has")
        if self.backend is not None:
            backends = torch._dynamo.list_backends(exclude_tags=())
            if self.backend not in backends:
                raise BadMode(f"there is no backend {self.backend!r}: {', '.join(backends)}")
        if self.grad and self.inference:
            raise BadMode("autograd does not record in inference mode: choose one")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise BadMode(f"threads is a number of at least 1, not {self.threads!r}")

    @property
    def shapes(self) -> tuple[bool | None, ...]:
        """What to pass as ``dynamic=``, one after the other."""
        if self.dynamic == "both":
            return None, True
        return (True,) if self.dynamic else (None,)

    def settings(self, fn: Callable[..., Any]) -> Settings:
        """What ``torch.compile`` is told of ``fn``: what it was told, and what stands here."""
        settings = settings_of(fn)
        if self.backend is not None:
            backend = torch._dynamo.lookup_backend(self.backend)
            inductor = self.backend == "inductor"
            options = settings.options if inductor else {}
            settings = replace(settings, backend=None if inductor else backend, options=options)
        if self.mode is not None:
            options = dict(torch._inductor.list_mode_options(self.mode))
            settings = replace(settings, backend=None, options=settings.options | options)
        return settings

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Autograd as it is asked for."""
        with contextlib.ExitStack() as stack:
            if self.inference is not None:
                stack.enter_context(torch.inference_mode(self.inference))
            if self.grad is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            yield
