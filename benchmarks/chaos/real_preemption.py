"""A replica of a real vLLM is preempted in the middle of a stream, one stream per API: the client reads the same text.

A whole installation as `serve up` starts it, with replicas of vLLM on the local cloud (`benchmarks.chaos.real_engines`). For each
API the same greedy request is streamed twice: undisturbed, and with the replica that serves it preempted without
notice when the client has a third of the text. Claims:

* the text, the finish reason and the counts are the same
* the agent says that the stream broke, and on which replica it went on
* nothing of the installation is left

    python -m benchmarks.chaos.real_preemption [--apis chat,completions,responses,messages] [--tokens 1500]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.chaos.harness import Stack, until
from benchmarks.chaos.real_engines import has_vllm, vllm_command
from benchmarks.chaos.stream_apis import Api, Received, request

NAME = "real"
PATIENCE_S = 1500.0
STREAM_TIMEOUT_S = 600.0


def service_yaml(replicas: int) -> str:
    command = shlex.join(vllm_command("PORT")).replace("PORT", "$SKYSERVE_REPLICA_PORT")
    return f"""\
name: {NAME}
service:
  readiness_probe: {{path: /health, initial_delay_seconds: {PATIENCE_S:g}, timeout_seconds: 20}}
  replicas: {replicas}
  load_balancing_policy: round_robin
resources: {{infra: local, use_spot: true}}
run: exec {command}
"""


def read(
    endpoint: str, api: Api, tokens: int, request_id: str, early: Callable[[], None] | None = None
) -> Received:
    """Read one stream; call `early` when a tenth of the tokens may be there."""
    body = request(api, [("user", "What is a spot instance?")], tokens, usage=True)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    got, events = Received(api), 0
    try:
        with urlopen(
            Request(endpoint + api.path, json.dumps(body).encode(), headers), timeout=STREAM_TIMEOUT_S
        ) as lines:
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                got.event(line[5:].decode().strip())
                events += 1
                if early is not None and events >= tokens // 10:
                    early()
                    early = None
    except HTTPError as error:
        got.status, got.error = error.code, error.read().decode()[:300]
    except (OSError, ValueError) as error:
        got.fault = f"{type(error).__name__}: {error}"
    return got


def preempted(stack: Stack, api: Api, tokens: int) -> list[str]:
    """Stream, preempt and compare; returns what is not as claimed."""
    until(lambda: len(stack.replicas(NAME, "READY")) > 1, "no two replicas become ready", PATIENCE_S)
    endpoint = stack.endpoint(NAME)
    undisturbed = read(endpoint, api, tokens, f"undisturbed-{api.value}")
    if not undisturbed.ended:
        return [f"{api.value}: the undisturbed stream does not end: {undisturbed.error or undisturbed.fault}"]
    served: list[str] = []

    def preempt() -> None:
        steps = json.loads(stack.ask_agent(NAME, f"/-/explain/{api.value}"))["steps"]
        served.append(next(step["target"] for step in reversed(steps) if step["target"]))
        stack.preempt(NAME, int(served[0]))

    began_at = time.monotonic()
    got = read(endpoint, api, tokens, api.value, preempt)
    took_s = time.monotonic() - began_at
    steps = json.loads(stack.ask_agent(NAME, f"/-/explain/{api.value}"))["steps"]
    targets = [step["target"] for step in steps if step["event"] == "chose"]
    wrong = got.differences(undisturbed) or ([] if got.ended else [got.fault or "no end"])
    wrong += [got.error] if got.error else []
    if len(targets) < 2:
        wrong.append(f"it did not lose its replica: {targets}")
    print(
        f"{api.value:13}{len(undisturbed.text):7} characters, replica {' -> '.join(targets)} in {took_s:.1f} s: "
        f"{'the same' if not wrong else '; '.join(wrong)}",
        flush=True,
    )
    return [f"{api.value}: {one}" for one in wrong]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Preempt a real vLLM in the middle of a stream of each API.")
    parser.add_argument("--apis", default=",".join(api.value for api in Api))
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--replicas", type=int, default=3)
    given = parser.parse_args(arguments)
    if not has_vllm():
        print("no vLLM: run scripts/real_engines.sh first", file=sys.stderr)
        return 2
    broken = []
    with Stack() as stack:
        stack.up(service_yaml(given.replicas))
        for name in given.apis.split(","):
            broken += preempted(stack, Api(name), given.tokens)
    for claim in broken:
        print(f"BROKEN: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
