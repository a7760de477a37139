"""The autoscaler over recorded requests: how often it moves, how long it is short, and what that costs.

    python benchmarks/scaling_burst.py TRACE... [--days 7] [--mean 4] [--start 180] [--seed 1]

TRACE is a recording that `serve simulate --requests` takes, or a rate like `poisson:8`. It is scaled so that
`--mean` replicas carry its mean; counts in bins of more than a minute get the jitter back that they have lost (each
ten seconds a draw from a normal law with the variance of a Poisson process).

Two rules, both with a window of 60 s and the same delays:

    ours        policies.scaling.request_rate, a tick every second
    counters    SkyPilot's documented rule, written for this benchmark: every 20 s the candidate is compared with the target;
                after delay/20 such comparisons in a row with the same outcome the target becomes the candidate, and
                one with another outcome starts the count again

Columns: moves of the target per day; `turns` are moves per day against the one before it within the downscale delay;
`short` is the share of time in which fewer replicas were ready than the last minute's rate needs, with `longest` the
longest such spell; `hours` is the time of all replicas against that of an ideal fleet, which always has exactly what
the last minute's rate needs, at once.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from policies.goals import Goal, ScalingGoal
from policies.history import Load
from policies.model import Json, Observation
from policies.scaling.request_rate import RequestRate
from skyserve_cli.sim.arrivals import Arrivals, arrivals_of

WINDOW_S = 60.0
DECISION_S = 20
QPS = 2.0

Rule = Callable[[float, int], int]  # (now, requests in the window) -> target


def ours(goal: ScalingGoal) -> Rule:
    scaler = RequestRate()
    memory: Json = {}

    def target(now: float, requests: int) -> int:
        nonlocal memory
        load = Load(WINDOW_S, requests, known=True)
        size = scaler.target(Observation(now, Goal(1, goal), (), (), load), memory)
        memory = size.memory
        return size.wanted

    return target


def counters(goal: ScalingGoal) -> Rule:
    current, above, below = goal.min_replicas, 0, 0
    ups, downs = int(goal.upscale_delay_s / DECISION_S), int(goal.downscale_delay_s / DECISION_S)

    def target(now: float, requests: int) -> int:
        nonlocal current, above, below
        if now % DECISION_S:
            return current
        candidate = needed(requests, goal)
        above = above + 1 if candidate > current else 0
        below = below + 1 if candidate < current else 0
        if current == 0 or above >= max(1, ups) or below >= max(1, downs):
            current, above, below = candidate, 0, 0
        return current

    return target


RULES: dict[str, Callable[[ScalingGoal], Rule]] = {"ours": ours, "counters": counters}


def needed(requests: int, goal: ScalingGoal) -> int:
    return min(max(math.ceil(requests / WINDOW_S / QPS - 1e-9), goal.min_replicas), goal.max_replicas)


@dataclass
class Outcome:
    """What a rule has done, second by second."""

    moves: list[tuple[int, int]] = field(default_factory=list)  # (second, step)
    short_s: int = 0
    longest_s: int = 0
    replica_s: int = 0
    ideal_s: int = 0

    def turns(self, within_s: float) -> int:
        return sum(a * b < 0 and then - at < within_s for (at, a), (then, b) in pairwise(self.moves))


def play(rule: Rule, arrivals: Arrivals, goal: ScalingGoal, seconds: int, start_s: int) -> Outcome:
    """A fleet that has what was requested `start_s` later, and gives back at once."""
    outcome, ready_at, spell_s = Outcome(), [-start_s] * goal.min_replicas, 0
    before = goal.min_replicas
    for now in range(seconds):
        requests = arrivals.count(max(0.0, now - WINDOW_S), now)
        target = rule(float(now), requests)
        if target != before:
            outcome.moves.append((now, target - before))
            before = target
        ready_at = ready_at[:target] + [now + start_s] * (target - len(ready_at))
        asked = needed(requests, goal)
        spell_s = spell_s + 1 if sum(at <= now for at in ready_at) < asked else 0
        outcome.short_s += spell_s > 0
        outcome.longest_s = max(outcome.longest_s, spell_s)
        outcome.replica_s += len(ready_at)
        outcome.ideal_s += asked
    return outcome


def jittery(arrivals: Arrivals, seed: int, bin_s: float = 10.0) -> Arrivals:
    rng, at_s, counts = random.Random(seed), [0.0], [0.0]
    while at_s[-1] < arrivals.length_s:
        mean = arrivals.rate(at_s[-1]) * bin_s
        at_s.append(at_s[-1] + bin_s)
        counts.append(counts[-1] + max(0, round(rng.gauss(mean, math.sqrt(mean)))))
    return Arrivals(arrivals.name, tuple(at_s), tuple(counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+")
    parser.add_argument(
        "--days", type=float, default=7.0, help="days of a recording at most, and the length of a rate"
    )
    parser.add_argument("--mean", type=float, default=4.0, help="replicas that carry the mean rate")
    parser.add_argument("--start", type=int, default=180, help="seconds until a new replica is ready")
    parser.add_argument("--upscale", type=float, default=300.0)
    parser.add_argument("--downscale", type=float, default=1200.0)
    parser.add_argument("--min", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    goal = ScalingGoal(args.min, 1000, QPS, upscale_delay_s=args.upscale, downscale_delay_s=args.downscale)
    print(f"{'trace':44} {'rule':9} moves/day  turns/day   short  longest s   hours")
    for text in args.traces:
        recorded = arrivals_of(text, seed=args.seed, length_s=args.days * 86400)
        recorded = recorded.scaled(args.mean * QPS / recorded.mean_rate)
        gap_s = recorded.length_s / (len(recorded.at_s) - 1)
        arrivals = jittery(recorded, args.seed) if gap_s > WINDOW_S else recorded
        seconds = int(min(args.days * 86400, arrivals.length_s))
        days = seconds / 86400
        for name, rule in RULES.items():
            done = play(rule(goal), arrivals, goal, seconds, args.start)
            print(
                f"{recorded.name:44.44} {name:9} {len(done.moves) / days:9.1f}  {done.turns(args.downscale) / days:9.1f}"
                f"  {done.short_s / seconds:6.2%}  {done.longest_s:9d}  {done.replica_s / done.ideal_s:6.3f}"
            )


if __name__ == "__main__":
    main()
