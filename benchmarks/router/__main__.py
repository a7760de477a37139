"""Compares the load balancer with others: the command line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.router import run
from benchmarks.router import systems as known
from benchmarks.router.cells import CELLS, EXTRA, STREAM_CELLS
from benchmarks.router.machine import Missing, allow_many_files, cpu_model
from benchmarks.router.report import Row, headlines, render
from benchmarks.router.run import LOAD_CORE, PROXY_CORE, Broken, Plan, measure, say
from benchmarks.router.systems import Family, System

_TLS: dict[str | None, frozenset[str]] = {
    None: frozenset(),
    "targets": frozenset({"targets"}),
    "clients": frozenset({"clients"}),
    "both": frozenset({"targets", "clients"}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)  # as Ctrl-C: contexts are left, processes ended
    if given.show:
        kept = json.loads(given.show.read_text())
        print(render([Row.from_json(row) for row in kept["rows"]], kept["facts"]), end="")
        return 0
    if not {PROXY_CORE, LOAD_CORE} <= os.sched_getaffinity(0):
        print(f"this needs cores {LOAD_CORE} and {PROXY_CORE}", file=sys.stderr)
        return 2
    allow_many_files()
    plan = Plan(
        systems=_systems(given),
        cells=[cell for cell in CELLS if (cell.name in given.only if given.only else cell.name not in EXTRA)],
        rounds=1 if given.quick else given.rounds,
        warm_s=0.5 if given.quick else 1.0,
        window_s=2.0 if given.quick else given.seconds,
        seed=given.seed,
        tls=_TLS[given.tls],
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


def _systems(given: argparse.Namespace) -> list[System]:
    """The chosen systems that this machine can run; missing ones are reported."""
    chosen = _own(given.policy, not given.interpreted)
    chosen += [known.ours(label, Path(folder).resolve(), plain=given.policy) for label, folder in given.also]
    chosen += [
        known.ours(label, arguments=text.split(), plain=given.policy, native=not given.interpreted)
        for label, text in given.variant
    ]
    makers = {
        name: lambda name=name: known.rust_router(name, not given.no_peer_metrics)
        for name in known.PEER_NAMES
    }
    for name, make in {**makers, "nginx": known.nginx, "direct": known.direct}.items():
        try:
            if not given.systems or name in given.systems:
                chosen.append(make())
        except Missing as missing:
            say(f"without {name}: {missing}")
    return [system for system in chosen if not given.systems or system.name in given.systems]


def _own(plain: str, native: bool) -> list[System]:
    """Our agent as wheels have it, and what else has a goal: each mode of continuation, API keys, the other prefix policy.
    The nameless engines are for comparison with those of vLLM's shape."""
    ours = partial(known.ours, native=native)
    return [
        ours("skyserve", plain=plain),
        ours("skyserve-off", arguments=("--continue", "off"), plain=plain, cells=STREAM_CELLS),
        ours("skyserve-nameless", plain=plain, cells=STREAM_CELLS | {"unary"}, nameless=True),
        ours("skyserve-keyed", plain=plain, cells=frozenset({"unary", "light", "streams250"}), keyed=True),
        ours("skyserve-gorgo", prefix="gorgo", cells=frozenset({"prefix"})),
    ]


def _load_average() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _facts(plan: Plan, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "window": f"{plan.window_s:g} s",
        "seed": plan.seed,
        "TLS": given.tls or "none",
        "metrics of the Rust routers": "off" if given.no_peer_metrics else "on",
        "on": f"{cpu_model()} ({os.cpu_count()} cores), Linux {platform.release()}, Python {platform.python_version()}",
        "load average at the start": _load_average(),
    }


def _pair(text: str) -> tuple[str, str]:
    label, equals, rest = text.partition("=")
    if not (label and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=...")
    return label, rest


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _cells(text: str) -> list[str]:
    unknown = set(_names(text)) - {cell.name for cell in CELLS}
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return _names(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=run.__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--seconds", type=float, default=5.0, help="that are counted, per cell (default: %(default)s)")
    add("--quick", action="store_true", help="one round of 2 seconds per cell: does it all run?")
    add("--only", type=_cells, default=[], metavar="CELL,...", help=", ".join(cell.name for cell in CELLS))
    add(
        "--systems",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="skyserve, the peers, nginx, direct, labels",
    )
    add("--policy", default="round_robin", help="ours outside of the prefix cell (default: %(default)s)")
    add(
        "--also",
        type=_pair,
        default=[],
        action="append",
        metavar="LABEL=CHECKOUT",
        help="another checkout of ours",
    )
    add(
        "--variant",
        type=_pair,
        default=[],
        action="append",
        metavar="LABEL=ARGUMENTS",
        help="ours with arguments",
    )
    add("--interpreted", action="store_true", help="ours as an editable install runs it, not compiled")
    add("--tls", choices=[where for where in _TLS if where], help="TLS there; without it plain HTTP")
    add("--no-peer-metrics", action="store_true", help="the Rust routers without their Prometheus port")
    add("--seed", type=int, default=0, help="of the order of systems (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="keep every row")
    add("--show", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    add("--check", action="store_true", help="exit with 1 if a goal is not reached")
    return parser


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
