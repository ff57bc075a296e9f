"""What the stages of one graph say about its mutated arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from omni_kv.audits.report import Alias, Argument, Clone, Op
from omni_kv.lens import pytorch
from omni_kv.lens.clones import ClonedTensor, clones_of, root_of
from omni_kv.lens.decisions import Decision, target_name
from omni_kv.lens.graph import GraphCapture, Input, overlap

_FUNCTIONALISED = ("auto_functionalized", "auto_functionalized_v2")
_TRITON = "triton_kernel_wrapper_functional"
_INSTALLED = {"site-packages", "dist-packages"}
_SEPARATE = (
    "give each pool an allocation of its own, or pass the op the one tensor that holds them all "
    "and slice it inside the op"
)
#: What to do about a cause, where that is known.
_ADVICE = {
    "same storage already reinplaced": _SEPARATE,
    "list shares storage": _SEPARATE,
    "same tensor twice": "pass the tensor once, or two tensors if they are to differ",
    "used later": "read what is needed before the call, or accept the copy: the old value is used",
    "view of an input": "pass the whole input to the op and take the view inside it",
}
_OWN_TENSORS = "make each a tensor of its own before the call, with clone(), not views of one"
#: The same for tensors that are made in the graph, and for writes by ATen ops.
_INTERMEDIATE_ADVICE = _ADVICE | {
    "same storage already reinplaced": _OWN_TENSORS,
    "list shares storage": _OWN_TENSORS,
}
_ATEN_ADVICE = {
    "used later": "read what is needed before the write, or accept the copy: the old value is used",
    "view of an input": "write into a tensor of its own, or through indices of the whole tensor",
}
_OUTSIDE_ADVICE = "; until then do not run it compiled, the values that it reads are not its own"


def ops_of(graph: GraphCapture, number: int = 0) -> list[Op]:
    """Every call of a mutable op in a graph, with what became of each mutated argument."""
    before, after = graph.post_grad_before_reinplace, graph.post_grad_after_decomposition
    if before is None or after is None:
        return []
    ops = []
    wrapped: set[str] = set()
    seen: dict[Any, int] = {}
    for node in before.nodes:
        kind = target_name(node.target) if node.op == "call_function" else ""
        if kind in _FUNCTIONALISED:
            overload = node.args[0]
            calls = after.find_nodes(op="call_function", target=overload)
            call = calls[seen.get(overload, 0)] if len(calls) > seen.get(overload, 0) else None
            seen[overload] = seen.get(overload, 0) + 1
            arguments = _wrapped_arguments(graph, node, call, kind)
            name, place = target_name(overload), place_of(node)
            ops.append(Op(name=name, kind=kind, graph=number, arguments=arguments, place=place))
            wrapped.add(node.name)
        elif kind == _TRITON:
            ops.append(_triton_op(graph, node, after, number))
            wrapped.add(node.name)
    return ops + _aten_ops(graph, before, wrapped, number)


def _wrapped_arguments(
    graph: GraphCapture, node: fx.Node, call: fx.Node | None, kind: str
) -> list[Argument]:
    """The mutated arguments of an auto_functionalized node, by the names of the op's schema."""
    overload: Any = node.args[0]
    decisions = {d.argument: d for d in graph.decisions if d.node == node.name}
    arguments = []
    for parameter in overload._schema.arguments:
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        name = parameter.name
        passed = _argument_of(call, overload, name)
        if kind == "auto_functionalized":
            keys: list[Any] = [name]
            labels, tensors = [name], [passed]
        elif f"_{name}_length" in node.kwargs:
            length: Any = node.kwargs[f"_{name}_length"] or 0
            keys = [node.kwargs[f"_{name}_{i}_base_index"] for i in range(length)]
            labels = [f"{name}[{i}]" for i in range(length)]
            tensors = list(passed) if isinstance(passed, (list, tuple)) else [None] * length
        else:
            keys = [node.kwargs.get(f"_{name}_base_index")]
            labels, tensors = [name], [passed]
        for key, label, tensor in zip(keys, labels, tensors, strict=True):
            if key is not None and key in decisions:
                arguments.append(_argument(graph, label, decisions[key], call, tensor))
    return arguments


def _argument_of(call: fx.Node | None, overload: Any, name: str) -> Any:
    if call is None:
        return None
    if name in call.kwargs:
        return call.kwargs[name]
    position = [a.name for a in overload._schema.arguments].index(name)
    return call.args[position] if position < len(call.args) else None


def _argument(
    graph: GraphCapture, label: str, decision: Decision, call: fx.Node | None, passed: Any
) -> Argument:
    source = graph.input_of(decision.tensors[0]) if decision.tensors else None
    merged = [i.name for i in graph.inputs if i.merged and i.aot in decision.tensors]
    name = source.name if source is not None else " + ".join(merged) or None
    tensor = passed if isinstance(passed, fx.Node) else None
    argument = Argument(
        name=label,
        input=name,
        outcome="reinplaced" if decision.reinplaced else "cloned",
        cause=decision.cause,
        why=_why(graph, decision),
        decided_at=str(decision.place) if decision.place is not None else None,
    )
    if not decision.reinplaced:
        argument.clone = _clone(graph, tensor, source)
        known = _ADVICE if name is not None else _INTERMEDIATE_ADVICE
        argument.advice = known.get(decision.cause)
        if argument.clone is not None and argument.clone.reads_outside:
            argument.advice = (argument.advice or "do not compile it") + _OUTSIDE_ADVICE
    _compare_view(graph, argument, call, tensor)
    if argument.misled and argument.advice is None:
        argument.advice = _SEPARATE + "; until then static shapes, if they are clean"
    return argument


def _why(graph: GraphCapture, decision: Decision) -> str:
    """Put the decision of the pass in words, with the caller's names for the tensors."""

    def named(node: str) -> str:
        tensor = graph.input_of(node)
        return tensor.name if tensor is not None else node

    detail = [named(name) for name in decision.detail]
    own = ", ".join(named(name) for name in decision.tensors)
    if decision.cause == "same storage already reinplaced":
        inputs = [graph.input_of(n) for n in (*decision.tensors, *decision.detail)]
        known = [i for i in inputs if i is not None]
        lie = overlap(known) if len(known) == len(inputs) else None
        fact = {True: ", and they overlap", False: ", although they do not overlap", None: ""}[lie]
        return (
            f"{own} lies in the same storage as {', '.join(detail)}, which was reinplaced first; "
            f"the pass does not try a second argument of one storage{fact}."
        )
    sentences = {
        "reinplaced": "No one needs the old value after the op.",
        "same tensor twice": f"{own} is passed twice, and was reinplaced the first time.",
        "list shares storage": f"The list {own} has elements in one storage; none is reinplaced.",
        "no copy-back": (
            f"Nothing copies the new value back into the graph input {own}, so the input itself "
            "must keep the old one."
        ),
        "view of an input": f"{own} is a view of the graph input {', '.join(detail)}.",
        "no storage": f"{own} has no storage that the pass knows.",
    }
    if decision.cause == "used later" and len(detail) == 2:
        return f"The old value is used after the op, by {detail[0]} (through {detail[1]})."
    return sentences.get(decision.cause, "The pass refused; the lens did not see why.")


def _clone(graph: GraphCapture, passed: fx.Node | None, source: Input | None) -> Clone | None:
    """Find the clone behind the tensor that the op is handed, and the kernel that makes it."""
    made = _cloned(graph, root_of(passed)) if passed is not None else None
    if made is None:
        return None
    clone = Clone(
        elements=made.elements,
        bytes=made.elements * made.itemsize,
        bytes_per_element=made.itemsize,
    )
    if source is None:
        _extent_in_buffer(graph, clone, made)
        return clone
    clone.argument_elements = source.span
    clone.storage_first = -source.offset
    clone.storage_last = source.storage - source.offset - 1
    if made.read is not None and made.writes is not None and made.source is source:
        clone.first, clone.last = made.read.first, made.read.last
        copied = graph.generated and graph.generated.copies(made.read.buffer, made.writes)
        if copied:
            call, loads = copied
            clone.kernel = [call.text, *loads]
    return clone


def _extent_in_buffer(graph: GraphCapture, clone: Clone, made: ClonedTensor) -> None:
    """What the clone of an intermediate reads, if one loop alone fills the buffer that it reads."""
    read = made.read
    filled = [k for k in graph.kernels if read is not None and k.into == read.buffer]
    if read is not None and len(filled) == 1 and filled[0].written is not None:
        clone.first, clone.last = read.first, read.last
        clone.storage_first, clone.storage_last = 0, filled[0].written - 1


def _cloned(graph: GraphCapture, node: fx.Node) -> ClonedTensor | None:
    return next((c for c in clones_of(graph) if c.node == node.name), None)


def _compare_view(
    graph: GraphCapture, argument: Argument, call: fx.Node | None, tensor: fx.Node | None
) -> None:
    """Hold the view that the generated code hands the op against the one in the graph."""
    after = graph.post_grad_after_decomposition
    if call is None or tensor is None or after is None or not graph.passed_views:
        return
    handed = [
        n
        for n in pytree.tree_leaves((call.args, call.kwargs))
        if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    order = list(after.find_nodes(op="call_function", target=call.target)).index(call)
    views = [v for v in graph.passed_views if v.op == target_name(call.target)]
    views = [v for v in views if v.order == order]
    if len(views) != len(handed) or tensor not in handed:
        return
    view = views[handed.index(tensor)]
    root = root_of(tensor)
    kernels = [k for k in graph.kernels if k.writes == view.buffer and root.name in k.origins]
    if root.name != view.buffer and not kernels:
        return  # the code hands over a buffer that the graph does not name
    whole = graph.number(root.meta["val"].numel())
    if any(k.written is not None and k.written < whole for k in kernels):
        return  # Inductor made a buffer of the view itself: it begins where the view begins
    start = graph.number(tensor.meta["val"].storage_offset())
    base = graph.number(root.meta["val"].storage_offset())
    argument.graph_offset, argument.passed_offset = start - base, view.offset
    source = graph.input_of(root.name)
    place = (source.offset if source is not None else 0) + view.offset
    argument.shift = view.offset - argument.graph_offset
    if kernels and (copied := _copied_input(graph, root)) is not None:
        # Element 0 of the clone is what its kernel read first, which need not be what it should.
        source, begin = copied
        place = source.offset + kernels[0].reads[0].first + view.offset
        argument.shift = place - begin - argument.graph_offset
    if source is None or not argument.shift:
        return
    same = [i for i in graph.inputs if i.storage_id == source.storage_id]
    there = [i.name for i in same if i.offset == place]
    if not 0 <= place < source.storage:
        argument.sees = "outside the storage"
    elif there:
        argument.sees = f"which is where {there[0]} begins"


def _copied_input(graph: GraphCapture, clone: fx.Node) -> tuple[Input, int] | None:
    """The input whose storage a clone copies, and the element of the storage it should begin at."""
    strided = clone.args[0] if target_name(clone.target) == "aten.clone.default" else None
    if not isinstance(strided, fx.Node) or target_name(strided.target) != "aten.as_strided.default":
        return None
    source = graph.input_of(str(strided.args[0]))
    if source is None or len(strided.args) < 4:
        return None
    offset = strided.args[3]
    return source, graph.number(offset.meta["val"] if isinstance(offset, fx.Node) else offset)


def _triton_op(graph: GraphCapture, node: fx.Node, after: fx.Graph, number: int) -> Op:
    """A user-defined Triton kernel: its mutated tensors are those that the pass was asked about."""
    tensors: Any = node.kwargs["kwargs"]
    calls = [n for n in after.nodes if target_name(n.target) == "triton_kernel_wrapper_mutation"]
    same = [n for n in calls if n.kwargs["kernel_idx"] == node.kwargs["kernel_idx"]]
    arguments = []
    for decision in graph.decisions:
        if decision.node == node.name:
            passed = same[0].kwargs["kwargs"].get(decision.argument) if same else None  # type: ignore[union-attr]
            label = str(decision.argument)
            arguments.append(_argument(graph, label, decision, None, passed))
    name = f"{_kernel_name(node.kwargs['kernel_idx'])}({', '.join(tensors)})"
    return Op(name=name, kind=_TRITON, graph=number, arguments=arguments, place=place_of(node))


def _kernel_name(index: Any) -> str:
    if not pytorch.KERNEL_TABLE.present:
        return f"Triton kernel {index}"
    kernel: Any = pytorch.KERNEL_TABLE.get().get_kernel(index)
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):  # an autotuner around it
        kernel = kernel.fn
    return getattr(kernel, "__name__", f"Triton kernel {index}")


def _aten_ops(graph: GraphCapture, before: fx.Graph, wrapped: set[str], number: int) -> list[Op]:
    """ATen ops that mutate an input: what the epilogue's ``copy_`` stores into a placeholder."""
    ops = []
    for node in before.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target, value = node.args[0], node.args[1]
        if target.op != "placeholder" or not isinstance(value, fx.Node):
            continue
        made = root_of(value)
        if made.target is not None and target_name(made.target) == "getitem":
            made = made.args[0]  # type: ignore[assignment]
        if made.name in wrapped:
            continue
        name = graph.name_of(target.name)
        decision = next((d for d in graph.decisions if d.node == made.name), None)
        argument = Argument(
            name=name,
            input=name if name != target.name else None,
            outcome="written back",
            cause="computed anew",
            why="The new value is computed and stored into the input; the input is not copied.",
        )
        if decision is not None:
            argument.outcome = "reinplaced" if decision.reinplaced else "cloned"
            argument.cause, argument.why = decision.cause, _why(graph, decision)
            argument.decided_at = str(decision.place)
            if not decision.reinplaced:
                value_of = target.meta["val"]
                elements = graph.number(value_of.numel())
                size = value_of.element_size()
                argument.clone = Clone(
                    elements=elements, bytes=elements * size, bytes_per_element=size
                )
                argument.advice = _ATEN_ADVICE.get(decision.cause)
        name, place = target_name(made.target), place_of(made) or place_of(node)
        ops.append(Op(name=name, kind="ATen", graph=number, arguments=[argument], place=place))
    return ops


def place_of(node: fx.Node) -> str | None:
    """Where the caller's program calls what a node stands for, as ``file:line``.

    That is the innermost frame outside installed packages, or the innermost one if all are inside.
    """
    frames = re.findall(r'File "([^<"][^"]*)", line (\d+)', node.stack_trace or "")
    own = [frame for frame in frames if not _INSTALLED.intersection(Path(frame[0]).parts)]
    return ":".join((own or frames)[-1]) if frames else None


def summary_of(graph: GraphCapture) -> dict[str, dict[str, Any]]:
    """What matters of each mutated argument of a graph, in plain types, for a table or a verdict.

    ``reads`` are the first and last element that the clone's kernel reads, counted from the
    argument's pointer; ``outside`` how many of them lie outside the storage; ``op is off by`` how
    many elements what it is handed lies away from its own.
    """
    rows: dict[str, dict[str, Any]] = {}
    for op in ops_of(graph):
        for argument in op.arguments:
            row: dict[str, Any] = {"outcome": argument.outcome, "cause": argument.cause}
            clone = argument.clone
            if clone is not None:
                row["elements cloned"] = clone.elements
                row["elements of its own"] = clone.argument_elements
                row["reads"] = [clone.first, clone.last]
                row["outside"] = (clone.outside_before or 0) + (clone.outside_after or 0)
            row["op is off by"] = argument.shift
            rows[argument.name] = row
    return rows


def aliases_of(graph: GraphCapture) -> list[Alias]:
    """The groups of inputs that share a storage."""
    groups: dict[int, list[Input]] = {}
    for tensor in graph.inputs:
        groups.setdefault(tensor.storage_id, []).append(tensor)
    return [
        Alias(
            inputs=[i.name for i in group],
            overlap=overlap(group),
            merged=all(i.merged for i in group),
        )
        for group in groups.values()
        if len(group) > 1
    ]
