"""Routing policies against each other, and against the real sglang-router and smg, over real engine processes.

    python -m benchmarks.routing_live                        5 rounds, trees of thought and chat: about an hour
    python -m benchmarks.routing_live --quick                one short round: does it all run?
    python -m benchmarks.routing_live --simulated            the same cells in the simulator as well, to compare
    python -m benchmarks.routing_live --show rows.json       the tables of rows kept by --json, and nothing measured

Four processes of `skyserve_cli.engine` (OpenAI's API over HTTP, the time and the prefix cache of an L4, or of an
A100 for Mooncake's long prompts) stand behind one load balancer at a time. The load are the workloads of
`benchmarks.routing`, at the load of its tables (`documents` at 1.7 times that, where hits decide if it can be carried), played by `benchmarks.routing_client` as streamed chat completions.
Every run has engines and a balancer of its own; within a round all have the same calls to serve, one after the other
in random order, and ratios are taken within rounds. Medians over the rounds, with the interval of the sign test
(5 rounds: smallest to largest, 94 %).

Times are the model's: those of the clock times `--speed`, by which the engines are faster. So a millisecond that a
balancer or a busy machine takes counts `--speed` fold; `machine` is how busy all processors were, by anybody, and
`late` how late the client itself was woken, at the 99th percentile. Peers have their defaults. Ours have them too, but
for the interval of their probes, which is the engines' business and as much faster: that load on the machine is as
much too high. `skywalker` and `sglang_router` are our agent with rules as they were published
(`benchmarks.routing_published`). `imbalance` is the work of the busiest engine over the mean by the engines'
counters, of the whole run (the simulator leaves out its first tenth).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.client import HTTPException
from math import inf
from pathlib import Path
from typing import NamedTuple, NoReturn

import uvloop

from benchmarks.router.machine import Missing, Process, ask, cpu_model, free_port, is_free
from benchmarks.router.ours import ours
from benchmarks.router.rust_routers import rust_router
from benchmarks.router.systems import CHECKOUT, Group, Launch
from benchmarks.routing_client import Until, play
from benchmarks.routing_client import ask as complete
from benchmarks.routing_live_report import CLAIMANT, REFERENCE, Row, render, worse
from benchmarks.routing_published import PUBLISHED, make_policy
from benchmarks.routing_workloads import DATA, GSM8K, WORKLOADS, Load
from benchmarks.traffic.driver import Setting, run
from benchmarks.traffic.measure import Metrics, ideal_hit_rate, measure
from benchmarks.traffic.workloads import Workload, walk
from lb.config import file as config_file
from lb.config.options import Pushing, PushMode
from lb.config.schema import Table, Target
from policies.routing.registry import POLICIES
from skyserve_cli.engine.profiles import profile_named

PEERS = ("sglang-router", "smg")
BLIND = ":blind"  # after a policy's name: its choice alone, requests do not wait for room
ONE = ":one"  # the event loop moves chunks, without threads beside it
OURS = ("cache_aware", "prefix_tree", "skywalker", "gorgo", "least_load")
SERVES = re.compile(rb"http://127\.0\.0\.1:(\d+)")
COUNTER = re.compile(rb"^vllm:(\w+)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
START_S = 60.0
RUN_LIMIT_S = 600.0
FIRST_WORDS = 8  # prompts that are sent at once, until every engine has had one


class Played(NamedTuple):
    """A workload as it is played here: `load` as in `benchmarks.routing`, no calls from `until_s` on."""

    load: Load
    until_s: float = inf


CELLS = {
    "trees": Played(Load(WORKLOADS["trees"].load.per_engine, 2)),
    "mixed": Played(Load(WORKLOADS["mixed"].load.per_engine, 1)),
    "chat": Played(Load(WORKLOADS["chat"].load.per_engine, 120), 120),
    "mooncake": Played(Load(WORKLOADS["mooncake"].load.per_engine, 120)),
    "documents": Played(Load(1.7 * WORKLOADS["documents"].load.per_engine, 120)),
}
QUICK = {
    "trees": Played(Load(3, 1)),
    "mixed": Played(Load(3, 1)),
    "chat": Played(Load(WORKLOADS["chat"].load.per_engine, 40), 40),
    "mooncake": Played(Load(WORKLOADS["mooncake"].load.per_engine, 30)),
    "documents": Played(Load(WORKLOADS["documents"].load.per_engine, 30)),
}


class Broken(RuntimeError):
    """A process that does not start."""


@dataclass(frozen=True, slots=True)
class System:
    """A balancer. `policy` is what the simulator calls it."""

    name: str
    version: str
    policy: str
    pushing: Pushing
    command: Callable[[Launch], list[str]]


@dataclass(frozen=True, slots=True)
class Plan:
    systems: Sequence[System]
    cells: dict[str, Played]
    rounds: int
    engines: int
    speed: float
    data: Path
    seed: int
    simulated: bool

    def workload(self, name: str, number: int) -> Workload:
        """Of a round: the same for everybody."""
        load, until_s = self.cells[name]
        return Until(WORKLOADS[name].make(self.seed + number, self.data, self.engines, load), until_s)


# --- the balancers


def own(name: str, speed: float) -> System:
    """Ours, configured by a table: its command line has no option for the speed of engines."""
    policy = name.removesuffix(ONE).removesuffix(BLIND)
    blind = name.endswith(BLIND) or policy == "sglang_router"
    pushing = Pushing(mode=PushMode.BLIND) if blind else Pushing()
    probing = replace(pushing, probe_s=max(0.01, pushing.probe_s / speed))
    module = "benchmarks.routing_published_agent" if policy in PUBLISHED else "lb"

    def command(launch: Launch) -> list[str]:
        targets = tuple(Target(id=url, url=url, health_path="/health") for url in launch.urls)
        file = launch.folder / "table.json"
        config_file.save(file, Table("default", "benchmark", targets, policy=policy, pushing=probing))
        return [
            *(sys.executable, "-m", module, "--port", str(launch.port)),
            *("--table-file", str(file), "--log-level", "warning"),
            *(("--workers", "1") if name.endswith(ONE) else ()),
        ]

    return System(name, ours(policy).version, policy, pushing, command)


def peer(name: str) -> System:
    """Raises Missing."""
    router = rust_router(name)
    return System(name, router.version, "sglang_router", Pushing(mode=PushMode.BLIND), router.command)


def systems(names: Sequence[str], speed: float) -> list[System]:
    """Return the available ones, and report the missing."""
    found = []
    for name in names:
        try:
            found.append(peer(name) if name in PEERS else own(name, speed))
        except Missing as missing:
            say(f"without {name}: {missing}")
    return found


# --- one run


class Fleet:
    """Engine processes."""

    def __init__(self, stack: ExitStack, folder: Path, number: int, profile: str, speed: float) -> None:
        command = [
            *(sys.executable, "-m", "skyserve_cli.engine", "--port", "0"),
            *("--profile", profile, "--speed", str(speed)),
        ]
        processes = [
            stack.enter_context(Process(command, folder / f"engine-{index}.log", None, CHECKOUT))
            for index in range(number)
        ]
        self.ports = [self._port(process) for process in processes]

    def counters(self) -> list[dict[str, float]]:
        """What each has counted since it began."""
        return [
            {name.decode(): float(value) for name, value in COUNTER.findall(ask(port, "GET", "/metrics")[1])}
            for port in self.ports
        ]

    def _port(self, process: Process) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not process.ended:
            if found := SERVES.search(process.log.read_bytes()):
                return int(found.group(1))
            time.sleep(0.02)
        raise Broken(f"an engine does not start: {process.last_lines()}")


async def awake(router: Process, port: int, fleet: Fleet, model: str) -> None:
    """Until every engine has responded through the balancer: some learn of their targets one by one."""
    deadline = time.monotonic() + START_S
    while not all(one["generation_tokens"] for one in fleet.counters()):
        if router.ended or time.monotonic() > deadline:
            raise Broken(router.last_lines() or "it does not reach every engine")
        await asyncio.gather(*(complete(port, model, first_words(), 4) for _ in range(FIRST_WORDS)))
        await asyncio.sleep(0.1)


def first_words() -> bytes:
    """A prompt like no other."""
    return f"<|im_start|>user\n{secrets.token_hex(16)}<|im_end|>\n<|im_start|>assistant\n".encode()


def one_run(plan: Plan, number: int, cell: str, system: System) -> Row:
    """Raises Broken. Everything it has started has ended when it returns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="routing-live-")))
        profile = WORKLOADS[cell].profile
        model = profile_named(profile).model
        fleet = Fleet(stack, folder, plan.engines, profile, plan.speed)
        port = free_port()
        command = system.command(Launch(port, fleet.ports, Group.PREFIX, folder))
        router = stack.enter_context(Process(command, folder / "router.log", None, CHECKOUT))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            loop.run(asyncio.wait_for(awake(router, port, fleet, model), 2 * START_S))
            before, ticks, begun_at = fleet.counters(), cpu_ticks(), time.monotonic()
            workload = plan.workload(cell, number)
            playing = play(workload, port, model, plan.speed)
            played = loop.run(asyncio.wait_for(playing, RUN_LIMIT_S))
        wall_s, busy = time.monotonic() - begun_at, busy_share(ticks, cpu_ticks())
        work = [computed(was, now) for was, now in zip(before, fleet.counters(), strict=True)]
    left = [at for at in (port, *fleet.ports) if not is_free(at)]
    if left:
        raise Broken(f"a process still listens on {left}")
    metrics = measure(played.served, plan.engines, refused=len(played.faults))
    metrics = replace(metrics, imbalance=max(work) * len(work) / sum(work))
    return Row(
        number, cell, system.name, system.version, metrics, wall_s, busy, played.late_s, played.faults[:3]
    )


def computed(before: dict[str, float], after: dict[str, float]) -> float:
    """Tokens that an engine has computed in between, as `Served.work` counts them."""
    grown = {name: after[name] - before[name] for name in after}
    return grown["prompt_tokens"] - grown["prompt_tokens_cached"] + grown["generation_tokens"]


def cpu_ticks() -> tuple[int, int]:
    """Of all processors since boot: those that were used, and all."""
    values = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(values) - values[3] - values[4], sum(values)


def busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def simulate(plan: Plan, number: int, cell: str, system: System) -> Metrics:
    """What the simulator says of the same run."""
    setting = Setting(
        policy=system.policy,
        profiles=(profile_named(WORKLOADS[cell].profile),) * plan.engines,
        pushing=system.pushing,
        make_policy=make_policy,
    )
    return run(plan.workload(cell, number), setting).metrics()


# --- all runs


def rounds(plan: Plan) -> Iterable[Row]:
    """Each as it comes. A run that breaks is said, and left out."""
    rng = random.Random(plan.seed)
    for number in range(1, plan.rounds + 1):
        for cell in plan.cells:
            order = list(plan.systems)
            rng.shuffle(order)
            for system in order:
                try:
                    row = one_run(plan, number, cell, system)
                except (Broken, OSError, HTTPException, TimeoutError) as error:
                    say(f"round {number} {cell:6} {system.name:14} broken: {error!r}")
                    continue
                say(f"round {number} {cell:6} {row}")
                yield row
            if plan.simulated:
                for policy, system in {system.policy: system for system in order}.items():
                    metrics = simulate(plan, number, cell, system)
                    yield Row(number, cell, f"simulated {policy}", "", metrics)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 1 if a run broke or a response was lost; with --check also if a system is missing or ours is worse."""
    made = parser()
    given = made.parse_args(arguments)
    if given.check and not {CLAIMANT, REFERENCE} <= set(given.systems):
        made.error(f"--check compares {CLAIMANT} with {REFERENCE}")
    signal.signal(signal.SIGTERM, terminated)  # as Ctrl-C: contexts are left, processes ended
    if given.show:
        kept = json.loads(given.show.read_text())
        print(render([Row.from_json(row) for row in kept["rows"]], kept["title"]), end="")
        return 0
    chosen = QUICK if given.quick else CELLS
    plan = Plan(
        systems=systems(given.systems, given.speed),
        cells={name: chosen[name] for name in given.workloads},
        rounds=1 if given.quick else given.rounds,
        engines=given.engines,
        speed=given.speed,
        data=given.data,
        seed=given.seed,
        simulated=given.simulated,
    )
    if not (plan.data / GSM8K).exists():
        say(f"{plan.data / GSM8K} is not there: problems are made up")
    title = facts(plan)
    rows: list[Row] = []
    try:
        for row in rounds(plan):
            rows.append(row)
            if given.json:
                given.json.write_text(
                    json.dumps({"title": title, "rows": [one.to_json() for one in rows]}) + "\n"
                )
    except KeyboardInterrupt:
        return 130
    finally:
        if rows:
            print(render(rows, title), end="")
    live = [row for row in rows if row.wall_s]
    wanted = plan.rounds * len(plan.cells) * (len(given.systems) if given.check else len(plan.systems))
    lost = len(live) < wanted or any(row.faults for row in live)
    return 1 if lost or (given.check and worse(rows)) else 0


def facts(plan: Plan) -> str:
    ideals = ", ".join(f"{name} {ideal_hit_rate(walk(plan.workload(name, 1))):.3f}" for name in plan.cells)
    profiles = ", ".join(dict.fromkeys(WORKLOADS[name].profile for name in plan.cells))
    return (
        f"{plan.engines} x {profiles} at speed {plan.speed:g}, {plan.rounds} rounds, seed {plan.seed}; ideal hit rates: {ideals};"
        f" {cpu_model()} ({os.cpu_count()} cores), Linux {platform.release()}, Python {platform.python_version()}"
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--quick", action="store_true", help="one short round")
    add("--workloads", type=listed(CELLS), default=["trees", "chat"], help=f"of {', '.join(CELLS)}")
    add(
        "--systems",
        type=listed(
            (*PEERS, *POLICIES, *PUBLISHED, *(name + way for name in POLICIES for way in (BLIND, ONE)))
        ),
        default=[*OURS, *PEERS],
        help=f"{', '.join(PEERS)}; ours by policy, with {BLIND} pushed blindly, with {ONE} by one worker, published ones too "
        f"(default: {', '.join(OURS)}, and peers)",
    )
    add("--engines", type=int, default=4, help="processes (default: %(default)s)")
    add("--speed", type=float, default=4.0, help="of the engines (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the calls and of the order of systems (default: %(default)s)")
    add("--data", type=Path, default=DATA, help="where the recordings are")
    add("--simulated", action="store_true", help="each cell in the simulator too")
    add("--json", type=Path, metavar="FILE", help="keep every row")
    add("--show", type=Path, metavar="FILE", help="print the tables of such a file, and measure nothing")
    add("--check", action="store_true", help=f"exit with 1 if {CLAIMANT} is worse than sglang-router")
    return made


def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return text.split(",")

    return names


def terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
