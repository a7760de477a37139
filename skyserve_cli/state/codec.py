"""Rows to values and back."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Role, Zone

#: UNIX time in 2001. Policies remember instants, and besides rates, counts, prices and versions far below it.
_FIRST_INSTANT = 1e9
_E = TypeVar("_E", bound=Enum)
_WORDS: dict[str, type[Enum]] = {
    "state": ReplicaState,
    "capacity_type": CapacityType,
    "end_reason": EndReason,
    "role": Role,
}


def replica_to_row(service: str, replica: Replica) -> dict[str, Any]:
    offer = replica.offer
    return {
        "service": service,
        "id": replica.id,
        "version": replica.version,
        "state": replica.state.value,
        "since": replica.since,
        "created_at": replica.created_at,
        "cloud": offer.zone.cloud,
        "region": offer.zone.region,
        "zone": offer.zone.label,
        "instance_type": offer.instance_type,
        "accelerator": offer.accelerator,
        "accelerator_count": offer.accelerator_count,
        "capacity_type": offer.capacity_type.value,
        "price_usd_hour": offer.price_usd_hour,
        "on_demand_usd_hour": offer.on_demand_usd_hour,
        "choice": offer.choice,
        "instance_id": replica.instance_id,
        "endpoint": replica.endpoint,
        "launched_at": replica.launched_at,
        "ready_at": replica.ready_at,
        "drain_by": replica.drain_by,
        "preempt_at": replica.preempt_at,
        "retire_at": replica.retire_at,
        "ended_at": replica.ended_at,
        "end_reason": None if replica.end_reason is None else replica.end_reason.value,
        "role": replica.role.value,
        "message": replica.message,
    }


def _zone(row: Any) -> Zone:
    name, _, reservation = row.zone.partition("+")
    return Zone(row.cloud, row.region, name, reservation)


def unread(row: Any) -> str:
    """Return a sentence if the row of a replica has a word that this program does not know, of a newer one; else "".

    `replica_from_row` takes what harms least for it: a machine that exists and is not ready.
    """
    for column, kind in _WORDS.items():
        word = getattr(row, column)
        if word is not None and _word(kind, word) is None:
            return f"{column} of replica {row.id} is {word!r}, which this version does not know"
    return ""


def _word(kind: type[_E], word: str) -> _E | None:
    try:
        return kind(word)
    except ValueError:
        return None


def replica_from_row(row: Any) -> Replica:
    offer = Offer(
        zone=_zone(row),
        instance_type=row.instance_type,
        accelerator=row.accelerator,
        accelerator_count=row.accelerator_count,
        capacity_type=_word(CapacityType, row.capacity_type) or CapacityType.ON_DEMAND,
        price_usd_hour=row.price_usd_hour,
        on_demand_usd_hour=row.on_demand_usd_hour,
        choice=row.choice,
    )
    return Replica(
        id=row.id,
        version=row.version,
        offer=offer,
        state=_word(ReplicaState, row.state) or ReplicaState.NOT_READY,
        since=row.since,
        created_at=row.created_at,
        instance_id=row.instance_id,
        endpoint=row.endpoint,
        launched_at=row.launched_at,
        ready_at=row.ready_at,
        drain_by=row.drain_by,
        preempt_at=row.preempt_at,
        retire_at=row.retire_at,
        ended_at=row.ended_at,
        end_reason=None if row.end_reason is None else _word(EndReason, row.end_reason),
        role=_word(Role, row.role) or Role.REPLICA,
        message=row.message,
    )


def memory_to_json(memory: Memory) -> dict[str, Any]:
    return {
        "placement": dict(memory.placement),
        "scaling": dict(memory.scaling),
        "rollout": dict(memory.rollout),
        "balancers": dict(memory.balancers),
    }


def memory_from_json(json: Any, next_replica_id: int) -> Memory:
    json = json if isinstance(json, dict) else {}
    return Memory(
        next_replica_id=next_replica_id,
        placement=json.get("placement", {}),
        scaling=json.get("scaling", {}),
        rollout=json.get("rollout", {}),
        balancers=json.get("balancers", {}),
    )


def moved_instants(memory: Any, by_s: float) -> Any:
    """Return the memory of policies with its instants moved. They are its only numbers of that size: see `_FIRST_INSTANT`."""
    match memory:
        case dict():
            return {key: moved_instants(value, by_s) for key, value in memory.items()}
        case list():
            return [moved_instants(value, by_s) for value in memory]
        case int() | float() if memory > _FIRST_INSTANT:
            return memory + by_s
        case _:
            return memory
