from pathlib import Path

import pytest
import torch

from omni_kv.publish.sources import link, place, read_next, url

PASS = "torch._inductor.fx_passes.reinplace:reinplace_inplaceable_ops_core"


def line_of(path, number):
    file = Path(torch.__file__).parent.parent / path
    return file.read_text(encoding="utf-8").splitlines()[number - 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (PASS, "def reinplace_inplaceable_ops_core"),
        (PASS, "def tensor_with_same_storage_already_reinplaced"),
        ("torch._inductor.lowering:as_strided", "def as_strided"),
        ("torch._prims_common:clone_preserve_strides", "(needed_size,)"),
    ],
)
def test_the_line_that_is_linked_is_the_one_that_is_meant(name, text):
    path, number = place(name, text)
    assert text in line_of(path, number)
    assert f"{path}#L{number}" in link(name, text)


def test_what_is_gone_is_said_and_not_linked():
    for name, text in ((PASS, "no such line at all"), ("torch._inductor.lowering:gone", "")):
        with pytest.raises(LookupError, match="does not have"):
            place(name, text)
        assert "http" not in link(name, text)
        assert "does not have" in read_next({f"{name}#{text}": "why"}).data


def test_a_release_is_linked_by_its_tag_and_a_nightly_by_its_commit():
    assert url("torch/x.py", 3, "2.11.0").endswith("/blob/v2.11.0/torch/x.py#L3")
    assert f"/blob/{torch.version.git_version}/" in url("torch/x.py", 3, "2.15.0.dev20261101")
