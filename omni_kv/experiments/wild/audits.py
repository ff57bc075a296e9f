"""Audit the forms, and say of each what was found and how many bytes it costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import nn

from omni_kv.audits.audit import Call, audit_all
from omni_kv.audits.report import AuditReport
from omni_kv.evidence.outcomes import recorded, releases
from omni_kv.evidence.verdicts import torch_release
from omni_kv.experiments.wild import caches

#: Tokens of a prefill; a decode step has one.
PREFILL = 8


@dataclass(frozen=True)
class Form:
    """One form of cache in one kind of call.

    Attributes:
        name: what it is called, and its verdict: ``10.<name>``.
        group: what a notebook's parameter turns on.
        how: how the cache lies and is written, in words.
        make: makes callable and arguments.
        needs: the module that it cannot do without.
    """

    name: str
    group: str
    how: str
    make: Callable[[], Call]
    needs: str | None = None


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(count, caches.WIDTH)


def _gpt_fast(tokens: int) -> Call:
    first = PREFILL if tokens == 1 else 0
    return Call(caches.GptFastLayer(), (_tokens(tokens), torch.arange(first, first + tokens)))


def _engine(layer: Callable[[], nn.Module]) -> Call:
    pool = torch.randn(2, caches.SLOTS, caches.HEADS, caches.HEAD_DIM)
    return Call(layer(), (_tokens(PREFILL), pool, torch.arange(PREFILL) * 3, torch.arange(64)))


def _outside() -> Call:
    x, pool, *where = _engine(caches.SlicedInside).args
    return Call(caches.SlicedOutside(), (x, *pool.unbind(0), *where))


def _llama(tokens: int) -> Call:
    from omni_kv.experiments.wild.llama import Llama

    model, first = Llama(), 0
    if tokens == 1:
        model(torch.arange(PREFILL)[None], torch.arange(PREFILL))
        first = PREFILL
    positions = torch.arange(first, first + tokens)
    return Call(model, (torch.arange(tokens)[None], positions))


def _torchtune() -> Call:
    return Call(caches.TorchtuneLayer(), (_tokens(1),))


FORMS = [
    Form(
        "gpt-fast-decode",
        "gpt-fast",
        "two buffers, k_cache[:, :, positions] = k, one token",
        partial(_gpt_fast, 1),
    ),
    Form("gpt-fast-prefill", "gpt-fast", "the same, several tokens", partial(_gpt_fast, PREFILL)),
    Form(
        "torchtune",
        "torchtune",
        "the same at cache_pos[:n], which is moved on in place",
        _torchtune,
    ),
    Form(
        "engine-inside",
        "engine",
        "one pool, sliced inside the op",
        partial(_engine, caches.SlicedInside),
    ),
    Form(
        "engine-outside",
        "engine",
        "one pool, sliced by the caller, two arguments of the op",
        _outside,
    ),
    Form(
        "engine-in-graph",
        "engine",
        "one pool, sliced in the graph, two arguments of the op",
        partial(_engine, caches.SlicedInGraph),
    ),
    Form(
        "engine-no-op",
        "engine",
        "one pool, sliced in the graph, keys[slots] = k",
        partial(_engine, caches.WrittenInGraph),
    ),
    Form(
        "llama-prefill",
        "llama",
        "StaticCache of transformers, several tokens",
        partial(_llama, PREFILL),
        "transformers",
    ),
    Form("llama-decode", "llama", "the same, one token", partial(_llama, 1), "transformers"),
]


@dataclass(frozen=True)
class Outcome:
    """What an audit found, free of times and places, as a verdict holds it.

    Attributes:
        verdict: that of the audit.
        findings: kind and setting of each finding, the worst first.
        copied: bytes of the copies of one call, or read and written where an input is rewritten,
            by the setting of ``dynamic=``.
        compared: the result of each comparison, by its label.
    """

    verdict: str
    findings: list[str]
    copied: dict[str, int]
    compared: dict[str, str]


def outcome_of(report: AuditReport) -> Outcome:
    """The outcome of one audit."""
    copied = {shapes.label: 0 for shapes in report.shapes}
    for finding in report.found:
        if finding.kind in ("argument-cloned", "input-rewritten") and finding.label is not None:
            copied[finding.label] += finding.bytes or 0
    return Outcome(
        verdict=report.verdict,
        findings=[f"{f.label}: {f.kind}, {f.argument or 'the call'}" for f in report.found],
        copied=copied,
        compared={c.label: c.result for c in report.comparisons},
    )


def chosen(groups: str) -> tuple[list[Form], str]:
    """The forms of some groups that can be run here, and one line on those that cannot.

    Args:
        groups: names of groups, between commas; ``all`` is all of them.

    Raises:
        ValueError: for a group that there is not.
    """
    known = list(dict.fromkeys(form.group for form in FORMS))
    asked = [name.strip() for name in groups.split(",") if name.strip()]
    asked = known if asked == ["all"] else asked
    if unknown := set(asked) - set(known):
        raise ValueError(f"no group {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    forms = [form for form in FORMS if form.group in asked]
    lacking = {f.needs for f in forms if f.needs and importlib.util.find_spec(f.needs) is None}
    here = [form for form in forms if form.needs not in lacking]
    if not lacking:
        return here, ""
    left = ", ".join(form.name for form in forms if form.needs in lacking)
    names = ", ".join(sorted(filter(None, lacking)))
    return here, f"{names} is missing (pip install 'omni-kv[wild]'): not run are {left}"


def version_of(module: str | None) -> dict[str, str]:
    """Name and version of a module that a form needs, as a parameter of its verdict."""
    return {module: importlib.metadata.version(module)} if module else {}


def audited(forms: Sequence[Form], seed: int = 0) -> dict[str, AuditReport]:
    """Audit some forms, static and dynamic, and run them in guarded memory.

    They share child processes, whose start is a good part of the time.

    Args:
        forms: what to audit.
        seed: of weights, caches and tokens.

    Returns:
        The reports, by the names of the forms.
    """
    calls = []
    with torch.no_grad():
        for form in forms:
            torch.manual_seed(seed)
            calls.append(form.make())
        reports = audit_all(calls)
    return {form.name: report for form, report in zip(forms, reports, strict=True)}


def table(outcomes: dict[str, Outcome]) -> pd.DataFrame:
    """One row a form: its verdict, findings and bytes; from the record where it was not run.

    Args:
        outcomes: what was measured, by the names of the forms.
    """
    known = recorded(torch_release(), "10.")
    rows = []
    for form in FORMS:
        row = {"form": form.name, "cache and write": form.how, "from": "not recorded"}
        if form.name in outcomes:
            row |= {"from": "this run", **_cells(outcomes[form.name])}
        elif f"10.{form.name}" in known:
            row |= {"from": "the record", **_cells(Outcome(**known[f"10.{form.name}"]))}
        rows.append(row)
    return pd.DataFrame(rows).set_index("form").fillna("")


def _cells(outcome: Outcome) -> dict[str, str]:
    labels = sorted(outcome.copied, reverse=True)  # static comes first
    copied = {f"bytes, {label}": f"{outcome.copied[label]:,}" for label in labels}
    return {"verdict": outcome.verdict, **copied, "findings": "; ".join(outcome.findings)}


def by_release() -> pd.DataFrame:
    """One row a form, one column a torch release: what its recorded audit says, in words."""
    columns = {}
    for release in releases():
        known = recorded(release, "10.")
        columns[f"torch {release}"] = {
            form.name: in_words(Outcome(**known[f"10.{form.name}"]))
            if f"10.{form.name}" in known
            else "not recorded"
            for form in FORMS
        }
    made = pd.DataFrame(columns, index=[form.name for form in FORMS])
    made.insert(0, "cache and write", [form.how for form in FORMS])
    return made


def in_words(outcome: Outcome) -> str:
    """``safe``, or what is the matter, the worst first."""
    kinds = {finding.partition(": ")[2].partition(",")[0] for finding in outcome.findings}
    results = set(outcome.compared.values())
    words = {
        "crashes or reads outside": bool(kinds & {"compiled-crashed", "clone-reads-outside"}),
        "wrong": bool(kinds & {"compiled-differs", "wrong-elements"}),
        "does not compile": bool(kinds & {"compiled-raises", "does-not-compile"}),
        "copied": "argument-cloned" in kinds,
        "rewritten": "input-rewritten" in kinds,
    }
    told = [word for word, holds in words.items() if holds]
    if not told and outcome.verdict == "clean" and results == {"same"}:
        return "safe"
    return ", ".join(told) or f"not known ({outcome.verdict})"


def safe() -> list[str]:
    """The forms whose recorded audit is safe on every recorded release."""
    columns = by_release().drop(columns="cache and write")
    return [str(name) for name, row in columns.iterrows() if set(row) == {"safe"}]
