"""The rows of the tables: who knows which replicas, by which rules inside a region and between regions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType

from benchmarks import routing_published
from lb.config.options import PushMode
from lb.core.forwarding import Forwarding
from lb.core.residency import Zones
from policies.regions.base import PeerView
from policies.routing.base import RequestView, RoutingPolicy
from policies.routing.consistent_hash import ConsistentHash
from policies.routing.gorgo import Gorgo
from policies.routing.registry import make_policy


class RingForwarding(Forwarding):
    """Forwarding of SkyWalker-CH: of the peers that have room, the first one after the session on a ring is the best match."""

    def _views(self, view: RequestView, now: float, exclude: Collection[int], zones: Zones) -> list[PeerView]:
        peers = super()._views(view, now, exclude, zones)
        ranked = sorted(peers, key=lambda peer: _distance(view.session, peer.region))
        return [peer._replace(matched_bytes=len(ranked) - rank) for rank, peer in enumerate(ranked)]


def _distance(session: str, peer: str) -> int:
    """Return how far a session is from the nearest point of a peer on the ring, clockwise."""
    at = _point(session)
    return min((point - at) % _RING for point in _points(peer))


def _point(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


@lru_cache
def _points(peer: str) -> tuple[int, ...]:
    return tuple(_point(f"{peer}/{number}") for number in range(_POINTS))


def plain_cost(_: str) -> RoutingPolicy:
    """Return GORGO without what we add for others: its cost is network + prefill + queue + decode pressure."""
    return Gorgo(copy_weight=0.0, prefill_weight=1.0)


_RING = 2**64
_POINTS = 64  # of each peer on the ring


def ring_hash(_: str) -> RoutingPolicy:
    """Return consistent hashing without a bound on loads."""
    return ConsistentHash(balance=1e9)


@dataclass(frozen=True, slots=True)
class Rule:
    """`inner`, made by `make_inner`, chooses a replica, `outer` a region. `all_view`: every agent has every replica in its table.

    `central` is the region of the only agent, if there is only one (the scenario's first if it has no such region). `distances`:
    the table knows the round trip to replicas. `ring`: a session's place on a ring of peers counts as its match there. `digests`: agents
    report to each other what caches hold.
    """

    name: str
    inner: str = "gorgo"
    make_inner: Callable[[str], RoutingPolicy] = make_policy
    push: PushMode = PushMode.WORK
    outer: str = "local"
    all_view: bool = False
    distances: bool = True
    central: str = ""
    ring: bool = False
    digests: bool = False


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule("local"),
            Rule("all_view", all_view=True, distances=False),
            Rule("all_view_rtt", all_view=True),
            Rule("all_view_plain", make_inner=plain_cost, all_view=True, distances=False),
            Rule(
                "skywalker",
                inner="skywalker",
                make_inner=routing_published.make_policy,
                push=PushMode.SELECTIVE,
                outer="skywalker",
            ),
            Rule("gorgo", make_inner=plain_cost, push=PushMode.SELECTIVE, outer="gorgo"),
            Rule(
                "central_gorgo",
                make_inner=plain_cost,
                push=PushMode.SELECTIVE,
                central="us",
                all_view=True,
            ),
            *(
                Rule(name, inner, make, PushMode.BLIND, all_view=True, central="us")
                for name, inner, make in (
                    ("central_rr", "round_robin", make_policy),
                    ("central_ll", "least_load", make_policy),
                    ("central_ch", "consistent_hash", ring_hash),
                    ("central_sgl", "sglang_router", routing_published.make_policy),
                )
            ),
            Rule("skywalker_ch", "consistent_hash", ring_hash, PushMode.SELECTIVE, "skywalker", ring=True),
            Rule("one_cost_own", outer="one_cost"),
            Rule("one_cost", outer="one_cost", digests=True),
        )
    }
)
