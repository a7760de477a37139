"""What links between regions cost: agents as processes, with mutual TLS over loopback.

    python -m benchmarks.regions cost [--parts idle,forward,rate] [--rounds 5] [--compiled] [--check]

    idle      share of a core of an agent with 1 and with 9 peers and no requests, and of one without peers; from the first
              two, CPU time of one report, at both of its ends
    forward   CPU time of a forwarded request at the agent that it enters and at the one that serves it, over that of a
              request that is served where it enters. Two agents are busy in both cases: two that share the cores of this
              machine have colder caches than one, and so would a forwarded request be charged with
    rate      requests per second that a peer with one replica, which takes one request at a time, is sent

Figures are medians over rounds; rounds of what is compared take turns. With `--compiled` the agents run as a wheel installs them
(compiling takes some minutes, once), else the Python modules of this checkout. With `--check` the exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.lb_scale import TOKEN, Balancer, line, load, run_clients, targets_at
from benchmarks.router.machine import native_agent
from provisioners.remote.certificates import Authority

ROOT = Path(__file__).parents[2]
PARTS = ("idle", "forward", "rate")
PEERS = 9
SETTLED_S = 8.0  # until links are made and what is polled once has been polled
WATCHED_S = 5.0
CLIENTS, REQUESTS = 8, 100
SERVICE_S = 0.02
_RATED_REQUESTS = 25  # of each client

IDLE_SHARE, REPORT_US, FORWARD_RATIO = 0.01, 100.0, 1.5


class Goal(NamedTuple):
    """One line of the report."""

    what: str
    value: float
    goal: float | None = None  # at most; None: for information
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.goal is None or self.value <= self.goal

    def __str__(self) -> str:
        verdict = (
            "" if self.goal is None else f"  (at most {self.goal:g}: {'holds' if self.holds else 'MISSED'})"
        )
        return f"{self.what:58} {self.value:9.3f} {self.unit}{verdict}"


class Linked(Balancer):
    """An agent of a region of its own."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        super().__init__(process)
        self.name, self.peers_port = name, int(self.ready["peers_port"])

    def own(self, targets: list[dict[str, str]], others: Sequence[Linked], **more: object) -> None:
        peers = [
            {
                "id": one.name,
                "region": f"cloud/{one.name}",
                "url": f"https://127.0.0.1:{one.peers_port}",
                "tls_name": one.name,
            }
            for one in others
            if one is not self
        ]
        regions = {"agent": self.name, "here": f"cloud/{self.name}", "peers": peers}
        self.use(targets, "gorgo", **({"regions": regions} if peers else {}), **more)

    def reports(self) -> int:
        """How many reports it has received from its peers."""
        return sum(int(row["reports"]) for row in self.call("GET", "/-/regions")["peers"])


@contextmanager
def agents(names: Sequence[str], modules: Path) -> Iterator[list[Linked]]:
    """Agents of one service, which are not linked yet. They run the packages in `modules`."""
    authority = Authority(bytes(range(32)), "owner", "chat")
    with ExitStack() as until:
        folder = Path(until.enter_context(TemporaryDirectory()))
        (folder / "ca.pem").write_bytes(authority.pem)
        found = []
        for name in names:
            certificate = folder / f"{name}.pem"
            certificate.write_bytes(authority.of_agent(name, datetime.now(UTC)))
            found.append(until.enter_context(_agent(name, certificate, folder, modules)))
        yield found


@contextmanager
def _agent(name: str, certificate: Path, folder: Path, modules: Path) -> Iterator[Linked]:
    words = ["--port", "0", "--admin-port", "0", "--peers-port", "0", "--region", f"cloud/{name}"]
    words += ["--peers-certfile", str(certificate), "--peers-cafile", str(folder / "ca.pem")]
    command = [sys.executable, "-m", "lb", *words]
    environ = {**os.environ, "SKYSERVE_LB_TOKEN": TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True, cwd=modules
    ) as process:
        try:
            yield Linked(process, name)
        finally:
            process.kill()


class Idle(NamedTuple):
    """Of one agent: share of a core, and reports received (which are as many as it sends) per second."""

    share: float
    reports_per_s: float


def idle(peers: int, rounds: int, modules: Path) -> Idle:
    """The median agent of `peers` + 1 that are all linked, without requests."""
    names = [f"r{number}" for number in range(peers + 1)]
    with load() as engine, agents(names, modules) as those:
        port = int(line(engine))
        for one in those:
            one.own(targets_at(port, 1), those)
        time.sleep(SETTLED_S)
        shares, rates = [], []
        for _ in range(rounds):
            began = time.monotonic()
            reports = [one.reports() for one in those] if peers else [0]
            asked = [one.cpu_s() for one in those]  # without the cost of the question
            time.sleep(WATCHED_S)
            took_s = time.monotonic() - began
            shares += [(one.cpu_s() - since) / WATCHED_S for one, since in zip(those, asked, strict=True)]
            if peers:
                rates += [(one.reports() - since) / took_s for one, since in zip(those, reports, strict=True)]
        return Idle(median(shares), median(rates) if rates else 0.0)


def idle_goals(rounds: int, modules: Path) -> list[Goal]:
    alone, pair, many = (idle(peers, rounds, modules) for peers in (0, 1, PEERS))
    reports_per_s = many.reports_per_s - pair.reports_per_s
    return [
        Goal("idle, no peer", 100 * alone.share, None, "% of a core"),
        Goal("idle, 1 peer", 100 * pair.share, None, "% of a core"),
        Goal(f"idle, {PEERS} peers", 100 * many.share, 100 * IDLE_SHARE, "% of a core"),
        Goal("reports a second to each idle peer", many.reports_per_s / PEERS),
        Goal("one report, both ends", 1e6 * (many.share - pair.share) / reports_per_s, REPORT_US, "us"),
    ]


def forward_goals(rounds: int, modules: Path) -> list[Goal]:
    names = ["us", "eu", "home", "other"]
    with load("--takes", "0.0") as engine, agents(names, modules) as (us, eu, home, other):
        targets = targets_at(int(line(engine)), 4)
        pushing = {"mode": "blind"}
        us.own([], [us, eu], pushing=pushing)
        eu.own(targets, [us, eu], pushing=pushing)
        home.own(targets, [home], pushing=pushing)
        other.own(targets, [other], pushing=pushing)
        time.sleep(SETTLED_S)
        costs: dict[str, list[float]] = {"us": [], "eu": [], "home": [], "other": []}
        for number in range(rounds + 1):
            for entered, measured, share in (((us,), (us, eu), 1), ((home, other), (home, other), 2)):
                before = {one.name: one.cpu_s() for one in measured}
                clients(engine, entered, CLIENTS, share * REQUESTS)
                if number:  # the first round opens connections
                    for one in measured:
                        us_each = 1e6 * (one.cpu_s() - before[one.name]) / (CLIENTS * REQUESTS)
                        costs[one.name].append(us_each)
        forwarded = us.call("GET", "/-/regions")["peers"][0]["forwarded_out"]
        if forwarded < CLIENTS * REQUESTS * (rounds + 1):
            raise SystemExit(f"only {forwarded} requests were forwarded: the figures are void")
    local = [(one + another) / 2 for one, another in zip(costs["home"], costs["other"], strict=True)]
    return [
        Goal("a request that is served where it enters", median(local), None, "us"),
        Goal("a forwarded request where it enters", median(costs["us"]), None, "us"),
        Goal("a forwarded request where it is served", median(costs["eu"]), None, "us"),
        Goal("where it enters, over a local one", _ratio(costs["us"], local), FORWARD_RATIO),
        Goal("where it is served, over a local one", _ratio(costs["eu"], local), FORWARD_RATIO),
    ]


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds."""
    return median(one / other for one, other in zip(these, those, strict=True))


def clients(engine: subprocess.Popen[str], entered: Sequence[Balancer], count: int, requests: int) -> None:
    """Run `count` closed loops, which take turns with the load balancers, until they are done."""
    ports = [one.port for one in entered]
    run_clients(engine, {"ports": ports, "clients": count, "requests": requests, "seed": 0})
    line(engine)


def rate_goals(rounds: int, modules: Path) -> list[Goal]:
    with load("--takes", str(SERVICE_S)) as engine, agents(["us", "eu"], modules) as (us, eu):
        pushing = {"mode": "fixed_cap", "cap": 1}
        us.own([], [us, eu], pushing=pushing)
        eu.own(targets_at(int(line(engine)), 1), [us, eu], pushing=pushing)
        time.sleep(SETTLED_S)
        rates = []
        for _ in range(rounds):
            began = time.monotonic()
            clients(engine, [us], CLIENTS, _RATED_REQUESTS)
            rates.append(CLIENTS * _RATED_REQUESTS / (time.monotonic() - began))
    return [Goal(f"requests to a peer with one replica of {1 / SERVICE_S:g}/s", median(rates), None, "/s")]


def run(parts: Sequence[str], rounds: int, *, compiled: bool = False) -> bool:
    """Print the figures of the parts. Returns whether all goals hold."""
    modules = native_agent(ROOT) if compiled else ROOT
    goals: list[Goal] = []
    for part, measure in zip(PARTS, (idle_goals, forward_goals, rate_goals), strict=True):
        if part in parts:
            for goal in measure(rounds, modules):
                print(goal, flush=True)
                goals.append(goal)
    return all(goal.holds for goal in goals)
