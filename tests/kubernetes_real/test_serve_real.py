"""`serve` on a real cluster: the real controller and load balancer, with clients that send requests all the time."""

from __future__ import annotations

import http.client
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import yaml

from provisioners.kubernetes.api import client_of
from provisioners.kubernetes.pod_exec import PodChannel, start_in_pod
from tests.clouds.kubernetes.kube_store import Refused
from tests.e2e.conftest import Serve, living_in
from tests.e2e.test_cli_kubernetes import SERVICE, Callers
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.renamed import renamed
from tests.kubernetes_real.spaces import LABEL, Space

pytestmark = pytest.mark.timeout(420)
AWAY_S = 15.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    yield from living_in(tmp_path)


class Life:
    """A service of two replicas, which is up, and its callers."""

    def __init__(self, serve: Serve, space: Space, folder: Path, more: str = "") -> None:
        self.serve, self.space = serve, space
        path = serve.home / "config.yaml"
        config = yaml.safe_load(path.read_text())
        context = {"node_selector": {LABEL: space.name}}
        section = {"kubeconfig": str(space.kubeconfig), "contexts": {space.name: context}}
        section |= {"agent_image": "agent:1"} if more else {}
        path.write_text(yaml.safe_dump({**config, "clouds": {"kubernetes": section}}))
        file = folder / "service.yaml"
        text = SERVICE.replace("resources: {", "resources: {cpus: 1, memory: 1, ")
        file.write_text(text.replace("  replicas: 2\n", f"  replicas: 2\n{more}"))
        began = monotonic()
        self.url = serve.ok("up", file, "-y").out.strip()
        self.until_ready({1, 2})
        print(f"two replicas are ready after {monotonic() - began:.1f} s")
        self.callers = Callers(self.url)

    def pods(self) -> dict[str, str]:
        """Return the nodes of our Pods, by name."""
        found = self.space.api.list("pods", self.space.name)
        return {one["metadata"]["name"]: one["spec"].get("nodeName", "") for one in found}

    def balancers(self) -> dict[str, str]:
        """Return the nodes of the Pods of load balancers, by name."""
        found = self.space.api.list("pods", self.space.name, "skyserve-role=load-balancer")
        return {one["metadata"]["name"]: one["spec"].get("nodeName", "") for one in found}

    def until_ready(self, ids: set[int]) -> float:
        """Wait until these replicas are ready, and no others; return after how many seconds."""
        began = monotonic()
        self.serve.eventually(lambda: self.ready() == ids)
        return monotonic() - began

    def ready(self) -> set[int]:
        return {one["id"] for one in self.serve.view("chat")["replicas"] if one["state"] == "READY"}

    def until_answered(self, more: int = 5) -> None:
        before = self.callers.answered
        self.serve.eventually(lambda: self.callers.answered >= before + more)

    def end(self) -> None:
        """Take the service down. No request has failed, and nothing of it is left."""
        self.callers.stop()
        began = monotonic()
        self.serve.ok("down", "chat", "-y")
        print(f"down after {monotonic() - began:.1f} s; {self.callers.answered} responses")
        assert self.callers.failed == []
        self.space.await_nothing()
        assert "nothing is left over" in self.serve.ok("gc", "--dry-run").err


def test_evictions_and_a_server_that_is_away_cost_no_request(
    space: Space, serve: Serve, tmp_path: Path
) -> None:
    life, plane = Life(serve, space, tmp_path), space.world.plane
    try:
        life.until_answered()
        assert "serves llama-3.1-8b" in serve.ok("logs", "chat", "1").out
        space.evict(min(life.pods()))
        print(f"an eviction: ready again after {life.until_ready({2, 3}):.1f} s")
        plane.server.stop()
        sleep(AWAY_S)
        life.until_answered()
        assert life.ready() == {2, 3}
        is_said_that_it_is_away(serve, space)
        plane.start_server()
        life.until_answered()
        plane.server.hold()
        try:
            is_said_that_it_is_away(serve, space)
        finally:
            plane.server.go_on()
        life.until_answered()
        space.evict(min(life.pods()))
        print(f"after the server was away: ready again after {life.until_ready({3, 4}):.1f} s")
        life.until_answered()
    finally:
        life.callers.stop()
    ended = {
        one["id"]: one["end_reason"] for one in serve.view("chat", "--all")["replicas"] if one["end_reason"]
    }
    assert ended == {1: "PREEMPTED", 2: "PREEMPTED"}
    life.end()


def is_said_that_it_is_away(serve: Serve, space: Space) -> None:
    """Each command ends in its time, and its first line says what is wrong. What needs no API server is shown."""
    sentence = f"the cluster {space.name} does not respond"
    for words in (("logs", "chat", "2"), ("logs", "chat")):
        said = serve(*words)
        assert (said.code, sentence in said.err.partition("\n")[0]) == (1, True), said
    assert serve.ok("logs", "chat", "--load-balancer", "--no-follow").out
    assert serve.ok("why", "chat").out.startswith("chat: ")
    assert "READY" in serve.ok("status", "chat").out
    said = serve("check")
    assert sentence in said.out + said.err, said


def test_a_silent_node_costs_no_request_and_down_ends(space: Space, serve: Serve, tmp_path: Path) -> None:
    """Its kubelet stops, its containers go on: the network between the node and the server is gone."""
    life = Life(serve, space, tmp_path)
    try:
        life.until_answered()
        lost = min(life.pods())
        space.hollow.silence(life.pods()[lost], dies=False)
        print(f"a silent node: replaced after {life.until_ready({2, 3}):.1f} s")
        serve.eventually(lambda: lost not in life.pods())
        life.until_answered()
    finally:
        life.callers.stop()
    life.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the namespace of mounts of a container")
def test_a_node_of_a_load_balancer_is_drained_without_a_failed_request(
    space: Space, serve: Serve, tmp_path: Path
) -> None:
    """It is cordoned, and its Pods are evicted as often as the PodDisruptionBudget refuses that."""
    with way_to(space):
        more = f"  load_balancers: {{regions: [kubernetes/{space.name}]}}\n"
        life = Life(serve, space, tmp_path, more)
        public = Callers(published(space, life.url))
        try:
            life.until_answered()
            serve.eventually(lambda: public.answered > 5)
            (balancer,) = life.balancers()
            node = life.balancers()[balancer]
            space.cordon(node)
            began = monotonic()
            refused = evicted_in_the_end(space, balancer)
            print(f"evicted after {monotonic() - began:.1f} s, refused {refused} times")
            until(lambda: balancer not in life.balancers(), "the load balancer is not gone")
            life.until_answered()
            (successor,) = life.balancers()
            assert life.balancers()[successor] != node
            assert public.failed == []
            assert "admin_port" in serve.ok("logs", "chat", "--load-balancer", "--no-follow").out
        finally:
            public.stop()
            life.callers.stop()
            space.cordon(node, on=False)
        assert public.failed == []
        space.api.delete("services", space.name, "public")
        life.end()


def published(space: Space, url: str) -> str:
    """Return the address of a Service as docs/howto/kubernetes.md has it, which selects load balancers by the labels of the service."""
    selector = {"app.kubernetes.io/name": "chat", "app.kubernetes.io/component": "load-balancer"}
    port = {"port": 8080, "targetPort": int(url.rpartition(":")[2]), "protocol": "TCP"}
    meta = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "public"}}
    made = space.api.create("services", space.name, {**meta, "spec": {"selector": selector, "ports": [port]}})
    address = str(made["spec"]["clusterIP"])
    until(lambda: is_open(address, 8080), "the Service leads nowhere")
    return f"http://{address}:8080"


def is_open(address: str, port: int) -> bool:
    """Return whether a request gets a response there."""
    line = http.client.HTTPConnection(address, port, timeout=5.0)
    with closing(line), suppress(OSError, http.client.HTTPException):
        line.request("GET", "/health")
        return line.getresponse().status == 200
    return False


@contextmanager
def way_to(space: Space) -> Iterator[None]:
    """Have the controller's calls go to a server that knows policy/v1."""
    if space.world.plane.minor >= 21:
        yield
        return
    with renamed(space.world.plane) as port:
        before, space.relay.target = space.relay.target, port
        yield
        space.relay.target = before


def evicted_in_the_end(space: Space, pod: str) -> int:
    """Evict it; return how often that was refused before."""
    refused = 0
    while True:
        try:
            space.evict(pod)
        except Refused as error:
            if error.code != 429:
                raise
            refused += 1
            assert refused < 100
            sleep(0.5)
        else:
            return refused


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None,
    reason="only root can enter a container's namespaces",
)
def test_any_bytes_go_through_the_server_to_a_command_in_a_pod(space: Space) -> None:
    cloud = space.controller()
    launched = cloud.launch(space.order(cloud))
    until(lambda: space.phase_of("chat-1") == "Running", "it does not run")
    client, namespace = client_of(None, str(space.admin_kubeconfig()))
    sent = bytes(range(256)) * 400
    channel = start_in_pod(client, namespace, "chat-1", "main", ["head", "-c", str(len(sent))], 10.0)
    channel.settimeout(20.0)
    channel.sendall(sent)
    assert read_all(channel) == sent
    channel.close()
    cloud.terminate(launched)
    space.await_nothing()


def read_all(channel: PodChannel) -> bytes:
    data = b""
    while chunk := channel.recv(65536):
        data += chunk
    return data
