"""The forms of notebook 10: what each writes, what an outcome says, what stands in the tables."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from omni_kv.audits.report import Finding
from omni_kv.evidence.verdicts import torch_release
from omni_kv.experiments.wild import audits as wild
from omni_kv.experiments.wild import caches


def made(layer: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer whose weights are those of every other one made here."""
    torch.manual_seed(0)
    return layer()


def test_gpt_fast_writes_its_positions_and_nothing_else() -> None:
    layer, positions = made(caches.GptFastLayer), torch.tensor([5, 6, 9])
    before = layer.k_cache.clone(), layer.v_cache.clone()
    x = torch.randn(3, caches.WIDTH)
    with torch.no_grad():
        layer(x, positions)
        _, k, v = layer.split(x)
    for cache, old, new in zip((layer.k_cache, layer.v_cache), before, (k, v), strict=True):
        assert torch.equal(cache[0, :, positions], new.transpose(0, 1))
        cache[0, :, positions] = old[0, :, positions]
        assert torch.equal(cache, old)


def test_a_token_does_not_see_what_comes_after_it() -> None:
    layer, x = made(caches.GptFastLayer), torch.randn(4, caches.WIDTH)
    with torch.no_grad():
        together = layer(x, torch.arange(4))
        assert torch.allclose(layer(x[:2], torch.arange(2)), together[:2], atol=1e-5)


def test_torchtune_does_the_same_and_moves_on() -> None:
    one, other = made(caches.GptFastLayer), made(caches.TorchtuneLayer)
    other.load_state_dict({**one.state_dict(), "cache_pos": other.cache_pos})
    x = torch.randn(5, caches.WIDTH)
    with torch.no_grad():
        for first, count in ((0, 3), (3, 2)):
            part = x[first : first + count]
            expected = one(part, torch.arange(first, first + count))
            assert torch.allclose(other(part), expected, atol=1e-6)
    assert torch.equal(other.k_cache, one.k_cache)
    assert int(other.cache_pos[0]) == 5


def test_the_engines_forms_leave_the_same_pool_and_result() -> None:
    seen = []
    for layer in (caches.SlicedInside, caches.SlicedInGraph, caches.WrittenInGraph):
        torch.manual_seed(1)
        call = wild._engine(lambda layer=layer: made(layer))
        with torch.no_grad():
            seen.append((call.fn(*call.args), call.args[1]))
    x, pool, slots, window = wild._engine(caches.SlicedInside).args
    for result, left in seen[1:]:
        assert torch.equal(result, seen[0][0])
        assert torch.equal(left, seen[0][1])
    outside, inside = made(caches.SlicedOutside), made(caches.SlicedInside)
    own = pool.clone()
    with torch.no_grad():
        given = outside(x, own[0], own[1], slots, window)
        assert torch.equal(given, inside(x, pool, slots, window))
    assert torch.equal(own, pool)


def test_the_caller_hands_over_halves_of_one_allocation() -> None:
    _, keys, values, *_ = wild._outside().args
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert values.storage_offset() == keys.numel()


@pytest.mark.compiles
def test_llama_decodes_over_its_static_cache_what_it_does_over_all_tokens() -> None:
    pytest.importorskip("transformers")
    from omni_kv.experiments.wild.llama import Llama

    model = made(Llama)
    tokens = torch.randint(128, (1, 9), generator=torch.Generator().manual_seed(0))
    pointers = [layer.keys.data_ptr() for layer in model.cache.layers]
    with torch.no_grad():
        model(tokens[:, :8], torch.arange(8))
        seen = model(tokens[:, 8:], torch.tensor([8]))
        whole = model.model(input_ids=tokens, use_cache=False).logits[:, -1]
    assert torch.allclose(seen, whole, atol=1e-5)
    assert [layer.keys.data_ptr() for layer in model.cache.layers] == pointers
    assert all(layer.keys[:, :, 8].any() for layer in model.cache.layers)


def test_groups_are_chosen_by_name() -> None:
    engine, missing = wild.chosen("engine, torchtune")
    assert {form.group for form in engine} == {"engine", "torchtune"}
    assert missing == ""
    assert len(wild.chosen("")[0]) == 0
    with pytest.raises(ValueError, match="no group no_such; there are: gpt-fast, "):
        wild.chosen("engine, no_such")


def test_without_transformers_one_line_says_so_and_the_rest_goes_on(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    forms, missing = wild.chosen("all")
    assert forms == [form for form in wild.FORMS if form.needs is None]
    assert missing == (
        "transformers is missing (pip install 'omni-kv[wild]'): not run are "
        "llama-prefill, llama-decode"
    )


def outcome(*findings: tuple[str, str], compared: str = "same", **copied: int) -> wild.Outcome:
    return wild.Outcome(
        verdict="findings" if findings else "clean",
        findings=[f"{label}: {kind}, pool" for label, kind in findings],
        copied=copied,
        compared={"static": compared},
    )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (outcome(), "safe"),
        (outcome(compared="not run"), "not known (clean)"),
        (outcome(("static", "argument-cloned")), "copied"),
        (outcome(("static", "input-rewritten")), "rewritten"),
        (outcome(("dynamic=True", "compiled-differs"), compared="differs"), "wrong"),
        (
            outcome(
                ("static", "compiled-crashed"), ("static", "argument-cloned"), compared="crashed"
            ),
            "crashes or reads outside, copied",
        ),
        (outcome(("static", "undeclared-write")), "not known (findings)"),
    ],
)
def test_an_outcome_in_words_is_safe_only_if_all_was_compared(seen, words) -> None:
    assert wild.in_words(seen) == words


def test_an_outcome_counts_the_bytes_of_each_setting(monkeypatch) -> None:
    from omni_kv.audits.report import AuditReport, Comparison, Shapes

    found = [
        Finding(kind="wrong-elements", message="", label="static", argument="v", bytes=64),
        Finding(kind="argument-cloned", message="", label="static", argument="v", bytes=64),
        Finding(kind="input-rewritten", message="", label="static", argument="p", bytes=100),
        Finding(kind="argument-cloned", message="", label="dynamic=True", argument="v", bytes=7),
    ]
    report = AuditReport(
        callable="", torch="", device="", verdict="findings", sentence="", found=found,
        shapes=[Shapes(label="static"), Shapes(label="dynamic=True")],
        comparisons=[Comparison(label="static", result="differs")],
    )  # fmt: skip
    seen = wild.outcome_of(report)
    assert seen.copied == {"static": 164, "dynamic=True": 7}
    assert seen.findings[0] == "static: wrong-elements, v"
    assert seen.compared == {"static": "differs"}


@pytest.fixture
def records(data: Path) -> Path:
    """Records of the installed release and of another one."""
    sound = {"verdict": "clean", "findings": [], "copied": {"static": 0}, "compared": {"s": "same"}}
    bad = sound | {"verdict": "findings", "findings": ["static: argument-cloned, pool"]}
    bad |= {"copied": {"static": 4096}}
    where = dict.fromkeys(("device", "platform", "python", "torch", "revision", "command"), "")
    where["date"] = "2026-01-01"
    (data / "verdicts").mkdir(parents=True)
    for release, second in ((torch_release(), sound), ("0.0.1", bad)):
        entries = [
            {"name": f"10.{name}", "parameters": {"seed": 0}, "outcome": seen, "recorded": where}
            for name, seen in (("torchtune", sound), ("llama-decode", second))
        ]
        content = {"torch": release, "verdicts": entries}
        (data / "verdicts" / f"torch-{release}.json").write_text(json.dumps(content))
    return data


def test_what_does_not_run_stands_in_the_table_from_the_record(records) -> None:
    cloned = outcome(("static", "argument-cloned"), static=131072)
    table = wild.table({"engine-outside": cloned})
    assert table.loc["engine-outside", "from"] == "this run"
    assert table.loc["engine-outside", "bytes, static"] == "131,072"
    assert table.loc["torchtune", "from"] == "the record"
    assert table.loc["torchtune", "verdict"] == "clean"
    assert table.loc["gpt-fast-decode", "from"] == "not recorded"
    assert list(table.index) == [form.name for form in wild.FORMS]


def test_safe_is_what_is_safe_on_every_release(records) -> None:
    table = wild.by_release()
    assert table.loc["llama-decode", f"torch {torch_release()}"] == "safe"
    assert table.loc["llama-decode", "torch 0.0.1"] == "copied"
    assert table.loc["gpt-fast-decode", "torch 0.0.1"] == "not recorded"
    assert wild.safe() == ["torchtune"]
