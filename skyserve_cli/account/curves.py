"""Series to draw, from the steps of a run: as many points as a picture has room for, and no area lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyserve_cli.account.runs import ON_DEMAND, SPOT, Run

Array = NDArray[np.float64]

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The part of a run that counts, in equal slices. `edges_s` are their edges, from 0 on.

    `alive` are replicas by zone and market, the mean over each slice, so that the area below a curve is what was
    paid for. `wanted` is the target. `short` is the part of each slice in which fewer than the target were ready.
    """

    edges_s: Array
    alive: dict[tuple[str, str], Array]
    wanted: Array
    short: Array


def timeline(run: Run, slices: int, *, tick_s: float, begin_s: float) -> Timeline:
    """Return a run in at most `slices` slices, and no more than it has ticks, from `begin_s` on."""
    edges = _edges(run, min(slices, round(run.days * DAY_S / tick_s)), begin_s)
    at = np.array([step.at_s for step in run.steps])
    groups = sorted({(zone, market) for step in run.steps for zone, market, _, _ in step.counts})
    alive = {group: np.zeros(len(at)) for group in groups}
    ready = np.zeros(len(at))
    for index, step in enumerate(run.steps):
        for zone, market, alive_count, ready_count in step.counts:
            alive[zone, market][index] = alive_count
            ready[index] += ready_count
    wanted_at, wanted = _wanted(run)
    # Both change on their own; a shortfall changes when either does.
    both = np.union1d(at, wanted_at)
    short = (_held(at, ready, both) < _held(wanted_at, wanted, both)).astype(np.float64)
    return Timeline(
        edges_s=edges - begin_s,
        alive={group: _means(at, values, edges) for group, values in alive.items()},
        wanted=_means(wanted_at, wanted, edges),
        short=_means(both, short, edges),
    )


def spend(run: Run, price_ratio: float, points: int, *, begin_s: float) -> tuple[Array, Array]:
    """Return what was paid until when: (seconds since `begin_s`, USD).

    An on-demand replica costs `price_ratio` times a spot replica; the last value is exactly `run.usd`.
    """
    at = np.array([step.at_s for step in run.steps])
    weight = {SPOT: 1.0, ON_DEMAND: price_ratio}
    rate = np.array([float(sum(weight[m] * n for _, m, n, _ in step.counts)) for step in run.steps])
    return _growing(at, rate, _edges(run, points, begin_s), run.usd)


def spend_on_demand(run: Run, points: int, *, begin_s: float) -> tuple[Array, Array]:
    """Return what the target would have cost on demand until when: (seconds since `begin_s`, USD)."""
    return _growing(*_wanted(run), _edges(run, points, begin_s), run.usd_on_demand)


def _edges(run: Run, slices: int, begin_s: float) -> Array:
    return begin_s + np.linspace(0.0, run.days * DAY_S, max(1, slices) + 1)


def _growing(at: Array, rate: Array, edges: Array, total: float) -> tuple[Array, Array]:
    """Return the area below `rate` since the first edge, scaled to end at `total`."""
    area = _integral(at, rate, edges)
    grown = area - area[0]
    return edges - edges[0], grown * (total / grown[-1]) if grown[-1] > 0 else grown


def _wanted(run: Run) -> tuple[Array, Array]:
    points: Sequence[tuple[float, int]] = run.wanted or ((0.0, run.n_target),)
    return np.array([at for at, _ in points]), np.array([float(count) for _, count in points])


def _held(at: Array, values: Array, when: Array) -> Array:
    """Return a step function's values at some instants; 0 before its first step."""
    if not len(at):
        return np.zeros(len(when))
    index = np.searchsorted(at, when, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], 0.0)


def _integral(at: Array, values: Array, edges: Array) -> Array:
    """Return the area below a step function from 0 to each edge.

    Between steps it grows evenly, so that interpolation between the steps is exact.
    """
    if not len(at):
        return np.zeros(len(edges))
    corners = np.append(at, max(edges[-1], at[-1]))
    area = np.concatenate(([0.0], np.cumsum(values * np.diff(corners))))
    return np.interp(edges, corners, area)


def _means(at: Array, values: Array, edges: Array) -> Array:
    return np.diff(_integral(at, values, edges)) / np.diff(edges)
