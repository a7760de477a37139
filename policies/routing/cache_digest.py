"""Digests of caches: what load balancers report to each other of the prompts that were sent to replicas. Pure.

A prompt is cut at fixed PLACES. Its *mark* at a place is a keyed hash of a checksum (CRC-32) of all of it up to there. The checksum starts
with a keyed hash of its scope (model and tenant). So two prompts have the same mark only if they begin with the same text, up to a chance
of 2**-31. Who wants to can write two prompts of his own scope that have the same mark, and is sent where the wrong one is cached; for
another tenant's scope he would need the key. A session has a mark, too. An agent keeps a log of the marks that are new
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

from collections.abc import Collection
from hashlib import blake2b
from typing import Final, NamedTuple
from zlib import crc32

from policies.routing.radix_tree import MAX_PROMPT_BYTES

MARK_BYTES: Final = 4
REFRESH_S: Final = 120.0
KEPT_S: Final = 300.0
MOST_LOGGED: Final = 2**14  # marks that a link can still read
MOST_KEPT: Final = 2**17  # marks, before they are taken for old
MOST_REPLICAS: Final = 1024  # of each agent
_FIRST: Final = 256
_LARGER: Final = 4  # two places are up to a quarter of the prompt apart, 256 bytes at least
_LEFT: Final = -1
_ROW_BYTES: Final = 3  # beside the id and the marks
_MOST_SCOPES: Final = 2**10
_MOST_HASHED: Final = 2**14  # checksums whose marks are remembered: most prompts begin as others did


def _places() -> tuple[int, ...]:
    found, at = [], _FIRST
    while at <= MAX_PROMPT_BYTES:
        found.append(at)
        at += max(_FIRST, at // _LARGER // _FIRST * _FIRST)
    return tuple(found)


PLACES: Final = _places()


class Marker:
    """Makes marks by one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._starts: dict[str, int] = {}  # of checksums, by scope
        self._hashed: dict[int, int] = {}

    def marks_of(self, scope: str, prompt: bytes) -> list[int]:
        """Return the mark of the prompt at each place that it reaches."""
        found, at = list[int](), 0
        start = self._starts.get(scope, -1)
        checksum = self._start(scope) if start < 0 else start
        for place in PLACES:
            if place > len(prompt):
                break
            checksum = crc32(prompt[at:place], checksum)
            at = place
            mark = self._hashed.get(checksum, -1)
            found.append(self._mark(checksum) if mark < 0 else mark)
        return found

    def of_session(self, scope: str, session: str) -> int:
        """Return the mark of a session, which stands for the state that a replica has of it."""
        return self._hash(f"{scope}\0{session}".encode("utf-8", "surrogateescape"), b"session")

    def _start(self, scope: str) -> int:
        if len(self._starts) >= _MOST_SCOPES:
            self._starts.clear()
        start = self._starts[scope] = self._hash(scope.encode("utf-8", "surrogateescape"), b"scope")
        return start

    def _mark(self, checksum: int) -> int:
        if len(self._hashed) >= _MOST_HASHED:
            self._hashed.clear()
        mark = self._hashed[checksum] = self._hash(checksum.to_bytes(4, "big"), b"digest")
        return mark

    def _hash(self, data: bytes, purpose: bytes) -> int:
        return int.from_bytes(
            blake2b(data, digest_size=MARK_BYTES, key=self._key, person=purpose).digest(), "big"
        )


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

    def sent(self, target_id: str, marks: Collection[int], zones: frozenset[str], now: float) -> None:
        """A prompt was sent to the replica."""
        if now - self._since > REFRESH_S:
            for marks_before in self._known.values():
                marks_before.clear()
            self._since = now
        known = self._known.get((target_id, zones))
        if known is None:
            known = self._known[target_id, zones] = set()
        elif known.issuperset(marks):  # as mostly where prompts begin alike
            return
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


class KnownCaches:
    """What other agents have reported: for each mark the replicas that have it, a bit for each, in this period and in the one before."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._found: dict[int, int] = {}  # returned by `news` in this period
        self._since = 0.0
        self._bits: dict[str, dict[str, int]] = {}  # by agent and replica
        self._names: dict[int, tuple[str, str]] = {}
        self._living = 0
        self._left = self._left_before = 0  # bits that may be in this period, and in the one before
        self._used = 0

    def reported(self, source: str, digest: Digest, now: float) -> None:
        """A digest of an agent has come."""
        self._age(now)
        kept, new = self._bits.setdefault(source, {}), self._new
        for target_id, marks in digest.rows:
            bit = kept.get(target_id, 0)
            if not marks:
                self._forget(source, [target_id])
            elif bit or len(kept) < MOST_REPLICAS:
                bit = bit or self._join(source, target_id)
                for mark in marks:
                    new[mark] = new.get(mark, 0) | bit

    def retain(self, sources: Collection[str]) -> None:
        """These are the agents from now on."""
        for source in [source for source in self._bits if source not in sources]:
            self._forget(source, list(self._bits[source]))
            del self._bits[source]

    def news(self, marks: list[int], now: float) -> list[Held]:
        """Return who has how much of a prompt, without what was returned before."""
        self._age(now)
        held = list[Held]()
        seen, new, old = 0, self._new, self._old
        for place in range(len(marks) - 1, -1, -1):
            mark = marks[place]
            holders = (new.get(mark, 0) | old.get(mark, 0)) & self._living & ~seen
            if not holders:
                continue
            seen |= holders
            found = self._found.get(mark, 0)
            holders &= ~found
            self._found[mark] = found | holders
            while holders:
                bit = holders & -holders
                holders ^= bit
                source, target_id = self._names[bit]
                held.append(Held(source, target_id, PLACES[place]))
        return held

    def _age(self, now: float) -> None:
        """Begin a new period, if this one has been long enough or is full."""
        if now - self._since > KEPT_S or len(self._new) > MOST_KEPT:
            self._old = self._new if now - self._since <= 2 * KEPT_S else {}
            self._new = {}
            self._found = {}
            self._since = now
            self._used &= ~self._left_before
            self._left_before, self._left = self._left, 0

    def _join(self, source: str, target_id: str) -> int:
        """Return a bit for a new replica: the lowest that is in no mark."""
        bit = ~self._used & (self._used + 1)
        self._used |= bit
        self._living |= bit
        self._bits[source][target_id] = bit
        self._names[bit] = source, target_id
        return bit

    def _forget(self, source: str, target_ids: list[str]) -> None:
        for target_id in target_ids:
            bit = self._bits[source].pop(target_id, 0)
            self._living &= ~bit
            self._left |= bit
