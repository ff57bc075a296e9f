"""What an audit found, as records that print as text, show as HTML in Jupyter and save as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, computed_field

#: The version of the report as JSON: the same as long as fields are only added.
VERSION = 1

Verdict = Literal["clean", "findings", "could not run"]
Result = Literal["same", "differs", "crashed", "raised", "killed", "timed out", "not run"]
#: The kinds of findings: the rules of ``formats.RULES`` say what each means.
Kind = Literal[
    "argument-cloned",
    "clone-reads-outside",
    "wrong-elements",
    "input-rewritten",
    "compiled-differs",
    "compiled-crashed",
    "compiled-raises",
    "does-not-compile",
    "could-not-compare",
    "undeclared-write",
]


class Clone(BaseModel):
    """A copy that the compiled code makes of a mutated argument, on every call.

    ``first`` and ``last`` say which elements the kernel reads, counted from the argument's own
    pointer; None if code was not generated or the kernel was not found in it. The storage around
    the argument spans ``storage_first`` to ``storage_last``.
    """

    elements: int
    bytes: int
    bytes_per_element: int
    argument_elements: int | None = None
    storage_first: int | None = None
    storage_last: int | None = None
    first: int | None = None
    last: int | None = None
    kernel: list[str] = Field(default_factory=list)

    @property
    def outside_before(self) -> int | None:
        """Elements read in front of the storage."""
        if self.first is None or self.storage_first is None or self.last is None:
            return None
        return max(0, min(self.storage_first, self.last + 1) - self.first)

    @property
    def outside_after(self) -> int | None:
        """Elements read behind the storage."""
        if self.first is None or self.storage_last is None or self.last is None:
            return None
        return max(0, self.last - max(self.storage_last, self.first - 1))

    @property
    def reads_outside(self) -> bool | None:
        """Whether the kernel reads outside the argument's storage; None if it is not known."""
        if self.outside_before is None or self.outside_after is None:
            return None
        return self.outside_before + self.outside_after > 0

    def extent(self) -> str:
        """Say in one sentence what the clone reads."""
        size = f"{self.elements:,} elements, {self.bytes:,} bytes a call"
        if self.argument_elements is not None:
            size += f"; the argument itself has {self.argument_elements:,}"
        if self.first is None or self.last is None:
            return size
        text = f"{size}; reads elements {self.first:,} to {self.last:,} from its pointer"
        if self.storage_first is None:
            return text
        text += f", its storage holds {self.storage_first:,} to {self.storage_last:,}"
        sides = [(self.outside_before, "in front of"), (self.outside_after, "behind")]
        outside = [
            f"{n:,} elements ({n * self.bytes_per_element:,} bytes) {side} the storage"
            for n, side in sides
            if n
        ]
        return text + (": READS OUTSIDE, " + " and ".join(outside) if outside else ": inside")


class Argument(BaseModel):
    """One mutated argument of one op.

    ``outcome`` is ``reinplaced`` (written in place), ``cloned`` (a copy is written) or
    ``written back`` (an ATen result is stored into the input, without a copy of the input).
    ``passed_offset`` is where the generated code lets the op's view begin, ``graph_offset`` where
    the graph says; both count elements from the buffer's pointer. ``shift`` is by how many elements
    what the op is handed lies off: it counts in where the clone began to read, so that two errors
    may cancel. ``sees`` says what lies there. They are None if not compared.
    """

    name: str
    input: str | None
    outcome: Literal["reinplaced", "cloned", "written back"]
    cause: str
    why: str
    decided_at: str | None = None
    clone: Clone | None = None
    passed_offset: int | None = None
    graph_offset: int | None = None
    shift: int | None = None
    sees: str | None = None
    advice: str | None = None

    @property
    def misled(self) -> bool:
        """Whether the generated code hands the op other elements than the argument's."""
        return bool(self.shift)

    def shifted(self) -> str:
        """Say where the elements lie that the op is handed."""
        side = "behind" if (self.shift or 0) > 0 else "in front of"
        text = f"the op is handed elements that lie {abs(self.shift or 0):,} {side} its own"
        return text + (f", {self.sees}" if self.sees else "")


class Op(BaseModel):
    """One call of a mutable op in a compiled graph.

    ``place`` is the caller's line that calls it, as ``file:line``; None where it is not known.
    """

    name: str
    kind: str
    graph: int
    arguments: list[Argument]
    place: str | None = None


class Alias(BaseModel):
    """Inputs that share a storage; ``overlap`` is None where it was not decided."""

    inputs: list[str]
    overlap: bool | None
    merged: bool


class Difference(BaseModel):
    """Where a compiled call and an eager call on equal inputs disagree."""

    tensor: str
    elements: int
    of: int
    first: list[int]
    equal_to: dict[str, int] = Field(default_factory=dict)
    largest: float | None = None

    def __str__(self) -> str:
        text = f"{self.tensor}: {self.elements:,} of {self.of:,} elements differ, the first at "
        text += str(self.first)
        if self.largest is not None:
            text += f", by up to {self.largest:.3g}"
        for origin, count in self.equal_to.items():
            text += f"; {count:,} of them equal {origin}"
        return text


class Run(BaseModel):
    """One compiled call in memory whose surroundings are known."""

    memory: str
    result: Result
    how: str = ""
    differences: list[Difference] = Field(default_factory=list)


class Comparison(BaseModel):
    """Compiled against eager, for one way to compile, in each kind of memory.

    ``changed`` names what the eager call changed. ``eager_works`` says that eager returns where
    compiled raises. ``note`` says what could not be told.
    """

    label: str
    result: Result
    how: str = ""
    eager_works: bool = False
    changed: list[str] = Field(default_factory=list)
    note: str = ""
    runs: list[Run] = Field(default_factory=list)


class Rewritten(BaseModel):
    """A mutated input that one call reads and writes more of than it changes.

    ``cause`` is ``clone by the pass``, ``scatter chain through views`` or ``copy back of a computed
    value``; the bytes are those of the input and of buffers made from it.
    """

    input: str
    cause: str
    reads: int
    writes: int
    changes: int

    def __str__(self) -> str:
        return (
            f"{self.input} is rewritten: reads {self.reads:,} bytes and writes {self.writes:,} to "
            f"change {self.changes:,} ({self.cause})"
        )


class Shapes(BaseModel):
    """What the compiler did with one setting of ``dynamic=``.

    ``problem`` says why it does not compile. ``instrument`` says what the lens could not look at:
    a failure of the instrument and none of the callable. ``loops_write_inputs`` says whether loops
    of the generated code write into the caller's tensors; None if it is not known.
    """

    label: str
    graphs: int = 0
    graph_break: str | None = None
    problem: str | None = None
    instrument: str | None = None
    loops_write_inputs: bool | None = None
    rewritten: list[Rewritten] = Field(default_factory=list)
    seconds: float = 0.0
    ops: list[Op] = Field(default_factory=list)
    aliases: list[Alias] = Field(default_factory=list)


class Finding(BaseModel):
    """One finding: its kind, one sentence, and where it belongs.

    ``label`` is that of the shapes or of the comparison, None for what holds of the whole call.
    ``place`` is a line of the caller's program, as ``file:line``; ``bytes`` are those that are
    copied a call. Each is None where it is not known or makes no sense.
    """

    kind: Kind
    message: str
    label: str | None = None
    op: str | None = None
    argument: str | None = None
    bytes: int | None = None
    place: str | None = None
    advice: str | None = None


class AuditReport(BaseModel):
    """The outcome of ``omni_kv.audit``.

    ``found`` holds the findings, the worst first; ``findings`` are their sentences. ``place`` is
    where the callable begins, as ``file:line``. ``left_quiet`` counts the copies of less than
    ``min_bytes`` bytes a call, which are no findings.
    """

    version: int = VERSION
    callable: str
    torch: str
    device: str
    verdict: Verdict
    sentence: str
    place: str | None = None
    found: list[Finding] = Field(default_factory=list)
    min_bytes: int = 0
    left_quiet: int = 0
    shapes: list[Shapes] = Field(default_factory=list)
    comparisons: list[Comparison] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def clones(self) -> list[Argument]:
        """Every cloned argument, in the order of shapes, graphs and ops."""
        arguments = [a for s in self.shapes for op in s.ops for a in op.arguments]
        return [a for a in arguments if a.outcome == "cloned"]

    @property
    def reads_outside(self) -> bool:
        """Whether any clone reads outside the storage of its argument."""
        return any(a.clone is not None and a.clone.reads_outside for a in self.clones)

    def comparison(self, label: str) -> Comparison:
        """The comparison with this label.

        Raises:
            KeyError: if none was made.
        """
        for comparison in self.comparisons:
            if comparison.label == label:
                return comparison
        raise KeyError(label)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def findings(self) -> list[str]:
        """The sentences of what was found, the worst first."""
        return [finding.message for finding in self.found]

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        word = "" if self.verdict == "findings" else f"{self.verdict}. "
        return f"audit of {self.callable}: {word}{self.sentence}"

    def text(self, *, verbose: bool = False) -> str:
        """The headline, the findings and what was not told; all of the rest if ``verbose``."""
        from omni_kv.audits.show import text

        return text(self, verbose=verbose)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from omni_kv.audits.show import page

        return page(self)
