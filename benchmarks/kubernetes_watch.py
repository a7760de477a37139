"""What following Pods costs the controller: 5,000 of them by one watch, with the daemon's own poller and the official client.

    python -m benchmarks.kubernetes_watch [-n 5000] [--seconds 60] [--events 20] [-o json]

The cluster (the fake of the tests) is a process of its own and is not measured. Two figures: while nothing happens but
bookmarks, and while `--events` Pods a second change; both in percent of a core, with the requests that were made meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from kubernetes import client as kube_client

from policies.model import CapacityType, Offer, Zone
from provisioners.kubernetes import translate
from provisioners.kubernetes.api import tuned
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import LaunchOrder
from skyserve_cli.controller.clouds.instance_poller import ThreadInstancePoller
from tests.clouds.kubernetes.kube_server import serving
from tests.clouds.kubernetes.kube_store import stamp
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld

OWNER = "owner-1"
ZONE = Zone("kubernetes", "prod", "zone-a")
OFFER = Offer(ZONE, "2cpu-4gb", None, 0.0, CapacityType.SPOT, 0.0)
PATIENCE_S = 300.0


class WallClock:
    def now(self) -> float:
        return time.time()


def cluster(count: int) -> None:
    """The cluster's side: prints its address, then obeys lines: `events RATE`, `counts`."""
    world = KubeWorld(None, time.time, strict=False)
    for index in range(max(1, count // 50)):
        world.add_node(f"node-{index}", ZONE.name, spot=True)
    for number in range(count):
        world.store.create("pods", NAMESPACE, _pod(number))
    rate = [0.0]
    threading.Thread(target=_churn, args=(world, count, rate), daemon=True).start()
    with serving(world) as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            word, _, value = line.strip().partition(" ")
            if word == "events":
                rate[0] = float(value)
            print(json.dumps(world.counts), flush=True)


def _pod(number: int) -> dict[str, Any]:
    order = LaunchOrder(f"chat-{number}", OWNER, "chat", number, 1, OFFER, setup=None, run="exec serve")
    made = translate.pod_of(order, 0, Cluster("prod"), NAMESPACE)
    made["spec"]["nodeName"] = f"node-{number // 50}"
    made["status"] = {
        "phase": "Running",
        "podIP": f"10.{number // 62500}.{number // 250 % 250}.{number % 250 + 1}",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": stamp(time.time())}],
        "containerStatuses": [
            {
                "name": "main",
                "image": "x",
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {}},
            }
        ],
    }
    return made


def _churn(world: KubeWorld, count: int, rate: list[float]) -> None:
    """Change one Pod after the other: it is disrupted, or is well again."""
    turn = 0
    while True:
        if not rate[0]:
            time.sleep(0.1)
            continue
        pod = world.store.get("pods", NAMESPACE, f"chat-{turn * 7919 % count}")
        is_taken = len(pod["status"]["conditions"]) > 1
        taken = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "x",
            "message": "y",
            "lastTransitionTime": stamp(time.time()),
        }
        pod["status"]["conditions"][1:] = [] if is_taken else [taken]
        world.store.update("pods", pod)
        turn += 1
        time.sleep(1.0 / rate[0])


@dataclass(frozen=True)
class Figures:
    """Of one phase."""

    cpu_percent: float
    lists: int
    watches: int
    wakes: int


class Follower:
    """The controller's side, as the daemon has it."""

    def __init__(self, url: str) -> None:
        def client(_context: str | None, _kubeconfig: str | None) -> tuple[Any, str]:
            return tuned(kube_client.ApiClient(kube_client.Configuration(host=url))), NAMESPACE

        self.cloud = KubernetesProvisioner([Cluster("prod")], client=client)
        self.wakes = 0
        self.poller = ThreadInstancePoller(lambda _: self.cloud, OWNER, WallClock(), self._wake, {})

    def _wake(self) -> None:
        self.wakes += 1

    def start(self, count: int) -> float:
        """Return the CPU seconds until all Pods are known."""
        began = time.process_time()
        self.poller.watch(frozenset({"kubernetes"}))
        until = time.monotonic() + PATIENCE_S
        while len(self.poller.last("kubernetes")) < count:
            assert time.monotonic() < until, "the first list did not come"
            time.sleep(0.1)
        return time.process_time() - began

    def measure(self, cluster: subprocess.Popen[str], seconds: float, events: float) -> Figures:
        before = _tell(cluster, f"events {events}")
        time.sleep(2.0)
        wakes, began, began_wall = self.wakes, time.process_time(), time.monotonic()
        until = began_wall + seconds
        while time.monotonic() < until:
            time.sleep(1.0)
            self.poller.drain()  # what a tick does
        used, wall = time.process_time() - began, time.monotonic() - began_wall
        after = _tell(cluster, "events 0")
        return Figures(
            round(100.0 * used / wall, 2),
            _new(before, after, "list"),
            _new(before, after, "watch"),
            self.wakes - wakes,
        )


def _tell(cluster: subprocess.Popen[str], line: str) -> dict[str, int]:
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    cluster.stdin.write(line + "\n")
    cluster.stdin.flush()
    found: dict[str, int] = json.loads(cluster.stdout.readline())
    return found


def _new(before: dict[str, int], after: dict[str, int], verb: str) -> int:
    return sum(count - before.get(key, 0) for key, count in after.items() if key.startswith(f"{verb} "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=5000, help="Pods")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--events", type=float, default=20.0, help="changes a second in the second phase")
    parser.add_argument("-o", choices=("text", "json"), default="text", dest="output")
    parser.add_argument("--cluster", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cluster:
        cluster(asked.n)
        return
    command = [sys.executable, "-m", "benchmarks.kubernetes_watch", "--cluster", "-n", str(asked.n)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        follower = Follower(process.stdout.readline().strip())
        first_s = follower.start(asked.n)
        quiet = follower.measure(process, asked.seconds, 0.0)
        busy = follower.measure(process, asked.seconds, asked.events)
        follower.poller.close()
        follower.cloud.close()
        process.terminate()
    facts = {"pods": asked.n, "first_list_cpu_s": round(first_s, 2), "quiet": vars(quiet), "busy": vars(busy)}
    if asked.output == "json":
        print(json.dumps(facts))
        return
    print(f"{asked.n} Pods, known after {first_s:.2f} s of CPU")
    for name, figures in (("quiet", quiet), (f"{asked.events:g} events/s", busy)):
        print(
            f"{name:>14}: {figures.cpu_percent:.1f} % of a core, {figures.lists} lists, {figures.watches} new watches, "
            f"{figures.wakes} wakes"
        )


if __name__ == "__main__":
    main()
