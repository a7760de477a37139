"""Compares the load balancer with others: the command line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from benchmarks.router.cells import CELLS, EXTRA
from benchmarks.router.choice import chosen
from benchmarks.router.machine import Missing, allow_many_files, cpu_model
from benchmarks.router.options import TLS, parse
from benchmarks.router.report import headlines, render
from benchmarks.router.rows import Row
from benchmarks.router.run import LOAD_CORE, PROXY_CORE, Broken, Plan, measure, say
from benchmarks.router.systems import Family


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    signal.signal(signal.SIGTERM, _terminated)  # as Ctrl-C: contexts are left, processes ended
    if given.show:
        kept = json.loads(given.show.read_text())
        print(render([Row.from_json(row) for row in kept["rows"]], kept["facts"]), end="")
        return 0
    if given.workers == 1 and not {PROXY_CORE, LOAD_CORE} <= os.sched_getaffinity(0):
        print(f"this needs cores {LOAD_CORE} and {PROXY_CORE}", file=sys.stderr)
        return 2
    allow_many_files()
    try:
        systems = chosen(given)
    except Missing as error:
        print(error, file=sys.stderr)
        return 2
    plan = Plan(
        systems=systems,
        cells=[cell for cell in CELLS if (cell.name in given.only if given.only else cell.name not in EXTRA)],
        rounds=1 if given.quick else given.rounds,
        warm_s=0.5 if given.quick else 1.0,
        window_s=2.0 if given.quick else given.seconds,
        seed=given.seed,
        tls=TLS[given.tls],
        keys=given.keys,
        workers=given.workers,
        mover_share=given.mover_share,
    )
    facts = _facts(plan, given)
    try:
        rows = measure(plan)
    except (Broken, Missing) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    facts["load average at the end"] = _load_average()
    print(render(rows, facts), end="")
    if given.json:
        kept = {"facts": facts, "rows": [row.to_json() for row in rows]}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return _verdict(plan, rows, given.check)


def _verdict(plan: Plan, rows: Sequence[Row], check: bool) -> int:
    """The exit code: 1 if one of ours lost, doubled or garbled a response or did not run, or if `check` and a goal is
    missed."""
    right = [row for row in rows if row.family is Family.OURS and not row.faults]
    own = [system for system in plan.systems if system.family is Family.OURS]
    runs = sum(system.takes_part(cell.name) for system in own for cell in plan.cells) * plan.rounds
    missed = [line for line in headlines(rows) if line.cell.has_goal and not line.holds]
    for line in missed if check else ():
        say(f"missed: {line.cell.name} {line.system}")
    return 1 if len(right) < runs or not rows or (check and missed) else 0


def _load_average() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _facts(plan: Plan, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "window": f"{plan.window_s:g} s",
        "seed": plan.seed,
        "agent": given.agent,
        "TLS": given.tls,
        "keys": str(plan.keys),
        "workers": plan.workers,
        "share of a core per mover": plan.mover_share or "no limit",
        "cores": "all"
        if plan.workers > 1
        else f"{PROXY_CORE} for the proxy, {LOAD_CORE} for engines and load",
        "metrics of the Rust routers": "off" if given.no_peer_metrics else "on",
        "on": f"{cpu_model()} ({os.cpu_count()} cores), Linux {platform.release()}, Python {platform.python_version()}",
        "load average at the start": _load_average(),
    }


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
