"""What the audit prints and writes: text, JSON and its schema, SARIF, JUnit, assertions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import audit_cases as cases
import jsonschema
import pytest
import torch
from click.testing import CliRunner
from sarif import SARIF

from omni_kv.audits.audit import audit
from omni_kv.audits.formats import SCHEMA_NAME, as_json, as_junit, as_sarif, schema
from omni_kv.audits.report import (
    Argument,
    AuditReport,
    Clone,
    Comparison,
    Difference,
    Op,
    Rewritten,
    Run,
    Shapes,
)
from omni_kv.audits.rules import RULES
from omni_kv.audits.verdict import conclude
from omni_kv.cli import main
from omni_kv.evidence.paths import project_dir
from omni_kv.testing import assert_no_clones

DOCS = project_dir() / "docs"
PROMISED = Path(__file__).with_name("report_v1.json")


def reported(*, shapes: list[Shapes] = (), comparisons: list[Comparison] = (), **fields: Any):
    """A report over parts that are made up, concluded as the audit does it."""
    report = AuditReport(
        callable="step", torch="0", device="cpu", verdict="clean", sentence="",
        shapes=list(shapes), comparisons=list(comparisons), **fields,
    )  # fmt: skip
    conclude(report)
    return report


def with_everything() -> AuditReport:
    clone = Clone(
        elements=16, bytes=64, bytes_per_element=4, argument_elements=8,
        storage_first=-8, storage_last=7, first=0, last=15,
    )  # fmt: skip
    cloned = Argument(
        name="pool", input="kv", outcome="cloned", cause="used later", why="It is used.",
        clone=clone, advice="do not", shift=3,
    )  # fmt: skip
    file = Path.cwd() / "model.py"
    op = Op(name="my.op", kind="k", graph=0, arguments=[cloned], place=f"{file}:12")
    rewritten = Rewritten(input="kv", cause="c", reads=9, writes=9, changes=1)
    differs = Difference(tensor="kv", elements=2, of=8, first=[1])
    runs = [Run(memory="filled on both sides", result="differs", differences=[differs])]
    return reported(
        shapes=[
            Shapes(label="static", graphs=1, ops=[op], rewritten=[rewritten]),
            Shapes(label="dynamic=True", problem="It does not compile: \x1b[31mno <b>"),
        ],
        comparisons=[
            Comparison(label="static", result="differs", runs=runs),
            Comparison(label="second call", result="not run", how="there was no time"),
        ],
        place="/elsewhere/my model.py:3",
    )


CLEAN = {"shapes": [Shapes(label="static", graphs=1)]}
BROKEN = {"shapes": [Shapes(label="static", problem="It does not compile: no.")]}


def test_the_text_begins_with_the_verdict_and_the_worst_finding() -> None:
    report = with_everything()
    headline, first, *rest = str(report).splitlines()
    assert headline == report.headline
    assert headline.startswith("audit of step: 6 findings. Compiled and eager were not compared: ")
    assert first.startswith("  ! static: my.op, pool: the op is handed elements that lie 3 behind")
    levels = [RULES[finding.kind].level for finding in report.found]
    assert levels == sorted(levels)
    assert sum("  what to do, at model.py:12: do not" in line for line in rest) == 1


def test_details_come_only_after_verbose() -> None:
    report = with_everything()
    short, long = report.text(), report.text(verbose=True)
    assert long.startswith(report.headline)
    assert set(short.splitlines()) <= set(long.splitlines())
    for detail in ("my.op  [k], at model.py:12", "filled on both sides: differs"):
        assert detail in long
        assert detail not in short


def test_what_was_not_told_stands_in_the_short_text() -> None:
    note = "zeros would not be seen"
    told = Comparison(label="static", result="same", note=note)
    text = str(reported(**CLEAN, comparisons=[told]))
    assert note in text
    assert "not compared: " in text


def test_the_stored_schema_is_that_of_the_code() -> None:
    assert (DOCS / SCHEMA_NAME).read_text() == schema(), "run `omni-kv figures`"


@pytest.mark.parametrize("report", [with_everything(), reported(**CLEAN), reported(**BROKEN)])
def test_json_fits_the_schema_and_holds_the_whole_report(report) -> None:
    written = json.loads(as_json(report))
    jsonschema.Draft202012Validator(json.loads(schema())).validate(written)
    assert written["version"] == 1
    assert written["findings"] == [finding["message"] for finding in written["found"]]
    assert AuditReport.model_validate(written) == report


def promises(of: dict[str, Any]) -> dict[str, Any]:
    """Every field of every object of a schema, with its type and whether it is always there."""
    found = {}
    for name, made in {"report": of, **of["$defs"]}.items():
        for field, kind in made.get("properties", {}).items():
            said = {k: v for k, v in kind.items() if k not in ("title", "description", "default")}
            found[f"{name}.{field}"] = {"type": said, "always": field in made.get("required", [])}
    return found


def broken(promised: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Promises that are not kept. A field may take more values of an enumeration than it did."""

    def known(kind: Any) -> Any:
        if isinstance(kind, dict):
            return {k: set(v) if k == "enum" else known(v) for k, v in kind.items()}
        return [known(k) for k in kind] if isinstance(kind, list) else kind

    def kept(old: Any, new: Any) -> bool:
        if isinstance(old, dict) and isinstance(new, dict):
            return old.keys() == new.keys() and all(kept(old[k], new[k]) for k in old)
        return old <= new if isinstance(old, set) and isinstance(new, set) else old == new

    return [
        name
        for name, promise in promised.items()
        if name not in now
        or not kept(known(promise["type"]), known(now[name]["type"]))
        or promise["always"] > now[name]["always"]
    ]


def test_fields_of_version_1_are_only_added_to() -> None:
    promised = json.loads(PROMISED.read_text())
    assert broken(promised, promises(json.loads(schema()))) == []
    assert len(promised) > 60


def test_a_field_that_is_lost_renamed_or_of_another_type_breaks_the_promise() -> None:
    now = json.loads(schema())
    promised = promises(now)
    lost, optional, other, fewer = (copy.deepcopy(now) for _ in range(4))
    del lost["$defs"]["Op"]["properties"]["place"]
    optional["$defs"]["Finding"]["required"].remove("message")
    other["$defs"]["Clone"]["properties"]["bytes"]["type"] = "string"
    fewer["properties"]["verdict"]["enum"].remove("clean")
    assert broken(promised, promises(lost)) == ["Op.place"]
    assert broken(promised, promises(optional)) == ["Finding.message"]
    assert broken(promised, promises(other)) == ["Clone.bytes"]
    assert broken(promised, promises(fewer)) == ["report.verdict"]
    more = copy.deepcopy(now)
    more["properties"]["verdict"]["enum"].append("new")
    more["$defs"]["Op"]["properties"]["new"] = {"type": "string"}
    assert broken(promised, promises(more)) == []


def sarif_run(report: AuditReport) -> dict[str, Any]:
    log = json.loads(as_sarif(report))
    jsonschema.Draft202012Validator(SARIF).validate(log)
    (run,) = log["runs"]
    return run


def test_sarif_has_a_result_for_each_finding_at_the_callers_line() -> None:
    report = with_everything()
    run = sarif_run(report)
    rules = run["tool"]["driver"]["rules"]
    assert [result["ruleId"] for result in run["results"]] == [f.kind for f in report.found]
    for result, finding in zip(run["results"], report.found, strict=True):
        assert rules[result["ruleIndex"]]["id"] == finding.kind
        assert finding.message in result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        known = finding.place is not None
        uri = "model.py" if known else "file:///elsewhere/my%20model.py"
        assert place["artifactLocation"]["uri"] == uri
        assert place["region"]["startLine"] == (12 if known else 3)
    assert {finding.place is None for finding in report.found} == {True, False}
    assert run["invocations"] == [{"executionSuccessful": True}]


def test_sarif_says_what_could_not_be_audited() -> None:
    run = sarif_run(reported(**BROKEN))
    (invocation,) = run["invocations"]
    assert run["results"] == []
    assert not invocation["executionSuccessful"]
    (told,) = invocation["toolExecutionNotifications"]
    assert told["message"]["text"] == "audit of step: could not run. It does not compile: no."


def junit(report: AuditReport) -> tuple[dict[str, str], dict[str, ElementTree.Element]]:
    (suite,) = ElementTree.fromstring(as_junit(report))
    return suite.attrib, {case.attrib["name"]: case for case in suite}


def test_junit_has_a_case_for_each_graph_and_each_comparison() -> None:
    report = with_everything()
    counts, tests = junit(report)
    outcomes = {name: [e.tag for e in case] for name, case in tests.items()}
    assert outcomes == {
        "what is made of it, static": ["failure"],
        "what is made of it, dynamic=True": ["failure"],
        "compiled against eager, static": ["failure"],
        "compiled against eager, second call": ["skipped"],
    }
    assert {name: counts[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "3", "errors": "0", "skipped": "1",
    }  # fmt: skip
    said = "".join(e.text or "" for case in tests.values() for e in case)
    assert sum(finding.message.replace("\x1b", "?") in said for finding in report.found) == 6


def test_junit_of_a_clean_callable_passes_and_of_one_that_cannot_be_audited_is_an_error() -> None:
    counts, tests = junit(reported(**CLEAN))
    assert (counts["tests"], counts["failures"]) == ("1", "0")
    assert [len(case) for case in tests.values()] == [0]
    counts, tests = junit(reported(**BROKEN))
    assert counts["errors"] == "1"
    assert [e.tag for case in tests.values() for e in case] == ["error"]


def test_a_finding_of_the_whole_call_is_told_by_a_comparison() -> None:
    same = Comparison(label="static", result="same", changed=["x"])
    report = reported(**CLEAN, comparisons=[same])
    assert [finding.kind for finding in report.found] == ["undeclared-write"]
    counts, tests = junit(report)
    assert counts["failures"] == "1"
    assert len(tests["compiled against eager, static"]) == 1


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "written"), [("shared", "torch.ops.audit_cases.write("), ("index_copy", "index_copy_")]
)
def test_an_op_is_placed_at_the_callers_line(name, written) -> None:
    fn, args = getattr(cases, f"make_{name}")()
    with torch.no_grad():
        report = audit(fn, args, run=False, dynamic=False, until="graph")
    ((op,),) = (shapes.ops for shapes in report.shapes)
    file, _, line = op.place.rpartition(":")
    assert Path(file) == Path(cases.__file__)
    assert written in Path(file).read_text().splitlines()[int(line) - 1]


@pytest.mark.compiles
def test_assertions_begin_with_the_line_of_the_command() -> None:
    fn, args = cases.make_shared()
    with torch.no_grad(), pytest.raises(AssertionError) as raised:
        assert_no_clones(fn, args)
    done = CliRunner().invoke(main, ["audit", "audit_cases:make_shared", "--no-run"])
    first = str(raised.value).splitlines()[0]
    assert first.startswith("audit of layer: ")
    assert first.partition(": ")[0] == done.stdout.splitlines()[0].partition(": ")[0]


@pytest.mark.compiles
def test_a_refused_case_writes_no_file(tmp_path) -> None:
    output = tmp_path / "audit.sarif"
    words = ["audit", "audit_cases:make_nothing", "--format", "sarif", "--output", str(output)]
    assert CliRunner().invoke(main, words).exit_code == 2
    assert not output.exists()
