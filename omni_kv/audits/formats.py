"""A report for other programs: JSON and its schema, SARIF 2.1.0, JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from omni_kv import __version__
from omni_kv.audits.report import VERSION, AuditReport, Finding
from omni_kv.audits.rules import OF_RUNS, ORDER, RULES

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SCHEMA_NAME = "audit_report.schema.json"


def as_json(report: AuditReport) -> str:
    """The report as JSON; ``schema`` says what is in it."""
    return report.model_dump_json(indent=2)


def schema() -> str:
    """The JSON schema of a report, as JSON."""
    made = AuditReport.model_json_schema(mode="serialization")
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = f"omni-kv audit report, version {VERSION}"
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def as_sarif(report: AuditReport) -> str:
    """The findings as SARIF 2.1.0, which code hosts show in a pull request.

    A finding stands at the line that calls the op, or where the callable begins. Paths below the
    working folder are relative to it.
    """
    ran = report.verdict != "could not run"
    invocation: dict[str, Any] = {"executionSuccessful": ran}
    if not ran:
        told = {"level": "error", "message": {"text": report.headline}}
        invocation["toolExecutionNotifications"] = [told]
    driver = {
        "name": "omni-kv",
        "version": __version__,
        "rules": [
            {
                "id": kind,
                "shortDescription": {"text": rule.text},
                "defaultConfiguration": {"level": rule.level},
            }
            for kind, rule in RULES.items()
        ],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_result(report, finding) for finding in report.found],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(report: AuditReport, finding: Finding) -> dict[str, Any]:
    advice = f"\nWhat to do: {finding.advice}." if finding.advice else ""
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": report.callable}]}
    file, _, line = (finding.place or report.place or "").rpartition(":")
    if file:
        location["physicalLocation"] = {
            "artifactLocation": _artifact(Path(file)),
            "region": {"startLine": int(line)},
        }
    return {
        "ruleId": finding.kind,
        "ruleIndex": ORDER.index(finding.kind),
        "level": RULES[finding.kind].level,
        "message": {"text": f"{report.callable}, {finding.message}{advice}"},
        "locations": [location],
    }


def _artifact(file: Path) -> dict[str, str]:
    root = Path.cwd()
    if file.is_absolute() and file.is_relative_to(root):
        return {"uri": file.relative_to(root).as_posix(), "uriBaseId": "%SRCROOT%"}
    return {"uri": file.as_uri() if file.is_absolute() else file.as_posix()}


def as_junit(report: AuditReport) -> str:
    """The report as JUnit XML: a test case for every graph looked at and every comparison."""
    suite = ElementTree.Element("testsuite", name=f"omni-kv audit of {report.callable}")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.verdict == "could not run":
        case = _case(suite, report, "audit")
        ElementTree.SubElement(case, "error", message=_legal(report.sentence))
        counts["tests"] = counts["errors"] = 1
    else:
        named = [(s.label, f"what is made of it, {s.label}", False) for s in report.shapes]
        named += [(c.label, f"compiled against eager, {c.label}", True) for c in report.comparisons]
        for label, name, of_run in named:
            case = _case(suite, report, name)
            found = [f for f in report.found if _belongs(report, f, label, of_run)]
            counts["tests"] += 1
            counts["failures"] += bool(found)
            if found:
                # One element a case: that is all that the readers of JUnit XML agree on.
                message = "; ".join(finding.message for finding in found)
                failure = ElementTree.SubElement(case, "failure", message=_legal(message))
                failure.set("type", found[0].kind)
                failure.text = _legal("\n".join(_told(finding) for finding in found))
            elif of_run and report.comparison(label).result == "not run":
                counts["skipped"] += 1
                how = _legal(report.comparison(label).how)
                ElementTree.SubElement(case, "skipped", message=how)
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    suite.set("time", f"{report.seconds:.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _belongs(report: AuditReport, finding: Finding, label: str, of_run: bool) -> bool:
    if finding.label is None:
        # It holds of the whole call: the first comparison tells it.
        return of_run and label == report.comparisons[0].label
    return finding.label == label and (finding.kind in OF_RUNS) == of_run


def _told(finding: Finding) -> str:
    lines = [finding.message, finding.place and f"at {finding.place}", finding.advice]
    return "\n".join(line for line in lines if line)


def _case(suite: ElementTree.Element, report: AuditReport, name: str) -> ElementTree.Element:
    classname = f"omni_kv.audit.{report.callable}"
    return ElementTree.SubElement(suite, "testcase", classname=classname, name=name)


def _legal(text: str) -> str:
    """What XML 1.0 may hold: an exception's text may bring colours of a terminal."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def as_text(report: AuditReport) -> str:
    """The report for people, the short form."""
    return report.text()


FORMATS: dict[str, Callable[[AuditReport], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "junit": as_junit,
}
