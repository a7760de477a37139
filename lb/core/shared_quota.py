"""The limits of API keys over the agents of several regions, without a coordinator. Pure.

Each agent keeps a whole bucket for each key (`lb.core.api_keys`), fills it at the full rate and drains it by what it and the other
agents have taken. What an agent has taken since it started is a set of counters that only grow (`Counters`), so they may be sent
twice, or late, or all again on a new connection; a receiver charges the difference to what it knew.

*No herd.* Between two messages every agent would see the same full bucket. So an agent leaves for each of the others as much as it
has taken itself and the others do not know of yet: `n` agents that see a level L take L together, and not `n` times L. SLACK
requests are exempt, so that a small limit is not refused for the moment that a message takes.

*Partition.* With some of the agents out of reach each side fills its buckets by its share of the agents, so the sum stays the
limit. What the other side took meanwhile came from its own share: of that no level falls below zero. An agent that is known to be
dead takes nothing, and does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

SLACK = 4


class Counters(NamedTuple):
    """Taken from the buckets of one key, and given back: requests that were refused after all, reservations that were too large."""

    requests: int = 0
    requests_back: int = 0
    tokens: int = 0
    tokens_back: int = 0

    def merged(self, other: Counters) -> Counters:
        """Return the newest of both: counters only grow."""
        return Counters(*map(max, self, other))

    @property
    def net_requests(self) -> int:
        return self.requests - self.requests_back

    @property
    def net_tokens(self) -> int:
        return self.tokens - self.tokens_back


_NONE = Counters()
Used = Mapping[str, Counters]
"""By the name of the key."""


class Charge(NamedTuple):
    """What another agent has taken from the buckets of a key. With `catching_up` no level falls below zero for it."""

    key: str
    requests: int
    tokens: int
    catching_up: bool


class _Link:
    """What one peer has been sent and has received, and what has come from it."""

    __slots__ = ("acknowledged", "boot", "connection", "reachable", "received", "sent", "unsent")

    def __init__(self) -> None:
        self.connection = 0
        self.unsent: set[str] = set()  # keys whose counters have changed since they were sent
        self.sent: deque[tuple[int, dict[str, Counters]]] = deque()  # with the beat that followed
        self.acknowledged: dict[str, Counters] = {}
        self.boot = 0
        self.received: dict[str, Counters] = {}
        self.reachable = False


class SharedQuota:
    """What the agents of a service have taken from the buckets of each key."""

    def __init__(self) -> None:
        self._own: dict[str, Counters] = {}
        self._links: dict[str, _Link] = {}
        self.share = 1.0  # of each limit, by which the buckets here are filled

    # --- this agent

    def take(self, key: str, requests: int = 0, tokens: int = 0) -> None:
        """Count what a request has taken, or (below zero) given back."""
        if not (requests or tokens):
            return
        own = self._own.get(key, _NONE)
        self._own[key] = Counters(
            own.requests + max(0, requests),
            own.requests_back + max(0, -requests),
            own.tokens + max(0, tokens),
            own.tokens_back + max(0, -tokens),
        )
        for link in self._links.values():
            link.unsent.add(key)

    def reserved(self, key: str) -> tuple[int, int]:
        """Return how many requests and tokens to leave for other agents."""
        own = self._own.get(key)
        if own is None:
            return 0, 0
        requests = tokens = others = 0
        for link in self._links.values():
            if link.reachable:
                others += 1
                known = link.acknowledged.get(key, _NONE)
                requests = max(requests, own.net_requests - known.net_requests)
                tokens = max(tokens, own.net_tokens - known.net_tokens)
        return others * max(0, requests - SLACK), others * tokens

    # --- peers

    def peers(self, reachable: Collection[str], dead: Collection[str], known: Collection[str]) -> None:
        """Set the `known` agents; of them some are reachable, some are dead, and others are out of reach."""
        for peer in self._links.keys() - set(known):
            del self._links[peer]
        for peer in known:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = _Link()
                link.unsent = set(self._own)
            link.reachable = peer in reachable
        self.share = (1 + len(reachable)) / (1 + len(known) - len(set(dead) - set(reachable)))

    @property
    def has_unsent(self) -> bool:
        return any(link.unsent and link.reachable for link in self._links.values())

    def unsent(self, peer: str, connection: int, beat: int) -> Used:
        """Return the counters to send before the beat of that number, on the connection of that number."""
        link = self._links.get(peer)
        if link is None:
            return {}
        if connection != link.connection:
            link.connection, link.unsent = connection, set(self._own)
        found = {key: self._own[key] for key in sorted(link.unsent) if key in self._own}
        link.unsent.clear()
        if found:
            link.sent.append((beat, found))
        return found

    def acknowledged(self, peer: str, beat: int) -> None:
        """The peer has received that beat, and what was sent before it."""
        link = self._links.get(peer)
        while link is not None and link.sent and link.sent[0][0] <= beat:
            for key, counters in link.sent.popleft()[1].items():
                link.acknowledged[key] = link.acknowledged.get(key, _NONE).merged(counters)

    def receive(self, peer: str, boot: int, used: Used) -> list[Charge]:
        """Take the counters of a peer into account, of its process `boot`. Returns what to charge here."""
        link = self._links.get(peer)
        if link is None:
            return []
        if boot != link.boot:
            link.boot, link.received = boot, {}
        charges = []
        for key, counters in used.items():
            before = link.received.get(key, _NONE)
            newest = link.received[key] = before.merged(counters)
            requests = newest.net_requests - before.net_requests
            tokens = newest.net_tokens - before.net_tokens
            charges.append(Charge(key, requests, tokens, not link.reachable))
        return charges
