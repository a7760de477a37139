"""Rules for serving from several regions against each other, in virtual time.

    python -m benchmarks.regions table                          every reference scenario, every rule
    python -m benchmarks.regions table --scenarios idle,day --rules local,one_cost --seeds 3
    python -m benchmarks.regions table --scenario FILE          a scenario of your own (see benchmarks/regions/scenario.py)
    python -m benchmarks.regions papers                         what SkyWalker and GORGO have published, and the same here
    python -m benchmarks.regions cost                           what links cost in CPU time (see benchmarks/regions/cost.py)
    python -m benchmarks.regions list                           the scenarios and the rules

Agents decide with the production code over the model of an L4; round trips are 90 ms (us, eu), 150 (us, asia) and 220 (eu,
asia). Rules: `local` (no region helps another), `all_view` (every agent has every replica), `all_view_rtt` (and knows the
distances), `all_view_plain` (chooses a replica by GORGO's cost without our terms for burden and copies), `skywalker` as published,
`gorgo` as published between regions and plain inside, `central_gorgo` (one agent in us, plain), `central_rr`, `central_ll`,
`central_ch` and `central_sgl` (one agent in us that pushes blindly: round robin, least load, a ring hash, sglang-router's rule),
`skywalker_ch` (a ring hash in both layers), `one_cost`, and `one_cost_own` (without digests of caches). Means over the seeds, with half of a 95 % confidence interval. Lines below a
rule are of a part of its requests: those of an outage, or of the clients of some regions. The last column is the TTFT's p90, of
the shortest of any rule.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.regions import cost, papers, workloads
from benchmarks.regions.measure import Figures, Part, measure, of_clients, parts_of
from benchmarks.regions.reference import DAY_S, SCENARIOS
from benchmarks.regions.rules import RULES
from benchmarks.regions.scenario import Scenario, ScenarioError, load
from benchmarks.regions.world import World
from benchmarks.traffic.tables import Column, print_table

COLUMNS: tuple[Column[Figures], ...] = (
    Column("TTFT p50 s", lambda f: f.ttft_p50, ".3f"),
    Column("p90", lambda f: f.ttft_p90, ".2f"),
    Column("p99", lambda f: f.ttft_p99, ".2f"),
    Column("E2E p50 s", lambda f: f.e2e_p50, ".1f"),
    Column("p90", lambda f: f.e2e_p90, ".1f"),
    Column("tokens/s", lambda f: f.tokens_per_s, ".0f"),
    Column("hit rate", lambda f: f.hit_rate, ".3f"),
    Column("left region", lambda f: f.left, ".3f"),
    Column("in 2 s", lambda f: f.within, ".3f"),
    Column("KB/req", lambda f: f.kb, ".1f"),
    Column("egress $/M", lambda f: f.egress_usd, ".2f"),
    Column("GPU $/M", lambda f: f.gpu_usd, ".0f"),
    Column("lost", lambda f: f.lost, ".0f"),
    Column("bytes outside zone", lambda f: f.outside_bytes, ".0f"),
    Column("digest KB/s", lambda f: f.digest_kb_per_s, ".2f"),
)


PAPER_COLUMNS = (*COLUMNS[:2], *COLUMNS[5:8])


class Run(NamedTuple):
    """One run: a scenario under a rule with a seed."""

    scenario: Scenario
    rule: str
    seed: int
    parts: tuple[Part, ...]


def figures(run: Run) -> list[Figures]:
    """Returns the figures of each part."""
    result = World(run.scenario, RULES[run.rule], run.seed).play()
    return [measure(result, part.since_s, part.until_s, part.regions) for part in run.parts]


def table(args: argparse.Namespace) -> None:
    scenarios = (
        [load(args.scenario)] if args.scenario else [SCENARIOS[name](args.length) for name in args.scenarios]
    )
    for scenario in scenarios if args.scenario else ():
        check_clients(scenario)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for scenario in scenarios:
            parts = _parts(scenario, args.clients_of)
            runs = [Run(scenario, rule, seed, parts) for rule in args.rules for seed in seeds]
            by_line: dict[tuple[str, str], list[Figures]] = {}
            for run, values in zip(runs, pool.map(figures, runs), strict=True):
                for part, value in zip(parts, values, strict=True):
                    by_line.setdefault((run.rule, part.name), []).append(value)
                    rows.append(_row(run, part, value))
            of_best = _of_best(by_line)
            lines = [
                [
                    f"{rule}: {part}" if part else rule,
                    *(column.cell(values) for column in COLUMNS),
                    f"{of_best[rule, part]:.2f}",
                ]
                for (rule, part), values in by_line.items()
            ]
            heads = ["rule", *(column.head for column in COLUMNS), "p90 of best"]
            print_table(f"{scenario.name}: {len(seeds)} seeds", heads, lines)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _of_best(by_line: Mapping[tuple[str, str], Sequence[Figures]]) -> dict[tuple[str, str], float]:
    """Returns how long the TTFT's p90 of each line is, of the shortest of any rule in that part."""
    p90 = {line: fmean(one.ttft_p90 for one in values) for line, values in by_line.items()}
    best: dict[str, float] = {}
    for (_, part), value in p90.items():
        best[part] = min(value, best.get(part, value))
    return {line: value / best[line[1]] for line, value in p90.items()}


def check_clients(scenario: Scenario) -> None:
    """Make the workload of a scenario once. Raises ScenarioError."""
    sizes = {region.name: region.size for region in scenario.regions}
    try:
        workloads.make(scenario.clients.kind, sizes, 1, scenario.clients.options)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ScenarioError(f"clients: {error}") from None


def papers_table(args: argparse.Namespace) -> None:
    """Print the runs of each scenario of the papers, and the published factors beside ours."""
    runs: dict[str, dict[str, Figures]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, (scenario, rules) in papers.scenarios(args.length, args.arena, args.wildchat).items():
            check_clients(scenario)
            tasks = [Run(scenario, rule, args.seed, (Part(""),)) for rule in rules]
            runs[name] = {run.rule: one for run, (one,) in zip(tasks, pool.map(figures, tasks), strict=True)}
            lines = [
                [rule, *(column.cell([one]) for column in PAPER_COLUMNS)] for rule, one in runs[name].items()
            ]
            print_table(scenario.name, ["rule", *(column.head for column in PAPER_COLUMNS)], lines)
    print_table("published and ours", ["source", "what", "published", "ours"], papers.rows(runs))


def _parts(scenario: Scenario, clients_of: Sequence[str]) -> tuple[Part, ...]:
    unknown = sorted(set(clients_of) - set(scenario.region_names))
    if unknown:
        raise ScenarioError(f"--clients-of: {scenario.name} has no region {unknown[0]!r}")
    parts = parts_of(scenario)
    asked = of_clients(frozenset(clients_of))
    return (*parts, asked) if clients_of and asked not in parts else tuple(parts)


def _row(run: Run, part: Part, value: Figures) -> dict[str, object]:
    return {
        "scenario": run.scenario.name,
        "rule": run.rule,
        "part": part.name,
        "seed": run.seed,
        **asdict(value),
    }


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(given: str) -> list[str]:
        names = given.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}; known: {', '.join(known)}")
        return names

    return parse


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"no such file: {path}")
    return Path(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="list the scenarios and the rules")
    run = verbs.add_parser("table", help="run scenarios under rules and print the figures")
    run.add_argument("--scenarios", type=_names(list(SCENARIOS)), default=["idle", "day", "skew", "trees"])
    run.add_argument("--scenario", type=_existing, help="a scenario file, instead of the reference ones")
    run.add_argument("--rules", type=_names(list(RULES)), default=list(RULES))
    run.add_argument(
        "--clients-of",
        type=lambda given: given.split(","),
        default=[],
        metavar="REGIONS",
        help="also print the figures of the clients of these regions",
    )
    run.add_argument("--seeds", type=int, default=5)
    run.add_argument("--first-seed", type=int, default=1)
    run.add_argument(
        "--length", type=float, default=DAY_S, help="seconds of a reference day (default: %(default)g)"
    )
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    run.add_argument("--json", type=Path, help="write every run to this file")
    paper = verbs.add_parser("papers", help="print what has been published beside the same comparison here")
    paper.add_argument("--length", type=float, default=120.0, help="seconds of a run (default: %(default)g)")
    paper.add_argument("--seed", type=int, default=1)
    paper.add_argument("--arena", type=_existing, help="conversations of Chatbot Arena, as JSON lines")
    paper.add_argument("--wildchat", type=_existing, help="conversations of WildChat, as JSON lines")
    paper.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    costs = verbs.add_parser("cost", help="measure the CPU time that links between agents cost")
    costs.add_argument("--parts", type=_names(list(cost.PARTS)), default=list(cost.PARTS))
    costs.add_argument("--rounds", type=int, default=5)
    costs.add_argument("--compiled", action="store_true", help="run agents as a wheel installs them")
    costs.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args()
    if args.verb == "cost":
        return 0 if cost.run(args.parts, args.rounds, compiled=args.compiled) or not args.check else 1
    if args.verb == "list":
        print("scenarios:", ", ".join(SCENARIOS))
        print("rules:    ", ", ".join(RULES))
        return 0
    try:
        (papers_table if args.verb == "papers" else table)(args)
    except ScenarioError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
