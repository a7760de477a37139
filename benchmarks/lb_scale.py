"""What a load balancer's requests cost as its targets, and those who wait, become many.

    python -m benchmarks.lb_scale [--parts choice,explain,waiting,request,lag] [--policies gorgo,least_load] [--check]

    choice    CPU time of one choice with its bookings, in this process
    explain   memory of the explanations of 1,000 requests at 1,000 targets
    waiting   CPU time of `python -m lb` while 10,000 requests are held and nothing changes
    request   CPU time of `python -m lb` per request, without what it needs when idle, which is printed as well
    lag       how long its event loop keeps a caller waiting: 1,000 targets of which one is dead, 300 requests a
              second, 1,000 held

Figures are medians over rounds; CPU times are process CPU time. The engine and the clients are another process
(`benchmarks.lb_scale_load`). With `--check` the exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from typing import Any

from lb.config.schema import Table, Target
from lb.core.targets import Booking, TargetTable
from lb.observe.explain import Explanations
from policies.routing.base import RequestView
from policies.routing.registry import POLICIES

SIZES = (10, 100, 1000)
IDLE_S = 4.0
PARTS = ("choice", "explain", "waiting", "request", "lag")
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
            choice = table.choose(view, now)
            assert choice is not None
            booking = table.book(view, choice.target_id, now)
            table.answered(booking, now)
            bookings.append(booking)
            if len(bookings) > 2 * count:
                table.release(bookings.pop(0), now, 100)
        self._now = now


def explained_mib(policy: str) -> float:
    table, stories = table_of(1000, policy), Explanations()
    tracemalloc.start()
    for number, view in enumerate(views(1000)):
        choice = table.choose(view, number / 100)
        assert choice is not None
        story = stories.begin(view.id, view.method, view.path, number / 100)
        story.note(number / 100, "chose", choice.target_id, choice.because, choice)
        table.release(table.book(view, choice.target_id, number / 100), number / 100)
        del story, choice
    before, _ = tracemalloc.get_traced_memory()
    del stories
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (before - after) / 2**20


# --- a load balancer as a process


class Balancer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        self._pid = process.pid
        self.port = int(ready["port"])
        self._admin = f"http://127.0.0.1:{ready['admin_port']}"

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
        fields = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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

    idle = 0.0  # CPU seconds per second

    def __init__(self, policy: str, count: int, until: ExitStack) -> None:
        self._engine = until.enter_context(load("--takes", "0.0"))
        self._lb = until.enter_context(balancer())
        self._lb.use(targets_at(int(line(self._engine)), count), policy)
        time.sleep(1.0)  # what the engines are is found out
        self.us()
        start = self._lb.cpu_s()
        time.sleep(IDLE_S)
        self.idle = (self._lb.cpu_s() - start) / IDLE_S

    def us(self) -> float:
        """CPU time of one, without what the process does when it has none."""
        start, began = self._lb.cpu_s(), time.monotonic()
        run_clients(self._engine, {"port": self._lb.port, "clients": 4, "requests": 250, "seed": 0})
        line(self._engine)
        background_s = self.idle * (time.monotonic() - began)
        return (self._lb.cpu_s() - start - background_s) / 1000 * 1e6


def waiting_share(count: int) -> float:
    """CPU seconds per second while so many are held."""
    with load("--takes", "1000") as engine, balancer() as lb:
        pushing = {"mode": "fixed_cap", "cap": 1}
        lb.use(targets_at(int(line(engine)), 10), "gorgo", pushing=pushing, limits={"max_held": count})
        run_clients(engine, {"port": lb.port, "clients": count + 10, "requests": 1, "seed": 0})
        while lb.call("GET", "/-/stats")["queued"] < count:
            time.sleep(0.5)
        time.sleep(2.0)
        costs = []
        for _ in range(5):
            start, began = lb.cpu_s(), time.monotonic()
            time.sleep(2.0)
            costs.append((lb.cpu_s() - start) / (time.monotonic() - began))
        return statistics.median(costs)


def lag_ms(seconds: float) -> tuple[float, float, float, int]:
    """Median and 99th percentile of a trivial call, CPU seconds per second, and how many are held."""
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
        waits = sorted(asyncio.run(calls(lb.port, seconds)))
        share = (lb.cpu_s() - start) / seconds
        held = int(lb.call("GET", "/-/stats")["queued"])
    return statistics.median(waits) * 1e3, waits[int(len(waits) * 0.99)] * 1e3, share, held


async def calls(port: int, seconds: float) -> list[float]:
    """How long each of many calls took that the load balancer answers itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    waits = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        writer.write(b"GET /-/nothing HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        waits.append(time.perf_counter() - start)
        await asyncio.sleep(0.01)
    writer.close()
    return waits


# --- the report


def by_size(part: str, policy: str, rounds: int) -> tuple[list[float], float]:
    """The cost at each size, and that at the largest by that at the smallest: medians over rounds that take all sizes in
    turn, since a machine that is busy with other things is slower at one time than at another."""
    with ExitStack() as until:
        subjects: list[Choices | Requests] = [
            Choices(policy, size) if part == "choice" else Requests(policy, size, until) for size in SIZES
        ]
        costs = [[subject.us() for subject in subjects] for _ in range(rounds)]
        for size, subject in zip(SIZES, subjects, strict=True):
            if isinstance(subject, Requests):
                print(f"idle     {policy:26} {100 * subject.idle:.1f} % of a core at {size} targets")
    ratio = statistics.median(row[-1] / row[0] for row in costs)
    return [statistics.median(column) for column in zip(*costs, strict=True)], ratio


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

    for part in ("choice", "request"):
        for policy in policies if part in parts else ():
            costs, ratio = by_size(part, policy, args.rounds)
            row = "  ".join(f"{cost:7.1f}" for cost in costs)
            print(f"{part:8} {policy:26} us at {SIZES} targets: {row}   ratio {ratio:.2f}", flush=True)
            if part == "request":  # a choice alone is so short that what is not in the CPU's cache shows
                goal(f"request {policy}, 1,000 targets to 10", ratio, 1.3)
    if "explain" in parts:
        for policy in policies:
            size = explained_mib(policy)
            print(f"explain  {policy:26} {size:.1f} MiB", flush=True)
            goal(f"explain {policy}, MiB", size, 10.0)
    if "waiting" in parts:
        share = 100 * waiting_share(args.waiting)
        print(f"waiting  {args.waiting} held: {share:.2f} % of a core", flush=True)
        goal("waiting, % of a core", share, 1.0)
    if "lag" in parts:
        median, p99, share, held = lag_ms(args.lag_seconds)
        print(
            f"lag      median {median:.1f} ms  p99 {p99:.1f} ms  {100 * share:.0f} % of a core, {held} held"
        )
        goal("lag, p99 ms", p99, 20.0)
    for sentence in missed:
        print("missed   " + sentence)
    if args.check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
