"""The queue model by which `serve simulate` judges an autoscaler: which requests a fleet serves within the SLO.

Requests arrive in steps of 20 s, gamma-Poisson with an index of dispersion of 2 around the recorded rate: real traffic
varies more than a Poisson process, and a recording in bins of ten minutes has lost that. Between the middles of two bins the
rate changes along a straight line; a forecast may gain a little from that, since real traffic does not announce its slope so
clearly. A replica carries its capacity within the SLO, and 1.25 times as much at most; the rest waits for the next step. A
request is late if it waits for more than 2 s, and otherwise with a probability that rises from 0 at the capacity to 1 at 1.25
times the capacity. While no replica is ready, all requests are late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from skyserve_cli.sim.arrivals import Arrivals, TokenMeans

STEP_S = 20.0
DISPERSION = 2.0
MOST = 1.25  # of its capacity a replica serves, late
LONGEST_WAIT_S = 2.0

EMPTY = 0.05  # of the mean: a bin with less is a hole if both sides of it are busy
BUSY = 0.25
LONGEST_HOLE_S = 6 * 3600.0


def drawn(arrivals: Arrivals, length_s: float, seed: int, step_s: float = STEP_S) -> tuple[int, ...]:
    """Return how many requests arrive in each step of `step_s` within `length_s`."""
    at_s = np.asarray(arrivals.at_s)
    rates = np.diff(arrivals.counts) / np.diff(at_s)
    middles = np.arange(math.ceil(length_s / step_s)) * step_s + step_s / 2
    means = step_s * np.interp(middles % at_s[-1], (at_s[1:] + at_s[:-1]) / 2, rates)
    # RandomState, because NumPy promises that its stream stays as it is.
    rng = np.random.RandomState(seed)
    return tuple(rng.poisson(rng.gamma(means / (DISPERSION - 1.0), DISPERSION - 1.0)).tolist())


def bridged(arrivals: Arrivals) -> tuple[Arrivals, int]:
    """Return the recording with its holes bridged by a straight line, and how many bins that were.

    A hole is at most 6 h without requests (below 5 % of the mean) between two bins that are busy (a quarter of the mean):
    there the recording failed or the recorded service did, which is no evidence about demand. A slow night is not a hole.
    """
    at_s = np.asarray(arrivals.at_s)
    rates = np.diff(arrivals.counts) / np.diff(at_s)
    empty, busy = EMPTY * rates.mean(), BUSY * rates.mean()
    bridges, sound = 0, np.ones(len(rates), dtype=np.bool_)
    start = 0
    while start < len(rates):
        end = start
        while end < len(rates) and rates[end] < empty:
            end += 1
        inside = 0 < start < end < len(rates) and at_s[end] - at_s[start] <= LONGEST_HOLE_S
        if inside and min(rates[start - 1], rates[end]) >= busy:
            rates[start:end] = np.linspace(rates[start - 1], rates[end], end - start + 2)[1:-1]
            bridges += end - start
            sound[start:end] = False
        start = end + 1
    counts = np.concatenate(([0.0], np.cumsum(rates * np.diff(at_s))))
    if not bridges:
        return arrivals, 0
    known = np.flatnonzero(sound)
    tokens = arrivals.tokens and TokenMeans(
        *(
            tuple(np.interp(np.arange(len(sound)), known, np.asarray(each)[known]).tolist())
            for each in arrivals.tokens
        )
    )
    return replace(arrivals, counts=tuple(counts.tolist()), tokens=tokens), bridges


@dataclass(slots=True)
class SloQueue:
    """Requests in front of replicas that carry `capacity_qps` each. `waiting` are those left from the steps before."""

    capacity_qps: float
    waiting: float = 0.0

    def step(self, arrived: float, ready: float, length_s: float = STEP_S) -> float:
        """Add the `arrived` requests of a step with `ready` replicas; return how many of them are in time."""
        if ready <= 0:
            self.waiting += arrived
            return 0.0
        within, most = self.capacity_qps * ready, MOST * self.capacity_qps * ready
        before_s = self.waiting / most
        served = min(self.waiting + arrived, most * length_s)
        self.waiting = max(0.0, self.waiting + arrived - served)
        prompt = _share_below(before_s, self.waiting / most, LONGEST_WAIT_S)
        crowded = min(1.0, max(0.0, (served / length_s / within - 1.0) / (MOST - 1.0)))
        return arrived * prompt * (1.0 - crowded)


def _share_below(first: float, last: float, limit: float) -> float:
    """Return the share of a straight line from `first` to `last` that does not exceed `limit`."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 1.0
    return 0.0 if low >= limit else (limit - low) / (high - low)
