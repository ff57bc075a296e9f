"""Random programs over views, in-place ATen ops and custom ops, each from a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

#: Expressions that make 2-D arguments out of a storage of ``(2 * rows, columns)``, by layout.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "whole": ("s",),
    "halves": ("s[:{rows}]", "s[{rows}:]"),
    "halves, second first": ("s[{rows}:]", "s[:{rows}]"),
    "halves with a gap": ("s[: {rows} - 1]", "s[{rows} + 1 :]"),
    "interleaved": ("s[::2]", "s[1::2]"),
    "columns": ("s[:, :2]", "s[:, 2:]"),
    "three parts": ("s[:2]", "s[2:4]", "s[4:]"),
    "overlapping": ("s[: {rows} + 1]", "s[{rows} - 1 :]"),
    "separate": ("s[:{rows}].clone()", "s[{rows}:].clone()"),
}
#: How a view is taken of a 2-D tensor in the program.
VIEWS = ("{v}[1:]", "{v}[:2]", "{v}[::2]", "{v}[:, 1:]", "{v}.t()", "{v}.view_as({v})", "{v}[-2:]")
#: In-place statements; ``{x}`` has as many rows and columns as it takes, see ``like``.
WRITES = (
    "{v}.add_(like(x, {v}))",
    "{v}.mul_(1.5)",
    "{v}.copy_(like(x, {v}) * 2)",
    "{v}[:2] = like(x, {v}[:2])",
    "{v}[idx(x, {v})] = like(x, {v})[:2]",
    "{v}.index_copy_(0, idx(x, {v}), like(x, {v})[:2])",
    "{v}.zero_()",
)


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        seed: that it was made from.
        layouts: how its arguments lie, one for each storage.
        source: a module with ``make_case``, which returns the function and its arguments.
    """

    seed: int
    layouts: tuple[str, ...]
    source: str

    @property
    def module(self) -> str:
        """Name of the module that it is written to."""
        return f"fuzz_{self.seed}"


@dataclass
class _Writer:
    rng: random.Random
    tensors: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def new(self, expression: str, names: list[str]) -> None:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        names.append(name)

    def statement(self) -> None:
        pick = self.rng.choice
        kind = self.rng.choices(("view", "write", "op", "read"), (3, 3, 4, 2))[0]
        if kind == "view":
            self.new(pick(VIEWS).format(v=pick(self.tensors)), self.tensors)
        elif kind == "write":
            self.lines.append(pick(WRITES).format(v=pick(self.tensors)))
        elif kind == "op":
            count = self.rng.randint(1, 3)
            mutated = [pick(self.tensors) for _ in range(count)]
            self.new(f"ops.write{count}(x * 1.5, {', '.join(mutated)})", self.results)
        else:
            self.new(f"{pick(self.tensors)}.sum(0) * 2", self.results)


def program(seed: int, statements: int = 5) -> Program:
    """Make the program of a seed.

    Args:
        seed: decides everything.
        statements: the largest number of statements.
    """
    rng = random.Random(seed)
    rows, columns = rng.choice((3, 4, 6)), 4
    layouts = tuple(rng.choice(list(LAYOUTS)) for _ in range(rng.randint(1, 2)))
    writer = _Writer(rng)
    make, names = [], []
    for number, layout in enumerate(layouts):
        make.append(f"    s = torch.randn({2 * rows}, {columns}, generator=g)")
        for expression in LAYOUTS[layout]:
            names.append(f"a{len(names)}")
            make.append(f"    {names[-1]} = {expression.format(rows=rows)}  # storage {number}")
    writer.tensors = list(names)
    for _ in range(rng.randint(2, statements)):
        writer.statement()
    body = "\n".join(f"    {line}" for line in writer.lines)
    given = ", ".join(names)
    returned = ", ".join([*writer.results, "x + 1"])
    source = f'''"""Random program {seed}: {", ".join(layouts)}."""

import torch
import fuzz_ops as ops


def like(x, v):
    return x[0, 0] * torch.ones_like(v) + torch.arange(v.shape[1])


def idx(x, v):
    return torch.arange(2) % v.shape[0]


def fn(x, {given}):
{body}
    return {returned}


def make_case():
    g = torch.Generator().manual_seed({seed})
    x = torch.randn({rows}, {columns}, generator=g)
{chr(10).join(make)}
    return fn, (x, {given})
'''
    return Program(seed, layouts, source)
