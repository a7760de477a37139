"""The runs: every round starts every system and measures the cells one after the other, systems in random order.

A proxy has core 1 to itself, the mock engine and the load generator share core 0; with several workers nothing is pinned. Systems that take part in a cell
follow each other within seconds, so that what else the machine does meets all of them; nothing is measured in a
system's first moments (each is warmed, and its responses checked, before its first cell).
"""

from __future__ import annotations

import json
import random
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.router.cells import BY_NAME, TARGETS, Cell
from benchmarks.router.certificates import certified
from benchmarks.router.keys import NO_KEYS, Keys, client_key
from benchmarks.router.machine import (
    Process,
    ask,
    compiled,
    free_port,
    is_free,
    limited,
    pinned,
)
from benchmarks.router.rows import Row
from benchmarks.router.systems import Family, Group, Launch, System, Tls

PROXY_CORE, LOAD_CORE = 1, 0
_START_S = 60.0
_SETTLE_S = 1.0
_SETTLE_LIMIT_S = 30.0
_IN_A_ROW = 40  # right responses before a system counts as started
_LOAD_LIMIT_S = 180.0
_PROBE = json.dumps(
    {"model": "mock", "messages": [{"role": "user", "content": "nonce-0000000000000000"}]}
).encode()
_PROBE_HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {client_key(0)}"}


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
    tls: frozenset[str] = frozenset()  # where it is: at "targets", "clients"
    keys: Keys = NO_KEYS  # that come in turn
    workers: int = 1  # of each proxy
    mover_share: float = 0.0  # of a core, for each thread of ours that moves bytes; 0: no limit

    def core(self, wanted: int) -> int | None:
        """Return the core for a process; None: any. Several workers are not to share one."""
        return wanted if self.workers == 1 else None


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
    tls: Tls | None = None
    facts: dict[str, object] = field(default_factory=dict)  # how it runs, ours by its own status


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
                if (system.name, group) not in broken
                and any(system.takes_part(cell.name) for cell in cells)
                and (system.can_tls or not plan.tls)
            ]
            if not cells or not able:
                continue
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-benchmark-")))
                tls = certified(folder, plan.tls) if plan.tls else None
                backends = {
                    nameless: _backend(stack, folder, nameless, tls, plan)
                    for nameless in sorted({system.nameless for system in able})
                }
                running = _started(stack, folder, backends, able, group, broken, tls, plan)
                ports += [one.port for one in running]
                ports += [port for backend in backends.values() for port in backend.ports]
                for cell in cells:
                    rng.shuffle(running)
                    try:
                        cell = _paced(number, cell, running, rows, folder, plan)
                    except Broken as error:
                        say(f"round {number} {cell.name:12} left out: {error}")
                        continue
                    for one in running:
                        if not one.system.takes_part(cell.name):
                            continue
                        if one.process is None and not cell.is_paced:
                            continue  # without a proxy there is only latency to see
                        try:
                            row = _row(number, cell, one, folder, plan)
                        except Broken as error:
                            say(f"round {number} {cell.name:12} {one.system.name:18} broken: {error}")
                            continue
                        rows.append(row)
                        say(
                            f"round {number} {cell.name:12} {one.system.name:18} {row.cost:8.1f} {row.faults}"
                        )
    left = [port for port in ports if not is_free(port)]
    if left:
        raise Broken(f"processes still listen on the ports {left}")
    return rows


def _paced(
    number: int, cell: Cell, running: Sequence[Running], rows: Sequence[Row], folder: Path, plan: Plan
) -> Cell:
    """Return the cell with its rate, if that is a share of what our agent reaches: the first of ours in the plan, in this round.
    Raises Broken."""
    if not cell.share_of_maximum:
        return cell
    names = [system.name for system in plan.systems if system.family is Family.OURS]
    ours = sorted(
        (one for one in running if one.system.name in names), key=lambda one: names.index(one.system.name)
    )
    if not ours:
        raise Broken("none of ours runs, whose maximum it needs")
    one, saturated = ours[0], BY_NAME[cell.beside]
    done = [
        row
        for row in rows
        if (row.round, row.cell, row.system) == (number, saturated.name, one.system.name) and not row.faults
    ]
    row = done[0] if done else _row(number, saturated, one, folder, plan)
    if row.faults:
        raise Broken(f"{saturated.name} of {one.system.name}: {row.faults}")
    return replace(cell, rate_s=round(cell.share_of_maximum * row.rate_s, 1))


def _backend(stack: ExitStack, folder: Path, nameless: bool, tls: Tls | None, plan: Plan) -> Backend:
    command = [str(compiled("backend")), str(TARGETS), *(["--nameless"] if nameless else [])]
    if tls is not None:
        command += ["--tls", str(tls.certificate), str(tls.key)]
    log = folder / f"backend-{nameless}.log"
    return Backend(stack.enter_context(Process(command, log, plan.core(LOAD_CORE), folder, pipe=True)))


def _started(
    stack: ExitStack,
    folder: Path,
    backends: Mapping[bool, Backend],
    able: Sequence[System],
    group: Group,
    broken: set[tuple[str, Group]],
    tls: Tls | None,
    plan: Plan,
) -> list[Running]:
    """Starts all systems at once, and warms each when it responds. Returns those that work."""
    launched: list[tuple[Running, Launch]] = []
    for system in able:
        backend = backends[system.nameless]
        port = backend.ports[0] if system.family is Family.DIRECT else free_port()
        launch = Launch(port, backend.ports, group, folder / system.name, tls, plan.workers)
        if system.family is Family.DIRECT:
            launched.append((Running(system, port, None, backend), launch))
            continue
        launch.folder.mkdir()
        process = Process(
            system.command(launch),
            folder / f"{system.name}.log",
            plan.core(PROXY_CORE),
            system.cwd,
            environment=system.environment(launch),
        )
        launched.append((Running(system, port, stack.enter_context(process), backend, tls), launch))
    ready = []
    for one, launch in launched:
        try:
            if (running := one.process) is not None:
                _await(one.port, running, one.tls)
                one = replace(one, facts=_facts(one, running, launch))
                _warm(one, folder, plan)
                if plan.mover_share and one.system.family is Family.OURS:
                    stack.enter_context(limited(running.movers(), plan.mover_share))
            ready.append(one)
        except Broken as error:
            broken.add((one.system.name, group))
            say(f"{one.system.name} is left out of the {group.value} cells: {error}")
    time.sleep(_SETTLE_S)
    return ready


def _facts(one: Running, process: Process, launch: Launch) -> dict[str, object]:
    """Complete the configuration of a system, and return how it runs. Raises Broken."""
    try:
        facts = one.system.settle(launch, process)
    except (OSError, ValueError, KeyError) as error:
        raise Broken(f"it does not report how it runs: {error}") from error
    return {**facts, "workers": launch.workers} if facts else facts


def _await(port: int, process: Process, tls: Tls | None) -> None:
    """Waits until it has given many right responses in a row: routers discover their targets one by one."""
    deadline = time.monotonic() + _START_S
    trust = None
    if tls is not None and tls.clients:
        trust = ssl.create_default_context(cafile=str(tls.authority))
    in_a_row = 0
    while in_a_row < _IN_A_ROW:
        if process.ended or time.monotonic() > deadline:
            raise Broken(process.last_lines() or "it does not respond")
        try:
            status, _ = ask(port, "POST", "/v1/chat/completions", _PROBE, _PROBE_HEADERS, trust)
        except (OSError, HTTPException):
            status = 0
        in_a_row = in_a_row + 1 if status == 200 else 0
        if not in_a_row:
            time.sleep(0.1)


def _warm(one: Running, folder: Path, plan: Plan) -> None:
    """Sends a short load of each kind. Raises Broken if a response is wrong."""
    for cell in (
        Cell("warm-unary", "", "", connections=8),
        Cell("warm-streams", "", "", mode="streams", connections=8),
        Cell("warm-again", "", "", connections=8),
    ):
        said = _load(cell, one, folder, 0.1, 0.3, plan)
        if said["answered"] != said["sent"]:
            raise Broken(f"{cell.name}: {said['answered']} right responses to {said['sent']} requests")


def _row(number: int, cell: Cell, one: Running, folder: Path, plan: Plan) -> Row:
    one.backend.settle()
    before = one.backend.requests()
    said = _load(cell, one, folder, plan.warm_s, plan.window_s, plan)
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
        facts=one.facts,
        wanted_s=cell.rate_s,
    )


def _load(
    cell: Cell, one: Running, folder: Path, warm_s: float, window_s: float, plan: Plan
) -> dict[str, Any]:
    command = [
        str(compiled("load")),
        cell.mode,
        "-P",
        str(one.port),
        *cell.load_arguments(folder, warm_s, window_s),
        *("-k", str(plan.keys.in_turn)),
    ]
    if one.tls is not None and one.tls.clients:
        command.append("-t")
    if one.process is not None:
        command += ["-p", ",".join(map(str, one.process.pids()))]
    command += ["-b", ",".join(map(str, one.backend.process.pids()))]
    try:
        core = plan.core(LOAD_CORE)
        place: AbstractContextManager[None] = nullcontext() if core is None else pinned(core)
        with place:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"{cell.name}: no end after {_LOAD_LIMIT_S:g} s") from error
    if done.returncode:
        raise Broken(f"{cell.name}: {done.stderr.strip()[:500]}")
    if done.stderr:
        say(done.stderr.strip()[:1000])
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
