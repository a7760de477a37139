"""The prefix cache shares, counts and evicts."""

from __future__ import annotations

import pytest

from skyserve_cli.engine.kv import BLOCK_TOKENS, BlockKey, BlockLease, PrefixCache, block_keys, blocks_for


def keys(*names: int) -> list[BlockKey]:
    return [(name,) * BLOCK_TOKENS for name in names]


def fill(cache: PrefixCache, *names: int) -> BlockLease:
    """A sequence whose blocks are all computed."""
    lease = cache.admit(keys(*names), len(names), spare=0)
    assert lease is not None
    for key in keys(*names)[len(lease.path) :]:
        cache.commit(lease, key)
    return lease


def held(cache: PrefixCache) -> set[BlockKey]:
    return {node.key for node in cache.nodes()}


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_a_rest_of_less_than_a_block_has_no_key() -> None:
    assert block_keys(range(40)) == [tuple(range(16)), tuple(range(16, 32))]


def test_a_released_prefix_is_found_again_and_shared() -> None:
    cache = PrefixCache(8)
    cache.release(fill(cache, 1, 2, 3))
    assert (cache.in_use, cache.cached, cache.free) == (0, 3, 5)
    first, second = fill(cache, 1, 2, 4), fill(cache, 1, 2, 4)
    assert first.path == second.path
    assert (cache.in_use, cache.cached) == (3, 1)


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    cache = PrefixCache(8)
    cache.release(fill(cache, 1, 9))
    lease = cache.admit(keys(2, 9), 2, spare=0)
    assert lease is not None
    assert lease.path == []


def test_equal_blocks_computed_at_once_are_merged() -> None:
    cache = PrefixCache(8)
    leases = [cache.admit(keys(1), 1, spare=0) for _ in range(2)]
    assert cache.in_use == 2
    for lease in leases:
        assert lease is not None
        cache.commit(lease, keys(1)[0])
    assert cache.in_use == 1


def test_a_block_computed_again_revives_the_cached_one() -> None:
    cache = PrefixCache(8)
    late = cache.admit(keys(1), 1, spare=0)  # finds nothing yet
    assert late is not None
    cache.release(fill(cache, 1))
    cache.commit(late, keys(1)[0])
    assert (cache.in_use, cache.cached, cache.free) == (1, 0, 7)


def test_the_least_recently_released_leaf_goes_first() -> None:
    cache = PrefixCache(4)
    old, new = fill(cache, 1, 2), fill(cache, 3, 4)
    cache.release(old)
    cache.release(new)
    cache.release(fill(cache, 1, 2))  # used again: now 3-4 is the oldest
    fill(cache, 5)
    assert held(cache) == {(n,) * BLOCK_TOKENS for n in (1, 2, 3, 5)}
    fill(cache, 6)
    assert held(cache) == {(n,) * BLOCK_TOKENS for n in (1, 2, 5, 6)}


def test_what_a_sequence_holds_is_never_evicted() -> None:
    cache = PrefixCache(3)
    fill(cache, 1, 2)
    assert cache.admit(keys(3, 4), 2, spare=0) is None
    assert held(cache) == set(keys(1, 2))


def test_an_admission_that_fails_changes_nothing() -> None:
    cache = PrefixCache(4)
    cache.release(fill(cache, 1, 2))
    # The two cached blocks would be revived, so they are not room for the three new ones.
    assert cache.admit(keys(1, 2, 3, 4, 5), 5, spare=0) is None
    assert (cache.in_use, cache.cached, cache.free) == (0, 2, 2)


@pytest.mark.parametrize(("spare", "admitted"), [(0, True), (1, True), (2, False)])
def test_spare_blocks_are_asked_for_but_not_taken(spare: int, admitted: bool) -> None:
    cache = PrefixCache(4)
    lease = cache.admit(keys(1, 2, 3), 3, spare=spare)
    assert (lease is not None) is admitted
    assert cache.in_use == (3 if admitted else 0)


def test_growing_evicts_and_stops_when_all_is_held() -> None:
    cache = PrefixCache(3)
    cache.release(fill(cache, 1, 2))
    lease = fill(cache, 3)
    assert [cache.grow(lease) for _ in range(3)] == [True, True, False]
    assert lease.blocks == cache.in_use == 3


def test_a_hot_prefix_does_not_grow_the_bookkeeping() -> None:
    cache = PrefixCache(4)
    for _ in range(5_000):
        cache.release(fill(cache, 1))
    assert len(cache._leaves) <= 2 * cache.capacity + 65
    fill(cache, 2, 3, 4, 5)
    assert cache.free == 0


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        PrefixCache(0)


def test_committing_without_a_private_block_is_refused() -> None:
    cache = PrefixCache(2)
    with pytest.raises(ValueError, match="nothing to commit"):
        cache.commit(fill(cache, 1), keys(2)[0])
