"""The predictive autoscaler against the reactive one at its best target in hindsight, at equal attainment.

    python -m benchmarks.autoscalers TRACE... [--cold-start 300,600] [--attainment 0.995] [--mean 8] [--jobs 1]
    python -m benchmarks.autoscalers --work TRACE... [--mean 3,8,30] [--response-weight 0.5,1,2]

TRACE is a recording that `serve simulate --requests` takes; its first half is history. The reactive autoscaler is run with every
target from 0.60 to 1.04 of the capacity, with two pairs of delays. What it costs at the attainment of the predictive one is
interpolated between the two targets nearest to that; a target beyond the sweep leaves a dash.

Columns: share in time and replica hours over the ideal of `predictive` and of the same without the forecast; then, for each pair of
delays, by how many percent `predictive` and `blind` are cheaper than the reactive autoscaler at their own attainment (negative: dearer);
last, by how many percent the forecast makes the hours less at the attainment of `blind`, from the two runs with the attainment asked
and half of the rest to 100 %. Where a recording has tokens, replicas carry their work.

With `--work` the columns are share in time, replica hours over the ideal and changes of size a day: of `predictive`, of the same that
counts requests and sees no tokens, and of the oracle. A response token weighs `--response-weight` prompt tokens in the replicas; the
autoscaler begins with 1 and has to learn it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from policies.forecast.work import RESPONSE_WEIGHT
from policies.goals import ScalingGoal
from skyserve_cli.sim.arrivals import load_arrivals
from skyserve_cli.sim.scaling import Evaluation, ScalingTrial, goal_for, run
from skyserve_cli.sim.slo_queue import bridged, drawn
from skyserve_cli.sim.token_steps import token_steps, work_share

CAPACITY_QPS = 2.0
TARGETS = tuple(round(0.60 + 0.02 * step, 2) for step in range(23))
DELAYS = ((300.0, 1200.0), (20.0, 600.0))
GOAL = ScalingGoal(1, 1000)

Point = tuple[float, float]  # share in time, hours over ideal


def trial_of(
    path: Path,
    cold_start_s: float,
    attainment: float,
    mean: float,
    seed: int,
    weight: float = RESPONSE_WEIGHT,
) -> ScalingTrial:
    """Return the recording scaled so that `mean` replicas carry the mean of its second half."""
    arrivals, _ = bridged(load_arrivals(path))
    half_s = arrivals.length_s / 2
    came = arrivals.count(half_s, arrivals.length_s) * work_share(arrivals, arrivals.length_s, half_s, weight)
    scaled = arrivals.scaled(mean * CAPACITY_QPS * half_s / came)
    counts = drawn(scaled, arrivals.length_s, seed)
    tokens = token_steps(scaled, arrivals.length_s, half_s, weight)
    return ScalingTrial(counts, int(half_s // 60), CAPACITY_QPS, cold_start_s, attainment, tokens)


def at(curve: Sequence[Point], attainment: float) -> float | None:
    """Return the hours of a curve at an attainment: a straight line between its neighbours, of the cheapest on either side."""
    above = [point for point in curve if point[0] >= attainment]
    below = [point for point in curve if point[0] < attainment]
    if not above or not below:
        return None
    high = min(above, key=lambda point: point[1])
    low = max(below, key=lambda point: point[0])
    if high[0] == low[0]:
        return high[1]
    return low[1] + (high[1] - low[1]) * (attainment - low[0]) / (high[0] - low[0])


def _evaluate(job: tuple[ScalingTrial, str, ScalingGoal]) -> Point:
    trial, name, goal = job
    found: Evaluation = run(trial, name, goal_for(name, goal, trial))
    return found.attainment, found.hours_over_ideal


def cell(path: Path, cold_start_s: float, args: argparse.Namespace, pool: ProcessPoolExecutor) -> str:
    make = partial(trial_of, path, cold_start_s, mean=float(args.mean), seed=args.seed)
    asked = make(attainment=args.attainment)
    strict = make(attainment=1.0 - (1.0 - args.attainment) / 2.0)
    jobs = [(asked, "predictive", GOAL), (asked, "predictive_blind", GOAL), (strict, "predictive", GOAL)]
    for up_s, down_s in DELAYS:
        goal = replace(GOAL, upscale_delay_s=up_s, downscale_delay_s=down_s)
        jobs += [(asked, f"reactive:{target}", goal) for target in TARGETS]
    found = list(pool.map(_evaluate, jobs))
    ours, blind, tighter, *rest = found
    cells = [f"{path.name:28.28} {cold_start_s:4.0f}"]
    cells += [f"{100 * share:6.2f} {hours:6.3f}" for share, hours in (ours, blind)]
    for number in range(len(DELAYS)):
        curve = rest[number * len(TARGETS) : (number + 1) * len(TARGETS)]
        cells.append(" ".join(_cheaper(at(curve, share), hours) for share, hours in (ours, blind)))
    cells.append(_cheaper(blind[1], _line(ours, tighter, blind[0])))
    return " | ".join(cells)


def work_row(path: Path, cold_start_s: float, mean: float, weight: float, args: argparse.Namespace) -> str:
    trial = trial_of(path, cold_start_s, args.attainment, mean, args.seed, weight)
    cells = [f"{path.name:28.28} {cold_start_s:4.0f} {mean:4.0f} {weight:5.2f}"]
    for name in ("predictive", "predictive_requests", "oracle"):
        if name == "predictive_requests" and trial.tokens is None:
            cells.append(f"{'no tokens':>18}")
            continue
        found = run(trial, name, goal_for(name, GOAL, trial))
        cells.append(
            f"{100 * found.attainment:6.2f} {found.hours_over_ideal:6.3f} {found.moves_per_day:4.0f}"
        )
    return " | ".join(cells)


def _line(one: Point, other: Point, attainment: float) -> float:
    """Return the hours at an attainment on the straight line through two points."""
    if one[0] == other[0]:
        return one[1]
    return one[1] + (other[1] - one[1]) * (attainment - one[0]) / (other[0] - one[0])


def _cheaper(than: float | None, hours: float) -> str:
    return f"{'-':>6}" if than is None else f"{100 * (1.0 - hours / than):+6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cold-start", default="300,600")
    parser.add_argument("--attainment", type=float, default=0.995)
    parser.add_argument("--mean", default="8", help="of replicas; several with --work")
    parser.add_argument("--work", action="store_true", help="what tokens are worth")
    parser.add_argument("--response-weight", default="1", help="with --work, several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.work:
        print(f"{'trace':28} cold mean weight | predictive         | counting requests  | oracle")
        lists = (args.cold_start, args.mean, args.response_weight)
        numbers = product(*([float(one) for one in text.split(",")] for text in lists))
        for path, (cold_start_s, mean, weight) in product(args.traces, numbers):
            print(work_row(path, cold_start_s, mean, weight, args), flush=True)
        return
    delays = " | ".join(f"than {up:.0f}/{down:.0f} s " for up, down in DELAYS)
    print(f"{'trace':28} cold | predictive    | blind         | {delays} | forecast")
    with ProcessPoolExecutor(args.jobs) as pool:
        for path in args.traces:
            for cold_start in args.cold_start.split(","):
                print(cell(path, float(cold_start), args, pool), flush=True)


if __name__ == "__main__":
    main()
