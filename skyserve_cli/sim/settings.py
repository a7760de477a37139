"""What a simulation runs: the policies by name, one job, and what all jobs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.served import Traffic
from skyserve_cli.sim.trace import Trace
from skyserve_cli.spec.model import ServiceSpec

#: Names for `--policy`.
POLICIES: Mapping[str, str] = {
    "spothedge": "spot where it lasts, N extra, on-demand while spot is missing (SkyServe §3, fixed refill rule)",
    "spothedge_literal": "the same with Algorithm 1 as printed, which livelocks where one zone of three is usable",
    "risk_hedge": "spot, zones and on-demand chosen for an availability target from what was seen of each zone",
    "spread": "spot only, spread over the zones that have room (what a file without a placer gets)",
    "even_spread": "a fixed share of spot replicas in every zone",
    "round_robin": "every attempt in the next zone",
    "single_zone": "all spot replicas in one zone, the best in hindsight",
    "single_region": "a spot pool over the zones of one region, the best in hindsight",
    "asg": "single_region with 10 % on-demand, like an AWS Auto Scaling group",
    "on_demand": "on-demand only",
    "omniscient": "the cheapest plan with knowledge of the future (SkyServe equations 1-5)",
}

#: Policies that take `num_overprovision`.
OVERPROVISIONING = frozenset(POLICIES) - {"risk_hedge", "on_demand", "omniscient"}


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `overprovision` None is 0 or not applicable; `availability_target` None is the policy's default."""

    policy: str
    overprovision: int | None = None
    availability_target: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share.

    `price_ratio` None takes the on-demand prices of the trace. `spec` gives scaling and nodes; where it follows the load,
    `n_target` is only what availability is measured by before the first tick. `notice_s`: preemptions are announced this
    long before the recorded loss. `traffic` (None: not judged) says which requests are in time; its arrivals take the place of
    `arrivals` where the service has an SLO. `beside_usd_hour` is what the disk and the address of a machine cost, None where that is
    not known. `whole`: with the controller's store and orders, to the same result.
    """

    trace: Trace
    n_target: int
    cold_start_s: float
    price_ratio: float | None = 3.0
    arrivals: Arrivals | None = None
    spec: ServiceSpec | None = None
    notice_s: float = 0.0
    traffic: Traffic | None = None
    beside_usd_hour: float | None = None
    whole: bool = False
