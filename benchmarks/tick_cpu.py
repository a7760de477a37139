"""CPU time of one reconciler tick with 50 services and 1,000 replicas, in the simulator.

    python -m benchmarks.tick_cpu [--services 50] [--replicas 20] [--ticks 200] [--all]
    python -m benchmarks.tick_cpu --services 10 --large 10000

Reports process CPU time (not wall-clock time) per tick: quiet ticks, in which nothing happens, and busy ticks, in
which spot instances are preempted all the time and replaced. `--all` decides about every service in every tick. The
time that the simulated cloud takes to probe its machines is not counted. The store is the production store on SQLite
in memory.

`--large N` measures the services beside one of N replicas instead: before it, while it starts, and afterwards. In every tick one replica
of any service is preempted. `others` is the part of a tick after which all but the large service have what they need.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import Any, cast

from policies.goals import ScalingGoal
from policies.model import Event, ReplicaState
from skyserve_cli.controller.gc_pauses import GcPauses
from skyserve_cli.controller.reconcile.fleets import MOST_LAUNCHES
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.kit.fault_cloud import Faults
from tests.kit.life import Life
from tests.kit.sim_ports import SimProber


class TimedProber(SimProber):
    """Adds up the CPU time for which it has stood in for the machines."""

    spent_s = 0.0

    def drain(self) -> list[tuple[str, Event]]:
        start = time.process_time()
        events = super().drain()
        TimedProber.spent_s += time.process_time() - start
        return events


class TimedLife(Life):
    make_prober = TimedProber


class TimedReconciler(Reconciler):
    """Knows when the first pass of its last tick was over: process CPU seconds, and those of the prober."""

    first_over: tuple[float, float] | None = None

    def _pass(self, *args: Any) -> Any:
        found = super()._pass(*args)
        self.first_over = self.first_over or (time.process_time(), TimedProber.spent_s)
        return found


def build(services: int, replicas: int, faults: Faults, *, keeps: bool = True) -> Life:
    """A world in which every service has all its replicas ready."""
    start = time.process_time()
    life = TimedLife(1, faults, zones=12, reconciler=partial(TimedReconciler, keeps=keeps))
    for place in life.cloud.zones:
        place.spot_capacity = services * replicas
    for index in range(services):
        life.put(spec_of(f"service-{index}", replicas))
    ticks_s = 0.0
    for _ in range(200):
        ticks_s += advance(life)
        rows = life.store.services()
        ready = sum(r.state is ReplicaState.READY for row in rows for r in row.replicas)
        if ready == services * replicas:
            spent_s = time.process_time() - start
            print(
                f"all ready after {life.clock.now():.0f} s, {ticks_s:.1f} s CPU of ticks, {spent_s:.1f} s with the world's"
            )
            for _ in range(10):
                advance(life)
            return life
    raise SystemExit(f"only {ready} of {services * replicas} replicas became ready")


def advance(life: Life) -> float:
    """One virtual second and one tick; the tick's CPU seconds."""
    life.clock.advance(life.clock.now() + 1.0)
    start, elsewhere = time.process_time(), TimedProber.spent_s
    life.reconciler.tick()
    return time.process_time() - start - (TimedProber.spent_s - elsewhere)


def report(label: str, costs_s: list[float], events: int | None = None) -> None:
    costs = sorted(cost * 1e3 for cost in costs_s)
    p99 = costs[int(len(costs) * 0.99) - 1]
    print(
        f"{label:6} ticks {len(costs):4}  median {statistics.median(costs):7.2f} ms  "
        f"mean {statistics.fmean(costs):7.2f} ms  p99 {p99:7.2f} ms"
        + ("" if events is None else f"  event lines {events}")
    )


def beside(life: Life, size: int, ticks: int) -> None:
    """Print what ticks cost the services beside one of `size` replicas."""
    rng = random.Random(2)
    for place in life.cloud.zones:
        place.spot_capacity += size

    def measure(label: str, count: int) -> None:
        others, whole = [], []
        for _ in range(count):
            life.cloud.preempt(rng.choice(sorted(life.cloud.alive(), key=lambda one: one.id)).id)
            reconciler = cast("TimedReconciler", life.reconciler)
            reconciler.first_over = None
            life.clock.advance(life.clock.now() + 1.0)
            start, elsewhere = time.process_time(), TimedProber.spent_s
            reconciler.tick()
            whole.append(time.process_time() - start - (TimedProber.spent_s - elsewhere))
            at, spent_s = reconciler.first_over or (time.process_time(), TimedProber.spent_s)
            others.append(at - start - (spent_s - elsewhere))
        report(f"{label:10} others", others)
        report(f"{label:10} whole ", whole)

    measure("alone", ticks)
    life.put(spec_of("large", size))
    measure("starting", size // MOST_LAUNCHES + 60)
    measure("afterwards", ticks)


def spec_of(name: str, size: int) -> ServiceSpec:
    return ServiceSpec(
        name=name,
        run="serve",
        probe=Probe(path="/health"),
        scaling=ScalingGoal(size, size),
        resources=(ResourceChoice(cloud="sim", use_spot=True),),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--services", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--all", action="store_true", help="decide about every service in every tick")
    parser.add_argument("--large", type=int, help="replicas of one service beside the others")
    args = parser.parse_args()
    GcPauses(time.monotonic).install()
    life = build(args.services, args.replicas, Faults(), keeps=not args.all)
    print(f"{args.services} services, {args.services * args.replicas} replicas")
    if args.large:
        beside(life, args.large, args.ticks)
        return
    mark = len(life.store.events(None, limit=10**6))
    quiet = [advance(life) for _ in range(args.ticks)]
    after = len(life.store.events(None, limit=10**6))
    report("quiet", quiet, after - mark)
    rng = random.Random(2)
    busy = []
    for _ in range(args.ticks):
        for victim in rng.sample(sorted(life.cloud.alive(), key=lambda one: one.id), 5):
            life.cloud.preempt(victim.id)
        busy.append(advance(life))
    report("busy", busy, len(life.store.events(None, limit=10**6)) - after)


if __name__ == "__main__":
    main()
