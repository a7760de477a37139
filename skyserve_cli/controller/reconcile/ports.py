"""What the reconciler needs of the world: five small ports. The daemon and the simulator fill them differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, Protocol

from lb.config.demand import Demand
from lb.config.schema import Table, Target
from lb.config.workers import AUTO
from policies.history import Load
from policies.model import Event, Offer, Replica
from policies.regions.ownership import NO_DISTANCES, Distances
from provisioners.port.base import Instance, InstanceState, Requirements, is_silent
from provisioners.port.dns import Endpoint
from skyserve_cli.spec.model import Probe, ServiceSpec


class OperationKind(str, Enum):
    """The calls that change a cloud."""

    LAUNCH = "launch"
    ATTEND = "attend"  # the launch once more, for an instance that no operation starts or watches any longer
    TERMINATE = "terminate"


class CloudOperation(NamedTuple):
    """One cloud call that is outstanding for a replica, with everything needed to build its order."""

    service: str
    incarnation: str
    kind: OperationKind
    replica: Replica
    team: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return self.service, self.replica.id


class OperationRunner(Protocol):
    """Makes cloud calls.

    At most one is in flight per replica: without this rule a machine leaks when a terminate overtakes its launch.
    """

    def ensure(self, calls: Sequence[CloudOperation]) -> None:
        """These calls are outstanding: start those not under way.

        Level-triggered, called every tick; a call that is under way, or waits for its retry, is left alone.
        """
        ...

    def drain(self) -> Sequence[tuple[str, Event]]:
        """Return the results since the last time, as (service, event)."""
        ...

    def abandon(self, orphan: Instance) -> None:
        """Terminate an instance that has no row."""
        ...


@dataclass(frozen=True)
class InstanceListing:
    """One listing of one cloud.

    It shows at least everything launched before `asked_at`, except in the `silent` regions or
    zones, which did not respond. `closed` regions do not let us in. Or, where `is_listing` is false, what machines have
    reported since the last one: a missing instance then means nothing.
    """

    cloud: str
    asked_at: float
    instances: tuple[Instance, ...]
    is_listing: bool = True
    silent: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()

    def shows(self, replica: Replica) -> bool:
        """Return whether the instance of the replica would be listed here if it existed."""
        is_here = self.is_listing and replica.zone.cloud == self.cloud
        return is_here and not is_silent(replica.zone, self.silent)

    @cached_property
    def by_id(self) -> Mapping[str, Instance]:
        return {instance.id: instance for instance in self.instances}

    @cached_property
    def unattended(self) -> frozenset[str]:
        """The ids of instances whose order is to be sent again."""
        return frozenset(one.id for one in self.instances if one.state is InstanceState.UNSUPERVISED)


class InstancePoller(Protocol):
    """Looks at the clouds' truth."""

    def watch(self, clouds: frozenset[str]) -> None:
        """List these clouds over and over."""
        ...

    def drain(self) -> Sequence[InstanceListing]: ...

    def trouble(self) -> Mapping[str, str]:
        """Return why clouds, or regions and zones of them (cloud/region), cannot be listed now: a sentence each."""
        ...


class ProbeOrder(NamedTuple):
    """One replica to be probed.

    `passing` is what the last probe the reconciler knows of said; None: none yet. With `counts_served` a response to a
    client counts as a probe that passed (see `served`).
    """

    service: str
    replica_id: int
    endpoint: str
    probe: Probe
    passing: bool | None
    counts_served: bool = False
    tls_name: str = ""


class Prober(Protocol):
    """Runs readiness probes."""

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        """Probe exactly these, each at its own interval."""
        ...

    def drain(self) -> Sequence[tuple[str, Event]]:
        """ProbePassed and ProbeFailed events, where they differ from `passing`."""
        ...


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """The load balancer a service should have. Its load is requested over the last `window_s`.

    With `counts_demand` the controller reads its minutes, too.
    """

    service: str
    host: str
    port: int
    table: Table
    tls: tuple[str, str] | None = None  # certificate file, key file
    window_s: float = 60.0
    counts_demand: bool = False
    workers: int = AUTO


@dataclass(frozen=True, slots=True)
class RegionalOrder:
    """The load balancer agent that should serve on a machine of its own.

    `instance` is as much of the machine as it takes to log in, `port` where the agent listens. `passing` is what the
    reconciler knows of it; None: it never responded. With a `peers_port` it speaks to agents of other regions, and
    `elsewhere` are targets that these own, by region (see `region_tables`).
    """

    service: str
    replica_id: int
    instance: Instance
    port: int
    table: Table
    tls: tuple[str, str] | None = None
    window_s: float = 60.0
    passing: bool | None = None
    counts_demand: bool = False
    peers_port: int | None = None
    elsewhere: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)
    workers: int = AUTO

    @property
    def key(self) -> tuple[str, int]:
        return self.service, self.replica_id


class Regional(Protocol):
    """Keeps the agents on machines of their own up to date, code and tables. Their machines are the reconciler's."""

    def ensure(self, orders: Sequence[RegionalOrder]) -> None:
        """Exactly these. Returns at once."""
        ...

    def drain(self) -> Sequence[tuple[str, Event]]:
        """ProbePassed and ProbeFailed events, where they differ from `passing`."""
        ...

    def loads(self, service: str) -> Sequence[Load]:
        """Return the demand that each of its agents last reported."""
        ...

    def demands(self, service: str) -> Sequence[Demand | None]:
        """Return the minutes that each of its agents has reported; None: one has not."""
        ...

    def distances(self, service: str) -> Distances:
        """Return what its agents have measured."""
        ...


class NoRegions:
    """A `Regional` without any agent."""

    def ensure(self, orders: Sequence[RegionalOrder]) -> None:
        pass

    def drain(self) -> Sequence[tuple[str, Event]]:
        return ()

    def loads(self, service: str) -> Sequence[Load]:
        return ()

    def demands(self, service: str) -> Sequence[Demand | None]:
        return ()

    def distances(self, service: str) -> Distances:
        return NO_DISTANCES


@dataclass(frozen=True, slots=True)
class NameOrder:
    """The name that a service should have in a hosted zone, and the agents that it means: (cloud, region, endpoint)."""

    service: str
    zone: str
    name: str
    agents: tuple[tuple[str, str, Endpoint], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.service, self.name


class Names(Protocol):
    """Publishes names."""

    def ensure(self, orders: Sequence[NameOrder]) -> None:
        """These names should mean this. Returns at once."""
        ...

    def is_settled(self, order: NameOrder) -> bool:
        """Return whether it is so, as far as it can be."""
        ...


class Firewalls(Protocol):
    """Sets the firewalls of rented machines."""

    def ensure(self, balancers: Mapping[str, frozenset[str]]) -> None:
        """By service, the addresses of load balancers that may open its replicas' ports. Returns at once."""
        ...


class NoFirewalls:
    """The `Firewalls` of a world without firewalls."""

    def ensure(self, balancers: Mapping[str, frozenset[str]]) -> None:
        pass


class NoDns:
    """The `Names` of a world without any."""

    def ensure(self, orders: Sequence[NameOrder]) -> None:
        pass

    def is_settled(self, order: NameOrder) -> bool:
        return True


class BalancerFleet(Protocol):
    """Keeps a load balancer agent alive per service and its table up to date."""

    def ensure(self, orders: Mapping[str, AgentOrder | None]) -> None:
        """Exactly these agents should run, with these tables; None: as it is, the wanted state is unknown now.

        Returns at once.
        """
        ...

    def load(self, service: str) -> Load:
        """Return the demand last reported."""
        ...

    def demand(self, service: str) -> Demand | None:
        """Return the minutes that its agent has reported; None: it has not."""
        ...


class Offers(Protocol):
    """Prices and places."""

    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        """Return the offers of all enabled clouds, best first; None while they are not known yet. Never blocks."""
        ...


class Specs(Protocol):
    """The specs of stored versions."""

    def get(self, service: str, version: int) -> ServiceSpec: ...

    def trouble(self, service: str, version: int) -> str:
        """Return why the stored spec cannot be read; "": it can. `get` returns a stand-in for it."""
        ...

    def probe(self, service: str, version: int) -> Probe:
        """Return the version's readiness probe with its secrets filled in."""
        ...
