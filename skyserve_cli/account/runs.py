"""What a simulation found, as values: one `Run` for each policy, knob, seed and window of the trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SPOT, ON_DEMAND = "spot", "on_demand"


class FleetSample(NamedTuple):
    """From `at_s` on: (zone, "spot" or "on_demand", alive, ready), sorted; only where something is alive."""

    at_s: float
    counts: tuple[tuple[str, str, int, int], ...]


class Percentiles(NamedTuple):
    """Seconds that half, 90 % and 99 % of the requests took at most."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Run:
    """One policy against one stretch of a trace.

    `availability` is the share of the time in which at least the target was ready, `capacity_fraction` the mean
    of min(ready, target) / target. `cost_relative` is what was paid, cold starts included, over what the target
    would have cost on demand (`usd` over `usd_on_demand`). `wanted` is the target over time where it follows the
    load, as (from second, replicas); `n_target` the target where it does not. `zones` names what a baseline that
    stays in one place stayed in. `overprovision` and `availability_target` are None for a policy that has no such
    knob. `outages` is how often fewer than the target became ready, and `growth` the part of the time in which fewer were
    only because the target had risen within the last cold start. `requests` and `requests_short` (the share that arrived while
    fewer than the target were ready) are None without requests. `attainment` is the share of requests within the SLO, by what
    a replica carries and not by the target; None where that is not known. `window` counts the stretches of the trace from 0.
    `ttft_s` is the time to the first token and `latency_s` that to the last, None without an engine's profile; both are of the requests that clients
    did not give up, and `requests_failed` is the share of the others, None where clients wait forever. `usd_beside` is
    what disks and addresses of machines cost, which `usd` leaves out; None where that is not known. Of a plan that knows the future,
    `cost_bound` is below the cost of the cheapest one, and `status` "optimal" or why it may not be that.
    """

    policy: str
    overprovision: int | None
    seed: int
    availability: float
    capacity_fraction: float
    cost_relative: float
    preemptions_per_day: float
    failed_launches_per_day: float
    on_demand_cost_share: float
    days: float
    usd: float
    usd_on_demand: float
    launches: int
    cpu_s: float
    ticks: int
    digest: str
    zones: str
    steps: tuple[FleetSample, ...]
    n_target: int
    wanted: tuple[tuple[float, int], ...] = ()
    requests: int | None = None
    requests_short: float | None = None
    availability_target: float | None = None
    window: int = 0
    outages: int = 0
    growth: float = 0.0
    attainment: float | None = None
    ttft_s: Percentiles | None = None
    latency_s: Percentiles | None = None
    requests_failed: float | None = None
    usd_beside: float | None = None
    cost_bound: float | None = None
    status: str = ""

    @property
    def label(self) -> str:
        """The policy with its knob: ``spothedge +1``, ``risk_hedge 99.5%``."""
        if self.availability_target is not None:
            return f"{self.policy} {percent(self.availability_target)}"
        return self.policy if self.overprovision is None else f"{self.policy} +{self.overprovision}"


@dataclass(frozen=True, slots=True)
class Simulation:
    """The runs of one command line, in the order in which they were requested.

    `days` is the length of the trace, of which each window is a part. `zones` are (zone, region), in its order.
    `priced` is whether the trace knows prices; where it does not, spot costs 1 and only ratios mean anything.
    `began_at`: nothing was simulated, this is what a service lived through (`service_history`), and second 0 was then (UNIX).
    """

    trace: str
    n_target: int
    cold_start_s: float
    price_ratio: float
    tick_s: float
    days: float
    zones: tuple[tuple[str, str], ...]
    priced: bool
    runs: tuple[Run, ...]
    began_at: float | None = None

    @property
    def counted_from_s(self) -> float:
        """Nothing can be ready before one cold start is over: cost and availability count from there."""
        return max(1, round(self.cold_start_s / self.tick_s)) * self.tick_s


def percent(share: float) -> str:
    """As many digits as the number has, three at most: ``99%``, ``99.5%``, ``99.95%``."""
    return f"{round(100 * share, 3):g}%"
