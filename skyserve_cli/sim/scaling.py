"""One autoscaler over recorded requests: whom the fleet served in time, and what it cost against an ideal one.

The scalers are those of the controller (`policies.registry.scaler_for`); the fleet is a plain one, on demand: a replica is
ready one cold start after its launch, and gone when the scaler wants fewer. They decide once a minute, about what the minutes
before have shown. `slo_queue` defines which requests were in time. Autoscalers are thus judged by what the traffic needed, never
by what they wanted themselves.

The first part of a recording is history: the autoscalers know its demand, and nothing is judged. Hours are those from launch
to termination; the ideal fleet has in every step of 20 s the replicas that its requests need, at once.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from policies.forecast.demand import Floats
from policies.goals import Goal, ScalingGoal, SloGoal
from policies.history import History, Load
from policies.model import Json, Observation
from policies.registry import scaler_for
from policies.scaling.base import Outlook, Scaler
from skyserve_cli.sim.slo_queue import STEP_S, SloQueue
from skyserve_cli.sim.token_steps import RUNNING, TokenSteps

MINUTE_S = 60.0
STEPS = round(MINUTE_S / STEP_S)  # in a minute
FIRST_SIZE_SHARE = 0.9  # of their capacity the replicas carry of the first judged minute
SEARCHED = 24  # rounds of bisection for the oracle's size

#: Names for `--autoscaler`.
AUTOSCALERS = {
    "reactive": "replicas for the last minute's requests, after the file's delays; reactive:0.9 sets another target",
    "predictive": "replicas for the demand of one cold start later, with headroom steered by the SLO's error budget",
    "predictive_blind": "the same without the forecast",
    "predictive_requests": "the forecasting one as it would be if the load balancers counted requests and no tokens",
    "static": "the smallest fleet of one size that keeps the SLO, by one who knows all requests beforehand",
    "oracle": "the smallest fleet of one who knows all requests beforehand, for the same SLO",
}


@dataclass(frozen=True, slots=True)
class ScalingTrial:
    """What all autoscalers of a comparison share.

    `counts` are the requests of each step; those of the first `known_min` minutes are history. The goals are the scalers'
    own. With `tokens` a replica carries their work, `capacity_qps` requests of the usual size per second. `response_weight` is what
    predictive scalers take a response token for before they have learned it.
    """

    counts: tuple[int, ...]
    known_min: int
    capacity_qps: float
    cold_start_s: float
    attainment: float
    tokens: TokenSteps | None = None
    response_weight: float | None = None

    def work(self) -> Floats:
        """Return what each step asks of the replicas, in requests of the usual size."""
        counts = np.asarray(self.counts, dtype=np.float64)
        return counts if self.tokens is None else counts * self.tokens.size

    def by_minute(self, steps: Floats) -> Floats:
        """Return the sums of whole minutes."""
        minutes = len(self.counts) // STEPS
        found: Floats = steps[: minutes * STEPS].reshape(minutes, STEPS).sum(axis=1)
        return found


class Minutes(NamedTuple):
    """The judged minutes from `first` on, one number for each: requests, those in time, replicas ready at its end."""

    first: int
    asked: array[float]
    met: array[float]
    ready: array[float]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What became of the requests.

    `attainment` is the share in time, `hours` and `ideal_hours` are replica hours. `sizes` are (minute, replicas wanted),
    where they changed.
    """

    autoscaler: str
    attainment: float
    hours: float
    ideal_hours: float
    moves_per_day: float
    turns_per_day: float
    requests: int
    days: float
    cpu_s: float
    sizes: tuple[tuple[int, int], ...]
    minutes: Minutes

    @property
    def hours_over_ideal(self) -> float:
        return self.hours / self.ideal_hours if self.ideal_hours else math.inf


@dataclass(slots=True)
class SimulatedFleet:
    """Replicas by the second they were launched at, oldest first."""

    trial: ScalingTrial
    launched_s: list[float]
    queue: SloQueue
    work: Sequence[float]
    hours: float = 0.0
    ideal_hours: float = 0.0
    met: float = 0.0
    asked: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)
    by_minute: list[tuple[int, float, int]] = field(default_factory=list)

    def minute(self, number: int, size: int) -> tuple[int, float]:
        """Go through one minute with `size` replicas wanted; return its requests, and those in time."""
        if not self.sizes or self.sizes[-1][1] != size:
            self.sizes.append((number, size))
        now_s = number * MINUTE_S
        del self.launched_s[size:]
        self.launched_s += [now_s] * (size - len(self.launched_s))
        asked, met, ready = 0, 0.0, 0
        counts, works = self.trial.counts, self.work
        for step in range(STEPS):
            count, work = counts[number * STEPS + step], works[number * STEPS + step]
            at_s = now_s + step * STEP_S
            ready = sum(launched + self.trial.cold_start_s <= at_s for launched in self.launched_s)
            in_time = self.queue.step(work, ready)
            met += count * in_time / work if work else 0.0
            asked += count
            self.ideal_hours += math.ceil(work / STEP_S / self.trial.capacity_qps) * STEP_S / 3600.0
        self.hours += len(self.launched_s) * MINUTE_S / 3600.0
        self.asked += asked
        self.met += met
        self.by_minute.append((asked, met, ready))
        return asked, met

    def evaluation(self, autoscaler: str, minutes: int, began: float, turn_min: float) -> Evaluation:
        days = minutes / 1440.0
        steps = [(at, size - before) for (_, before), (at, size) in pairwise(self.sizes)]
        turns = sum(a * b < 0 and then - at < turn_min for (at, a), (then, b) in pairwise(steps))
        return Evaluation(
            autoscaler=autoscaler,
            attainment=self.met / self.asked if self.asked else 1.0,
            hours=self.hours,
            ideal_hours=self.ideal_hours,
            moves_per_day=len(steps) / days,
            turns_per_day=turns / days,
            requests=self.asked,
            days=days,
            cpu_s=time.process_time() - began,
            sizes=tuple(self.sizes),
            minutes=Minutes(
                self.trial.known_min,
                *(array("d", [one[column] for one in self.by_minute]) for column in range(3)),
            ),
        )


def goal_for(autoscaler: str, reactive: ScalingGoal, trial: ScalingTrial) -> ScalingGoal:
    """Return the goal of an autoscaler by its name, with the limits of the `reactive` one.

    `reactive:0.9` has that share of the capacity as its target.
    """
    kind, _, share = autoscaler.partition(":")
    if share:
        return replace(reactive, target_qps_per_replica=float(share) * trial.capacity_qps)
    if not kind.startswith("predictive"):
        return reactive
    slo = SloGoal(trial.attainment, trial.capacity_qps, trial.cold_start_s, kind != "predictive_blind")
    return replace(reactive, slo=replace(slo, response_weight=trial.response_weight))


def run(trial: ScalingTrial, autoscaler: str, goal: ScalingGoal) -> Evaluation:
    """Put one autoscaler through the trial. `goal` is that of `goal_for`."""
    if autoscaler == "predictive_requests" and trial.tokens is not None:
        trial = replace(trial, tokens=trial.tokens._replace(reported=False))
    match autoscaler:
        case "oracle":
            return oracle(trial, goal)
        case "static":
            return static(trial, goal)
        case _:
            return evaluate(trial, autoscaler, goal)


class Minute(NamedTuple):
    """What a scaler saw when it decided in minute `number`, what it wanted and expected, and how many requests were in time then."""

    number: int
    queued: int
    wanted: int
    requests: int
    met: int
    outlook: Outlook | None = None


def evaluate(trial: ScalingTrial, autoscaler: str, goal: ScalingGoal) -> Evaluation:
    """Run the scaler that `goal` requests through the trial; `autoscaler` is only its name."""
    began = time.process_time()
    fleet, memory = first_fleet(trial, goal)
    for _ in decisions(trial, goal, fleet, memory):
        pass
    minutes = len(trial.counts) // STEPS - trial.known_min
    return fleet.evaluation(autoscaler, minutes, began, trial.cold_start_s / MINUTE_S)


def decisions(
    trial: ScalingTrial, goal: ScalingGoal, fleet: SimulatedFleet, memory: Json
) -> Iterator[Minute]:
    """Yield what the scaler does minute by minute, as the fleet goes through it."""
    scaler: Scaler = scaler_for(goal)
    counts = trial.by_minute(np.asarray(trial.counts, dtype=np.float64))
    work = trial.by_minute(trial.work())
    asked = array("d", counts)
    met = array("d", asked)  # demand known beforehand was in time
    seen = memoryview(asked).toreadonly()
    served = memoryview(met)
    tokens = _token_minutes(trial)
    for number in range(trial.known_min, len(asked)):
        history = History(0, seen[:number], served[:number], None, *(one[:number] for one in tokens))
        size = work[number - 1] / asked[number - 1] if number and asked[number - 1] else 1.0
        queued = round(fleet.queue.waiting / size)
        running = RUNNING * work[number - 1] / (MINUTE_S * trial.capacity_qps) if tokens else 0.0
        load = Load(
            MINUTE_S,
            round(asked[number - 1]) if number else 0,
            queued=queued,
            ongoing=queued + running,
            known=number > 0,
        )
        observation = Observation(number * MINUTE_S, Goal(1, goal), (), (), load, history=history)
        found = scaler.target(observation, memory)
        memory = found.memory
        count, in_time = fleet.minute(number, found.wanted)
        met[number] = count - round(count - in_time)  # a load balancer counts whole requests
        yield Minute(number, queued, found.wanted, count, round(met[number]), found.outlook)


def _token_minutes(trial: ScalingTrial) -> tuple[memoryview, ...]:
    """Return the tokens of prompts and of responses of each minute; empty where they are not known."""
    if trial.tokens is None or not trial.tokens.reported:
        return ()
    counts = np.asarray(trial.counts, dtype=np.float64)
    return tuple(
        memoryview(array("d", trial.by_minute(counts * each).round())).toreadonly()
        for each in trial.tokens[:2]
    )


def oracle(trial: ScalingTrial, goal: ScalingGoal) -> Evaluation:
    """Return the fleet of one who knows every request: the least headroom by which the SLO is met."""
    began = time.process_time()
    low, high, found = 0.8, 3.0, None
    for _ in range(SEARCHED):
        headroom = (low + high) / 2
        tried = _with(trial, goal, headroom, began)
        if tried.attainment >= trial.attainment:
            found, high = tried, headroom
        else:
            low = headroom
        if found is not None and high - low < 0.002:
            break
    return found or _with(trial, goal, high, began)


def static(trial: ScalingTrial, goal: ScalingGoal) -> Evaluation:
    """Return the smallest fleet of one size that meets the SLO; the largest allowed, if none does."""
    began = time.process_time()
    sizes = range(max(1, goal.min_replicas), goal.max_replicas + 1)

    def tried(size: int) -> Evaluation:
        fleet, _ = first_fleet(trial, goal)
        fleet.launched_s = [-math.inf] * size
        minutes = range(trial.known_min, len(trial.counts) // STEPS)
        for number in minutes:
            fleet.minute(number, size)
        return fleet.evaluation("static", len(minutes), began, trial.cold_start_s / MINUTE_S)

    most = min(
        len(sizes), math.ceil(2.0 * max(trial.by_minute(trial.work())) / MINUTE_S / trial.capacity_qps) + 1
    )
    enough = bisect_left(sizes[:most], True, key=lambda size: tried(size).attainment >= trial.attainment)
    return tried(sizes[min(enough, most - 1)])


def _with(trial: ScalingTrial, goal: ScalingGoal, headroom: float, began: float) -> Evaluation:
    """Return the trial with the replicas that each two minutes need, `headroom` times, ready when they begin."""
    minutes = len(trial.counts) // STEPS
    asked = trial.by_minute(trial.work()) / MINUTE_S
    cold_start = math.ceil(trial.cold_start_s / MINUTE_S)
    busiest = np.maximum(asked, np.append(asked[1:], asked[-1]))
    needed = np.clip(
        np.ceil(headroom * busiest / trial.capacity_qps - 1e-9), goal.min_replicas, goal.max_replicas
    )
    # Wanted is the need until a launch of now would be ready.
    padded = np.append(needed, np.full(cold_start, needed[-1]))
    wanted = np.lib.stride_tricks.sliding_window_view(padded, cold_start + 1).max(axis=1).astype(int)
    fleet, _ = first_fleet(trial, goal)
    fleet.launched_s = [-math.inf] * int(wanted[trial.known_min])
    for number in range(trial.known_min, minutes):
        fleet.minute(number, int(wanted[number]))
    return fleet.evaluation("oracle", minutes - trial.known_min, began, trial.cold_start_s / MINUTE_S)


def first_fleet(trial: ScalingTrial, goal: ScalingGoal) -> tuple[SimulatedFleet, Json]:
    """Return all begin with the same fleet: ready, and as large as the last known minute needs."""
    start = trial.known_min * STEPS
    work: list[float] = trial.work().tolist()
    rate = sum(work[max(0, start - STEPS) : start]) / MINUTE_S
    size = math.ceil(rate / (FIRST_SIZE_SHARE * trial.capacity_qps))
    size = min(max(size, goal.min_replicas), goal.max_replicas)
    fleet = SimulatedFleet(trial, [-math.inf] * size, SloQueue(trial.capacity_qps), work)
    return fleet, {"target": size}
