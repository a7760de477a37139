"""What a reconciler is made of, in groups: the ports of replicas and of load balancers, what may be spent, and what is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.brake import Evidence
from policies.goals import Quota
from provisioners.offers.egress import egress_usd_per_gb
from skyserve_cli.controller.reconcile.ports import (
    BalancerFleet,
    Firewalls,
    InstancePoller,
    Names,
    NoDns,
    NoFirewalls,
    NoRegions,
    Offers,
    OperationRunner,
    Prober,
    Regional,
)
from skyserve_cli.controller.reconcile.region_tables import Egress

if TYPE_CHECKING:
    from skyserve_cli.controller.reconcile.adoption import Adoption


@dataclass(frozen=True, slots=True)
class ReplicaPorts:
    """What launches, terminates and observes replicas.

    The `enabled` clouds are polled even when no replica is there, so that orphans of an earlier life are found.
    """

    enabled: frozenset[str]
    offers: Offers
    runner: OperationRunner
    instance_poller: InstancePoller
    prober: Prober
    firewalls: Firewalls = field(default_factory=NoFirewalls)


@dataclass(frozen=True, slots=True)
class BalancerPorts:
    """What runs load balancers: on this host, where they listen on `host`, and in regions, with their names.

    `targets_ca` is the certificate by which they know replicas, `egress` the price of a GB from one zone to another.
    """

    fleet: BalancerFleet
    host: str
    regional: Regional = field(default_factory=NoRegions)
    names: Names = field(default_factory=NoDns)
    targets_ca: str = ""
    egress: Egress = egress_usd_per_gb


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent: `max_usd_hour` by all services together, and by team its quota. `stopwatch` measures the seconds of turns."""

    max_usd_hour: float | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    stopwatch: Callable[[], float] = lambda: 0.0


def _no_doubt(service: str) -> Evidence:
    return Evidence()


@dataclass(frozen=True, slots=True)
class Doubts:
    """What must be clear before something is decided: which failed probes count, and which machines a restored backup lacks."""

    evidence: Callable[[str], Evidence] = _no_doubt
    adoption: Adoption | None = None


NO_LIMITS = Budget()
NO_DOUBTS = Doubts()
