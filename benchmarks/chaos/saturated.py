"""Five engines with one seat each get three times what they can do: is a busy replica taken for a dead one?

The service may grow to ten replicas, and its configured rate is wrong: it calls five enough. Thresholds are the defaults (a probe
has 15 s, a replica 180 s). For each kind of probe: GET on a thread of its own, GET behind the requests, POST behind them.

Claims:
* no replica is terminated; with probes that wait behind requests the service grows to ten
* every response is 200, or 429 because the queue is full; a request is served within what the queue and the seats' queues hold
* with `--hang`, one replica that stops as a whole is replaced within its threshold and one probe, and nothing else is
* with `--fail`, one that responds with 500 to everything is replaced within its threshold, and nothing else is

    python -m benchmarks.chaos.saturated [--minutes 10] [--probes thread,queue,post] [--hang] [--fail]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.chaos.harness import Stack, until
from benchmarks.chaos.traffic import Traffic

NAME = "seats"
SEATS, MOST = 5, 10
SERVICE_S = 1.0
PER_REPLICA, QUEUE = 40, 50
THRESHOLD_S, PROBE_S, INTERVAL_S = 180.0, 15.0, 10.0
HURT_AFTER_S = 60.0


def service(probe: str) -> str:
    post = ', post_data: {model: m, messages: [{role: user, content: "hi"}]}' if probe == "post" else ""
    path = "/v1/chat/completions" if probe == "post" else "/health"
    engine = f"{sys.executable} -m benchmarks.chaos.one_seat"
    return f"""\
name: {NAME}
service:
  readiness_probe: {{path: {path}{post}}}
  replica_policy:
    min_replicas: {SEATS}
    max_replicas: {MOST}
    target_qps_per_replica: {3 * SEATS / SERVICE_S:g}
    upscale_delay_seconds: 60
  load_balancing_policy: least_load
  load_balancer:
    max_concurrency_per_replica: {PER_REPLICA}
    pushing: fixed_cap
    queue: {{size: {QUEUE}, timeout_seconds: 60}}
resources: {{infra: local}}
run: cd {_root()} && exec {engine} $SKYSERVE_REPLICA_PORT {SERVICE_S:g} {"thread" if probe == "thread" else "queue"}
"""


def _root() -> str:
    import benchmarks

    return str(next(iter(benchmarks.__path__)).removesuffix("/benchmarks"))


def events(stack: Stack, kind: str) -> list[dict[str, Any]]:
    return [event for event in stack.client.events(NAME) if event["kind"] == kind]


def ready_targets(stack: Stack) -> int:
    view = stack.view(NAME)
    return 0 if view is None or view["load_balancer"] is None else int(view["load_balancer"]["ready_targets"])


def measured(probe: str, minutes: float, hurt: str) -> list[str]:
    """Run one case; returns the claims that do not hold."""
    wrong: list[str] = []
    with Stack() as stack:
        stack.up(service(probe))
        until(lambda: ready_targets(stack) == SEATS, "not ready")
        hurt_at, victim = 0.0, 0
        rate = (0.5 if hurt == "/fail" else 3.0) * SEATS / SERVICE_S
        with Traffic(stack.endpoint(NAME), rate) as traffic:
            began = time.monotonic()
            while time.monotonic() - began < minutes * 60.0:
                time.sleep(1.0)
                if hurt and not victim and time.monotonic() - began >= HURT_AFTER_S:
                    one = stack.replicas(NAME, "READY")[1]
                    victim, hurt_at = one["id"], time.time()
                    urlopen(Request(one["endpoint"] + hurt, b""), timeout=5.0).close()
        gave_up = {event["replica_id"]: event["at"] for event in events(stack, "GaveUp")}
        size = len(stack.replicas(NAME, "READY"))
    statuses = Counter(outcome.status for outcome in traffic.outcomes)
    lost = Counter(outcome.error for outcome in traffic.outcomes if outcome.status is None)
    waits = sorted(outcome.took_s for outcome in traffic.outcomes if outcome.status == 200)
    p99 = waits[int(0.99 * len(waits))] if waits else float("inf")
    took = gave_up.get(victim, 0.0) - hurt_at if victim in gave_up else None
    print(
        f"probe {probe:7}{hurt or 'no fault':9} {size:3} replicas ready, given up {sorted(gave_up)}, responses "
        f"{dict(statuses)}{f' {dict(lost)}' if lost else ''}, p99 {p99:.1f} s, replaced after {'-' if took is None else f'{took:.0f} s'}",
        flush=True,
    )
    if set(gave_up) != ({victim} if hurt else set()):
        wrong.append(f"given up: {sorted(gave_up)}, hurt: {victim or 'none'}")
    if took is not None and took > THRESHOLD_S + PROBE_S + INTERVAL_S + 5.0:
        wrong.append(f"replaced after {took:.0f} s")
    if not hurt:
        if size < (SEATS if probe == "thread" else MOST):
            wrong.append(f"{size} replicas are ready")
        if set(statuses) - {200, 429}:
            wrong.append(f"responses {dict(statuses)}")
        # Those before it on its seat, a probe among them, those in the queue, and its own.
        if p99 > (PER_REPLICA + 1 + QUEUE / SEATS + 2) * SERVICE_S:
            wrong.append(f"p99 {p99:.1f} s")
    return [f"{probe}: {one}" for one in wrong]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.saturated", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--probes", default="thread,queue,post")
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--fail", action="store_true")
    given = parser.parse_args(arguments)
    hurt = "/hang" if given.hang else "/fail" if given.fail else ""
    wrong = [one for probe in given.probes.split(",") for one in measured(probe, given.minutes, hurt)]
    for one in wrong:
        print(f"BROKEN: {one}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
