"""The events of one engine, in order: what is applied, what is missing, and when all that was known is void. Pure.

Batches are numbered from 0 on by each process of an engine. Their feed

- begins with a replay from 0: if the engine has kept its first batch, or has published none, all of its cache is known (`complete`);
- requests a replay when a number is missing, from the last one that it has: if that batch is another one than before, or the engine
  has not kept what is missing, then all that was known is void;
- takes a number that has been for a repetition if the batch is the same, and else for a new process: then all is void, too;
- goes on with what comes if no replay is served. What is missing then makes it incomplete.

What comes while a replay is under way waits for its end, up to MAX_WAITING_BYTES.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from lb.cache_events.decoder import REMOVED, STORED, BatchError, read_batch
from policies.routing.block_index import BlockIndex, CacheState

MAX_WAITING_BYTES: Final = 8 * 2**20
REMEMBERED: Final = 256  # digests of batches, by which a repetition is recognized

# Of these, a prefix of blocks is in the cache or is not. Of others, such as windows, parts of it are.
_WHOLE_PREFIXES: Final = frozenset(
    {None, "full_attention", "mla_attention", "sink_full_attention", "unknown"}
)


class CacheFeed:
    """What one target reports, applied to an index. `wants_replay_from` is a number while a replay is wanted or under way."""

    def __init__(self, index: BlockIndex, target_id: str) -> None:
        self.target_id = target_id
        self.wants_replay_from: int | None = 0
        self.batches = self.blocks = self.gaps = self.restarts = self.errors = 0
        self._index = index
        self._next: int | None = None  # the number that is expected; None: any
        self._digests: dict[int, int] = {}
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self.replays = False  # the engine has replayed something before
        self._replayed = False  # something of the present replay has come
        self._lacking = False  # it is for batches that are missing
        self._again = False  # another one has to follow: it is of a process that is over, or not whole
        index.clear(target_id, complete=False)

    @property
    def cache(self) -> CacheState:
        """What is known of the target's cache."""
        cache = self._index.cache(self.target_id)
        return cache if cache is not None else self._index.clear(self.target_id, complete=False)

    def live(self, number: int, payload: bytes) -> None:
        """A batch has been published."""
        if self.wants_replay_from is not None:
            self._wait(number, payload)
            return
        expected = self._next
        if expected is None or number == expected:
            self._apply(number, payload)
        elif number > expected:
            self.gaps += 1
            self._lacking = True
            self.wants_replay_from = max(0, expected - 1)
            self._wait(number, payload)
        elif self._digests.get(number) != hash(payload):
            self._begin_again()
            self.wants_replay_from = 0
            self._wait(number, payload)

    def check(self) -> None:
        """Nothing has come for a while: look whether the engine is the same process, and has published nothing that was lost."""
        if self.wants_replay_from is None and self._next is not None and self.replays:
            self.wants_replay_from = max(0, self._next - 1)

    def replayed(self, number: int, payload: bytes) -> None:
        """A batch has come that was requested."""
        if self.wants_replay_from is None or self._again:
            return
        self.replays = True
        expected = self._next
        first, self._replayed = not self._replayed, True
        if expected is None:
            if first:
                self._index.clear(self.target_id, complete=number == 0)
            self._apply(number, payload)
        elif number == expected:
            self._apply(number, payload)
        elif number > expected and not first:  # lost on the way
            self._again = True
        elif number > expected:  # the engine has not kept what is missing
            self._index.clear(self.target_id, complete=False)
            self._apply(number, payload)
        elif number == expected - 1 and first and self._digests.get(number) != hash(payload):
            self._begin_again()
            self._again = True

    def replay_ended(self) -> None:
        """All that was requested has come."""
        start = self.wants_replay_from
        if start is None:
            return
        self.replays = True
        if (
            not self._replayed
        ):  # not even the last batch that we know, if we know one: that was of another process
            if self._next:
                self._begin_again()
            if start:
                self._again = True
            else:  # it has published nothing
                self._index.clear(self.target_id, complete=True)
                self._next = 0
        self._end_replay()

    def replay_broke(self) -> None:
        """The rest of a replay has not come: request it once more."""
        if self.wants_replay_from is not None:
            self._again = True
            self._end_replay()

    def replay_failed(self) -> None:
        """No replay is served: go on with what comes."""
        if self.wants_replay_from is None:
            return
        if self._lacking or self._next is None:
            self._index.clear(self.target_id, complete=False)
            self._next = None
        self._end_replay()

    # --- inside

    def _end_replay(self) -> None:
        self._replayed = False
        if self._again:
            self._again, self.wants_replay_from = False, max(0, (self._next or 0) - 1)
            return
        self.wants_replay_from, self._lacking = None, False
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for number, payload in waiting:
            # What the replay has brought as well may be older than all that is remembered.
            if self._next is None or number >= self._next or number in self._digests:
                self.live(number, payload)

    def _begin_again(self) -> None:
        """The engine is a new process."""
        self.restarts += 1
        self._index.clear(self.target_id, complete=False)
        self._digests.clear()
        self._next = None
        self._waiting.clear()  # of the old process, or else the replay brings it
        self._waiting_bytes = 0

    def _wait(self, number: int, payload: bytes) -> None:
        if self._waiting_bytes + len(payload) > MAX_WAITING_BYTES:
            self._waiting.clear()  # a replay brings it, or it is a gap
            self._waiting_bytes = 0
        self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        digests = self._digests
        digests[number] = hash(payload)
        if len(digests) > REMEMBERED:
            del digests[next(iter(digests))]
        self.batches += 1
        try:
            events, rank = read_batch(payload)
        except BatchError:
            self.errors += 1
            self._index.refuse(self.cache, "unreadable")
            return
        if rank:
            self._index.refuse(self.cache, "data_parallel")
            return
        for event in events:
            self._take(event)

    def _take(self, event: object) -> None:
        index, cache = self._index, self.cache
        if isinstance(event, REMOVED):
            self.blocks += len(event.block_hashes)
            index.removed(cache, event.block_hashes)
        elif isinstance(event, STORED):
            self.blocks += len(event.block_hashes)
            if event.group_idx or event.kv_cache_spec_kind not in _WHOLE_PREFIXES:
                index.refuse(cache, "attention")
                return
            name = event.lora_name or ("" if event.lora_id is None else f"#{event.lora_id}")
            extra = None if event.extra_keys is None else _distinguishing(event.extra_keys, name)
            if extra is not None and len(extra) != len(event.block_hashes):
                self.errors += 1
                index.refuse(cache, "unreadable")
                return
            index.stored(
                cache,
                event.parent_block_hash,
                event.block_hashes,
                event.token_ids,
                event.block_size,
                name,
                extra,
            )
        else:
            index.clear(self.target_id, complete=True)


def _distinguishing(keys: list[object], lora: str) -> list[tuple[object, ...] | None] | None:
    """Return what distinguishes each block beside its tokens and its adapter; None if nothing does."""
    rest = [
        None if not isinstance(one, (list, tuple)) else tuple(key for key in one if key != lora) or None
        for one in keys
    ]
    return rest if any(one is not None for one in rest) else None
