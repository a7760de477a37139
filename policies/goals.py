"""What the user requested, as far as policies need to know it: frozen values.

Units are in the names, as in `policies.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class AgentRegion(NamedTuple):
    """A region where load balancer agents are wanted."""

    cloud: str
    region: str

    def __str__(self) -> str:
        return f"{self.cloud}/{self.region}"


@dataclass(frozen=True, slots=True)
class AcceleratorQps:
    """How many requests per second one replica on this accelerator can serve. `count` None stands for any number of them."""

    accelerator: str
    count: float | None
    qps: float


@dataclass(frozen=True, slots=True)
class SloGoal:
    """The share of requests that are to be served within the SLO, and what one replica carries within it.

    `cold_start_s` is how long a replica takes from its launch until it is ready; with `learns_cold_start` only until the
    service's own replicas have shown it. `capacity_qps` None: it is learned (`forecast.capacity`). `response_weight` is
    what a token of a response weighs until that is learned (`forecast.work`). With `forecast` False only present demand
    counts, and what a forecast would want is only noted; with `computes_forecast` False it is not computed either.
    """

    attainment: float
    capacity_qps: float | None
    cold_start_s: float
    forecast: bool = True
    computes_forecast: bool = True
    learns_cold_start: bool = False
    response_weight: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingGoal:
    """How many replicas are wanted. Without any target the size is fixed at `min_replicas`.

    A replica should carry `target_qps_per_replica` requests per second; where that differs by accelerator,
    `target_qps_by_accelerator` has the numbers, and the plain number is the smallest of them. Or it should carry
    `target_ongoing_requests_per_replica` requests at a time. More (less) load must last `upscale_delay_s`
    (`downscale_delay_s`). Beside these, engines should have at most `target_queue_length` requests waiting per replica and use
    `target_kv_cache_usage` (0 to 1) of their KV caches (`scaling.engine_load`). With `slo` the size follows a forecast instead (`scaling.predictive`).
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_qps_per_replica: float | None = None
    upscale_delay_s: float = 300.0
    downscale_delay_s: float = 1200.0
    target_qps_by_accelerator: tuple[AcceleratorQps, ...] = ()
    target_ongoing_requests_per_replica: float | None = None
    slo: SloGoal | None = None
    target_queue_length: float | None = None
    target_kv_cache_usage: float | None = None

    @property
    def autoscaling(self) -> bool:
        return self.max_replicas > self.min_replicas


@dataclass(frozen=True, slots=True)
class PlacementGoal:
    """On which capacity replicas run, and where. `placer` is a name of `registry`.

    `num_overprovision` is SpotHedge's N_extra: spot replicas beyond the wanted number. With
    `dynamic_ondemand_fallback` on-demand replicas stand in for spot replicas that are missing;
    `base_ondemand_fallback_replicas` of the wanted replicas are on demand at all times. `availability_target` is
    the part of the time in which the wanted number should be ready (0.995), for policies that take a target. Where machines
    differ in speed, `work` has their rates, and prices are compared per request. On-demand replicas are spread over
    offers that cost at most the fraction `price_band` more than the cheapest, spot replicas over those that cost at most
    `spot_price_cap` times as much as the cheapest (not by RiskHedge, which weighs prices itself). With `one_continent` replicas stay on the
    continent of the cheapest offer while it takes them. Spot replicas that have gathered in one zone for
    `spread_again_after_s` are spread again; 0: never.
    """

    placer: str = "spread"
    num_overprovision: int = 0
    dynamic_ondemand_fallback: bool = False
    base_ondemand_fallback_replicas: int = 0
    availability_target: float | None = None
    work: tuple[AcceleratorQps, ...] = ()
    price_band: float = 0.10
    spot_price_cap: float = 2.0
    spread_again_after_s: float = 1800.0
    one_continent: bool = False


class UpdateMode(str, Enum):
    ROLLING = "rolling"
    BLUE_GREEN = "blue_green"


@dataclass(frozen=True, slots=True)
class Goal:
    """What the user requested, as far as policies need to know it.

    `same_replicas` holds every version whose replicas are identical to those of `version` (an update that
    touched only the `service` section), so that they are kept. During a rolling update at most `max_surge`
    replicas more than the target live, and at most `max_unavailable` fewer than the target are ready. `down`:
    the service is being taken down. `killed`: replicas the user terminated by id. `max_usd_hour` is what the replicas may cost
    together; None: no limit. A replica with a preemption notice takes requests until `notice_drain_s` before its end.
    """

    version: int
    scaling: ScalingGoal
    placement: PlacementGoal = PlacementGoal()
    same_replicas: frozenset[int] = frozenset()
    update_mode: UpdateMode = UpdateMode.ROLLING
    max_surge: int = 1
    max_unavailable: int = 0
    provision_timeout_s: float = 1800.0
    initial_delay_s: float = 1200.0
    probe_failure_threshold_s: float = 180.0
    drain_timeout_s: float = 120.0
    notice_drain_s: float = 30.0
    down: bool = False
    killed: frozenset[int] = frozenset()
    max_usd_hour: float | None = None


class Amounts(NamedTuple):
    """What some replicas use together; of a limit: what they may."""

    gpus: float = 0.0
    replicas: float = 0.0
    usd_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Quota:
    """What the services of a team may use together; None: no limit. `max_usd_month` is for each calendar month (UTC)."""

    max_gpus: int | None = None
    max_replicas: int | None = None
    max_usd_hour: float | None = None
    max_usd_month: float | None = None


@dataclass(frozen=True, slots=True)
class TeamRoom:
    """What one service of a team may launch in a tick; see `policies.quotas`.

    `used` is what all services of the team use, and `left` the quota less that and less what is due to the others. `due` is
    how many replicas are due to this one. `month_usd` is what the team's services have cost since the month began.
    `num_nodes` are the nodes of a replica of the version that is launched.
    """

    team: str
    quota: Quota
    used: Amounts
    left: Amounts
    due: int
    month_usd: float = 0.0
    num_nodes: int = 1
