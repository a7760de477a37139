"""Routing policies against each other over simulated engines, as tables.

    python -m benchmarks.routing table                  every policy on every workload, 8 engines
    python -m benchmarks.routing table --load 0.7,1,1.3,1.6,2 --policies gorgo,gorgo:blind,cache_aware:selective
                                                        a policy may name its pushing; at several loads, the first
                                                        policy is compared with the best of the others
    python -m benchmarks.routing burst                  three times the load for a minute: how soon are the hits back?
    python -m benchmarks.routing pushing                selective, fixed-cap and blind pushing on trees of thought,
                                                        4 engines, over a range of clients (SkyWalker §5.2)
    python -m benchmarks.routing evict                  the caches of all engines together hold a tenth of what the calls of a
                                                        run have in all: hit rates with cache events and without, over that
                                                        of a router that sees the caches themselves

The workloads are those of `benchmarks.traffic`: `trees` (2 branches), `mixed` (some clients think in 4), `mooncake`
(recorded; lengths an eighth), `chat`, `documents` and `agents` (drawn). GSM8K and Mooncake's trace are looked for in `--data`; without them
the problems are made up and `mooncake` is left out. The balancer is the production code, the engines are the model of
`skyserve_cli.engine`: figures compare policies, they do not predict a GPU. Means over the seeds, with half of a 95 %
confidence interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.routing_all_knowing import AllKnowing
from benchmarks.routing_published import PUBLISHED, make_policy
from benchmarks.routing_workloads import DATA, GSM8K, MOONCAKE, WORKLOADS, Load
from benchmarks.traffic.burst import Burst, WithBurst
from benchmarks.traffic.driver import Outcome, Setting, run
from benchmarks.traffic.measure import Metrics, Served, ideal_hit_rate, working_set_tokens
from benchmarks.traffic.tables import Column, print_table, shown
from benchmarks.traffic.workloads import Workload, walk
from lb.config.options import Pushing, PushMode
from policies.routing.registry import POLICIES
from skyserve_cli.engine.kv import BLOCK_TOKENS
from skyserve_cli.engine.profiles import Profile, assumed, profile_named
from skyserve_cli.sim.summary import estimate

SLOTS = 32  # SkyWalker saw 20 to 50 requests running on an L4 before others had to wait (§3.3)


def engine(name: str, slots: int | None, cache_tokens: int | None = None) -> Profile:
    """The profile of that name, with batches of at most `slots` sequences and that cache, as far as these are given."""
    profile = profile_named(name)
    if slots is not None:
        profile = replace(profile, max_num_seqs=assumed(slots, "sequences", "asked for"))
    if cache_tokens is not None:
        longest = min(profile.max_model_len.value, cache_tokens - 2 * BLOCK_TOKENS)
        profile = replace(
            profile,
            kv_capacity=assumed(cache_tokens, "tokens", "asked for"),
            max_model_len=assumed(longest, "tokens", "as long as the cache"),
        )
    return profile


class Contender(NamedTuple):
    """A policy, whether it has cache events, and how its requests are pushed, as `policy[+events][:pushing]`."""

    name: str
    policy: str
    has_events: bool
    pushing: Pushing


def contender(name: str, default: Pushing) -> Contender:
    """Raises ValueError for a pushing that there is not."""
    rule, _, mode = name.partition(":")
    policy, _, events = rule.partition("+")
    if events not in ("", "events"):
        raise ValueError(f"{name!r}: only +events may follow a policy")
    return Contender(name, policy, bool(events), replace(default, mode=PushMode(mode)) if mode else default)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    workload: str
    load: Load
    policy: str
    pushing: Pushing
    seed: int
    engines: int
    profile: str
    slots: int | None
    data: Path
    burst: Burst | None = None
    has_events: bool = False
    cache_tokens: int | None = None  # of each engine; None: the profile's

    def make(self) -> Workload:
        workload = WORKLOADS[self.workload].make(self.seed, self.data, self.engines, self.load)
        return workload if self.burst is None else WithBurst(workload, self.burst)

    def run(self) -> tuple[Metrics, float]:
        """What came of it, and the seconds of CPU it took."""
        began = time.process_time()
        metrics = self.play().metrics()
        return metrics, time.process_time() - began

    def play(self) -> Outcome:
        setting = Setting(
            policy=self.policy,
            profiles=(engine(self.profile, self.slots, self.cache_tokens),) * self.engines,
            pushing=self.pushing,
            make_policy=make_policy,
            cache_events=self.has_events,
        )
        return run(self.make(), setting)

    def ideal(self) -> float:
        return ideal_hit_rate(walk(self.make()))


def run_cell(cell: Cell) -> tuple[Metrics, float]:
    """For a pool: methods of slotted dataclasses travel, but a plain function is quicker to find."""
    return cell.run()


# --- tables -------------------------------------------------------------------------------------------------


COLUMNS: tuple[Column[Metrics], ...] = (
    Column("hit rate", lambda m: m.hit_rate, ".3f"),
    Column("TTFT p50 s", lambda m: m.ttft_p50_s, ".2f"),
    Column("p90", lambda m: m.ttft_p90_s, ".2f"),
    Column("p99", lambda m: m.ttft_p99_s, ".2f"),
    Column("E2E p50 s", lambda m: m.e2e_p50_s, ".1f"),
    Column("s/token p99", lambda m: m.normalized_p99_s, ".2f"),
    Column("tokens/s", lambda m: m.tokens_per_s, ".0f"),
    Column("imbalance", lambda m: m.imbalance, ".2f"),
    Column("held p90 s", lambda m: m.held_p90_s, ".2f"),
)


def ran(cells: Sequence[Cell], jobs: int) -> dict[Cell, tuple[Metrics, float]]:
    with ProcessPoolExecutor(jobs) as pool:
        return dict(zip(cells, pool.map(run_cell, cells), strict=True))


def seeds(args: argparse.Namespace) -> range:
    return range(args.first_seed, args.first_seed + args.seeds)


def table(args: argparse.Namespace) -> None:
    names = [
        name for name in args.workloads or WORKLOADS if name != "mooncake" or (args.data / MOONCAKE).exists()
    ]
    default = Pushing() if args.mode is None else Pushing(mode=args.mode, cap=args.cap)
    contenders = [contender(name, default) for name in args.policies or [*sorted(POLICIES), *PUBLISHED]]
    compared = []
    for name in names:
        for times in args.load:
            by_contender = _cells(args, name, times, contenders)
            found = ran([cell for cells in by_contender.values() for cell in cells], args.jobs)
            metrics = {one: [found[cell][0] for cell in cells] for one, cells in by_contender.items()}
            rows = [
                [
                    one,
                    *(shown(estimate([column.value(m) for m in values]), column.form) for column in COLUMNS),
                    f"{sum(found[cell][1] for cell in by_contender[one]) / len(values):.1f}",
                ]
                for one, values in metrics.items()
            ]
            first = by_contender[contenders[0].name][0]
            calls = [m.calls for values in metrics.values() for m in values]
            title = (
                f"{name} at {times:g} times the load: {first.engines} x {first.profile}, {min(calls)}-{max(calls)} calls,"
                f" ideal hit rate {first.ideal():.3f}, {args.seeds} seeds"
            )
            print_table(title, ["policy", *(column.head for column in COLUMNS), "CPU s"], rows, args.markdown)
            if len(contenders) > 1:
                compared.append([name, f"{times:g}", *against_the_best(metrics, contenders[0].name)])
    if compared:
        heads = ["workload", "load", *(f"{column.head} / best of the others" for column in COMPARED)]
        print_table(contenders[0].name, heads, compared, args.markdown)


def _cells(
    args: argparse.Namespace,
    workload: str,
    times: float,
    contenders: Iterable[Contender],
    cache_tokens: int | None = None,
) -> dict[str, list[Cell]]:
    usual = WORKLOADS[workload]
    load = Load(usual.load.per_engine * times, usual.load.length * args.length)
    profile = args.profile or usual.profile
    return {
        one.name: [
            Cell(
                workload,
                load,
                one.policy,
                one.pushing,
                seed,
                args.engines or 8,
                profile,
                args.slots,
                args.data,
                has_events=one.has_events,
                cache_tokens=cache_tokens,
            )
            for seed in seeds(args)
        ]
        for one in contenders
    }


COMPARED = (COLUMNS[6], COLUMNS[1], COLUMNS[2])


def against_the_best(metrics: Mapping[str, Sequence[Metrics]], name: str) -> list[str]:
    """Tokens per second and times to the first token of `name`, each over the best mean of any other."""
    ratios = []
    for column in COMPARED:
        means = {one: fmean(map(column.value, values)) for one, values in metrics.items()}
        own = means.pop(name)
        best = max(means.values()) if column.head == "tokens/s" else min(means.values())
        ratios.append(f"{own / best:.3f}")
    return ratios


# --- a burst ------------------------------------------------------------------------------------------------

BURST = Burst(at_s=120.0, length_s=60.0, times=3.0)
AFTER_S = 180.0
WINDOW_S = 30.0


def outcome_of(cell: Cell) -> tuple[Served, ...]:
    """For a pool, as `run_cell`."""
    return cell.play().served


def burst(args: argparse.Namespace) -> None:
    """Hit rates and times to the first token by the instant of arrival, in windows from a minute before the burst."""
    default = Pushing() if args.mode is None else Pushing(mode=args.mode, cap=args.cap)
    contenders = [contender(name, default) for name in args.policies or ["gorgo", "cache_aware"]]
    name = args.workload if args.workload in OPEN else "documents"
    usual = WORKLOADS[name]
    # What the burst brings forward must be there to be brought forward.
    length_s = BURST.ends_at + AFTER_S + BURST.length_s * (BURST.times - 1)
    edges = [BURST.at_s - 60.0 + WINDOW_S * number for number in range(int((120.0 + AFTER_S) / WINDOW_S))]
    for times in args.load:
        load = Load(usual.load.per_engine * times, length_s)
        for value, head, form in (
            (_hit_rate, "hit rate", ".3f"),
            (_median_ttft_s, "TTFT p50 s", ".2f"),
        ):
            rows = []
            for one in contenders:
                cells = [
                    Cell(
                        name, load, one.policy, one.pushing, seed, args.engines or 8, usual.profile, args.slots,
                        args.data, BURST, one.has_events,
                    )
                    for seed in seeds(args)
                ]  # fmt: skip
                with ProcessPoolExecutor(args.jobs) as pool:
                    runs = list(pool.map(outcome_of, cells))
                row = [one.name]
                for since in edges:
                    windows = [
                        [call for call in run if since <= call.arrived_at < since + WINDOW_S] for run in runs
                    ]
                    row.append(shown(estimate([value(window) for window in windows if window]), form))
                rows.append(row)
            title = (
                f"{name} at {times:g} times the load, {BURST.times:g} times that for {BURST.length_s:g} s: {head} of"
                f" the calls that arrive in {WINDOW_S:g} s from ... s after the start of the burst, {args.seeds} seeds"
            )
            print_table(
                title, ["policy", *(f"{since - BURST.at_s:+.0f}" for since in edges)], rows, args.markdown
            )


OPEN = ("mooncake", "documents")  # workloads whose calls wait for no other


def _hit_rate(calls: Sequence[Served]) -> float:
    return sum(one.cached_tokens for one in calls) / sum(one.prompt_tokens for one in calls)


def _median_ttft_s(calls: Sequence[Served]) -> float:
    return median(one.first_at - one.arrived_at for one in calls)


# --- engines that evict -------------------------------------------------------------------------------------

EVICTING = ("trees", "chat", "documents", "agents")
SPARE_TOKENS = 1024  # that an engine has beside the longest call


def evict(args: argparse.Namespace) -> None:
    """Hit rates over that of the router that sees the caches: pairs by seed, as all have seen the same calls."""
    contenders = [
        contender(name, Pushing()) for name in args.policies or ["gorgo+events", "gorgo", "cache_aware"]
    ]
    judge = contender(AllKnowing.name, Pushing())
    rows = []
    for name in args.workloads or EVICTING:
        for times in args.load:
            cache_tokens = _cache_tokens(args, _cells(args, name, times, [judge])[judge.name])
            by_contender = _cells(args, name, times, [judge, *contenders], cache_tokens)
            found = ran([cell for cells in by_contender.values() for cell in cells], args.jobs)
            metrics = {one: [found[cell][0] for cell in cells] for one, cells in by_contender.items()}
            for one, values in metrics.items():
                ratios = [
                    ours.hit_rate / best.hit_rate
                    for ours, best in zip(values, metrics[judge.name], strict=True)
                ]
                rows.append(
                    [
                        name,
                        f"{times:g}",
                        str(cache_tokens),
                        one,
                        shown(estimate([m.hit_rate for m in values]), ".3f"),
                        shown(estimate(ratios), ".3f"),
                        shown(estimate([m.foreseen for m in values]), ".3f"),
                        shown(estimate([m.ttft_p50_s for m in values]), ".2f"),
                        shown(estimate([m.ttft_p90_s for m in values]), ".2f"),
                        shown(estimate([m.tokens_per_s for m in values]), ".0f"),
                    ]
                )
    heads = [
        "workload", "load", "tokens a cache", "policy", "hit rate", f"of {judge.name}'s", "foreseen", "TTFT p50 s", "p90",
        "tokens/s",
    ]  # fmt: skip
    title = f"caches of {args.cache:g} of what calls have in all, {args.seeds} seeds"
    print_table(title, heads, rows, args.markdown)


def _cache_tokens(args: argparse.Namespace, cells: Sequence[Cell]) -> int:
    """Tokens for the cache of one engine, so that all have the asked share of what the calls have, and the longest call fits."""
    tokens, longest = list[int](), 0
    for cell in cells:
        calls = list(walk(cell.make()))
        tokens.append(working_set_tokens(calls))
        longest = max(longest, *[len(call.prompt.tokens) + len(call.answer) for call in calls])
    share: float = args.cache
    return max(round(share * fmean(tokens) / cells[0].engines), longest + SPARE_TOKENS)


# --- pushing ------------------------------------------------------------------------------------------------


def pushing(args: argparse.Namespace) -> None:
    """Pairs by seed: every mode has seen the same trees, so the ratios are more certain than the values."""
    engines = args.engines or 4
    profile = args.profile or WORKLOADS[args.workload].profile
    slots = args.slots or SLOTS
    policies = args.policies or ["sglang_router", "cache_aware"]
    modes = [
        Pushing(mode=PushMode.SELECTIVE),
        *(Pushing(mode=PushMode.FIXED_CAP, cap=cap) for cap in args.caps),
        Pushing(mode=PushMode.BLIND),
    ]
    heads = [
        "clients", "pushing", "hit rate", "tokens/s", "TTFT p50 s", "TTFT p90 s", "held p90 s", "imbalance",
        "SP-P: tokens/s", "SP-P: TTFT p90",
    ]  # fmt: skip
    for policy in policies:
        rows = []
        for clients in args.clients:
            load = Load(clients / engines, 5 * args.length)
            cells = [
                Cell(args.workload, load, policy, mode, seed, engines, profile, slots, args.data)
                for mode in modes
                for seed in seeds(args)
            ]
            found = ran(cells, args.jobs)
            by_mode = {mode: [found[cell][0] for cell in cells if cell.pushing == mode] for mode in modes}
            ours = by_mode[modes[0]]
            for mode, values in by_mode.items():
                faster = [a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, values, strict=True)]
                sooner = [b.ttft_p90_s / a.ttft_p90_s for a, b in zip(ours, values, strict=True)]
                rows.append(
                    [
                        str(clients),
                        mode.mode.value + (f" {mode.cap}" if mode.mode is PushMode.FIXED_CAP else ""),
                        shown(estimate([m.hit_rate for m in values]), ".3f"),
                        shown(estimate([m.tokens_per_s for m in values]), ".0f"),
                        shown(estimate([m.ttft_p50_s for m in values]), ".2f"),
                        shown(estimate([m.ttft_p90_s for m in values]), ".2f"),
                        shown(estimate([m.held_p90_s for m in values]), ".2f"),
                        shown(estimate([m.imbalance for m in values]), ".2f"),
                        *(
                            ["", ""]
                            if mode is modes[0]
                            else [
                                f"{shown(estimate(faster), '.2f')} x as many",
                                f"{shown(estimate(sooner), '.2f')} x as soon",
                            ]
                        ),
                    ]
                )
        print_table(
            f"{args.workload}: {engines} x {profile} of {slots} slots, {policy}, {args.seeds} seeds",
            heads,
            rows,
            args.markdown,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("table", "burst", "pushing", "evict"))
    parser.add_argument("--workloads", type=lambda text: text.split(","), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--workload",
        default="trees",
        choices=tuple(WORKLOADS),
        help="of pushing (trees) and burst (documents)",
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        help="default: all; of burst gorgo and cache_aware, of pushing sglang_router and cache_aware, of evict gorgo+events,"
        " gorgo and cache_aware",
    )
    parser.add_argument("--engines", type=int, help="default: 8, or 4")
    parser.add_argument("--profile", help="of all engines; default: the workload's own")
    parser.add_argument("--slots", type=int, help=f"sequences in a batch; default: the profile's, or {SLOTS}")
    parser.add_argument("--mode", type=PushMode, choices=list(PushMode), help="default: that of services")
    parser.add_argument("--cap", type=int, default=32, help="of --mode fixed_cap")
    parser.add_argument("--caps", type=lambda text: [int(part) for part in text.split(",")], default=[16, 32])
    parser.add_argument(
        "--clients", type=lambda text: [int(part) for part in text.split(",")], default=[20, 30, 40]
    )
    parser.add_argument(
        "--load",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[1.0],
        help="times the usual load; several make several tables",
    )
    parser.add_argument("--length", type=float, default=1.0, help="times the usual length")
    parser.add_argument(
        "--cache", type=float, default=0.1, help="of evict: share of the calls' tokens that all caches hold"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA, help="where the recordings are")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    for name, instead in ((GSM8K, "problems are made up"), (MOONCAKE, "mooncake is left out")):
        if not (args.data / name).exists():
            print(f"{args.data / name} is not there: {instead}", file=sys.stderr)
    {"table": table, "burst": burst, "pushing": pushing, "evict": evict}[args.what](args)


if __name__ == "__main__":
    main()
