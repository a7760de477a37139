"""The runs: every round starts every system and measures the cells one after the other, systems in random order.

A proxy has core 1 to itself, the mock engine and the load generator share core 0. Systems that take part in a cell
follow each other within seconds, so that what else the machine does meets all of them; nothing is measured in a
system's first moments (each is warmed, and its responses checked, before its first cell).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.router import systems as known
from benchmarks.router.cells import CELLS, EXTRA, STREAM_CELLS, TARGETS, Cell
from benchmarks.router.machine import (
    Missing,
    Process,
    allow_many_files,
    ask,
    compiled,
    cpu_model,
    free_port,
    is_free,
    pinned,
)
from benchmarks.router.report import Row, headlines, render
from benchmarks.router.systems import Family, Group, Launch, System

_PROXY_CORE, _LOAD_CORE = 1, 0
_START_S = 60.0
_SETTLE_S = 1.0
_SETTLE_LIMIT_S = 30.0
_IN_A_ROW = 40  # right responses before a system counts as started
_LOAD_LIMIT_S = 120.0
_PROBE = json.dumps(
    {"model": "mock", "messages": [{"role": "user", "content": "nonce-0000000000000000"}]}
).encode()


class Broken(RuntimeError):
    """A system does not start, or responds wrongly while it is warmed."""


@dataclass(frozen=True, slots=True)
class Plan:
    systems: Sequence[System]
    cells: Sequence[Cell]
    rounds: int
    warm_s: float
    window_s: float
    seed: int


class Backend:
    """A mock engine on TARGETS ports, new for every group of cells."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ports: list[int] = json.loads(process.line())["ports"]

    def requests(self) -> int:
        return self._counts()[0]

    def settle(self) -> None:
        """Waits until no stream runs and no request arrives: an overloaded proxy still sends those of clients that
        have given up, and they would be counted as the next system's."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        before = self._counts()
        while time.monotonic() < deadline:
            time.sleep(_SETTLE_S / 4)
            now = self._counts()
            if now == before and not now[1]:
                return
            before = now

    def _counts(self) -> tuple[int, int]:
        """Requests so far, and streams that run."""
        _, body = ask(self.ports[0], "GET", "/counts")
        ports = json.loads(body).values()
        return sum(port["requests"] for port in ports), sum(port["running"] for port in ports)


@dataclass(frozen=True, slots=True)
class Running:
    system: System
    port: int
    process: Process | None  # None: there is nothing in between
    backend: Backend


def measure(plan: Plan) -> list[Row]:
    """Measures all rounds. A system that breaks is reported and left out of later rounds."""
    rng = random.Random(plan.seed)
    rows: list[Row] = []
    broken: set[tuple[str, Group]] = set()
    ports: list[int] = []
    for number in range(1, plan.rounds + 1):
        for group in Group:
            cells = [cell for cell in plan.cells if cell.group is group]
            able = [
                system
                for system in plan.systems
                if (system.name, group) not in broken and any(system.takes_part(cell.name) for cell in cells)
            ]
            if not cells or not able:
                continue
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-benchmark-")))
                backends = {
                    nameless: _backend(stack, folder, nameless)
                    for nameless in sorted({system.nameless for system in able})
                }
                running = _started(stack, folder, backends, able, group, broken)
                ports += [one.port for one in running]
                ports += [port for backend in backends.values() for port in backend.ports]
                for cell in cells:
                    rng.shuffle(running)
                    for one in running:
                        if not one.system.takes_part(cell.name):
                            continue
                        if one.process is None and not (cell.rate_s or cell.late_s):
                            continue  # without a proxy there is only latency to see
                        try:
                            row = _row(number, cell, one, folder, plan)
                        except Broken as error:
                            _say(f"round {number} {cell.name:12} {one.system.name:18} broken: {error}")
                            continue
                        rows.append(row)
                        _say(
                            f"round {number} {cell.name:12} {one.system.name:18} {row.cost:8.1f} {row.faults}"
                        )
    left = [port for port in ports if not is_free(port)]
    if left:
        raise Broken(f"processes still listen on the ports {left}")
    return rows


def _backend(stack: ExitStack, folder: Path, nameless: bool) -> Backend:
    command = [str(compiled("backend")), str(TARGETS), *(["--nameless"] if nameless else [])]
    log = folder / f"backend-{nameless}.log"
    return Backend(stack.enter_context(Process(command, log, _LOAD_CORE, folder, pipe=True)))


def _started(
    stack: ExitStack,
    folder: Path,
    backends: Mapping[bool, Backend],
    able: Sequence[System],
    group: Group,
    broken: set[tuple[str, Group]],
) -> list[Running]:
    """Starts all systems at once, and warms each when it responds. Returns those that work."""
    launched = []
    for system in able:
        backend = backends[system.nameless]
        if system.family is Family.DIRECT:
            launched.append(Running(system, backend.ports[0], None, backend))
            continue
        own = folder / system.name
        own.mkdir()
        port = free_port()
        command = system.command(Launch(port, backend.ports, group, own))
        process = Process(command, folder / f"{system.name}.log", _PROXY_CORE, system.cwd)
        launched.append(Running(system, port, stack.enter_context(process), backend))
    ready = []
    for one in launched:
        try:
            if one.process is not None:
                _await(one.port, one.process)
                _warm(one, folder)
            ready.append(one)
        except Broken as error:
            broken.add((one.system.name, group))
            _say(f"{one.system.name} is left out of the {group.value} cells: {error}")
    time.sleep(_SETTLE_S)
    return ready


def _await(port: int, process: Process) -> None:
    """Waits until it has given many right responses in a row: routers discover their targets one by one."""
    deadline = time.monotonic() + _START_S
    in_a_row = 0
    while in_a_row < _IN_A_ROW:
        if process.ended or time.monotonic() > deadline:
            raise Broken(process.log_archive() or "it does not respond")
        try:
            status, _ = ask(
                port, "POST", "/v1/chat/completions", _PROBE, {"Content-Type": "application/json"}
            )
        except (OSError, HTTPException):
            status = 0
        in_a_row = in_a_row + 1 if status == 200 else 0
        if not in_a_row:
            time.sleep(0.1)


def _warm(one: Running, folder: Path) -> None:
    """Sends a short load of each kind. Raises Broken if a response is wrong."""
    for cell in (
        Cell("warm-unary", "", "", connections=8),
        Cell("warm-streams", "", "", mode="streams", connections=8),
        Cell("warm-again", "", "", connections=8),
    ):
        said = _load(cell, one, folder, 0.1, 0.3)
        if said["answered"] != said["sent"]:
            raise Broken(f"{cell.name}: {said['answered']} right responses to {said['sent']} requests")


def _row(number: int, cell: Cell, one: Running, folder: Path, plan: Plan) -> Row:
    one.backend.settle()
    before = one.backend.requests()
    said = _load(cell, one, folder, plan.warm_s, plan.window_s)
    return Row(
        round=number,
        cell=cell.name,
        system=one.system.name,
        family=one.system.family,
        version=one.system.version,
        policy=one.system.policy(cell.group),
        load=said,
        engine_requests=one.backend.requests() - before,
        streams=0 if cell.mode == "unary" else cell.connections,
        measure=cell.measure,
    )


def _load(cell: Cell, one: Running, folder: Path, warm_s: float, window_s: float) -> dict[str, Any]:
    command = [
        str(compiled("load")),
        cell.mode,
        "-P",
        str(one.port),
        *cell.load_arguments(folder, warm_s, window_s),
    ]
    if one.process is not None:
        command += ["-p", ",".join(map(str, one.process.pids()))]
    command += ["-b", ",".join(map(str, one.backend.process.pids()))]
    try:
        with pinned(_LOAD_CORE):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{cell.name}: no end after {_LOAD_LIMIT_S:g} s") from error
    if done.returncode:
        raise Broken(f"{cell.name}: {done.stderr.strip()[:500]}")
    if done.stderr:
        _say(done.stderr.strip()[:1000])
    said: dict[str, Any] = json.loads(done.stdout)
    return said


# --- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)  # as Ctrl-C: contexts are left, processes ended
    if given.show:
        kept = json.loads(given.show.read_text())
        print(render([Row.from_json(row) for row in kept["rows"]], kept["facts"]), end="")
        return 0
    if not {_PROXY_CORE, _LOAD_CORE} <= os.sched_getaffinity(0):
        print(f"this needs cores {_LOAD_CORE} and {_PROXY_CORE}", file=sys.stderr)
        return 2
    allow_many_files()
    plan = Plan(
        systems=_systems(given),
        cells=[cell for cell in CELLS if (cell.name in given.only if given.only else cell.name not in EXTRA)],
        rounds=1 if given.quick else given.rounds,
        warm_s=0.5 if given.quick else 1.0,
        window_s=2.0 if given.quick else given.seconds,
        seed=given.seed,
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
        _say(f"missed: {line.cell.name} {line.system}")
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
            _say(f"without {name}: {missing}")
    return [system for system in chosen if not given.systems or system.name in given.systems]


def _own(plain: str, native: bool) -> list[System]:
    """Our agent as wheels have it, and what else has a goal: each mode of continuation, the other prefix policy. The
    nameless engines are for comparison with those of vLLM's shape."""
    ours = partial(known.ours, native=native)
    return [
        ours("skyserve", plain=plain),
        ours("skyserve-text", arguments=("--continue", "text"), plain=plain, cells=STREAM_CELLS),
        ours("skyserve-off", arguments=("--continue", "off"), plain=plain, cells=STREAM_CELLS),
        ours("skyserve-nameless", plain=plain, cells=STREAM_CELLS | {"unary"}, nameless=True),
        ours("skyserve-gorgo", prefix="gorgo", cells=frozenset({"prefix"})),
    ]


def _load_average() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _facts(plan: Plan, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "rounds": plan.rounds,
        "window": f"{plan.window_s:g} s",
        "seed": plan.seed,
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
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
    add("--no-peer-metrics", action="store_true", help="the Rust routers without their Prometheus port")
    add("--seed", type=int, default=0, help="of the order of systems (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="keep every row")
    add("--show", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    add("--check", action="store_true", help="exit with 1 if a goal is not reached")
    return parser


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
