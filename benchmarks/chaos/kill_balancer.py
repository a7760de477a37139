"""The load balancer is killed with SIGKILL under traffic: how long until its endpoint responds again?

Measured from the kill to the first request that a replica has served through the endpoint, so the table must
be back as well: a load balancer that listens but knows no replica does not count. Also once with the whole
controller's knowledge of it gone: the controller is killed first, and the next one has to find out.

Claims: with the controller at work the endpoint responds within 2 s, each time; the new one has the same table;
nothing is left of the old one. Requests in the gap are refused or reset, and are counted, not judged: the
connection is the process's, and one load balancer per region is one.

    python -m benchmarks.chaos.kill_balancer [--kills 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.chaos.harness import Stack, share, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Traffic, tally

NAME = "gate"
LIMIT_S = 2.0


def answers(endpoint: str) -> bool:
    """Whether a request is served by a replica."""
    body = b'{"messages": [{"role": "user", "content": "Back?"}], "max_tokens": 1}'
    request = Request(f"{endpoint}/v1/chat/completions", data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urlopen(request, timeout=5.0) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError, TimeoutError):
        return False


def kill(stack: Stack, *, with_controller: bool = False) -> float:
    """Kill the agent; seconds until a request is served again."""
    endpoint, old = stack.endpoint(NAME), stack.agent_pid(NAME)
    controllers = stack.controllers() if with_controller else []
    began_at = time.monotonic()
    for pid in (*controllers, old):
        os.kill(pid, signal.SIGKILL)
    if with_controller:
        stack.client.ensure_running()
    until(lambda: answers(endpoint), "the endpoint does not respond", 60.0)
    took_s = time.monotonic() - began_at
    until(lambda: stack.agent_pid(NAME) != old, "the old agent is still listed")
    return took_s


def main() -> int:
    parser = argparse.ArgumentParser(description="SIGKILL the load balancer under traffic.")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    given = parser.parse_args()
    broken = []
    with Stack() as stack:
        stack.up(service_yaml(NAME, 3))
        stack.settled(NAME)
        table = stack.listed(NAME)
        with Traffic(stack.endpoint(NAME), given.rate) as traffic:
            for number in range(1, given.kills + 1):
                took_s = kill(stack)
                print(f"kill {number}: answers again after {took_s:.2f} s", flush=True)
                if took_s > LIMIT_S:
                    broken.append(f"kill {number}: {took_s:.2f} s")
                stack.settled(NAME)
                if stack.listed(NAME) != table:
                    broken.append(f"kill {number}: the table was {table} and is {stack.listed(NAME)}")
            took_s = kill(stack, with_controller=True)
            print(f"killed together with the controller: answers again after {took_s:.2f} s (not judged)")
            stack.settled(NAME)
    print(f"requests in the gaps: {share(traffic.failed(), traffic.outcomes)} {tally(traffic.outcomes)}")
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
