"""The controller is killed with SIGKILL at random moments, again and again, while it has work to do.

Two services live a scripted life: one under traffic is updated (rolling and blue-green), preempted (with notice
and without) and a replica is terminated by command; the other goes up and down. Meanwhile the benchmark kills the controller at
moments drawn from a seed, also while it is starting, and starts the next. The script always knows how many
replicas an uninterrupted controller would have launched, and why each of them would have ended.

Claims, when all is quiet again:
* the fleet is what the specs say, and every live instance belongs to a live replica
* replicas launched, and instances ever made, are as many as the script explains, and no id was used twice
* every end has the reason, and the reasons the numbers, that the script explains
* no request failed

    python -m benchmarks.chaos.kill_controller [--kills 50] [--seed 1] [--longest-life 2.5]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from benchmarks.chaos.harness import Stack, share, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Traffic, latency, tally
from policies.goals import UpdateMode
from policies.model import EndReason
from skyserve_cli.controller.api.client import ControllerDownError, RefusedError

STEADY, COMING = "steady", "coming"
STEADY_REPLICAS, COMING_REPLICAS = 3, 2


class Killer:
    """Kills whatever controller there is, `kills` times, and sees to it that there is a next one. A context
    manager with a thread of its own."""

    def __init__(self, stack: Stack, kills: int, seed: int, longest_life_s: float) -> None:
        self.done = 0
        self._stack = stack
        self._kills = kills
        self._random = random.Random(seed)
        self._longest_life_s = longest_life_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(60.0)

    @property
    def finished(self) -> bool:
        """Whether there will be no further kill."""
        return self.done >= self._kills or not self._thread.is_alive()

    def _run(self) -> None:
        while self.done < self._kills and not self._stopping.is_set():
            starting = threading.Thread(target=self._bring_up, daemon=True)
            starting.start()
            self._stopping.wait(self._random.uniform(0.0, self._longest_life_s))
            for pid in until(self._stack.controllers, "there is no controller to kill"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.done += 1
            starting.join()
        self._bring_up()

    def _bring_up(self) -> None:
        with suppress(ControllerDownError):  # killed on its way up: as intended
            self._stack.client.ensure_running()


class Script:
    """The life of the two services, and the books on what it takes. One method, one deed, waited for."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._version = 1
        self.launches: Counter[str] = Counter()
        self.ends: Counter[tuple[str, str]] = Counter()
        self.deeds: Counter[str] = Counter()

    @property
    def model(self) -> str:
        return f"v{self._version}"

    def steady_up(self) -> None:
        self._up(STEADY, STEADY_REPLICAS)
        self._stack.settled(STEADY)

    def rolling(self) -> None:
        self._update(UpdateMode.ROLLING)

    def blue_green(self) -> None:
        self._update(UpdateMode.BLUE_GREEN)

    def preempt(self) -> None:
        self._preempt(0.0)

    def preempt_with_notice(self) -> None:
        self._preempt(2.0)

    def end_one(self) -> None:
        victim = self._oldest()
        with suppress(RefusedError):  # the response to the first try was lost, and it is gone
            insist(lambda: self._stack.client.kill(STEADY, victim))
        self._replaced(victim, EndReason.USER)

    def coming_up(self) -> None:
        self._up(COMING, COMING_REPLICAS)
        self._stack.settled(COMING)

    def coming_down(self) -> None:
        insist(lambda: self._stack.client.down(COMING, purge=False))
        self._stack.went_down(COMING)
        self._count("down", COMING, EndReason.SERVICE_DOWN, COMING_REPLICAS)

    def coming_up_and_straight_down(self) -> None:
        """Terminated before it is up: how far it got decides what is launched, so its instances are the record."""
        self._up(COMING, COMING_REPLICAS)
        insist(lambda: self._stack.client.down(COMING, purge=True))
        self._stack.went_down(COMING)
        launched = self._stack.rows(
            "SELECT count(*) FROM replicas WHERE service = ? AND version ="
            " (SELECT version FROM services WHERE name = ?)", COMING, COMING
        )[0][0]  # fmt: skip
        self.launches[COMING] += launched - COMING_REPLICAS
        self._count("up and straight down", COMING, EndReason.SERVICE_DOWN, launched)

    def cycle(self) -> list[Callable[[], None]]:
        return [
            self.coming_up,
            self.rolling,
            self.preempt,
            self.coming_down,
            self.end_one,
            self.blue_green,
            self.coming_up_and_straight_down,
            self.preempt_with_notice,
        ]

    def _up(self, name: str, replicas: int) -> None:
        yaml = service_yaml(name, replicas, model=self.model)

        def put() -> None:
            if self._stack.view(name) is None:  # else the first try was taken, and its response lost
                self._stack.up(yaml)

        insist(put)
        self.launches[name] += replicas
        self.deeds["up"] += 1

    def _update(self, mode: UpdateMode) -> None:
        self._version += 1
        before = until(lambda: self._stack.view(STEADY), "no service")["version"]

        def put() -> None:
            view = self._stack.view(STEADY)
            if view is not None and view["version"] == before:
                self._stack.update(service_yaml(STEADY, STEADY_REPLICAS, model=self.model), mode)

        insist(put)
        self._stack.settled(STEADY, model=self.model)
        self.launches[STEADY] += STEADY_REPLICAS
        self._count(f"{mode.value} update", STEADY, EndReason.REPLACED, STEADY_REPLICAS)

    def _preempt(self, notice_s: float) -> None:
        victim = self._oldest()
        insist(lambda: self._stack.preempt(STEADY, victim, notice_s))
        self._replaced(victim, EndReason.PREEMPTED)

    def _replaced(self, victim: int, reason: EndReason) -> None:
        until(lambda: all(r["id"] != victim for r in self._stack.replicas(STEADY)), f"{victim} does not go")
        self._stack.settled(STEADY)
        self.launches[STEADY] += 1
        self._count(reason.value.lower(), STEADY, reason, 1)

    def _oldest(self) -> int:
        return self._stack.settled(STEADY)[0]

    def _count(self, deed: str, name: str, reason: EndReason, replicas: int) -> None:
        self.deeds[deed] += 1
        self.ends[name, reason.value] += replicas


def insist(call: Callable[[], object]) -> None:
    """Make a call of the controller, again if it died before it responded."""

    def responded() -> bool:
        call()
        return True

    until(responded, "the controller does not respond")


def audit(stack: Stack, script: Script) -> list[str]:
    """Whatever an uninterrupted controller would have done otherwise, as sentences."""
    broken = []
    launched = Counter(dict(stack.rows("SELECT service, count(*) FROM replicas GROUP BY service")))
    if launched != script.launches:
        broken.append(f"replicas launched: {dict(launched)}, explained: {dict(script.launches)}")
    ends = Counter(
        {
            (service, reason): count
            for service, reason, count in stack.rows(
                "SELECT service, end_reason, count(*) FROM replicas WHERE state = 'GONE' GROUP BY 1, 2"
            )
        }
    )
    if ends != script.ends:
        broken.append(f"replicas ended: {dict(ends)}, explained: {dict(script.ends)}")
    twice = stack.rows(
        "SELECT service, replica_id FROM events WHERE kind = 'Launch' GROUP BY 1, 2 HAVING count(*) > 1"
    )
    if twice:
        broken.append(f"ids used twice: {twice}")
    logged = Counter(
        dict(stack.rows("SELECT service, count(*) FROM events WHERE kind = 'Launch' GROUP BY service"))
    )
    if logged != script.launches:
        broken.append(f"launches in the event log: {dict(logged)}, explained: {dict(script.launches)}")
    errors = stack.rows("SELECT service, replica_id, message FROM events WHERE kind = 'error'")
    if errors:
        broken.append(f"errors in the event log: {errors}")
    return broken + audit_instances(stack)


def audit_instances(stack: Stack) -> list[str]:
    """Instances against rows: at most one for each replica that was launched, alive where the replica is."""
    made = stack.made()
    accepted = set(stack.rows("SELECT service, id FROM replicas WHERE launched_at IS NOT NULL"))
    broken = [f"{count} instances of {key}" for key, count in made.items() if count > 1]
    if not accepted <= set(made):
        broken.append(f"launched, and no instance: {sorted(accepted - set(made))}")
    known = set(stack.rows("SELECT service, id FROM replicas"))
    if not set(made) <= known:
        broken.append(f"instances without a row: {sorted(set(made) - known)}")
    alive = {(r.service, r.replica_id) for f in stack.live_instances() if (r := f.record())}
    live = set(stack.rows("SELECT service, id FROM replicas WHERE state != 'GONE'"))
    if alive != live:
        broken.append(f"alive {sorted(alive)}, rows say {sorted(live)}")
    return broken


def run(
    stack: Stack,
    script: Script,
    deeds: Sequence[Callable[[], None]],
    *,
    kills: int,
    seed: int,
    longest_life_s: float,
    rate: float,
) -> tuple[Traffic, int]:
    """The deeds of the script, over and over until the killer has had his fill; the traffic, and the kills."""
    script.steady_up()
    with Traffic(stack.endpoint(STEADY), rate) as traffic:
        with Killer(stack, kills, seed, longest_life_s) as killer:
            while True:
                for deed in deeds:
                    deed()
                if killer.finished:
                    break
        stack.settled(STEADY, model=script.model)
    return traffic, killer.done


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL the controller at random moments.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--longest-life", type=float, default=2.5, help="seconds a controller may live")
    given = parser.parse_args()
    with Stack() as stack:
        script = Script(stack)
        traffic, kills = run(
            stack, script, script.cycle(), kills=given.kills, seed=given.seed,
            longest_life_s=given.longest_life, rate=given.rate,
        )  # fmt: skip
        broken = audit(stack, script)
    print(f"controller killed {kills} times (seed {given.seed}) during {dict(script.deeds)}")
    print(f"replicas launched, each explained: {dict(script.launches)}; ended: {dict(script.ends)}")
    print(f"requests failed: {share(traffic.failed(), traffic.outcomes)}; {latency(traffic.outcomes)}")
    if kills < given.kills:
        broken.append(f"only {kills} kills of {given.kills}")
    if traffic.failed():
        broken.append(f"requests failed: {tally(traffic.outcomes)}")
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    began_at = time.monotonic()
    code = main()
    print(f"took {time.monotonic() - began_at:.0f} s")
    sys.exit(code)
