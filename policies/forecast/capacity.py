"""How many requests per second one replica carries within the SLO, learned from the minutes of the service itself.

Each minute shows at which load per ready replica which share of its requests was late. Loads are kept in bins a tenth apart,
with the requests and the late ones of each; old ones fade with a half-life of two days of traffic. The share of late requests
does not fall with the load, so it is smoothed by isotonic regression (pool adjacent violators). The capacity lies between the
highest load at which requests are in time and the lowest at which too many are not. While no load was too high, it is a tenth
above the highest that was tried: a fleet that meets its SLO is tried with more load per replica, step by step, and the error
budget pays for the step that is too far.

PreServe takes the largest load of a window without any violation, which one lucky window raises for good. Nothing is extrapolated
from light load either: the mean time per token at a third of the load underestimates that at the knee by half and more.

A fleet of several kinds (accelerators, versions) shares its load by what each is thought to carry, and a minute teaches each of them
its share. A new version starts from the newest known one on the same accelerator.

Memory: {kind: {"c": what it starts from, "bins": {bin: [requests, late]}}}, at most MOST_KINDS of them, MOST_BINS bins each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from policies.goals import Goal
from policies.model import Json, Offer, Replica, ReplicaState

STEP = 1.1  # from one bin to the next
LEAST_REQUESTS = 60.0  # that a bin needs to be believed
LEAST_LATE_SHARE = 0.01  # shares below this are no sign of too much load
FADE = 0.5 ** (1 / 2880)  # per minute of traffic
MOST_BINS = 20
MOST_KINDS = 4
FORGOTTEN = 0.5  # requests
MOST_ABOVE_START = 8.0  # that a capacity may exceed what it started from

#: Requests per second of an accelerator before anything is known: about a terabyte per second of its memory's bandwidth each,
#: at which an engine with an 8B model writes several short responses a second.
PRIOR_QPS: Mapping[str, float] = {
    "T4": 0.3,
    "L4": 0.3,
    "A10": 0.6,
    "A10G": 0.6,
    "L40": 0.9,
    "L40S": 0.9,
    "V100": 0.9,
    "A100": 1.6,
    "A100-80GB": 2.0,
    "H100": 3.4,
    "H200": 4.8,
    "B200": 8.0,
}
UNKNOWN_QPS = 1.0


class Estimate(NamedTuple):
    """What one replica carries; between `low`, which was in time, and `high`, which was not (None: no load was too high yet)."""

    qps: float
    low: float
    high: float | None


def kind_of(offer: Offer, version: int, goal: Goal) -> str:
    """Return by what a replica's capacity is known: ``L4:1@3``. Versions with equal replicas are one."""
    same = goal.same_replicas | {goal.version}
    of = min(same) if version in same else version
    return f"{offer.accelerator or 'cpu'}:{offer.accelerator_count:g}@{of}"


def prior(offer: Offer) -> float:
    return PRIOR_QPS.get(offer.accelerator or "", UNKNOWN_QPS) * max(1.0, offer.accelerator_count)


def capacity(memory: Json, kind: str, start: float, attainment: float) -> Estimate:
    """Return the estimate of a kind in the memory, which starts from `start` if nothing is known of it or of an earlier version."""
    known = memory.get(kind)
    if known is None:
        before = _before(memory, kind)
        return Estimate(start, 0.0, None) if before is None else _estimate(memory[before], attainment)
    return _estimate(known, attainment)


def learn(
    memory: Json, fleet: Iterable[tuple[str, float]], rate: float, late_share: float, attainment: float
) -> dict[str, Any]:
    """Return the memory after one minute of `rate` requests per second on a ready fleet of (kind, its prior) per replica."""
    replicas = list(fleet)
    counts, priors = Counter(kind for kind, _ in replicas), dict(replicas)
    if not counts or rate <= 0.0:
        return dict(memory)
    each = {kind: capacity(memory, kind, priors[kind], attainment).qps for kind in counts}
    total = sum(each[kind] * count for kind, count in counts.items())
    after = dict(memory)
    for kind, count in counts.items():
        load = rate * each[kind] / total
        requests = 60.0 * load * count
        known = after.pop(kind, None) or {"c": _rounded(each[kind]), "bins": {}}
        bins = {
            key: [_rounded(FADE * asked), _rounded(FADE * late)]
            for key, (asked, late) in known["bins"].items()
            if asked > FORGOTTEN
        }
        key = str(_bin(load))
        asked, late = bins.get(key, (0.0, 0.0))
        bins[key] = [_rounded(asked + requests), _rounded(late + late_share * requests)]
        for lowest in sorted(bins, key=int)[: max(0, len(bins) - MOST_BINS)]:
            del bins[lowest]
        after[kind] = {"c": known["c"], "bins": bins}  # the kinds taught last are last
    for oldest in list(after)[: max(0, len(after) - MOST_KINDS)]:
        del after[oldest]
    return after


def ready_kinds(replicas: Iterable[Replica], goal: Goal) -> list[tuple[str, float]]:
    """Return (kind, prior) of each replica that is ready."""
    return [
        (kind_of(one.offer, one.version, goal), prior(one.offer))
        for one in replicas
        if one.state is ReplicaState.READY
    ]


def _before(memory: Json, kind: str) -> str | None:
    """Return the newest known version on the same accelerator."""
    accelerator = kind.rpartition("@")[0]
    known = [one for one in memory if one.rpartition("@")[0] == accelerator]
    return max(known, key=lambda one: int(one.rpartition("@")[2]), default=None)


def _estimate(known: Json, attainment: float) -> Estimate:
    start = float(known["c"])
    allowed = max(1.0 - attainment, LEAST_LATE_SHARE)
    good, bad = 0.0, None
    for low, high, share in _isotonic(known["bins"]):
        if share > allowed:
            bad = low
            break
        good = high
    if bad is None:
        return Estimate(min(max(start, good * STEP), MOST_ABOVE_START * start), good, None)
    # Below all bins that are known nothing was tried: the load has to be halved until requests are in time.
    return Estimate(math.sqrt(good * bad) if good else bad / 2.0, good, bad)


def _isotonic(bins: Mapping[str, tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Return (lowest load, highest load, share of late requests) of pooled bins, the share never falling."""
    pools: list[list[float]] = []  # low, high, requests, late
    for key in sorted(bins, key=int):
        asked, late = bins[key]
        pools.append([STEP ** int(key), STEP ** (int(key) + 1), asked, late])
        while len(pools) > 1 and (
            pools[-2][3] * pools[-1][2] > pools[-1][3] * pools[-2][2] or pools[-2][2] < LEAST_REQUESTS
        ):
            _, high, asked, late = pools.pop()
            pools[-1][1] = high
            pools[-1][2] += asked
            pools[-1][3] += late
    return [(low, high, late / asked) for low, high, asked, late in pools if asked >= LEAST_REQUESTS]


def _bin(load: float) -> int:
    return math.floor(math.log(load) / math.log(STEP))


def _rounded(value: float) -> float:
    """Four significant digits: memory is written every minute."""
    return float(f"{value:.4g}")
