import pytest
import torch
from torch._dynamo.utils import counters

from omni_kv.model.geometry import preset
from omni_kv.model.pools import make_pools
from omni_kv.model.rollout import frames_in_pool, rollout, window_of_chunk
from omni_kv.model.transformer import make_model

pytestmark = pytest.mark.compiles

TINY = preset("tiny")
CHUNKS = TINY.first_full_chunk + 4  # the ring wraps and the first frames behind the sink are gone


def generate(model, layout="separate", chunks=CHUNKS, **options):
    pools = make_pools(model.geometry, layout)
    with torch.no_grad():
        return list(rollout(model, pools, chunks=chunks, **options)), pools


@pytest.fixture(scope="module")
def model():
    return make_model(TINY)


@pytest.fixture(scope="module")
def eager(model):
    return generate(model)


def test_a_rollout_sees_more_until_the_window_is_full(eager):
    seen = [chunk.visible_tokens for chunk in eager[0]]
    full = TINY.first_full_chunk
    assert seen[: full + 1] == [(i + 1) * TINY.tokens_per_chunk for i in range(full + 1)]
    assert set(seen[full:]) == {TINY.visible_tokens}


def test_eager_layouts_agree_to_the_bit(model, eager):
    shared, pools = generate(model, "shared")
    for a, b in zip(shared, eager[0], strict=True):
        assert torch.equal(a.latents, b.latents)
    assert torch.equal(pools.value_slots(1), eager[1].value_slots(1))


def test_pages_in_random_order_change_nothing(model, eager):
    order = torch.randperm(TINY.num_blocks, generator=torch.Generator().manual_seed(1))
    shuffled, _ = generate(model, page_order=order)
    for a, b in zip(shuffled, eager[0], strict=True):
        torch.testing.assert_close(a.latents, b.latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset_name", ["tiny", "lingbot-480x768", "lingbot-480x832"])
def test_a_chunk_sees_the_sink_the_window_and_itself(preset_name):
    g = preset(preset_name)
    for chunk in range(g.first_full_chunk + 5):
        first = chunk * g.frames_per_chunk
        past = range(max(first - g.window_frames, 0), first + g.frames_per_chunk)
        wanted = sorted({*range(min(g.sink_frames, first)), *past})
        pool = frames_in_pool(g, chunk)
        visible = int(window_of_chunk(g, chunk).seq_lens) // g.tokens_per_frame
        seen = sorted(frame for frame in pool[:visible] if frame is not None)
        # Where sink and window overlap in a young video, frames in front of the window are sink.
        assert set(seen) >= set(wanted)
        assert len(seen) == visible == min(first + g.frames_per_chunk, g.visible_frames)


def test_the_window_matters(model, eager):
    pools = make_pools(TINY, "separate")
    with torch.no_grad():
        run = rollout(model, pools, chunks=2)
        next(run)
        pools.value_slots(0).zero_()  # what chunk 0 left behind in the first layer
        forgetful = next(run)
    assert not torch.allclose(forgetful.latents, eager[0][1].latents, atol=1e-3)


def test_compiled_layers_agree_with_eager_and_share_one_graph(eager):
    torch._dynamo.reset()
    counters.clear()
    compiled = make_model(TINY)
    compiled.compile_layers()
    chunks, pools = generate(compiled)
    for a, b in zip(chunks, eager[0], strict=True):
        torch.testing.assert_close(a.latents, b.latents, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pools.value_slots(1), eager[1].value_slots(1), rtol=1e-3, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_seed_decides(eager):
    again, _ = generate(make_model(TINY))
    other, _ = generate(make_model(TINY, seed=1))
    assert torch.equal(again[-1].latents, eager[0][-1].latents)
    assert not torch.allclose(other[-1].latents, eager[0][-1].latents, atol=1e-2)


def test_gradients_are_refused_in_plain_words(model):
    with pytest.raises(RuntimeError, match=r"inference only.*no_grad"):
        next(rollout(model, make_pools(TINY, "separate"), chunks=1))


def test_a_ragged_geometry_rolls_out():
    g = TINY.replace(block_size=7, pool_frames=9)
    assert g.tokens_per_frame % g.block_size
    chunks, _ = generate(make_model(g), chunks=TINY.first_full_chunk + 2)
    assert all(chunk.latents.isfinite().all() for chunk in chunks)
