"""Which constants stand on a plateau: each times .5, .7, 1.4 and 2, on recorded markets or recorded requests.

    python -m benchmarks.plateaus FOLDER:4d … [--minutes 20] [--only STEER_S,YOUNG_H] [--markdown]
    python -m benchmarks.plateaus --requests TRACE … [--minutes 20] [--only MOST_RATIO]

Each row changes one constant. On markets, of RiskHedge: the figures are the means over the traces of what 99.5 and 99.9 % cost (RiskHedge
with these two targets, mixed with on-demand replicas where that is cheaper) against the constants as they are, in points, with the
95 % interval of the paired difference over blocks of 6 h, and the time short over the allowed. A constant stands on a plateau where
both costs stay within a point. On requests, of the autoscaler that learns what tokens weigh: the share in time and the
hours over the ideal, against the constants as they are, at 99.5 %, 300 s to start and a mean of 8 replicas; a plateau is within .2
points and 2 %. Shares that end at 1 or that mean nothing below 1 are changed within these limits. When the minutes are over, the
finished part is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from benchmarks.autoscalers import GOAL, trial_of
from benchmarks.frontier import table
from benchmarks.frontier_stats import Family, Interval, Outcome, cost
from benchmarks.market_runs import (
    RISK_HEDGE,
    Circumstances,
    Piece,
    by_block,
    measure,
    recorded_cases,
)
from policies.forecast import work
from policies.placement import risk_budget, risk_growth, risk_hedge, risk_market, risk_odds
from skyserve_cli.sim.scaling import goal_for, run
from skyserve_cli.sim.settings import Job

AVAILABILITIES = (0.995, 0.999)
FACTORS = (0.5, 0.7, 1.4, 2.0)
PLATEAU = 0.01
IN_TIME_PLATEAU, HOURS_PLATEAU = 0.002, 0.02


class Constant(NamedTuple):
    """Where it is, and what it is changed to, in ascending order."""

    module: Any
    name: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return float(getattr(self.module, self.name))


def by_factors(module: Any, *names: str) -> list[Constant]:
    found = []
    for name in names:
        value = getattr(module, name)
        values = [type(value)(round(value * factor, 9)) for factor in FACTORS]
        found.append(Constant(module, name, tuple(sorted({one for one in values if one != value}))))
    return found


CONSTANTS: tuple[Constant, ...] = (
    *by_factors(risk_budget, "PENALTY_SHARE"),
    Constant(risk_budget, "EXPONENT", (1.0, 1.5)),  # twice of it is another law
    *by_factors(risk_budget, "STEER_S", "PRIOR_WINDOWS", "FADE_S", "MOST_OVERDRAWN", "LEAST_PENALTY"),
    *by_factors(risk_budget, "EVEN_S", "MOST_AIM", "LOAN_H", "SAVED_H", "SHARE_STEP"),
    *by_factors(risk_market, "YOUNG_H", "FLOOR_PER_HOUR", "PRIOR_LOSSES", "MEMORY_LOSSES"),
    *by_factors(risk_hedge, "HORIZON_H", "MARGIN", "MOVE_MARGIN", "REFUSAL_H", "MOST_EXTRA"),
    *by_factors(risk_hedge, "TRIAL_H", "PAYBACK_H", "TRIAL_SHARE", "MOST_TRIED"),
    *by_factors(risk_market, "FIRST_RETRY_S", "LONGEST_RETRY_S", "RETRY_SHARE", "HELD_PATIENCE"),
    *by_factors(risk_market, "RECOVERY_H", "UNKNOWN_DOWN", "FIRST_SIGHT_H"),
    Constant(risk_market, "SIBLINGS_UP", (0.5, 1.0)),
    Constant(risk_market, "SIBLINGS_DOWN", (1.0, 3.2)),
    *by_factors(risk_odds, "TOGETHER", "ACROSS"),
    *by_factors(risk_hedge, "DETECTION_S", "ANSWER_S", "LOOK_AGAIN_S"),
    *by_factors(risk_growth, "NEAR_H", "PRIOR_DAYS"),  # change nothing but --by-hour
)
OF_WORK: tuple[Constant, ...] = tuple(by_factors(work, "USUAL_REQUESTS", "PRIOR_MIN", "MOST_RATIO"))


@contextmanager
def changed(constant: Constant | None, value: float) -> Iterator[None]:
    """Within it the constant has this value; None: all are as they are."""
    if constant is None:
        yield
        return
    before = getattr(constant.module, constant.name)
    setattr(constant.module, constant.name, value)
    try:
        yield
    finally:
        setattr(constant.module, constant.name, before)


def families(sources: Sequence[str], around: Circumstances) -> list[Family]:
    """RiskHedge with both targets on each of the traces."""
    found = []
    for case in (case for source in sources for case in recorded_cases(source, True, 1)):
        ((_, trace),) = case.traces
        jobs = [Job(RISK_HEDGE, availability_target=target) for target in AVAILABILITIES]
        runs = [(job, measure(Piece(case, trace, job, around))) for job in jobs]
        found.append(
            tuple(Outcome(job, tuple(by_block([run])), run.failed_launches_per_day) for job, run in runs)
        )
    return found


def difference(
    before: Sequence[Family], after: Sequence[Family], availability: float, resamples: int
) -> tuple[float, Interval]:
    """Return how much dearer the mean of the traces is after, and its interval; each trace is drawn by itself."""
    mean = fmean(cost(b, availability) - cost(a, availability) for a, b in zip(before, after, strict=True))
    rng, drawn = np.random.default_rng(1), []
    for _ in range(resamples):
        one = []
        for a, b in zip(before, after, strict=True):
            blocks = rng.integers(len(a[0].samples), size=len(a[0].samples)).tolist()
            one.append(cost(b, availability, blocks) - cost(a, availability, blocks))
        drawn.append(fmean(one))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return mean, Interval(float(low), float(high))


def rows(
    constants: Sequence[Constant],
    sources: Sequence[str],
    around: Circumstances,
    minutes: float,
    resamples: int,
) -> Iterator[list[str]]:
    shorts = (f"{a:.1%}: short of allowed" for a in AVAILABILITIES)
    yield ["constant", "value", "changed to", *(f"{a:.1%}" for a in AVAILABILITIES), *shorts, "plateau"]
    end_at = time.monotonic() + 60.0 * minutes
    base = families(sources, around)
    yield ["as they are", "", "", "", "", *_short_of_allowed(base), ""]
    for constant in constants:
        for value in constant.values:
            if time.monotonic() > end_at:
                print(f"the time is over at {constant.name}", file=sys.stderr)
                return
            with changed(constant, value):
                after = families(sources, around)
            found = [difference(base, after, availability, resamples) for availability in AVAILABILITIES]
            flat = all(abs(mean) <= PLATEAU for mean, _ in found)
            texts = [
                f"{100 * mean:+.1f} ({100 * sure.low:+.1f} … {100 * sure.high:+.1f})" for mean, sure in found
            ]
            yield _row(constant, value, [*texts, *_short_of_allowed(after)], flat)


def _short_of_allowed(found: Sequence[Family]) -> list[str]:
    """Return the time short over the allowed at each target, the mean over the traces."""
    downs = [[outcome.point().down for outcome in family] for family in found]
    return [
        f"{fmean(of) / (1.0 - a):.2f}" for of, a in zip(zip(*downs, strict=True), AVAILABILITIES, strict=True)
    ]


def _row(constant: Constant, value: float, texts: Sequence[str], flat: bool) -> list[str]:
    row = [constant.name, f"{constant.value:g}", f"{value:g}", *texts, "yes" if flat else "no"]
    print(" ".join(row), file=sys.stderr, flush=True)
    return row


def work_rows(constants: Sequence[Constant], paths: Sequence[Path], minutes: float) -> Iterator[list[str]]:
    """The rows of constants that say what tokens weigh."""
    yield ["constant", "value", "changed to", "in time", "hours over ideal", "plateau"]
    end_at = time.monotonic() + 60.0 * minutes
    trials = [trial_of(path, 300.0, 0.995, 8.0, 0) for path in paths]

    def means() -> tuple[float, float]:
        found = [run(trial, "predictive", goal_for("predictive", GOAL, trial)) for trial in trials]
        return fmean(one.attainment for one in found), fmean(one.hours_over_ideal for one in found)

    base = means()
    yield ["as they are", "", "", f"{base[0]:.2%}", f"{base[1]:.3f}", ""]
    for constant in constants:
        for value in constant.values:
            if time.monotonic() > end_at:
                print(f"the time is over at {constant.name}", file=sys.stderr)
                return
            with changed(constant, value):
                in_time, hours = means()
            flat = abs(in_time - base[0]) <= IN_TIME_PLATEAU and abs(hours / base[1] - 1.0) <= HOURS_PLATEAU
            yield _row(
                constant, value, [f"{100 * (in_time - base[0]):+.2f}", f"{hours - base[1]:+.3f}"], flat
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", help="FOLDER, FOLDER:cap1, FOLDER:4d")
    parser.add_argument("--requests", action="store_true", help="the traces are recordings of requests")
    parser.add_argument("--only", default="", help="names of constants")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--by-hour", action="store_true", help="2 to 6 replicas by the hour of the day")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    every = OF_WORK if args.requests else CONSTANTS
    constants = [constant for constant in every if not names or constant.name in names]
    around = Circumstances(by_hour=args.by_hour)
    found = list(
        work_rows(constants, [Path(one) for one in args.traces], args.minutes)
        if args.requests
        else rows(constants, args.traces, around, args.minutes, args.resamples)
    )
    print(table(found, args.markdown))


if __name__ == "__main__":
    main()
