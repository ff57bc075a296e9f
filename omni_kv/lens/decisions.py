"""Why the reinplace pass let an argument be written in place, or did not.

The pass logs which arguments it turned down and keeps that in the nodes' metadata, but not why. The
local variables of its functions hold the reason, so they are read as those functions return.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

#: Functions of the reinplace pass that are read as they return.
_DECIDERS = (
    "can_inplace",
    "any_use_of_views_after_node",
    "tensor_with_same_storage_already_reinplaced",
    "reinplace_and_refine_tensors_to_clone",
)


@dataclass(frozen=True)
class Place:
    """A line of the reinplace pass: where a decision fell."""

    function: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"reinplace.py:{self.line}, in {self.function}: {self.text}"


@dataclass(frozen=True)
class Decision:
    """What the reinplace pass decided about one mutated argument of one node.

    Attributes:
        node: name of the functional node (``auto_functionalized_v2``, ``index_put``, ...).
        target: what that node calls.
        argument: base number, argument name or position by which the node knows the tensor.
        tensors: names of the nodes that would be written in place.
        reinplaced: whether the pass allowed it.
        cause: a word for the cause, read from the deciding frame; see ``_cause``.
        detail: names of the nodes that tipped the scale, such as the later user.
        place: the line that decided; None where it was not seen.
    """

    node: str
    target: str
    argument: int | str
    tensors: tuple[str, ...]
    reinplaced: bool
    cause: str
    detail: tuple[str, ...]
    place: Place | None


@contextlib.contextmanager
def watch_pass() -> Iterator[list[Decision]]:
    """Collect the decisions of the reinplace pass from its frames, as they return.

    The pass logs which arguments it turned down, but not why; its local variables hold that.
    """
    from torch._inductor.fx_passes import reinplace

    decisions: list[Decision] = []
    returned: list[dict[str, Any]] = []

    def on_return(frame: types.FrameType, event: str, value: Any) -> Any:
        if event == "return":
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = Place(code.co_name, frame.f_lineno, text)
            seen = {"name": code.co_name, "value": value, "place": place, **frame.f_locals}
            if code.co_name == "reinplace_and_refine_tensors_to_clone":
                asked = [
                    f["name"] == "tensor_with_same_storage_already_reinplaced" for f in returned
                ]
                first = asked.index(True) if True in asked else len(returned)
                decisions.extend(_plain_decisions(returned[:first]))
                decisions.extend(_wrapped_decisions(seen, returned[first:]))
                returned.clear()
            else:
                returned.append(seen)
        return on_return

    def on_call(frame: types.FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        watched = code.co_name in _DECIDERS and code.co_filename == reinplace.__file__
        return on_return if watched else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield decisions
    finally:
        sys.settrace(before)
        decisions.extend(_plain_decisions(returned))


def _wrapped_decisions(seen: dict[str, Any], returned: list[dict[str, Any]]) -> list[Decision]:
    """Decisions on the mutated arguments of one auto_functionalized or Triton node."""
    # A tensor is asked about at most once before it is reinplaced or left, in order: the frames
    # that returned before the next "already reinplaced?" belong to the argument at hand.
    asked: list[list[dict[str, Any]]] = []
    for frame in returned:
        if frame["name"] == "tensor_with_same_storage_already_reinplaced":
            asked.append([])
        asked[-1].append(frame)
    node = seen.get("node")
    decisions: list[Decision] = []
    for argument, frames in itertools.zip_longest(seen["old_tensors_to_clone"], asked):
        if argument is None:
            continue
        tensor = seen["kwargs"][argument]
        earlier = [d for d in decisions if d.reinplaced]
        decisions.append(_decision(node, argument, tensor, frames or [], earlier))
        if decisions[-1].reinplaced == (argument in seen["tensors_to_clone"]):
            raise RuntimeError(f"the reinplace pass contradicts its frames on {argument}")
    return decisions


def _plain_decisions(returned: list[dict[str, Any]]) -> list[Decision]:
    """Decisions on ATen ops with an in-place variant, such as index_put."""
    decisions = []
    for number, frame in enumerate(returned):
        if frame["name"] == "can_inplace" and isinstance(frame["mutated_arg"], fx.Node):
            frames = returned[: number + 1]
            decisions.append(_decision(frame["node"], 0, frame["mutated_arg"], frames[-2:], []))
    return decisions


def _decision(
    node: Any,
    argument: int | str,
    tensor: Any,
    frames: list[dict[str, Any]],
    earlier: list[Decision],
) -> Decision:
    tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
    verdict = next((f for f in reversed(frames) if f["name"] == "can_inplace"), None)
    reinplaced = verdict is not None and verdict["value"] is True
    cause, detail, place = _cause(tensors, frames, verdict, earlier)
    return Decision(
        node=node.name if isinstance(node, fx.Node) else str(node),
        target=target_name(node.target) if isinstance(node, fx.Node) else "",
        argument=argument,
        tensors=tuple(getattr(t, "name", str(t)) for t in tensors),
        reinplaced=reinplaced,
        cause="reinplaced" if reinplaced else cause,
        detail=() if reinplaced else detail,
        place=place,
    )


def _cause(
    tensors: Any,
    frames: list[dict[str, Any]],
    verdict: dict[str, Any] | None,
    earlier: list[Decision],
) -> tuple[str, tuple[str, ...], Place | None]:
    """Name the cause of a refusal from the local variables of the frames that returned it."""
    if verdict is None:
        refused = [f for f in frames if f["value"] is True]
        place = refused[-1]["place"] if refused else None
        names = {t.name for t in tensors if isinstance(t, fx.Node)}
        same = [d for d in earlier if names & set(d.tensors)]
        if same:
            return "same tensor twice", same[0].tensors, place
        return (
            "same storage already reinplaced",
            tuple(n for d in earlier for n in d.tensors),
            place,
        )
    place = verdict["place"]
    argument = verdict["mutated_arg"]
    before = frames[: max(i for i, f in enumerate(frames) if f is verdict)]
    if isinstance(argument, (list, tuple)):
        if len(verdict.get("unique_storages", argument)) != len(argument):
            return "list shares storage", tuple(t.name for t in argument), place
        # The elements are asked in turn, up to the first that is refused.
        element = max(i for i, f in enumerate(before) if f["name"] == "can_inplace")
        return _cause(tensors, before[: element + 1], before[element], earlier)
    if "shared_view_nodes" not in verdict:
        return "no storage", (), place
    use = before[-1] if before and before[-1]["name"] == "any_use_of_views_after_node" else None
    if use is not None and use["value"] is True:
        return "used later", (use["user"].name, use["view"].name), use["place"]
    inputs = tuple(
        v.name for v in verdict["shared_view_nodes"] if v.op in ("placeholder", "get_attr")
    )
    if argument.op in ("placeholder", "get_attr"):
        return "no copy-back", (), place
    return ("view of an input" if inputs else "unknown"), inputs, place


def target_name(target: Any) -> str:
    """Name of what a node calls, such as ``aten.clone.default``."""
    if isinstance(target, str):
        return target
    name = str(target)
    return getattr(target, "__name__", name) if name.startswith("<") else name
