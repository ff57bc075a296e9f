import pytest

from omni_kv.model.geometry import PRESETS, preset


def test_the_pull_requests_clone_has_545_587_200_elements():
    assert preset("lingbot-480x768").clone_numel == 545_587_200


def test_the_pull_requests_clones_copy_163_gib_a_chunk():
    assert round(preset("lingbot-480x768").clone_nbytes_per_chunk / 2**30) == 163


def test_lingbot_window_is_full_at_chunk_6_with_30_240_keys_for_4_320_queries():
    g = preset("lingbot-480x768")
    assert (g.first_full_chunk, g.visible_tokens, g.tokens_per_chunk) == (6, 30_240, 4_320)
    assert (g.dim, g.num_slots, g.pool_numel) == (5_120, 53_280, 272_793_600)
    assert g.chunk_seconds == 0.75


def test_a_frame_of_480x832_is_no_whole_number_of_pages():
    g = preset("lingbot-480x832")
    assert g.tokens_per_frame == 1_560
    assert g.tokens_per_frame % g.block_size
    assert g.num_blocks * g.block_size >= g.pool_frames * g.tokens_per_frame
    assert (g.num_blocks - 1) * g.block_size < g.pool_frames * g.tokens_per_frame


@pytest.mark.parametrize("block_size", [1, 16, 48, 256, 1_440])
def test_the_paging_unit_does_not_touch_the_eviction_unit(block_size):
    g = preset("lingbot-480x768").replace(block_size=block_size)
    assert g.visible_tokens == 30_240
    assert g.num_slots >= g.pool_frames * g.tokens_per_frame
    assert g.num_slots % block_size == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_filed_under_its_own_name(name):
    assert PRESETS[name].name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"dtype": "floaty"}, "no torch dtype"),
        ({"num_kv_heads": 3}, "no multiple"),
        ({"head_dim": 33}, "must be even"),
        ({"latent_height": 7}, "does not divide"),
        ({"pool_frames": 7}, "raise pool_frames"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"tiny.*{message}"):
        preset("tiny").replace(**changes)


def test_an_unknown_preset_lists_those_that_exist():
    with pytest.raises(ValueError, match="'huge'; known: tiny, lingbot"):
        preset("huge")
