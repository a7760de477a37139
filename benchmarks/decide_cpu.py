"""CPU of one decision of RiskHedge, by zones, replicas and kinds of GPU; beside another checkout, in turns.

    python -m benchmarks.decide_cpu [--against CHECKOUT] [--rounds 7] [--kinds 20 --zones 100]

A service has run for hours in a third of the zones. `steady` is a look at it as it is, `lost` the one after half of
its spot replicas were preempted at once, `dry` while no zone has room. Measured is the decision on what was learned until
then: the least of several, in each round. With --against, both checkouts are measured in every round, the first in turn, each
in a process of its own; ratios are taken within a round. Another checkout needs no more than the policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import get_type_hints

from policies.model import (
    CapacityType,
    FailureKind,
    Json,
    Launched,
    LaunchFailed,
    Offer,
    Preempted,
    ProbePassed,
    Replica,
    ReplicaState,
    Zone,
)
from policies.placement.base import View
from policies.placement.risk_hedge import RiskHedge

POLICY = RiskHedge()
GOAL = get_type_hints(View)["goal"]  # its module is another in older checkouts
TARGET = 0.999
HOUR_S = 3600.0
TIMES = 15
SIZES = ((3, 4), (9, 4), (9, 16), (30, 16), (100, 16))
SITUATIONS = ("steady", "lost", "dry")


def offers_of(zones: int, kinds: int) -> tuple[Offer, ...]:
    """Spot for about 1 and on demand for about 3 USD/h, in three zones of a region."""
    found = []
    for capacity, price in ((CapacityType.SPOT, 1.0), (CapacityType.ON_DEMAND, 3.0)):
        for number in range(zones):
            zone = Zone("cloud", f"r{number // 3}", f"r{number // 3}-{number % 3}")
            found += [
                Offer(zone, f"m{kind}", f"G{kind}", 1.0, capacity, price * (1.0 + 0.1 * kind), 3.0)
                for kind in range(kinds)
            ]
    return tuple(found)


class Service:
    """One that the policy has seen from its start."""

    def __init__(self, zones: int, replicas: int, kinds: int) -> None:
        self.offers = offers_of(zones, kinds)
        self.spot = [offer for offer in self.offers if offer.capacity_type is CapacityType.SPOT]
        self.wanted = replicas
        self.now = 300 * HOUR_S
        self.memory: Json = {}
        self.live: dict[int, Replica] = {}
        used = self.spot[:: max(1, len(self.spot) // max(2, zones // 3))]
        for number in range(replicas + 2):
            self._add(number, used[number % len(used)])
            self.now += 0.4 * HOUR_S
            if number >= replicas - 1:
                self.memory = self.decide(self.now)

    def _add(self, number: int, offer: Offer) -> None:
        asked = Replica(number, 1, offer, ReplicaState.REQUESTED, self.now, self.now)
        self.memory = POLICY.learn(
            self.memory, [Launched(number, f"i-{number}")], {**self.live, number: asked}, self.now
        )
        starting = Replica(number, 1, offer, ReplicaState.STARTING, self.now, self.now, launched_at=self.now)
        ready_at = self.now + 180.0
        self.memory = POLICY.learn(
            self.memory, [ProbePassed(number)], {**self.live, number: starting}, ready_at
        )
        self.live[number] = Replica(
            number, 1, offer, ReplicaState.READY, self.now, ready_at, launched_at=self.now, ready_at=ready_at
        )

    def lose_half(self) -> None:
        gone = list(self.live)[::2]
        self.memory = POLICY.learn(
            self.memory, [Preempted(number) for number in gone], dict(self.live), self.now
        )
        self.live = {number: replica for number, replica in self.live.items() if number not in gone}

    def dry_up(self) -> None:
        """Every zone without a replica refuses one."""
        held = {replica.zone for replica in self.live.values()}
        asked = {
            1000 + number: Replica(1000 + number, 1, offer, ReplicaState.REQUESTED, self.now, self.now)
            for number, offer in enumerate(self.spot)
            if offer.zone not in held
        }
        refused = [LaunchFailed(number, FailureKind.CAPACITY) for number in asked]
        self.memory = POLICY.learn(self.memory, refused, {**self.live, **asked}, self.now)
        self.lose_half()

    def decide(self, now: float) -> Json:
        goal = GOAL("risk_hedge", 0, True, 0, TARGET)
        view = View(now, self.wanted, goal, tuple(self.live.values()), (), self.offers, 99)
        return POLICY.decide(view, self.memory).memory


def measure(zones: int, replicas: int, kinds: int) -> dict[str, float]:
    """Seconds of CPU of a decision in each situation."""
    found = {}
    for situation in SITUATIONS:
        service = Service(zones, replicas, kinds)
        if situation == "lost":
            service.lose_half()
        elif situation == "dry":
            service.dry_up()
        took = []
        for turn in range(TIMES):
            before = time.process_time()
            service.decide(service.now + 300.0 * turn)
            took.append(time.process_time() - before)
        found[situation] = min(took)
    return found


def measured_in(checkout: Path, sizes: list[tuple[int, int]], kinds: int) -> list[dict[str, float]]:
    """What a process of that checkout measures, with this script and Python."""
    out = subprocess.run(
        [sys.executable, __file__, "--only", json.dumps([sizes, kinds])],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found: list[dict[str, float]] = json.loads(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="folder of another checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--zones", type=int)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--kinds", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        sizes, kinds = json.loads(args.only)
        print(json.dumps([measure(zones, replicas, kinds) for zones, replicas in sizes]))
        return
    sizes = list(SIZES) if args.zones is None else [(args.zones, args.replicas)]
    here = Path(__file__).resolve().parents[1]
    checkouts = [here] if args.against is None else [here, args.against.resolve()]
    rounds: list[dict[Path, list[dict[str, float]]]] = []
    for number in range(args.rounds):
        order = checkouts if number % 2 == 0 else checkouts[::-1]
        rounds.append({checkout: measured_in(checkout, sizes, args.kinds) for checkout in order})
    print(
        "ms of CPU, median of the rounds" + ("" if args.against is None else "; here, there, ratio [range]")
    )
    for index, (zones, replicas) in enumerate(sizes):
        for situation in SITUATIONS:
            ms = [[1000.0 * one[checkout][index][situation] for one in rounds] for checkout in checkouts]
            line = f"{zones:>4} zones, {args.kinds} kinds, N={replicas:<3} {situation:<7}"
            line += "".join(f"{statistics.median(column):>8.2f}" for column in ms)
            if args.against is not None:
                ratios = [a / b for a, b in zip(*ms, strict=True)]
                line += f"   {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            print(line)


if __name__ == "__main__":
    main()
