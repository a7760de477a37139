"""RiskHedge: how many spot replicas, in which zones, and how many on demand, for an availability target.

SpotHedge (SkyServe, section 3; see `spothedge`) keeps a fixed number of spot replicas too many, and an on-demand one
for each that is missing. Here every replica must be worth its price. With n_z spot replicas in zone z and o on demand
the fleet costs, per hour,

    sum(price_z * n_z) + price_od * o + mu * P(fewer than N_tar are ready one cold start from now)

1.  The rate at which a zone loses replicas comes from what it did (`risk_market`): it falls with the time since its
    last loss, as 1 / (0.7 h + age), and is higher while other zones of its region are empty. The chance of a
    shortfall is exact for the whole fleet, with zones of a region also failing together (`risk_odds`).
2.  On demand: the o of the least cost beside the spot replicas that were accepted, at the rates of this moment. Spot
    replicas that are starting count, since a new on-demand one would not be ready sooner; one that will is kept.
3.  On spot: the cheapest fleet among the near ones, at the rates of the next two hours (`risk_search`). A zone that
    may have no room must save the more, the likelier it refuses; one that had none at the last try gets one replica
    on trial.
4.  A zone without room is tried again when that has lasted as long again, after 10 min to 4 h, or after 40 min to
    16 h where we hold replicas: the longer an outage has lasted, the longer it will. After an outage of all zones the
    first to take a replica has the others tried at once, and gets no more for a minute.
5.  mu, what an hour below N_tar is worth, is steered: mu = 0.1 * price_od * N_tar / (1 - target) * e^b, where b is by
    how much the error budget is overdrawn, in units of what the target allows in 72 hours, within +-2.5;
    and at least twice what N_tar replicas cost on demand.
6.  `spot_price_cap` does not leave zones out here: what a further zone is worth is for (3) to say.

SpotHedge is the better choice where most of the replicas are nearly as good as all (the target counts the time in
which all are ready, and without a hedge that is longest with all in the oldest zone), where the number of replicas must
be known beforehand (a quota) or the extra ones are wanted for their throughput, for fleets that live for a few hours,
about which nothing is learned in time, and where a cloud takes minutes to refuse: RiskHedge gets the results of the
zones it tried before it tries others.

Memory: that of `risk_market`, "blocks" (see `blocks`; here none for lack of capacity), and the error budget
{"budget": {"spent": b, "at": instant of b, "rate": its growth per second, "met": wanted replicas that were reached}}.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.model import CapacityType, Event, Json, Offer, Replica, ReplicaState, Zone
from policies.placement import blocks, fleet, reopening, risk_market, risk_search, thrift
from policies.placement.base import Decision, PlannedLaunch, PlannedTermination, View
from policies.placement.blocks import is_spot
from policies.placement.risk_market import HELD, HOUR_S, MarketModel
from policies.placement.risk_odds import Fleet, Hedge, Odds, Terms, best_hedge, chance
from policies.placement.risk_search import Site

AVAILABILITY_TARGET = 0.995
#: At the target, shortfalls cost as much as this share of the fleet on demand.
PENALTY_SHARE = 0.1
#: Being short is always worse than paying for the fleet on demand, by this factor.
LEAST_PENALTY = 2.0
BUDGET_S = 72 * HOUR_S
MOST_OVERDRAWN = 2.5

HORIZON_H = 2.0
DETECTION_S = 30.0
MOST_EXTRA = 4  # spot replicas beyond the wanted number
MARGIN = 0.1  # what a change must save, as a share of the price of a spot replica
MOVE_MARGIN = 0.2
REFUSAL_H = 0.5  # a refused launch is as bad as the price of a spot replica for this number of hours
ANSWER_S = 60.0  # how long a launch may stay unanswered before other zones are tried
LOOK_AGAIN_S = 300.0
USUAL_RATIO = 3.0  # of on-demand to spot prices, where no on-demand price is known

_SURELY = 1e-5  # unavailability below which a target is the same as none


@dataclass(frozen=True, slots=True)
class RiskHedge:
    """The policy; see the top of this file."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        closed = blocks.learn(memory.get("blocks", {}), events, replicas, now, longest_s=0.0)
        after = {**memory, **risk_market.learn(memory, events, replicas, now), "blocks": closed}
        return {key: value for key, value in after.items() if value}

    def decide(self, view: View, memory: Json) -> Decision:
        memory = _budgeted(view, memory)
        if view.wanted == 0:
            return Decision(
                0, memory, ends=[PlannedTermination(replica.id, "none wanted") for replica in view.replicas]
            )
        # With the cap a fleet would come back from an outage of all zones in a single one.
        uncapped = replace(view, goal=replace(view.goal, spot_price_cap=math.inf))
        view, beyond = thrift.thrifty(uncapped, memory.get("blocks", {}))
        look = _MarketView(view, memory)
        asked = look.additions()[: max(0, view.limit)]
        too_many = [] if asked else look.surplus()
        ended = {end.replica_id for end in too_many}
        hedge = look.hedge([replica for replica in look.spot if replica.id not in ended], asked)
        why = (
            f"chance of fewer than {view.wanted} ready in {look.window_h * 60:.0f} min: {hedge.shortfall:.1%}"
        )
        stand_ins = fleet.Share.of(view, CapacityType.ON_DEMAND, hedge.on_demand, memory.get("blocks", {}))
        bought = fleet.on_demand_places(stand_ins, view, why)
        launches = [*bought, *asked] if look.short else [*asked, *bought]  # the surer first, or the cheaper
        ends = too_many if view.others else [*too_many, *stand_ins.ends(why)]
        return Decision(
            target=view.wanted,
            memory=memory,
            launches=launches[: max(0, view.limit)],
            ends=ends,
            wake_at=fleet.earliest(look.wake_at(), stand_ins.opens_at),
            notes=(*look.note(), *stand_ins.note(), *beyond),
        )


# --- the error budget ------------------------------------------------------------------------------------------


def _budgeted(view: View, memory: Json) -> Json:
    """Return the memory with the error budget, which is written when the service begins or ceases to be short, not between.

    It begins when the wanted number is first reached; while a service grows it is short only of what it had.
    """
    budget = memory.get("budget")
    serving = fleet.ready((*view.replicas, *view.others), view.now)
    if budget is None and (view.wanted == 0 or serving < view.wanted):
        return memory
    met = view.wanted if budget is None or serving >= view.wanted else min(view.wanted, budget["met"])
    rate = (float(serving < met) / _allowed(view) - 1.0) / BUDGET_S if view.wanted else 0.0
    if budget is not None and (budget["rate"], budget["met"]) == (rate, met):
        return memory
    spent = _overdrawn(budget, view.now)
    return {**memory, "budget": {"spent": spent, "at": view.now, "rate": rate, "met": met}}


def _overdrawn(budget: Json | None, now: float) -> float:
    if budget is None:
        return 0.0
    spent: float = budget["spent"] + budget["rate"] * (now - budget["at"])
    return max(-MOST_OVERDRAWN, min(MOST_OVERDRAWN, spent))


def _allowed(view: View) -> float:
    """Return the share of the time in which fewer replicas than wanted may be ready."""
    target = view.goal.availability_target
    return max(_SURELY, 1.0 - (AVAILABILITY_TARGET if target is None else target))


# --- one decision ----------------------------------------------------------------------------------------------


class _MarketView:
    """What one decision works with: the view in numbers. A zone is its index in `zones`, best offer first.

    Rates and mu are as of the last full five minutes, so that between two of them only events change a decision.
    """

    def __init__(self, view: View, memory: Json) -> None:
        now = view.now
        self.view = view
        self.spot = fleet.spot(view.replicas)
        self.on_demand = fleet.on_demand(view.replicas)
        self.serving = fleet.ready((*view.replicas, *view.others), now)
        self.short = "budget" in memory and self.serving < view.wanted  # not before it was first complete
        self.as_of = now // LOOK_AGAIN_S * LOOK_AGAIN_S
        self.market = market = MarketModel(memory, self.as_of)
        self.window_h = (market.start_s + DETECTION_S) / HOUR_S

        offers = [offer for offer in view.offers if is_spot(offer)]
        closed = memory.get("blocks", {})
        usable = _by_zone(blocks.open_offers(offers, closed, now))
        known = _by_zone([*offers, *(replica.offer for replica in self.spot)])
        self.zones = list(known)
        self.retry_at = self._retry_at()
        self.usable = [
            None if at is not None and at > now else usable.get(zone)
            for zone, at in zip(self.zones, self.retry_at, strict=True)
        ]
        self.sites = [
            _site(known[zone].price_usd_hour, offer is not None, market.refusals(zone))
            for zone, offer in zip(self.zones, self.usable, strict=True)
        ]
        opens = [
            blocks.next_opening(offers, closed, now),
            *(at for at in self.retry_at if at is not None and at > now),
        ]
        self.opens_at = fleet.earliest(*opens)
        self.have = self._count(replica.zone for replica in self.spot)

        hazards = market.hazards(self.zones, self.window_h, HORIZON_H)
        regions = [(zone.cloud, zone.region) for zone in self.zones]
        self.per_hour = [hazard.later for hazard in hazards]
        self.terms = _terms(view, _overdrawn(memory.get("budget"), self.as_of), len(self.on_demand))
        self.odds_now, self.odds_later = (
            Odds(
                [regions.index(region) for region in regions],
                [chance(rate, self.window_h) for rate in rates],
                market.whole,
                self.terms,
            )
            for rates in ([hazard.now for hazard in hazards], self.per_hour)
        )

    def _retry_at(self) -> list[float | None]:
        """Return when each zone may be tried again.

        After an outage in which all zones were shut, the first that takes a replica shows that the market is open. The
        others are tried at once, and it is left alone until `reopening.PATIENCE_S` later: else it would take the whole
        fleet, and its next preemption would be an outage again.
        """
        retry_at = [self.market.retry_at(zone) for zone in self.zones]
        hosts = thrift.own_zones(self.view.offers)
        live = [r for r in (*self.spot, *fleet.spot(self.view.others)) if r.zone not in hosts]
        held = {replica.zone for replica in live if replica.launched_at is not None}
        began = reopening.accepted_at(live)
        if began is None or len(held) != 1 or self.view.now >= began + reopening.PATIENCE_S:
            return retry_at
        others = [zone for zone in self.zones if zone not in held and zone not in hosts]
        empty = {zone: span for zone in others if (span := self.market.empty(zone)) is not None}
        asked_at = min(replica.created_at for replica in live if replica.zone in held)
        # Zones that were tried together with this one, as at the first launch of a service, show no outage.
        if not others or len(empty) < len(others) or any(since >= asked_at for since, _ in empty.values()):
            return retry_at
        again = reopening.ask_again_at({zone: at for zone, (_, at) in empty.items()}, began)
        again |= dict.fromkeys(held, began + reopening.PATIENCE_S)
        return [again.get(zone, at) for zone, at in zip(self.zones, retry_at, strict=True)]

    def _count(self, zones: Iterable[Zone]) -> Fleet:
        count = Counter(zones)
        return tuple(count[zone] for zone in self.zones)

    # --- on demand

    def hedge(self, spot: Sequence[Replica], asked: Sequence[PlannedLaunch]) -> Hedge:
        """The on-demand replicas to have beside these spot ones, and those that are about to be requested.

        What was requested counts as had, unless the service is short already: while enough serve there is time to
        get the result. An on-demand replica that is ready before the spot replicas which are to take its place is
        kept until they are.
        """
        coming = [(r.zone, self._ready_at(r)) for r in spot if r.state in HELD or not self.short]
        if not self.short:
            coming += [(place.offer.zone, self.view.now + self.market.start_s) for place in asked]
        best = self._hedge([zone for zone, _ in coming], self.terms.most)
        for ready_at in sorted({self._ready_at(replica) for replica in self.on_demand}):
            by_then = [zone for zone, at in coming if at <= ready_at]
            if len(by_then) < len(coming):
                there = sum(self._ready_at(other) <= ready_at for other in self.on_demand)
                kept = self._hedge(by_then, min(there, self.terms.most))
                best = max(best, kept, key=lambda hedge: hedge.on_demand)
        # A service that is short gets no shorter: what serves goes when it is one too many.
        serving = fleet.ready(self.on_demand, self.view.now)
        spare = serving + fleet.ready((*spot, *self.view.others), self.view.now) - self.view.wanted
        least = min(serving - max(0, spare), self.terms.most)
        return best if best.on_demand >= least else best._replace(on_demand=least)

    def _hedge(self, spot: Sequence[Zone], most: int) -> Hedge:
        terms = self.terms._replace(most=most)
        if self.view.others and (any(self.usable) or len(self.spot) >= self.view.wanted - terms.least):
            # The old version serves beside them; only in a dry market an update must not wait for its spot replicas.
            helping = fleet.ready(self.view.others, self.view.now)
            terms = terms._replace(wanted=max(0, terms.wanted - helping))
        return best_hedge(self.odds_now.survivors(self._count(spot)), terms)

    def _ready_at(self, replica: Replica) -> float:
        """Return when it should begin to serve; long ago if it has."""
        if replica.state in (ReplicaState.READY, ReplicaState.NOT_READY):
            return -math.inf
        began = replica.created_at if replica.launched_at is None else replica.launched_at
        return began + self.market.start_s

    # --- on spot

    def additions(self) -> list[PlannedLaunch]:
        """Return what to request. Nothing while responses are out: they may change what is best."""
        if self._answers_at() is not None:
            return []
        plan = self._better(self.have)
        if plan is None:
            return []
        places = []
        for zone, offer in enumerate(self.usable):
            missing = plan[zone] - self.have[zone]
            if offer is not None and missing > 0:
                why = f"{self.have[zone]} there; a loss expected every {1.0 / self.per_hour[zone]:.1f} h"
                on_trial = self.retry_at[zone] is not None
                places += [PlannedLaunch(offer, why)] * (1 if on_trial else missing)
        return places

    def surplus(self) -> list[PlannedTermination]:
        """Return the spot replicas that are not worth their price any more.

        While others start up none is, and what serves is not taken below the wanted number.
        """
        starting = any(r.state in (ReplicaState.PROVISIONING, ReplicaState.STARTING) for r in self.spot)
        if self._answers_at() is not None or (starting and len(self.spot) <= self._most()):
            return []
        needed = self.view.wanted - self.terms.least
        smaller = risk_search.shrunk(self.odds_later, self.have, self.sites, needed, MARGIN)
        plan = next((plan for plan in reversed(smaller) if self._better(plan) is None), self.have)
        why = f"{len(self.spot)} spot replicas, {sum(plan)} are worth their price"
        ends: list[PlannedTermination] = []
        spare = self.serving - self.view.wanted
        for zone, keep in zip(self.zones, plan, strict=True):
            here = [replica for replica in self.spot if replica.zone == zone]
            for end in fleet.ends(here, keep, why):
                serves = fleet.ready([r for r in here if r.id == end.replica_id], self.view.now)
                if serves <= spare:
                    spare -= serves
                    ends.append(end)
        return ends

    def _better(self, have: Fleet) -> Fleet | None:
        """Return a fleet worth the change, with more replicas or with some elsewhere."""
        room = self._most() - sum(have)
        if room <= 0:
            return None
        larger = risk_search.grown(self.odds_later, have, self.sites, room, MARGIN)
        return larger or risk_search.moved(self.odds_later, have, self.sites, room, MOVE_MARGIN)

    def _most(self) -> int:
        return self.view.wanted - self.terms.least + MOST_EXTRA

    def _answers_at(self) -> float | None:
        """Return until when to wait for the results of launches under way; None if none are out."""
        asked = [r.since + ANSWER_S for r in self.spot if r.state is ReplicaState.REQUESTED]
        return max((at for at in asked if at > self.view.now), default=None)

    # --- beside the decision

    def wake_at(self) -> float | None:
        """Zones are tried again only where there is something to win."""
        prices = [site.usd_hour for site in self.sites]
        wins = self.odds_later.hedge(self.have).usd_hour > MOVE_MARGIN * min(prices, default=math.inf)
        return fleet.earliest(
            self.as_of + LOOK_AGAIN_S,
            self.opens_at if wins else None,
            self._answers_at(),
            fleet.grace_ends_at((*self.view.replicas, *self.view.others), self.view.now),
        )

    def note(self) -> tuple[str, ...]:
        """The sentence for the user while spot capacity is missing; it stands until a zone takes a replica."""
        held = sum(replica.state in HELD for replica in self.spot)
        if held >= self.view.wanted - self.terms.least or None in self.retry_at:
            return ()
        return (
            "no zone had room for more spot replicas when last asked"
            if self.zones
            else "no spot on offer fits",
        )


def _terms(view: View, overdrawn: float, on_demand: int) -> Terms:
    """`on_demand` is how many there are: where none are on offer, no more are available."""
    goal, wanted = view.goal, view.wanted
    rented = thrift.rented(view.offers)  # a host of one's own says nothing about what a replica is worth
    prices = [offer.price_usd_hour for offer in rented if not is_spot(offer)]
    usual = [offer.on_demand_usd_hour for offer in rented if offer.on_demand_usd_hour is not None]
    dearest = max((offer.price_usd_hour for offer in rented), default=1.0)
    usd_hour = min(prices or usual, default=USUAL_RATIO * dearest)
    mu_share = max(LEAST_PENALTY, PENALTY_SHARE / _allowed(view) * math.exp(overdrawn))
    least = min(goal.base_ondemand_fallback_replicas, wanted)
    most = (wanted if prices else min(wanted, on_demand)) if goal.dynamic_ondemand_fallback else least
    return Terms(wanted, mu_share * usd_hour * wanted, usd_hour, least, max(least, most))


def _site(usd_hour: float, is_open: bool, refusals: float) -> Site:
    """`refusals` are those to be expected for one replica; over the horizon they must be earned back."""
    return Site(usd_hour, is_open, usd_hour * refusals * REFUSAL_H / HORIZON_H)


def _by_zone(offers: Sequence[Offer]) -> dict[Zone, Offer]:
    """Return the best offer of each zone, in their order."""
    best: dict[Zone, Offer] = {}
    for offer in offers:
        best.setdefault(offer.zone, offer)
    return best
