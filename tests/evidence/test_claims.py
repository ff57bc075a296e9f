import json

import nbformat
import pytest

from omni_kv.evidence import claims
from omni_kv.publish.notebooks import notebooks_dir

ENTRY = """
[[claim]]
id = "one"
source = "pull request"
statement = "It crashes."
verdict = "confirmed"
said = "It does."
experiment = "02"
checks = [{ file = "verdicts/t.json", select = { name = "02.a" }, field = "outcome/n", equals = 3 }]
"""


@pytest.mark.parametrize("claim", claims.load(), ids=lambda claim: claim.id)
def test_the_records_do_not_contradict_the_claim(claim):
    assert claim.contradictions() == []


def headings(path):
    """The headings of a notebook, without their marks."""
    cells = nbformat.read(path, as_version=4).cells
    lines = [line for c in cells if c.cell_type == "markdown" for line in c.source.splitlines()]
    found = [line.lstrip("#") for line in lines if line.startswith("#")]
    return {line.strip().replace("`", "").lower() for line in found}


@pytest.mark.parametrize("claim", claims.load(), ids=lambda claim: claim.id)
def test_every_tested_claim_names_a_notebook_and_a_heading_that_are_there(claim):
    known = {path.stem: headings(path) for path in notebooks_dir().glob("*.ipynb")}
    named = [text.partition(": ") for text in filter(None, claim.experiment.split("; "))]
    assert named or claim.verdict == "not tested here"
    for stem, _, place in named:
        assert stem in known, stem
        assert not place or place.replace("`", "").lower() in known[stem], f"{stem}: {place}"


def test_a_list_stands_for_its_median_and_a_ratio_for_two_entries(data):
    text = ENTRY.replace(
        'field = "outcome/n", equals = 3', 'per = { name = "b" }, field = "s", at_least = 2'
    )
    (data / "verdicts").mkdir(parents=True)
    cells = [{"name": "02.a", "s": [9.0, 4.0, 3.0]}, {"name": "b", "s": [1.0, 2.0, 7.0]}]
    (data / "verdicts" / "t.json").write_text(json.dumps({"cells": cells}))
    (data / "claims.toml").write_text(text)
    (claim,) = claims.load()
    assert claim.checks[0].found() == 2.0
    assert claim.contradictions() == []


def ledger(data, text, n=3):
    folder = data / "verdicts"
    folder.mkdir(parents=True)
    record = {"verdicts": [{"name": "02.a", "outcome": {"n": n}}]}
    (folder / "t.json").write_text(json.dumps(record))
    (data / "claims.toml").write_text(text)
    return claims.load()


def test_a_record_that_says_otherwise_contradicts_its_claim(data):
    (claim,) = ledger(data, ENTRY, n=4)
    (text,) = claim.contradictions()
    assert "outcome/n is 4, not 3" in text


@pytest.mark.parametrize(
    ("bound", "holds"),
    [("at_least = 3", True), ("at_least = 4", False), ("at_most = 2.5", False)],
)
def test_bounds_are_held(data, bound, holds):
    (claim,) = ledger(data, ENTRY.replace("equals = 3", bound))
    assert (claim.contradictions() == []) is holds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("checks = [", "#", "'one'.*needs an experiment and checks"),
        ('experiment = "02"', "", "'one'.*needs an experiment and checks"),
        (", equals = 3 }", " }", "'one'.*needs equals"),
        ('"confirmed"', '"surely"', "'one': verdict"),
        ("id =", "name =", "None: id"),
    ],
)
def test_an_entry_that_proves_nothing_is_refused_by_name(data, old, new, message):
    with pytest.raises(claims.ClaimsError, match=message):
        ledger(data, ENTRY.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("02.a", "02.b", "0 entries"),
        ("outcome/n", "outcome/m", "no field 'outcome/m'"),
        ("t.json", "u.json", "cannot be read"),
    ],
)
def test_a_check_without_a_record_is_an_error(data, old, new, message):
    (claim,) = ledger(data, ENTRY.replace(old, new))
    with pytest.raises(claims.ClaimsError, match=message):
        claim.contradictions()


def test_a_claim_stands_there_once(data):
    with pytest.raises(claims.ClaimsError, match="'one' stands there twice"):
        ledger(data, ENTRY + ENTRY)
