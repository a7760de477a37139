"""RiskHedge against SpotHedge at equal availability, in the product's simulator, with paired confidence intervals.

    python -m benchmarks.frontier FOLDER FOLDER:cap1 FOLDER:12d \
        --cache frontier.json --markdown

A family is a policy with all settings of its knob: SpotHedge with 0 to 4 spot replicas too many, RiskHedge with six
availability targets. What a family pays for an availability is the least cost of time-sharing between its settings
and all on demand (`skyserve_cli.sim.frontier`), so that neither wins by where its settings happen to lie.

Recorded traces are those of `market_runs`. They are split in time, unless only their first days are taken: RiskHedge's constants were compared on first halves, so the second half counts for more and the first is marked
(neither is unseen: the form of its law was looked at on whole recordings). Each half is a run of its own, in which nothing is known at the start. With --whole a trace is one piece: right for one
that nothing was set on. --by-hour lets the size follow the hour, 2 to 6 replicas; --notice announces losses. Settings are means over --policy-seeds, which draw victims and the order of equal zones.
Intervals: bootstrap over blocks of 6 h.

Synthetic markets come from the shipped generator, with seeds that nothing was set on: the two shipped recipes, and
shapes like those of published recordings (SkyServe, section 5.2) of which there is none at hand. Intervals:
bootstrap over seeds. Beside them each seed is compared by itself, with a paired t interval over seeds.

A resample takes the same blocks (or seeds) for both families, and draws both frontiers again. A family that is mixed
with on demand for most of the time fails few launches for that reason alone; tables of single settings show theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks import synthetic
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
from benchmarks.market_runs import (
    FAMILIES,
    OVERPROVISIONS,
    RISK_HEDGE,
    SPOTHEDGE,
    TARGETS,
    Blocks,
    Case,
    Circumstances,
    by_block,
    pieces_of,
    recorded_cases,
    run_all,
)
from benchmarks.synthetic import Lull, MarketParameters
from skyserve_cli.account.runs import percent
from skyserve_cli.sim.settings import Job

AVAILABILITIES = (0.99, 0.995, 0.999)


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


# --- runs -----------------------------------------------------------------------------------------------------


def synthetic_case(name: str, seeds: Sequence[int]) -> Case:
    market, days = SHAPES[name]
    drawn = tuple((seed, synthetic.generate(market, seed, days, name)) for seed in seeds)
    return Case(name, f"seeds {seeds[0]}-{seeds[-1]}, {days:.3g} d each", False, drawn)


# --- what it comes to -------------------------------------------------------------------------------------------


def families_of(case: Case, runs: Mapping[Job, Sequence[Blocks]]) -> dict[str, Family]:
    """Samples are the blocks of a recording, each the mean over policy seeds; else the synthetic markets."""
    return {
        name: tuple(
            Outcome(
                job,
                tuple(by_block(runs[job]) if case.recorded else map(_whole, runs[job])),
                fmean(blocks.failed_launches_per_day for blocks in runs[job]),
            )
            for job in jobs
        )
        for name, jobs in FAMILIES.items()
    }


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


def mean_table(found: Found, resamples: int) -> Iterator[Row]:
    """The mean over recordings; a resample draws the blocks of each by itself."""
    yield ["availability", "SpotHedge", "RiskHedge (95 % CI)", "difference (95 % CI)"]
    families = [each for case, each in found.items() if case.recorded]
    for availability in AVAILABILITIES if len(families) > 1 else ():
        spot, risk = ([cost(each[name], availability) for each in families] for name in FAMILIES)
        drawn = [_draws(each, availability, resamples) for each in families]
        sure = [
            _interval([fmean(one) for one in zip(*(d[which] for d in drawn), strict=True)])
            for which in (0, 1)
        ]
        yield [
            f"{availability:.1%}", f"{fmean(spot) * 100:.1f}",
            f"{fmean(risk) * 100:.1f} ({sure[0].low * 100:.1f} … {sure[0].high * 100:.1f})",
            _difference(fmean(risk) - fmean(spot), sure[1]),
        ]  # fmt: skip


def _draws(
    families: Mapping[str, Family], availability: float, resamples: int
) -> tuple[list[float], list[float]]:
    """RiskHedge's cost in resamples of the blocks, and by how much it exceeds SpotHedge's."""
    spot, risk = families[SPOTHEDGE], families[RISK_HEDGE]
    rng, size = np.random.default_rng(1), len(risk[0].samples)
    costs, more = [], []
    for _ in range(resamples):
        drawn = rng.integers(size, size=size).tolist()
        costs.append(cost(risk, availability, drawn))
        more.append(costs[-1] - cost(spot, availability, drawn))
    return costs, more


def _interval(values: Sequence[float]) -> Interval:
    low, high = np.percentile(values, (2.5, 97.5))
    return Interval(float(low), float(high))


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
        "Mean of the recorded traces": mean_table(found, resamples),
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
    parser.add_argument("--by-hour", action="store_true", help="2 to 6 replicas by the hour of the day")
    parser.add_argument("--notice", type=float, default=0.0, help="seconds before a loss")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--cache", type=Path, help="JSON file in which finished runs are kept")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [c for source in args.traces for c in recorded_cases(source, args.whole, args.policy_seeds)]
    cases += [synthetic_case(name, seeds) for name in args.shapes.split(",") if name]
    around = Circumstances(args.replicas, args.cold_start, args.by_hour, args.notice)
    pieces = list(pieces_of(cases, around, [job for family in FAMILIES.values() for job in family]))
    runs: dict[Case, dict[Job, list[Blocks]]] = {}
    for piece, blocks in zip(pieces, run_all(pieces, args.cache, args.jobs), strict=True):
        runs.setdefault(piece.case, {}).setdefault(replace(piece.job, seed=0), []).append(blocks)
    found = {case: families_of(case, by_job) for case, by_job in runs.items()}
    print(report(found, args.resamples, args.markdown))


if __name__ == "__main__":
    main()
