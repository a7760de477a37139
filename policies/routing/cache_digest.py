"""Digests of caches: what load balancers report to each other of the prompts that were sent to replicas. Pure.

A prompt is cut at fixed PLACES. Its *mark* at a place is a keyed hash of all of it up to there, with its scope (model and tenant): two
prompts have the same mark only if they begin with the same text, up to a chance of 2**-32. An agent keeps a log of the marks that are new
to a replica (`CacheLog`), and every link to another agent reads on in it from where it was, within its bytes. The receiver keeps the marks of
each replica (`KnownCaches`), and finds how much of its own prompt each of them has. Nothing is sent twice within REFRESH_S, and marks
that are not repeated are forgotten after one to two times KEPT_S, as caches forget.

*What a digest reveals.* It has ids of replicas and marks, no text and no token. Who reads it without the key learns how long prompts are,
up to the distance of two places, and which of them begin alike; links are encrypted, so on the wire he sees only how many bytes there are. A
peer has the key: it can test whether a beginning of a prompt that it guesses was sent to a replica in the last minutes, in one scope
that it guesses as well. It learns nothing of the text after the first byte that it does not guess. It may have the requests themselves, as
the caller gives it only what is of zones that it serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from policies.routing.prefix_policy import MAX_PROMPT_BYTES

MARK_BYTES: Final = 4
REFRESH_S: Final = 120.0
KEPT_S: Final = 300.0
MOST_LOGGED: Final = 2**14  # marks that a link can still read
MOST_KEPT: Final = 2**13  # of each replica, before they are taken for old
MOST_REPLICAS: Final = 1024  # of each agent
_FIRST: Final = 256
_LARGER: Final = 16  # two places are an eighth to a sixteenth of the prompt apart, 256 bytes at least
_LEFT: Final = -1
_ROW_BYTES: Final = 3  # beside the id and the marks


def _places() -> tuple[int, ...]:
    found, at = [], _FIRST
    while at <= MAX_PROMPT_BYTES:
        found.append(at)
        at += max(_FIRST, at // _LARGER // _FIRST * _FIRST)
    return tuple(found)


PLACES: Final = _places()


def marks_of(key: bytes, scope: str, prompt: bytes) -> list[int]:
    """Return the mark of the prompt at each place that it reaches."""
    state = blake2b(
        scope.encode("utf-8", "surrogateescape") + b"\0", digest_size=MARK_BYTES, key=key, person=b"digest"
    )
    found, at = list[int](), 0
    for place in PLACES:
        if place > len(prompt):
            break
        state.update(prompt[at:place])
        at = place
        found.append(int.from_bytes(state.copy().digest(), "big"))
    return found


class Row(NamedTuple):
    """Marks of prompts that were sent to a replica; none: the replica has left."""

    target_id: str
    marks: tuple[int, ...]


class Digest(NamedTuple):
    """What one agent reports to another. The oldest of it is `age_s` old."""

    age_s: float
    rows: tuple[Row, ...]


class _Logged(NamedTuple):
    target_id: str
    mark: int
    zones: frozenset[str]  # of the request's residency
    at: float


class CacheLog:
    """What was sent to the replicas here, in order."""

    def __init__(self) -> None:
        self._log: list[_Logged] = []
        self._dropped = 0  # from its beginning
        self._known: dict[tuple[str, frozenset[str]], set[int]] = {}  # logged since `_since`
        self._since = 0.0

    @property
    def end(self) -> int:
        """How many entries there have been: a link that has read so many has nothing to read."""
        return self._dropped + len(self._log)

    def sent(self, target_id: str, marks: Iterable[int], zones: frozenset[str], now: float) -> None:
        """A prompt was sent to the replica."""
        if now - self._since > REFRESH_S:
            for marks_before in self._known.values():
                marks_before.clear()
            self._since = now
        known = self._known.setdefault((target_id, zones), set())
        for mark in marks:
            if mark not in known:
                known.add(mark)
                self._append(_Logged(target_id, mark, zones, now))

    def retain(self, target_ids: Collection[str], now: float) -> None:
        """These are the replicas from now on. Others have left, with their caches."""
        gone = {target_id for target_id, _ in self._known}.difference(target_ids)
        self._known = {key: marks for key, marks in self._known.items() if key[0] not in gone}
        for target_id in sorted(gone):
            self._append(_Logged(target_id, _LEFT, frozenset(), now))

    def read(self, start: int, served: Collection[str], room: int, now: float) -> tuple[Digest, int]:
        """Return what a peer may have that serves those zones, from entry number `start` on, and the number of the next one.

        It takes about `room` bytes at most.
        """
        at = max(0, start - self._dropped, len(self._log) - MOST_LOGGED)
        rows = list[tuple[str, list[int]]]()
        oldest = now
        while at < len(self._log) and room > 0:
            target_id, mark, zones, since = self._log[at]
            at += 1
            if not zones.issubset(served):
                continue
            oldest = min(oldest, since)
            goes_on = bool(rows) and rows[-1][0] == target_id and bool(rows[-1][1])
            if not goes_on or mark == _LEFT:
                rows.append((target_id, []))
                room -= _ROW_BYTES + len(target_id)
            if mark != _LEFT:
                rows[-1][1].append(mark)
                room -= MARK_BYTES
        digest = Digest(now - oldest, tuple([Row(name, tuple(marks)) for name, marks in rows]))
        return digest, at + self._dropped

    def _append(self, entry: _Logged) -> None:
        self._log.append(entry)
        if len(self._log) >= 2 * MOST_LOGGED:
            self._dropped += MOST_LOGGED
            del self._log[:MOST_LOGGED]


class Held(NamedTuple):
    """The replica of an agent (`source`) has the first `bytes` of a prompt."""

    source: str
    target_id: str
    bytes: int


class _Kept:
    """The marks of one replica: those of this period and of the one before; and those that were found already."""

    __slots__ = ("found", "new", "old", "since")

    def __init__(self, now: float) -> None:
        self.new: set[int] = set()
        self.old: set[int] = set()
        self.found: set[int] = set()
        self.since = now

    def age(self, now: float) -> None:
        if now - self.since > KEPT_S or len(self.new) > MOST_KEPT:
            self.old = self.new if now - self.since <= 2 * KEPT_S else set()
            self.new = set()
            self.found = set()
            self.since = now

    def places(self, marks: list[int]) -> int:
        """Return how many of the marks it has. Who has one has all before it."""
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high + 1) // 2
            mark = marks[middle - 1]
            if mark in self.new or mark in self.old:
                low = middle
            else:
                high = middle - 1
        return low


class KnownCaches:
    """What other agents have reported, by agent and replica."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Kept]] = {}

    def reported(self, source: str, digest: Digest, now: float) -> None:
        """A digest of an agent has come."""
        kept = self._kept.setdefault(source, {})
        for target_id, marks in digest.rows:
            if not marks:
                kept.pop(target_id, None)
                continue
            one = kept.get(target_id)
            if one is None:
                if len(kept) >= MOST_REPLICAS:
                    continue
                one = kept[target_id] = _Kept(now)
            one.age(now)
            one.new.update(marks)

    def retain(self, sources: Collection[str]) -> None:
        """These are the agents from now on."""
        self._kept = {source: kept for source, kept in self._kept.items() if source in sources}

    def news(self, marks: list[int], now: float) -> list[Held]:
        """Return who has how much of a prompt, without what was returned before."""
        held = list[Held]()
        if not marks:
            return held
        for source, kept in self._kept.items():
            for target_id, one in kept.items():
                one.age(now)
                places = one.places(marks)
                if places and marks[places - 1] not in one.found:
                    one.found.add(marks[places - 1])
                    held.append(Held(source, target_id, PLACES[places - 1]))
        return held
