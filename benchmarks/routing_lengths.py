"""What guesses of response lengths are worth to a router: constant, running median, learner, and lengths known beforehand.

    python -m benchmarks.routing_lengths knee               the rate at which `least_load` still has `IN_TIME` of the calls in time
    python -m benchmarks.routing_lengths table [--knee RATE] [--load 0.7,0.8,0.9,1,1.1] [--seeds 20] [--pushing selective,blind]
        [--router preserve]                                     or gorgo, which counts lengths in seconds and not in tokens

Calls are those of `benchmarks.traffic.tenants`, on simulated engines, with the balancer's production code. A call is in time if it
takes at most `MOST_S_PER_TOKEN` per token of its response, from its arrival (PreServe, section 5). Every policy gets the same
calls, so they are compared seed by seed: the table has each policy's mean, and by how much it differs from the same router with a
constant guess, with half of a 95 % confidence interval (t over seeds). `better` and `worse` count seeds.

`known` has the length of each response: no learner can do better. `known, decode x 0.15` gives PreServe's router 15 % of that, as a
token that is to be decoded costs an engine far less than its share of a cost that counts it like a prompt token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from benchmarks.preserve.length_learner import LengthLearner
from benchmarks.preserve.router import PreServe
from benchmarks.traffic.driver import Setting, run
from benchmarks.traffic.measure import Served, quantile
from benchmarks.traffic.tables import print_table, shown
from benchmarks.traffic.tenants import Tenants
from benchmarks.traffic.workloads import walk
from lb.config.options import Pushing, PushMode
from policies.routing.base import RequestView, RoutingPolicy
from policies.routing.gorgo import Gorgo
from policies.routing.registry import make_policy
from policies.routing.response_length import Constant, ResponseLength, RunningMedian
from skyserve_cli.engine.profiles import profile_named
from skyserve_cli.sim.summary import estimate

MOST_S_PER_TOKEN = 0.2
IN_TIME = 0.95
COUNTED_FROM = 0.1  # of the calls, by arrival: before, engines fill and guesses are learned
DECODE_SHARE = 0.15
LEAST_TOKENS = 4  # of a response whose time per token is counted: shorter ones are all prefill


class Known:
    """Returns the length that a response will have, by the id of its request, times `share`."""

    def __init__(self, lengths: Mapping[str, int], share: float = 1.0) -> None:
        self._lengths = lengths
        self._share = share

    def predict(self, request: RequestView) -> int:
        return max(1, round(self.mean(request)))

    def mean(self, request: RequestView) -> float:
        return self._share * self._lengths[request.id]

    def learn(self, request: RequestView, tokens: int) -> None:
        pass


GUESSES: Mapping[str, Callable[[Mapping[str, int]], ResponseLength]] = {
    "constant": lambda _: Constant(),
    "running median": lambda _: RunningMedian(),
    "learner": lambda _: LengthLearner(),
    "known": Known,
    f"known, decode x {DECODE_SHARE:g}": lambda lengths: Known(lengths, DECODE_SHARE),
}
GUIDED: Mapping[str, Callable[[ResponseLength], RoutingPolicy]] = {
    PreServe.name: PreServe,
    Gorgo.name: lambda lengths: Gorgo(lengths=lengths),
}
LEAST_LOAD = "least_load"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `router` is a name of `GUESSES` for the policy `guided`, or a routing policy."""

    router: str
    guided: str
    per_s: float
    length_s: float
    seed: int
    pushing: PushMode
    engines: int
    profile: str


class Figures(NamedTuple):
    """`in_time`: share of the calls. Seconds, and seconds per token of a response."""

    in_time: float
    ttft_mean_s: float
    ttft_p99_s: float
    per_token_mean_s: float
    per_token_p99_s: float
    refused: int


def play(cell: Cell) -> Figures:
    workload = Tenants(cell.per_s, cell.length_s, cell.seed)
    setting = Setting(
        policy=cell.guided if cell.router in GUESSES else cell.router,
        profiles=(profile_named(cell.profile),) * cell.engines,
        pushing=Pushing(mode=cell.pushing),
        make_policy=_maker(cell),
    )
    outcome = run(workload, setting)
    return figures(outcome.served, outcome.refused)


def _maker(cell: Cell) -> Callable[[str], RoutingPolicy]:
    guess = GUESSES.get(cell.router)
    if guess is None:
        return make_policy
    lengths = {call.id: len(call.answer) for call in walk(Tenants(cell.per_s, cell.length_s, cell.seed))}
    lengths_known = guess(lengths)
    guided = GUIDED[cell.guided]
    return lambda _: guided(lengths_known)


def figures(served: Sequence[Served], refused: int = 0) -> Figures:
    """Return the figures of the calls after the first tenth. Raises ValueError if there are too few."""
    by_arrival = sorted(served, key=lambda one: one.arrived_at)
    counted = by_arrival[int(COUNTED_FROM * len(by_arrival)) :]
    if len(counted) < 2:
        raise ValueError(f"{len(by_arrival)} calls are too few to measure")
    ttft = sorted(one.first_at - one.arrived_at for one in counted)
    per_token = sorted(
        (one.ended_at - one.arrived_at) / max(LEAST_TOKENS, one.response_tokens) for one in counted
    )
    return Figures(
        in_time=sum(one <= MOST_S_PER_TOKEN for one in per_token) / len(per_token),
        ttft_mean_s=fmean(ttft),
        ttft_p99_s=quantile(ttft, 0.99),
        per_token_mean_s=fmean(per_token),
        per_token_p99_s=quantile(per_token, 0.99),
        refused=refused,
    )


# --- tables ---------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    head: str
    value: Callable[[Figures], float]
    form: str


COLUMNS = (
    Shown("in time %", lambda one: 100 * one.in_time, ".2f"),
    Shown("TTFT mean s", lambda one: one.ttft_mean_s, ".3f"),
    Shown("TTFT p99 s", lambda one: one.ttft_p99_s, ".2f"),
    Shown("s/token mean", lambda one: one.per_token_mean_s, ".4f"),
    Shown("s/token p99", lambda one: one.per_token_p99_s, ".3f"),
)
COMPARED = (COLUMNS[0], COLUMNS[1], COLUMNS[3])


def rows(found: Mapping[str, Sequence[Figures]], base: str) -> list[list[str]]:
    """Return a row for each router: its means, and its differences from `base`, which has the same seeds in the same order."""
    lines = []
    for router, runs in found.items():
        cells = [router, *(f"{fmean(map(column.value, runs)):{column.form}}" for column in COLUMNS)]
        for column in COMPARED:
            differences = [
                column.value(ours) - column.value(theirs)
                for ours, theirs in zip(runs, found[base], strict=True)
            ]
            cells.append("" if router == base else shown(estimate(differences), "+" + column.form))
        in_time = [ours.in_time - theirs.in_time for ours, theirs in zip(runs, found[base], strict=True)]
        better, worse = sum(one > 0 for one in in_time), sum(one < 0 for one in in_time)
        cells.append("" if router == base else f"{better}/{worse}")
        lines.append(cells)
    return lines


def table(args: argparse.Namespace) -> None:
    routers = [*GUESSES, LEAST_LOAD]
    heads = [
        "router", *(column.head for column in COLUMNS), *(f"{column.head}, change" for column in COMPARED), "better/worse",
    ]  # fmt: skip
    with ProcessPoolExecutor(args.jobs) as pool:
        for pushing in args.pushing.split(","):
            for load in map(float, args.load.split(",")):
                cells = [_cell(args, router, load * args.knee, seed, PushMode(pushing)) for router in routers for seed in _seeds(args)]  # fmt: skip
                runs = list(pool.map(play, cells))
                found = {
                    router: runs[index * args.seeds : (index + 1) * args.seeds]
                    for index, router in enumerate(routers)
                }
                title = (
                    f"{args.router}, {pushing}, {load:g} of the knee ({load * args.knee:.2f} calls/s for {args.length:g} s, "
                    f"{args.engines} x {args.profile}), {args.seeds} seeds"
                )
                print_table(title, heads, rows(found, next(iter(GUESSES))), args.markdown)


def knee(args: argparse.Namespace) -> None:
    """Print the rate at which `IN_TIME` of the calls are in time with `least_load`, found by bisection."""
    low, high = 0.1, args.most
    with ProcessPoolExecutor(args.jobs) as pool:
        while high - low > 0.02 * high:
            rate = (low + high) / 2
            cells = [_cell(args, LEAST_LOAD, rate, seed, PushMode.BLIND) for seed in _seeds(args)]
            share = fmean(one.in_time for one in pool.map(play, cells))
            print(f"{rate:.3f} calls/s: {100 * share:.2f} % in time", flush=True)
            low, high = (rate, high) if share >= IN_TIME else (low, rate)
    print(f"knee: {low:.2f} calls/s")


def _cell(args: argparse.Namespace, router: str, per_s: float, seed: int, pushing: PushMode) -> Cell:
    return Cell(router, args.router, per_s, args.length, seed, pushing, args.engines, args.profile)


def _seeds(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("knee", "table"))
    parser.add_argument("--knee", type=float, default=4.0, help="calls per second")
    parser.add_argument("--most", type=float, default=20.0, help="for `knee`: a rate that is too high")
    parser.add_argument("--load", default="0.7,0.8,0.9,1,1.1")
    parser.add_argument("--pushing", default="selective,blind")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--length", type=float, default=300.0, help="seconds in which calls come")
    parser.add_argument("--router", choices=sorted(GUIDED), default=PreServe.name)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--profile", default="l4-8b")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    {"knee": knee, "table": table}[args.what](args)


if __name__ == "__main__":
    main()
