"""What a cloud has with our tag on it that belongs to nothing we know. Pure.

Everything we make carries the owner's tag from its first moment, and but for what all machines share the token of the
replica that it is for. Rows are committed before any call to a cloud. So there is one order in which nothing is
ever accused wrongly: *list the cloud first, read the rows second*. What has been listed had its row before, and if the
row has terminated since, the thing is no longer needed.

    instance   its token is not known: no live or requested replica has it
    leftover   belongs to no machine, and its token is not known; without a token, it is not young
    shared     no machine runs and no service could want one: all of it, or nothing
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from provisioners.port.base import Instance
from provisioners.port.vm import Machine, OrphanedResource, token_of_replica

YOUNG_S = 300.0  # what was made since may be part of a launch that is under way
HOURS_PER_MONTH = 730.0


class Part(str, Enum):
    """What kind of thing, by how it is removed."""

    INSTANCE = "instance"
    LEFTOVER = "leftover"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class KnownInstances:
    """What belongs to a service.

    The tokens of all replicas that are up or being launched, and the clouds that have any, or may get one at any moment.
    """

    tokens: frozenset[str]
    clouds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something that belongs to nothing we know. `kind` is the cloud's word for it, `created_at` in UNIX seconds."""

    cloud: str
    part: Part
    kind: str
    id: str
    region: str
    service: str = ""
    created_at: float | None = None
    usd_month: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.cloud, self.kind, self.id, self.region

    def __str__(self) -> str:
        return f"{self.kind} {self.id} in {self.cloud}/{self.region}"

    def view(self) -> dict[str, Any]:
        return asdict(self) | {"part": self.part.value}


def stray_machines(machines: Iterable[Machine], known: KnownInstances) -> Iterator[Machine]:
    return (
        one for one in machines if not one.state.is_gone and token_of_replica(one.token) not in known.tokens
    )


def stray_instances(instances: Iterable[Instance], known: KnownInstances) -> Iterator[Instance]:
    return (one for one in instances if not one.state.is_gone and one.token not in known.tokens)


def stray_leftovers(
    leftovers: Iterable[OrphanedResource], known: KnownInstances, now: float
) -> Iterator[OrphanedResource]:
    for one in leftovers:
        if one.token:
            if token_of_replica(one.token) not in known.tokens:
                yield one
        elif one.created_at is None or one.created_at < now - YOUNG_S:
            yield one


def of_machine(machine: Machine, usd_hour: float | None) -> Orphan:
    return Orphan(
        machine.zone.cloud,
        Part.INSTANCE,
        "instance",
        machine.id,
        machine.zone.region,
        machine.service,
        machine.launched_at,
        None if usd_hour is None else usd_hour * HOURS_PER_MONTH,
    )


def of_instance(instance: Instance) -> Orphan:
    zone = instance.zone
    return Orphan(zone.cloud, Part.INSTANCE, "instance", instance.id, zone.region, instance.service)


def of_leftover(cloud: str, part: Part, leftover: OrphanedResource) -> Orphan:
    return Orphan(
        cloud,
        part,
        leftover.kind,
        leftover.id,
        leftover.region,
        created_at=leftover.created_at,
        usd_month=leftover.usd_month,
    )
