"""What a load balancer's requests cost as its targets, and those who wait, become many.

    python -m benchmarks.lb_scale [--parts choice,explain,waiting,request,lag] [--policies gorgo,least_load] [--check]

    choice    CPU time of one choice with its bookings, in this process
    explain   memory of the explanations of 1,000 requests at 1,000 targets
    waiting   CPU time of `python -m lb` while 10,000 requests are held and nothing changes
    idle      CPU time of `python -m lb` that has targets and no requests
    request   CPU time of `python -m lb` per request, without what it needs when idle
    opening   the same with engines that close each connection
    lag       how long its event loop keeps a caller waiting: 1,000 targets of which one is dead, 300 requests a
              second, 1,000 held

Figures are medians over rounds; CPU times are process CPU time. The engine and the clients are another process
(`benchmarks.lb_scale_load`). With `--check` the exit code is 1 if a goal is missed.

*Connections.* The load balancer closes connections that have been idle for four seconds, as servers do. How many
requests find one open follows from the rate per target and not from the number of targets, and opening one costs as much
as the rest of a request. So `request` measures under a load that lasts: before each measurement the targets have had
WARMING requests each, and how many of the requests opened a connection is printed. `opening` measures the other extreme.

*The lag* on a machine that has other things to do is mostly the wait for a core. So the goal is for what the load
balancer itself does in the meantime: the time of a call, or the CPU time that the process had during it if that is less.
Without other load both are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lb.config.schema import Table, Target
from lb.core.target_choice import choose
from lb.core.targets import Booking, TargetTable
from lb.observe.explain import Explanations
from policies.routing.base import RequestView
from policies.routing.registry import POLICIES

SIZES = (10, 100, 1000)
WARMING = 3  # requests for each target
IDLE_S = 1.0
SETTLED_S = 45.0  # until polls of targets that have just joined are spread over their intervals
ARRIVED_S = 12.0  # until the timers of the connections have gone off that were set before their requests
PARTS = ("choice", "explain", "waiting", "idle", "request", "opening", "lag")
TOKEN = "benchmark"
SHARED = b"The instructions of the system, which all conversations share. " * 8


# --- in this process


def table_of(count: int, policy: str) -> TargetTable:
    targets = tuple(Target(f"t{number}", f"http://h{number}:1") for number in range(count))
    return TargetTable(Table("s", "1", targets, policy=policy), 0.0)


def views(count: int) -> list[RequestView]:
    prompts = [SHARED + b"conversation %04d " % number * 100 for number in range(500)]
    return [
        RequestView(f"r{n}", "POST", "/v1/chat/completions", 2500, prompts[n % 500], "m", f"user-{n % 500}")
        for n in range(count)
    ]


class Choices:
    """Choices with all their bookings, on one table whose targets are warm."""

    def __init__(self, policy: str, count: int) -> None:
        self._table, self._count, self._now = table_of(count, policy), count, 0.0
        self._open: list[Booking] = []
        self._run(views(1000 + 2 * count))

    def us(self) -> float:
        """CPU time of one."""
        requests = views(1000)
        start = time.process_time()
        self._run(requests)
        return (time.process_time() - start) / len(requests) * 1e6

    def _run(self, requests: list[RequestView]) -> None:
        table, count, bookings, now = self._table, self._count, self._open, self._now
        for view in requests:
            now += 1.0 / count  # each response takes two seconds, however many targets there are
            choice = choose(table, view, now)
            assert choice is not None
            booking = table.book(view, choice.target_id, now)
            table.responded(booking, now)
            bookings.append(booking)
            if len(bookings) > 2 * count:
                table.release(bookings.pop(0), now, 100)
        self._now = now


def explained_mib(policy: str) -> float:
    table, explanations = table_of(1000, policy), Explanations()
    tracemalloc.start()
    for number, view in enumerate(views(1000)):
        choice = choose(table, view, number / 100)
        assert choice is not None
        explanation = explanations.begin(view.id, view.method, view.path, number / 100)
        explanation.note(number / 100, "chose", choice.target_id, choice.because, choice)
        table.release(table.book(view, choice.target_id, number / 100), number / 100)
        del explanation, choice
    before, _ = tracemalloc.get_traced_memory()
    del explanations
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (before - after) / 2**20


# --- a load balancer as a process


class Balancer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.ready = json.loads(process.stdout.readline())
        self._pid = process.pid
        self.port = int(self.ready["port"])
        self._admin = f"http://127.0.0.1:{self.ready['admin_port']}"

    def call(self, method: str, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self._admin + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def use(self, targets: list[dict[str, str]], policy: str, **more: object) -> None:
        table = self.call("GET", "/-/targets")
        self.call(
            "PUT", "/-/targets", {**table, "revision": policy, "targets": targets, "policy": policy, **more}
        )

    def cpu_s(self) -> float:
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9

    def share(self, seconds: float) -> float:
        """CPU seconds per second."""
        start, began = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_s() - start) / (time.monotonic() - began)


@contextmanager
def balancer() -> Iterator[Balancer]:
    command = [sys.executable, "-m", "lb", "--port", "0", "--admin-port", "0"]
    environ = {**os.environ, "SKYSERVE_LB_TOKEN": TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True
    ) as process:
        try:
            yield Balancer(process)
        finally:
            process.kill()


@contextmanager
def load(*args: str) -> Iterator[subprocess.Popen[str]]:
    """The engine, and what it prints: its port, then whatever the clients report."""
    command = [sys.executable, "-m", "benchmarks.lb_scale_load", *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def run_clients(process: subprocess.Popen[str], order: dict[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()


def targets_at(port: int, count: int) -> list[dict[str, str]]:
    return [{"id": f"t{n}", "url": f"http://127.0.0.1:{port}/t{n}"} for n in range(count)]


class Requests:
    """Requests by sockets through a load balancer of its own."""

    def __init__(self, policy: str, count: int, until: ExitStack, close: bool = False) -> None:
        self._engine = until.enter_context(load("--takes", "0.0", *(["--close"] if close else [])))
        self._lb = until.enter_context(balancer())
        self._lb.use(targets_at(int(line(self._engine)), count), policy)
        self._warming = 0 if close else WARMING * count
        self.opened: list[float] = []  # connections per request
        time.sleep(3.0)  # what the engines are is found out
        self._run(500)

    def us(self) -> float:
        """CPU time of one, without what the process does when it has none."""
        idle = self._lb.share(IDLE_S)
        if self._warming:
            self._run(self._warming)
        start, began = self._lb.cpu_s(), time.monotonic()
        opened = self._run(1000)
        cost_s = self._lb.cpu_s() - start - idle * (time.monotonic() - began)
        self.opened.append(opened / 1000)
        return cost_s / 1000 * 1e6

    def _run(self, count: int) -> int:
        """Returns how many connections have been opened."""
        run_clients(self._engine, {"port": self._lb.port, "clients": 4, "requests": count // 4, "seed": 0})
        return int(line(self._engine))


def idle_share(count: int) -> float:
    """Return CPU seconds per second with this number of targets and nothing to do."""
    with load() as engine, balancer() as lb:
        lb.use(targets_at(int(line(engine)), count), "gorgo")
        time.sleep(SETTLED_S)
        return statistics.median(lb.share(3.0) for _ in range(5))


def most_waiting() -> int:
    """How many may wait, with two file descriptors for each."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 100


def waiting_share(count: int) -> float:
    """Return CPU seconds per second while this number of requests is held."""
    with load("--takes", "1000") as engine, balancer() as lb:
        pushing = {"mode": "fixed_cap", "cap": 1}
        lb.use(
            targets_at(int(line(engine)), 10),
            "gorgo",
            pushing=pushing,
            limits={"max_held": count, "hold_s": 600},
        )
        run_clients(engine, {"port": lb.port, "clients": count + 10, "requests": 1, "seed": 0})
        while lb.call("GET", "/-/stats")["queued"] < count:
            time.sleep(0.5)
        time.sleep(ARRIVED_S)
        share = statistics.median(lb.share(2.0) for _ in range(5))
        held = lb.call("GET", "/-/stats")["queued"]
        if held < count:
            raise SystemExit(
                f"only {held} of {count} requests were still held at the end: the figure is void"
            )
        return share


class Lag(NamedTuple):
    """Of a trivial call, in seconds: how long it took, and how much of that is the load balancer's own."""

    took: list[float]
    own: list[float]


def lag(seconds: float) -> tuple[Lag, float, int]:
    """Calls, CPU seconds per second, and how many requests are held."""
    with load("--takes", "3.3") as engine, balancer() as lb:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            dead = {"id": "dead", "url": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        targets = [*targets_at(int(line(engine)), 999), dead]
        pushing = {"mode": "fixed_cap", "cap": 1}
        lb.use(targets, "gorgo", pushing=pushing, limits={"max_held": 5000})
        run_clients(engine, {"port": lb.port, "clients": 2000, "requests": 1000, "seed": 0})
        while lb.call("GET", "/-/stats")["queued"] < 900:
            time.sleep(0.5)
        start = lb.cpu_s()
        waits = asyncio.run(calls(lb, seconds))
        share = (lb.cpu_s() - start) / seconds
        held = int(lb.call("GET", "/-/stats")["queued"])
    return waits, share, held


def p99_ms(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1e3


async def calls(lb: Balancer, seconds: float) -> Lag:
    """How long each of many calls took to which the load balancer responds itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", lb.port)
    waits = Lag([], [])
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cpu_s, start = lb.cpu_s(), time.perf_counter()
        writer.write(b"GET /-/nothing HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        waits.took.append(time.perf_counter() - start)
        waits.own.append(min(waits.took[-1], lb.cpu_s() - cpu_s))
        await asyncio.sleep(0.01)
    writer.close()
    return waits


# --- the report


class Costs(NamedTuple):
    """In microseconds at each size, their ratio from the smallest to the largest, and connections opened per request."""

    us: list[float]
    ratio: float
    opened: list[float]


def by_size(part: str, policy: str, rounds: int) -> Costs:
    """The cost at each size, and that at the largest by that at the smallest: medians over rounds that take all sizes in
    turn, since a machine that is busy with other things is slower at one time than at another."""
    with ExitStack() as until:
        subjects: list[Choices | Requests] = [
            Choices(policy, size)
            if part == "choice"
            else Requests(policy, size, until, close=part == "opening")
            for size in SIZES
        ]
        costs = [[subject.us() for subject in subjects] for _ in range(rounds)]
        opened = [statistics.median(one.opened) for one in subjects if isinstance(one, Requests)]
    ratio = statistics.median(row[-1] / row[0] for row in costs)
    return Costs([statistics.median(column) for column in zip(*costs, strict=True)], ratio, opened)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--lag-seconds", type=float, default=20.0)
    parser.add_argument("--check", action="store_true", help="fail if a goal is missed")
    args = parser.parse_args()
    parts, policies = args.parts.split(","), args.policies.split(",")
    missed = []

    def goal(what: str, value: float, most: float) -> None:
        if value > most:
            missed.append(f"{what}: {value:.2f} is more than {most:g}")

    for part in ("choice", "request", "opening"):
        for policy in policies if part in parts else ():
            costs = by_size(part, policy, args.rounds)
            row = "  ".join(f"{cost:7.1f}" for cost in costs.us)
            opened = "  ".join(f"{share:.2f}" for share in costs.opened)
            row += f"   ratio {costs.ratio:.2f}" + (f"   opened {opened}" if opened else "")
            print(f"{part:8} {policy:26} us at {SIZES} targets: {row}", flush=True)
            if part != "choice":  # a choice alone is so short that a miss of the CPU's cache shows
                goal(f"{part} {policy}, 1,000 targets to 10", costs.ratio, 1.3)
    if "idle" in parts:
        for size in SIZES:
            share = 100 * idle_share(size)
            print(f"idle     {share:.2f} % of a core at {size} targets", flush=True)
            goal(f"idle at {size} targets, % of a core", share, 3.0)
    if "explain" in parts:
        for policy in policies:
            mib = explained_mib(policy)
            print(f"explain  {policy:26} {mib:.1f} MiB", flush=True)
            goal(f"explain {policy}, MiB", mib, 10.0)
    if "waiting" in parts:
        count = min(args.waiting, most_waiting())
        if count < args.waiting:
            print(f"waiting  no more than {count} can wait here: raise the limit of open files (ulimit -n)")
        share = 100 * waiting_share(count)
        print(f"waiting  {count} held: {share:.2f} % of a core", flush=True)
        goal("waiting, % of a core", share, 1.0)
    if "lag" in parts:
        waits, share, held = lag(args.lag_seconds)
        for name, seconds in (("of a call", waits.took), ("of its own", waits.own)):
            median = statistics.median(seconds) * 1e3
            print(f"lag      {name:10}  median {median:.1f} ms  p99 {p99_ms(seconds):.1f} ms")
        print(f"lag      {100 * share:.0f} % of a core, {held} held")
        goal("lag, p99 ms", p99_ms(waits.own), 20.0)
    for sentence in missed:
        print("missed   " + sentence)
    if args.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
