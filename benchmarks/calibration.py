"""RiskHedge: what was asked and what was realised, in the product's simulator.

    python -m benchmarks.calibration FOLDER FOLDER:cap1:8d --cache calibration.json

Prints, for each recorded trace (see `market_runs`) and availability target, the time below the wanted number over the time
that the target allows (1.00 keeps the promise exactly), its 95 % interval by a bootstrap over blocks of 6 h, and the outages
seen and allowed. The last row is the geometric mean over traces. With --by-hour the size follows the hour, and the part of the
shortfall that was growth is printed too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.frontier import table
from benchmarks.frontier_stats import Sample, bootstrap
from benchmarks.market_runs import (
    FAMILIES,
    RISK_HEDGE,
    TARGETS,
    Blocks,
    Case,
    Circumstances,
    by_block,
    pieces_of,
    recorded_cases,
    run_all,
)
from skyserve_cli.account.runs import percent
from skyserve_cli.sim.settings import Job

_LEAST = 0.02  # a setting without an outage counts as this in the geometric mean


def ratio(samples: Sequence[Sample], target: float, drawn: Sequence[int] | None = None) -> float:
    """Realised over allowed unavailability, over the samples that were drawn, or over all."""
    chosen = samples if drawn is None else [samples[index] for index in drawn]
    return sum(one.down for one in chosen) / sum(one.hours for one in chosen) / (1.0 - target)


def rows(
    found: Mapping[Case, Mapping[Job, Sequence[Blocks]]],
    targets: Sequence[float],
    window_s: float,
    resamples: int,
) -> list[list[str]]:
    """A row for each trace, and their geometric means."""
    shown = [["trace", "days", *(percent(target) for target in targets)]]
    ratios: dict[float, list[float]] = {target: [] for target in targets}
    for case, runs in found.items():
        days = sum(next(iter(runs.values()))[0].hours) / 24
        row = [case.name, f"{days:.1f}"]
        for target in targets:
            blocks = runs[Job(RISK_HEDGE, availability_target=target)]
            samples = by_block(blocks)
            value = ratio(samples, target)
            ratios[target].append(max(_LEAST, value))
            sure = bootstrap(len(samples), lambda drawn, s=samples, t=target: ratio(s, t, drawn), resamples)  # type: ignore[misc]
            outages = fmean(sum(one.outages) for one in blocks)
            allowed = days * 86_400 * (1.0 - target) / window_s
            grown = fmean(one.growth for one in blocks)
            growth = f", growth {grown / (1.0 - target):.2f}" if grown else ""
            row.append(
                f"{value:.2f} ({sure.low:.2f} … {sure.high:.2f}{growth}; {outages:.0f} of {allowed:.1f})"
            )
        shown.append(row)
    means = [math.exp(fmean(map(math.log, ratios[target]))) for target in targets]
    return [*shown, ["geometric mean", "", *(f"{mean:.2f}" for mean in means)]]


def shares(text: str) -> list[float]:
    """Parse numbers between 0 and 1, separated by commas."""
    found = [float(part) for part in text.split(",")]
    if not all(0.0 < share < 1.0 for share in found):
        raise argparse.ArgumentTypeError(f"{text}: each must be between 0 and 1, as 0.999")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", help="FOLDER, FOLDER:cap1, FOLDER:12d; in one piece")
    parser.add_argument(
        "--targets", type=shares, default=TARGETS, help="shares of the time, with commas: 0.995,0.999"
    )
    parser.add_argument("--policy-seeds", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--cold-start", type=float, default=183.0, help="seconds")
    parser.add_argument("--by-hour", action="store_true", help="2 to 6 replicas by the hour of the day")
    parser.add_argument("--notice", type=float, default=0.0, help="seconds before a loss")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument(
        "--cache", type=Path, help="JSON file in which finished runs are kept; shared with frontier"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    around = Circumstances(args.replicas, args.cold_start, args.by_hour, args.notice)
    jobs = [job for job in FAMILIES[RISK_HEDGE] if job.availability_target in args.targets]
    jobs += [Job(RISK_HEDGE, availability_target=t) for t in args.targets if t not in TARGETS]
    cases = [case for source in args.traces for case in recorded_cases(source, True, args.policy_seeds)]
    pieces = list(pieces_of(cases, around, jobs))
    found: dict[Case, dict[Job, list[Blocks]]] = {}
    for piece, blocks in zip(pieces, run_all(pieces, args.cache, args.jobs), strict=True):
        found.setdefault(piece.case, {}).setdefault(replace(piece.job, seed=0), []).append(blocks)
    print(
        "time below the wanted number over the allowed time (95 % interval; outages seen of those allowed)\n"
    )
    print(table(rows(found, args.targets, args.cold_start + 30.0, args.resamples), args.markdown))


if __name__ == "__main__":
    main()
