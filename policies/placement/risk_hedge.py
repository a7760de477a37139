"""RiskHedge: how many spot replicas, in which markets, and how many on demand, for an availability target.

SpotHedge (SkyServe, section 3; see `spothedge`) keeps a fixed number of spot replicas too many, and an on-demand one
for each that is missing. Here every replica must be worth its price. With n_z spot replicas in market z (a kind of machine
in a zone) and o on demand the fleet costs, per hour,

    sum(price_z * n_z) + price_od * o + mu * P(fewer are ready one cold start from now than are wanted then)

1.  The rate at which a market loses replicas comes from what it did (`risk_market`): it falls with the time since its
    last loss, as 1 / (0.7 h + age), and is higher while other zones of its region are empty. The chance of a
    shortfall is exact for the whole fleet, with zones of a region also failing together (`risk_odds`), and includes
    that more may be wanted then (`risk_growth`).
2.  On demand: the o of the least cost beside the spot replicas that were accepted, at the rates of this moment. Spot
    replicas that are starting count, since a new on-demand one would not be ready sooner; one that will is kept.
3.  On spot: the cheapest fleet among the near ones, at the rates of the next two hours (`risk_search`). A market that
    may have no room must save the more, the likelier it refuses; one that had none at the last try gets one replica
    on trial. Where on demand replicas stand in for all of them, spot replicas that do not change that end, also while
    they start.
4.  A market without room is tried again when that has lasted as long again, after 10 min to 4 h, or after 40 min to
    16 h where we hold replicas: the longer an outage has lasted, the longer it will. After an outage of all markets the
    first to take a replica has the others tried at once, and gets no more for a minute.
5.  mu, what an hour below the wanted number is worth, is steered by the shortfall that is predicted (`risk_budget`).
6.  Where on-demand replicas stand in for all, nothing would be learned of spot. There one replica is kept beside them in each market
    in which what the best fleet will save, once the market has kept a replica for a day, times the chance of that over a week is
    worth more than the replica costs until then.
7.  Trials, and insurance against growth, are paid from what was saved against the wanted number on demand, and .25 % of
    a week in advance, every week: no week is dearer by more than twice that and what was saved before. While fleets have come to
    more than that all the same, as where spot replicas are lost as fast as they start, no spot replica is requested
    as long as on-demand ones can be had instead.
8.  `spot_price_cap` does not leave zones out here: what a further zone is worth is for (3) to say.

SpotHedge is the better choice where most of the replicas are nearly as good as all (the target counts the time in
which all are ready, and without a hedge that is longest with all in the oldest zone), where the number of replicas must
be known beforehand (a quota) or the extra ones are wanted for their throughput, for fleets that live for a few hours,
about which nothing is learned in time, and where a cloud takes minutes to refuse: RiskHedge gets the results of the
zones it tried before it tries others.

Memory: that of `risk_market`, "blocks" (see `zone_backoff`; here none for lack of capacity), "budget" (see `risk_budget`) and
"growth" (see `risk_growth`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from policies.model import CapacityType, Event, Json, Offer, Replica, ReplicaState
from policies.placement import (
    fleet,
    price_limits,
    risk_budget,
    risk_growth,
    risk_market,
    risk_search,
    zone_backoff,
)
from policies.placement.base import Decision, PlannedLaunch, PlannedTermination, View
from policies.placement.risk_market import HELD, HOUR_S, MarketModel, group_of
from policies.placement.risk_odds import NO_GROWTH, Fleet, Growth, Hedge, Odds, Terms, best_hedge, chance
from policies.placement.risk_search import Site
from policies.placement.risk_sites import Units, sites_of, units_of
from policies.placement.zone_backoff import is_spot

HORIZON_H = 2.0
DETECTION_S = 30.0
MOST_EXTRA = 4  # spot replicas beyond the wanted number
MARGIN = 0.1  # what a change must save, as a share of the price of a spot replica
MOVE_MARGIN = 0.2
REFUSAL_H = 0.5  # a refused launch is as bad as the price of a spot replica for this number of hours
ANSWER_S = 60.0  # how long a launch may stay unanswered before other zones are tried
LOOK_AGAIN_S = 300.0
TRIAL_H = 24.0  # a market that has kept a replica for so long is known
PAYBACK_H = 168.0
MOST_TRIED = 4
TRIAL_SHARE = 0.5  # of the advance must be there for a trial to begin
TRIAL = "on trial beside on demand: what it shows is worth more than it costs"
USUAL_RATIO = 3.0  # of on-demand to spot prices, where no on-demand price is known


@dataclass(frozen=True, slots=True)
class RiskHedge:
    """The policy; see the top of this file."""

    def learn(
        self, memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
    ) -> Json:
        closed = zone_backoff.learn(memory.get("blocks", {}), events, replicas, now, longest_s=0.0)
        after = {**memory, **risk_market.learn(memory, events, replicas, now), "blocks": closed}
        return {key: value for key, value in after.items() if value}

    def decide(self, view: View, memory: Json) -> Decision:
        if "growth" in memory:
            memory = _with(memory, "growth", risk_growth.watched(memory["growth"], view.wanted, view.now))
        if view.wanted == 0:
            memory = _with(memory, "budget", risk_budget.paused(memory.get("budget"), view.now))
            return Decision(
                0, memory, ends=[PlannedTermination(replica.id, "none wanted") for replica in view.replicas]
            )
        units = units_of(view)
        # With the cap a fleet would come back from an outage of all zones in a single one.
        uncapped = replace(view, goal=replace(view.goal, spot_price_cap=math.inf))
        view, beyond = price_limits.within_limits(uncapped, memory.get("blocks", {}))
        look = _MarketView(view, memory, units)
        trials = look.trials() if look.is_idle(look.have) else ()
        asked = (look.additions() or look.on_trial(trials))[: max(0, view.limit)]
        too_many = [] if asked else look.surplus(trials)
        ended = {end.replica_id for end in too_many}
        hedge = look.hedge([replica for replica in look.spot if replica.id not in ended], asked)
        why = (
            f"chance of fewer than {view.wanted} ready in {look.window_h * 60:.0f} min: {hedge.shortfall:.1%}"
        )
        count = look.on_demand_count(look.lasting(hedge, asked).on_demand)
        stand_ins = fleet.Share.of(view, CapacityType.ON_DEMAND, count, memory.get("blocks", {}))
        bought = fleet.on_demand_places(stand_ins, view, why)
        launches = [*bought, *asked] if look.short else [*asked, *bought]  # the surer first, or the cheaper
        ends = too_many if view.others else [*too_many, *stand_ins.ends(why)]
        launches = launches[: max(0, view.limit)]
        memory = _with(memory, "budget", look.budget(hedge.shortfall, launches, ends))
        if "growth" not in memory and launches:
            memory = {**memory, "growth": risk_growth.watched(None, view.wanted, view.now)}
        return Decision(
            target=view.wanted,
            memory=memory,
            launches=launches,
            ends=ends,
            wake_at=fleet.earliest(look.wake_at(), stand_ins.opens_at),
            notes=(*look.note(), *look.learning(trials, asked), *stand_ins.note(), *beyond),
        )


def _with(memory: Json, key: str, value: Json | None) -> Json:
    """Return the memory with this value; the same object if it is the one that was there."""
    return memory if value is None or value is memory.get(key) else {**memory, key: value}


# --- one decision ----------------------------------------------------------------------------------------------


class _MarketView:
    """What one decision works with: the view in numbers. A market is its index in `sites`, best offer first.

    Rates and mu are as of the last full five minutes, so that between two of them only events change a decision.
    """

    def __init__(self, view: View, memory: Json, units: Units) -> None:
        now = view.now
        self.view = view
        self.units = units
        self.spot = fleet.spot(view.replicas)
        self.on_demand = fleet.on_demand(view.replicas)
        self.serving = units.ready((*view.replicas, *view.others), now)
        self.memory = memory
        # Replicas wanted ahead of demand, or as headroom, are not missed yet; the scaler's budget steers how much that is.
        self.incomplete = (
            self.serving + units.ready(view.leaving, now) < units.wanted - view.ahead * units.head
        )
        self.short = self.incomplete and "budget" in memory  # not before it was first complete
        self.as_of = now // LOOK_AGAIN_S * LOOK_AGAIN_S
        self.market = market = MarketModel(memory, self.as_of)

        known = self.known = sites_of(view, market, self.spot, memory.get("blocks", {}))
        self.window_h = (self._start_s(view, known.offers) + DETECTION_S) / HOUR_S
        self.sites = [
            _site(
                offer.price_usd_hour, usable is not None, market.refusals(name), units.of(offer) / units.head
            )
            for name, offer, usable in zip(known.markets, known.offers, known.usable, strict=True)
        ]
        self.index = {name: number for number, name in enumerate(known.markets)}
        self.have = self._count([replica.offer for replica in self.spot])

        groups = [group_of(offer) for offer in known.offers]
        hazards = market.hazards(known.markets, groups, self.window_h, HORIZON_H)
        number_of = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self.groups = [number_of[group] for group in groups]
        self.per_hour = [hazard.later for hazard in hazards]
        self.terms = self._terms()
        self.odds_now, self.odds_later = (
            Odds(
                self.groups,
                [chance(rate, self.window_h) for rate in rates],
                market.whole,
                self.terms,
                [units.of(offer) for offer in known.offers] if units.by_kind else None,
            )
            for rates in ([hazard.now for hazard in hazards], self.per_hour)
        )

    def _start_s(self, view: View, spot: Sequence[Offer]) -> float:
        """Return how long what replaces a lost replica takes to start: on demand where that can be bought, else spot."""
        bought = (
            [offer for offer in view.offers if not is_spot(offer)]
            if view.goal.dynamic_ondemand_fallback
            else []
        )
        offer = next(iter(bought or spot), None)
        return risk_market.USUAL_START_S if offer is None else self.market.start_s(offer)

    def _terms(self) -> Terms:
        """Return what the odds weigh. Where no replicas are on offer on demand, no more than there are can be kept."""
        view, units, goal = self.view, self.units, self.view.goal
        rented = price_limits.without_own_hosts(
            view.offers
        )  # a host of one's own is no evidence about what a replica is worth
        bought = [(offer.price_usd_hour / units.of(offer), offer) for offer in rented if not is_spot(offer)]
        usual = [offer.on_demand_usd_hour for offer in rented if offer.on_demand_usd_hour is not None]
        dearest = max((offer.price_usd_hour for offer in rented), default=1.0)
        best = min(bought, key=lambda one: one[0])[1] if bought else None
        each = units.head if best is None else units.of(best)
        usd_hour = min(usual, default=USUAL_RATIO * dearest) if best is None else best.price_usd_hour
        enough = -(-units.wanted // each)
        plain = self.plain_usd_hour = usd_hour * units.wanted / each
        self.means = risk_budget.means(self.memory.get("budget"), plain, self.as_of)
        growth = risk_growth.partly(self._growth(), self.means.share)
        most = -(-(units.wanted + growth[-1][0]) // each) if bought else min(enough, len(self.on_demand))
        least = min(goal.base_ondemand_fallback_replicas, enough)
        if not goal.dynamic_ondemand_fallback:
            most = least
        share = risk_budget.penalty_share(self.memory.get("budget"), goal.availability_target, self.as_of)
        return Terms(units.wanted, share * plain, usd_hour, least, max(least, most), each, growth)

    def _growth(self) -> Growth:
        view, head = self.view, self.units.head
        if view.wanted_later is not None:
            found = risk_growth.forecast(view.wanted_later)
        else:
            found = risk_growth.expected(self.memory.get("growth"), view.wanted, self.as_of, self.window_h)
        return found if found is NO_GROWTH or head == 1 else tuple((more * head, p) for more, p in found)

    def _count(self, offers: Sequence[Offer]) -> Fleet:
        count = Counter(self.index[zone_backoff.market(offer)] for offer in offers)
        return tuple([count[number] for number in range(len(self.index))])

    # --- on demand

    def hedge(self, spot: Sequence[Replica], asked: Sequence[PlannedLaunch]) -> Hedge:
        """The on-demand replicas to have beside these spot ones, and those that are about to be requested.

        What was requested counts as had, unless the service is short already: while enough serve there is time to
        get the result. An on-demand replica that is ready before the spot replicas which are to take its place is
        kept until they are.
        """
        now, each = self.view.now, self.terms.on_demand_units
        coming = [(r.offer, self._ready_at(r)) for r in spot if r.state in HELD or not self.short]
        if not self.short:
            coming += [(place.offer, now + self.market.start_s(place.offer)) for place in asked]
        best = self._hedge([offer for offer, _ in coming], self.terms.most)
        for ready_at in sorted({self._ready_at(replica) for replica in self.on_demand}):
            by_then = [offer for offer, at in coming if at <= ready_at]
            if len(by_then) < len(coming):
                there = self.units.total(r for r in self.on_demand if self._ready_at(r) <= ready_at) // each
                kept = self._hedge(by_then, min(there, self.terms.most))
                best = max(best, kept, key=lambda hedge: hedge.on_demand)
        # A service that is short gets no shorter: what serves goes when it is one too many.
        serving = self.units.ready(self.on_demand, now)
        spare = serving + self.units.ready((*spot, *self.view.others), now) - self.units.wanted
        least = min(-(-(serving - max(0, spare)) // each), self.terms.most)
        return best if best.on_demand >= least else best._replace(on_demand=least)

    def lasting(self, hedge: Hedge, asked: Sequence[PlannedLaunch]) -> Hedge:
        """Return the hedge without on-demand replicas to launch that would be ready when they are not wanted any more."""
        passing = self.view.passing * self.units.head
        have = self.units.total(self.on_demand) // self.terms.on_demand_units
        if not passing or hedge.on_demand <= have:
            return hedge
        terms = self.terms._replace(wanted=max(0, self.terms.wanted - passing), growth=NO_GROWTH)
        spot = [replica.offer for replica in self.spot] + [place.offer for place in asked]
        then = best_hedge(self.odds_now.survivors(self._count(spot)), terms)
        return hedge._replace(on_demand=min(hedge.on_demand, max(have, then.on_demand)))

    def on_demand_count(self, hedge: int) -> int:
        """Return how many on-demand replicas to have for a hedge of that number of the kind that is bought."""
        if not self.units.by_kind:
            return hedge
        spare = self.units.total(self.on_demand) - hedge * self.terms.on_demand_units
        if spare < 0:
            return len(self.on_demand) - spare // self.terms.on_demand_units
        return len(self.on_demand) - spare // max([self.units.of(r.offer) for r in self.on_demand], default=1)

    def _hedge(self, spot: Sequence[Offer], most: int) -> Hedge:
        terms = self.terms._replace(most=most)
        if self.view.others and (any(self.known.usable) or self.units.total(self.spot) >= self._needed()):
            # The old version serves beside them; only in a dry market an update must not wait for its spot replicas.
            helping = self.units.ready(self.view.others, self.view.now)
            terms = terms._replace(wanted=max(0, terms.wanted - helping))
        return best_hedge(self.odds_now.survivors(self._count(spot)), terms)

    def _ready_at(self, replica: Replica) -> float:
        """Return when it should begin to serve; long ago if it has."""
        if replica.state in (ReplicaState.READY, ReplicaState.NOT_READY):
            return -math.inf
        began = replica.created_at if replica.launched_at is None else replica.launched_at
        return began + self.market.start_s(replica.offer)

    # --- on spot

    def additions(self) -> list[PlannedLaunch]:
        """Return what to request. Nothing while responses are out: they may change what is best."""
        if self._answers_at() is not None or self._is_to_be_plain():
            return []
        plan = self._better(self.have)
        if plan is None:
            return []
        places = []
        for zone, offer in enumerate(self.known.usable):
            missing = plan[zone] - self.have[zone]
            if offer is not None and missing > 0:
                why = f"{self.have[zone]} there; a loss expected every {1.0 / self.per_hour[zone]:.1f} h"
                on_trial = self.known.retry_at[zone] is not None
                places += [PlannedLaunch(offer, why)] * (1 if on_trial else missing)
        return places

    def _is_to_be_plain(self) -> bool:
        """Return whether fleets have come to too much, and on-demand replicas can be had instead: refused ones serve no one."""
        if not risk_budget.is_spent(self.means, self.plain_usd_hour):
            return False
        enough = -(-self.units.wanted // self.terms.on_demand_units)
        plain = fleet.Share.of(self.view, CapacityType.ON_DEMAND, enough, self.memory.get("blocks", {}))
        return self.view.goal.dynamic_ondemand_fallback and (plain.missing <= 0 or bool(plain.usable))

    def trials(self) -> tuple[int, ...]:
        """Return the markets in which one replica beside the on-demand ones is an investment, those that are held first.

        Where on-demand replicas stand in for all, nothing is learned of spot. A market that keeps a replica for `TRIAL_H` is
        known to be of use: what the best fleet would then save, within `PAYBACK_H`, times the chance that it comes to that must be
        more than the trial costs.
        """
        if self.short or not self.means.share:
            return ()
        # One that has refused is left to the search, which weighs refusals: what it has room for is worth little.
        known = [
            n for n, at in enumerate(self.known.retry_at) if at is None and self.known.usable[n] is not None
        ]
        open_now = [n for n in known if not self.have[n] and self.means.share >= TRIAL_SHARE]
        open_now.sort(key=lambda n: (self.sites[n].usd_hour / self.sites[n].heads, self.per_hour[n]))
        chosen: tuple[int, ...] = ()
        saved = 0.0
        # A market that took the first replica after an outage is left alone for a while; what it holds is on trial all the same.
        had_room = [self.market.retry_at(name) is None for name in self.known.markets]
        held = [n for n, count in enumerate(self.have) if count and had_room[n]]
        for number in (*held, *open_now)[:MOST_TRIED]:
            proven = self.market.proven(self.known.markets[number], TRIAL_H, self.window_h)
            more = self._saving((*chosen, number)) - saved
            cost = self.sites[number].usd_hour * 0.5 * (1.0 + proven.now) * TRIAL_H
            if more * proven.now * PAYBACK_H > cost * (0.5 if self.have[number] else 1.0):
                chosen, saved = (*chosen, number), saved + more
        return chosen

    def _saving(self, markets: Sequence[int]) -> float:
        """Return what the best fleet in these markets will save per hour, once each has kept a replica for `TRIAL_H`."""
        names = [self.known.markets[number] for number in markets]
        rates = [self.market.proven(name, TRIAL_H, self.window_h).later for name in names]
        units = [self.odds_later.units_of(number) for number in markets]
        odds = Odds(
            [self.groups[number] for number in markets],
            [chance(rate, self.window_h) for rate in rates],
            self.market.whole,
            self.terms,
            units,
        )
        none = (0,) * len(markets)
        sites = [self.sites[number]._replace(open=True, asking_usd_hour=0.0) for number in markets]
        best = risk_search.grown(odds, none, sites, -(-self._most() // odds.least_units), MARGIN)
        if best is None:
            return 0.0
        paid = sum(count * site.usd_hour for count, site in zip(best, sites, strict=True))
        return odds.hedge(none).usd_hour - odds.hedge(best).usd_hour - paid

    def on_trial(self, markets: Sequence[int]) -> list[PlannedLaunch]:
        """Return the launches of one replica in each of these markets that has none."""
        if self._answers_at() is not None:
            return []
        new = [(self.known.usable[number], number) for number in markets if not self.have[number]]
        return [PlannedLaunch(offer, TRIAL) for offer, number in new if offer is not None]

    def learning(self, markets: Sequence[int], asked: Sequence[PlannedLaunch]) -> tuple[str, ...]:
        """The sentence for the user while there are trials: where, and what they cost."""
        offers = [r.offer for r in self.spot] + [place.offer for place in asked]
        tried = [self.known.offers[number] for number in markets]
        tried = [offer for offer in tried if zone_backoff.market(offer) in map(zone_backoff.market, offers)]
        if not tried:
            return ()
        usd = sum(offer.price_usd_hour for offer in tried)
        zones = ", ".join(str(offer.zone) for offer in tried)
        return (
            f"a spot replica beside the on-demand ones shows whether {zones} keeps it, for {usd:.2f} USD/h",
        )

    def is_idle(self, spot: Fleet) -> bool:
        """Return whether as many replicas on demand stand in for these as if there were none."""
        return self.odds_later.hedge(spot).on_demand * self.terms.on_demand_units >= self.units.wanted

    def surplus(self, trials: Sequence[int]) -> list[PlannedTermination]:
        """Return the spot replicas that are not worth their price any more.

        While others start up none is, and what serves is not taken below the wanted number. The wanted number of them
        is kept. Neither holds where as many replicas on demand stand in for them as if there were none, unless a zone in
        which some start can be asked for more before they are ready.
        """
        starting = [r for r in self.spot if r.state in (ReplicaState.PROVISIONING, ReplicaState.STARTING)]
        idle = self.is_idle(self.have)
        awaited = any(map(self._may_have_company, starting)) if idle else bool(starting)
        if self._answers_at() is not None or (awaited and self.units.total(self.spot) <= self._most()):
            return []
        needed = 0 if idle else self._needed()
        smaller = risk_search.shrunk(self.odds_later, self.have, self.sites, needed, MARGIN)
        if not idle:  # else the next look would find that the rest is of no use
            smaller = [plan for plan in smaller if not self.is_idle(plan)]
        plan = next((plan for plan in reversed(smaller) if self._better(plan) is None), self.have)
        plan = tuple([max(keep, min(self.have[n], n in trials)) for n, keep in enumerate(plan)])
        why = f"{len(self.spot)} spot replicas, {sum(plan)} are worth their price"
        ends: list[PlannedTermination] = []
        spare = self.serving - self.units.wanted
        for market, count, keep in zip(self.known.markets, self.have, plan, strict=True):
            if count <= keep:
                continue
            here = [replica for replica in self.spot if zone_backoff.market(replica.offer) == market]
            for end in fleet.ends(here, keep, why):
                serves = self.units.ready([r for r in here if r.id == end.replica_id], self.view.now)
                if serves <= spare:
                    spare -= serves
                    ends.append(end)
        return ends

    def _may_have_company(self, replica: Replica) -> bool:
        """Return whether its market takes requests again before the replica is ready."""
        at = self.known.retry_at[self.index[zone_backoff.market(replica.offer)]]
        return at is not None and self.view.now < at < self._ready_at(replica)

    def _better(self, have: Fleet) -> Fleet | None:
        """Return a fleet worth the change, with more replicas or with some elsewhere."""
        room = -(-(self._most() - self.odds_later.total(have)) // self.odds_later.least_units)
        if room <= 0:
            return None
        larger = risk_search.grown(self.odds_later, have, self.sites, room, MARGIN)
        return larger or risk_search.moved(self.odds_later, have, self.sites, room, MOVE_MARGIN)

    def _most(self) -> int:
        return self._needed() + MOST_EXTRA * self.units.head

    def _needed(self) -> int:
        return max(0, self.units.wanted - self.terms.least * self.terms.on_demand_units)

    def _answers_at(self) -> float | None:
        """Return until when to wait for the results of launches under way; None if none are out."""
        asked = [r.since + ANSWER_S for r in self.spot if r.state is ReplicaState.REQUESTED]
        return max((at for at in asked if at > self.view.now), default=None)

    # --- beside the decision

    def budget(
        self, predicted: float, launches: Sequence[PlannedLaunch], ends: Sequence[PlannedTermination]
    ) -> Json | None:
        """Return the error budget after this decision; None before the service was first complete."""
        view, ended = self.view, {end.replica_id for end in ends}
        staying = [replica for replica in view.replicas if replica.id not in ended]
        ready = sum(replica.state is ReplicaState.READY for replica in staying)
        offers = [*(r.offer for r in staying), *(p.offer for p in launches)]
        paid = sum(offer.price_usd_hour for offer in offers)
        bought = sum(not is_spot(offer) for offer in offers)
        return risk_budget.written(
            self.memory.get("budget"),
            now=view.now,
            short=self.incomplete,
            predicted=predicted,
            fleet=(view.wanted, ready, len(staying) + len(launches), bought),
            target=view.goal.availability_target,
            window_s=self.window_h * HOUR_S,
            saved=(*self.means, self.plain_usd_hour - paid, self.as_of),
        )

    def wake_at(self) -> float | None:
        """Zones are tried again only where there is something to win."""
        prices = [site.usd_hour for site in self.sites]
        wins = self.odds_later.hedge(self.have).usd_hour > MOVE_MARGIN * min(prices, default=math.inf)
        return fleet.earliest(
            self.as_of + LOOK_AGAIN_S,
            self.known.opens_at if wins else None,
            self._answers_at(),
            fleet.grace_ends_at((*self.view.replicas, *self.view.others, *self.view.leaving), self.view.now),
        )

    def note(self) -> tuple[str, ...]:
        """The sentence for the user while spot capacity is missing; it stands until a zone takes a replica."""
        held = self.units.total(replica for replica in self.spot if replica.state in HELD)
        if held >= self._needed() or not self.known.all_asked:
            return ()
        return (
            "no zone had room for more spot replicas when last asked"
            if self.known.markets
            else "no spot on offer fits",
        )


def _site(usd_hour: float, is_open: bool, refusals: float, heads: float) -> Site:
    """`refusals` are those to be expected for one replica; over the horizon they must be earned back."""
    return Site(usd_hour, is_open, usd_hour * refusals * REFUSAL_H / HORIZON_H, heads)
