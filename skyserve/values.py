"""What the API returns: frozen snapshots. Instants are UNIX seconds, money is US dollars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a service; `state` and `end_reason` are those of docs/status.md."""

    id: int
    version: int
    state: str
    cloud: str
    region: str
    zone: str
    capacity_type: str
    instance_type: str
    accelerator: str | None
    usd_per_hour: float
    endpoint: str | None
    end_reason: str | None
    json: Json

    @classmethod
    def of(cls, json: Json) -> Replica:
        return cls(
            id=json["id"],
            version=json["version"],
            state=json["state"],
            cloud=json["cloud"],
            region=json["region"],
            zone=json["zone"],
            capacity_type=json["capacity_type"],
            instance_type=json["instance_type"],
            accelerator=json["accelerator"],
            usd_per_hour=json["price_usd_hour"],
            endpoint=json["endpoint"],
            end_reason=json["end_reason"],
            json=json,
        )


@dataclass(frozen=True, slots=True)
class Service:
    """A service: `ready` of its `target` replicas serve at `endpoint`."""

    name: str
    status: str
    version: int
    endpoint: str
    ready: int
    target: int
    usd_per_hour: float
    usd_total: float
    replicas: tuple[Replica, ...]
    json: Json

    @classmethod
    def of(cls, json: Json) -> Service:
        return cls(
            name=json["name"],
            status=json["status"],
            version=json["version"],
            endpoint=json["endpoint"],
            ready=json["ready"],
            target=json["target"],
            usd_per_hour=json["cost"]["usd_per_hour"],
            usd_total=json["cost"]["usd_total"],
            replicas=tuple(Replica.of(one) for one in json["replicas"]),
            json=json,
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """A replica that a plan would launch, and why there.

    `stands_in`: it is on demand and runs until the others are ready.
    """

    replica_id: int
    cloud: str
    region: str
    zone: str
    capacity_type: str
    instance_type: str
    accelerator: str | None
    usd_per_hour: float
    why: str
    stands_in: bool

    @classmethod
    def of(cls, json: Json) -> Launch:
        return cls(
            replica_id=json["replica_id"],
            cloud=json["cloud"],
            region=json["region"],
            zone=json["zone"],
            capacity_type=json["capacity_type"],
            instance_type=json["instance_type"],
            accelerator=json["accelerator"],
            usd_per_hour=json["price_usd_hour"],
            why=json["why"],
            stands_in=json["stands_in"],
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What bringing a service up would launch first.

    `usd_per_hour` is what the replicas cost once all are ready, `usd_per_hour_at_first` what they cost until then.
    """

    name: str
    launches: tuple[Launch, ...]
    usd_per_hour: float
    usd_per_hour_at_first: float
    json: Json

    @classmethod
    def of(cls, json: Json) -> Plan:
        launches = tuple(Launch.of(one) for one in json["launches"])
        for_now = sum(launch.usd_per_hour for launch in launches if launch.stands_in)
        return cls(
            name=json["name"],
            launches=launches,
            usd_per_hour=json["usd_per_hour"] - for_now,
            usd_per_hour_at_first=json["usd_per_hour"],
            json=json,
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the history. `seq` increases; `replica_id` None: about the service."""

    seq: int
    at: float
    service: str
    replica_id: int | None
    kind: str
    state: str | None
    message: str

    @classmethod
    def of(cls, json: Json) -> Event:
        return cls(
            seq=json["seq"],
            at=json["at"],
            service=json["service"],
            replica_id=json["replica_id"],
            kind=json["kind"],
            state=json["state"],
            message=json["message"],
        )
