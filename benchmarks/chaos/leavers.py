"""A client leaves: how long until the replica has noticed, and stopped working for it?

An engine that goes on generating for a client that has left takes the place of another client. Each try opens one request through the
endpoint, sees on the engine's own metrics that it has arrived there, closes the connection, and measures until
the engine has neither a running nor a waiting request. Three ways to leave: in the middle of a stream, before the
first token of a stream, and while waiting for a response that is not streamed.

Claim: each time within a second.

    python -m benchmarks.chaos.leavers [--tries 20]
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks.chaos.harness import Stack, until
from benchmarks.chaos.service_files import service_yaml

NAME = "leave"
LIMIT_S = 1.0
WAYS = ("in mid-stream", "before the first token", "waiting for a whole answer")


class Leaver:
    """A client on a bare socket, so that leaving is exactly one close and nothing of a library's courtesy."""

    def __init__(self, endpoint: str, *, stream: bool, prompt_words: int = 1) -> None:
        address = urlsplit(endpoint)
        body = {
            "messages": [{"role": "user", "content": "word " * prompt_words}],
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": stream,
        }
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        self._socket = socket.create_connection((address.hostname, address.port), timeout=30.0)
        self._socket.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)

    def read(self) -> bytes:
        """The next bytes of the response."""
        return self._socket.recv(4096)

    def leave(self) -> None:
        self._socket.close()


def busy(engine_url: str) -> float:
    """Requests that the engine runs or holds back, by its own metrics."""
    with urlopen(f"{engine_url}/metrics", timeout=5.0) as answer:
        lines = answer.read().decode().splitlines()
    wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted))


def leave(endpoint: str, engine_url: str, way: str) -> float:
    """Come, leave, and the seconds until the engine is idle."""
    # A long prompt keeps the engine from its first token; the service's engine is slow enough to be caught.
    leaver = Leaver(
        endpoint,
        stream=way != "waiting for a whole answer",
        prompt_words=8000 if way == "before the first token" else 1,
    )
    if way == "in mid-stream":
        seen = leaver.read()
        while seen.count(b"data:") < 3:
            seen += leaver.read()
    until(lambda: busy(engine_url) == 1, "the request does not arrive")
    left_at = time.monotonic()
    leaver.leave()
    for _ in range(10_000):
        if busy(engine_url) == 0:
            return time.monotonic() - left_at
        time.sleep(0.002)
    raise AssertionError("the engine goes on without a client")


def main() -> int:
    parser = argparse.ArgumentParser(description="How soon an engine is rid of a client that has left.")
    parser.add_argument("--tries", type=int, default=20)
    given = parser.parse_args()
    slow = 0
    with Stack() as stack:
        stack.up(service_yaml(NAME, 1, speed=1.0))
        (replica_id,) = stack.settled(NAME)
        endpoint, engine_url = stack.endpoint(NAME), str(stack.replica(NAME, replica_id)["endpoint"])
        for way in WAYS:
            took_s = sorted(leave(endpoint, engine_url, way) for _ in range(given.tries))
            slow += sum(seconds > LIMIT_S for seconds in took_s)
            each = " ".join(f"{seconds:.3f}" for seconds in took_s)
            print(f"{way}: idle after {took_s[len(took_s) // 2]:.3f} s, at most {took_s[-1]:.3f} s ({each})")
        in_flight = stack.stats(NAME)[str(replica_id)]["in_flight"]
    if in_flight:
        print(f"BROKEN: the load balancer still counts {in_flight} requests in flight", file=sys.stderr)
    if slow:
        print(f"BROKEN: {slow} tries took longer than {LIMIT_S:g} s", file=sys.stderr)
    return 1 if slow or in_flight else 0


if __name__ == "__main__":
    sys.exit(main())
