"""What a table says of other regions: who the agents there are, and what this one owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lb.config.decode import Fields, WireError
from policies.regions.registry import DEFAULT_REGION_POLICY, REGION_POLICIES


@dataclass(frozen=True, slots=True)
class PeerAgent:
    """An agent of another region. It is spoken to at `url` only if its certificate is for `tls_name`."""

    id: str
    region: str
    url: str
    tls_name: str

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "region": self.region, "url": self.url, "tls_name": self.tls_name}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> PeerAgent:
        fields = Fields(value, path)
        peer = cls(fields.name("id"), fields.name("region"), fields.url("url"), fields.name("tls_name"))
        if not peer.url.startswith("https://"):
            raise WireError(fields.at("url"), "must start with https://")
        fields.done()
        return peer


@dataclass(frozen=True, slots=True)
class Regions:
    """The view of one agent. `here` is its region, `policy` one of `policies.regions.registry`.

    `owned` are the regions whose replicas are among the table's targets, `epoch` that of the ownership.
    """

    agent: str
    here: str
    policy: str = DEFAULT_REGION_POLICY
    epoch: int = 0
    peers: tuple[PeerAgent, ...] = ()
    owned: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
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
        )
        if regions.policy not in REGION_POLICIES:
            raise WireError(fields.at("policy"), f"expected one of {', '.join(sorted(REGION_POLICIES))}")
        seen: set[str] = set()
        for peer in regions.peers:
            if peer.id in seen or peer.id == regions.agent:
                raise WireError(fields.at("peers"), f"two agents have the id {peer.id!r}")
            seen.add(peer.id)
        fields.done()
        return regions
