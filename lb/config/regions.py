"""The part of a table about other regions: the agents there, and the regions that this agent owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lb.config.decode import Fields, WireError
from policies.regions.names import DEFAULT_REGION_POLICY, REGION_NAMES


@dataclass(frozen=True, slots=True)
class PeerAgent:
    """Another agent. Connections to `url` need a certificate for `tls_name`.

    `zones` are the residency zones whose requests it may have (see `lb.core.residency`). A GB that is sent to it costs
    `egress_usd_per_gb`, one that it sends `ingress_usd_per_gb`.
    """

    id: str
    region: str
    url: str
    tls_name: str
    zones: tuple[str, ...] = ()
    egress_usd_per_gb: float = 0.0
    ingress_usd_per_gb: float = 0.0

    def to_json(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"zones": list(self.zones)} if self.zones else {}
        for name in ("egress_usd_per_gb", "ingress_usd_per_gb"):
            if getattr(self, name):
                extra[name] = getattr(self, name)
        return {"id": self.id, "region": self.region, "url": self.url, "tls_name": self.tls_name, **extra}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> PeerAgent:
        fields = Fields(value, path)
        peer = cls(
            fields.name("id"),
            fields.name("region"),
            fields.url("url"),
            fields.name("tls_name"),
            fields.names("zones"),
            fields.number("egress_usd_per_gb", 0.0, 1e6, 0.0),
            fields.number("ingress_usd_per_gb", 0.0, 1e6, 0.0),
        )
        if not peer.url.startswith("https://"):
            raise WireError(fields.at("url"), "must start with https://")
        fields.done()
        return peer


@dataclass(frozen=True, slots=True)
class Place:
    """An address in a region: of a replica by which its distance is measured, or of an agent. `zones` are served there."""

    region: str
    url: str
    zones: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"zones": list(self.zones)} if self.zones else {}
        return {"region": self.region, "url": self.url, **extra}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Place:
        fields = Fields(value, path)
        place = cls(fields.name("region"), fields.url("url"), fields.names("zones"))
        fields.done()
        return place


@dataclass(frozen=True, slots=True)
class Regions:
    """The view of one agent. `here` is its region, `policy` one of `policies.regions.registry`.

    `siblings` are the other agents of its region, which have the same replicas. `owned` are the regions whose replicas are among the table's targets, `epoch` that of the ownership. `places` are regions
    without agents, `endpoints` those of all agents for clients. `usd_per_second` is what a second less of waiting is worth; None: money does not count.
    """

    agent: str
    here: str
    policy: str = DEFAULT_REGION_POLICY
    epoch: int = 0
    peers: tuple[PeerAgent, ...] = ()
    owned: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    usd_per_second: float | None = None
    endpoints: tuple[Place, ...] = ()
    siblings: tuple[PeerAgent, ...] = ()

    def to_json(self) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self.places:
            extra["places"] = [place.to_json() for place in self.places]
        if self.endpoints:
            extra["endpoints"] = [place.to_json() for place in self.endpoints]
        if self.siblings:
            extra["siblings"] = [sibling.to_json() for sibling in self.siblings]
        if self.usd_per_second is not None:
            extra["usd_per_second"] = self.usd_per_second
        return extra | {
            "agent": self.agent,
            "here": self.here,
            "policy": self.policy,
            "epoch": self.epoch,
            "peers": [peer.to_json() for peer in self.peers],
            "owned": list(self.owned),
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Regions:
        fields = Fields(value, path)
        regions = cls(
            agent=fields.name("agent"),
            here=fields.name("here"),
            policy=fields.text("policy", DEFAULT_REGION_POLICY),
            epoch=fields.count("epoch", 0),
            peers=tuple(PeerAgent.from_json(one, at) for one, at in fields.items("peers")),
            owned=tuple(str(one) for one, _ in fields.items("owned")),
            places=tuple(Place.from_json(one, at) for one, at in fields.items("places")),
            usd_per_second=fields.number_or_none("usd_per_second", 1e-12, 1e9),
            endpoints=tuple(Place.from_json(one, at) for one, at in fields.items("endpoints")),
            siblings=tuple(PeerAgent.from_json(one, at) for one, at in fields.items("siblings")),
        )
        if regions.policy not in REGION_NAMES:
            raise WireError(fields.at("policy"), f"expected one of {', '.join(REGION_NAMES)}")
        seen: set[str] = set()
        for peer in (*regions.peers, *regions.siblings):
            if peer.id in seen or peer.id == regions.agent:
                raise WireError(fields.at("peers"), f"two agents have the id {peer.id!r}")
            seen.add(peer.id)
        fields.done()
        return regions
