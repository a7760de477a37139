"""The manifests, the printed Roles and the Helm chart on a real API server: accepted, and the second time nothing changes.

An older server does not know all of it. What is left out or renamed for it is named here.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioners import permissions
from skyserve_cli.deployment.cluster import ClusterTarget
from skyserve_cli.deployment.cluster_removal import ClusterRemoval
from skyserve_cli.home import Home
from tests.clouds.kubernetes.kube_store import Refused
from tests.kubernetes_real.cluster import Context, until
from tests.kubernetes_real.real_api import Json
from tests.kubernetes_real.spaces import RealWorld

ROOT = Path(__file__).parents[2] / "deploy"
KUBECTL = shutil.which("kubectl")
NAMESPACE = "skyserve"
_BUDGETS, _END_PORTS = 21, 22  # since when there are policy/v1 and endPort
_WRITTEN = (
    "Deployment",
    "PodDisruptionBudget",
    "PersistentVolumeClaim",
    "ServiceAccount",
)  # by controllers, too
_KINDS = (
    "deployments,services,configmaps,networkpolicies,roles,rolebindings,serviceaccounts,poddisruptionbudgets"
)
OURS = (_KINDS, "-l", "app.kubernetes.io/part-of=skyserve")
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl is not installed (Debian: kubernetes-client)"
)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def admin(world: RealWorld) -> Iterator[Path]:
    """The kubeconfig of the administrator, for whom there is the namespace of the manifests."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    world.api.ensure("namespaces", "", space)
    user = world.plane.certificate_of("admin")
    yield world.plane.kubeconfig("manifests", {"manifests": Context(NAMESPACE, user)})
    world.api.delete("namespaces", "", NAMESPACE)
    until(lambda: is_removed(world), "the namespace is not removed")


def is_removed(world: RealWorld) -> bool:
    """No kubelet removes the Pods in it, which may be on nodes of other tests."""
    for pod in world.api.list("pods", NAMESPACE):
        world.api.delete("pods", NAMESPACE, pod["metadata"]["name"], {"gracePeriodSeconds": 0})
    try:
        world.api.get("namespaces", "", NAMESPACE)
    except Refused:
        return True
    return False


def for_server(world: RealWorld, body: Json) -> Json | None:
    """Return the object as the server takes it; None if it does not know such an object."""
    minor, kind = world.plane.minor, body["kind"]
    ports = [
        port
        for rule in (body.get("spec") or {}).get("ingress") or ()
        for port in rule.get("ports") or ()
        if "endPort" in port
    ]
    if ports and minor < _END_PORTS:
        print(f"left out: {kind} {body['metadata']['name']}: endPort is of 1.{_END_PORTS}")
        return None
    if kind == "PodDisruptionBudget" and minor < _BUDGETS:
        print(f"renamed: {kind} {body['metadata']['name']} to policy/v1beta1")
        return {**body, "apiVersion": "policy/v1beta1"}
    return body


def versions(kubeconfig: Path, *which: str, text: str = "") -> dict[str, Any]:
    """Return what says whether the objects have been changed by us."""
    listed = yaml.safe_load(kubectl(kubeconfig, "get", *which, "-o", "yaml", text=text))
    return {
        f"{one['kind']}/{one['metadata']['name']}": one.get("spec")
        if one["kind"] in _WRITTEN
        else one["metadata"]["resourceVersion"]
        for one in listed["items"]
    }


def kubectl(kubeconfig: Path, *words: str, text: str = "") -> str:
    command = [str(KUBECTL), f"--kubeconfig={kubeconfig}", f"--cache-dir={kubeconfig.parent}/cache", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_kubectl
@pytest.mark.parametrize("folder", ["one-controller", "two-controllers", "kubernetes", "kubernetes-reaper"])
def test_applied_twice_nothing_changes(world: RealWorld, admin: Path, folder: str) -> None:
    if folder.startswith("kubernetes"):
        made = permissions.text_of(folder)
    else:
        made = kubectl(admin, "kustomize", str(ROOT / "kubernetes" / folder))
    bodies = [found for one in yaml.safe_load_all(made) if one and (found := for_server(world, one))]
    text = yaml.safe_dump_all(bodies)
    try:
        kubectl(admin, "apply", "--server-side", "-f", "-", text=text)
        found = versions(admin, "-f", "-", text=text)
        assert len(found) == len(bodies)
        kubectl(admin, "apply", "--server-side", "-f", "-", text=text)
        assert versions(admin, "-f", "-", text=text) == found
    finally:
        kubectl(admin, "delete", "--ignore-not-found", "--wait=false", "-f", "-", text=text)


@needs_kubectl
def test_undeploy_removes_what_was_applied(world: RealWorld, admin: Path, tmp_path: Path) -> None:
    """Without Pods, which no kubelet would end."""
    made = kubectl(admin, "kustomize", str(ROOT / "kubernetes" / "one-controller"))
    bodies = [found for one in yaml.safe_load_all(made) if one and (found := for_server(world, one))]
    for body in bodies:
        if body["kind"] == "Deployment":
            body["spec"]["replicas"] = 0
    kubectl(admin, "apply", "--server-side", "-f", "-", text=yaml.safe_dump_all(bodies))
    removal = ClusterRemoval(
        Home(tmp_path, ""), ClusterTarget("manifests", NAMESPACE, str(admin)), lambda _: None
    )
    removal.insist(force=True)
    shown = {f"{one['kind']}/{one['metadata']['name']}" for one in bodies}
    found = removal.run(purge=False)
    assert set(found.removed) == shown - {"PersistentVolumeClaim/skyserve-home"}
    until(lambda: not left(admin), lambda: f"there is {left(admin)}")
    assert kubectl(admin, "get", "clusterroles,clusterrolebindings", *OURS[1:], "-o", "name") == ""
    assert removal.run(purge=True).removed == ["PersistentVolumeClaim/skyserve-home"]


@needs_kubectl
def test_helm_installs_the_chart_upgrades_it_without_a_change_and_removes_it(
    world: RealWorld, admin: Path, tmp_path: Path
) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    chart, values = ROOT / "helm" / "skyserve", {"controllers": 2}
    with helm.Config(kubeconfig_path=admin, namespace=NAMESPACE) as config:
        if world.plane.minor < 25:
            with pytest.raises(helm.HelmError, match=r"requires kubeVersion: >=1.25"):
                config.install(chart, "skyserve", values)
            assert left(admin) == []
            chart, values = older(chart, tmp_path), {**values, "networkPolicy": {"enabled": False}}
        config.install(chart, "skyserve", values)
        found = left(admin)
        assert "deployment.apps/skyserve-controller" in found
        before = versions(admin, *OURS)
        config.upgrade(chart, "skyserve", values)
        assert versions(admin, *OURS) == before
        config.uninstall("skyserve")
    until(lambda: not left(admin), "not everything of the chart is removed")


def older(chart: Path, folder: Path) -> Path:
    """Return a copy of the chart for a server below its floor, which has budgets of policy/v1beta1."""
    made = folder / "skyserve"
    shutil.copytree(chart, made)
    about = made / "Chart.yaml"
    about.write_text("".join(one for one in about.read_text().splitlines(True) if "kubeVersion" not in one))
    for path in (made / "templates").glob("*.yaml"):
        path.write_text(path.read_text().replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n"))
    return made


def left(admin: Path) -> list[str]:
    return kubectl(admin, "get", *OURS, "-o", "name").split()
