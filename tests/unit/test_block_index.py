"""The index of blocks against a naive model, within its limits, and with engines whose hashes have nothing in common."""

from __future__ import annotations

import random

import pytest

from policies.routing.block_index import Block, BlockIndex, CacheState, ancestor, common_block

SIZE = 4


def tokens(*blocks: int) -> list[int]:
    return [block * 10 + at for block in blocks for at in range(SIZE)]


def store(index: BlockIndex, cache: CacheState, *blocks: int, seed: int = 0, above: int = 0) -> None:
    """Store a chain of blocks; the first `above` of them are there already. An engine's name of a block: its path and the seed."""
    names = [hash((seed, blocks[: end + 1])) for end in range(len(blocks))]
    parent = names[above - 1] if above else None
    index.stored(cache, parent, names[above:], tokens(*blocks[above:]), SIZE)


def name(*blocks: int, seed: int = 0) -> int:
    return hash((seed, blocks))


def held(index: BlockIndex, target: str, *blocks: int) -> int:
    block = index.pinned_chain(tokens(*blocks))
    cache = index.cache(target)
    assert cache is not None
    depth = index.depth(block, cache)
    by_levels = next((depth for mask, depth in index.levels(block) if mask & cache.bit), 0)
    index.unpin(block)
    assert depth == by_levels
    return depth


def audit(index: BlockIndex) -> None:
    caches = [*index._caches.values(), *index._dead]
    assert index.held == sum(len(cache.blocks) for cache in caches)
    children: dict[Block, int] = {}
    for key, block in index._blocks.items():
        assert block.key == key
        assert block.depth == block.parent.depth + 1
        assert block.parent.depth == 0 or index._blocks[block.parent.key] is block.parent
        children[block.parent] = children.get(block.parent, 0) + 1
        holders = {cache.bit for cache in caches if block in cache.blocks.values()}
        assert block.holders == sum(holders)
    for block in index._blocks.values():
        assert block.pins >= children.get(block, 0)
        assert block.holders or block.pins, "nothing needs it"


def test_engines_with_other_seeds_share_the_blocks_of_equal_tokens() -> None:
    index = BlockIndex()
    one, other = index.clear("one", complete=True), index.clear("other", complete=True)
    store(index, one, 1, 2, 3, seed=1)
    store(index, other, 1, 2, seed=2)
    store(index, other, 1, 2, 4, seed=2, above=2)
    assert len(index) == 4
    assert [held(index, target, 1, 2, 3) for target in ("one", "other")] == [3, 2]
    assert held(index, "other", 1, 2, 4, 5) == 3
    assert held(index, "one", 2, 3) == 0, "a block is what it is below its parent only"
    audit(index)


def test_a_block_that_is_there_twice_is_lost_with_its_second_copy() -> None:
    index = BlockIndex()
    cache = index.clear("a", complete=True)
    store(index, cache, 1, 2)
    store(index, cache, 1, 2)
    index.removed(cache, [name(1, 2)])
    assert held(index, "a", 1, 2) == 2
    index.removed(cache, [name(1, 2)])
    assert held(index, "a", 1, 2) == 1
    index.removed(cache, [name(1, 2), name(7)])
    assert held(index, "a", 1, 2) == 1
    index.removed(cache, [name(1), name(1)])
    assert held(index, "a", 1, 2) == 0
    assert len(index) == 0
    audit(index)


def test_a_copy_in_a_second_medium_keeps_a_block() -> None:
    index = BlockIndex()
    cache = index.clear("a", complete=True)
    store(index, cache, 1)
    index.stored(cache, None, [name(1), name(9)], [], SIZE)
    index.removed(cache, [name(1)])
    assert held(index, "a", 1) == 1


def test_adapters_and_what_else_distinguishes_blocks() -> None:
    index = BlockIndex()
    cache = index.clear("a", complete=True)
    index.stored(cache, None, [1], tokens(1), SIZE, "lora")
    index.stored(cache, None, [2], tokens(2), SIZE, "", ["an image"])
    assert held(index, "a", 1) == held(index, "a", 2) == 0
    block = index.pinned_chain(tokens(1), "lora")
    assert index.depth(block, cache) == 1
    assert index.knows_adapter("lora")
    assert not index.knows_adapter("other")


def test_a_block_below_one_that_is_not_known_is_left_out() -> None:
    index = BlockIndex()
    cache = index.clear("a", complete=False)
    store(index, cache, 1, 2, 3, above=2)
    assert (len(index), cache.orphans) == (0, 1)


@pytest.mark.parametrize(
    ("blocks", "size", "count", "why"),
    [
        ((1, 2), 8, 1, "block_size"),
        ((1, 2), SIZE, 3, "block_size"),
        ((1, 2), 3, 2, "block_size"),
        (tuple(range(9)), SIZE, 9, "too_many_blocks"),
    ],
)
def test_what_cannot_be_followed_is_refused_until_it_is_cleared(
    blocks: tuple[int, ...], size: int, count: int, why: str
) -> None:
    index = BlockIndex(max_blocks_per_target=8)
    store(index, index.clear("other", complete=True), 5)
    cache = index.clear("a", complete=True)
    index.stored(cache, None, list(range(count)), tokens(*blocks), size)
    refused = index.cache("a")
    assert refused is not None
    assert refused.refused == why
    assert not refused.complete
    store(index, refused, 1)
    assert not refused.blocks
    index.tidy()
    assert len(index) == 1, "nothing of it is left"
    store(index, index.clear("a", complete=True), 1)
    assert held(index, "a", 1) == 1
    audit(index)


def test_all_targets_together_have_a_limit_and_so_have_adapters() -> None:
    index = BlockIndex(max_blocks=10)
    caches = [index.clear(target, complete=True) for target in "abc"]
    for at, cache in enumerate(caches):
        store(index, cache, *range(at * 10, at * 10 + 4))
    assert [index.cache(target).refused for target in "abc"] == ["", "", "too_many_blocks"]  # type: ignore[union-attr]
    index.tidy()
    for at in range(1100):
        cache = index.cache("a")  # type: ignore[assignment]
        index.stored(cache, None, [1000], tokens(1), SIZE, f"lora-{at}")
        index.removed(cache, [1000])
    assert index.cache("a").refused == "too_many_adapters"  # type: ignore[union-attr]


def test_a_target_is_forgotten_at_once_and_taken_apart_bit_by_bit() -> None:
    index = BlockIndex()
    cache = index.clear("a", complete=True)
    store(index, cache, *range(100))
    again = index.clear("a", complete=False)
    assert held(index, "a", *range(100)) == 0
    assert again.bit != cache.bit
    index.tidy(10)
    assert index.held == 90
    assert index.tidy_is_due
    index.tidy()
    assert (len(index), index.held, index.tidy_is_due) == (0, 0, False)
    index.forget("a")
    index.forget("a")
    index.tidy()
    assert index.block_size == 0
    assert index.clear("b", complete=True).bit == 1
    audit(index)


def test_ancestors_and_common_blocks_of_long_chains() -> None:
    index = BlockIndex()
    index.block_size = SIZE
    one = index.pinned_chain(tokens(*range(500)))
    other = index.pinned_chain(tokens(*range(300), *range(1000, 1100)))
    assert (one.depth, other.depth) == (500, 400)
    for depth in (0, 1, 2, 255, 256, 499, 500):
        block = ancestor(one, depth)
        assert block.depth == depth
    assert common_block(one, other) is ancestor(one, 300) is ancestor(other, 300)
    assert common_block(one, one) is one
    assert common_block(one, ancestor(one, 7)).depth == 7
    assert common_block(one, index.pinned_chain(tokens(7))).depth == 0


def test_an_engine_with_a_least_recently_used_cache_is_followed_exactly() -> None:
    """Chains end before they begin, as engines evict; a block may have several copies."""
    rng = random.Random(7)
    index = BlockIndex()
    for target in "ab":
        index.clear(target, complete=True)
    chains: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    for _ in range(400):
        target = rng.choice("ab")
        cache = index.cache(target)
        assert cache is not None
        mine = chains[target]
        if mine and rng.random() < 0.45:
            chain = mine.pop(rng.randrange(len(mine)))
            index.removed(cache, [name(*chain[:end], seed=ord(target)) for end in range(len(chain), 0, -1)])
        else:
            chain = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
            store(index, cache, *chain, seed=ord(target))
            mine.append(chain)
        wanted = [rng.randrange(3) for _ in range(8)]
        for one in "ab":
            best = max((common(wanted, chain) for chain in chains[one]), default=0)
            assert held(index, one, *wanted) == best
    audit(index)


def common(one: list[int], other: tuple[int, ...]) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
