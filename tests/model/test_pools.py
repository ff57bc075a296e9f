import pytest
import torch

from omni_kv.model.geometry import preset
from omni_kv.model.pools import make_pools

TINY = preset("tiny")


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_flat_slot_views_alias_their_block_shaped_cache(layout):
    pools = make_pools(TINY, layout)
    for layer in range(TINY.num_layers):
        for cache, slots in (
            (pools.key_cache(layer), pools.key_slots(layer)),
            (pools.value_cache(layer), pools.value_slots(layer)),
        ):
            assert slots.shape == (TINY.num_slots, TINY.num_kv_heads, TINY.head_dim)
            slots[TINY.block_size + 3] = 7.0
            assert (cache[1, 3] == 7.0).all()
            assert (cache == 7.0).sum() == cache[1, 3].numel()


def test_separate_keys_and_values_do_not_share_storage():
    pools = make_pools(TINY, "separate")
    storages = {storage(t) for t in (*pools.keys, *pools.values)}
    assert len(storages) == 2 * TINY.num_layers
    pools.value_cache(0).fill_(1.0)
    assert not pools.key_cache(0).any()


def test_shared_halves_share_storage_and_v_begins_where_k_ends():
    pools = make_pools(TINY, "shared")
    key, value = pools.key_slots(0), pools.value_slots(0)
    assert storage(key) == storage(value) != storage(pools.key_slots(1))
    assert (key.storage_offset(), value.storage_offset()) == (0, TINY.pool_numel)
    value.fill_(1.0)
    assert not key.any()


@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_nbytes_is_what_the_geometry_says(layout):
    pools = make_pools(TINY, layout)
    assert pools.nbytes == TINY.cache_nbytes
    storages = {storage(t): t.untyped_storage().nbytes() for t in (*pools.keys, *pools.values)}
    assert sum(storages.values()) == TINY.cache_nbytes


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'woven'; known: shared, separate"):
        make_pools(TINY, "woven")


def test_pools_can_be_laid_into_given_memory():
    made = []

    def allocate(shape, dtype):
        made.append(torch.ones(shape, dtype=dtype))
        return made[-1]

    pools = make_pools(TINY, "shared", allocate=allocate)
    assert [storage(t) for t in made] == [storage(t) for t in pools.keys]
