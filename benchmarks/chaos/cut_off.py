"""The controller alone is in trouble: its network is cut, or it gets no CPU. Replicas and load balancer are well.

Three replicas under open-loop traffic. For `--cut` seconds no probe of the controller reaches a replica; then it is stopped
(SIGSTOP) for `--stopped` seconds.

Claims:
* no replica is terminated, and none is launched
* the doubt is reported once in the events, and in the notes of the service while it lasts
* no request fails
* within 30 s after each of the two, the controller calls all replicas ready and has no doubt
* a replica that is really dead is replaced after all that

    python -m benchmarks.chaos.cut_off [--cut 180] [--stopped 120] [--threshold 60]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

from benchmarks.chaos.deaf_controller import DEAF
from benchmarks.chaos.harness import Stack, Stuck, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Traffic, latency, tally

NAME, REPLICAS, RATE = "web", 3, 10.0
DOUBT = "may be cut off"
SOON_S = 30.0


@dataclass(slots=True)
class Finding:
    """What did not hold, as sentences."""

    broken: list[str] = field(default_factory=list)

    def claim(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.broken.append(sentence)


def run(cut_s: float, stopped_s: float, threshold_s: float) -> Finding:
    finding = Finding()
    with Stack("benchmarks.chaos.deaf_controller") as stack:
        stack.up(service_yaml(NAME, REPLICAS, failure_threshold_s=threshold_s))
        before = stack.settled(NAME)
        with Traffic(stack.endpoint(NAME), RATE) as traffic:
            _cut(stack, finding, cut_s)
            _recovered(stack, finding, before, "after the cut")
            _stop(stack, stopped_s)
            _recovered(stack, finding, before, "after it was stopped")
        finding.claim(not traffic.failed(), f"requests failed: {tally(traffic.outcomes)}")
        print(f"requests: {latency(traffic.outcomes)}", flush=True)
        _replace_a_dead_one(stack, finding, before[0], threshold_s)
    return finding


def _cut(stack: Stack, finding: Finding, cut_s: float) -> None:
    file = stack.home.root / DEAF
    file.touch()
    time.sleep(cut_s)
    finding.claim(DOUBT in _notes(stack), f"no doubt in the notes of the service: {_notes(stack)!r}")
    reported = [event for event in stack.client.events(NAME) if DOUBT in str(event.get("message", ""))]
    finding.claim(len(reported) == 1, f"the doubt was reported {len(reported)} times")
    file.unlink()


def _stop(stack: Stack, stopped_s: float) -> None:
    pid = stack.controller_pid()
    stack.freeze(pid)
    time.sleep(stopped_s)
    stack.thaw(pid)


def _recovered(stack: Stack, finding: Finding, before: list[int], when: str) -> None:
    def well() -> bool:
        ready = [r["id"] for r in stack.replicas(NAME) if r["state"] == "READY"]
        return sorted(ready) == sorted(before) and DOUBT not in _notes(stack)

    try:
        until(well, "", SOON_S)
    except Stuck:
        finding.claim(
            False, f"{when}: {[(r['id'], r['state']) for r in stack.replicas(NAME)]}, {_notes(stack)!r}"
        )
    print(f"{when}: {[(r['id'], r['state']) for r in stack.replicas(NAME)]}", flush=True)


def _replace_a_dead_one(stack: Stack, finding: Finding, replica: int, threshold_s: float) -> None:
    """Its process is stopped: it accepts connections and responds with nothing."""
    pid = stack.engine_pid(NAME, replica)
    stack.freeze(pid)
    try:
        until(
            lambda: replica not in [r["id"] for r in stack.replicas(NAME)],
            "",
            2.0 * threshold_s + 60.0,
        )
        stack.settled(NAME)
        print("a dead replica was replaced", flush=True)
    except Stuck as stuck:
        finding.claim(False, f"a dead replica is not replaced: {stuck} {_notes(stack)!r}")


def _notes(stack: Stack) -> str:
    (service,) = [one for one in stack.client.services() if one["name"] == NAME]
    return str(service.get("notes", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description="A controller that is cut off, or gets no CPU.")
    parser.add_argument("--cut", type=float, default=180.0, help="seconds")
    parser.add_argument("--stopped", type=float, default=120.0, help="seconds")
    parser.add_argument(
        "--threshold", type=float, default=60.0, help="seconds after which a probe that fails counts"
    )
    given = parser.parse_args()
    finding = run(given.cut, given.stopped, given.threshold)
    for claim in finding.broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if finding.broken else 0


if __name__ == "__main__":
    sys.exit(main())
