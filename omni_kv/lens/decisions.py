"""Why the reinplace pass let an argument be written in place, or did not.

The pass logs which arguments it turned down and keeps that in the nodes' metadata, but not why. The
local variables of its functions hold the reason, so they are read as those functions return.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from omni_kv.lens import pytorch

_CAN, _USED = "can_inplace", "any_use_of_views_after_node"
_SAME = "tensor_with_same_storage_already_reinplaced"
_REFINE = "reinplace_and_refine_tensors_to_clone"
#: Functions of the reinplace pass that are read as they return.
_DECIDERS = (_CAN, _USED, _SAME, _REFINE)
NOT_KNOWN = "not known"


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
        argument: base number, argument name or position by which the node knows the tensor.
        tensors: names of the nodes that would be written in place.
        reinplaced: whether the pass allowed it.
        cause: a word for the cause, read from the deciding frame; see ``_cause``. "not known" if
            the frame does not hold what this torch's pass is known to keep there.
        detail: names of the nodes that tipped the scale, such as the later user.
        place: the line that decided; None where it was not seen.
    """

    node: str
    argument: int | str
    tensors: tuple[str, ...]
    reinplaced: bool
    cause: str
    detail: tuple[str, ...]
    place: Place | None


@dataclass
class _Returned:
    """One function of the pass as it returned: its local variables are read as items.

    Raises:
        KeyError: for a local variable that it does not have.
    """

    function: str
    value: Any
    place: Place
    variables: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]


@contextlib.contextmanager
def watch_pass() -> Iterator[list[Decision]]:
    """Collect the decisions of the reinplace pass from its frames, as they return.

    The pass logs which arguments it turned down, but not why; its local variables hold that.
    Nothing is raised into the pass: what cannot be read is left out, or has no known cause.
    """
    decisions: list[Decision] = []
    returned: list[_Returned] = []
    file = pytorch.PASS_FILE.get() if pytorch.PASS_FILE.present else None

    def on_return(frame: types.FrameType, event: str, value: Any) -> Any:
        if event == "return":
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = Place(code.co_name, frame.f_lineno, text)
            seen = _Returned(code.co_name, value, place, dict(frame.f_locals))
            if code.co_name == _REFINE:
                first = next((i for i, f in enumerate(returned) if f.function == _SAME), None)
                plain = returned[:first]
                wrapped = returned[len(plain) :]
                returned.clear()
                decisions.extend(_plain_decisions(plain))
                decisions.extend(_wrapped_decisions(seen, wrapped))
            else:
                returned.append(seen)
        return on_return

    def on_call(frame: types.FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        watched = code.co_name in _DECIDERS and code.co_filename == file
        return on_return if watched else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield decisions
    finally:
        sys.settrace(before)
        decisions.extend(_plain_decisions(returned))


def _wrapped_decisions(seen: _Returned, returned: list[_Returned]) -> list[Decision]:
    """Decisions on the mutated arguments of one auto_functionalized or Triton node."""
    # A tensor is asked about at most once before it is reinplaced or left, in order: the frames
    # that returned before the next "already reinplaced?" belong to the argument at hand.
    asked: list[list[_Returned]] = []
    for frame in returned:
        if frame.function == _SAME:
            asked.append([])
        if asked:
            asked[-1].append(frame)
    try:
        node, tensors = seen["node"], seen["kwargs"]
        arguments, refused = list(seen["old_tensors_to_clone"]), list(seen.value)
    except (KeyError, TypeError):
        return []
    decisions: list[Decision] = []
    for number, argument in enumerate(arguments):
        try:
            tensor = tensors[argument]
        except (KeyError, IndexError):
            tensor = ()
        frames = asked[number] if number < len(asked) else []
        reinplaced = argument not in refused
        earlier = [d for d in decisions if d.reinplaced]
        decisions.append(_decision(node, argument, tensor, frames, earlier, reinplaced))
    return decisions


def _plain_decisions(returned: list[_Returned]) -> list[Decision]:
    """Decisions on ATen ops with an in-place variant, such as index_put."""
    decisions = []
    for number, frame in enumerate(returned):
        variables = frame.variables
        tensor, node = variables.get("mutated_arg"), variables.get("node")
        if frame.function == _CAN and isinstance(tensor, fx.Node):
            frames = returned[max(0, number - 1) : number + 1]
            decisions.append(_decision(node, 0, tensor, frames, [], frame.value is True))
    return decisions


def _decision(
    node: Any,
    argument: int | str,
    tensor: Any,
    frames: list[_Returned],
    earlier: list[Decision],
    reinplaced: bool,
) -> Decision:
    tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
    verdict = next((f for f in reversed(frames) if f.function == _CAN), None)
    cause, place = "reinplaced", verdict.place if verdict is not None else None
    detail: tuple[str, ...] = ()
    if not reinplaced:
        try:
            cause, detail, place = _cause(tensors, frames, verdict, earlier)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            cause = NOT_KNOWN
    return Decision(
        node=getattr(node, "name", str(node)),
        argument=argument,
        tensors=tuple(getattr(t, "name", str(t)) for t in tensors),
        reinplaced=reinplaced,
        cause=cause,
        detail=detail,
        place=place,
    )


def _cause(
    tensors: Any,
    frames: list[_Returned],
    verdict: _Returned | None,
    earlier: list[Decision],
) -> tuple[str, tuple[str, ...], Place | None]:
    """Name the cause of a refusal from the local variables of the frames that returned it."""
    if verdict is None:
        refused = [f for f in frames if f.value is True]
        if not refused:
            return NOT_KNOWN, (), None
        names = {t.name for t in tensors if isinstance(t, fx.Node)}
        same = [d for d in earlier if names & set(d.tensors)]
        if same:
            return "same tensor twice", same[0].tensors, refused[-1].place
        others = tuple(n for d in earlier for n in d.tensors)
        return "same storage already reinplaced", others, refused[-1].place
    place = verdict.place
    argument = verdict["mutated_arg"]
    before = frames[: max(i for i, f in enumerate(frames) if f is verdict)]
    if isinstance(argument, (list, tuple)):
        if len(verdict["unique_storages"]) != len(argument):
            return "list shares storage", tuple(t.name for t in argument), place
        # The elements are asked in turn, up to the first that is refused.
        element = max(i for i, f in enumerate(before) if f.function == _CAN)
        return _cause(tensors, before[: element + 1], before[element], earlier)
    use = before[-1] if before and before[-1].function == _USED else None
    if use is not None and use.value is True:
        return "used later", (use["user"].name, use["view"].name), use.place
    if "shared_view_nodes" not in verdict.variables:
        # The function returns before it makes this list if a tensor has no storage.
        known = pytorch.SHARED_VIEWS.present
        return ("no storage" if known else NOT_KNOWN), (), place
    views = verdict["shared_view_nodes"]
    inputs = tuple(v.name for v in views if v.op in ("placeholder", "get_attr"))
    if argument.op in ("placeholder", "get_attr"):
        return "no copy-back", (), place
    return ("view of an input" if inputs else NOT_KNOWN), inputs, place


def target_name(target: Any) -> str:
    """Name of what a node calls, such as ``aten.clone.default``."""
    if isinstance(target, str):
        return target
    name = str(target)
    return getattr(target, "__name__", name) if name.startswith("<") else name
