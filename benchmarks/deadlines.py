"""Requests with deadlines beside others, over simulated engines: are they in time, and what does it cost the others?

    python -m benchmarks.deadlines                       the table: without deadlines, and late ones queued or shed
    python -m benchmarks.deadlines --load 1.3,1.75       at several loads; 1 is about three quarters of what engines can take
    python -m benchmarks.deadlines --keys 4 --weights 4,2,1,1

A third of the requests of each API key are urgent: their first byte is due within `--ttft` seconds. The balancer is the
production code, the engines are the model of `skyserve_cli.engine`, time is virtual. `in time` is the share of the urgent
requests, refused ones counted as late, `of the served` without those; `fair` is the smallest share of served tokens that a key got for
its weight, over the largest. Only keys that always wait have a claim to that: those of an open workload at more than engines can take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import fmean
from typing import NamedTuple

from benchmarks.routing import engine
from benchmarks.routing_workloads import DATA, WORKLOADS, Load
from benchmarks.traffic.driver import Outcome, Setting, run
from benchmarks.traffic.measure import Served, quantile
from benchmarks.traffic.tables import print_table, shown
from benchmarks.traffic.workloads import Arrival, Call, Workload
from lb.config.options import Limits
from policies.routing.deadlines import Late
from skyserve_cli.sim.summary import estimate

SHARE = 1 / 3
HOLD_S = 30.0  # as services have it


class WithDeadlines:
    """`workload`, of whose calls a `share` is due `ttft_s` after it came, and whose conversations belong to `keys`."""

    def __init__(self, workload: Workload, ttft_s: float, keys: Sequence[str], share: float = SHARE) -> None:
        self.name = workload.name
        self.urgent: dict[str, str] = {}  # keys, by call
        self._workload = workload
        self._ttft_s = ttft_s
        self._keys = keys
        self._share = share

    def opening(self) -> Iterator[Arrival]:
        return map(self._with_deadline, self._workload.opening())

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return map(self._with_deadline, self._workload.ended(call, now))

    def _with_deadline(self, arrival: Arrival) -> Arrival:
        call = arrival.call
        key = self._keys[int(_drawn(call.session or call.id) * len(self._keys))]
        if _drawn(f"urgent {call.id}") >= self._share:
            return Arrival(arrival.at_s, replace(call, tenant=key))
        self.urgent[call.id] = key
        return Arrival(arrival.at_s, replace(call, tenant=key, ttft_s=self._ttft_s))


def _drawn(text: str) -> float:
    """Between 0 and 1, the same for the same text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `late` None: the deadlines are known to the clients alone."""

    workload: str
    load: float
    late: Late | None
    seed: int
    ttft_s: float
    weights: tuple[float, ...]
    engines: int
    length: float = 1.0
    policy: str = "gorgo"

    def run(self) -> Row:
        usual = WORKLOADS[self.workload]
        load = Load(usual.load.per_engine * self.load, usual.load.length * self.length)
        keys = [f"key-{number}" for number in range(len(self.weights))]
        made = usual.make(self.seed, DATA, self.engines, load)
        workload = WithDeadlines(made, self.ttft_s if self.late else 0.0, keys)
        setting = Setting(
            policy=self.policy,
            profiles=(engine(usual.profile, None),) * self.engines,
            limits=Limits(hold_s=HOLD_S),
            late=self.late or Late.QUEUE,
            weights=dict(zip(keys, self.weights, strict=True)),
        )
        return row_of(run(workload, setting), workload.urgent, self.ttft_s, setting.weights)


class Row(NamedTuple):
    """What came of one run."""

    in_time: float
    of_served: float
    refused: int
    urgent_p50_s: float
    urgent_p99_s: float
    others_p50_s: float
    others_p90_s: float
    tokens_per_s: float
    hit_rate: float
    fair: float


def row_of(outcome: Outcome, urgent: Mapping[str, str], ttft_s: float, weights: Mapping[str, float]) -> Row:
    metrics = outcome.metrics()
    first = {one.call_id: one.first_at - one.arrived_at for one in outcome.served}
    theirs = sorted(first[name] for name in urgent if name in first)
    others = sorted(wait_s for name, wait_s in first.items() if name not in urgent)
    kept = sum(wait_s <= ttft_s for wait_s in theirs)
    return Row(
        in_time=kept / len(urgent),
        of_served=kept / len(theirs),
        refused=outcome.refused,
        urgent_p50_s=quantile(theirs, 0.5),
        urgent_p99_s=quantile(theirs, 0.99),
        others_p50_s=quantile(others, 0.5),
        others_p90_s=quantile(others, 0.9),
        tokens_per_s=metrics.tokens_per_s,
        hit_rate=metrics.hit_rate,
        fair=fairness(outcome.served, weights),
    )


def fairness(served: Iterable[Served], weights: Mapping[str, float]) -> float:
    """Return the smallest number of requests that a key was served, for its weight, over the largest."""
    counts = dict.fromkeys(weights, 0)
    for one in served:
        counts[one.tenant] += 1
    shares = [count / weights[key] for key, count in counts.items()]
    return min(shares) / max(shares)


HEADS = (
    "in time", "of the served", "refused", "TTFT p50 s", "p99", "others' TTFT p50 s", "p90", "tokens/s", "hit rate", "fair",
)  # fmt: skip
_FORMS = (".4f", ".4f", ".0f", ".2f", ".2f", ".2f", ".2f", ".0f", ".3f", ".2f")


def run_cell(cell: Cell) -> Row:
    return cell.run()


def table(args: argparse.Namespace) -> None:
    kinds: tuple[Late | None, ...] = (None, Late.QUEUE, Late.SHED)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    weights = tuple(args.weights or [1.0] * args.keys)
    for name in args.workloads:
        for load in args.load:
            cells = [
                Cell(name, load, late, seed, args.ttft, weights, args.engines, args.length, args.policy)
                for late in kinds
                for seed in seeds
            ]
            with ProcessPoolExecutor(args.jobs) as pool:
                found = list(zip(cells, pool.map(run_cell, cells), strict=True))
            rows = []
            usual = fmean(row.tokens_per_s for cell, row in found if cell.late is None)
            for late in kinds:
                values = [row for cell, row in found if cell.late is late]
                columns = zip(*values, strict=True)
                tokens = fmean(row.tokens_per_s for row in values) / usual
                shown_values = [
                    shown(estimate(list(one)), form) for one, form in zip(columns, _FORMS, strict=True)
                ]
                rows.append([late.value if late else "no deadlines", *shown_values, f"{tokens:.3f}"])
            title = f"{name} at {load:g} times the load, a third due within {args.ttft:g} s, {len(weights)} keys, {args.seeds} seeds"
            print_table(title, ["late ones", *HEADS, "tokens/s of without"], rows, args.markdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["chat", "mixed"])
    parser.add_argument("--load", type=lambda text: [float(part) for part in text.split(",")], default=[1.3])
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds until an urgent request is due")
    parser.add_argument("--keys", type=int, default=3, help="API keys, of the weight 1")
    parser.add_argument(
        "--weights", type=lambda text: [float(part) for part in text.split(",")], help="of the keys, instead"
    )
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--policy", default="gorgo")
    parser.add_argument("--length", type=float, default=1.0, help="times the usual length")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", action="store_true")
    table(parser.parse_args())


if __name__ == "__main__":
    main()
