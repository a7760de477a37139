"""The simulator's short way to a decision against the whole controller: the same to the last bit, over drawn days.

`SKYSERVE_SIM_DAYS=200 pytest tests/sim/test_sim_direct.py` runs that number of whole days; without it a few of an hour.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import synthetic
from benchmarks.synthetic import Lull, MarketParameters
from policies.goals import ScalingGoal
from skyserve_cli.sim.arrivals import Arrivals, TokenMeans
from skyserve_cli.sim.run import Replay
from skyserve_cli.sim.served import Traffic
from skyserve_cli.sim.settings import OVERPROVISIONING, POLICIES, Job, Setting
from skyserve_cli.sim.trace import Steps, Trace
from skyserve_cli.spec.model import ServiceSpec, SloSpec

DAYS = int(os.environ.get("SKYSERVE_SIM_DAYS", "0"))
SEEDS, LENGTH_S = (range(DAYS), 86_400.0) if DAYS else (range(8), 3600.0)
ONLINE = [name for name in POLICIES if name != "omniscient"]
KNOWN_S = 43_200.0


def market(rng: random.Random) -> Trace:
    """One to six zones in up to three regions; some have prices that move."""
    regions = ("north", "south", "west")[: rng.randint(1, 3)]
    zones = [f"{regions[number % len(regions)]}-1{'abcdef'[number]}" for number in range(rng.randint(1, 6))]
    parameters = MarketParameters(
        zones=tuple(zones),
        capacity=rng.choice((2, 4, 16)),
        calm=Lull(1.0, 0.7, 10.0 ** rng.uniform(-2.0, 0.5)),
        shortage=Lull(1.3, 1.0, 10.0 ** rng.uniform(-1.5, 0.0)),
        partial=rng.random(),
        same_region=rng.random(),
    )
    trace = synthetic.generate(parameters, rng.randrange(1 << 30), LENGTH_S / 86_400.0)
    if rng.random() < 0.7:
        return trace
    at = sorted(rng.sample(range(1, trace.n_ticks), 3))
    priced = [
        replace(zone, spot_usd_hour=Steps((0, *at), tuple(rng.uniform(0.5, 2.0) for _ in range(4))))
        for zone in trace.zones
    ]
    return replace(trace, zones=tuple(priced))


def requests(rng: random.Random, *, tokens: bool) -> Arrivals:
    """Requests per second that wander, by ten minutes, with tokens that do."""
    count = round((KNOWN_S + LENGTH_S) / 600.0)
    draw = np.random.RandomState(rng.randrange(1 << 30))
    rates = 3.0 * np.exp(np.cumsum(draw.normal(0.0, 0.2, count)) * 0.5)
    sizes = TokenMeans(*(tuple(draw.uniform(100.0, 900.0, count)) for _ in range(2))) if tokens else None
    counts = (0.0, *np.cumsum(600.0 * np.clip(rates, 0.0, 20.0)).tolist())
    return Arrivals("drawn", tuple(600.0 * ten for ten in range(count + 1)), counts, sizes)


def day(seed: int) -> tuple[Setting, Job]:
    rng = random.Random(f"direct {seed}")
    trace, policy = market(rng), ONLINE[seed % len(ONLINE)]
    job = Job(
        policy, rng.randint(0, 2) if policy in OVERPROVISIONING else None, rng.choice((0.99, None)), seed
    )
    notice_s, cold_start_s = rng.choice((0.0, 120.0)), rng.choice((30.0, 183.0, 600.0))
    plain = Setting(trace, rng.randint(1, 5), cold_start_s, rng.uniform(1.5, 4.0), notice_s=notice_s)
    match (seed + seed // len(ONLINE)) % 4:
        case 0 | 1:
            return plain, job
        case 2:
            scaling = ScalingGoal(0, 8, 1.0, upscale_delay_s=rng.choice((0.0, 90.0)), downscale_delay_s=300.0)
            spec = ServiceSpec("drawn", "run", scaling=scaling, num_nodes=rng.randint(1, 2))
            return replace(plain, spec=spec, arrivals=requests(rng, tokens=False)), job
        case _:
            arrivals = requests(rng, tokens=rng.random() < 0.7)
            slo = SloSpec(2000.0, None, 0.99, rng.choice((None, 1.5)), rng.choice(("predictive", "reactive")))
            spec = ServiceSpec("drawn", "run", scaling=ScalingGoal(0, 20), slo=slo)
            traffic = Traffic(arrivals, 1.5, KNOWN_S, None if arrivals.tokens is None else 1.0)
            return replace(plain, spec=spec, arrivals=arrivals.later(KNOWN_S), traffic=traffic), job


@pytest.mark.timeout(1200)  # a day with an SLO takes a minute where others compute, too
@pytest.mark.parametrize("seed", SEEDS)
def test_a_decision_without_the_store_is_the_controllers(seed: int) -> None:
    setting, job = day(seed)
    found = Replay(setting, job).run()
    assert found == Replay(replace(setting, whole=True), job).run()
    assert found.ticks > 1
