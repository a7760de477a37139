"""What the store takes and gives, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.goals import UpdateMode
from policies.model import Memory, Replica

#: Prefix of the kind of an event about a load balancer agent.
AGENT_WORD = "Agent"


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """One service as stored.

    It has the live replicas, the live load balancer agents on machines of their own, and the memory of the policies. `team`
    "": none. `trouble` says what of it cannot be read; "": nothing.
    """

    name: str
    incarnation: str
    created_at: float
    version: int
    same_replicas: frozenset[int]
    update_mode: UpdateMode
    down: bool
    purge: bool
    wanted: int
    target: int
    notes: str
    memory: Memory
    lb_port: int
    killed: frozenset[int]
    replicas: tuple[Replica, ...]
    balancers: tuple[Replica, ...] = ()
    team: str = ""
    trouble: str = ""

    @property
    def attempts(self) -> tuple[Replica, ...]:
        """All that has, or may have, an instance."""
        return (*self.replicas, *self.balancers)


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version of a service: its spec as JSON and its sealed secrets."""

    service: str
    version: int
    replica_hash: str
    spec: Mapping[str, Any]
    sealed_secrets: bytes


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One line of the event log.

    `replica_id` None: about the service. `state`: the state from now on, the state of the replica or (kind "scale") how
    many replicas the service wants. `author`: who set the goal (kind "goal").
    """

    kind: str
    message: str
    replica_id: int | None = None
    state: str | None = None
    author: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """What one tick writes of one service. `memory`, `wanted` None: unchanged."""

    name: str
    now: float
    changed: Sequence[Replica]
    memory: Memory | None
    target: int
    notes: str
    records: Sequence[EventRecord]
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    seq: int
    at: float
    service: str
    record: EventRecord


class StateChange(NamedTuple):
    """From `at` on the replica is in this state, or (`replica_id` None) the service wants `state` replicas."""

    at: float
    replica_id: int | None
    state: str


@dataclass(frozen=True, slots=True)
class ServiceHistory:
    """The stored past of a service since `since`.

    Its replicas that lived then or later, by id, and everything that became of them, in order. From `complete_from` on
    nothing is missing.
    """

    since: float
    complete_from: float
    replicas: tuple[Replica, ...]
    changes: tuple[StateChange, ...]


class DemandRow(NamedTuple):
    """What a service was asked for in `minute` (counted since 1970), and what became of it; of ten minutes: their means.

    Tokens and `late` are of requests that finished in the minute. `ready` are the replicas that were.
    """

    minute: int
    requests: float
    prompt_tokens: float
    response_tokens: float
    late: float
    ready: float


@dataclass(frozen=True, slots=True)
class Spent:
    """US dollars since the service's first `up`; the second figure is the same fleet all on demand."""

    usd: float
    usd_on_demand: float


class NotKeptError(Exception):
    """The database gives something else back than it was given; the text is the key. Nothing was stored."""


class ServiceExistsError(Exception):
    """A service of that name is up."""


class StillGoingDownError(ServiceExistsError):
    """A service of that name is on its way down."""


class NoSuchServiceError(Exception):
    """No service of that name is known."""
