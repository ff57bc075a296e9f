"""The code that Inductor generated, parsed once: its kernels, and the calls that it makes.

Generated code is a Python module with the kernels as strings. What is not understood is left out;
nothing here raises.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Passed:
    """One argument of a call: its text, and the buffer that it is (``offset`` elements into it).

    ``offset`` is the text of an expression; it may hold symbols.
    """

    text: str
    buffer: str | None = None
    offset: str = "0"


@dataclass(frozen=True)
class Call:
    """One call in the generated code.

    Attributes:
        target: what is called, without a kernel's ``.run``.
        text: the statement.
        result: the name that it is assigned to; None if there is none.
        arguments: what is passed by position.
    """

    target: str
    text: str
    result: str | None
    arguments: tuple[Passed, ...]

    @property
    def buffers(self) -> tuple[str | None, ...]:
        """The buffer behind each argument; None for what is none."""
        return tuple(argument.buffer for argument in self.arguments)


@dataclass(frozen=True)
class KernelSource:
    """The source of one kernel, in C++ or as a Triton function, and its parameters' names."""

    name: str
    lines: tuple[str, ...]
    parameters: tuple[str, ...]

    def loads(self, parameter: str) -> list[str]:
        """The lines that load from a parameter."""
        pattern = re.compile(rf"\b{re.escape(parameter)}( \+|\[)")
        return [line.strip() for line in self.lines if pattern.search(line)]


@dataclass(frozen=True)
class Generated:
    """The generated code of one graph."""

    kernels: dict[str, KernelSource]
    calls: tuple[Call, ...]

    def copies(self, reads: str, writes: str) -> tuple[Call, list[str]] | None:
        """The call of a kernel on two buffers, and the lines that load from the first of them."""
        for call in self.calls:
            kernel = self.kernels.get(call.target)
            if kernel is None or reads not in call.buffers or writes not in call.buffers:
                continue
            position = call.buffers.index(reads)
            if position < len(kernel.parameters):
                return call, kernel.loads(kernel.parameters[position])
        return None


def parse(code: str | None) -> Generated | None:
    """Read generated code; None if there is none, or if it is no Python."""
    try:
        tree = ast.parse(code or "")
    except (SyntaxError, ValueError):
        return None
    if not code:
        return None
    kernels = {}
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name, source = line.targets[0].id, _source(line.value)
            if source is not None:
                kernels[name] = KernelSource(name, tuple(source.splitlines()), _parameters(source))
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            statements = [n for n in ast.walk(node) if isinstance(n, (ast.Expr, ast.Assign))]
            for statement in sorted(statements, key=lambda n: (n.lineno, n.col_offset)):
                call = _call(statement, code)
                if call is not None:
                    calls.append(call)
    return Generated(kernels, tuple(calls))


def _source(value: ast.expr) -> str | None:
    """The kernel in ``async_compile.cpp_pybinding([...], '''...''')`` and the like."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).startswith("async_compile.")):
        return None
    texts = [a.value for a in value.args if isinstance(a, ast.Constant)]
    return next((t for t in texts if isinstance(t, str) and "\n" in t), None)


def _parameters(source: str) -> tuple[str, ...]:
    """Names of a kernel's parameters, in the order of the arguments that it is called with."""
    signature = re.search(r"(?:void\s+kernel|def triton_\w+)\(([^)]*)\)", source)
    parts = signature[1].split(",") if signature is not None else []
    return tuple(re.split(r"[\s*]+", part.split(":")[0].strip())[-1] for part in parts)


def _call(statement: ast.Expr | ast.Assign, code: str) -> Call | None:
    value = statement.value
    if not isinstance(value, ast.Call):
        return None
    first = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return Call(
        target=ast.unparse(value.func).removesuffix(".run"),
        text=ast.get_source_segment(code, statement) or ast.unparse(statement),
        result=first.id if isinstance(first, ast.Name) else None,
        arguments=tuple(_passed(argument) for argument in value.args),
    )


def _passed(argument: ast.expr) -> Passed:
    text = ast.unparse(argument)
    if isinstance(argument, ast.Name):
        return Passed(text, argument.id)
    if isinstance(argument, ast.Call) and ast.unparse(argument.func) == "reinterpret_tensor":
        view = argument.args
        if len(view) > 3 and isinstance(view[0], ast.Name):
            return Passed(text, view[0].id, ast.unparse(view[3]))
    return Passed(text)
