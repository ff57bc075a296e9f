"""Where two results disagree, and whose values stand there instead."""

from __future__ import annotations

import torch

from omni_kv.audits.report import Difference
from omni_kv.sandbox.relocate import BEHIND, IN_FRONT

#: Rounding that is allowed, relative to the values around, by dtype: some hundred units in the
#: last place of float32, since sums are added up in another order, and a few of the short dtypes.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: Elements that are compared at a time, so that large pools are not copied whole into wide numbers.
BLOCK = 1 << 20


def wrong_elements(right: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Which elements disagree beyond rounding: bool, of the tensors' shape.

    What rounding may explain is measured in the scale of the data: of the largest value in the same
    row (the last dimension), and, far less, of the largest in the tensor. Integers, bools and bytes
    must be equal; NaN equals NaN.

    Args:
        right: what is right.
        seen: what was seen, of the same shape and dtype.
    """
    if not (right.dtype.is_floating_point or right.dtype.is_complex):
        return right != seen
    relative = TOLERANCE.get(right.dtype, 1e-1)
    if right.numel() == 0:
        return torch.zeros_like(right, dtype=torch.bool)
    rows = [t.reshape(-1, t.shape[-1] if t.dim() else 1) for t in (right, seen)]
    parts = list(zip(*(t.split(max(1, BLOCK // t.shape[-1])) for t in rows), strict=True))
    largest = max(float(_size(a).max()) for a, _ in parts)
    wrong = [_wrong_rows(_wide(a), _wide(b), relative, largest) for a, b in parts]
    return torch.cat(wrong).reshape(right.shape)


def _wrong_rows(a: torch.Tensor, b: torch.Tensor, relative: float, largest: float) -> torch.Tensor:
    allowed = relative * (_size(a).amax(-1, keepdim=True) + 1e-3 * largest)
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(same | ((a - b).abs() <= allowed))


def _size(values: torch.Tensor) -> torch.Tensor:
    return _wide(values).abs().nan_to_num(0.0, 0.0, 0.0)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.dtype.is_complex else torch.float64)


def difference_of(
    name: str,
    right: torch.Tensor,
    seen: torch.Tensor,
    before: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> Difference | None:
    """Where two tensors disagree beyond rounding, and whose values stand there instead.

    Rounding is judged by dtype; whose values they are is judged bit by bit.
    """
    if right.shape != seen.shape or right.dtype != seen.dtype:
        return Difference(tensor=name, elements=right.numel(), of=right.numel(), first=[])
    if torch.equal(bits_of(right), bits_of(seen)):
        return None
    wrong = wrong_elements(right, seen)
    largest = None
    if right.dtype.is_floating_point or right.dtype.is_complex:
        gap = (_wide(right[wrong]) - _wide(seen[wrong])).abs()
        finite = gap[gap.isfinite()]
        largest = float(finite.max()) if finite.numel() else None
    count = int(wrong.sum())
    if not count:
        return None
    origins: dict[str, torch.Tensor] = {}
    for label, byte in (("the pattern behind", BEHIND), ("the pattern in front of", IN_FRONT)):
        pattern = torch.full_like(right.new_empty(right.element_size()), byte, dtype=torch.uint8)
        pattern = pattern.view(right.dtype)
        origins[f"{label} the storage"] = pattern.expand(right.shape)
    origins["its own old value"] = before.get(name, right.new_empty(0))
    for other, tensor in expected.items():
        if other != name and not other.startswith("output"):
            origins[f"{other} at the same place"] = tensor
    equal_to = {}
    for label, values in origins.items():
        if values.shape == right.shape and values.dtype == right.dtype:
            equal = int((bits_of(values)[wrong] == bits_of(seen)[wrong]).sum())
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


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same size, so that a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    return tensor.contiguous().view(integers[size]) if size in integers else tensor
