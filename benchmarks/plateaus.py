"""Which constants of RiskHedge stand on a plateau: each halved and doubled, on recorded markets.

    python -m benchmarks.plateaus FOLDER:4d … [--minutes 20] [--only STEER_S,YOUNG_H] [--markdown]

Each row changes one constant. The figures are the means over the traces of what 99.5 and 99.9 % cost (RiskHedge with these
two targets, mixed with on-demand replicas where that is cheaper) against the constants as they are, in points, with the
95 % interval of the paired difference over blocks of 6 h. A constant stands on a plateau where both stay within a point. Shares that
end at 1 or that mean nothing below 1 are changed within these limits. When the minutes are over, the finished part is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

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
from policies.placement import risk_budget, risk_growth, risk_hedge, risk_market, risk_odds
from skyserve_cli.sim.settings import Job

AVAILABILITIES = (0.995, 0.999)
PLATEAU = 0.01


class Constant(NamedTuple):
    """Where it is, and what it is changed to."""

    module: Any
    name: str
    low: float
    high: float

    @property
    def value(self) -> float:
        return float(getattr(self.module, self.name))


def halved_and_doubled(module: Any, *names: str) -> list[Constant]:
    found = []
    for name in names:
        value = getattr(module, name)
        found.append(Constant(module, name, type(value)(value / 2), type(value)(value * 2)))
    return found


CONSTANTS: tuple[Constant, ...] = (
    *halved_and_doubled(risk_budget, "PENALTY_SHARE"),
    Constant(risk_budget, "EXPONENT", 1.0, 1.5),  # twice of it is another law
    *halved_and_doubled(risk_budget, "STEER_S", "PRIOR_WINDOWS", "FADE_S", "MOST_OVERDRAWN", "LEAST_PENALTY"),
    *halved_and_doubled(risk_budget, "EVEN_S", "MOST_AIM", "LOAN_H", "SAVED_H", "SHARE_STEP"),
    *halved_and_doubled(risk_market, "YOUNG_H", "FLOOR_PER_HOUR", "PRIOR_LOSSES", "MEMORY_LOSSES"),
    *halved_and_doubled(risk_hedge, "HORIZON_H", "MARGIN", "MOVE_MARGIN", "REFUSAL_H", "MOST_EXTRA"),
    *halved_and_doubled(risk_hedge, "TRIAL_H", "PAYBACK_H", "MOST_TRIED"),
    *halved_and_doubled(risk_market, "FIRST_RETRY_S", "LONGEST_RETRY_S", "RETRY_SHARE", "HELD_PATIENCE"),
    *halved_and_doubled(risk_market, "RECOVERY_H", "UNKNOWN_DOWN", "FIRST_SIGHT_H"),
    Constant(risk_market, "SIBLINGS_UP", 0.5, 1.0),
    Constant(risk_market, "SIBLINGS_DOWN", 1.0, 3.2),
    *halved_and_doubled(risk_odds, "TOGETHER", "ACROSS"),
    *halved_and_doubled(risk_hedge, "DETECTION_S", "ANSWER_S", "LOOK_AGAIN_S"),
    *halved_and_doubled(risk_growth, "NEAR_H", "PRIOR_DAYS"),  # change nothing but --by-hour
)


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
    yield ["constant", "value", "changed to", *(f"{a:.1%}" for a in AVAILABILITIES), "plateau"]
    end_at = time.monotonic() + 60.0 * minutes
    base = families(sources, around)
    for constant in constants:
        for value in (constant.low, constant.high):
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
            row = [constant.name, f"{constant.value:g}", f"{value:g}", *texts, "yes" if flat else "no"]
            print(" ".join(row), file=sys.stderr, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", help="FOLDER, FOLDER:cap1, FOLDER:4d")
    parser.add_argument("--only", default="", help="names of constants")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--by-hour", action="store_true", help="2 to 6 replicas by the hour of the day")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    constants = [constant for constant in CONSTANTS if not names or constant.name in names]
    around = Circumstances(by_hour=args.by_hour)
    found = list(rows(constants, args.traces, around, args.minutes, args.resamples))
    print(table(found, args.markdown))


if __name__ == "__main__":
    main()
