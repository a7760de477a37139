"""`serve plan --requests|--history`: the next 24 hours of a service, from what it was asked before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from policies.forecast.day import HOUR_MIN, Hour, next_day
from policies.forecast.demand import DAY_MIN, Floats
from policies.forecast.work import RESPONSE_WEIGHT
from policies.scaling.predictive import HEADROOM
from skyserve_cli.commands import runs
from skyserve_cli.commands.options import View, controller, find
from skyserve_cli.commands.traffic_options import weight_in
from skyserve_cli.output import CommandFailed, WrongUsage, date_time, usd
from skyserve_cli.sim.slo_queue import bridged
from skyserve_cli.sim.token_steps import token_steps
from skyserve_cli.spec import ServiceSpec
from skyserve_cli.spec.schedule import limits_at
from skyserve_cli.text_tables import FittedTable

MINUTE_S = 60.0
HISTORY_MIN = 14 * DAY_MIN
BY_MINUTE_MIN = 1400  # the last of them are read as minutes, the others as quarters of an hour
LEAST_MIN = 60


class KnownDemand(NamedTuple):
    """The requests of consecutive minutes until now, NaN where not known; and what was learned of the service, if anything.

    Where tokens are known, `requests` are of the usual size.
    """

    source: str
    requests: Floats
    capacity_qps: float | None = None
    headroom: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedHour:
    """`hour` from `at` on (UNIX seconds), the replicas of its two quantiles, and USD for the first of them."""

    at: float
    hour: Hour
    replicas: int
    replicas_p90: int
    usd: float | None


@dataclass(frozen=True, slots=True)
class DayPlan:
    """The next 24 hours. `carried_qps` is what a replica is given of `capacity_qps`; prices are USD per replica and hour."""

    source: str
    known_min: int
    carried_qps: float
    price_usd_hour: float | None
    hours: tuple[PlannedHour, ...]

    def view(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "known_minutes": self.known_min,
            "requests_per_s_per_replica": round(self.carried_qps, 6),
            "usd_per_replica_hour": self.price_usd_hour,
            "replica_hours": sum(one.replicas for one in self.hours),
            "replica_hours_p90": sum(one.replicas_p90 for one in self.hours),
            "hours": [
                {
                    "at": one.at,
                    "p50_per_min": round(one.hour.p50, 1),
                    "p90_per_min": round(one.hour.p90, 1),
                    "replicas": one.replicas,
                    "replicas_p90": one.replicas_p90,
                    "usd": one.usd,
                }
                for one in self.hours
            ],
        }

    def table(self) -> FittedTable:
        rows = [
            (
                date_time(one.at)[:16],
                f"{one.hour.p50:.0f}",
                f"{one.hour.p90:.0f}",
                str(one.replicas),
                str(one.replicas_p90),
                "-" if one.usd is None else usd(one.usd),
            )
            for one in self.hours
        ]
        return FittedTable(("HOUR FROM", "REQ/MIN P50", "P90", "REPLICAS", "AT P90", "$"), rows)

    def sentence(self) -> str:
        """Return the sums of the day, and what they are made from."""
        hours, most = (
            sum(each) for each in zip(*((h.replicas, h.replicas_p90) for h in self.hours), strict=True)
        )
        price = self.price_usd_hour
        paid, at_most = (
            ("", "") if price is None else (f" for ${usd(price * hours)}", f" for ${usd(price * most)}")
        )
        days = self.known_min / DAY_MIN
        return (
            f"The next 24 hours, forecast from {days:.1f} days of {self.source}: {hours} replica hours{paid}; {most}{at_most} if "
            f"every hour is as busy as one in ten. A replica gets {self.carried_qps:.3g} requests per second."
        )


class DayPlanInput(NamedTuple):
    """What a plan is made from: what came, what a replica is given of it (requests per second), and the time of it."""

    known: KnownDemand
    carried_qps: float
    now: float


def asked(
    spec: ServiceSpec, requests: str | None, history: bool, capacity_qps: float | None, now: float
) -> DayPlanInput:
    """Return what the options mean. Raises WrongUsage where they contradict each other or the file, and as `recorded` and `history_known`."""
    if requests is not None and history:
        raise WrongUsage(
            "--requests names a recording and --history takes that of the service: leave one of them out"
        )
    if requests is None and not history:
        raise WrongUsage(
            "--capacity says what a replica carries of --requests or --history: name one of them"
        )
    if capacity_qps is not None and not 0 < capacity_qps <= 1e6:
        raise WrongUsage(f"--capacity takes requests per second above 0 (got {capacity_qps:g})")
    weight = weight_in(spec) or RESPONSE_WEIGHT
    known = history_known(spec.name, now) if requests is None else recorded(requests, weight)
    return DayPlanInput(known, carried(spec, known, capacity_qps), now)


def recorded(text: str, weight: float = RESPONSE_WEIGHT) -> KnownDemand:
    """Return a recording as if it ended now, in which a response token has a `weight`. Raises WrongUsage."""
    arrivals = runs.arrivals(text, 7 * 86400.0)
    if arrivals is None or arrivals.mean_rate <= 0:
        raise WrongUsage(f"--requests {text}: no request in it")
    whole, _ = bridged(arrivals)
    minutes = int(whole.length_s // MINUTE_S)
    if minutes < LEAST_MIN:
        raise WrongUsage(f"--requests {text}: shorter than an hour, which says nothing about a day")
    edges = whole.length_s - MINUTE_S * np.arange(min(minutes, HISTORY_MIN), -1, -1)
    requests = np.diff(np.interp(edges, whole.at_s, whole.counts))
    tokens = token_steps(whole, MINUTE_S * minutes, 0.0, weight, MINUTE_S)
    if tokens is None:
        return KnownDemand(f"{arrivals.name} (without tokens)", requests)
    return KnownDemand(f"{arrivals.name} by its tokens", requests * tokens.size[-len(requests) :])


def history_known(name: str, now: float) -> KnownDemand:
    """Return what the load balancers of a service have counted. Raises CommandFailed, ControllerDownError."""
    client = controller()
    view = find(client.services(name), name)
    end = now // MINUTE_S * MINUTE_S
    parts = [client.series(name, since=end - MINUTE_S * minutes) for minutes in (HISTORY_MIN, BY_MINUTE_MIN)]
    slo = view.get("slo") or {}
    weights = slo.get("token_weights")
    columns = ("requests",) if weights is None else ("requests", "tokens_in", "tokens_out")
    series = (by_minute(parts, end, column) for column in columns)
    requests = sum(weight * one for weight, one in zip(weights or (1.0,), series, strict=True))
    if len(requests) < LEAST_MIN:
        raise CommandFailed(f"{name} has been counted for less than an hour, which says nothing about a day")
    source = f"requests to {name}" + ("" if weights is None else " by their tokens")
    return KnownDemand(source, requests, slo.get("capacity_qps"), slo.get("headroom"))


def by_minute(parts: Sequence[View], end: float, column: str = "requests") -> Floats:
    """Return the requests, or tokens, of each minute before `end` (UNIX seconds), from the first that is known on.

    Slots of later `parts` replace those of earlier ones; a slot's requests are spread evenly over its minutes.
    """
    requests = np.full(HISTORY_MIN, np.nan)
    for part in parts:
        minutes = max(1, round(part["span_s"] / MINUTE_S))
        for at, count in zip(part["at"], part[column], strict=True):
            index = HISTORY_MIN - round((end - at) / MINUTE_S)
            if index >= 0 and index + minutes <= HISTORY_MIN:
                requests[index : index + minutes] = count / minutes
    known = np.flatnonzero(~np.isnan(requests))
    found: Floats = requests[known[0] : known[-1] + 1] if len(known) else requests[:0]
    return found


def carried(spec: ServiceSpec, known: KnownDemand, capacity_qps: float | None) -> float:
    """Return the requests per second that a replica is given. Raises WrongUsage where nothing says it."""
    headroom = known.headroom or HEADROOM
    if capacity_qps is not None:
        return capacity_qps / headroom
    if spec.slo is not None:
        learned = spec.slo.capacity_qps or known.capacity_qps
        if learned is not None:
            return learned / headroom
    target = spec.scaling.target_qps_per_replica
    if target is not None:
        return target
    raise WrongUsage(
        "service.replica_policy: nothing says what a replica carries; set slo.capacity_qps or target_qps_per_replica, or give "
        "--capacity"
    )


def planned(
    spec: ServiceSpec, known: KnownDemand, carried_qps: float, now: float, price_usd_hour: float | None
) -> DayPlan:
    """Return the next 24 hours, within the limits of the file and its schedule."""
    start = math.ceil(now / MINUTE_S) * MINUTE_S
    hours = []
    for number, hour in enumerate(next_day(known.requests)):
        at = start + number * HOUR_MIN * MINUTE_S
        least, most, _ = limits_at(spec, at)
        low, high = (
            min(most, max(least, math.ceil(rate / (MINUTE_S * carried_qps) - 1e-9))) for rate in hour
        )
        cost = None if price_usd_hour is None else low * price_usd_hour
        hours.append(PlannedHour(at, hour, low, high, cost))
    return DayPlan(known.source, len(known.requests), carried_qps, price_usd_hour, tuple(hours))


def price_of(plan: View, candidates: Sequence[View]) -> float | None:
    """Return USD per replica and hour: the mean of the plan's replicas, else of the best candidate; None without one."""
    lasting = [each["price_usd_hour"] for each in plan["launches"] if not each["stands_in"]]
    if lasting:
        return float(sum(lasting) / len(lasting))
    return float(candidates[0]["price_usd_hour"]) if candidates else None
