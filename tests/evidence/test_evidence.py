"""Records refuse what does not fit, and every number shown comes from their raw samples."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from omni_kv import __version__
from omni_kv.evidence import outcomes
from omni_kv.evidence import records as evidence
from omni_kv.evidence import tables as gpu_tables
from omni_kv.evidence.cells import CrashRun, Timing
from omni_kv.evidence.records import EvidenceError, Provenance, Record
from omni_kv.experiments.gpu.bench import bench_table
from omni_kv.experiments.gpu.cases import CRASHES
from omni_kv.model.geometry import preset
from omni_kv.publish.figures import gpu as gpu_figures

PROVENANCE = Provenance(
    device="Some Card",
    platform="Linux x86_64",
    python="3.12.3",
    torch="2.11.0+cu130",
    date="2026-11-29",
    revision="abc",
    command="omni-kv record",
)
RECORD = Record(
    experiment="step",
    provenance=PROVENANCE,
    parameters={"preset": "tiny"},
    units=["a"],
    cells=[Timing(name="a", seconds=[1.0, 3.0, 2.0])],
)
GEOMETRY = preset("lingbot-480x768")
NAMES = (
    "crash",
    "segments",
    "segments-alone",
    "expandable",
    "hypotheses",
    "stale-cache",
    "sanitizer",
    "step",
    "trials",
    "bench",
    "rollout",
)


def put(data: Path, record: Record = RECORD, **changes: object) -> Path:
    path = data / "evidence" / evidence.folder_name(record.provenance) / "step.json"
    evidence.write(record, path)
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_a_record_is_read_back_as_it_was_written(data: Path) -> None:
    put(data)
    assert evidence.load("step") == RECORD
    assert evidence.devices() == ["some-card-torch2.11.0"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 99}, "schema_version"),
        ({"provenance": {"device": "x"}}, "provenance.platform"),
        ({"cells": [{"kind": "timing", "name": "a", "seconds": []}]}, "seconds"),
        ({"cells": [{"kind": "timing", "name": "a", "seconds": ["soon"]}]}, "seconds.0"),
        ({"cells": [{"kind": "poem", "name": "a"}]}, "cells.0"),
        ({"cells": [{"kind": "timing", "name": "a", "seconds": [1], "x": 1}]}, "x"),
        ({"cells": 2 * [{"kind": "timing", "name": "a", "seconds": [1]}]}, "cells"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_field_named(data: Path, change, field) -> None:
    path = put(data, **change)
    with pytest.raises(EvidenceError, match=re.escape(field)) as refusal:
        evidence.load("step")
    assert str(path) in str(refusal.value)


def test_what_was_never_recorded_says_what_was(data: Path) -> None:
    put(data)
    with pytest.raises(EvidenceError, match="nothing recorded"):
        evidence.load("rollout")
    with pytest.raises(EvidenceError, match=r"some-card-torch2\.11\.0"):
        evidence.load("step", device="other")


def moved(**changes: str) -> Provenance:
    return PROVENANCE.model_copy(update=changes)


@pytest.mark.parametrize("field", ["device", "card", "driver", "torch", "triton", "revision"])
def test_another_card_or_version_is_another_machine(field: str) -> None:
    assert PROVENANCE.same_machine(moved(date="2026-11-30"))
    assert not PROVENANCE.same_machine(moved(**{field: "other"}))


@pytest.mark.parametrize("name", NAMES)
def test_the_records_in_the_repository_fit_and_hold_no_paths(name: str) -> None:
    record = evidence.load(name)
    assert record.experiment == name
    text = record.model_dump_json()
    assert not re.search(r"/(opt|root|home|tmp|work|usr)/", text)


@pytest.mark.parametrize("name", sorted(CRASHES))
def test_recorded_cases_are_the_ones_that_the_code_runs(name: str) -> None:
    for run in evidence.load(name).of(CrashRun).values():
        assert CRASHES[name][run.name] == run.case


# What the notebook prints, recomputed from the raw samples without the code that printed it.


def raw(name: str) -> list[dict]:
    device = evidence.chosen_device() or evidence.devices()[0]
    path = evidence.data_dir() / "evidence" / device / f"{name}.json"
    return json.loads(path.read_text())["cells"]


def test_step_figures_follow_from_the_samples() -> None:
    table = gpu_tables.step_table(evidence.load("step"))
    samples = {c["name"]: c for c in raw("step") if c["kind"] == "timing"}
    off = {c["name"]: float(c["relative_error"]) for c in raw("step") if c["kind"] == "agreement"}
    assert (table == gpu_tables.WRONG).any(axis=1).sum() > 0
    for name, row in table.iterrows():
        if not off.get(f"{name} against eager", 0.0) <= 0.02:
            assert set(row) == {gpu_tables.WRONG}
            continue
        ms = sorted(1e3 * s for s in samples[name]["seconds"])
        assert row["median ms"] == pytest.approx(ms[len(ms) // 2], abs=0.051)
        assert (row["min ms"], row["max ms"]) == pytest.approx((ms[0], ms[-1]), abs=0.051)
        rate = samples[name]["flop"] / ms[len(ms) // 2] / 1e9
        assert row["TFLOP/s"] == pytest.approx(rate, abs=0.51)
    assert set(table.index) == {n for n in samples if "ceiling" not in n}


def test_rollout_figures_follow_from_the_samples() -> None:
    table = gpu_tables.rollout_table(evidence.load("rollout"), GEOMETRY)
    runs = [c for c in raw("rollout") if len(c["chunks"]) > 6]
    assert len(table) == len(runs)
    steady = {
        (c["backend"], c["mode"], c["layout"]): [k["seconds"] for k in c["chunks"][6:]]
        for c in runs
    }
    for (backend, mode, layout), seconds in steady.items():
        row = table.loc[(backend, "eager" if mode == "eager" else f"compiled, {layout}")]
        if (mode, layout) == ("compiled", "shared"):
            assert set(row[["chunk, s", "spread", "RTF", "against eager"]]) == {gpu_tables.WRONG}
            continue
        median = statistics.median(seconds)
        eager = statistics.median(steady[backend, "eager", "separate"])
        assert row["chunk, s"] == pytest.approx(median, abs=6e-4)
        assert row["RTF"] == pytest.approx(median / 0.75, abs=6e-3)
        assert row["against eager"] == f"{eager / median:.2f}x"
        assert row["spread"] == f"{100 * (max(seconds) - min(seconds)) / median:.2f}%"


def test_peak_memory_and_results_follow_from_the_samples() -> None:
    table = gpu_tables.rollout_table(evidence.load("rollout"), GEOMETRY)
    for cell in raw("rollout"):
        if len(cell["chunks"]) <= 6:
            continue
        how = "eager" if cell["mode"] == "eager" else f"compiled, {cell['layout']}"
        row = table.loc[(cell["backend"], how)]
        assert row["peak memory, GiB"] == pytest.approx(cell["peak_bytes"] / 2**30, abs=0.051)
        differs = [k["differs"] for k in cell["chunks"] if "differs" in k]
        if not differs:
            assert row["results"] == ""
        elif "nan" in differs:
            assert row["results"] == gpu_tables.WRONG
        else:
            assert row["results"] == f"as eager, within {100 * max(differs):.1f}%"


def test_parts_of_a_step_add_up_to_its_kernels() -> None:
    table = gpu_tables.parts_table(evidence.load("step"))
    for cell in raw("step"):
        if cell["kind"] == "profile":
            kernels = {k["name"]: k["microseconds"] / 1e3 for k in cell["kernels"]}
            parts = table[cell["name"]]
            wrong = cell["name"].endswith("compiled shared")
            assert set(parts.index[parts.isna()]) == set(parts.index[2:] if wrong else ())
            assert wrong or parts.sum() == pytest.approx(sum(kernels.values()), abs=0.5)
            clone = sum(ms for name, ms in kernels.items() if "as_strided_clone" in name)
            back = sum(ms for name, ms in kernels.items() if "as_strided_copy" in name)
            ours = sum(ms for name, ms in kernels.items() if name.startswith("triton_"))
            attention = sum(ms for name, ms in kernels.items() if re.search("flash|sdpa", name))
            assert parts["clone of K and V"] == pytest.approx(clone, abs=0.051)
            assert parts["copy back over V"] == pytest.approx(back, abs=0.051)
            if wrong:
                continue
            assert parts[:3].sum() == pytest.approx(ours, abs=0.16)
            assert parts["attention"] == pytest.approx(attention, abs=0.051)


def test_titles_follow_from_the_samples() -> None:
    parts = gpu_tables.parts_table(evidence.load("step"))
    right = [name for name in parts if not name.endswith("compiled shared")]
    fastest = parts[min(right, key=lambda name: parts[name].sum())]
    share = 100 * (fastest["attention"] + fastest["matrix products"]) / fastest.sum()
    title = gpu_figures.parts_figure(evidence.load("step")).axes[0].get_title(loc="left")
    assert f"{share:.0f}% of the device time" in title
    peak: dict[str, dict[str, int]] = {"separate": {}, "shared": {}}
    for cell in raw("rollout"):
        if cell["mode"] == "compiled" and not cell["repeat"]:
            peak[cell["layout"]][cell["backend"]] = cell["peak_bytes"]
    spreads = []
    for cell in raw("rollout"):
        if (cell["mode"], cell["layout"]) == ("compiled", "separate"):
            full = [chunk["seconds"] for chunk in cell["chunks"] if chunk["index"] >= 6]
            spreads.append(100 * (max(full) - min(full)) / statistics.median(full))
    figure = gpu_figures.latency_figure(evidence.load("rollout"), GEOMETRY)
    title = figure.axes[0].get_title(loc="left")
    assert title.startswith("From chunk 6 on the window is full")
    assert title.endswith(f"stays within {max(spreads):.1f}%")
    drawn = [line.get_label() for line in figure.axes[0].lines]
    assert not any("shared" in label for label in drawn if not label.startswith("_"))
    more = min(high - peak["separate"][name] for name, high in peak["shared"].items()) / 2**30
    title = gpu_figures.memory_figure(evidence.load("rollout")).axes[0].get_title(loc="left")
    assert title == f"Compiled, shared halves take at least {more:.1f} GiB more at the peak"
    plt.close("all")


def test_clone_figures_follow_from_bytes_and_bandwidth() -> None:
    table = gpu_tables.clone_table(evidence.load("step"), GEOMETRY)
    copies = [c for c in raw("step") if c["name"].endswith("ceiling/copy")]
    bandwidth = statistics.median(c["nbytes"] / statistics.median(c["seconds"]) for c in copies)
    elements = 545_587_200
    clone, back = 40 * 2 * 2 * elements, 40 * 2 * elements
    assert table["GB read and written"].tolist() == pytest.approx(
        [clone / 1e9, back / 1e9], abs=0.051
    )
    assert table["expected ms"].tolist() == pytest.approx(
        [1e3 * clone / bandwidth, 1e3 * back / bandwidth], abs=0.051
    )
    parts = gpu_tables.parts_table(evidence.load("step"))
    measured = [name for name in table if name.endswith("shared")]
    assert len(measured) == len([name for name in parts if name.endswith("shared")]) > 0
    assert table[measured].equals(parts.loc[table.index, measured])


def test_trials_follow_from_the_samples() -> None:
    table = gpu_tables.trials_table(evidence.load("trials"))
    samples = {c["name"]: c for c in raw("trials") if "ceiling" not in c["name"]}
    base = statistics.median(samples["as it is"]["seconds"])
    for name, row in table.iterrows():
        median = statistics.median(samples[name]["seconds"])
        ms = [1e3 * s for s in samples[name]["seconds"]]
        assert row["step, ms"] == pytest.approx(1e3 * median, abs=0.051)
        assert (row["min"], row["max"]) == pytest.approx((min(ms), max(ms)), abs=0.051)
        assert row["measured change"] == pytest.approx(1e3 * (median - base), abs=0.051)
        assert row["expected change"] == samples[name]["predicted_ms"]


def test_the_pieces_follow_from_the_samples() -> None:
    table = bench_table(list(evidence.load("bench").of(Timing).values()))
    cells = {c["name"]: c for c in raw("bench")}
    median = {name: statistics.median(c["seconds"]) for name, c in cells.items()}
    copy, matmul = "pieces: ceiling/copy", "pieces: ceiling/matmul"
    for name, cell in cells.items():
        by_bytes = cell.get("nbytes", 0) * median[copy] / cells[copy]["nbytes"]
        by_flop = cell.get("flop", 0) * median[matmul] / cells[matmul]["flop"]
        floor = max(by_bytes, by_flop)
        row, ms = table.loc[name], [1e3 * s for s in cell["seconds"]]
        assert (row["min ms"], row["max ms"]) == pytest.approx((min(ms), max(ms)))
        for rate, work, unit in (("TFLOP/s", "flop", 1e12), ("GB/s", "nbytes", 1e9)):
            expected = cell[work] / median[name] / unit if work in cell else float("nan")
            assert row[rate] == pytest.approx(expected, nan_ok=True)
        assert table.loc[name, "median ms"] == pytest.approx(1e3 * median[name])
        assert table.loc[name, "floor ms"] == pytest.approx(1e3 * floor)
        assert table.loc[name, "times the floor"] == pytest.approx(median[name] / floor)


@pytest.mark.parametrize("name", ["crash", "segments", "segments-alone", "stale-cache"])
def test_crash_tables_say_what_the_runs_say(name: str) -> None:
    record = evidence.load(name)
    crashes, predictions = gpu_tables.crash_table(record), gpu_tables.prediction_table(record)
    for cell in raw(name):
        assert crashes.loc[cell["name"], "outcome"] == cell["outcome"]
        assert predictions.loc[cell["name"], "predicted"] == cell.get("predicted", "")
        crash, prediction = crashes.loc[cell["name"]], predictions.loc[cell["name"]]
        if "rows_wrong" in cell:
            lost = f"{cell['rows_wrong']:,} of {cell['rows']:,}"
            foreign = f"{cell['rows_neighbour']:,} of {cell['rows']:,}"
            assert (crash["rows of V lost"], crash["of them a neighbour's"]) == (lost, foreign)
        for column, field in (
            ("reads behind V", "overread_bytes"),
            ("mapped behind V", "mapped_bytes"),
        ):
            mib = f"{cell[field] / 2**20:,.1f} MiB" if field in cell else ""
            assert prediction[column] == mib
        timed = [n for kernel, n in cell["configs"].items() if "clone" in kernel]
        assert crash["configurations timed"] == (str(max(timed)) if timed else "")


def test_agreements_are_shown_as_recorded() -> None:
    table = gpu_tables.agreement_table(evidence.load("step"))["relative difference"]
    for cell in raw("step"):
        if cell["kind"] == "agreement":
            recorded = pytest.approx(float(cell["relative_error"]), abs=6e-5, nan_ok=True)
            assert table[cell["name"]] == recorded


def test_the_sanitizer_table_measures_from_the_end_of_v() -> None:
    (cell,) = raw("sanitizer")
    table = gpu_tables.sanitizer_table(evidence.load("sanitizer"))
    past = cell["address"] - cell["value_pool_end"]
    assert table["bytes past the end of V"] == past
    assert 0 <= past < 2 * cell["pool_numel"], "the clone reads as far behind V as K is long"
    assert table["bad accesses"] == cell["errors"] > 0


def test_the_clone_is_as_long_as_the_pull_request_says() -> None:
    runs = evidence.load("crash").of(CrashRun)
    assert runs["shared"].clones == ["545587200 bfloat16"]
    assert runs["separate"].clones == []
    assert any(":1176 autotune_to_one_config" in frame for frame in runs["shared"].frames)


def test_a_second_device_beside_the_first_changes_nothing(data, monkeypatch) -> None:
    stored = Path(__file__).resolve().parents[2] / "data"
    shutil.copytree(stored, data)
    before = (evidence.load("step"), outcomes.outcome_lines())
    first = data / "evidence" / "nvidia-h200-torch2.11.0"
    second = data / "evidence" / "a-card-torch2.11.0"
    shutil.copytree(first, second)
    for path in second.glob("*.json"):
        path.write_text(path.read_text().replace("NVIDIA H200", "A Card"))
    assert (evidence.load("step"), outcomes.outcome_lines()) == before
    monkeypatch.setenv("OMNI_KV_DEVICE_RECORD", second.name)
    assert evidence.load("step").provenance.device == "A Card"
    assert "A Card" in outcomes.outcome_lines()[-1]
    monkeypatch.setenv("OMNI_KV_DEVICE_RECORD", "no-such-card")
    with pytest.raises(evidence.EvidenceError, match=r"no-such-card.*a-card-torch2\.11\.0"):
        evidence.load("step")


def test_a_wheel_in_somebodys_repository_names_the_packages_version(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("OMNI_KV_REVISION", raising=False)
    monkeypatch.setattr(evidence, "PACKAGE_PARENT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert evidence.revision() == __version__
