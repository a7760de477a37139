"""The figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.regions.scenario import Scenario
from benchmarks.regions.world import Response, Result
from benchmarks.traffic.measure import quantile

WITHIN_S = 2.0
_EDGE = 0.1  # of a closed loop, left out at its start and, for throughput, at its end


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in seconds at the client, shares between 0 and 1, `kb` and USD per (million) requests. Throughput, `lost` and
    all from `kb` on are of the whole run; `outside_bytes` were sent to regions that may not serve their request.

    `left` is the share of requests that were served outside of their client's region. `gpu_usd` is the price of the time for which
    engines were busy. `digest_kb_per_s` is what the busiest agent sent of digests, to all others.
    """

    requests: int
    lost: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    e2e_p50: float
    e2e_p90: float
    tokens_per_s: float
    hit_rate: float
    left: float
    within: float
    kb: float
    egress_usd: float
    gpu_usd: float
    outside_bytes: int = 0
    digest_kb_per_s: float = 0.0


def measure(
    result: Result, since_s: float = 0.0, until_s: float = float("inf"), regions: frozenset[str] | None = None
) -> Figures:
    """Returns the figures of the requests that arrived in a window, of the clients of some regions or of all."""
    scenario = result.scenario
    counted = _counted(result, since_s, until_s, regions)
    ttft = sorted(one.first_at - one.arrived_at for one in counted)
    e2e = sorted(one.ended_at - one.arrived_at for one in counted)
    ends = sorted(result.responses, key=lambda one: one.ended_at)
    middle = ends[int(len(ends) * _EDGE) : int(len(ends) * (1 - _EDGE))]
    total = len(result.responses)
    egress_usd = sum(
        size * scenario.region(source).egress_usd_per_gb / 1e9
        for (source, _), size in result.egress_bytes.items()
    )
    names = [region.name for region in scenario.regions for _ in range(region.size)]
    gpu_usd = sum(
        busy_s * scenario.region(name).usd_per_hour / 3600
        for busy_s, name in zip(result.busy_s, names, strict=True)
    )
    return Figures(
        requests=len(counted),
        lost=result.lost,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p90=quantile(ttft, 0.9),
        ttft_p99=quantile(ttft, 0.99),
        e2e_p50=quantile(e2e, 0.5),
        e2e_p90=quantile(e2e, 0.9),
        tokens_per_s=sum(one.response_tokens for one in middle) / (middle[-1].ended_at - middle[0].ended_at),
        hit_rate=sum(one.cached_tokens for one in counted) / sum(one.prompt_tokens for one in counted),
        left=sum(one.left for one in counted) / len(counted),
        within=sum(value <= WITHIN_S for value in ttft) / len(ttft),
        kb=sum(result.egress_bytes.values()) / total / 1e3,
        egress_usd=1e6 * egress_usd / total,
        gpu_usd=1e6 * gpu_usd / total,
        outside_bytes=result.outside_bytes,
        digest_kb_per_s=max(result.digest_bytes, default=0) / 1e3 / ends[-1].ended_at,
    )


class Part(NamedTuple):
    """Requests of a run that are of interest on their own: those that arrived in a window, or of the clients of some regions."""

    name: str
    since_s: float = 0.0
    until_s: float = float("inf")
    regions: frozenset[str] | None = None


def parts_of(scenario: Scenario) -> list[Part]:
    """Returns the whole run; with a death, the outage and what of it is left when clients have found another agent; with clients
    that stay in a zone, these and the others; where regions differ in size, those of the smallest one that has replicas."""
    parts = [Part("")]
    for death in scenario.deaths:
        found_s = death.at_s + death.clients_find_s
        parts.append(Part(f"{death.region} dead", death.at_s, death.until_s))
        if found_s < death.until_s:
            parts.append(Part(f"{death.region} dead, clients moved", found_s, death.until_s))
    sizes = {region.name: region.size for region in scenario.regions if region.size}
    if len(set(sizes.values())) > 1:
        parts.append(of_clients(frozenset({min(sizes, key=lambda name: sizes[name])})))
    if scenario.stay:
        pinned = frozenset(scenario.stay)
        others = frozenset(scenario.region_names) - pinned
        parts += [of_clients(regions) for regions in (pinned, others) if regions]
    return parts


def of_clients(regions: frozenset[str]) -> Part:
    return Part(f"clients of {', '.join(sorted(regions))}", regions=regions)


def _counted(
    result: Result, since_s: float, until_s: float, regions: frozenset[str] | None
) -> Sequence[Response]:
    scenario = result.scenario
    by_arrival = sorted(result.responses, key=lambda one: one.arrived_at)
    if scenario.closed_loop:
        by_arrival = by_arrival[int(len(by_arrival) * _EDGE) :]
    since_s = max(since_s, scenario.count_from_s)
    counted = [
        one
        for one in by_arrival
        if since_s <= one.arrived_at < until_s and (regions is None or one.region in regions)
    ]
    if not counted:
        raise ValueError(f"no request arrived between {since_s:g} and {until_s:g} s")
    return counted
