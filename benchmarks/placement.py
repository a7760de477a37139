"""Every placement policy over recorded spot traces, as tables.

    python -m benchmarks.placement table FOLDER ...      whole traces, 4 replicas, 183 s
    python -m benchmarks.placement paper FOLDER ...      24-h windows, 3 replicas, 120 s (SkyServe §5.2)

A trace of zeros and ones is read twice: as "obtainable, any number" and, with `:cap1`, as one instance per zone.
Folders or names of shipped traces. Figures are availability % / cost % of N on-demand replicas / preemptions a day /
failed launches a day / on-demand share of cost %, means over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from skyserve_cli.account.runs import Run
from skyserve_cli.sim import trace as traces
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import Trace

SEEDED = ("even_spread", "round_robin", "spothedge", "spothedge_literal")
TABLE = (
    "omniscient", "risk_hedge", "spothedge", "spothedge_literal", "round_robin", "even_spread", "single_zone",
    "single_region", "asg", "on_demand",
)  # fmt: skip
PAPER = ("even_spread", "round_robin", "spothedge", "spothedge_literal", "risk_hedge", "omniscient")
DAY_S = 86_400.0


class Case(NamedTuple):
    trace: Trace
    job: Job
    replicas: int
    cold_start_s: float

    def run(self) -> Run:
        return simulate(Setting(self.trace, self.replicas, self.cold_start_s), self.job)


def loaded(source: str) -> Trace:
    """A folder, or a shipped trace; ":cap1" reads a probe's 1 as one instance."""
    name, _, cap = source.partition(":")
    return traces.load(traces.find(name), capacity_per_zone=1 if cap == "cap1" else None)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, Case]]:
    """(trace, policy, run)."""
    for source in args.traces:
        trace = loaded(source)
        whole = args.what == "table"
        for policy in args.policies or (TABLE if whole else PAPER):
            for window in [trace] if whole else trace.windows(DAY_S):
                for seed in range(args.seeds if policy in SEEDED else 1):
                    job = Job(policy, args.overprovision, args.availability_target, seed)
                    yield source, policy, Case(window, job, 4 if whole else 3, 183.0 if whole else 120.0)


def line(policy: str, runs: Sequence[Run]) -> str:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    spread = statistics.stdev([run.cost_relative * 100 for run in runs]) if len(runs) > 1 else 0.0
    return (
        f"  {policy:18} {mean('availability') * 100:7.2f} {mean('cost_relative') * 100:6.1f} "
        f"{mean('preemptions_per_day'):6.0f} {mean('failed_launches_per_day'):7.0f} "
        f"{mean('on_demand_cost_share') * 100:6.1f}   {len(runs):3} runs, sd of cost {spread:4.1f}, "
        f"{sum(run.cpu_s for run in runs) / sum(run.days for run in runs):5.2f} s CPU per day"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("table", "paper"))
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--policies", type=lambda text: text.split(","))
    parser.add_argument("--overprovision", type=int, default=1)
    parser.add_argument("--availability-target", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    wanted = list(cases(args))
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = list(pool.map(Case.run, (case for _, _, case in wanted)))
    found: dict[tuple[str, str], list[Run]] = {}
    for (source, policy, _), run in zip(wanted, runs, strict=True):
        found.setdefault((source, policy), []).append(run)
    shown = None
    for (source, policy), several in found.items():
        if source != shown:
            print(f"{source}\n  policy               avail   cost preempt  failed     od")
            shown = source
        print(line(policy, several))


if __name__ == "__main__":
    main()
