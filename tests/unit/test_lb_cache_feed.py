"""The events of one engine, from a publisher that loses some, restarts, keeps few of them, or sends what is no batch at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lb.cache_events.decoder import MAX_BATCH_BYTES, BatchError, Removed, Stored, read_batch
from lb.cache_events.feed import CacheFeed
from policies.routing.block_index import BlockIndex

SIZE = 4


def stored(*hashes: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    ids = [one * 10 + at for one in hashes for at in range(SIZE)]
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    } | more


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """An engine's process: it numbers its batches and keeps the last `kept` of them."""

    def __init__(self, kept: int = 10_000, started: float = 0.0) -> None:
        self.batches: list[bytes] = []
        self.kept = kept
        self.started = started

    def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        number = len(self.batches)
        self.batches.append(msgspec.msgpack.encode([self.started + number, list(events), 0]))
        return number, self.batches[number]

    def replay(self, feed: CacheFeed) -> None:
        """Serve replays until none is wanted."""
        for _ in range(5):
            start = feed.wants_replay_from
            if start is None:
                return
            for number in range(max(start, len(self.batches) - self.kept), len(self.batches)):
                feed.replayed(number, self.batches[number])
            feed.replay_ended()
        raise AssertionError("it wants replays without end")


def begun(publisher: Publisher) -> tuple[CacheFeed, BlockIndex]:
    index = BlockIndex()
    feed = CacheFeed(index, "a")
    publisher.replay(feed)
    return feed, index


def names(feed: CacheFeed) -> set[Any]:
    return set(feed.cache.blocks)


# --- batches


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize("name", [7, b"\x01" * 32, 2**64 - 1])
def test_both_forms_are_read(as_rows: bool, name: Any) -> None:
    if as_rows:
        events: list[Any] = [
            ["BlockStored", [name], None, [1, 2], 2, None],
            ["BlockRemoved", [name]],
            ["AllBlocksCleared"],
        ]
    else:
        events = [
            {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": None, "token_ids": [1, 2],
             "block_size": 2, "lora_id": None, "medium": None, "lora_name": None, "session_id": "s", "of_later": 1},
            {"type": "BlockRemoved", "block_hashes": [name], "medium": None},
            {"type": "AllBlocksCleared"},
        ]  # fmt: skip
    first, second, third = read_batch(msgspec.msgpack.encode([1.5, events, 3]))[0]
    assert (first.block_hashes, first.token_ids, first.block_size) == ([name], [1, 2], 2)
    assert second.block_hashes == [name]
    assert type(third).__name__ in ("Cleared", "_ClearedRow")
    assert read_batch(msgspec.msgpack.encode([1.5, events]))[1] == 0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0, [{"type": "Other"}]]),
        msgspec.msgpack.encode([1.0, [stored(1) | {"token_ids": ["a"]}]]),
        msgspec.msgpack.encode([1.0, [stored(1) | {"block_hashes": None}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", 1]]]),
        b"\xc0" * (MAX_BATCH_BYTES + 1),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(BatchError):
        read_batch(payload)


def test_no_bytes_of_a_batch_raise_anything_else() -> None:
    rng = random.Random(3)
    batch = bytearray(msgspec.msgpack.encode([1.0, [stored(1, 2), removed(1), CLEARED], 0]))
    for _ in range(3000):
        changed = bytearray(batch)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        feed = CacheFeed(BlockIndex(), "a")
        feed.replay_ended()
        feed.live(0, bytes(changed))
        assert feed.batches == 1
        assert len(feed.cache.blocks) <= 3


# --- order


def test_a_feed_from_the_first_batch_knows_all() -> None:
    publisher = Publisher()
    publisher.publish(stored(1, 2))
    feed, _ = begun(publisher)
    assert (names(feed), feed.cache.complete) == ({1, 2}, True)
    feed.live(*publisher.publish(removed(2), stored(3, parent=1)))
    assert (names(feed), feed.cache.complete, feed.blocks) == ({1, 3}, True, 4)


def test_an_engine_that_has_published_nothing_has_nothing() -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    assert feed.cache.complete
    feed.live(*publisher.publish(stored(1)))
    assert (names(feed), feed.cache.complete) == ({1}, True)


def test_an_engine_that_has_not_kept_its_first_batches_is_known_in_part_until_it_is_empty() -> None:
    publisher = Publisher(kept=1)
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    feed, _ = begun(publisher)
    assert (names(feed), feed.cache.complete) == ({2}, False)
    feed.live(*publisher.publish(CLEARED, stored(3)))
    assert (names(feed), feed.cache.complete) == ({3}, True)


def test_what_comes_during_a_replay_waits_and_is_applied_once() -> None:
    publisher = Publisher()
    feed = CacheFeed(BlockIndex(), "a")
    batches = [publisher.publish(stored(at)) for at in range(400)]
    for batch in batches[:350]:
        feed.live(*batch)
    publisher.replay(feed)
    assert (len(names(feed)), feed.batches, feed.restarts, feed.cache.copies) == (400, 400, 0, {})
    feed.live(*publisher.publish(stored(1000)))
    assert 1000 in names(feed)


def test_lost_batches_are_replayed() -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    feed.live(*publisher.publish(stored(1)))
    publisher.publish(stored(2))
    publisher.publish(removed(1))
    feed.live(*publisher.publish(stored(3)))
    assert feed.wants_replay_from == 0
    publisher.replay(feed)
    assert (names(feed), feed.cache.complete, feed.gaps, feed.restarts) == ({2, 3}, True, 1, 0)


def test_the_last_batches_that_were_lost_are_found_by_a_check() -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    feed.live(*publisher.publish(stored(1)))
    publisher.publish(stored(2))
    feed.check()
    publisher.replay(feed)
    assert (names(feed), feed.gaps) == ({1, 2}, 0)
    feed.check()
    publisher.replay(feed)
    assert (names(feed), feed.cache.copies) == ({1, 2}, {})


def test_lost_batches_that_nobody_has_kept_make_all_void() -> None:
    publisher = Publisher(kept=2)
    feed, _ = begun(publisher)
    feed.live(*publisher.publish(stored(1)))
    for at in range(2, 6):
        publisher.publish(stored(at))
    feed.live(*publisher.publish(stored(6)))
    publisher.replay(feed)
    assert (names(feed), feed.cache.complete) == ({5, 6}, False)


def test_a_new_process_is_recognized_by_its_first_batch() -> None:
    old, new = Publisher(), Publisher(started=1000.0)
    feed, _ = begun(old)
    for at in range(5):
        feed.live(*old.publish(stored(at)))
    feed.live(*new.publish(stored(77)))
    new.replay(feed)
    assert (names(feed), feed.cache.complete, feed.restarts) == ({77}, True, 1)


@pytest.mark.parametrize("published", [0, 2, 5, 9])
def test_a_new_process_is_recognized_by_a_check_however_much_it_has_published(published: int) -> None:
    old, new = Publisher(), Publisher(started=1000.0)
    feed, _ = begun(old)
    for at in range(5):
        feed.live(*old.publish(stored(at)))
    for at in range(published):
        new.publish(stored(100 + at))
    feed.check()
    new.replay(feed)
    assert (names(feed), feed.cache.complete) == ({100 + at for at in range(published)}, True)
    assert feed.restarts == 1


def test_a_new_process_that_is_ahead_is_recognized_by_the_replay_of_a_gap() -> None:
    old, new = Publisher(), Publisher(started=1000.0)
    feed, _ = begun(old)
    feed.live(*old.publish(stored(1)))
    for at in range(3):
        new.publish(stored(100 + at))
    feed.live(*new.publish(stored(103)))
    new.replay(feed)
    assert (names(feed), feed.restarts) == ({100, 101, 102, 103}, 1)


def test_repetitions_change_nothing() -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    batch = publisher.publish(stored(1))
    feed.live(*batch)
    feed.live(*batch)
    assert (names(feed), feed.cache.copies, feed.restarts) == ({1}, {}, 0)
    assert feed.wants_replay_from is None


def test_without_replays_what_comes_counts_and_a_gap_makes_all_void() -> None:
    publisher = Publisher()
    feed = CacheFeed(BlockIndex(), "a")
    feed.replay_failed()
    feed.check()
    assert feed.wants_replay_from is None, "nobody would respond"
    publisher.publish(stored(1))
    feed.live(*publisher.publish(stored(2)))
    assert (names(feed), feed.cache.complete) == ({2}, False)
    publisher.publish(stored(3))
    feed.live(*publisher.publish(stored(4)))
    feed.replay_failed()
    assert names(feed) == {4}


def test_a_check_that_nobody_responds_to_changes_nothing() -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    feed.live(*publisher.publish(stored(1)))
    feed.check()
    feed.live(*publisher.publish(stored(2)))
    feed.replay_failed()
    assert (names(feed), feed.cache.complete) == ({1, 2}, True)


@pytest.mark.parametrize("ends", [True, False])
def test_a_replay_with_holes_is_requested_again_from_there(ends: bool) -> None:
    publisher = Publisher()
    for at in range(10):
        publisher.publish(stored(at))
    feed = CacheFeed(BlockIndex(), "a")
    for number in (0, 1, 2, 5, 6):
        feed.replayed(number, publisher.batches[number])
    if ends:
        feed.replay_ended()
    else:
        feed.replay_broke()
    assert feed.wants_replay_from == 2
    publisher.replay(feed)
    assert (names(feed), feed.cache.complete, feed.cache.copies) == (set(range(10)), True, {})


def test_waiting_batches_have_a_limit() -> None:
    publisher = Publisher()
    feed = CacheFeed(BlockIndex(), "a")
    for at in range(10):
        feed.live(*publisher.publish(stored(at, of_later="x" * (2**21 - 1000))))
    assert feed._waiting_bytes <= 8 * 2**20
    publisher.replay(feed)
    assert names(feed) == set(range(10))


# --- what is not followed


@pytest.mark.parametrize(
    ("event", "rank", "why"),
    [
        (stored(1, group_idx=1), 0, "attention"),
        (stored(1, kv_cache_spec_kind="sliding_window"), 0, "attention"),
        (stored(1), 1, "data_parallel"),
        (stored(1, extra_keys=[["x"], None]), 0, "unreadable"),
        ({"type": "Other"}, 0, "unreadable"),
        (stored(1, block_size=3), 0, "block_size"),
    ],
)
def test_what_cannot_be_followed_is_not_known_until_the_next_process(
    event: dict[str, Any], rank: int, why: str
) -> None:
    publisher = Publisher()
    feed, _ = begun(publisher)
    feed.live(*publisher.publish(stored(5)))
    publisher.batches.append(msgspec.msgpack.encode([1.0, [event], rank]))
    feed.live(1, publisher.batches[1])
    feed.live(*publisher.publish(stored(6)))
    assert (feed.cache.refused, names(feed), feed.cache.complete) == (why, set(), False)
    new = Publisher(started=1000.0)
    feed.live(*new.publish(stored(1)))
    new.replay(feed)
    assert (feed.cache.refused, names(feed)) == ("", {1})


@pytest.mark.parametrize(
    ("more", "root", "depth"),
    [
        ({}, "", 1),
        ({"extra_keys": [None]}, "", 1),
        ({"extra_keys": [["l"]], "lora_name": "l"}, "l", 1),
        ({"extra_keys": [["l"]], "lora_name": "l"}, "", 0),
        ({"extra_keys": [["salt"]]}, "", 0),
        ({"lora_id": 3}, "", 0),
        ({"group_idx": 0, "kv_cache_spec_kind": "full_attention"}, "", 1),
    ],
)
def test_adapters_and_other_keys(more: dict[str, Any], root: str, depth: int) -> None:
    publisher = Publisher()
    publisher.publish(stored(1, **more))
    feed, index = begun(publisher)
    block = index.pinned_chain([10, 11, 12, 13], root)
    assert index.depth(block, feed.cache) == depth


# --- anything at all


@pytest.mark.parametrize("seed", range(20))
def test_losses_and_restarts_end_in_what_the_engine_has(seed: int) -> None:
    rng = random.Random(seed)
    publisher = Publisher()
    feed, index = begun(publisher)
    cached: list[int] = []
    for step in range(300):
        if rng.random() < 0.01:
            publisher = Publisher(started=1000.0 * step)
            cached = []
        events = []
        for _ in range(rng.randrange(1, 4)):
            if cached and rng.random() < 0.4:
                events.append(removed(cached.pop(rng.randrange(len(cached)))))
            else:
                cached.append(rng.randrange(50))
                events.append(stored(cached[-1]))
        batch = publisher.publish(*events)
        if rng.random() > 0.1:
            feed.live(*batch)
        if rng.random() < 0.3:
            publisher.replay(feed)
    feed.check()
    publisher.replay(feed)
    index.tidy()
    assert names(feed) == set(cached)
    assert sum(feed.cache.copies.values()) == len(cached) - len(set(cached))
    assert feed.cache.complete


def test_types_are_those_of_the_decoder() -> None:
    kinds: list[Callable[..., Any]] = [Stored, Removed]
    assert [
        type(one) for one in read_batch(msgspec.msgpack.encode([0.0, [stored(1), removed(1)]]))[0]
    ] == kinds
