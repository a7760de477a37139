"""Runs that differ only by chance, put together: means, how sure they are, and which is the one to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from skyserve_cli.account.runs import Percentiles, Run

#: Policies that see the future: a bound for the others, nothing one could run.
BOUNDS = frozenset({"omniscient"})


class Estimate(NamedTuple):
    """A mean, and half the width of its 95 % confidence interval; None where there is only one value."""

    mean: float
    half_width: float | None = None


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One policy with one setting of its knobs, over all seeds and windows. Units as in `Run`."""

    label: str
    policy: str
    overprovision: int | None
    availability_target: float | None
    runs: tuple[Run, ...]
    availability: Estimate
    capacity_fraction: Estimate
    cost_relative: Estimate
    preemptions_per_day: Estimate
    failed_launches_per_day: Estimate
    on_demand_cost_share: Estimate
    requests_short: Estimate | None
    attainment: Estimate | None
    requests_failed: Estimate | None
    outages: Estimate
    growth: Estimate
    ttft_s: Percentiles | None
    latency_s: Percentiles | None

    @property
    def zones(self) -> str:
        return ", ".join(sorted({run.zones for run in self.runs if run.zones}))

    @property
    def usd_hour(self) -> float:
        return sum(run.usd for run in self.runs) / self._hours

    @property
    def usd_hour_on_demand(self) -> float:
        return sum(run.usd_on_demand for run in self.runs) / self._hours

    @property
    def usd_hour_beside(self) -> float | None:
        """For disks and addresses, which the other prices leave out; None where that is not known."""
        known = [run.usd_beside for run in self.runs if run.usd_beside is not None]
        return sum(known) / self._hours if len(known) == len(self.runs) else None

    @property
    def _hours(self) -> float:
        return sum(run.days for run in self.runs) * 24


def summarize(runs: Iterable[Run]) -> tuple[SummaryRow, ...]:
    """Return a row for each policy and setting, in the order in which they first appear."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.policy, run.overprovision, run.availability_target), []).append(run)
    return tuple(_row(tuple(group)) for group in groups.values())


def cheapest(rows: Iterable[SummaryRow], availability: float) -> SummaryRow | None:
    """Return the least cost among runnable policies with at least that availability; None if there is none."""
    fit = [row for row in rows if row.policy not in BOUNDS and row.availability.mean >= availability]
    return min(fit, key=lambda row: row.cost_relative.mean, default=None)


def most_available(rows: Iterable[SummaryRow]) -> SummaryRow | None:
    """Return the one to name where none is good enough."""
    real = [row for row in rows if row.policy not in BOUNDS]
    return max(real, key=lambda row: row.availability.mean, default=None)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of independent values."""
    if len(values) < 2:
        return Estimate(values[0])
    from scipy.special import (
        stdtrit,  # Student's t; here, because commands that need no statistics import this module
    )

    t = float(stdtrit(len(values) - 1, 0.975))
    return Estimate(fmean(values), t * stdev(values) / sqrt(len(values)))


def _row(runs: tuple[Run, ...]) -> SummaryRow:
    def over(value: Callable[[Run], float]) -> Estimate:
        return _over(runs, value)

    def if_known(value: Callable[[Run], float | None]) -> Estimate | None:
        is_known = all(value(run) is not None for run in runs)
        return over(lambda run: value(run) or 0.0) if is_known else None

    first = runs[0]
    return SummaryRow(
        label=first.label,
        policy=first.policy,
        overprovision=first.overprovision,
        availability_target=first.availability_target,
        runs=runs,
        availability=over(lambda run: run.availability),
        capacity_fraction=over(lambda run: run.capacity_fraction),
        cost_relative=over(lambda run: run.cost_relative),
        preemptions_per_day=over(lambda run: run.preemptions_per_day),
        failed_launches_per_day=over(lambda run: run.failed_launches_per_day),
        on_demand_cost_share=over(lambda run: run.on_demand_cost_share),
        requests_short=if_known(lambda run: run.requests_short),
        attainment=if_known(lambda run: run.attainment),
        requests_failed=if_known(lambda run: run.requests_failed),
        outages=over(lambda run: float(run.outages)),
        growth=over(lambda run: run.growth),
        ttft_s=_means([run.ttft_s for run in runs]),
        latency_s=_means([run.latency_s for run in runs]),
    )


def _means(each: Sequence[Percentiles | None]) -> Percentiles | None:
    """Return the means of percentiles; None if a run has none."""
    known = [one for one in each if one is not None]
    return Percentiles(*map(fmean, zip(*known, strict=True))) if len(known) == len(each) else None


def _over(runs: Sequence[Run], value: Callable[[Run], float]) -> Estimate:
    """Seeds of one window share its market, so they are not independent.

    Where there are several windows, windows are counted, each with the mean of its seeds.
    """
    windows: dict[int, list[float]] = {}
    for run in runs:
        windows.setdefault(run.window, []).append(value(run))
    if len(windows) == 1:
        (values,) = windows.values()
        return estimate(values)
    return estimate([fmean(values) for values in windows.values()])
