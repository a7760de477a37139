"""What is counted and measured of the agents of other regions, by peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_PREFIX = "skyserve_lb_"
_AGENT = ("service", "region")
_PEER = (*_AGENT, "peer")


@dataclass(slots=True, eq=False)
class PeerCounts:
    """Of requests to and from one peer. `sent_bytes` are those of bodies, of requests and of responses."""

    forwards: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # to it, by reason
    returned: int = 0  # by it, because it had no room
    requests: int = 0  # from it
    refusals: int = 0  # of those from it, for want of room here
    sent_bytes: int = 0


class PeerMetrics:
    """The counts of each peer that is in the table."""

    def __init__(self) -> None:
        self._counts: dict[str, PeerCounts] = {}

    def of(self, peer: str) -> PeerCounts:
        counts = self._counts.get(peer)
        if counts is None:
            counts = self._counts[peer] = PeerCounts()
        return counts

    def retain(self, peers: Collection[str]) -> None:
        """These are the peers from now on."""
        self._counts = {peer: self.of(peer) for peer in peers}

    @property
    def refusals(self) -> int:
        return sum(one.refusals for one in self._counts.values())

    def families(self, agent: tuple[str, str], regions: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield the families; `regions` is what `/-/regions` of the admin port shows."""
        forwards = CounterMetricFamily(
            f"{_PREFIX}forwards",
            "Requests forwarded to a peer: on arrival, from the queue, or to continue a stream.",
            labels=(*_PEER, "reason"),
        )
        for peer, counts in self._counts.items():
            for reason, number in counts.forwards.items():
                forwards.add_metric((*agent, peer, reason), number)
        yield forwards
        for attribute, name, meaning in (
            (
                "returned",
                "returned_forwards",
                "Forwarded requests that the peer returned, as it had no room.",
            ),
            ("requests", "peer_requests", "Requests that the peer forwarded to this agent."),
            ("refusals", "peer_refusals", "Those among them that were returned for want of room."),
            ("sent_bytes", "peer_sent_bytes", "Bytes of bodies sent to the peer, of requests and responses."),
        ):
            family = CounterMetricFamily(_PREFIX + name, meaning, labels=_PEER)
            for peer, counts in self._counts.items():
                family.add_metric((*agent, peer), getattr(counts, attribute))
            yield family
        yield from _links(agent, regions)


def _links(agent: tuple[str, str], regions: Mapping[str, Any]) -> Iterator[Metric]:
    rows = regions.get("peers", ())
    for key, name, meaning, unit_s in (
        (
            "rtt_ms",
            "peer_round_trip_seconds",
            "The shortest round trip to the peer of the last seconds.",
            1e-3,
        ),
        ("silent_s", "peer_silent_seconds", "For how long the peer has not reported.", 1.0),
    ):
        gauge = GaugeMetricFamily(_PREFIX + name, meaning, labels=_PEER)
        for row in rows:
            if row[key] is not None:
                gauge.add_metric((*agent, row["id"]), row[key] * unit_s)
        yield gauge
    sent = CounterMetricFamily(
        f"{_PREFIX}cache_digest_sent_bytes",
        "Bytes of digests of caches sent to another agent, of this region or another one.",
        labels=_PEER,
    )
    age = GaugeMetricFamily(
        f"{_PREFIX}cache_digest_age_seconds",
        "How old the newest digest of caches is that another agent has sent.",
        labels=_PEER,
    )
    for row in regions.get("digests", ()):
        sent.add_metric((*agent, row["id"]), row["sent_bytes"])
        if row["age_s"] is not None:
            age.add_metric((*agent, row["id"]), row["age_s"])
    yield sent
    yield age
    usd = CounterMetricFamily(
        f"{_PREFIX}peer_egress_usd",
        "What sending these bytes to the peer has cost, by list prices of traffic between regions.",
        labels=_PEER,
    )
    for row in rows:
        usd.add_metric((*agent, row["id"]), row["egress_usd"])
    yield usd
    refused = CounterMetricFamily(
        f"{_PREFIX}refused_peer_connections",
        "Connections to the port for peers that were refused, or (expired) are heard and given nothing.",
        labels=(*_AGENT, "reason"),
    )
    for reason, number in regions.get("refused_connections", {}).items():
        refused.add_metric((*agent, reason), number)
    yield refused
    left = GaugeMetricFamily(
        f"{_PREFIX}peers_certificate_seconds_left",
        "Until the agent's certificate for peers expires; negative once it has.",
        labels=_AGENT,
    )
    if regions.get("certificate_left_s") is not None:
        left.add_metric(agent, regions["certificate_left_s"])
    yield left
