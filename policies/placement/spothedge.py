"""SpotHedge: spot replicas where they last longest, on-demand ones while spot replicas are missing.

From SkyServe (Mao et al., EuroSys 2025), section 3. Two halves:

Dynamic placement (Algorithm 1) decides where. A zone that preempts, or has no room when tried, goes from the
available zones Z_A to the preempting zones Z_P; a replica that becomes ready there brings it back. A new replica
goes to a zone of Z_A that has no spot replica of ours yet, the cheapest one, else to the cheapest of Z_A. Zones
that cost the same are filled evenly, then their regions.

Dynamic fallback decides how many. N_tar + N_extra spot replicas are wanted at all times, and beside them

    O(t) = min(N_tar, N_tar + N_extra - S_r(t))

on-demand replicas, S_r of the spot replicas being ready. `base_ondemand_fallback_replicas` are on demand for
good; then the formula is about the others. On-demand replicas go where they are cheapest.

With several kinds of machines (accelerators) a "zone" of Z_A and Z_P is one kind in a zone: each has its own spot
market. What costs less is then decided by the price of the work that a replica does, where that is known.

Three things are repaired, because on real markets the algorithm as printed does not arrive. It empties Z_P as soon as
fewer than two zones are left in Z_A: with three zones of which one has room it tries the two others in turn for
ever, and never the good one for its last replica. Here Z_P is emptied only when Z_A is empty (the authors' own
simulator does so for three zones). And it tries again at every tick, which is thousands of refused launches a day;
here a zone that refused is left alone for a while (`zone_backoff`). Nothing waits while any zone is open: if those of
Z_A are all in their back-off, the others are tried. After an outage of all zones one replica is a probe, and the
rest is spread over the zones that have opened (`reopening`): else the first to open would take them all, and its next
preemption would be an outage again.

No spot replica costs more than `spot_price_cap` times the cheapest (`price_limits`). Where that leaves a single zone, spreading
comes first: the next cheapest zone is added if it costs no more than on demand, because a fleet in one zone is lost in one
preemption. While all zones within the cap refuse, on-demand replicas stand in. `as_printed()` is the algorithm without the repairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from policies.model import CapacityType, Event, Json, Offer, Replica
from policies.placement import fleet, price_limits, reopening, zone_backoff
from policies.placement.base import Decision, PlannedLaunch, View
from policies.placement.zone_backoff import is_spot

LEAST_ZONES = 2

_SPOT, _ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


@dataclass(frozen=True, slots=True)
class SpotHedge:
    """Memory: {"preempting": [`zone_backoff.market`s of Z_P], "blocks": see `zone_backoff`}.

    Z_P is emptied when Z_A has fewer than `refill_below` zones. A zone that refused is left alone for at most
    `longest_block_s` (0: not at all). Prices within the fraction `equal_cost` of the least are the same price;
    among those, `by_region` prefers regions with few replicas, because zones of a region fail together. What is
    equal then goes by the order of offers or, `shuffled`, by one that is another at every tick. `limits_prices`: own hosts
    first, and within one continent (`price_limits`).
    """

    refill_below: int = 1
    longest_block_s: float = zone_backoff.LONGEST_BLOCK_S
    equal_cost: float = fleet.EQUAL_COST
    by_region: bool = True
    shuffled: bool = False
    limits_prices: bool = True

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        """HANDLE-PREEMPTION and HANDLE-LAUNCH.

        Zones are only noted here, in the order of the events: whether Z_P is to be emptied depends on which zones are on
        offer, which `decide` knows.
        """
        preempting = list(memory.get("preempting", ()))
        refused = (replica for replica in zone_backoff.refusals(events, replicas) if is_spot(replica.offer))
        preempting += [
            zone_backoff.market(r.offer) for r in (*zone_backoff.losses(events, replicas), *refused)
        ]
        launched = {
            zone_backoff.market(r.offer) for r in zone_backoff.arrivals(events, replicas) if is_spot(r.offer)
        }
        preempting = [zone for zone in preempting if zone not in launched]
        closed = zone_backoff.learn(
            memory.get("blocks", {}), events, replicas, now, longest_s=self.longest_block_s
        )
        return _memory(preempting, closed)

    def decide(self, view: View, memory: Json) -> Decision:
        closed = memory.get("blocks", {})
        view, beyond = self._within_limits(view, memory) if self.limits_prices else (view, ())
        goal, now = view.goal, view.now
        base = min(goal.base_ondemand_fallback_replicas, view.wanted)
        hedged = view.wanted - base  # the paper's N_tar: the replicas that spot is to carry
        extra = goal.num_overprovision if view.wanted > 0 else 0

        spot = fleet.Share.of(view, _SPOT, hedged + extra, closed)
        again = self._returning(spot, view, closed)
        ready = fleet.ready(spot.replicas, now)
        if view.others and (spot.usable or spot.missing <= 0):
            # In a dry market an update must not wait for the spot replicas that the old version still has.
            ready += fleet.ready(fleet.spot(view.others), now)
        stand_ins = min(hedged, max(0, spot.wanted - ready)) if goal.dynamic_ondemand_fallback else 0
        have = max(0, len(fleet.on_demand(view.replicas)) - base)
        # One launched for a replica that is passing would be ready when it is not wanted any more.
        stand_ins = max(min(stand_ins, have), stand_ins - view.passing)
        on_demand = fleet.Share.of(view, _ON_DEMAND, base + stand_ins, closed)
        state = f"{ready} of {spot.wanted} spot replicas are ready"

        memory = self._refilled(memory, view.offers)
        on_spot = self._on_spot(spot, again, view, memory)
        stand_in = fleet.on_demand_places(on_demand, view, state if stand_ins else "always on demand")
        short = fleet.ready((*view.replicas, *view.others), now) < view.wanted
        # Where too few serve the surer kind comes first, else the cheaper.
        launches = [*stand_in, *on_spot] if short else [*on_spot, *stand_in]
        ends = spot.ends(f"{len(spot.replicas)} spot replicas, {spot.wanted} wanted")
        if not view.others:  # while a version takes over from another, nothing that serves is in the way
            ends += on_demand.ends(state)
        grace_ends_at = fleet.grace_ends_at((*view.replicas, *view.others), now)
        return Decision(
            target=view.wanted + extra,
            memory=memory,
            launches=launches[: max(0, view.limit)],
            ends=ends,
            wake_at=fleet.earliest(
                spot.opens_at, again.wake_at if again else None, on_demand.opens_at, grace_ends_at
            ),
            notes=(*spot.note(), *on_demand.note(), *beyond),
        )

    def _within_limits(self, view: View, memory: Json) -> price_limits.LimitedView:
        noted = memory.get("preempting", ())
        return price_limits.within_limits(
            view,
            memory.get("blocks", {}),
            least_spot_zones=LEAST_ZONES,
            avoids=lambda offer: zone_backoff.market(offer) in noted,
        )

    def _refilled(self, memory: Json, offers: Sequence[Offer]) -> Json:
        """The memory once Z_P was emptied each time that too few zones were left in Z_A."""
        noted = memory.get("preempting", [])
        zones = {zone_backoff.market(offer) for offer in offers if is_spot(offer)} if noted else None
        if not zones:
            return memory
        preempting: set[str] = set()
        for zone in noted:
            preempting.add(zone)
            if len(zones - preempting) < self.refill_below:
                preempting.clear()
        kept = sorted(preempting)
        return memory if kept == noted else _memory(kept, memory.get("blocks", {}))

    def _returning(self, spot: fleet.Share, view: View, closed: Json) -> reopening.Return | None:
        """Return what may be rented after an outage of all zones; None at all other times, and where own hosts take the rest."""
        if not self.limits_prices or len(self._own(spot, view)) >= spot.missing:
            return None
        hosts = price_limits.own_zones(view.offers)
        live = [one for one in fleet.spot((*view.replicas, *view.others)) if one.zone not in hosts]
        rented = price_limits.without_own_hosts(spot.offers)
        return reopening.after_outage(
            rented, price_limits.without_own_hosts(spot.usable), live, closed, view.now
        )

    def _own(self, spot: fleet.Share, view: View) -> list[Offer]:
        """Return the free places of own hosts that missing spot replicas take."""
        if not self.limits_prices or spot.missing <= 0:
            return []
        return price_limits.own_places(spot.usable, (*view.replicas, *view.others), spot.missing)

    def _on_spot(
        self, spot: fleet.Share, again: reopening.Return | None, view: View, memory: Json
    ) -> list[PlannedLaunch]:
        """Own hosts first, then SELECT-NEXT-ZONE for every missing replica, each counted before the next.

        After an outage one goes to each zone that may be tried, in Z_P or not.
        """
        own = self._own(spot, view)[: max(0, view.limit)]
        missing = min(spot.missing, view.limit) - len(own)
        count = missing if again is None else min(missing, again.most)
        preempting = memory.get("preempting", ()) if again is None else ()
        usable = spot.usable if again is None else again.usable
        usable = price_limits.without_own_hosts(usable) if self.limits_prices else usable
        available = [offer for offer in usable if zone_backoff.market(offer) not in preempting] or usable
        if self.shuffled:
            available = sorted(available, key=lambda o: crc32(f"{view.now:.0f} {o.zone}".encode()))
        spread = fleet.Spread(fleet.spot((*view.replicas, *view.others)), by_region=self.by_region)
        places = [spread.put(offer, fleet.OWN_HOST) for offer in own]
        for _ in range(count if available else 0):
            fresh = [offer for offer in available if not spread.in_zone[offer.zone]]
            why = "no spot replica there yet" if fresh else "fewest there, of the cheapest"
            band = fleet.cheapest(fresh or available, view.goal.work, self.equal_cost)
            places.append(spread.take(band, why))
        return places


def as_printed() -> SpotHedge:
    """Algorithm 1 to the letter: Z_P is emptied when one zone is left, and every missing replica is requested at every tick.

    It does not say which of several equal zones is next; a fixed order among them would decide how bad its livelock is, so
    here chance does. For comparison; it may never reach its number (see above).
    """
    return SpotHedge(
        refill_below=2,
        longest_block_s=0.0,
        equal_cost=0.0,
        by_region=False,
        shuffled=True,
        limits_prices=False,
    )


def _memory(preempting: Sequence[str], closed: Json) -> Json:
    memory = {"preempting": list(preempting), "blocks": closed}
    return {key: value for key, value in memory.items() if value}
