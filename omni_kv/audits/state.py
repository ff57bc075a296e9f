"""What a call can return or change: tensors by name, and where results lie."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from omni_kv.audits.differences import bits_of
from omni_kv.lens.graph import parameter_names


@dataclass(frozen=True)
class Place:
    """Where a result lies.

    Attributes:
        is_given: the tensor given that the result is; None if it is another one.
        shares: tensors given whose storage the result shares.
        stride: in elements; dimensions of size 1 have None, for theirs means nothing.
    """

    is_given: str | None
    shares: tuple[str, ...]
    stride: tuple[int | None, ...]

    def __str__(self) -> str:
        if self.is_given is not None:
            return f"is {self.is_given} itself"
        if self.shares:
            return f"shares memory with {', '.join(self.shares)}"
        return "has memory of its own"


@dataclass(frozen=True)
class Seen:
    """What a call returned or changed: values by name, and the place of each result."""

    values: dict[str, torch.Tensor]
    places: dict[str, Place]

    def apart(self, got: Seen) -> list[str]:
        """Say where compiled returns what is missing, is more, or lies elsewhere than in eager.

        Args:
            got: what the compiled call returned or changed.
        """
        found = []
        for name in sorted({*self.places, *got.places}):
            right, other = self.places.get(name), got.places.get(name)
            if right is None or other is None:
                found.append(f"only {'eager' if other is None else 'compiled'} returns {name}")
            elif (right.is_given, right.shares) != (other.is_given, other.shares):
                found.append(f"{name} {right} in eager, and {other} in compiled")
        return found

    def restrided(self, got: Seen) -> list[str]:
        """Say which results have other strides in compiled: no fault by itself."""
        return [
            f"{name} has strides {right.stride} in eager, and {got.places[name].stride} in compiled"
            for name, right in self.places.items()
            if name in got.places and right.stride != got.places[name].stride
        ]


def seen_of(out: Any, named: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> Seen:
    """The outputs of a call, and the named tensors that it changed.

    Args:
        out: what it returned.
        named: what it can change.
        before: the values that those had.
    """
    results = tensors_in(out, "output")
    values = {name: leaf.detach().clone() for name, leaf in results.items()}
    for name, tensor in named.items():
        if not torch.equal(bits_of(tensor.detach()), bits_of(before[name])):
            values[name] = tensor.detach().clone()
    return Seen(values, {name: _place(leaf, named) for name, leaf in results.items()})


def _place(result: torch.Tensor, named: dict[str, torch.Tensor]) -> Place:
    same = [name for name, tensor in named.items() if tensor is result]
    start = _storage(result)
    shares = [name for name, tensor in named.items() if start and _storage(tensor) == start]
    stride = tuple(
        step if size > 1 and result.numel() else None
        for size, step in zip(result.shape, _strides(result), strict=True)
    )
    return Place(same[0] if same else None, tuple(sorted(shares)), stride)


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else (0,) * tensor.dim()


def named_tensors(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors among the arguments and the module's buffers, by the caller's names."""
    named: dict[str, torch.Tensor] = {}
    names = parameter_names(fn)
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        place = getattr(path[1], "idx", None)
        if place is None:
            name = str(getattr(path[1], "key", path[1]))
        else:
            name = names[place] if place < len(names) else f"args[{place}]"
        named.update(tensors_in(leaf, name + pytree.keystr(path[2:])))
    if isinstance(fn, torch.nn.Module):
        named.update({f"fn.{name}": buffer for name, buffer in fn.named_buffers()})
    return named


def state_of(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Tensors that the callable reaches by name: attributes, closure and globals."""
    found: dict[str, torch.Tensor] = {}
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    for module in owner.modules() if isinstance(owner, torch.nn.Module) else [owner]:
        for name, value in vars(module).items() if hasattr(module, "__dict__") else ():
            if not name.startswith("_"):
                found.update(tensors_in(value, f"self.{name}"))
    function = getattr(fn, "forward", fn) if isinstance(fn, torch.nn.Module) else fn
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        reached = inspect.getclosurevars(function)
        for name, value in {**reached.globals, **reached.nonlocals}.items():
            found.update(tensors_in(value, name))
    return found


def tensors_in(value: Any, name: str, depth: int = 3) -> dict[str, torch.Tensor]:
    """The tensors in a value, by where they are: in containers, dataclasses and plain objects.

    Args:
        value: anything.
        name: what to call it.
        depth: how many objects deep to look.
    """
    found: dict[str, torch.Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        here = name + pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            found[here] = leaf
        elif depth and is_plain(leaf):
            for attribute, inner in vars(leaf).items():
                found.update(tensors_in(inner, f"{here}.{attribute}", depth - 1))
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is an object whose attributes are data."""
    code = (type, torch.nn.Module, torch.dtype, torch.Generator)
    if isinstance(value, code) or callable(value) or inspect.ismodule(value):
        return False
    return dataclasses.is_dataclass(value) or hasattr(value, "__dict__")
