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

from lb.core.quota import NOTHING, Amount

SLACK = 4


class Counters(NamedTuple):
    """Taken from one quota, and given back: requests that were refused after all, reservations that were too large.

    `micro_usd` is what settled requests have cost, in millionths of a US dollar.
    """

    requests: int = 0
    requests_back: int = 0
    tokens_in: int = 0
    tokens_in_back: int = 0
    tokens_out: int = 0
    tokens_out_back: int = 0
    micro_usd: int = 0

    def merged(self, other: Counters) -> Counters:
        """Return the newest of both: counters only grow."""
        return Counters(*map(max, self, other))

    @property
    def net(self) -> Amount:
        return Amount(
            self.requests - self.requests_back,
            self.tokens_in - self.tokens_in_back,
            self.tokens_out - self.tokens_out_back,
        )


_NONE = Counters()
Used = Mapping[str, Counters]
"""By the name of the quota (`lb.core.quota.name_of`)."""


class _Taken:
    """The counters of this agent, while they grow."""

    __slots__ = (
        "micro_usd",
        "requests",
        "requests_back",
        "tokens_in",
        "tokens_in_back",
        "tokens_out",
        "tokens_out_back",
    )

    def __init__(self) -> None:
        self.requests = self.requests_back = 0
        self.tokens_in = self.tokens_in_back = 0
        self.tokens_out = self.tokens_out_back = 0
        self.micro_usd = 0

    def add(self, requests: int, tokens_in: int, tokens_out: int, micro_usd: int) -> None:
        self.requests += max(0, requests)
        self.requests_back += max(0, -requests)
        self.tokens_in += max(0, tokens_in)
        self.tokens_in_back += max(0, -tokens_in)
        self.tokens_out += max(0, tokens_out)
        self.tokens_out_back += max(0, -tokens_out)
        self.micro_usd += micro_usd

    def counters(self) -> Counters:
        return Counters(
            self.requests,
            self.requests_back,
            self.tokens_in,
            self.tokens_in_back,
            self.tokens_out,
            self.tokens_out_back,
            self.micro_usd,
        )


class Charge(NamedTuple):
    """What another agent has taken from a quota. With `catching_up` no level falls below zero for it.

    `is_news`: it is none of what that agent took before this one ran, which may have been on another day.
    """

    name: str
    used: Amount
    micro_usd: int
    catching_up: bool
    is_news: bool


class _Link:
    """What one peer has been sent and has received, and what has come from it."""

    __slots__ = ("acknowledged", "boot", "connection", "is_first", "reachable", "received", "sent", "unsent")

    def __init__(self) -> None:
        self.connection = 0
        self.unsent: set[str] = set()  # keys whose counters have changed since they were sent
        self.sent: deque[tuple[int, dict[str, Counters]]] = deque()  # with the beat that followed
        self.acknowledged: dict[str, Counters] = {}
        self.boot = 0
        self.is_first = True  # the peer's process ran before this one, or did for all that is known
        self.received: dict[str, Counters] = {}
        self.reachable = False


class SharedQuota:
    """What the agents of a service have taken from the buckets of each key."""

    def __init__(self) -> None:
        self._own: dict[str, _Taken] = {}
        self._links: dict[str, _Link] = {}
        self.share = 1.0  # of each limit, by which the buckets here are filled

    # --- this agent

    def take(
        self, name: str, requests: int, tokens_in: int = 0, tokens_out: int = 0, micro_usd: int = 0
    ) -> None:
        """Count what a request has taken from a quota, or (below zero) given back."""
        own = self._own.get(name)
        if own is None:
            own = self._own[name] = _Taken()
        own.add(requests, tokens_in, tokens_out, micro_usd)
        for link in self._links.values():
            link.unsent.add(name)

    def reserved(self, name: str) -> Amount:
        """Return how much to leave for other agents."""
        own = self._own.get(name)
        if own is None:
            return NOTHING
        requests = tokens_in = tokens_out = others = 0
        for link in self._links.values():
            if link.reachable:
                others += 1
                known = link.acknowledged.get(name, _NONE)
                requests = max(
                    requests, own.requests - own.requests_back - known.requests + known.requests_back
                )
                tokens_in = max(
                    tokens_in, own.tokens_in - own.tokens_in_back - known.tokens_in + known.tokens_in_back
                )
                tokens_out = max(
                    tokens_out,
                    own.tokens_out - own.tokens_out_back - known.tokens_out + known.tokens_out_back,
                )
        if not others:
            return NOTHING
        return Amount(others * max(0, requests - SLACK), others * tokens_in, others * tokens_out)

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
        found = {key: self._own[key].counters() for key in sorted(link.unsent) if key in self._own}
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
            link.is_first = link.boot == 0
            link.boot, link.received = boot, {}
        charges = []
        for name, counters in used.items():
            known = link.received.get(name)
            before = _NONE if known is None else known
            newest = link.received[name] = before.merged(counters)
            taken = Amount(*(new - old for new, old in zip(newest.net, before.net, strict=True)))
            is_news = known is not None or not link.is_first
            cost = newest.micro_usd - before.micro_usd
            charges.append(Charge(name, taken, cost, not link.reachable, is_news))
        return charges
