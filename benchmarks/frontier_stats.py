"""What families of settings cost at an availability, and how sure that is, from samples that are paired.

A sample is a stretch of a market in which every setting was run: a block of a recording, or all of a synthetic
market. A resample draws samples with replacement, the same for every setting, so that compared settings have seen the
same markets (paired bootstrap, percentile intervals).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import stats

from skyserve_cli.sim.frontier import ALL_ON_DEMAND, Point, cost_at, lower_hull
from skyserve_cli.sim.settings import Job
from skyserve_cli.sim.summary import Estimate, estimate

_TIE = 5e-4  # of what all on demand costs: a difference that no table shows

Drawn = Sequence[int]  # indices of samples


class Sample(NamedTuple):
    """Hours; how many hours of all on demand would have cost what was paid; hours below the target."""

    hours: float
    paid: float
    down: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One setting in all samples. Failed launches are per day, over all of them."""

    job: Job
    samples: tuple[Sample, ...]
    failed_launches: float

    def point(self, drawn: Drawn | None = None) -> Point:
        """Cost and unavailability over the samples that were drawn, or over all."""
        chosen = self.samples if drawn is None else [self.samples[index] for index in drawn]
        hours = sum(sample.hours for sample in chosen)
        return Point(sum(s.paid for s in chosen) / hours, sum(s.down for s in chosen) / hours)


#: A policy with every setting of its knob, over the same samples.
Family = tuple[Outcome, ...]


class Interval(NamedTuple):
    low: float
    high: float


def cost(family: Family, availability: float, drawn: Drawn | None = None) -> float:
    """The least, relative to all on demand."""
    return cost_at([outcome.point(drawn) for outcome in family], 1 - availability)


def failed_launches(family: Family, availability: float) -> float:
    """Per day of the mixture that costs least at an availability; on demand no launch fails."""
    shares = mixture([outcome.point() for outcome in family], 1 - availability)
    return sum(share * outcome.failed_launches for share, outcome in zip(shares, family, strict=True))


def mixture(points: Sequence[Point], down: float) -> list[float]:
    """The part of the time that each point has in the mixture behind `cost_at`; the rest is on demand."""
    hull = lower_hull((*points, ALL_ON_DEMAND))
    parts = {hull[0]: 1.0}
    for left, right in pairwise(hull):
        if left.down > down:
            share = (left.down - down) / (left.down - right.down)
            parts = {left: 1.0 - share, right: share} if share <= 1.0 else {right: 1.0}
    return [parts.pop(point, 0.0) for point in points]  # of equal points the first


def bootstrap(samples: int, value: Callable[[Drawn], float], resamples: int) -> Interval:
    """Return the 95 % interval of a value from this number of samples."""
    found = stats.bootstrap(
        (np.arange(samples),),
        lambda drawn: value(drawn.tolist()),
        n_resamples=resamples,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    return Interval(float(found.low), float(found.high))


def cost_difference(one: Family, other: Family, availability: float, resamples: int) -> Interval:
    """Of what `other` costs beyond `one`; both frontiers are drawn again from each resample."""

    def more(drawn: Drawn) -> float:
        return cost(other, availability, drawn) - cost(one, availability, drawn)

    return bootstrap(len(one[0].samples), more, resamples)


def point_difference(one: Outcome, other: Outcome, resamples: int) -> tuple[Interval, Interval]:
    """Of what a setting costs beyond another, and of how much more it is down."""

    def more(field: int) -> Interval:
        return bootstrap(
            len(one.samples), lambda drawn: other.point(drawn)[field] - one.point(drawn)[field], resamples
        )

    return more(0), more(1)


class OneByOne(NamedTuple):
    """Every sample with frontiers of its own: the mean difference in cost with its paired t interval, and the
    number of samples in which the other family is cheaper, and dearer."""

    difference: Estimate
    cheaper: int
    dearer: int


def one_by_one(one: Family, other: Family, availability: float) -> OneByOne:
    samples = range(len(one[0].samples))
    more = [cost(other, availability, [index]) - cost(one, availability, [index]) for index in samples]
    return OneByOne(estimate(more), sum(d < -_TIE for d in more), sum(d > _TIE for d in more))
