"""A controller that is deployed to a cluster: the real command, client and controller, and Pods whose containers are processes."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from skyserve_cli.controller.leader_label import LABEL
from tests.clouds.kubernetes.kube_places import living
from tests.clouds.kubernetes.kube_server import TOKEN
from tests.clouds.kubernetes.kube_store import Refused
from tests.clouds.kubernetes.kube_world import NAMESPACE, KubeWorld
from tests.clouds.schedules import only_long
from tests.e2e.conftest import ROOT, Serve
from tests.e2e.test_cli_kubernetes import SERVICE
from tests.e2e.test_kubernetes_home import database  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the mount namespaces of Pods"),
]

FILE = SERVICE.replace("resources: {infra: kubernetes}", "resources: {cloud: kubernetes, zone: zone-a}")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubeWorld]:
    with living(tmp_path, token=TOKEN, nodes=("a", "b")) as (made, path):
        assert made.kubelet is not None
        made.kubelet.kubeconfig = path
        yield made


@pytest.fixture
def ada(tmp_path: Path, world: KubeWorld) -> Serve:
    """A home without a controller of its own."""
    found = Serve(tmp_path / "ada")
    found.environment |= {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    return found


def versions(world: KubeWorld) -> dict[tuple[str, str], str]:
    """Return the version of every object but Pods."""
    return {
        (kind, name): one["metadata"]["resourceVersion"]
        for (kind, _, name), one in world.store.objects.items()
        if kind not in ("pods", "nodes", "events")
    }


def secrets_of(world: KubeWorld) -> list[str]:
    found = [
        one
        for one in world.store.list("secrets", NAMESPACE)
        if one["metadata"]["name"].startswith("skyserve-")
    ]
    return [value for one in found for value in one["data"].values()]


def test_deployed_to_a_cluster_used_through_its_context_and_deployed_again(
    ada: Serve, world: KubeWorld, tmp_path: Path
) -> None:
    first = ada.ok("controller", "deploy", "kubernetes/test", "--image", "controller:1", "-o", "json")
    made = first.json()
    assert (made["namespace"], made["controllers"], made["context"]) == (NAMESPACE, 1, "test")
    assert "Deployment/skyserve-controller" in made["changed"]
    assert "0 of 1 controllers are ready" in first.err
    assert secrets_of(world)
    for value in secrets_of(world):
        assert value not in first.out + first.err
        assert base64.b64decode(value).decode(errors="replace") not in first.out + first.err

    ada.ok("context", "use", "test")
    assert TOKEN not in (ada.home / "contexts.json").read_text()
    assert ada.ok("controller", "status", "-o", "json").json()["clouds"] == ["kubernetes"]
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    ada.ok("up", file, "-y")
    ada.eventually(lambda: ada.view("chat")["ready"] == 2)
    assert '"author": "owner"' in ada.ok("events", "chat", "-o", "json").out

    before = versions(world)
    again = ada.ok("controller", "deploy", "kubernetes/test", "-o", "json").json()
    assert again["changed"] == []
    assert (again["image"], versions(world)) == ("controller:1", before)

    # An upgrade replaces the controller's Pod alone. The state is on the volume.
    (pod,) = [one for one in world.store.list("pods", NAMESPACE) if LABEL in one["metadata"]["labels"]]
    replicas = set(world.pod_names(ada.ok("status", "chat", "-o", "json") and None))
    upgraded = ada.ok(
        "controller", "deploy", "kubernetes/test", "--image", "controller:2", "-o", "json"
    ).json()
    assert upgraded["changed"] == ["Deployment/skyserve-controller"]
    now = set(world.pod_names())
    assert pod["metadata"]["name"] not in now
    assert replicas - {pod["metadata"]["name"]} <= now
    assert ada.view("chat")["ready"] == 2
    changed = {key for key, version in versions(world).items() if before.get(key) != version}
    assert changed == {("deployments", "skyserve-controller")}
    refused = ada("controller", "undeploy", "kubernetes/test", "-y")
    assert (refused.code, "services are up there: chat" in refused.err) == (1, True)
    ada.ok("down", "chat", "-y")
    assert [name for name in world.pod_names() if not name.startswith("skyserve-controller")] == []

    wrong = ada("controller", "undeploy", "aws/us-east-1", "--purge", "-y")
    assert (wrong.code, "--purge: is for kubernetes/" in wrong.err) == (2, True)
    gone = ada.ok("controller", "undeploy", "kubernetes/test", "-y")
    assert "left: state and keys: persistentvolumeclaim/skyserve-home, secret/skyserve-api-tls" in gone.out
    assert world.pod_names() == []
    assert "kubernetes://" not in (ada.home / "contexts.json").read_text()
    assert ada.ok("controller", "undeploy", "kubernetes/test", "--purge", "-y", "-o", "json").json()[
        "removed"
    ] == ["PersistentVolumeClaim/skyserve-home", "Secret/skyserve-api-tls"]


@only_long  # test_kubernetes_home has two controllers, in every run
def test_two_controllers_have_keys_that_were_made_here(
    ada: Serve,
    world: KubeWorld,
    database: str,  # noqa: F811
) -> None:
    words = ("controller", "deploy", "kubernetes/test/ml", "--image", "controller:1", "--context", "prod")
    refused = ada(*words, "--database-secret", "pg")
    assert (refused.code, "has no Secret pg with a key `url`" in refused.err) == (2, True), refused.err
    assert world.store.list("deployments", NAMESPACE) == []
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "pg"}}
    data = {"url": base64.b64encode(database.encode()).decode()}
    world.create("secrets", NAMESPACE, {**body, "data": data})
    made = ada.ok(*words, "--database-secret", "pg", "-o", "json").json()
    assert (made["controllers"], made["context"]) == (2, "prod")
    keys = world.store.get("secrets", NAMESPACE, "skyserve-keys")["data"]
    assert sorted(keys) == ["machines.key", "metrics.token", "sealing.key"]
    ada.ok("context", "use", "prod")
    assert ada.ok("controller", "status", "-o", "json").json()["lease"]["leads"]
    again = ada.ok(*words, "-o", "json").json()
    assert (again["changed"], again["controllers"]) == ([], 2)
    assert world.store.get("secrets", NAMESPACE, "skyserve-keys")["data"] == keys
    # The context goes to the controller that leads.
    (leader,) = [
        one for one in world.store.list("pods", NAMESPACE) if one["metadata"]["labels"].get(LABEL) == "true"
    ]
    world.lose(leader["metadata"]["name"])
    ada.eventually(lambda: ada("controller", "status").code == 0)


@only_long  # half a minute; the second run of a command is tested in every run
def test_a_command_that_is_killed_at_any_time_is_completed_by_the_next(ada: Serve, world: KubeWorld) -> None:
    words = ("controller", "deploy", "kubernetes/test", "--image", "controller:1")
    certificate = ""
    for after in ("creating the Secret", "created ConfigMap", "created Role ", "created Deployment"):
        process = subprocess.Popen(
            [*ada.command, *words], env=ada.environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if after in line:
                break
        process.kill()
        process.wait()
        process.stderr.close()
        found = [
            one
            for one in world.store.list("secrets", NAMESPACE)
            if one["metadata"]["name"] == "skyserve-api-tls"
        ]
        if certificate:
            assert [one["data"]["tls.crt"] for one in found] == [certificate]
        certificate = found[0]["data"]["tls.crt"] if found else ""
    ada.ok(*words)
    ada.ok("context", "use", "test")
    assert ada.ok("controller", "status", "-o", "json").json()["lease"]["leads"]
    assert (
        len([one for one in world.store.list("pods", NAMESPACE) if LABEL in one["metadata"]["labels"]]) == 1
    )


def test_what_is_wrong_is_named_and_nothing_is_changed(ada: Serve, world: KubeWorld, tmp_path: Path) -> None:
    before = versions(world)
    (tmp_path / "wrong.yaml").write_text("clouds: {kubernetes: {contexts: 3}}\n")
    for words, sentence in (
        (["kubernetes/other", "--image", "i"], "has no context other (it has: test)"),
        (["kubernetes/test/UPPER", "--image", "i"], "'UPPER' is no name of a namespace"),
        (["kubernetes/test"], "--image: name the controller's image"),
        (["kubernetes/test", "--image", "i", "--copy-files"], "--copy-files: is not for kubernetes/"),
        (["ssh/h1", "--image", "i"], "--image: is not for ssh/"),
        (["kubernetes/test", "--image", "i", "--config", str(tmp_path / "wrong.yaml")], "clouds.kubernetes"),
        (
            ["kubernetes/test", "--image", "i", "--kubeconfig", "/nowhere/at/all"],
            "--kubeconfig: there is no file",
        ),
    ):
        refused = ada("controller", "deploy", *words)
        assert (refused.code, sentence in refused.err, refused.err.count("\n")) == (2, True, 1), refused.err
    world.troubles.denied = {("create", "pods/exec"), ("patch", "deployments"), ("get", "clusterroles")}
    refused = ada("controller", "deploy", "kubernetes/test", "--image", "i")
    assert refused.code == 1
    for right in ("create pods/exec", "patch deployments.apps", "get clusterroles.rbac.authorization.k8s.io"):
        assert right in refused.err
    world.troubles.denied = {("create", "clusterroles")}
    refused = ada("controller", "deploy", "kubernetes/test", "--image", "i")
    assert "--no-cluster-role does without" in refused.err
    assert versions(world) == before


def test_an_image_that_cannot_be_pulled_and_a_controller_that_exits_are_reported(
    ada: Serve, world: KubeWorld, tmp_path: Path
) -> None:
    assert world.kubelet is not None
    world.kubelet.bad_images.add("nowhere/image:1")
    words = ("controller", "deploy", "kubernetes/test", "--no-cluster-role")
    refused = ada(*words, "--image", "nowhere/image:1")
    assert (refused.code, "ImagePullBackOff" in refused.err) == (1, True), refused.err
    with pytest.raises(Refused):
        world.store.get("clusterroles", "", f"{NAMESPACE}-skyserve-nodes")
    # The same command with what was wrong corrected completes it.
    made = ada.ok(*words, "--image", "controller:1", "-o", "json").json()
    assert made["changed"] == ["Deployment/skyserve-controller"]
    listen = {"host": "0.0.0.0", "port": 9443, "certfile": "/nowhere/tls.crt", "keyfile": "/nowhere/tls.key"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"controller": {"listen": listen}}))
    refused = ada(*words, "--config", str(tmp_path / "config.yaml"))
    assert refused.code == 1
    assert re.search(
        r"exits again and again; its log ends with: controller.listen.certfile: .* cannot be read",
        refused.err,
    ), refused.err
    config = world.store.get("configmaps", NAMESPACE, "skyserve-config")["data"]["config.yaml"]
    assert yaml.safe_load(config)["controller"]["listen"] == listen
