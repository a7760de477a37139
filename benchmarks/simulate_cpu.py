"""CPU time of the simulator: a day of 4 replicas, and 45 days of 9 zones.

    python -m benchmarks.simulate_cpu [--policies spothedge,risk_hedge,...] [--trace FOLDER ...]

Without `--trace` the markets are drawn from a seed: 3 volatile zones for a day (the busiest of 14), 9 zones for 45 days.
Reports process CPU time, medians over `--runs` for the day.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.synthetic import RECIPES, generate
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import Trace

DAY_S = 86_400.0


def busiest_day(trace: Trace) -> Trace:
    return max(trace.windows(DAY_S), key=lambda day: len(day.changes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", default="spothedge,spothedge_literal,risk_hedge,round_robin,even_spread"
    )
    parser.add_argument("--trace", nargs="*", default=[])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    day = busiest_day(traces.named("synthetic-volatile"))
    recipe = RECIPES["synthetic-wide"]
    long = [generate(recipe.market, recipe.seed, 45.0)]
    long = [traces.load(traces.find(folder)) for folder in args.trace] or long
    for policy in args.policies.split(","):
        runs = [simulate(Setting(day, 4, 183.0), Job(policy, 1)) for _ in range(args.runs)]
        print(
            f"{policy:18} one day: {statistics.median(run.cpu_s for run in runs):6.2f} s CPU, "
            f"{runs[0].ticks} of {day.n_ticks} ticks, {len({run.digest for run in runs})} event log"
        )
        for trace in long:
            run = simulate(Setting(trace, 4, 183.0), Job(policy, 1))
            print(
                f"{policy:18} {trace.name}, {trace.length_s / DAY_S:.1f} days of {len(trace.zones)} zones: "
                f"{run.cpu_s:6.1f} s CPU, {run.cpu_s / run.days:5.2f} s a day, {run.ticks} of {trace.n_ticks} ticks"
            )


if __name__ == "__main__":
    main()
