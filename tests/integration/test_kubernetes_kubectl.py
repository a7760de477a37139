"""kubectl on the fake cluster: what a user looks at, and takes away. It keeps the fake honest, for it is written for the real one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import InstanceState
from tests.clouds.kubernetes.kube_controller import OWNER, order_of
from tests.clouds.kubernetes.kube_places import living
from tests.integration.test_kubernetes_pods import until

KUBECTL = shutil.which("kubectl")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed (Debian: kubernetes-client)"),
]
S = InstanceState
MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """Of a cluster without logins: kubectl sends no token over plain HTTP."""
    with living(tmp_path) as (_, path):
        yield path


@pytest.mark.parametrize("folder", ["two-controllers", "one-controller"])
def test_kubectl_applies_the_manifests(tmp_path: Path, folder: str) -> None:
    with living(tmp_path, nodes=()) as (world, path):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "skyserve"}}
        world.store.create("namespaces", "", body)
        for _ in range(2):  # the second time nothing changes
            kubectl(path, "apply", "--validate=false", "-k", str(MANIFESTS / folder))
        found = world.store.get("deployments", "skyserve", "skyserve-controller")
        assert found["spec"]["replicas"] == (2 if folder == "two-controllers" else 1)


def kubectl(kubeconfig: Path, *words: str) -> str:
    command = [str(KUBECTL), f"--kubeconfig={kubeconfig}", f"--cache-dir={kubeconfig.parent}/cache", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubectl_gets_watches_reads_logs_and_deletes(kubeconfig: Path) -> None:
    cloud = KubernetesProvisioner([Cluster("prod")], str(kubeconfig))
    watching = subprocess.Popen(
        [str(KUBECTL), f"--kubeconfig={kubeconfig}", "get", "pods", "--watch", "--output=name"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        order = order_of(run="echo hello; exec sleep 1000", secrets={"A": "b"})
        cloud.launch(order)
        assert until(lambda: cloud.listing(OWNER).instances[0].state is S.RUNNING)
        assert watching.stdout is not None
        assert watching.stdout.readline() == "pod/chat-1\n"
        assert kubectl(kubeconfig, "get", "pods,secrets", "-o", "name").split() == [
            "pod/chat-1",
            "secret/chat-1-env",
        ]
        assert (
            kubectl(kubeconfig, "get", "pods", "-l", "skyserve-service=chat", "-o", "name") == "pod/chat-1\n"
        )
        assert kubectl(kubeconfig, "get", "pods", "-l", "skyserve-service=other", "-o", "name") == ""
        (pod,) = json.loads(kubectl(kubeconfig, "get", "pods", "-o", "json"))["items"]
        assert pod["status"]["phase"] == "Running"
        assert until(lambda: kubectl(kubeconfig, "logs", "chat-1") == "hello\n")
        kubectl(kubeconfig, "delete", "pod", "chat-1", "--wait=true")
        assert until(lambda: cloud.listing(OWNER).instances[0].state is S.PREEMPTED)
        assert kubectl(kubeconfig, "get", "secrets", "-o", "name") == ""
    finally:
        cloud.close()
        watching.kill()
        watching.wait()
