"""RiskHedge against SpotHedge at equal availability, in the product's simulator, with paired confidence intervals.

    python -m benchmarks.frontier FOLDER FOLDER:cap1 \
        --cache frontier.json --markdown

A family is a policy with all settings of its knob: SpotHedge with 0 to 4 spot replicas too many, RiskHedge with eight
availability targets. What a family pays for an availability is the least cost of time-sharing between its settings
and all on demand (`skyserve_cli.sim.frontier`), so that neither wins by where its settings happen to lie.

Recorded traces are folders, or names of shipped ones; ":cap1" reads a probe's 1 as one instance. They are split in
time: RiskHedge's constants were compared on first halves, so the second half counts for more and the first is marked
(neither is unseen: the form of its law was looked at on whole recordings). Each half is a run of its own, in which nothing is known at the start. With --whole a trace is one piece: right for one
that nothing was set on. Settings are means over --policy-seeds, which draw victims and the order of equal zones.
Intervals: bootstrap over blocks of 6 h.

Synthetic markets come from the shipped generator, with seeds that nothing was set on: the two shipped recipes, and
shapes like those of published recordings (SkyServe, section 5.2) of which there is none at hand. Intervals:
bootstrap over seeds. Beside them each seed is compared by itself, with a paired t interval over seeds.

A resample takes the same blocks (or seeds) for both families, and draws both frontiers again. A family that is mixed
with on demand for most of the time fails few launches for that reason alone; tables of single settings show theirs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from benchmarks.frontier_stats import (
    Family,
    Interval,
    Outcome,
    Sample,
    cost,
    cost_difference,
    failed_launches,
    one_by_one,
    point_difference,
)
from skyserve_cli.sim import synthetic, workers
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.market import usual_spot_usd_hour
from skyserve_cli.sim.results import ON_DEMAND, Run, percent
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.synthetic import Lull, MarketParameters
from skyserve_cli.sim.trace import Trace

SPOTHEDGE, RISK_HEDGE = "spothedge", "risk_hedge"
OVERPROVISIONS = (0, 1, 2, 3, 4)
TARGETS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
FAMILIES: Mapping[str, tuple[Job, ...]] = {
    SPOTHEDGE: tuple(Job(SPOTHEDGE, overprovision=extra) for extra in OVERPROVISIONS),
    RISK_HEDGE: tuple(Job(RISK_HEDGE, availability_target=target) for target in TARGETS),
}
AVAILABILITIES = (0.99, 0.995, 0.999)

PRICE_RATIO = 3.0  # of on-demand to spot
BLOCK_S = 6 * 3600.0
TELL_S = 10.0


class Shape(NamedTuple):
    market: MarketParameters
    days: float


_VOLATILE = synthetic.RECIPES["synthetic-volatile"].market
_WIDE = synthetic.RECIPES["synthetic-wide"].market

SHAPES: Mapping[str, Shape] = {
    "synthetic-volatile": Shape(_VOLATILE, days=5),
    "synthetic-wide": Shape(_WIDE, days=4),
    # A zone has one instance or none, as in the stricter reading of a probe.
    "wide-cap1": Shape(replace(_WIDE, capacity=1), days=4),
    # All zones are empty for an eighth of the time, and two of the three fall together.
    "stormy": Shape(
        replace(
            _VOLATILE,
            capacity=16,
            calm=Lull(shape=1.2, scale_h=0.4, floor=0.03),
            shortage=Lull(shape=1.1, scale_h=0.6, floor=0.05),
            partial=0.6,
            unlike=0.2,
        ),
        days=7,
    ),
    # Big instances in many regions: most zones have hardly ever room, one or two nearly always.
    "scarce": Shape(
        MarketParameters(
            zones=("north-1a", "north-1b", "east-1a", "south-1a", "west-1a", "far-1a"),
            capacity=4,
            shortage=Lull(shape=0.9, scale_h=1.0, floor=0.04),
            partial=0.6,
            unlike=1.5,
            gap_s=150.0,
        ),
        days=32 / 24,
    ),
}


# --- what is run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A row of the tables. `traces` is one piece of a recording, or the synthetic market of each seed; a setting is
    run on each of them with each of `policy_seeds`, counted from the trace's own seed on."""

    name: str
    part: str
    recorded: bool
    traces: tuple[tuple[int, Trace], ...]
    policy_seeds: int = 1


def recorded_cases(source: str, whole: bool, policy_seeds: int) -> Iterator[Case]:
    folder, _, cap = source.partition(":")
    trace = traces.load(traces.find(folder), capacity_per_zone=1 if cap == "cap1" else None)
    name = source.rstrip("/").split("/")[-1]
    if whole:
        yield Case(name, "whole", True, ((0, trace),), policy_seeds)
        return
    half = trace.n_ticks // 2
    for part, start in (("second half", trace.n_ticks - half), ("first half (tuned on)", 0)):
        yield Case(name, part, True, ((0, trace.cut(start, half, f"{name} {part}")),), policy_seeds)


def synthetic_case(name: str, seeds: Sequence[int]) -> Case:
    market, days = SHAPES[name]
    drawn = tuple((seed, synthetic.generate(market, seed, days, name)) for seed in seeds)
    return Case(name, f"seeds {seeds[0]}-{seeds[-1]}, {days:.3g} d each", False, drawn)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One run."""

    case: Case
    trace: Trace
    job: Job
    n_target: int
    cold_start_s: float

    def key(self, code: str) -> str:
        """The same for the same result."""
        what = repr((self.trace.zones, self.trace.n_ticks, self.job, self.n_target, self.cold_start_s, code))
        return hashlib.sha256(what.encode()).hexdigest()[:24]


def pieces_of(cases: Sequence[Case], n_target: int, cold_start_s: float) -> Iterator[Piece]:
    for case in cases:
        for seed, trace in case.traces:
            for policy_seed in range(seed, seed + case.policy_seeds):
                for job in (job for family in FAMILIES.values() for job in family):
                    yield Piece(case, trace, replace(job, seed=policy_seed), n_target, cold_start_s)


class Blocks(NamedTuple):
    """What is kept of a run. Of each 6 h: hours, the hours that all replicas on demand would have cost as much as
    was paid, and hours below target."""

    hours: list[float]
    paid: list[float]
    down: list[float]
    failed_launches_per_day: float


def measure(piece: Piece) -> Blocks:
    setting = Setting(piece.trace, piece.n_target, piece.cold_start_s, PRICE_RATIO)
    return blocks_of(simulate(setting, piece.job), setting)


def blocks_of(run: Run, setting: Setting) -> Blocks:
    """A run cut into blocks of 6 h. ValueError where they do not add up to it, because its prices move."""
    trace, usual = setting.trace, usual_spot_usd_hour(setting.trace)
    price = {  # of what an instance costs on demand
        zone.name: (usual if zone.spot_usd_hour is None else zone.spot_usd_hour.at(0)) / (PRICE_RATIO * usual)
        for zone in trace.zones
    }
    first_s = max(1, round(setting.cold_start_s / trace.tick_s)) * trace.tick_s
    count = math.ceil((trace.length_s - first_s) / BLOCK_S)
    hours, paid, down = ([0.0] * count for _ in range(3))
    ends = [step.at_s for step in run.steps[1:]] + [trace.length_s]
    for step, end_s in zip(run.steps, ends, strict=True):
        rate = sum(alive * (1.0 if kind == ON_DEMAND else price[z]) for z, kind, alive, _ in step.counts)
        short = sum(ready for *_, ready in step.counts) < setting.n_target
        at_s = max(step.at_s, first_s)
        while at_s < end_s:
            block = int((at_s - first_s) // BLOCK_S)
            until_s = min(end_s, first_s + (block + 1) * BLOCK_S)
            span_h = (until_s - at_s) / 3600
            hours[block] += span_h
            paid[block] += span_h * rate / setting.n_target
            down[block] += span_h * short
            at_s = until_s
    total = sum(hours)
    if not (
        math.isclose(sum(paid) / total, run.cost_relative, rel_tol=1e-6)
        and math.isclose(1 - sum(down) / total, run.availability, rel_tol=1e-6)
    ):
        raise ValueError(f"{trace.name}: {run.label} cannot be cut into blocks: its prices move")
    return Blocks(hours, paid, down, run.failed_launches_per_day)


# --- running, once ----------------------------------------------------------------------------------------------


def code_digest(policy: str) -> str:
    """Of everything that decides what a run comes to: results of other code are not used again. What only
    RiskHedge is made of decides nothing for others."""
    decide = (
        "policies",
        "skyserve_cli.controller",
        "skyserve_cli.sim",
        "skyserve_cli.spec",
        "skyserve_cli.state",
    )
    sources = {
        module.__file__
        for name, module in sys.modules.items()
        if name.startswith(decide)
        and module.__file__ is not None
        and (policy == RISK_HEDGE or not name.startswith("policies.placement.risk_"))
    }
    return hashlib.sha256(b"\0".join(Path(source).read_bytes() for source in sorted(sources))).hexdigest()


def run_all(pieces: Sequence[Piece], cache: Path | None, processes: int) -> list[Blocks]:
    """What every piece comes to; those in the cache are not run. It is written after each run."""
    kept: dict[str, list[Any]] = {}
    if cache is not None and cache.exists():
        kept = orjson.loads(cache.read_bytes())
    code = {policy: code_digest(policy) for policy in FAMILIES}
    keys = [piece.key(code[piece.job.policy]) for piece in pieces]
    to_do = [number for number, key in enumerate(keys) if key not in kept]
    print(f"{len(pieces)} runs, {len(pieces) - len(to_do)} of them in the cache", file=sys.stderr)
    told_at = began = time.monotonic()
    done = 0
    for news in workers.run(lambda number, _: measure(pieces[to_do[number]]), len(to_do), processes):
        if news is None or news.result is None:
            continue
        piece, done = to_do[news.piece], done + 1
        kept[keys[piece]] = list(news.result)
        if cache is not None:
            _write(cache, kept)
        now = time.monotonic()
        if now - told_at >= TELL_S or done == len(to_do):
            told_at, left_s = now, (now - began) / done * (len(to_do) - done)
            about = f"{pieces[piece].case.name}, about {left_s / 60:.0f} min left"
            print(f"{done}/{len(to_do)} runs ({about})", file=sys.stderr, flush=True)
    return [Blocks(*kept[key]) for key in keys]


def _write(cache: Path, kept: Mapping[str, list[Any]]) -> None:
    """All of it or nothing: an interrupted benchmark goes on from what is there."""
    beside = cache.with_name(cache.name + ".new")
    beside.write_bytes(orjson.dumps(kept))
    beside.replace(cache)


# --- what it comes to -------------------------------------------------------------------------------------------


def families_of(case: Case, runs: Mapping[Job, Sequence[Blocks]]) -> dict[str, Family]:
    """Samples are the blocks of a recording, each the mean over policy seeds; else the synthetic markets."""
    return {
        name: tuple(
            Outcome(
                job,
                tuple(_by_block(runs[job]) if case.recorded else map(_whole, runs[job])),
                fmean(blocks.failed_launches_per_day for blocks in runs[job]),
            )
            for job in jobs
        )
        for name, jobs in FAMILIES.items()
    }


def _by_block(runs: Sequence[Blocks]) -> Iterator[Sample]:
    for block, hours in enumerate(runs[0].hours):
        yield Sample(hours, fmean(run.paid[block] for run in runs), fmean(run.down[block] for run in runs))


def _whole(run: Blocks) -> Sample:
    return Sample(sum(run.hours), sum(run.paid), sum(run.down))


# --- tables -----------------------------------------------------------------------------------------------------

Found = Mapping[Case, Mapping[str, Family]]
Row = list[str]


def costs_table(found: Found, resamples: int, *, recorded: bool) -> Iterator[Row]:
    seeds = [] if recorded else ["seed by seed, paired t", "cheaper / dearer"]
    yield [
        "market", "part", "availability", "SpotHedge", "RiskHedge", "difference (95 % CI)", "RiskHedge is",
        "failed launches/day", *seeds,
    ]  # fmt: skip
    for case, families in found.items():
        spot, risk = families[SPOTHEDGE], families[RISK_HEDGE]
        for availability in AVAILABILITIES if case.recorded == recorded else ():
            costs = cost(spot, availability), cost(risk, availability)
            sure = cost_difference(spot, risk, availability, resamples)
            fails = failed_launches(spot, availability), failed_launches(risk, availability)
            row = [
                case.name, case.part, f"{availability:.1%}", f"{costs[0] * 100:.1f}", f"{costs[1] * 100:.1f}",
                _difference(costs[1] - costs[0], sure),
                "cheaper" if sure.high < 0 else "dearer" if sure.low > 0 else "undecided", _fewer(*fails),
            ]  # fmt: skip
            if not recorded:
                (mean, half), cheaper, dearer = one_by_one(spot, risk, availability)
                row += [f"{mean * 100:+.1f} ± {(half or 0.0) * 100:.1f}", f"{cheaper} / {dearer}"]
            yield row


def defaults_table(found: Found, resamples: int) -> Iterator[Row]:
    """One setting of each, chosen beforehand: what a user gets who changes no option."""
    yield [
        "market", "part", "SpotHedge +1", "RiskHedge 99.5%", "cost (95 % CI)", "unavailability (95 % CI)",
        "failed launches/day",
    ]  # fmt: skip
    for case, families in found.items():
        spot = families[SPOTHEDGE][OVERPROVISIONS.index(1)]
        risk = families[RISK_HEDGE][TARGETS.index(0.995)]
        dearer, longer = point_difference(spot, risk, resamples)
        yield [
            case.name, case.part, _point(spot), _point(risk),
            _difference(risk.point().cost - spot.point().cost, dearer),
            _difference(risk.point().down - spot.point().down, longer, digits=2),
            _fewer(spot.failed_launches, risk.failed_launches),
        ]  # fmt: skip


def settings_table(found: Found, family: str) -> Iterator[Row]:
    yield ["market", "part", *(_knob(job) for job in FAMILIES[family])]
    for case, families in found.items():
        row = [case.name, case.part]
        for outcome in families[family]:
            target = outcome.job.availability_target
            allowed = "" if target is None else f" ({outcome.point().down / (1 - target):.2f})"
            row.append(f"{_point(outcome)} / {outcome.failed_launches:.0f}{allowed}")
        yield row


def _knob(job: Job) -> str:
    return f"+{job.overprovision}" if job.availability_target is None else percent(job.availability_target)


def _point(outcome: Outcome) -> str:
    return f"{outcome.point().down * 100:.2f} / {outcome.point().cost * 100:.1f}"


def _difference(share: float, sure: Interval, digits: int = 1) -> str:
    low, mean, high = (f"{value * 100:+.{digits}f}" for value in (sure.low, share, sure.high))
    return f"{mean} ({low} … {high})"


def _fewer(spot: float, risk: float) -> str:
    less, more = sorted((spot, risk))
    times = f" ({more / less:.1f}x {'fewer' if risk < spot else 'more'})" if less >= 0.5 else ""
    return f"{spot:.0f} → {risk:.0f}{times}"


def report(found: Found, resamples: int, markdown: bool) -> str:
    sections: dict[str, Iterator[Row]] = {
        "Recorded traces: cost at equal availability, in % of all on demand": (
            costs_table(found, resamples, recorded=True)
        ),
        "Synthetic markets: the same over all seeds, and seed by seed": (
            costs_table(found, resamples, recorded=False)
        ),
        "Defaults: unavailability % / cost %, and differences in points": defaults_table(found, resamples),
        "RiskHedge by target: unavailability % / cost % / failed launches a day (unavailability over the allowed)": (
            settings_table(found, RISK_HEDGE)
        ),
        "SpotHedge by N_extra: unavailability % / cost % / failed launches a day": settings_table(
            found, SPOTHEDGE
        ),
    }
    head = "### " if markdown else ""
    tables = {title: list(rows) for title, rows in sections.items()}
    return "\n\n".join(
        f"{head}{title}\n\n{table(rows, markdown)}" for title, rows in tables.items() if len(rows) > 1
    )


def table(rows: Sequence[Row], markdown: bool) -> str:
    """The first row is the head."""
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "traces", nargs="*", help='recorded traces; ":cap1" reads a probe\'s 1 as one instance'
    )
    parser.add_argument("--whole", action="store_true", help="do not split recorded traces in time")
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="synthetic markets, or nothing: --shapes ''"
    )
    parser.add_argument("--seeds", type=int, default=10, help="of each synthetic market")
    parser.add_argument("--first-seed", type=int, default=1001)
    parser.add_argument("--policy-seeds", type=int, default=2, help="of each setting on a recorded trace")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--cold-start", type=float, default=183.0, help="seconds")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--cache", type=Path, help="JSON file in which finished runs are kept")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [c for source in args.traces for c in recorded_cases(source, args.whole, args.policy_seeds)]
    cases += [synthetic_case(name, seeds) for name in args.shapes.split(",") if name]
    pieces = list(pieces_of(cases, args.replicas, args.cold_start))
    runs: dict[Case, dict[Job, list[Blocks]]] = {}
    for piece, blocks in zip(pieces, run_all(pieces, args.cache, args.jobs), strict=True):
        runs.setdefault(piece.case, {}).setdefault(replace(piece.job, seed=0), []).append(blocks)
    found = {case: families_of(case, by_job) for case, by_job in runs.items()}
    print(report(found, args.resamples, args.markdown))


if __name__ == "__main__":
    main()
