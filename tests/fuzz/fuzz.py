"""Hold the audit's answer against plain ``torch.compile``, over random programs.

    python tests/fuzz/fuzz.py --first 0 --count 100

Each program runs eagerly and under plain ``torch.compile``, static and ``dynamic=True``, in forks
of a child process, without any instrument. The audit must not call clean what plain compile gets
wrong, and must not claim wrong results where plain compile is right, unless compiled code reads
outside, which plain memory may hide.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
LABELS = ("static", "dynamic=True")


def plain(module: str, dynamic: bool | None) -> str:
    """What plain ``torch.compile`` does with a program: right, or what is wrong."""
    from omni_kv.sandbox.process import graph_caches_off, run_forked

    def work() -> str:
        make_case = importlib.import_module(module).make_case
        with torch.no_grad(), graph_caches_off():
            fn, expected_args = make_case()
            try:
                expected = fn(*expected_args)
            except Exception as error:
                return f"eager raises {type(error).__name__}"
            _, args = make_case()
            got = torch.compile(fn, dynamic=dynamic)(*args)
        for kind, right, seen in (("argument", expected_args, args), ("result", expected, got)):
            for number, (a, b) in enumerate(zip(right, seen, strict=True)):
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True):
                    return f"{kind} {number} differs"
        return "right"

    outcome = run_forked(work)
    if outcome.value is not None:
        return outcome.value
    first = outcome.describe().splitlines()[0]
    return f"crashed: {first}" if outcome.status == "killed" else first[:200]


def plain_all(folder: str, modules: list[str]) -> list[dict[str, str]]:
    """``plain`` for all programs and both kinds of shapes; for a child process of its own."""
    from omni_kv.sandbox.compiler import compile_once

    sys.path[:0] = [folder, str(HERE)]
    torch.set_num_threads(1)
    compile_once()
    return [
        dict(zip(LABELS, (plain(m, dynamic) for dynamic in (None, True)), strict=True))
        for m in modules
    ]


def judge(label: str, was: str, report) -> str | None:
    """What is wrong with the audit's answer for one kind of shapes; None if nothing is."""
    (seen,) = [c.result for c in report.comparisons if c.label == label] or ["none"]
    found = [f for f in report.findings if f.startswith(label)]
    wrong = was.endswith("differs") or was.startswith("crashed")
    if wrong and seen == "same" and report.verdict == "clean":
        return f"MISSED: plain {was}, audit clean"
    if wrong and seen == "same":
        return f"HALF MISSED: plain {was}, compared the same, but found: {found}"
    if was == "right" and seen in ("differs", "crashed") and not report.reads_outside:
        how = next((str(c.runs) for c in report.comparisons if c.label == label), "")
        return f"FALSE ALARM: plain right, audit {seen}: {found} {how}"
    return None


def main() -> int:
    """Run the programs of consecutive seeds; exit code 1 if the audit was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--batch", type=int, default=25)
    options = parser.parse_args()
    from programs import program

    from omni_kv.audits.audit import Call, audit_all
    from omni_kv.sandbox.process import run_all, run_isolated

    kinds: Counter[str] = Counter()
    problems = 0
    with tempfile.TemporaryDirectory(prefix="omni-kv-fuzz-") as folder:
        sys.path[:0] = [folder, str(HERE)]
        for start in range(options.first, options.first + options.count, options.batch):
            stop = min(start + options.batch, options.first + options.count)
            made = [program(seed) for seed in range(start, stop)]
            for p in made:
                (Path(folder) / f"{p.module}.py").write_text(p.source)
            modules = [p.module for p in made]
            hands = [modules[::2], modules[1::2]]
            outcomes = run_all(
                [partial(run_isolated, plain_all, folder, hand, timeout=1200) for hand in hands]
            )
            was = {}
            for hand, outcome in zip(hands, outcomes, strict=True):
                was.update(zip(hand, outcome.unwrap(), strict=True))
            sound = [m for m in modules if not was[m]["static"].startswith("eager raises")]
            with torch.no_grad():
                calls = [Call(*importlib.import_module(m).make_case()) for m in sound]
                reports = audit_all(calls)
            for m, report in zip(sound, reports, strict=True):
                for label in LABELS:
                    kinds[f"{label}: plain {was[m][label].split(':')[0][:60]}"] += 1
                    problem = judge(label, was[m][label], report)
                    if problem:
                        problems += 1
                        print(f"{m} {label}: {problem}\n    {report.sentence}", flush=True)
            kinds["eager raises"] += len(modules) - len(sound)
            print(f"seeds {start} to {stop - 1} done, {problems} problems", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:6d}  {kind}")
    return int(problems > 0)


if __name__ == "__main__":
    raise SystemExit(main())
