"""Where not to ask for a while: the memory of refusals that every placer shares.

A capacity error or a preemption (its notice, where there is one) blocks the zone, for that capacity type and that
kind of machine (accelerator and count), for 10 s, doubling with every further one up to 5 min, until a replica launched
there becomes ready: a zone without room for an L4 may have an A100. A quota error blocks the region for that capacity
type and accelerator until `retry_at` (default 5 min), and a region whose answers were errors to the last try is left alone
for a minute. A permission error blocks the cloud for 15 s, doubling up to 15 min until a launch there is accepted:
somebody may be mending it right now, or not before Monday. A launch known to fail helps nobody.

Blocks are {"cloud/region/zone|capacity type|accelerator:count": {"until": s, "failures": n}}, with "*" for zone or
region; what is missing at the end stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
)

FIRST_BLOCK_S = 10.0
LONGEST_BLOCK_S = 300.0
QUOTA_BLOCK_S = 300.0
FIRST_AUTH_BLOCK_S = 15.0
LONGEST_AUTH_BLOCK_S = 900.0
ERROR_BLOCK_S = 60.0
FORGET_AFTER_S = 3600.0

_DOUBLINGS = 10  # more would only make large numbers


def is_spot(offer: Offer) -> bool:
    return offer.capacity_type is CapacityType.SPOT


def losses(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """The held spot replicas that these events take away, each once: one that was announced is lost at the
    notice, and one with several nodes at the first node."""
    lost = set()
    for event in events:
        replica = replicas.get(event.replica_id)
        if replica is None or not is_spot(replica.offer) or replica.preempt_at is not None:
            continue
        if isinstance(event, (PreemptionNotice, Preempted, NodeLost)) and replica.id not in lost:
            lost.add(replica.id)
            yield replica


def refusals(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """The replicas for which a zone had no room."""
    for event in events:
        if isinstance(event, LaunchFailed) and event.kind is FailureKind.CAPACITY:
            replica = replicas.get(event.replica_id)
            if replica is not None:
                yield replica


def arrivals(events: Sequence[Event], replicas: Mapping[int, Replica]) -> Iterator[Replica]:
    """The replicas that have become ready for the first time."""
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
    """The blocks after these events; those long over are forgotten. Several refusals and losses of one moment in
    one zone are one piece of news. `longest_s` 0: zones are never blocked for lack of capacity."""
    after: dict[str, dict[str, float]] = {
        key: block for key, block in blocks.items() if block["until"] + FORGET_AFTER_S > now
    }
    for replica in arrivals(events, replicas):
        after.pop(_key(replica.offer), None)
    news = {_key(r.offer) for r in (*refusals(events, replicas), *losses(events, replicas))}
    if longest_s > 0:
        for key in sorted(news):
            failures = int(after[key]["failures"]) + 1 if key in after else 1
            after[key] = {"until": now + _wait_s(failures, longest_s), "failures": failures}
    for event in events:
        held = replicas.get(event.replica_id)
        if held is None:
            continue
        match event:
            case LaunchFailed(kind=FailureKind.QUOTA, retry_at=retry_at):
                until = now + QUOTA_BLOCK_S if retry_at is None else retry_at
                after.pop(_region_key(held.offer), None)  # that was an answer
                after[_quota_key(held.offer)] = {"until": until, "failures": 1}
            case LaunchFailed(kind=FailureKind.AUTH):
                key = _cloud_key(held.offer)
                after[key] = _denied_again(after.get(key), now)
            case Launched():
                after.pop(_cloud_key(held.offer), None)
            case GaveUp(reason=EndReason.CLOUD_ERROR):
                key = _region_key(held.offer)
                until = max(now + ERROR_BLOCK_S, after.get(key, {"until": now})["until"])
                after[key] = {"until": until, "failures": 1}
            case _:
                pass
    return after


def _wait_s(failures: int, longest_s: float) -> float:
    """How long a zone is left alone after so many refusals."""
    return float(min(longest_s, FIRST_BLOCK_S * 2 ** min(failures - 1, _DOUBLINGS)))


def _denied_again(block: dict[str, float] | None, now: float) -> dict[str, float]:
    """A block of a cloud. Several refusals of one moment are one."""
    if block is not None and block["until"] > now:
        return block
    failures = 1 if block is None else int(block["failures"]) + 1
    wait_s = min(LONGEST_AUTH_BLOCK_S, FIRST_AUTH_BLOCK_S * 2 ** min(failures - 1, _DOUBLINGS))
    return {"until": now + wait_s, "failures": failures}


def open_offers(offers: Sequence[Offer], blocks: Json, now: float) -> list[Offer]:
    """The offers that nothing speaks against asking for, in their order."""
    return [offer for offer in offers if not any(until > now for until in _until(offer, blocks))]


def next_opening(offers: Sequence[Offer], blocks: Json, now: float) -> float | None:
    """When the first blocked offer may be asked for again; None if none is blocked."""
    waits = [max(until) for offer in offers if (until := [u for u in _until(offer, blocks) if u > now])]
    return min(waits, default=None)


def all_refused(offers: Sequence[Offer], blocks: Json) -> bool:
    """Whether every one of them refused when last asked, be it open again by now."""
    return all(_until(offer, blocks) for offer in offers)


class Refusal(NamedTuple):
    """The last time that a zone had no room, and how often that was since a replica there was last ready."""

    at: float
    times: int


def refusal(offer: Offer, blocks: Json) -> Refusal | None:
    """What is known of the zone's last lack of room for such a machine; None if it had none."""
    block = blocks.get(_key(offer))
    if block is None:
        return None
    times = int(block["failures"])
    return Refusal(block["until"] - _wait_s(times, LONGEST_BLOCK_S), times)


def barred(offer: Offer, blocks: Json, now: float) -> bool:
    """Whether something other than a lack of room speaks against asking: quota, permission, errors."""
    keys = _quota_key(offer), _region_key(offer), _cloud_key(offer)
    return any(blocks[key]["until"] > now for key in keys if key in blocks)


def market(offer: Offer) -> str:
    """What is in demand, and taken away, as one: a kind of machine in a zone. Sorts as the zone does."""
    kind = _kind(offer)
    return f"{offer.zone} {kind}" if kind else str(offer.zone)


def _until(offer: Offer, blocks: Json) -> list[float]:
    if not blocks:
        return []
    keys = _key(offer), _quota_key(offer), _region_key(offer), _cloud_key(offer)
    return [blocks[key]["until"] for key in dict.fromkeys(keys) if key in blocks]


def _kind(offer: Offer) -> str:
    return f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else ""


def _key(offer: Offer) -> str:
    return "|".join(filter(None, (str(offer.zone), offer.capacity_type.value, _kind(offer))))


def _quota_key(offer: Offer) -> str:
    return "|".join(filter(None, (_region_key(offer), offer.accelerator)))


def _region_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/{offer.zone.region}/*|{offer.capacity_type.value}"


def _cloud_key(offer: Offer) -> str:
    return f"{offer.zone.cloud}/*/*"
