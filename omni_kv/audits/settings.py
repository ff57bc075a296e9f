"""What the caller set in torch for all that follows, as far as a child must be told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchSettings:
    """Settings of torch that change what a program computes, beside those of the compiler.

    Attributes:
        grad: whether autograd records.
        inference: whether it is inference mode.
        dtype: the default dtype.
        device: the default device.
        deterministic: whether deterministic algorithms are asked for, and whether an op that has
            none only warns.
        precision: of float32 matrix products.
        autocast: the dtype of each device type that is under autocast.
    """

    grad: bool
    inference: bool
    dtype: torch.dtype
    device: torch.device
    deterministic: tuple[bool, bool]
    precision: str
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def here(cls) -> TorchSettings:
        """The settings as they are now."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            precision=torch.get_float32_matmul_precision(),
            autocast=tuple(
                (device, torch.get_autocast_dtype(device))
                for device in _AUTOCAST
                if torch.is_autocast_enabled(device)
            ),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have these settings; those of before come back."""
        before = TorchSettings.here()
        with contextlib.ExitStack() as stack:
            stack.callback(before._set)
            self._set()
            if self.device != before.device:
                stack.enter_context(self.device)
            for device, dtype in set(self.autocast) - set(before.autocast):
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            yield

    def _set(self) -> None:
        """Set what has no context manager, where it is not so already."""
        now = TorchSettings.here()
        if now.dtype != self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.deterministic != self.deterministic:
            torch.use_deterministic_algorithms(
                self.deterministic[0], warn_only=self.deterministic[1]
            )
        if now.precision != self.precision:
            torch.set_float32_matmul_precision(self.precision)
