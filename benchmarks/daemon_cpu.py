"""CPU of the whole controller: store, ticks, probes over HTTP, load balancers and API, with up to 10,000 replicas.

The cloud is in memory (`benchmarks.memory_controller`), everything else is the product. All replicas are one small HTTP server
in a process of its own, reached on as many addresses. It closes idle connections after five seconds, as uvicorn and so vLLM
do. It runs in a network namespace of its own, so this needs root.

    python -m benchmarks.daemon_cpu [--replicas 10000] [--services 10] [--steady 60] [--clients 200] [--serving] [--half-a-core]

With `--serving` load balancers report that every replica serves clients (`benchmarks.serving_agent`); without it nothing does.
With `--half-a-core` the controller shares one CPU with a process that never sleeps, from its start on.

With `--large N` it measures what one service of N replicas does to the others instead: how long ticks take, and a command that reads
another service, before it, while it starts, when it is ready, and while it loses a replica per second. All the time one replica of the
others is terminated per second.

    python -m benchmarks.daemon_cpu --replicas 200 --large 10000

Prints, for the controller's process: CPU seconds until all replicas were READY, percent of a core afterwards, what
`--clients` clients of /v1/services at once cost, and how late ticks were meanwhile: how much longer than the interval it took
from the beginning of one to the next, of which the tick itself is a part. Exit code 1 if a replica was terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import aiohttp
import psutil

from benchmarks.memory_controller import PORT
from policies.goals import ScalingGoal
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec

_INSIDE = "SKYSERVE_BENCH_INSIDE"
TICK_S = 1.0
READY_WITHIN_S = 900.0
ROUNDS = 5


class Bench:
    """One controller over `services` services of `replicas` replicas in all."""

    def __init__(
        self, services: int, replicas: int, keep_alive_s: float, *, on_half_a_core: bool, serving: bool
    ) -> None:
        self.services, self.replicas, self.keep_alive_s = services, replicas, keep_alive_s
        self.home = Home.from_environment({"SKYSERVE_HOME": tempfile.mkdtemp(prefix="skyserve-bench-")})
        self.client = ControllerClient(self.home)
        self.ticks = self.home.root / "ticks"
        self._half = on_half_a_core
        self._serving = serving
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Bench:
        self.home.create()
        self.home.config.write_text(
            f"controller: {{tick_seconds: {TICK_S:g}}}\nclouds: {{local: {{enabled: false}}, fake: {{poll_seconds: 10}}}}\n"
        )
        environment = {
            **os.environ,
            "SKYSERVE_HOME": str(self.home.root),
            "SKYSERVE_BENCH_TICKS": str(self.ticks),
            "SKYSERVE_BENCH_SERVING": "1" if self._serving else "",
        }
        self._start([sys.executable, "-c", _REPLICAS.format(port=PORT, keep_alive_s=self.keep_alive_s)])
        with self.home.controller_log.open("ab") as out:
            command = [sys.executable, "-m", "benchmarks.memory_controller"]
            if self._half:
                command = ["taskset", "-c", "0", *command]
                self._start(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])
            self._start(command, env=environment, stdout=out, stderr=out)
        self.daemon = psutil.Process(self._processes[-1].pid)
        self._until(self._is_up, 60.0, "the controller does not start")
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends a second one to the group
        for process in self._processes:
            process.kill()  # the controller before its load balancers, which it would start again
        for found in psutil.process_iter():
            try:
                if found.environ().get("SKYSERVE_HOME") == str(self.home.root) or str(
                    self.home.root
                ) in " ".join(found.cmdline()):
                    found.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        for one in self._processes:
            one.send_signal(signal.SIGKILL)
            one.wait()
        shutil.rmtree(self.home.root)

    def _start(self, command: list[str], **more: object) -> None:
        self._processes.append(subprocess.Popen(command, **more))  # type: ignore[call-overload]

    def up(self) -> None:
        for number in range(self.services):
            self.put(f"s{number}", self.replicas // self.services)

    def put(self, name: str, size: int) -> None:
        spec = ServiceSpec(
            name=name,
            run="serve",
            probe=Probe(path="/health"),
            scaling=ScalingGoal(size, size),
            resources=(ResourceChoice(cloud="fake", use_spot=True),),
        )
        self.client.put(spec.name, json.loads(json.dumps(spec_to_json(spec))), {}, None)

    def oldest_ready(self, name: str) -> int | None:
        query = "SELECT min(id) FROM replicas WHERE service = ? AND state = 'READY'"
        with self._database() as database:
            return database.execute(query, (name,)).fetchone()[0]  # type: ignore[no-any-return]

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(f"file:{self.home.root / 'state.db'}?mode=ro", uri=True, timeout=10.0)
        try:
            yield database
        finally:
            database.close()

    def count(self, state: str) -> int:
        query = "SELECT count(*) FROM replicas WHERE state = ?"
        with self._database() as database:
            return int(database.execute(query, (state,)).fetchone()[0])

    def cpu_s(self) -> float:
        used = self.daemon.cpu_times()
        return float(used.user + used.system)

    def ticks_since(self, since: float) -> list[tuple[float, ...]]:
        """Of the ticks that began since then: beginning, end, CPU seconds, and when services that are not large were served."""
        lines = [tuple(map(float, line.split())) for line in self.ticks.read_text().splitlines()[:-1]]
        return [one for one in lines if one[0] >= since]

    def lateness(self, since: float) -> str:
        """Of the ticks that began since then, as a sentence."""
        ticks = self.ticks_since(since)
        late_s = [b[0] - a[0] - TICK_S for a, b in itertools.pairwise(ticks)]
        if not late_s:
            return "no tick"
        took_s, cpu_s = [end - start for start, end, *_ in ticks], [cpu for _, _, cpu, _ in ticks]
        return (
            f"ticks at most {1000 * max(late_s):.0f} ms late, took {1000 * statistics.median(took_s):.1f} ms, at most "
            f"{1000 * max(took_s):.0f} ms; {1000 * statistics.median(cpu_s):.1f} ms of CPU, at most {1000 * max(cpu_s):.0f} ms"
        )

    def _is_up(self) -> bool:
        try:
            return bool(self.client.health())
        except ControllerDownError:
            return False

    def _until(self, holds: object, patience_s: float, what: str) -> None:
        for _ in range(int(patience_s / 0.25)):
            if holds():  # type: ignore[operator]
                return
            time.sleep(0.25)
        raise SystemExit(what)

    def all_ready(self) -> None:
        self._until(lambda: self.count("READY") >= self.replicas, READY_WITHIN_S, "not all are READY")


_REPLICAS = """
import asyncio
class Replica(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.timer = transport, None
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
        if self.timer: self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later({keep_alive_s}, self.transport.close)
    def connection_lost(self, error):
        if self.timer: self.timer.cancel()
async def main():
    server = await asyncio.get_running_loop().create_server(Replica, "0.0.0.0", {port}, backlog=4096)
    await server.serve_forever()
asyncio.run(main())
"""


async def ask(home: Home, clients: int) -> tuple[float, int]:
    """Seconds for `ROUNDS` requests of each client at once, and bytes received."""
    connector = aiohttp.UnixConnector(str(home.controller_socket), limit=0)
    headers = {"Authorization": f"Bearer {home.token()}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one() -> int:
            received = 0
            for _ in range(ROUNDS):
                async with session.get("http://controller/v1/services") as response:
                    received += len(await response.read())
            return received

        started = time.monotonic()
        received = sum(await asyncio.gather(*(one() for _ in range(clients))))
        return time.monotonic() - started, received


class Neighbours:
    """The services of a bench beside a large one."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._turns = itertools.count()

    def phase(self, label: str, lasts: Callable[[float], bool], *, victims: Sequence[str] = ()) -> None:
        """Print a row of the table of this phase, which goes on while `lasts` returns true for its seconds so far.

        One replica of each of the `victims` is terminated per second, and one of the others.
        """
        bench, started, used = self._bench, time.monotonic(), self._bench.cpu_s()
        commands_s: list[float] = []
        while lasts(passed_s := time.monotonic() - started):
            if len(commands_s) % 10 == 0:
                for name in (f"s{next(self._turns) % bench.services}", *victims):
                    number = bench.oldest_ready(name)
                    if number is not None:
                        bench.client.kill(name, number)
            asked = time.monotonic()
            bench.client._json("GET", "/v1/services/s0")
            commands_s.append(time.monotonic() - asked)
            time.sleep(max(0.0, started + 0.1 * len(commands_s) - time.monotonic()))
        ticks = bench.ticks_since(started)
        took_s, cpu_s = [end - start for start, end, *_ in ticks], [cpu for _, _, cpu, _ in ticks]
        others_s = [others_at - start for start, _, _, others_at in ticks]
        share = 100 * (bench.cpu_s() - used) / passed_s
        print(
            f"{label:9} {passed_s:5.0f} {len(ticks):6} {_spread(others_s)} {_spread(took_s)} {_spread(cpu_s)} "
            f"{_spread(commands_s)} {share:7.0f} %",
            flush=True,
        )


def _spread(seconds: list[float]) -> str:
    """Return median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(1000.0 * one for one in seconds)
    p99 = ordered[int(0.99 * (len(ordered) - 1))]
    return f"| {statistics.median(ordered):7.1f} {p99:7.1f} {ordered[-1]:7.1f}"


def beside(bench: Bench, size: int, seconds: float) -> None:
    """Measure the neighbours of a service of `size` replicas."""
    neighbours = Neighbours(bench)
    bench.up()
    bench.all_ready()
    heads = ("the others' tick", "whole tick", "CPU of it", "GET /v1/services/s0")
    print("ms: median, p99, most   ", "".join(f"| {head:23} " for head in heads), "| daemon")
    print(f"{'phase':9} {'s':>5} {'ticks':>6}")
    neighbours.phase("alone", lambda passed_s: passed_s < seconds)
    bench.put("large", size)
    most = bench.replicas + size
    neighbours.phase(
        "starting",
        lambda passed_s: bench.count("READY") < most - bench.services and passed_s < READY_WITHIN_S,
    )
    time.sleep(15.0)
    neighbours.phase("ready", lambda passed_s: passed_s < seconds)
    neighbours.phase("replacing", lambda passed_s: passed_s < seconds, victims=["large"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU of the whole controller.")
    parser.add_argument("--services", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--steady", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--keep-alive",
        type=float,
        default=5.0,
        help="seconds after which a replica closes an idle connection",
    )
    parser.add_argument(
        "--serving", action="store_true", help="load balancers report that replicas serve clients"
    )
    parser.add_argument("--half-a-core", action="store_true")
    parser.add_argument("--large", type=int, help="replicas of one service beside the others")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        inside = ["-m", "benchmarks.daemon_cpu", *sys.argv[1:]]
        script = f'ip link set lo up && exec "{sys.executable}" "$@"'
        os.execvp("unshare", ["unshare", "-n", "--", "sh", "-c", script, "sh", *inside])  # noqa: S606
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("terminated")
    )  # so that `timeout` leaves no process behind
    with Bench(
        given.services,
        given.replicas,
        given.keep_alive,
        on_half_a_core=given.half_a_core,
        serving=given.serving,
    ) as bench:
        if given.large:
            beside(bench, given.large, given.steady)
            return 0
        started, used = time.monotonic(), bench.cpu_s()
        bench.up()
        bench.all_ready()
        print(
            f"{given.replicas} replicas in {given.services} services READY after {time.monotonic() - started:.0f} s, "
            f"{bench.cpu_s() - used:.1f} s of CPU",
            flush=True,
        )
        time.sleep(15.0)
        started, used = time.monotonic(), bench.cpu_s()
        time.sleep(given.steady)
        took_s = time.monotonic() - started
        memory = bench.daemon.memory_info().rss / 2**20
        print(
            f"steady: {100 * (bench.cpu_s() - used) / took_s:.1f} % of a core over {took_s:.0f} s, {memory:.0f} MiB, "
            f"{bench.daemon.num_threads()} threads; {bench.lateness(started)}",
            flush=True,
        )
        started, used = time.monotonic(), bench.cpu_s()
        took_s, received = asyncio.run(ask(bench.home, given.clients))
        print(
            f"{given.clients} clients of /v1/services, {ROUNDS} requests each: {took_s:.1f} s, "
            f"{bench.cpu_s() - used:.1f} s of CPU, {received / 2**20:.0f} MiB; "
            f"{bench.lateness(started)}; {bench.daemon.memory_info().rss / 2**20:.0f} MiB",
            flush=True,
        )
        ended = bench.count("GONE")
        print(f"terminated: {ended}")
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
