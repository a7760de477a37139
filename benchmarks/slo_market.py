"""An SLO on a spot market: the predictive autoscaler against the reactive one, in USD at equal attainment.

    python -m benchmarks.slo_market TRACE --market FOLDER|NAME... [--policy risk_hedge,spothedge] [--attainment 0.995]

TRACE is a recording that `serve simulate --requests` takes; the first half of it is history, and a market is cut into windows as long
as the second half. Every run is one of `serve simulate`: the controller's tick, plan and placement on the market, and the queue
model of `skyserve_cli.sim.slo_queue`. The reactive autoscaler is run with each of `TARGETS`, shares of what a replica carries,
with its default delays. What it pays at the attainment of another autoscaler is interpolated between its two targets
nearest to that, on the sums of all windows; a dash where its targets do not reach so far. It sees requests without the
noise that is drawn around the recording, so that nothing here is to its disadvantage.

`blind` is the predictive autoscaler without the forecast (`autoscaler: reactive` beside `slo`): placement knows nothing of the future
then. Stand-ins are launches on demand, and the hours of those replicas; "avoided" compares them with those of
the reactive autoscaler, interpolated in the same way, and of `blind`. Intervals: 95 %, over windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.traffic.tables import print_table
from policies.goals import ScalingGoal
from skyserve_cli.account.runs import ON_DEMAND, Run
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.arrivals import load_arrivals
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.served import Traffic
from skyserve_cli.sim.settings import OVERPROVISIONING, Job, Setting
from skyserve_cli.sim.slo_queue import bridged
from skyserve_cli.sim.summary import estimate
from skyserve_cli.sim.trace import TICK_S, Trace
from skyserve_cli.spec.model import ServiceSpec, SloSpec

CAPACITY_QPS = 2.0
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
GOAL = ScalingGoal(1, 1000)
OVERPROVISION = 1


class Outcome(NamedTuple):
    """Requests, those in time, USD, and the launches and replica hours on demand; of a run, or summed over several."""

    requests: int
    met: float
    usd: float
    stand_ins: int
    stand_in_hours: float

    @property
    def attainment(self) -> float:
        return self.met / self.requests if self.requests else 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """What a comparison runs on."""

    traffic: Traffic
    market: Trace
    placer: str
    cold_start_s: float
    seed: int


def with_target(share: float) -> ServiceSpec:
    """Return a service whose replicas are given this share of what they carry."""
    goal = replace(GOAL, target_qps_per_replica=share * CAPACITY_QPS)
    return ServiceSpec(name="chat", run="serve", scaling=goal)


def with_slo(attainment: float, autoscaler: Literal["predictive", "reactive"]) -> ServiceSpec:
    slo = SloSpec(2000.0, None, attainment, CAPACITY_QPS, autoscaler)
    return ServiceSpec(name="chat", run="serve", scaling=GOAL, slo=slo)


def outcome_of(job: tuple[Case, ServiceSpec]) -> Outcome:
    """Run one service on one window of a market."""
    case, spec = job
    setting = Setting(
        trace=case.market,
        n_target=GOAL.min_replicas,
        cold_start_s=case.cold_start_s,
        arrivals=case.traffic.arrivals.later(case.traffic.known_s),
        spec=spec,
        traffic=case.traffic,
    )
    extra = OVERPROVISION if case.placer in OVERPROVISIONING else None
    return counted(simulate(setting, Job(case.placer, extra, seed=case.seed)))


def counted(run: Run) -> Outcome:
    """Return what a run came to. A run without traffic that is judged is a mistake of the caller."""
    if run.attainment is None or run.requests is None:
        raise ValueError("the run has judged no requests")
    sizes = [
        (step.at_s, sum(alive for _, kind, alive, _ in step.counts if kind == ON_DEMAND))
        for step in run.steps
    ]
    ends_s = run.days * 86400.0 + (sizes[0][0] if sizes else 0.0)
    edges = [*sizes, (max(ends_s, sizes[-1][0]) if sizes else 0.0, 0)]
    hours = sum(size * (until - since) for (since, size), (until, _) in pairwise(edges)) / 3600.0
    launches = sum(max(0, size - before) for (_, before), (_, size) in pairwise([(0.0, 0), *sizes]))
    return Outcome(run.requests, run.attainment * run.requests, run.usd, launches, hours)


def total(outcomes: Iterable[Outcome]) -> Outcome:
    requests, met, usd, stand_ins, hours = (sum(column) for column in zip(*outcomes, strict=True))
    return Outcome(int(requests), met, usd, int(stand_ins), hours)


def at(curve: Sequence[Outcome], attainment: float, value: Callable[[Outcome], float]) -> float | None:
    """Return a value of the curve at an attainment: a straight line between the two outcomes nearest to it in attainment.

    None where it lies beyond them.
    """
    ordered = sorted(curve, key=lambda one: one.attainment)
    for low, high in pairwise(ordered):
        if low.attainment <= attainment <= high.attainment:
            if high.attainment == low.attainment:
                return min(value(low), value(high))
            share = (attainment - low.attainment) / (high.attainment - low.attainment)
            return value(low) + share * (value(high) - value(low))
    return None


class Found(NamedTuple):
    """By window: the reactive autoscaler at each target, and the two that have an SLO."""

    reactive: list[list[Outcome]]
    blind: list[Outcome]
    predictive: list[Outcome]


def compare(cases: Sequence[Case], attainment: float, pool: ProcessPoolExecutor) -> Found:
    specs = [with_target(share) for share in TARGETS]
    specs += [with_slo(attainment, "reactive"), with_slo(attainment, "predictive")]
    runs = list(pool.map(outcome_of, [(case, spec) for spec in specs for case in cases]))
    by_spec = [runs[index * len(cases) : (index + 1) * len(cases)] for index in range(len(specs))]
    return Found(by_spec[: len(TARGETS)], by_spec[-2], by_spec[-1])


def rows(market: str, placer: str, found: Found) -> list[list[str]]:
    """Return a row for the predictive autoscaler and one for `blind`, beside the reactive one at their attainment."""
    curve = [total(windows) for windows in found.reactive]
    blind = total(found.blind)
    lines = []
    for name, windows in (("predictive", found.predictive), ("blind", found.blind)):
        ours = total(windows)
        cells = [market, placer, name, f"{100 * ours.attainment:.2f}", f"{ours.usd:.0f}"]
        cells.append(_beside(at(curve, ours.attainment, lambda one: one.usd), ours.usd))
        cells.append(_interval(found, windows))
        for field in ("stand_ins", "stand_in_hours"):
            value = attrgetter(field)
            then = at(curve, ours.attainment, value)
            cells += [f"{value(ours):.0f}", "-" if then is None else f"{then - value(ours):+.0f}"]
            cells.append("" if name == "blind" else f"{value(blind) - value(ours):+.0f}")
        lines.append(cells)
    return lines


def _beside(than: float | None, usd: float) -> str:
    return "-" if than is None else f"{100 * (1.0 - usd / than):+.1f}"


def _interval(found: Found, windows: Sequence[Outcome]) -> str:
    """Return by how many percent less is paid, over the windows in which the targets reach as far."""
    shares = []
    for index, ours in enumerate(windows):
        than = at([target[index] for target in found.reactive], ours.attainment, lambda one: one.usd)
        if than is not None:
            shares.append(100.0 * (1.0 - ours.usd / than))
    if not shares:
        return "-"
    mean, half = estimate(shares)
    spread = "" if half is None else f" ± {half:.1f}"
    return f"{mean:+.1f}{spread} ({len(shares)} of {len(windows)})"


HEADS = (
    "market", "placement", "autoscaler", "in time %", "USD", "cheaper %", "by window",
    "stand-ins", "avoided", "than blind", "their hours", "avoided", "than blind",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--market", nargs="+", required=True)
    parser.add_argument("--policy", default="risk_hedge,spothedge")
    parser.add_argument("--cold-start", type=float, default=300.0)
    parser.add_argument("--attainment", type=float, default=0.995)
    parser.add_argument(
        "--mean", type=float, default=8.0, help="replicas that carry the mean of the second half"
    )
    parser.add_argument("--windows", type=int, default=100, help="at most so many of a market")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    arrivals, _ = bridged(load_arrivals(args.trace))
    half_s = TICK_S * round(arrivals.length_s / 2 / TICK_S)
    came = arrivals.count(half_s, arrivals.length_s)
    scaled = arrivals.scaled(args.mean * CAPACITY_QPS * (arrivals.length_s - half_s) / came)
    traffic = Traffic(scaled, CAPACITY_QPS, half_s)
    lines = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for source in args.market:
            market = traces.load(traces.find(source))
            windows = market.windows(min(half_s, market.length_s))[: args.windows]
            for placer in args.policy.split(","):
                cases = [
                    Case(traffic, window, placer, args.cold_start, args.seed + index)
                    for index, window in enumerate(windows)
                ]
                lines += rows(Path(source).name, placer, compare(cases, args.attainment, pool))
                print(*lines[-2:], sep="\n", flush=True)
    title = (
        f"{args.trace.name} on spot markets: asked {100 * args.attainment:g} %, mean of {args.mean:g} replicas, "
        f"cold start {args.cold_start:g} s"
    )
    print_table(title, HEADS, lines, args.markdown)


if __name__ == "__main__":
    main()
