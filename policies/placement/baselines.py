"""What SpotHedge is compared with: the placements of SkyServe's evaluation (sections 2 and 5) and of the clouds.

They differ in where a missing spot replica goes. None falls back to on-demand replicas, and none waits after a
refusal before it tries again, because that is what they are: what the goal says about fallback is not for them.
Where a zone cannot be tried at all (quota, permission) they do not try.

A replica of the other capacity type, left by another placer, is terminated when what replaces it is ready.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from policies.model import CapacityType, Event, Json, Launched, Offer, Replica
from policies.placement import fleet, zone_backoff
from policies.placement.base import Decision, PlannedLaunch, View
from policies.placement.zone_backoff import is_spot

_SPOT, _ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


class OnDemand:
    """On-demand replicas only, where they are cheapest, and none beyond the wanted number.

    Memory: {"blocks": see `zone_backoff`}. For want of a market to compare with, it does wait after a refusal.
    """

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        closed = zone_backoff.learn(memory.get("blocks", {}), events, replicas, now)
        return {"blocks": closed} if closed else {}

    def decide(self, view: View, memory: Json) -> Decision:
        share = fleet.Share.of(view, _ON_DEMAND, view.wanted, memory.get("blocks", {}))
        ready = fleet.ready(share.replicas, view.now)
        leftover = fleet.spot(view.replicas)
        why = f"{ready} of {view.wanted} on-demand replicas are ready"
        return Decision(
            target=view.wanted,
            memory=memory,
            launches=fleet.on_demand_places(share, view, "on demand only"),
            ends=[*share.ends(why), *fleet.ends(leftover, view.wanted - ready, why)],
            wake_at=share.opens_at,
            notes=share.note(),
        )


class _SpotPool(ABC):
    """A fixed number of spot replicas, and for `on_demand_share` of the target on-demand ones."""

    on_demand_share = 0.0

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        closed = zone_backoff.learn(memory.get("blocks", {}), events, replicas, now, longest_s=0.0)
        after = {**memory, "blocks": closed}
        return {key: value for key, value in after.items() if value}

    def decide(self, view: View, memory: Json) -> Decision:
        target = view.wanted + view.goal.num_overprovision if view.wanted > 0 else 0
        closed = memory.get("blocks", {})
        pool = math.ceil(round(target * self.on_demand_share, 6))
        spot = fleet.Share.of(view, _SPOT, target - pool, closed)
        on_demand = fleet.Share.of(view, _ON_DEMAND, pool, closed)
        ready = fleet.ready(spot.replicas, view.now)

        launches = fleet.on_demand_places(on_demand, view, f"{pool} of {target} replicas are on demand")
        room = min(spot.missing, view.limit - len(launches))
        chosen: Sequence[PlannedLaunch] = ()
        if room > 0 and spot.usable:
            chosen, after = self._choose(room, spot, view, memory)
            memory = after if chosen else memory
        waits = spot.missing > len(chosen)  # perhaps for one zone only, while others are open
        opens_at = zone_backoff.next_opening(spot.offers, closed, view.now) if waits else None
        keep = pool or max(0, view.wanted - ready)
        return Decision(
            target=target,
            memory=memory,
            launches=[*launches, *chosen],
            ends=[
                *spot.ends(f"{len(spot.replicas)} spot replicas, {spot.wanted} wanted"),
                *fleet.ends(on_demand.replicas, keep, f"{keep} on-demand replicas wanted"),
            ],
            wake_at=fleet.earliest(opens_at, on_demand.opens_at),
            notes=(*spot.note(), *on_demand.note()),
        )

    @abstractmethod
    def _choose(
        self, count: int, spot: fleet.Share, view: View, memory: Json
    ) -> tuple[Sequence[PlannedLaunch], Json]:
        """At most `count` places, and the memory once they are requested. Something is usable."""


class EvenSpread(_SpotPool):
    """Every zone has a fixed share of the target, the first zones one more where it does not divide.

    Replicas that a zone lacks are launched in that zone, also if it has refused them.
    """

    def _choose(
        self, count: int, spot: fleet.Share, view: View, memory: Json
    ) -> tuple[list[PlannedLaunch], Json]:
        zones = list(dict.fromkeys(offer.zone for offer in spot.offers))
        there = Counter(replica.zone for replica in spot.replicas)
        best = {offer.zone: offer for offer in reversed(spot.usable)}
        places: list[PlannedLaunch] = []
        for index, zone in enumerate(zones):
            quota = spot.wanted // len(zones) + (index < spot.wanted % len(zones))
            if zone in best:
                why = f"{there[zone]} there, {quota} is its share"
                places += [PlannedLaunch(best[zone], why)] * max(0, quota - there[zone])
        return places[:count], memory


class RoundRobin(_SpotPool):
    """Every attempt goes to the zone after that of the attempt before. Memory, beside the blocks: {"last": zone}."""

    def _choose(
        self, count: int, spot: fleet.Share, view: View, memory: Json
    ) -> tuple[list[PlannedLaunch], Json]:
        zones = list(dict.fromkeys(offer.zone for offer in spot.offers))
        best = {offer.zone: offer for offer in reversed(spot.usable)}
        names = [str(zone) for zone in zones]
        turn = names.index(memory["last"]) + 1 if memory.get("last") in names else 0
        ahead = (zones[(turn + step) % len(zones)] for step in range(count * len(zones)))
        places = [PlannedLaunch(best[zone], "the next zone in turn") for zone in ahead if zone in best][
            :count
        ]
        return places, {**memory, "last": str(places[-1].offer.zone)}


class SingleZone(_SpotPool):
    """Everything in one zone: the first on offer when the first replica is launched, for as long as it is on offer.

    Memory, beside the blocks: {"home": zone}.
    """

    def _choose(
        self, count: int, spot: fleet.Share, view: View, memory: Json
    ) -> tuple[list[PlannedLaunch], Json]:
        home, memory = _home(memory, [str(offer.zone) for offer in spot.offers])
        here = [offer for offer in spot.usable if str(offer.zone) == home]
        return [PlannedLaunch(offer, "the zone of this service") for offer in here[:1] * count], memory


class SingleRegion(_SpotPool):
    """A pool over the zones of one region, as balanced as possible.

    Each missing replica goes to the zone with the fewest among those that did not fail at the last attempt; when all have,
    they all are tried again.

    Memory, beside the blocks: {"home": cloud/region, "failed": [zones]}.
    """

    def __init__(self, on_demand_share: float = 0.0) -> None:
        self.on_demand_share = on_demand_share

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        lost = (*zone_backoff.losses(events, replicas), *zone_backoff.refusals(events, replicas))
        failed = {*memory.get("failed", ()), *(str(r.zone) for r in lost if is_spot(r.offer))}
        failed -= set(_launched_zones(events, replicas))
        return super().learn({**memory, "failed": sorted(failed)}, events, replicas, now)

    def _choose(
        self, count: int, spot: fleet.Share, view: View, memory: Json
    ) -> tuple[list[PlannedLaunch], Json]:
        home, memory = _home(memory, [_region(offer) for offer in spot.offers])
        here = [offer for offer in spot.usable if _region(offer) == home]
        failed = memory.get("failed", ())
        good = [offer for offer in here if str(offer.zone) not in failed]
        if here and not good:
            good, memory = here, {key: value for key, value in memory.items() if key != "failed"}
        spread = fleet.Spread(fleet.spot((*view.replicas, *view.others)))
        return spread.fill(good, count), memory


def auto_scaling_group() -> SingleRegion:
    """Return an AWS Auto Scaling group: a pool over one region, of which 10 % are always on demand, rounded up."""
    return SingleRegion(on_demand_share=0.1)


def _home(memory: Json, places: Sequence[str]) -> tuple[str, Json]:
    """Return the place that was settled in, or the first of these, and the memory with it."""
    home = memory.get("home")
    if home in places:
        return str(home), memory
    return places[0], {**memory, "home": places[0]}


def _region(offer: Offer) -> str:
    return f"{offer.zone.cloud}/{offer.zone.region}"


def _launched_zones(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[str]:
    for event in events:
        if isinstance(event, Launched) and event.replica_id in replicas:
            yield str(replicas[event.replica_id].zone)
