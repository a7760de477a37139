"""Runs of spot policies for the benchmarks: each run once, cut into blocks of time.

A recorded trace is given as FOLDER, or the name of a shipped one; ":cap1" reads a probe's 1 as one instance, and ":12d" takes
the first twelve days of it. Results are kept in a file by everything that decides them, the code included, so that an
interrupted benchmark continues from the stored runs.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from benchmarks.frontier_stats import Sample
from policies.goals import ScalingGoal
from skyserve_cli.account.runs import ON_DEMAND, Run
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim import workers
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.market import usual_spot_usd_hour
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import TICK_S, Trace
from skyserve_cli.spec.model import ServiceSpec

SPOTHEDGE, RISK_HEDGE = "spothedge", "risk_hedge"
OVERPROVISIONS = (0, 1, 2, 3, 4)
TARGETS = (0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
FAMILIES: Mapping[str, tuple[Job, ...]] = {
    SPOTHEDGE: tuple(Job(SPOTHEDGE, overprovision=extra) for extra in OVERPROVISIONS),
    RISK_HEDGE: tuple(Job(RISK_HEDGE, availability_target=target) for target in TARGETS),
}

PRICE_RATIO = 3.0  # of on-demand to spot
BLOCK_S = 6 * 3600.0
TELL_S = 10.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

# --- runs -----------------------------------------------------------------------------------------------------


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
    """A recording in two halves; in one piece if `whole`, or if only its first days are taken."""
    folder, *reading = source.split(":")
    trace = traces.load(traces.find(folder), capacity_per_zone=1 if "cap1" in reading else None)
    name = source.rstrip("/").split("/")[-1]
    for part in reading:
        if part.endswith("d") and part[:-1].isdecimal():
            ticks = min(trace.n_ticks, round(int(part[:-1]) * DAY_S / trace.tick_s))
            trace, whole = trace.cut(0, ticks, name), True
        elif part != "cap1":
            raise SystemExit(f"{source}: FOLDER, FOLDER:cap1, FOLDER:12d or FOLDER:cap1:12d")
    if whole:
        yield Case(name, "whole", True, ((0, trace),), policy_seeds)
        return
    half = trace.n_ticks // 2
    for part, start in (("second half", trace.n_ticks - half), ("first half (tuned on)", 0)):
        yield Case(name, part, True, ((0, trace.cut(start, half, f"{name} {part}")),), policy_seeds)


class Circumstances(NamedTuple):
    """What all runs of a benchmark share. `by_hour`: the size follows the hour (`sizes_by_hour`) instead of `n_target`."""

    n_target: int = 4
    cold_start_s: float = 183.0
    by_hour: bool = False
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One run."""

    case: Case
    trace: Trace
    job: Job
    around: Circumstances

    def key(self, code: str) -> str:
        """The same for the same result."""
        what = repr((self.trace.zones, self.trace.n_ticks, self.job, self.around, code))
        return hashlib.sha256(what.encode()).hexdigest()[:24]


def pieces_of(cases: Sequence[Case], around: Circumstances, jobs: Sequence[Job]) -> Iterator[Piece]:
    for case in cases:
        for seed, trace in case.traces:
            for policy_seed in range(seed, seed + case.policy_seeds):
                for job in jobs:
                    yield Piece(case, trace, replace(job, seed=policy_seed), around)


def sizes_by_hour() -> list[int]:
    """The size of a service in each hour of the day: from 2 at night to 6 at noon, in steps of one."""
    return [round(4 - 2 * math.cos(2 * math.pi * hour / 24)) for hour in range(24)]


def service_by_hour() -> tuple[ServiceSpec, Arrivals]:
    """A service that follows its requests without delay, and a day of requests that are just enough for each size."""
    sizes = sizes_by_hour()
    scaling = ScalingGoal(
        min_replicas=min(sizes),
        max_replicas=max(sizes),
        target_qps_per_replica=1.0,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
    )
    counts = [sum(sizes[:hour]) * HOUR_S for hour in range(25)]
    arrivals = Arrivals("by the hour", tuple(hour * HOUR_S for hour in range(25)), tuple(counts))
    return ServiceSpec(name="by-hour", run="serve", scaling=scaling, load_window_s=TICK_S), arrivals


class Blocks(NamedTuple):
    """The kept figures of a run. Of each 6 h: hours, the hours that the wanted replicas on demand would have cost as much as
    was paid (at their mean number), hours below target, and the outages that began."""

    hours: list[float]
    paid: list[float]
    down: list[float]
    outages: list[int]
    failed_launches_per_day: float
    growth: float


def measure(piece: Piece) -> Blocks:
    around = piece.around
    spec, arrivals = service_by_hour() if around.by_hour else (None, None)
    setting = Setting(
        piece.trace,
        around.n_target,
        around.cold_start_s,
        PRICE_RATIO,
        arrivals=arrivals,
        spec=spec,
        notice_s=around.notice_s,
    )
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
    outages, was_short, wanted_hours = [0] * count, False, 0.0
    for at_s, until_s, alive, ready, wanted in stretches(run, trace.length_s, first_s, price):
        block = int((at_s - first_s) // BLOCK_S)
        span_h, short = (until_s - at_s) / HOUR_S, ready < wanted
        hours[block] += span_h
        paid[block] += span_h * alive
        down[block] += span_h * short
        outages[block] += short and not was_short
        wanted_hours += span_h * wanted
        was_short = short
    total = sum(hours)
    paid = [usd / (wanted_hours / total) for usd in paid]
    if not (
        math.isclose(sum(paid) / total, run.cost_relative, rel_tol=1e-6)
        and math.isclose(1 - sum(down) / total, run.availability, rel_tol=1e-6)
    ):
        raise ValueError(f"{trace.name}: {run.label} cannot be cut into blocks: its prices move")
    return Blocks(hours, paid, down, outages, run.failed_launches_per_day, run.growth)


def stretches(
    run: Run, length_s: float, first_s: float, price: Mapping[str, float]
) -> Iterator[tuple[float, float, float, int, int]]:
    """From, until, price of live replicas, replicas ready and wanted: wherever one of these changes, and at block ends."""
    ends = [first_s + BLOCK_S * n for n in range(1, math.ceil((length_s - first_s) / BLOCK_S))]
    changes = [step.at_s for step in run.steps] + [at_s for at_s, _ in run.wanted]
    edges = sorted({first_s, length_s, *ends, *(at_s for at_s in changes if first_s < at_s < length_s)})
    step = size = 0
    for at_s, until_s in pairwise(edges):
        while step + 1 < len(run.steps) and run.steps[step + 1].at_s <= at_s:
            step += 1
        while size + 1 < len(run.wanted) and run.wanted[size + 1][0] <= at_s:
            size += 1
        counts = run.steps[step].counts
        rate = sum(alive * (1.0 if kind == ON_DEMAND else price[zone]) for zone, kind, alive, _ in counts)
        yield at_s, until_s, rate, sum(ready for *_, ready in counts), run.wanted[size][1]


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
    for progress in workers.run(lambda number, _: measure(pieces[to_do[number]]), len(to_do), processes):
        if progress is None or progress.result is None:
            continue
        piece, done = to_do[progress.piece], done + 1
        kept[keys[piece]] = list(progress.result)
        if cache is not None:
            _write(cache, kept)
        now = time.monotonic()
        if now - told_at >= TELL_S or done == len(to_do):
            told_at, left_s = now, (now - began) / done * (len(to_do) - done)
            about = f"{pieces[piece].case.name}, about {left_s / 60:.0f} min left"
            print(f"{done}/{len(to_do)} runs ({about})", file=sys.stderr, flush=True)
    return [Blocks(*kept[key]) for key in keys]


def _write(cache: Path, kept: Mapping[str, list[Any]]) -> None:
    """All of it or nothing: an interrupted benchmark continues from the stored runs."""
    temporary = cache.with_name(cache.name + ".new")
    temporary.write_bytes(orjson.dumps(kept))
    temporary.replace(cache)


def by_block(runs: Sequence[Blocks]) -> list[Sample]:
    """The blocks of a recording as samples, each the mean over policy seeds."""
    return [
        Sample(hours, fmean(run.paid[block] for run in runs), fmean(run.down[block] for run in runs))
        for block, hours in enumerate(runs[0].hours)
    ]
