"""From steps to a capacity: the highest load at which the share of late requests is still allowed, and how certain that is.

The share of late requests does not fall with the load, so shares are smoothed by isotonic regression; the estimate is
where they cross what is allowed, on a line over the logarithm of the load.

The bounds do not rest on the smoothed curve. Whatever the curve is, the share at a load is at most that of all requests at this load
and at higher ones, up to any load; so the capacity is at least L if some such group that begins at L has a late share whose upper
bound is allowed. In the same way it is at most U if some group that ends at U has one whose lower bound is not. Bounds of
shares are those of Clopper and Pearson, each with `SURE`. They take requests as independent, which those of one queue are not
quite: with very short steps the interval is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SURE = 0.95  # of each bound, hence 90 % of the interval
SAME = 1.05  # loads that differ by less are one
HIGH, MEDIUM = 1.2, 1.6  # upper bound over lower bound
_ROUNDING = 1e-9


class Step(NamedTuple):
    """`load`: requests per second and replica. `requests` of them were counted."""

    load: float
    requests: int
    late: int


class Capacity(NamedTuple):
    """Requests per second of one replica. `low` 0: too few requests to be sure of any. `high` None: no load was surely too high.

    With `beyond`, all loads were in time: `qps` is the highest that was tried.
    """

    qps: float
    low: float
    high: float | None
    beyond: bool

    @property
    def confidence(self) -> str:
        """Return ``high``, ``medium`` or ``low``, by the width of the interval."""
        if self.high is None or self.low <= 0.0:
            return "low"
        ratio = self.high / self.low
        return "high" if ratio <= HIGH else "medium" if ratio <= MEDIUM else "low"


def capacity(steps: Sequence[Step], attainment: float) -> Capacity | None:
    """Return the capacity; None while even the lowest load has too many late requests, or no request was counted."""
    from scipy.optimize import (
        isotonic_regression,
    )  # of an extra: commands say what is missing before they get here

    known = grouped(steps)
    if not known:
        return None
    allowed = 1.0 - attainment + _ROUNDING
    shares = isotonic_regression(
        [step.late / step.requests for step in known], weights=[step.requests for step in known]
    ).x
    within = int(np.sum(shares <= allowed))
    if not within:
        return None
    below, qps = known[within - 1].load, known[within - 1].load
    if within < len(known):
        part = (allowed - shares[within - 1]) / (shares[within] - shares[within - 1])
        qps = below * (known[within].load / below) ** float(part)
    high = _at_most(known, allowed)
    # Steps that contradict each other have bounds on the wrong side of the estimate.
    return Capacity(
        qps,
        min(_at_least(known, allowed), qps),
        None if high is None else max(high, qps),
        beyond=within == len(known),
    )


def grouped(steps: Sequence[Step]) -> list[Step]:
    """Return the steps with requests by load, those of about the same load as one."""
    groups: list[list[Step]] = []
    for step in sorted(step for step in steps if step.requests):
        if groups and step.load <= SAME * groups[-1][0].load:
            groups[-1].append(step)
        else:
            groups.append([step])
    return [_sum(group) for group in groups]


def _sum(group: Sequence[Step]) -> Step:
    requests = sum(step.requests for step in group)
    load = sum(step.load * step.requests for step in group) / requests
    return Step(load, requests, sum(step.late for step in group))


def surely_too_high(step: Step, attainment: float) -> bool:
    """Return whether the requests of a step alone show that its load is too high."""
    return step.requests > 0 and _least_share(step.late, step.requests) > 1.0 - attainment + _ROUNDING


def requests_to_be_sure(attainment: float) -> int:
    """Return how many requests, all in time, show that a load is not too high."""
    return math.ceil(math.log(1.0 - SURE) / math.log(attainment))


def _at_least(known: Sequence[Step], allowed: float) -> float:
    """Return the highest load that some group of steps from it on shows to be in time; 0 if none does."""
    found = [
        known[start].load
        for start in range(len(known))
        if _some(known[start:], lambda late, requests: _most_share(late, requests) <= allowed)
    ]
    return max(found, default=0.0)


def _at_most(known: Sequence[Step], allowed: float) -> float | None:
    """Return the lowest load that some group of steps up to it shows to be too high."""
    found = [
        known[end].load
        for end in range(len(known))
        if _some(known[end::-1], lambda late, requests: _least_share(late, requests) > allowed)
    ]
    return min(found, default=None)


def _some(steps: Sequence[Step], holds: Callable[[int, int], bool]) -> bool:
    """Return whether it holds for the sums of the first step, or of the first two, or of more of them."""
    late = requests = 0
    for step in steps:
        late, requests = late + step.late, requests + step.requests
        if holds(late, requests):
            return True
    return False


def _most_share(late: int, requests: int) -> float:
    return 1.0 if late == requests else _beta_quantile(late + 1, requests - late, SURE)


def _least_share(late: int, requests: int) -> float:
    return 0.0 if late == 0 else _beta_quantile(late, requests - late + 1, 1.0 - SURE)


def _beta_quantile(a: int, b: int, p: float) -> float:
    from scipy.special import betaincinv

    return float(betaincinv(a, b, p))
