"""The kinds of findings: how bad each is, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from omni_kv.audits.report import Kind


@dataclass(frozen=True)
class Rule:
    """``error``: results may be wrong, or the call fails. ``warning``: it costs, or is not told."""

    level: Literal["error", "warning"]
    text: str


RULES: dict[Kind, Rule] = {
    "wrong-elements": Rule("error", "The compiled code hands an op other elements than its own."),
    "clone-reads-outside": Rule("error", "A copy of a mutated argument reads beyond its storage."),
    "compiled-crashed": Rule("error", "The compiled call crashes where eager returns."),
    "compiled-differs": Rule("error", "Compiled and eager disagree on equal inputs."),
    "compiled-raises": Rule("error", "The compiled call raises where eager works."),
    "undeclared-write": Rule("error", "An input changes though no op says that it writes there."),
    "does-not-compile": Rule("warning", "It compiles with one setting of dynamic= and not all."),
    "could-not-compare": Rule("warning", "Compiled and eager were not compared in one setting."),
    "input-rewritten": Rule("warning", "Far more of an input is read and written than changes."),
    "argument-cloned": Rule("warning", "A mutated argument is copied on every call."),
}

#: The kinds, the worst first.
ORDER: list[Kind] = list(RULES)
assert set(ORDER) == set(get_args(Kind))

#: Kinds that come from a run; the others are read off what the compiler made.
OF_RUNS: set[Kind] = {
    "compiled-crashed",
    "compiled-differs",
    "compiled-raises",
    "could-not-compare",
    "undeclared-write",
}
