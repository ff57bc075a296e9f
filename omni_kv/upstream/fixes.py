"""The lines of torch that each candidate fix changes, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Lines of one module of torch, and what stands in their place after the fix.

    Attributes:
        module: the module's dotted name.
        old: whole lines, as they stand exactly once in its source file.
        new: the lines that replace them.
    """

    module: str
    old: str
    new: str


#: A fix by name: one tuple of changes for each form that the lines have had. The first form whose
#: lines are all there is the one that is used.
FIXES: dict[str, tuple[tuple[Change, ...], ...]] = {}

_REINPLACE = "torch._inductor.fx_passes.reinplace"
_LOWERING = "torch._inductor.lowering"
_CODECACHE = "torch._inductor.codecache"
_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"
_PROXIES = "torch.fx.experimental.proxy_tensor"


FIXES["overlap-check"] = (
    (
        Change(
            _REINPLACE,
            """\
        storage_of_reinplaced_args = OrderedSet[int | None]()
""",
            """\
        reinplaced_args: list[torch.fx.Node] = []
""",
        ),
        Change(
            _REINPLACE,
            """\
        # TODO this logic can be made more precise using _overlap
        def tensor_with_same_storage_already_reinplaced(arg):
            if isinstance(arg, (list, tuple)):
                return any(
                    get_node_storage(a) in storage_of_reinplaced_args for a in arg
                )
            return get_node_storage(mutated_arg) in storage_of_reinplaced_args
""",
            """\
        def ends_before(a, b):
            # Known from the expressions alone: asking for it adds no guard.
            from torch.fx.experimental.symbolic_shapes import statically_known_true

            reach = sum((n - 1) * s for n, s in zip(a.shape, a.stride()))
            return statically_known_true(a.storage_offset() + reach < b.storage_offset())

        def overlaps(a, b):
            if get_node_storage(a) != get_node_storage(b):
                return False
            tensors = a, b = [a.meta["val"], b.meta["val"]]
            if ends_before(a, b) or ends_before(b, a):
                return False
            try:
                return len(compute_overlapping_tensors(tensors)) != 0
            except GuardOnDataDependentSymNode:
                # Whether they overlap depends on data: assume that they do.
                return True

        def overlaps_reinplaced_arg(arg):
            args = arg if isinstance(arg, (list, tuple)) else [arg]
            return any(overlaps(a, b) for a in args for b in reinplaced_args)
""",
        ),
        Change(
            _REINPLACE,
            """\
            should_attempt_reinplace = not tensor_with_same_storage_already_reinplaced(
                mutated_arg
            )
""",
            """\
            should_attempt_reinplace = not overlaps_reinplaced_arg(mutated_arg)
""",
        ),
        Change(
            _REINPLACE,
            """\
                if isinstance(mutated_arg, (list, tuple)):
                    for a in mutated_arg:
                        storage_of_reinplaced_args.add(get_node_storage(a))
                else:
                    storage_of_reinplaced_args.add(get_node_storage(mutated_arg))
""",
            """\
                if isinstance(mutated_arg, (list, tuple)):
                    reinplaced_args.extend(mutated_arg)
                else:
                    reinplaced_args.append(mutated_arg)
""",
        ),
    ),
)


_AS_STRIDED_FROM_STORAGE = Change(
    _LOWERING,
    """\
@register_lowering(aten.as_strided, type_promotion_kind=None)
def as_strided(x, size, stride, storage_offset=None):
""",
    """\
def _graph_input_storage_offset(name):
    for node in V.graph.graph.nodes:
        if node.op == "placeholder" and V.graph.qualify_name(node.target) == name:
            offset = node.meta["val"].storage_offset()
            return offset.node.expr if isinstance(offset, torch.SymInt) else offset
    return 0


@register_lowering(aten.as_strided, type_promotion_kind=None)
def as_strided_from_storage(x, size, stride, storage_offset=None):
    # The pointer of a graph input includes its storage offset; an explicit offset
    # counts from the start of the storage.
    base = x.data.unwrap_view() if isinstance(x.data, ir.BaseView) else x.data
    base = base.data if isinstance(base, ir.StorageBox) else base
    if storage_offset is not None and isinstance(base, ir.InputBuffer):
        input_offset = _graph_input_storage_offset(base.get_name())
        storage_offset = sympy.sympify(storage_offset) - input_offset
    return as_strided(x, size, stride, storage_offset)


def as_strided(x, size, stride, storage_offset=None):
""",
)
FIXES["input-storage-offset"] = ((_AS_STRIDED_FROM_STORAGE,),)


_SYM_STORAGE_OFFSET = Change(
    _LOWERING,
    """\
@register_lowering(aten.sym_numel)
def sym_numel(a):
""",
    """\
@register_lowering(aten.sym_storage_offset)
def sym_storage_offset(a):
    val = V.graph.current_node.meta["val"]
    if isinstance(val, torch.SymInt):
        return val.node.expr
    else:
        return int(val)


@register_lowering(aten.sym_numel)
def sym_numel(a):
""",
)
_COUNTS_FROM_STORAGE = (
    "            - V.graph.graph_input_storage_offsets.get(storage_data.get_name(), 0)\n"
)
FIXES["view-storage-offset"] = (
    (_AS_STRIDED_FROM_STORAGE, _SYM_STORAGE_OFFSET),
    (Change(_LOWERING, _COUNTS_FROM_STORAGE, _COUNTS_FROM_STORAGE), _SYM_STORAGE_OFFSET),
)


FIXES["aliasing-in-cache-key"] = (
    (
        Change(
            _CODECACHE,
            """\
class FxGraphHashDetails:
""",
            """\
def input_aliasing(
    example_inputs: Sequence[InputType],
) -> list[tuple[int, Any] | None]:
    \"\"\"
    For each input that is a view: the number of the first input on the same storage,
    and the storage offset. The generated code depends on both.
    \"\"\"
    tensors = [
        (number, value)
        for number, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor) and torch._C._has_storage(value)
    ]
    first: dict[int, int] = {}
    inputs_on: dict[int, int] = {}
    for number, value in tensors:
        storage = value.untyped_storage()._cdata
        first.setdefault(storage, number)
        inputs_on[storage] = inputs_on.get(storage, 0) + 1
    result: list[tuple[int, Any] | None] = [None] * len(example_inputs)
    for number, value in tensors:
        storage, offset = value.untyped_storage()._cdata, value.storage_offset()
        if inputs_on[storage] > 1 or not (isinstance(offset, int) and offset == 0):
            result[number] = (first[storage], offset)
    return result


class FxGraphHashDetails:
""",
        ),
        Change(
            _CODECACHE,
            """\
        self.cache_key_tag = cconfig.cache_key_tag
""",
            """\
        self.input_aliasing = input_aliasing(example_inputs)
        self.cache_key_tag = cconfig.cache_key_tag
""",
        ),
    ),
)


_EXPLICIT_SIZES = Change(
    _WRAPPERS,
    """\
            synthetic_base.set_(example_alias.untyped_storage())
""",
    """\
            # With explicit sizes, since the storage's size may be symbolic.
            storage = example_alias.untyped_storage()
            numel = storage.nbytes() // example_alias.element_size()
            synthetic_base.set_(storage, 0, (numel,), (1,))
""",
)
_NO_VALUE_FROM_ITSELF = Change(
    _PROXIES,
    """\
    if isinstance(out, py_sym_types):
        p_out_thunk = thunkify(
""",
    """\
    # The value of an argument, as in 0 + s, is no new one. Values are also found by
    # their expression: s would then be computed from itself.
    is_arg = any(
        isinstance(arg, py_sym_types) and arg.node.expr == out.node.expr for arg in args
    )
    if isinstance(out, py_sym_types) and not is_arg:
        p_out_thunk = thunkify(
""",
)
_PRODUCTS = "    # sympy Mul and Add are n-ary, but the handlers they map to (operator.mul,\n"
FIXES["symbolic-synthetic-base"] = (
    # What is not recorded is built from its expression, which may be a product of three.
    (_EXPLICIT_SIZES, _NO_VALUE_FROM_ITSELF, Change(_PROXIES, _PRODUCTS, _PRODUCTS)),
    (_EXPLICIT_SIZES,),
)
