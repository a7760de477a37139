"""Availability against cost: what mixtures of settings can reach.

A service that runs under one setting for part of the time and under another for the rest pays, and is down, in
proportion. So a family of settings reaches every point on the segments between its own; what counts of it is the
lower left edge of its convex hull. On demand (all the cost, no unavailability) is open to everybody, so every
family reaches every availability at some cost, and families can be compared at equal availability.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Point(NamedTuple):
    """`cost` relative to on demand, `down` the share of the time below target; less of both is better."""

    cost: float
    down: float


ALL_ON_DEMAND = Point(1.0, 0.0)


def lower_hull(points: Iterable[Point]) -> tuple[Point, ...]:
    """The corners of the lower left edge, by rising cost and falling unavailability."""
    hull: list[Point] = []
    for point in sorted(set(points)):
        if hull and point.down >= hull[-1].down:
            continue  # dearer and no better
        while len(hull) >= 2 and not _turns_left(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull)


def cost_at(points: Iterable[Point], down: float) -> float:
    """Return the least cost at which the family, mixed with on demand, is down for no more than that share."""
    hull = lower_hull((*points, ALL_ON_DEMAND))
    if hull[0].down <= down:
        return hull[0].cost
    for left, right in pairwise(hull):
        if right.down <= down:
            share = (left.down - down) / (left.down - right.down)
            return left.cost + share * (right.cost - left.cost)
    raise AssertionError("on demand is always up")


def mixed(hull: Sequence[Point], per_segment: int = 40) -> tuple[Point, ...]:
    """Points on the edge between the corners: straight lines here are curved on a logarithmic axis.

    They lie close together where little unavailability is left, where such an axis has most of its length.
    """
    if not hull:
        return ()
    path = [hull[0]]
    for left, right in pairwise(hull):
        for step in range(1, per_segment + 1):
            rest = (1 - step / per_segment) ** 3
            path.append(
                Point(
                    right.cost + rest * (left.cost - right.cost), right.down + rest * (left.down - right.down)
                )
            )
    return tuple(path)


def _turns_left(a: Point, b: Point, c: Point) -> bool:
    return (b.cost - a.cost) * (c.down - a.down) - (b.down - a.down) * (c.cost - a.cost) > 0
