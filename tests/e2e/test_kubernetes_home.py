"""Two controllers in a cluster by the manifests, with PostgreSQL: nodes, Pods and controllers go, and no request fails."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clouds.kubernetes.kube_home import KubernetesHome
from tests.clouds.kubernetes.kube_places import living
from tests.clouds.kubernetes.kube_server import TOKEN
from tests.clouds.kubernetes.kube_store import SERVICE_NET, Json
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld
from tests.e2e.conftest import Serve
from tests.e2e.test_cli_kubernetes import SERVICE, Callers
from tests.integration.postgres_server import postgres_server

pytestmark = pytest.mark.long

#: The load balancer and the controllers are in zone-a, replicas in zone-b, a node for each.
FILE = SERVICE.replace(
    "resources: {infra: kubernetes}", "resources: {cloud: kubernetes, region: default, zone: zone-b}"
).replace("  replicas: 2\n", "  replicas: 2\n  load_balancers: {regions: [kubernetes/default]}\n")


@pytest.fixture
def database() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="skyserve-postgres-"))
    folder.chmod(0o755)
    (folder / "server").mkdir()
    with postgres_server(folder / "server") as server:
        yield server.url
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def home(tmp_path: Path, database: str) -> Iterator[KubernetesHome]:
    with living(tmp_path, token=TOKEN, nodes=()) as (world, kubeconfig):
        world.add_node("a1", "zone-a")
        world.add_node("a2", "zone-a")
        for name in ("b1", "b2", "b3", "b4"):
            world.add_node(name, "zone-b", pods=1)
        made = KubernetesHome(world, tmp_path, kubeconfig, database)
        made.apply({"kubernetes": {"agent_image": "agent:1"}})
        yield made


def replicas(world: KubeWorld) -> list[Json]:
    pods = world.store.list("pods", NAMESPACE)
    return [one for one in pods if one["spec"].get("hostname")]


def agents(world: KubeWorld) -> list[str]:
    pods = world.store.list("pods", NAMESPACE)
    found = [one for one in pods if one["metadata"]["labels"].get("skyserve-role") == "load-balancer"]
    return [one["metadata"]["uid"] for one in found]


def test_a_service_outlives_nodes_pods_and_controllers_without_a_failed_request(
    home: KubernetesHome, tmp_path: Path
) -> None:
    world, ada = home.world, Serve(tmp_path / "ada")
    ada.eventually(home.is_up)
    leader = home.leader()
    assert leader is not None
    token = home.execute(leader, "token", "create", "ada", "--role", "admin").strip()
    ada.environment |= {
        "SKYSERVE_CONTROLLER": home.url,
        "SKYSERVE_TOKEN": token,
        "SKYSERVE_CA_FILE": str(home.certificate),
    }
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    url = ada.ok("up", file, "-y").out.strip()
    assert url.startswith(f"http://{SERVICE_NET}.")
    callers = Callers(url)

    def still_served(change: Callable[[], object], holds: Callable[[], object]) -> None:
        change()
        ada.eventually(holds)
        before = callers.answered
        ada.eventually(lambda: callers.answered > before + 5)
        assert callers.failed == []

    def ready_replicas() -> set[int]:
        return {one["id"] for one in ada.view("chat")["replicas"] if one["state"] == "READY"}

    try:
        ada.eventually(lambda: callers.answered > 5)
        first, second = sorted(replicas(world), key=lambda one: one["metadata"]["name"])
        ids = ready_replicas()
        still_served(
            lambda: world.evict(first["metadata"]["name"]),  # a node goes, with notice
            lambda: len(ready_replicas()) == 2 and ready_replicas() != ids,
        )
        ids = ready_replicas()
        still_served(
            lambda: world.preempt_node(second["spec"]["nodeName"]),  # and one without
            lambda: len(ready_replicas()) == 2 and ready_replicas() != ids,
        )
        before = agents(world)
        restart(world, "load-balancer")
        still_served(  # a process is killed in the roll-out: it goes on in its Pod, and with the roll-out
            lambda: home.kill(leader), lambda: home.is_up() and home.restarts(leader) == 1
        )
        ada.eventually(lambda: len(agents(world)) == 1 and agents(world) != before)
        leads = home.leader()
        assert leads is not None
        still_served(
            lambda: home.lose(leads),  # its Pod: the other one takes over
            lambda: home.is_up() and home.leader()["metadata"]["uid"] != leads["metadata"]["uid"],  # type: ignore[index]
        )
        assert len(ready_replicas()) == 2
    finally:
        callers.stop()
    assert callers.failed == []
    assert "admin_port" in ada.ok("logs", "chat", "--load-balancer", "--no-follow").out
    assert {world.launches[one["metadata"]["name"]] for one in replicas(world)} == {1}
    ada.ok("down", "chat", "-y")
    left = {one["metadata"]["name"] for one in world.store.list("pods", NAMESPACE)}
    assert left == {one["metadata"]["name"] for one in home.pods()}
    assert world.store.list("poddisruptionbudgets", NAMESPACE)[0]["metadata"]["name"] == "skyserve-controller"
    kept = {"skyserve-controller", "skyserve-api", "skyserve-endpoints", "skyserve-metrics"}
    kept |= {"skyserve-keys", "skyserve-database", "skyserve-api-tls"}
    for kind in ("deployments", "services", "secrets"):
        assert {one["metadata"]["name"] for one in world.store.list(kind, NAMESPACE)} <= kept
    assert "forbidden" not in home.log()
    assert "s3cret" not in home.log()
    assert token not in home.log()


def restart(world: KubeWorld, role: str) -> None:
    """As `kubectl rollout restart` does."""
    (deployment,) = [
        one
        for one in world.store.list("deployments", NAMESPACE)
        if one["metadata"]["labels"].get("skyserve-role") == role
    ]
    found = world.store.get("deployments", NAMESPACE, deployment["metadata"]["name"])
    notes = found["spec"]["template"]["metadata"].setdefault("annotations", {})
    notes["kubectl.kubernetes.io/restartedAt"] = "2026-11-26T00:00:00Z"
    world.store.put("deployments", NAMESPACE, found["metadata"]["name"], found)
