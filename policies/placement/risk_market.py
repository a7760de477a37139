"""What RiskHedge knows of each spot market (a kind of machine in a zone), and what it expects from that.

Capacity that has lasted goes on lasting, and an outage that has lasted goes on too. In the three recordings that we
have (SkyServe's AWS 1, the first half of AWS 3, and 4 zones of V100) the rate at which a zone drops replicas falls
with the time `age` since it last did, roughly (within a factor of about two) as

    loss(age) = m * s * (1 / (0.7 h + age) + 0.03 per hour)

and the rate at which an empty zone has room again, with the time since it was emptied, as 1 / (0.5 h + age). `s` says
how the other zones of the region do for this kind: 0.75 if they have room, 1.6 if one is known to be empty. (Two of the
recordings have regions of several zones; in them the rate at one age is mostly two to four times as high with one empty.
Other kinds in the same zone say nothing: in SkyServe's AWS 2022 recording they lost capacity within ten minutes of each
other 0.94 times as often as by chance, zones of one kind 1.5 times.) `m` is learned for each market: losses seen against
losses expected, both with ten prior ones added, so that a market has to be seen to be different. A loss takes all replicas
of the market in a share of the cases that is learned too, over all markets; else any smaller number, each as likely. A
refused launch is no loss: it says that the market is full, and when.

Memory: {"zones": {market: record}, "whole": [losses of all, losses of some], "starts": {kind of a cloud: start time}}, a
market being as in `zone_backoff.market` and a record being

    since           when its age began: its last loss, or an estimate of when it had room again
    held_from       since when replicas are held there without a loss; absent when none are
    lost, due       losses seen, losses expected up to `held_from`
    empty_from, empty_at    when it was first and last known to have no room for one more; absent when it has
    left_at         when we left it of our own will

and changes only with events: what grows with time is worked out when it is requested.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from policies.model import Drained, Event, Json, Launched, Offer, Preempted, Replica, ReplicaState, Terminated
from policies.placement import zone_backoff
from policies.placement.zone_backoff import is_spot

HOUR_S = 3600.0

YOUNG_H = 0.7  # the age at which the rate of loss has halved
FLOOR_PER_HOUR = 0.03  # the rest of it after days
PRIOR_LOSSES = 10.0  # as many must be seen before a zone is judged by itself rather than by the law
MEMORY_LOSSES = 20.0  # older ones fade
SIBLINGS_UP, SIBLINGS_DOWN = 0.75, 1.6
UNKNOWN_DOWN = 0.4  # the chance that a zone without a request is empty
RECOVERY_H = 0.5
WHOLE_PRIOR = (2.0, 2.0)
FIRST_SIGHT_H = 2.0  # the age of a zone that had room at the first try

FIRST_RETRY_S = 600.0
LONGEST_RETRY_S = 4 * HOUR_S
RETRY_SHARE = 1.0  # an outage is looked at again when it has lasted this much longer
HELD_PATIENCE = 4.0  # so much longer are both where we have replicas: more of them there spread no risk

USUAL_START_S = 180.0
_START_WEIGHT = 0.3
_HARDLY = 1e-3  # the least chance of room

#: States in which the cloud has accepted a replica and does not terminate it.
HELD = (ReplicaState.PROVISIONING, ReplicaState.STARTING, ReplicaState.NOT_READY, ReplicaState.READY)


def learn(
    memory: Json, events: Sequence[Event], replicas: Mapping[int, Replica], now: float
) -> dict[str, object]:
    """Return the memory after these events. `replicas` are as they were before them."""
    zones = dict(memory.get("zones", {}))
    whole = memory.get("whole")
    starts = dict(memory.get("starts", {}))
    held = [r for r in replicas.values() if is_spot(r.offer) and r.state in HELD and r.preempt_at is None]
    before = Counter(zone_backoff.market(replica.offer) for replica in held)
    lost = Counter(
        zone_backoff.market(r.offer) for r in zone_backoff.losses(events, replicas) if r.state in HELD
    )
    for zone, count in sorted(lost.items()):
        left = before[zone] - count
        zones[zone] = _after_loss(record_of(zones, zone), left, now)
        if before[zone] > 1:
            whole = _counted(whole or WHOLE_PRIOR, left == 0)
    left_in = before - lost
    for event in events:
        replica = replicas.get(event.replica_id)
        if replica is None or not is_spot(replica.offer):
            continue
        zone = zone_backoff.market(replica.offer)
        if isinstance(event, Launched) and replica.state is ReplicaState.REQUESTED:
            zones[zone] = _after_launch(record_of(zones, zone), now)
            left_in[zone] += 1
        elif (
            isinstance(event, (Terminated, Drained, Preempted))
            and left_in[zone] == 0
            and "held_from" in record_of(zones, zone)
        ):
            zones[zone] = _after_leaving(record_of(zones, zone), now)
    for zone in sorted(
        {zone_backoff.market(r.offer) for r in zone_backoff.refusals(events, replicas) if is_spot(r.offer)}
    ):
        zones[zone] = _after_refusal(record_of(zones, zone), now)
    for replica in zone_backoff.arrivals(events, replicas):
        took_s = now - (replica.created_at if replica.launched_at is None else replica.launched_at)
        kind = _started(replica.offer, is_spot(replica.offer))
        before_s = starts.get(kind, took_s)
        starts[kind] = before_s + _START_WEIGHT * (took_s - before_s)
    after = {"zones": zones, "whole": whole, "starts": starts}
    return {key: value for key, value in after.items() if value}


def record_of(records: Json, market: str) -> Json:
    """Return the record of a market; without one, what an older release has written of its zone."""
    found: Json | None = records.get(market)
    return records.get(market.partition(" ")[0], {}) if found is None else found


def _started(offer: Offer, spot: bool) -> str:
    """Return what start times are learned by: the kind of machine of a cloud, and whether it is spot."""
    return f"{offer.zone.cloud} {zone_backoff.kind(offer)} {'spot' if spot else 'on_demand'}"


def _after_loss(record: Json, left: int, now: float) -> dict[str, float]:
    """Treat the rest of a zone that drops replicas as young as newcomers: capacity falls in steps."""
    lost, due = record.get("lost", 0.0) + 1.0, record.get("due", 0.0) + _exposure(record, now)
    fade = min(1.0, MEMORY_LOSSES / lost)
    after = {"since": now, "lost": lost * fade, "due": due * fade, "empty_from": now, "empty_at": now}
    return {**after, "held_from": now} if left > 0 else after


def _after_launch(record: Json, now: float) -> dict[str, float]:
    """The zone has room. If it was not held, it has had room for an unknown part of the time since it had none."""
    after = {key: record[key] for key in record if key not in ("empty_from", "empty_at", "left_at")}
    if "held_from" not in record:
        after["since"] = now - _entry_age_h(record, now) * HOUR_S
        after["held_from"] = now
    return after


def _after_leaving(record: Json, now: float) -> dict[str, float]:
    """We left of our own will: the zone had room for us when last seen, and had had for as long as is known.

    If it had none for one more, that stands. Else a zone with room for one would be requested four, give one, be left
    because one is of no use, and be requested four again a moment later, for ever.
    """
    after = {key: record[key] for key in record if key != "held_from"}
    return {**after, "due": record.get("due", 0.0) + _exposure(record, now), "left_at": now}


def _after_refusal(record: Json, now: float) -> dict[str, float]:
    after = {key: record[key] for key in record if key != "left_at"}
    return {"empty_from": now, **after, "empty_at": now}


def _counted(whole: Sequence[float], all_lost: bool) -> list[float]:
    of_all, of_some = whole[0] + all_lost, whole[1] + (not all_lost)
    fade = min(1.0, MEMORY_LOSSES / (of_all + of_some))
    return [of_all * fade, of_some * fade]


def _entry_age_h(record: Json, now: float) -> float:
    """Return the age to give a zone that is entered now."""
    if "left_at" in record:
        kept_s: float = record["left_at"] - record["since"]
        return kept_s / HOUR_S
    if "empty_at" not in record:
        return FIRST_SIGHT_H
    unknown_s: float = max(0.0, now - record["empty_at"])
    return min(FIRST_SIGHT_H, 0.5 * unknown_s / HOUR_S)


def _exposure(record: Json, now: float) -> float:
    """Return the losses that the law expects between `held_from` and now."""
    if "held_from" not in record:
        return 0.0
    since, held_from = float(record["since"]), float(record["held_from"])
    return _expected(max(0.0, held_from - since) / HOUR_S, max(0.0, now - held_from) / HOUR_S)


def _expected(age_h: float, span_h: float) -> float:
    """Return the integral of the law over a span that begins at an age."""
    return math.log1p(span_h / (YOUNG_H + age_h)) + FLOOR_PER_HOUR * span_h


def group_of(offer: Offer) -> str:
    """Return the markets that fail together: one kind of machine in a region."""
    return f"{offer.zone.cloud}/{offer.zone.region} {zone_backoff.kind(offer)}"


class Hazard(NamedTuple):
    """The losses per hour that a market is expected to have, over the next cold start and over the hours to come."""

    now: float
    later: float


class MarketModel:
    """The expectations of one moment."""

    def __init__(self, memory: Json, now: float) -> None:
        self.now = now
        of_all, of_some = memory.get("whole", WHOLE_PRIOR)
        self.whole: float = of_all / (of_all + of_some)  # share of losses that take all
        self._records: Json = memory.get("zones", {})
        self._starts: Json = memory.get("starts", {})

    def _record(self, market: str) -> Json:
        return record_of(self._records, market)

    def start_s(self, offer: Offer) -> float:
        """Return how long a replica takes from its acceptance until it is ready.

        As this kind did, else as it does in the other capacity type, else as the slowest that is known.
        """
        spot = is_spot(offer)
        for one in (spot, not spot):
            learned: float | None = self._starts.get(_started(offer, one))
            if learned is not None:
                return learned
        return float(max(self._starts.values(), default=USUAL_START_S))

    def retry_at(self, market: str) -> float | None:
        """Return when a market that had no room may be tried again; None if it had room when last seen."""
        record = self._record(market)
        if "empty_at" not in record:
            return None
        lasted_s = record["empty_at"] - record["empty_from"]
        patience = HELD_PATIENCE if "held_from" in record else 1.0
        wait_s = min(patience * LONGEST_RETRY_S, max(patience * FIRST_RETRY_S, RETRY_SHARE * lasted_s))
        return float(record["empty_at"] + wait_s)

    def empty(self, market: str) -> tuple[float, float] | None:
        """Return when a zone was first and last known to have no room; None if it had room when last seen."""
        record = self._record(market)
        return (record["empty_from"], record["empty_at"]) if "empty_at" in record else None

    def refusals(self, market: str) -> float:
        """Return how many a zone that is requested one more replica is expected to give before it takes one.

        What was last seen of it becomes less certain with time, down to that of a zone without requests.
        """
        record = self._record(market)
        if "empty_at" in record:
            room = 1.0 - self._still(RECOVERY_H, record["empty_from"], record["empty_at"])
            room *= 1.0 - UNKNOWN_DOWN
        elif "held_from" in record:
            room = 1.0
        elif "left_at" in record:
            room = 1.0 - UNKNOWN_DOWN * (1.0 - self._still(YOUNG_H, record["since"], record["left_at"]))
        else:
            room = 1.0 - UNKNOWN_DOWN
        return 1.0 / max(_HARDLY, room) - 1.0

    def hazards(
        self, markets: Sequence[str], groups: Sequence[str], window_h: float, horizon_h: float
    ) -> list[Hazard]:
        """For each of these markets, whose groups are given, averaged over the next `window_h` and `horizon_h`."""
        records = [self._record(market) for market in markets]
        chances = [self._chance_empty(record) for record in records]
        empty: dict[str, list[float]] = {}
        for group, chance in zip(groups, chances, strict=True):
            empty.setdefault(group, []).append(chance)
        emptiest = {group: sorted(of, reverse=True)[:2] for group, of in empty.items()}
        spans = (window_h, horizon_h)
        found = []
        for record, group, chance in zip(records, groups, chances, strict=True):
            age_h = self._age_h(record)
            scale = self._multiplier(record)
            first, *others = emptiest[group]
            if others:
                siblings = others[0] if chance == first else first
                scale *= SIBLINGS_UP + (SIBLINGS_DOWN - SIBLINGS_UP) * siblings
            found.append(Hazard(*[scale * _expected(age_h, span_h) / span_h for span_h in spans]))
        return found

    def proven(self, market: str, hours: float, window_h: float) -> Hazard:
        """Return the chance that a market keeps all for that long, and its losses per hour over a window after it has."""
        record = self._record(market)
        age_h = self._age_h(record)
        lost = PRIOR_LOSSES + record.get("lost", 0.0)
        due = PRIOR_LOSSES + record.get("due", 0.0) + _exposure(record, self.now)
        more = due + _expected(age_h, hours)
        return Hazard((due / more) ** lost, lost / more * _expected(age_h + hours, window_h) / window_h)

    def _age_h(self, record: Json) -> float:
        if "held_from" in record:
            return max(0.0, self.now - float(record["since"])) / HOUR_S
        return _entry_age_h(record, self.now)

    def _multiplier(self, record: Json) -> float:
        lost, due = record.get("lost", 0.0), record.get("due", 0.0) + _exposure(record, self.now)
        return float((PRIOR_LOSSES + lost) / (PRIOR_LOSSES + due))

    def _chance_empty(self, record: Json) -> float:
        """Return how likely a zone has no room for a single replica: less and less, the longer ago that was last seen."""
        if "held_from" in record:
            return 0.0
        if "left_at" in record:
            return 1.0 - self._still(YOUNG_H, record["since"], record["left_at"])
        if "empty_at" in record:
            return self._still(RECOVERY_H, record["empty_from"], record["empty_at"])
        return UNKNOWN_DOWN

    def _still(self, scale_h: float, since: float, seen_at: float) -> float:
        """Return the chance that what had lasted since then when last seen lasts now, where rates fall with age."""
        lasted_h = scale_h + (seen_at - since) / HOUR_S
        return float(lasted_h / (lasted_h + max(0.0, self.now - seen_at) / HOUR_S))
