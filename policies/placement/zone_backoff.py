"""Where not to launch for a while: the memory of refusals that every placer shares.

A capacity error or a preemption (its notice, where there is one) blocks the zone, for that capacity type and that
kind of machine (accelerator and count), for 10 s, doubling with every further one up to 5 min, until a replica launched
there becomes ready: a zone without room for an L4 may have an A100. So does an on-demand instance that is lost before its
replica was ready. A quota error blocks the region (or the cloud, where the quota is the cloud's) for that capacity type and
accelerator until `retry_at` (default 5 min), and a region that returned errors to the last try is left alone for a
minute. A permission error blocks what was refused, the region or the whole cloud, for 15 s, doubling up to 15 min until a
launch there is accepted: a person may be about to fix it, or not before Monday. A refusal for a reason that waiting does not
cure (FailureKind.REFUSED) blocks its scope for an hour, doubling up to six, until a replica launched there becomes ready.

Blocks are {"cloud/region/zone|capacity type|accelerator:count": {"until": s, "failures": n}}, with "*" for zone or
region; parts missing at the end stand for all. Refusals have keys of their own, in which "=" and the machine type follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from policies.backoff import delay_s
from policies.model import (
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Json,
    Launched,
    LaunchFailed,
    NodeLost,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbePassed,
    Replica,
    ReplicaState,
    Scope,
    Zone,
)

FIRST_BLOCK_S = 10.0
LONGEST_BLOCK_S = 300.0
QUOTA_BLOCK_S = 300.0
FIRST_AUTH_BLOCK_S = 15.0
LONGEST_AUTH_BLOCK_S = 900.0
FIRST_REFUSED_BLOCK_S = 3600.0
LONGEST_REFUSED_BLOCK_S = 6 * 3600.0
ERROR_BLOCK_S = 60.0
FORGET_AFTER_S = 3600.0
MARKETS = 4096  # whose keys are cached: a service with every zone and machine type of three clouds has fewer


def is_spot(offer: Offer) -> bool:
    return offer.capacity_type is CapacityType.SPOT


def losses(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """Yield the held spot replicas that these events take away, each once.

    One that was announced is lost at the notice, and one with several nodes at the first node.
    """
    lost = set()
    for event in events:
        replica = replicas.get(event.replica_id)
        if replica is None or not is_spot(replica.offer) or replica.preempt_at is not None:
            continue
        if isinstance(event, (PreemptionNotice, Preempted, NodeLost)) and replica.id not in lost:
            lost.add(replica.id)
            yield replica


def refusals(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """Yield the replicas for which a zone had no room."""
    for event in events:
        if isinstance(event, LaunchFailed) and event.kind is FailureKind.CAPACITY:
            replica = replicas.get(event.replica_id)
            if replica is not None:
                yield replica


def is_early_loss(event: Event, replica: Replica) -> bool:
    """Return whether the event takes away, for a reason that is not known, an instance that was never of use."""
    if replica.ready_at is not None or replica.preempt_at is not None or replica.end_reason is not None:
        return False
    lost_node = isinstance(event, NodeLost) and not is_spot(replica.offer)
    return lost_node or (isinstance(event, Preempted) and event.lost)


def arrivals(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """Yield the replicas that have become ready for the first time."""
    for event in events:
        replica = replicas.get(event.replica_id)
        if isinstance(event, ProbePassed) and replica is not None and replica.state is ReplicaState.STARTING:
            yield replica


def learn(
    blocks: Json,
    events: Sequence[Event],
    replicas: Mapping[int, Replica],
    now: float,
    *,
    longest_s: float = LONGEST_BLOCK_S,
) -> dict[str, dict[str, float]]:
    """Return the blocks after these events; those long over are forgotten.

    Several refusals and losses of one moment in one zone are one piece of news. `longest_s` 0: zones are never blocked for
    lack of capacity.
    """
    after: dict[str, dict[str, float]] = {
        key: block for key, block in blocks.items() if block["until"] + FORGET_AFTER_S > now
    }
    for replica in arrivals(events, replicas):
        for key in (_key(replica.offer), *_refusal_keys(replica.offer)):
            after.pop(key, None)
    held_by = ((event, replicas.get(event.replica_id)) for event in events)
    early = (replica for event, replica in held_by if replica and is_early_loss(event, replica))
    gone = (*losses(events, replicas), *early)
    news = {_key(r.offer) for r in (*refusals(events, replicas), *gone)}
    if longest_s > 0:
        for key in sorted(news):
            failures = int(after[key]["failures"]) + 1 if key in after else 1
            after[key] = {"until": now + _wait_s(failures, longest_s), "failures": failures}
    for event in events:
        held = replicas.get(event.replica_id)
        if held is None:
            continue
        match event:
            case LaunchFailed(kind=FailureKind.QUOTA, retry_at=retry_at, scope=scope):
                until = now + QUOTA_BLOCK_S if retry_at is None else retry_at
                after.pop(_region_key(held.offer), None)  # that was a refusal
                after[_quota_key(held.offer, scope)] = {"until": until, "failures": 1}
            case LaunchFailed(kind=FailureKind.AUTH, scope=scope):
                key = _denied_key(held.offer, scope)
                after[key] = _again(after.get(key), now, FIRST_AUTH_BLOCK_S, LONGEST_AUTH_BLOCK_S)
            case LaunchFailed(kind=FailureKind.REFUSED, scope=scope):
                key = _refusal_key(held.offer, scope or Scope.OFFER)
                after[key] = _again(after.get(key), now, FIRST_REFUSED_BLOCK_S, LONGEST_REFUSED_BLOCK_S)
            case Launched():
                after.pop(_cloud_key(held.offer), None)
                after.pop(_denied_key(held.offer, Scope.REGION), None)
            case GaveUp(reason=EndReason.CLOUD_ERROR):
                key = _region_key(held.offer)
                until = max(now + ERROR_BLOCK_S, after.get(key, {"until": now})["until"])
                after[key] = {"until": until, "failures": 1}
            case _:
                pass
    return after


def _wait_s(failures: int, longest_s: float) -> float:
    """Return how long a zone is left alone after `failures` refusals in a row."""
    return delay_s(failures, FIRST_BLOCK_S, longest_s)


def _again(block: dict[str, float] | None, now: float, first_s: float, longest_s: float) -> dict[str, float]:
    """Return the block after one more denial or refusal. Several of one moment are one."""
    if block is not None and block["until"] > now:
        return block
    failures = 1 if block is None else int(block["failures"]) + 1
    wait_s = delay_s(failures, first_s, longest_s)
    return {"until": now + wait_s, "failures": failures}


def open_offers(offers: Sequence[Offer], blocks: Json, now: float) -> list[Offer]:
    """Return the offers that nothing speaks against asking for, in their order."""
    return [offer for offer in offers if not any(until > now for until in _until(offer, blocks))]


def next_opening(offers: Sequence[Offer], blocks: Json, now: float) -> float | None:
    """Return when the first blocked offer may be requested again; None if none is blocked."""
    waits = [max(until) for offer in offers if (until := [u for u in _until(offer, blocks) if u > now])]
    return min(waits, default=None)


def all_refused(offers: Sequence[Offer], blocks: Json) -> bool:
    """Return whether every one of them refused at the last try, be it open again by now."""
    return all(_until(offer, blocks) for offer in offers)


def all_rejected(offers: Sequence[Offer], blocks: Json) -> bool:
    """Return whether there are offers, and every one was refused for a reason that waiting does not cure."""
    return bool(offers and blocks) and all(
        any(key in blocks for key in _refusal_keys(offer)) for offer in offers
    )


def without_refusals(blocks: Json) -> dict[str, dict[str, float]]:
    """Return the blocks for other reasons. What one version was refused for, the next may not be."""
    return {key: block for key, block in blocks.items() if "|=" not in key}


class LastShortage(NamedTuple):
    """The last time that a zone had no room, and how often that was since a replica there was last ready."""

    at: float
    times: int


def refusal(offer: Offer, blocks: Json) -> LastShortage | None:
    """Return the zone's last lack of room for such a machine; None if it had none."""
    block = blocks.get(_key(offer))
    if block is None:
        return None
    times = int(block["failures"])
    return LastShortage(block["until"] - _wait_s(times, LONGEST_BLOCK_S), times)


def barred(offer: Offer, blocks: Json, now: float) -> bool:
    """Return whether something other than a lack of room speaks against asking: quota, permission, refusals, errors."""
    return any(blocks[key]["until"] > now for key in _bars(offer) if key in blocks)


def market(offer: Offer) -> str:
    """Return a market: a kind of machine in a zone. Sorts as the zone does."""
    machine = kind(offer)
    return f"{offer.zone} {machine}" if machine else str(offer.zone)


def _until(offer: Offer, blocks: Json) -> list[float]:
    if not blocks:
        return []
    return [blocks[key]["until"] for key in _keys(offer) if key in blocks]


def _keys(offer: Offer) -> tuple[str, ...]:
    """Return all keys under which a block of the offer can stand, each once: its own first."""
    return _keys_of(*_parts(offer))


def _bars(offer: Offer) -> tuple[str, ...]:
    """Return the keys under which something other than a lack of room can stand."""
    return _bars_of(*_parts(offer))


def _parts(offer: Offer) -> tuple[Zone, CapacityType, str | None, float, str]:
    """Return what the keys depend on. Prices are no part of it: they change, and the keys are cached."""
    kind = offer.accelerator, offer.accelerator_count, offer.instance_type
    return offer.zone, offer.capacity_type, *kind


@lru_cache(maxsize=MARKETS)
def _keys_of(
    zone: Zone, capacity_type: CapacityType, accelerator: str | None, count: float, instance_type: str
) -> tuple[str, ...]:
    offer = Offer(zone, instance_type, accelerator, count, capacity_type, 0.0)
    return tuple(dict.fromkeys((_key(offer), *_bars(offer))))


@lru_cache(maxsize=MARKETS)
def _bars_of(
    zone: Zone, capacity_type: CapacityType, accelerator: str | None, count: float, instance_type: str
) -> tuple[str, ...]:
    offer = Offer(zone, instance_type, accelerator, count, capacity_type, 0.0)
    return (
        _quota_key(offer),
        _quota_key(offer, Scope.CLOUD),
        _region_key(offer),
        _denied_key(offer, Scope.REGION),
        _cloud_key(offer),
        *_refusal_keys(offer),
    )


def kind(offer: Offer) -> str:
    """Return the kind of machine, as in ``L4:1``; nothing where no accelerator is asked for."""
    return f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else ""


def _key(offer: Offer) -> str:
    return "|".join(filter(None, (str(offer.zone), offer.capacity_type.value, kind(offer))))


def _quota_key(offer: Offer, scope: Scope | None = None) -> str:
    market = offer.capacity_type.value
    place = f"{offer.zone.cloud}/*/*|{market}" if scope is Scope.CLOUD else _region_key(offer)
    if offer.zone.reservation:  # reservations count to no quota again
        place = f"{offer.zone}|{market}"
    return "|".join(filter(None, (place, offer.accelerator)))


def _denied_key(offer: Offer, scope: Scope | None) -> str:
    """Of a missing permission: only credentials are the whole cloud's."""
    return _cloud_key(offer) if scope in (None, Scope.CLOUD) else f"{offer.zone.cloud}/{offer.zone.region}/*"


def _refusal_keys(offer: Offer) -> tuple[str, ...]:
    return tuple(_refusal_key(offer, scope) for scope in Scope)


def _refusal_key(offer: Offer, scope: Scope) -> str:
    zone, kind = offer.zone, offer.instance_type
    match scope:
        case Scope.OFFER:
            return f"{zone}|{offer.capacity_type.value}|={kind}"
        case Scope.TYPE:
            return f"{zone.cloud}/{zone.region}/*|={kind}"
        case Scope.ZONE:
            return f"{zone}|="
        case Scope.REGION:
            return f"{zone.cloud}/{zone.region}/*|="
        case Scope.CLOUD:
            return f"{zone.cloud}/*/*|="


def _region_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/{offer.zone.region}/*|{offer.capacity_type.value}"


def _cloud_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/*/*"
