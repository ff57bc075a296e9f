"""What the names of cells and the texts of outcomes say, taken apart once."""

import json
from pathlib import Path

import pytest

from omni_kv.evidence import records
from omni_kv.evidence.cells import Timing
from omni_kv.evidence.outcomes import count

FILES = sorted((Path(__file__).resolve().parents[2] / "data" / "evidence").glob("*/*.json"))


@pytest.mark.parametrize(
    ("name", "parts", "ceiling"),
    [
        ("flash-attn-3/compiled separate", ("flash-attn-3", "compiled", "separate"), None),
        ("sdpa/eager shared", ("sdpa", "eager", "shared"), None),
        ("sdpa/layer, eager", (None, None, None), None),
        ("as it is", (None, None, None), None),
        ("ceiling/copy", (None, None, None), "copy"),
        ("sdpa, shared: ceiling/matmul", (None, None, None), "matmul"),
    ],
)
def test_the_name_of_a_timing_says_what_was_run(name, parts, ceiling) -> None:
    timing = Timing(name=name, seconds=[1.0])
    assert (timing.backend, timing.mode, timing.layout) == parts
    assert timing.ceiling == ceiling
    assert timing.is_ceiling is (ceiling is not None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_record_is_written_again_byte_for_byte(path: Path, tmp_path: Path) -> None:
    records.write(records.read(path), tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert list(json.loads(path.read_text())["cells"][0])[:2] == ["kind", "name"]


def test_a_count_is_the_number_before_of() -> None:
    assert (count("0 of 240"), count("192 of 240")) == (0, 192)
    for text in ("", "none", "02 wrong", "1,024 of 2,048"):
        with pytest.raises(ValueError, match="N of M"):
            count(text)
