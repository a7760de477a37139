"""Preemptions, a rolling update and a blue-green update under traffic: who notices?

Four replicas, 30 unary requests a second, and streams that take much longer than a switch takes.

Claims:
* two of four replicas are preempted, one with ten seconds' notice and one without: no unary request fails, and every
  stream ends whole
* a rolling and a blue-green update: no unary request fails, and every stream ends whole, also the ones whose replica
  was drained while they ran, and also if they need longer than the drain timeout
* blue-green never mixes: no request that was sent after the first response of the new version was complete is
  served by the old one. During a rolling update both respond, which is what rolling means.

    python -m benchmarks.chaos.updates [--rate 30] [--stream-seconds 8] [--drain-timeout 120]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.chaos.harness import Stack, share, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Outcome, Traffic, latency, tally
from policies.goals import UpdateMode

NAME = "web"
UNARY_TOKENS = 40
STREAM_TOKENS = 2000
STREAMS_AT_ONCE = 16
DRAIN_TIMEOUT_S = 120.0
TOKEN_S = 0.067  # of the engine's profile, at speed 1


@dataclass(frozen=True, slots=True)
class Finding:
    unary: tuple[Outcome, ...]
    streams: tuple[Outcome, ...]

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in (*self.unary, *self.streams) if not outcome.good]


class Warned(NamedTuple):
    """What became of a replica with a notice.

    Requests it had been given when its replacement was being launched, and when that was ready, while it still took some; and
    how long before its end it was taken out of the load balancer's list.
    """

    finding: Finding
    served_before: int
    served_after: int
    drained_s_before: float


def spec(
    replicas: int,
    model: str,
    stream_s: float,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    notice_drain_s: float = 30.0,
) -> str:
    """Engines so fast that a stream takes `stream_s`."""
    speed = STREAM_TOKENS * TOKEN_S / stream_s
    return service_yaml(
        NAME,
        replicas,
        model=model,
        speed=speed,
        drain_timeout_s=drain_timeout_s,
        notice_drain_s=notice_drain_s,
    )


def preempt_two(stack: Stack, *, rate: float, stream_s: float, notice_s: float = 10.0) -> Finding:
    """One with notice, one without."""
    first, second, *_ = stack.settled(NAME)
    endpoint = stack.endpoint(NAME)
    with (
        Traffic(endpoint, rate, tokens=UNARY_TOKENS) as unary,
        Traffic(endpoint, STREAMS_AT_ONCE / stream_s, tokens=STREAM_TOKENS, stream=True) as streams,
    ):
        until(lambda: streams.outcomes, "no stream ends", 10.0 * stream_s)
        stack.preempt(NAME, first, notice_s)
        stack.preempt(NAME, second)
        until(lambda: not {first, second} & {r["id"] for r in stack.replicas(NAME)}, "they do not go")
        stack.settled(NAME)
        flow(unary, rate)
    return Finding(tuple(unary.outcomes), tuple(streams.outcomes))


def warn_one(stack: Stack, *, rate: float, stream_s: float, notice_s: float) -> Warned:
    """One of the replicas has a notice, long enough for its replacement to be ready before it ends."""
    replicas = stack.settled(NAME)
    first, endpoint = replicas[0], stack.endpoint(NAME)
    with (
        Traffic(endpoint, rate, tokens=UNARY_TOKENS) as unary,
        Traffic(endpoint, len(replicas) / stream_s, tokens=STREAM_TOKENS, stream=True) as streams,
    ):
        until(lambda: streams.outcomes, "no stream ends", 10.0 * stream_s)
        ends_at = time.time() + notice_s
        stack.preempt(NAME, first, notice_s)
        replacement = until(
            lambda: [r["id"] for r in stack.replicas(NAME) if r["id"] not in replicas], "nothing is launched"
        )[0]
        before = served(stack, first)
        until(lambda: stack.listed(NAME).get(str(replacement)) == "ready", "the replacement is not ready")
        until(lambda: served(stack, first) > before, "the replica with the notice is given no more requests")
        after = served(stack, first)
        until(lambda: stack.listed(NAME).get(str(first)) != "ready", "it does not drain", 2.0 * notice_s)
        drained_s_before = ends_at - time.time()
        until(lambda: first not in {r["id"] for r in stack.replicas(NAME)}, "it does not go")
        stack.settled(NAME)
        flow(unary, rate)
    return Warned(Finding(tuple(unary.outcomes), tuple(streams.outcomes)), before, after, drained_s_before)


def served(stack: Stack, replica_id: int) -> int:
    """The requests that a replica was given within the last minute."""
    target = stack.stats(NAME).get(str(replica_id))
    return 0 if target is None else int(target["requests"])


def update(
    stack: Stack,
    mode: UpdateMode,
    *,
    replicas: int,
    model: str,
    rate: float,
    stream_s: float,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    streams_at_once: int = STREAMS_AT_ONCE,
) -> Finding:
    """Replace every replica by one of another version, while unary requests and long streams go on."""
    endpoint = stack.endpoint(NAME)
    with (
        Traffic(endpoint, rate, tokens=UNARY_TOKENS) as unary,
        Traffic(endpoint, streams_at_once / stream_s, tokens=STREAM_TOKENS, stream=True) as streams,
    ):
        until(lambda: streams.outcomes, "no stream ends", 10.0 * stream_s)
        stack.update(spec(replicas, model, stream_s, drain_timeout_s), mode)
        stack.settled(NAME, model=model, patience_s=120.0 + 10.0 * stream_s)
        flow(unary, rate)
    return Finding(tuple(unary.outcomes), tuple(streams.outcomes))


def flow(traffic: Traffic, count: float) -> None:
    """Wait for this number of further responses."""
    enough = len(traffic.outcomes) + count
    until(lambda: len(traffic.outcomes) >= enough, "the traffic stands still")


def mixed(outcomes: Sequence[Outcome], new: str) -> list[Outcome]:
    """Responses of another version to requests sent after the new version had already served one."""
    switched_at = min((o.ended_at for o in outcomes if o.model == new), default=float("inf"))
    return [o for o in outcomes if o.good and o.model != new and o.sent_at > switched_at]


def outlived(finding: Finding, new: str) -> list[Outcome]:
    """Streams of the old version that completed after the first response of the new version."""
    switched_at = min((o.ended_at for o in finding.unary if o.model == new), default=float("inf"))
    return [o for o in finding.streams if o.good and o.model != new and o.ended_at > switched_at]


def report(what: str, finding: Finding, new: str = "") -> list[str]:
    """Print the figures; the claims that do not hold. `new`: the version an update went to."""
    failed = [outcome for outcome in finding.unary if not outcome.good]
    print(f"{what}: unary failed {share(failed, finding.unary)}; {latency(finding.unary)}", flush=True)
    broken = [f"{what}: {tally(finding.unary)}"] if failed else []
    if finding.streams:
        cut = [outcome for outcome in finding.streams if not outcome.good]
        print(f"{what}: streams cut {share(cut, finding.streams)}; {latency(finding.streams)}", flush=True)
        broken += [f"{what}: {tally(finding.streams)}"] if cut else []
    if new:
        late = outlived(finding, new)
        print(f"{what}: {len(late)} streams of the old version ended whole after the switch", flush=True)
        if not late:
            broken.append(f"{what}: no stream outlived the switch: the case was not the one to show")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description="Preemptions and updates under traffic.")
    parser.add_argument("--rate", type=float, default=30.0, help="unary requests per second")
    parser.add_argument("--stream-seconds", type=float, default=8.0, help="how long a stream takes")
    parser.add_argument("--drain-timeout", type=float, default=DRAIN_TIMEOUT_S, help="seconds")
    given = parser.parse_args()
    rate, stream_s, drain_s = given.rate, given.stream_seconds, given.drain_timeout
    with Stack() as stack:
        stack.up(spec(4, "v1", stream_s, drain_s))
        stack.settled(NAME)
        broken = report("two of four preempted", preempt_two(stack, rate=rate, stream_s=stream_s))
        versions = ((UpdateMode.ROLLING, "v2"), (UpdateMode.BLUE_GREEN, "v3"))
        for mode, model in versions:
            finding = update(
                stack, mode, replicas=4, model=model, rate=rate, stream_s=stream_s, drain_timeout_s=drain_s
            )
            broken += report(f"{mode.value} update", finding, model)
            both = mixed(finding.unary, model) + mixed(finding.streams, model)
            print(f"{mode.value} update: {len(both)} answers of the old version after the first of the new")
            if mode is UpdateMode.BLUE_GREEN and both:
                broken.append(f"blue-green mixed the versions: {len(both)} late answers of the old one")
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    began_at = time.monotonic()
    code = main()
    print(f"took {time.monotonic() - began_at:.0f} s")
    sys.exit(code)
