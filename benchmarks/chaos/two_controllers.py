"""Two controllers of one database. Round after round something befalls the one that leads, or the database, or a clock, while
the service has requests and loses replicas.

* the leader is killed with SIGKILL, or stopped for 30 s and then continued, when another one leads
* it is cut off from the database (PostgreSQL), or the database's server is restarted as after a crash
* its clock is set by eight hours, forwards or back (SQLite: the clock of both, and the database's)

Both share one machine, and so the local cloud's folder and the load balancer, as two controllers elsewhere would share a cloud
and the load balancers in its regions.

Claims, when all is quiet again:
* replicas launched, and instances ever made, are as many as the script explains: nothing twice, nothing terminated wrongly
* epochs only grow, and no two controllers led at once
* after a SIGKILL the other controller leads within 10 s
* no request failed

    python -m benchmarks.chaos.two_controllers [--database sqlite|postgresql] [--rounds 50] [--seed 1] [--stopped 30]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.chaos.databases import PostgresServer, SqliteFile
from benchmarks.chaos.harness import Stack, share, until
from benchmarks.chaos.kill_controller import STEADY, Script, audit
from benchmarks.chaos.traffic import Traffic, latency, tally
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.home import Home

NAMES = ("a", "b")
FAILOVER_WITHIN_S = 10.0
EIGHT_HOURS_S = 8 * 3600.0
_NOT_NOW = (409, 503)  # of a controller that stands by, or that has just been replaced


class LeaderClient:
    """Calls of whichever controller leads; ControllerDownError if none does."""

    def __init__(self, pair: PairStack) -> None:
        self._pair = pair

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*values: Any, **more: Any) -> Any:
            client = self._pair.daemons[self._pair.leader()].client
            try:
                return getattr(client, verb)(*values, **more)
            except RefusedError as error:
                if error.status in _NOT_NOW:
                    raise ControllerDownError(str(error)) from None
                raise

        return call


class Daemon:
    """One controller's process, without a supervisor."""

    def __init__(self, home: Home, database_url: str, *, is_clock_shared: bool) -> None:
        self.home = home
        self.client = ControllerClient(home)
        self.clock = home.root / "clock"
        self._environment = {
            **os.environ,
            "SKYSERVE_HOME": str(home.root),
            "SKYSERVE_DB": database_url,
            "SKYSERVE_CHAOS_CLOCK": str(self.clock),
            "SKYSERVE_CHAOS_DATABASE_TOO": "1" if is_clock_shared else "",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.home.controller_log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos.shifted_controller"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
            )

    def send(self, sign: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(sign)
        if sign is signal.SIGKILL:
            self.process.wait()

    def leads(self) -> bool:
        try:
            return bool(self.client.health()["lease"]["leads"])
        except (ControllerDownError, RefusedError):
            return False

    def epochs(self) -> list[int]:
        """Of its terms, in order."""
        log = self.home.controller_log.read_text(errors="replace")
        return [int(epoch) for epoch in re.findall(r"this controller leads epoch=(\d+)", log)]


class PairStack(Stack):
    """One installation with two controllers. `frozen` and the dead are not asked who leads."""

    def __init__(self, database: str) -> None:
        super().__init__()
        self.root_a = self.home.root
        homes = {"a": self.home, "b": Home(self.root_a / "b", "")}
        self.database = PostgresServer(NAMES) if database == "postgresql" else SqliteFile(self.root_a)
        self.daemons = {
            name: Daemon(home, self.database.url(name), is_clock_shared=not self.database.is_server)
            for name, home in homes.items()
        }
        self.silent: set[str] = set()
        self.gone: list[tuple[Any, ...]] = []
        self.client = LeaderClient(self)  # type: ignore[assignment]

    def __enter__(self) -> PairStack:
        a, b = self.daemons["a"], self.daemons["b"]
        self.client = a.client
        self._controller = ""
        for daemon in (a, b):
            daemon.home.create()
            daemon.clock.write_text("0")
        self._prepare()
        for shared in ("local", "lb"):
            (self.root_a / shared).mkdir(exist_ok=True)
            (b.home.root / shared).symlink_to(self.root_a / shared)
        a.home.sealing_keys()[0]
        a.home.machine_secret()
        for name in ("sealing.key", "machines.key", "config.yaml"):
            shutil.copy(self.root_a / name, b.home.root / name)
        a.start()
        until(a.leads, "the first controller does not lead", 30.0)
        b.start()
        until(b.client.health, "the second controller does not start", 30.0)
        self.client = LeaderClient(self)  # type: ignore[assignment]
        return self

    def show_logs(self) -> None:
        """The ends of both, after something went wrong."""
        for name, daemon in self.daemons.items():
            lines = daemon.home.controller_log.read_text(errors="replace").splitlines()
            print(f"--- controller {name}", *lines[-20:], sep="\n", file=sys.stderr)

    def leader(self) -> str:
        for name in NAMES:
            if name not in self.silent and self.daemons[name].leads():
                return name
        raise ControllerDownError("none leads")

    def other(self, name: str) -> str:
        return NAMES[1 - NAMES.index(name)]

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self.database.rows(query, values)

    def take_down(self) -> None:
        for name in NAMES:
            self.daemons[name].send(signal.SIGCONT)
        self.silent.clear()

        def is_down() -> bool:
            for service in self.client.services():
                self.client.down(service["name"], purge=True)
            return not self.client.services()

        until(is_down, "the service does not go down", 60.0)
        until(lambda: not list(self.home.load_balancers.glob("*/agent.json")), "load balancers stay", 30.0)
        for daemon in self.daemons.values():
            daemon.send(signal.SIGTERM)
            assert daemon.process is not None
            daemon.process.wait(30.0)
        self.gone = self.rows("SELECT service, id FROM replicas WHERE state != 'GONE'")

    def leftovers(self) -> list[str]:
        left = [f"instance {folder.token} lives" for folder in self.live_instances()]
        return left + [f"row of {service} replica {number} is live" for service, number in self.gone]

    def _sweep(self) -> None:
        super()._sweep()
        for daemon in self.daemons.values():
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.kill()
        self.database.close()


class Fate:
    """What befalls the pair, one thing a round."""

    def __init__(self, pair: PairStack, seed: int, stopped_s: float) -> None:
        self._pair = pair
        self._random = random.Random(seed)
        self._stopped_s = stopped_s
        self.deeds: Counter[str] = Counter()
        self.failovers_s: dict[str, list[float]] = {}

    def strike(self) -> None:
        deeds = [self.kill, self.stop, self.set_clock]
        if isinstance(self._pair.database, PostgresServer):
            deeds += [self.cut_off, self.restart_database]
        deed = self._random.choice(deeds)
        self.deeds[deed.__name__] += 1
        deed()

    def kill(self) -> None:
        """SIGKILL; the one that was killed comes back and stands by."""
        name = self._leader()
        daemon = self._pair.daemons[name]
        self._pair.silent.add(name)
        daemon.send(signal.SIGKILL)
        self._takes_over("kill", self._pair.other(name))
        daemon.start()
        until(daemon.client.health, f"{name} does not come back", 30.0)
        self._pair.silent.discard(name)

    def stop(self) -> None:
        """SIGSTOP for a while, then SIGCONT: it believes for a moment that it leads."""
        name = self._leader()
        daemon = self._pair.daemons[name]
        self._pair.silent.add(name)
        started = time.monotonic()
        daemon.send(signal.SIGSTOP)
        self._takes_over("stop", self._pair.other(name))
        time.sleep(max(0.0, started + self._stopped_s - time.monotonic()))
        daemon.send(signal.SIGCONT)
        self._stands_by(name)

    def cut_off(self) -> None:
        """No packet between the leader and the database."""
        name = self._leader()
        assert isinstance(self._pair.database, PostgresServer)
        relay = self._pair.database.relays[name]
        self._pair.silent.add(name)
        relay.cut()
        self._takes_over("cut_off", self._pair.other(name))
        time.sleep(self._random.uniform(1.0, 10.0))
        relay.heal()
        self._stands_by(name)

    def restart_database(self) -> None:
        """As after a crash of the server."""
        assert isinstance(self._pair.database, PostgresServer)
        self._pair.database.restart()
        self._leader()

    def set_clock(self) -> None:
        """Of the leader's host (SQLite: of the host that both run on), and back at another time."""
        self._pair.made()
        ahead = self._random.choice(("0", str(EIGHT_HOURS_S), str(-EIGHT_HOURS_S)))
        name = self._leader()
        names = (name,) if self._pair.database.is_server else NAMES
        for one in names:
            self._pair.daemons[one].clock.write_text(ahead)
        time.sleep(3.0)
        self._leader()

    def _stands_by(self, name: str) -> None:
        daemon = self._pair.daemons[name]
        until(lambda: not daemon.leads() and daemon.client.health(), f"{name} does not stand by", 90.0)
        self._pair.silent.discard(name)

    def _leader(self) -> str:
        return until(self._pair.leader, "no controller leads", 30.0)

    def _takes_over(self, what: str, name: str) -> None:
        started = time.monotonic()
        until(self._pair.daemons[name].leads, f"{name} does not take over", 60.0)
        self.failovers_s.setdefault(what, []).append(time.monotonic() - started)


def run(pair: PairStack, fate: Fate, script: Script, rounds: int, rate: float) -> Traffic:
    """The deeds of the script while fate strikes; the traffic."""
    deeds = [script.preempt, script.end_one, script.preempt_with_notice, script.rolling]
    script.steady_up()
    with Traffic(pair.endpoint(STEADY), rate) as traffic:
        for number in range(rounds):
            failure: list[BaseException] = []

            def strike(failure: list[BaseException] = failure) -> None:
                try:
                    fate.strike()
                except BaseException as error:  # noqa: BLE001 - reported by the other thread
                    failure.append(error)

            thread = threading.Thread(target=strike)
            thread.start()
            deeds[number % len(deeds)]()
            thread.join()
            if failure:
                pair.show_logs()
                raise failure[0]
            pair.settled(STEADY)
            pair.made()
            print(f"round {number + 1} of {rounds}: {dict(fate.deeds)}", file=sys.stderr)
    return traffic


def audit_terms(pair: PairStack, fate: Fate) -> list[str]:
    """What the terms say, as sentences."""
    epochs = [epoch for daemon in pair.daemons.values() for epoch in daemon.epochs()]
    broken = []
    if len(set(epochs)) != len(epochs):
        broken.append(f"two controllers led in one term: {sorted(epochs)}")
    if any(sorted(mine) != mine for mine in (daemon.epochs() for daemon in pair.daemons.values())):
        broken.append("an epoch fell")
    late = [one for one in fate.failovers_s.get("kill", []) if one > FAILOVER_WITHIN_S]
    if late:
        broken.append(f"after a SIGKILL the other one led after {late} s")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description="Two controllers of one database.")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--stopped", type=float, default=30.0, help="seconds between SIGSTOP and SIGCONT")
    given = parser.parse_args()
    with PairStack(given.database) as pair:
        script, fate = Script(pair), Fate(pair, given.seed, given.stopped)
        traffic = run(pair, fate, script, given.rounds, given.rate)
        broken = audit(pair, script) + audit_terms(pair, fate)
    print(
        f"{given.database}, {given.rounds} rounds (seed {given.seed}): {dict(fate.deeds)} during {dict(script.deeds)}"
    )
    print(f"replicas launched, each explained: {dict(script.launches)}; ended: {dict(script.ends)}")
    for what, took in sorted(fate.failovers_s.items()):
        took.sort()
        at_99 = took[min(len(took) - 1, round(0.99 * len(took)))]
        print(
            f"the other one leads after {what}: p50 {statistics.median(took):.1f} s, p99 {at_99:.1f} s ({len(took)})"
        )
    print(f"requests failed: {share(traffic.failed(), traffic.outcomes)}; {latency(traffic.outcomes)}")
    if traffic.failed():
        broken.append(f"requests failed: {tally(traffic.outcomes)}")
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
