"""Static placement: spread over zones, cheapest first, and stay away for a while from where it failed.

Each new replica goes to the zone with the fewest live replicas of the service, then to the region with the
fewest, then to the better offer (the order in which offers come: by price, or by the user's preference).
SkyPilot's placer sends everything beyond one per zone to the cheapest zone (10 replicas over 4 zones become
7/1/1/1), so that one zone's bad minute takes most of the service.

A capacity error or a preemption (its notice, where there is one) blocks the zone and capacity type for 10 s,
doubling with every further one up to 5 min, until a replica launched there becomes ready. A quota error blocks
the region and capacity type until `retry_at` (default 5 min), a permission error the cloud for 5 min, and a
region whose answers were errors to the last try is left alone for a minute. When everything is blocked nothing
is launched until the first block ends: a launch known to fail helps nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from policies.model import (
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Json,
    LaunchFailed,
    Observation,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbePassed,
    Replica,
    ReplicaState,
)
from policies.placement.base import Place

FIRST_BLOCK_S = 10.0
LONGEST_BLOCK_S = 300.0
QUOTA_BLOCK_S = 300.0
AUTH_BLOCK_S = 300.0
ERROR_BLOCK_S = 60.0
FORGET_AFTER_S = 3600.0

_COUNTED = frozenset(ReplicaState) - {ReplicaState.TERMINATING, ReplicaState.GONE, ReplicaState.DRAINING}


class Static:
    """Memory: {"blocks": {"cloud/region/zone|capacity type": {"until": s, "failures": n}}}."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        blocks: dict[str, dict[str, float]] = {
            key: block
            for key, block in memory.get("blocks", {}).items()
            if block["until"] + FORGET_AFTER_S > now
        }
        told: set[str] = set()
        for event in events:
            replica = replicas.get(event.replica_id)
            if replica is None:
                continue
            zone_key = _zone_key(replica.offer)
            match event:
                case LaunchFailed(kind=FailureKind.CAPACITY):
                    _block(blocks, zone_key, told, now)
                case PreemptionNotice() | Preempted() if replica.preempt_at is None and _is_spot(replica):
                    _block(blocks, zone_key, told, now)
                case LaunchFailed(kind=FailureKind.QUOTA, retry_at=retry_at):
                    until = now + QUOTA_BLOCK_S if retry_at is None else retry_at
                    blocks[_region_key(replica.offer)] = {"until": until, "failures": 1}
                case LaunchFailed(kind=FailureKind.AUTH):
                    blocks[_cloud_key(replica.offer)] = {"until": now + AUTH_BLOCK_S, "failures": 1}
                case GaveUp(reason=EndReason.CLOUD_ERROR):
                    key = _region_key(replica.offer)
                    until = max(now + ERROR_BLOCK_S, blocks.get(key, {"until": now})["until"])
                    blocks[key] = {"until": until, "failures": 1}
                case ProbePassed() if replica.state is ReplicaState.STARTING:
                    blocks.pop(zone_key, None)
                case _:
                    pass
        return {"blocks": blocks} if blocks else {}

    def place(self, count: int, observation: Observation, memory: Json) -> tuple[Sequence[Place], Json]:
        blocks = memory.get("blocks", {})
        open_offers = [offer for offer in observation.offers if not _blocked(offer, blocks, observation.now)]
        live = [replica for replica in observation.replicas if replica.state in _COUNTED]
        in_zone = Counter(replica.zone for replica in live)
        in_region = Counter((replica.zone.cloud, replica.zone.region) for replica in live)
        rank = {offer: index for index, offer in enumerate(observation.offers)}
        places = []
        for _ in range(count if open_offers else 0):
            best = min(
                open_offers,
                key=lambda o: (in_zone[o.zone], in_region[o.zone.cloud, o.zone.region], rank[o]),
            )
            places.append(Place(best, _why(in_zone[best.zone])))
            in_zone[best.zone] += 1
            in_region[best.zone.cloud, best.zone.region] += 1
        return places, memory


def next_opening(offers: Sequence[Offer], memory: Json, now: float) -> float | None:
    """When the first blocked offer may be tried again; None if some offer is open or there are none."""
    blocks = memory.get("blocks", {})
    waits = []
    for offer in offers:
        until = [blocks[key]["until"] for key in _keys(offer) if key in blocks and blocks[key]["until"] > now]
        if not until:
            return None
        waits.append(max(until))
    return min(waits, default=None)


def _block(blocks: dict[str, dict[str, float]], key: str, told: set[str], now: float) -> None:
    """One step longer than before; several losses of one moment are one piece of news (`told` of this moment)."""
    if key in told:
        return
    told.add(key)
    failures = int(blocks[key]["failures"]) + 1 if key in blocks else 1
    wait_s = min(LONGEST_BLOCK_S, FIRST_BLOCK_S * 2 ** min(failures - 1, 10))
    blocks[key] = {"until": now + wait_s, "failures": failures}


def _is_spot(replica: Replica) -> bool:
    return replica.offer.capacity_type is CapacityType.SPOT


def _blocked(offer: Offer, blocks: Mapping[str, Mapping[str, float]], now: float) -> bool:
    return any(key in blocks and blocks[key]["until"] > now for key in _keys(offer))


def _keys(offer: Offer) -> tuple[str, str, str]:
    return _zone_key(offer), _region_key(offer), _cloud_key(offer)


def _zone_key(offer: Offer) -> str:
    return f"{offer.zone}|{offer.capacity_type.value}"


def _region_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/{offer.zone.region}/*|{offer.capacity_type.value}"


def _cloud_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/*/*"


def _why(already: int) -> str:
    return "no replica there yet" if already == 0 else f"{already} there, no zone has fewer"
