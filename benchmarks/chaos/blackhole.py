"""One of five replicas is down and still listed: how many requests fail, and how long does the longest wait?

Three faults on a whole installation: the engine's process is killed, the whole instance is killed, the engine is
frozen (SIGSTOP: it accepts connections and never responds). Each once with the controller at work, which takes
the replica out of the table within about a second, and once, the harsher case, with the controller frozen as
well: the load balancer gets no message, the replica stays listed to the end. Traffic is open-loop.

Claims: no 5xx and no other failure; no wait beyond the configured time to first byte; the replica is ejected.

The figures beside ours were measured with SkyPilot 0.14.1, its own load balancer, 5 targets of which one is
down and still listed, the same rate and duration (benchmarks/lb_blackhole.py says more).

    python -m benchmarks.chaos.blackhole [--seconds 20] [--rate 20]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.chaos.harness import Stack, share, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Outcome, Traffic, tally

NAME = "hole"
TIME_TO_FIRST_BYTE_S = 20.0
FAULTS = ("engine killed", "instance killed", "engine frozen")
SKYSERVE = {
    ("least_load", False): "42-45 % failed",
    ("round_robin", False): "1 % failed",
    ("least_load", True): "1 % hung > 40 s",
    ("round_robin", True): "20 % hung > 40 s",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault under one policy. `listed`: the victim was in the load balancer's table to the end."""

    outcomes: tuple[Outcome, ...]
    listed: bool
    ejections: float

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.good]

    @property
    def longest_s(self) -> float:
        return max(outcome.took_s for outcome in self.outcomes)


def hurt(stack: Stack, fault: str, replica_id: int) -> None:
    engine, host = stack.engine_pid(NAME, replica_id), stack.host_pid(NAME, replica_id)
    if fault == "engine frozen":
        stack.freeze(engine)
    else:
        os.kill(engine if fault == "engine killed" else host, signal.SIGKILL)


@contextmanager
def controller_frozen(stack: Stack, wanted: bool) -> Iterator[None]:
    """No controller takes the replica out of the table."""
    pid = stack.controller_pid()
    if wanted:
        stack.freeze(pid)
    try:
        yield
    finally:
        stack.thaw(pid)


def measure(stack: Stack, fault: str, *, alone: bool, seconds: float, rate: float) -> Finding:
    """Hurt the oldest replica a moment after the traffic begins. `alone`: without the controller."""
    victim = stack.settled(NAME)[0]
    before = stack.metric(NAME, "skyserve_lb_ejections")
    endpoint, engine = stack.endpoint(NAME), stack.engine_pid(NAME, victim)
    with controller_frozen(stack, alone):
        with Traffic(endpoint, rate) as traffic:
            # In good standing, and proved by a second of traffic: it may have been the victim before.
            until(lambda: not stack.stats(NAME)[str(victim)]["ejected"], "the victim is still ejected")
            warm = len(traffic.outcomes) + rate
            until(lambda: len(traffic.outcomes) >= warm, "no traffic")
            hurt(stack, fault, victim)
            if fault == "engine frozen":
                until(lambda: stack.metric(NAME, "skyserve_lb_ejections") > before, "it is not ejected", 30.0)
            until(
                lambda: len(traffic.outcomes) >= warm + rate * seconds, "traffic ends", 10.0 * seconds + 30.0
            )
        finding = Finding(
            outcomes=tuple(traffic.outcomes),
            listed=str(victim) in stack.listed(NAME),
            ejections=stack.metric(NAME, "skyserve_lb_ejections") - before,
        )
    if fault == "engine frozen":
        stack.thaw(engine)
    else:  # a controller that was frozen has yet to find out
        until(
            lambda: all(r["id"] != victim for r in stack.replicas(NAME, "READY")), "it is still called ready"
        )
    stack.settled(NAME)
    return finding


def check(finding: Finding, *, fault: str, alone: bool) -> list[str]:
    """The claims that do not hold."""
    broken = []
    if finding.failures:
        broken.append(f"{len(finding.failures)} requests failed: {tally(finding.outcomes)}")
    if finding.longest_s > TIME_TO_FIRST_BYTE_S:
        broken.append(f"a request waited {finding.longest_s:.1f} s")
    if alone and not finding.listed:
        broken.append("the victim was not listed to the end: the case was not the one to show")
    if (alone or fault == "engine frozen") and not finding.ejections:
        broken.append("the victim was not ejected")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description="Failures while one of five replicas is down.")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    given = parser.parse_args()
    broken = []
    print(
        f"time to first byte is configured as {TIME_TO_FIRST_BYTE_S:g} s; SkyServe: SkyPilot 0.14.1, still listed"
    )
    print(f"{'policy':<12} {'fault':<16} {'controller':<11} {'failed here':<18} {'longest':<9} "
          f"{'ejected':<8} {'listed':<7} SkyServe")  # fmt: skip
    with Stack() as stack:
        for policy in ("least_load", "round_robin"):
            yaml = service_yaml(NAME, 5, policy=policy, time_to_first_byte_s=TIME_TO_FIRST_BYTE_S)
            if policy == "least_load":
                stack.up(yaml)
            else:
                stack.update(yaml)  # replicas are not replaced for it
            for fault in FAULTS:
                for alone in (False, True):
                    found = measure(stack, fault, alone=alone, seconds=given.seconds, rate=given.rate)
                    print(f"{policy:<12} {fault:<16} {'frozen' if alone else 'at work':<11} "
                          f"{share(found.failures, found.outcomes):<18} {found.longest_s:<7.3f} s "
                          f"{found.ejections:<8g} {'yes' if found.listed else 'no':<7} "
                          f"{SKYSERVE[policy, fault == 'engine frozen']}", flush=True)  # fmt: skip
                    broken += [
                        f"{policy}, {fault}, controller {'frozen' if alone else 'at work'}: {claim}"
                        for claim in check(found, fault=fault, alone=alone)
                    ]
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    began_at = time.monotonic()
    code = main()
    print(f"took {time.monotonic() - began_at:.0f} s")
    sys.exit(code)
