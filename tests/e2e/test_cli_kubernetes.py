"""`serve` on a cluster: the real controller and load balancer, the official client, and Pods whose containers are processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.clouds.kubernetes.kube_places import living
from tests.clouds.kubernetes.kube_server import TOKEN
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld
from tests.e2e.conftest import ROOT, Serve

pytestmark = pytest.mark.long

SERVICE = f"""
name: chat
service:
  readiness_probe: {{path: /health, endpoint_probe_interval_seconds: 1}}
  replicas: 2
resources: {{infra: kubernetes}}
envs: {{PYTHONPATH: {ROOT}}}
secrets: {{KEY: s3cret}}
run: exec {sys.executable} -m skyserve_cli engine --host $SKYPILOT_NODE_IPS --port $SKYSERVE_REPLICA_PORT --speed 20
"""


@pytest.fixture
def world(tmp_path: Path, serve: Serve) -> Iterator[KubeWorld]:
    """A cluster of four nodes with room for one Pod each, which `serve` has in its config.yaml."""
    with living(tmp_path, token=TOKEN, pods=1) as (made, path):
        serve.configure(clouds={"kubernetes": {"kubeconfig": str(path), "contexts": {"test": {}}}})
        yield made


class Callers:
    """A client that sends requests all the time, and counts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered = 0
        self.failed: list[str] = []
        self._over = Event()
        self._thread = Thread(target=self._ask)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        body = {
            "model": "llama-3.1-8b",
            "max_tokens": 6,
            "stream": True,
            "messages": [{"role": "user", "content": "hi"}],
        }
        while not self._over.is_set():
            request = urllib.request.Request(
                f"{self.url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    if b"[DONE]" not in response.read():
                        self.failed.append("cut off")
            except OSError as error:
                self.failed.append(str(error))
            self.answered += 1


def test_nodes_that_go_with_and_without_a_notice_cost_no_request_and_nothing_is_left(
    serve: Serve, world: KubeWorld, tmp_path: Path
) -> None:
    checked = serve.ok("check", "-o", "json").json()
    assert [(one["cloud"], one["usable"], one["zones"]) for one in checked] == [
        ("kubernetes", True, ["test/zone-a"])
    ]
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE)
    url = serve.ok("up", file, "-y").out.strip()
    serve.eventually(lambda: serve.view("chat")["ready"] == 2)
    assert {one["zone"] for one in serve.view("chat")["replicas"]} == {"zone-a"}
    assert "serves llama-3.1-8b" in serve.ok("logs", "chat", "1").out
    callers = Callers(url)
    try:
        serve.eventually(lambda: callers.answered > 5)
        first, second = sorted(world.pod_names())
        world.evict(first)
        serve.eventually(lambda: serve.view("chat")["ready"] == 2 and first not in world.pod_names())
        before = callers.answered
        serve.eventually(lambda: callers.answered > before + 5)
        world.preempt_node(world.store.get("pods", "ml", second)["spec"]["nodeName"])
        serve.eventually(
            lambda: {one["id"] for one in serve.view("chat")["replicas"] if one["state"] == "READY"} == {3, 4}
        )
        before = callers.answered
        serve.eventually(lambda: callers.answered > before + 5)
        world.troubles.is_down = True
        for words in (("logs", "chat", "3"), ("logs", "chat")):
            said = serve(*words)
            assert said.code == 1, said
            assert "the cluster test does not respond" in said.err.partition("\n")[0], said
        assert serve.ok("why", "chat").out
        world.troubles.is_down = False
        serve.eventually(lambda: serve("logs", "chat", "3").code == 0)
    finally:
        callers.stop()
    assert callers.failed == []
    ended = {
        one["id"]: one["end_reason"] for one in serve.view("chat", "--all")["replicas"] if one["end_reason"]
    }
    assert ended == {1: "PREEMPTED", 2: "PREEMPTED"}
    kinds = [json.loads(line)["kind"] for line in serve.ok("events", "chat", "-o", "json").out.splitlines()]
    assert "PreemptionNotice" in kinds
    serve.ok("down", "chat", "-y")
    assert world.pod_names() == []
    serve.eventually(
        lambda: world.store.list("secrets", "ml") == []
    )  # the cluster's garbage collector comes later
    serve.ok("gc", "--dry-run")


def test_nodes_that_fall_silent_are_replaced_and_leave_nothing_behind(
    serve: Serve, world: KubeWorld, tmp_path: Path
) -> None:
    world.nodes.monitor_grace_s = 2.0
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE)
    serve.ok("up", file, "-y")
    serve.eventually(lambda: serve.view("chat")["ready"] == 2)
    first, second = sorted(world.pod_names())
    world.nodes.silence(world.store.get("pods", "ml", first)["spec"]["nodeName"], dies=True)
    serve.eventually(
        lambda: {one["id"] for one in serve.view("chat")["replicas"] if one["state"] == "READY"} == {2, 3}
    )
    world.nodes.silence(world.store.get("pods", "ml", second)["spec"]["nodeName"])
    down = serve.ok("down", "chat", "-y")
    assert world.pod_names() == [], down  # by force: no kubelet removes them
    serve.eventually(lambda: world.store.list("secrets", "ml") == [])
    assert "nothing is left over" in serve.ok("gc", "--dry-run").err


def test_a_controller_that_is_killed_follows_the_pods_that_there_are(
    serve: Serve, world: KubeWorld, tmp_path: Path
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE)
    url = serve.ok("up", file, "-y").out.strip()
    serve.eventually(lambda: serve.view("chat")["ready"] == 2)
    callers = Callers(url)
    try:
        address = serve.home / "controller.json"
        pid = json.loads(address.read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        serve.eventually(lambda: json.loads(address.read_text())["pid"] != pid)
        serve.eventually(lambda: serve.view("chat")["ready"] == 2)
        world.evict(min(world.pod_names()))
        serve.eventually(
            lambda: {one["id"] for one in serve.view("chat")["replicas"] if one["state"] == "READY"} == {2, 3}
        )
    finally:
        callers.stop()
    assert callers.failed == []
    assert set(world.launches.values()) == {1}
    assert len(world.launches) == 3
    serve.ok("down", "chat", "-y")
    assert world.pod_names() == []


def test_a_claim_keeps_what_replicas_write(serve: Serve, world: KubeWorld, tmp_path: Path) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}}
    world.create("persistentvolumeclaims", NAMESPACE, {**kind, "spec": spec})
    file = tmp_path / "chat.yaml"
    setup = 'cache: {kind: pvc, claim: weights}\nsetup: echo "$SKYSERVE_REPLICA_ID" >>"$HF_HOME/ids"\n'
    file.write_text(SERVICE.replace("replicas: 2", "replicas: 1") + setup)
    serve.ok("up", file, "-y")
    (first,) = (one["id"] for one in serve.view("chat")["replicas"])

    def starts() -> list[str]:
        lines = map(json.loads, serve.ok("events", "chat", "-o", "json").out.splitlines())
        return [f"{one['replica_id']}: {one['message']}" for one in lines if one["kind"] == "cache"]

    serve.eventually(lambda: len(starts()) == 1)
    serve.ok("down", "chat", "--replica-id", str(first), "-y")
    serve.eventually(lambda: len(starts()) == 2)
    empty, warm = starts()
    assert empty.startswith(f"{first}: ready after ")
    assert empty.endswith("; its cache was empty")
    assert f" in its cache; replica {first} took " in warm
    serve.ok("down", "chat", "-y")
    (kept,) = tmp_path.rglob("claims/weights/skyserve/*/-/chat/hf_home/ids")
    assert kept.read_text().split() == [str(first), warm.partition(":")[0]]
