"""Is RiskHedge ever dearer than plain on demand? Random markets, sizes, prices and targets, its dearest week of each.

    python -m benchmarks.dearer [--markets 500] [--first 0] [--days 10] [--jobs 1]

A market has one to six zones in up to three regions; it may be calm or lose everything within the hour, its shortages may last
minutes or days, and on demand costs 1.5 to 5 times as much as spot. A service has a fixed size, or another of 1 to 8 replicas every
one to 24 hours on average. A week is any seven days that begin at a multiple of six hours, its cost relative to the
wanted number on demand. RiskHedge advances .25 % of a week, every week, for trials and insurance (`risk_budget.LOAN_H`).
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import NamedTuple

from benchmarks import synthetic
from benchmarks.market_runs import BLOCK_S, DAY_S, HOUR_S, RISK_HEDGE, stretches
from benchmarks.synthetic import Lull, MarketParameters
from policies.goals import ScalingGoal
from skyserve_cli.sim import workers
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import TICK_S
from skyserve_cli.spec.model import ServiceSpec

TARGETS = (0.98, 0.99, 0.995, 0.999)
MOST_SIZE = 8
WEEK = 28  # blocks


class Found(NamedTuple):
    """Costs are relative to the wanted number on demand, `short` is a share of the time."""

    seed: int
    target: float
    usd: float
    dearest_week: float
    short: float


def setting_of(seed: int, days: float) -> tuple[Setting, Job]:
    """Return the market and the service of a seed."""
    rng = random.Random(f"dearer {seed}")
    regions = ("north", "south", "west")[: rng.randint(1, 3)]
    zones = [f"{regions[number % len(regions)]}-1{'abcdef'[number]}" for number in range(rng.randint(1, 6))]
    market = MarketParameters(
        zones=tuple(zones),
        capacity=rng.choice((2, 4, 8, 16)),
        calm=Lull(1.0, 0.7, 10.0 ** rng.uniform(-3.0, 1.0)),
        shortage=Lull(1.3, 1.0, 10.0 ** rng.uniform(-1.5, 1.0)),
        partial=rng.random(),
        same_region=rng.random(),
    )
    trace = synthetic.generate(market, seed, days)
    size, ratio = rng.randint(1, MOST_SIZE), rng.uniform(1.5, 5.0)
    job = Job(RISK_HEDGE, availability_target=rng.choice(TARGETS), seed=seed)
    if rng.random() < 0.5:
        return Setting(trace, size, 183.0, ratio), job
    spec, arrivals = _moving(rng, days, 10.0 ** rng.uniform(0.0, 1.38))
    return Setting(trace, size, 183.0, ratio, arrivals=arrivals, spec=spec), job


def _moving(rng: random.Random, days: float, every_h: float) -> tuple[ServiceSpec, Arrivals]:
    """Return a service that follows its requests without delay, and requests that are just enough for random sizes."""
    at_s, counts = [0.0], [0.0]
    while at_s[-1] < days * DAY_S:
        stays_s = max(1.0, round(rng.expovariate(1.0 / every_h) * HOUR_S / TICK_S)) * TICK_S
        counts.append(counts[-1] + stays_s * rng.randint(1, MOST_SIZE))
        at_s.append(at_s[-1] + stays_s)
    scaling = ScalingGoal(1, MOST_SIZE, 1.0, upscale_delay_s=0.0, downscale_delay_s=0.0)
    spec = ServiceSpec(name="moving", run="serve", scaling=scaling, load_window_s=TICK_S)
    return spec, Arrivals("moving", tuple(at_s), tuple(counts))


def measured(seed: int, days: float) -> Found:
    """Return what RiskHedge comes to in the market of a seed."""
    setting, job = setting_of(seed, days)
    run, trace, ratio = simulate(setting, job), setting.trace, setting.price_ratio or 1.0
    first_s = max(1, round(setting.cold_start_s / trace.tick_s)) * trace.tick_s
    count = int((trace.length_s - first_s) // BLOCK_S) + 1
    paid, plain = [0.0] * count, [0.0] * count
    price = {zone.name: 1.0 / ratio for zone in trace.zones}
    for at_s, until_s, rate, _, wanted in stretches(run, trace.length_s, first_s, price):
        block = int((at_s - first_s) // BLOCK_S)
        paid[block] += (until_s - at_s) * rate
        plain[block] += (until_s - at_s) * wanted
    starts = range(max(1, count - WEEK + 1))
    weeks = [sum(paid[at : at + WEEK]) / sum(plain[at : at + WEEK]) for at in starts]
    return Found(
        seed, job.availability_target or 0.0, sum(paid) / sum(plain), max(weeks), 1.0 - run.availability
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--markets", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--days", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.markets)
    done = workers.run(lambda number, _: measured(seeds[number], args.days), len(seeds), args.jobs)
    found = []
    for progress in done:
        if progress is not None and progress.result is not None:
            found.append(progress.result)
            print(*found[-1], file=sys.stderr, flush=True)
    dearest = sorted(found, key=lambda one: -one.dearest_week)
    above = sum(one.dearest_week > 1.0 for one in found)
    print(f"{len(found)} markets, mean cost {sum(one.usd for one in found) / len(found):.1%} of on demand")
    print(f"a week above 100 % in {above} of them; the dearest weeks:")
    for one in dearest[:10]:
        print(f"  seed {one.seed}, {one.target:.1%}: {one.dearest_week:.1%}, on the whole {one.usd:.1%}")


if __name__ == "__main__":
    main()
