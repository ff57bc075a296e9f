"""The candidate fixes are put in and taken out again, and refuse what they do not know."""

import pytest

from omni_kv.upstream import overlap_check


def test_the_pass_is_put_back_after_the_trial():
    from torch._inductor.fx_passes import reinplace

    original = reinplace.reinplace_inplaceable_ops_core
    with overlap_check():
        assert reinplace.reinplace_inplaceable_ops_core is not original
    assert reinplace.reinplace_inplaceable_ops_core is original


def test_a_pass_with_other_lines_is_refused(monkeypatch):
    from torch._inductor.fx_passes import reinplace

    monkeypatch.setattr(
        reinplace, "reinplace_inplaceable_ops_core", test_a_pass_with_other_lines_is_refused
    )
    with pytest.raises(RuntimeError, match="has no line"), overlap_check():
        pass
