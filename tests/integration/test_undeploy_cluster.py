"""`serve controller undeploy kubernetes/…`: what deploy made is gone, what is left is named, and what is not its own stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.api.remote import LOCAL, Contexts
from skyserve_cli.deployment.cluster import ClusterTarget
from skyserve_cli.deployment.cluster_removal import ClusterRemoval, Removal
from skyserve_cli.output import CommandFailed, WrongUsage
from tests.clouds.kubernetes.kube_controller import controller
from tests.clouds.kubernetes.kube_world import NAMESPACE
from tests.integration.test_deploy_refused import Deployer

STATE = {
    ("persistentvolumeclaims", NAMESPACE, "skyserve-home"),
    ("secrets", NAMESPACE, "skyserve-api-tls"),
}


@pytest.fixture
def deployer(tmp_path: Path) -> Iterator[Deployer]:
    with controller() as kube:
        made = Deployer(kube, tmp_path)
        made.before = made.objects()  # type: ignore[attr-defined]
        with pytest.raises(CommandFailed, match="no controller is ready"):
            made.run()  # there is no kubelet
        target = target_of(made)
        Contexts("test", {"test": target.remote, "other": target.remote._replace(url="ssh://other")}).write(
            made.home
        )
        yield made


def target_of(deployer: Deployer) -> ClusterTarget:
    return ClusterTarget("test", NAMESPACE, deployer.kubeconfig)


def removal_of(deployer: Deployer) -> ClusterRemoval:
    return ClusterRemoval(deployer.home, target_of(deployer), lambda _: None)


def run(deployer: Deployer, *, purge: bool = False) -> Removal:
    removal = removal_of(deployer)
    world = deployer.world
    removal._await_pods = world.look  # type: ignore[method-assign]  # nothing else moves the fake's controllers
    return removal.run(purge=purge)


@pytest.mark.parametrize("purge", [False, True])
def test_what_deploy_made_is_gone_and_the_state_as_well_if_it_is_to_be(
    deployer: Deployer, purge: bool
) -> None:
    found = run(deployer, purge=purge)
    deployer.world.look()
    assert deployer.objects() - deployer.before == (set() if purge else STATE)  # type: ignore[attr-defined]
    assert "Deployment/skyserve-controller" in found.removed
    assert ("PersistentVolumeClaim/skyserve-home" in found.removed) == purge
    assert [one.partition(":")[0] for one in found.left[:-1]] == ([] if purge else ["state and keys"])
    assert "kubectl --context test delete namespace ml" in found.left[-1]
    assert Contexts.of(deployer.home).current == LOCAL
    assert set(Contexts.of(deployer.home).remotes) == {"other"}
    assert run(deployer).removed == []


def test_while_the_controller_does_not_respond_it_is_refused_unless_forced(deployer: Deployer) -> None:
    before = deployer.objects()
    with pytest.raises(CommandFailed, match=r"whether services are up there is not known \(--force"):
        removal_of(deployer).insist(force=False)
    removal_of(deployer).insist(force=True)
    assert deployer.objects() == before


def test_what_helm_has_installed_is_removed_by_helm(deployer: Deployer) -> None:
    found = deployer.world.store.get("deployments", NAMESPACE, "skyserve-controller")
    found["metadata"].setdefault("annotations", {})["meta.helm.sh/release-name"] = "mine"
    deployer.world.store.update("deployments", found)
    with pytest.raises(WrongUsage, match="helm uninstall mine"):
        removal_of(deployer).insist(force=True)


def test_what_others_have_made_under_these_names_stays(deployer: Deployer) -> None:
    """The Role that `serve check --policy kubernetes` prints has the name of that of the manifests."""
    found = deployer.world.store.get("roles", NAMESPACE, "skyserve")
    del found["metadata"]["labels"]
    deployer.world.store.update("roles", found)
    run(deployer)
    assert ("roles", NAMESPACE, "skyserve") in deployer.objects()


def test_what_may_not_be_removed_is_named_and_goes_another_time(deployer: Deployer) -> None:
    deployer.world.troubles.denied = {("delete", "clusterroles")}
    left = run(deployer).left
    assert [one for one in left if one.startswith(f"ClusterRole/{NAMESPACE}-skyserve-nodes: ")], left
    deployer.world.troubles.denied = set()
    assert run(deployer).removed == [f"ClusterRole/{NAMESPACE}-skyserve-nodes"]


def test_pods_that_nothing_looks_after_are_named(deployer: Deployer) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "chat-1",
            "labels": {"app.kubernetes.io/managed-by": "skyserve", "skyserve-owner": "me"},
        },
        "spec": {"containers": [{"name": "main", "image": "i", "command": ["sleep"]}]},
    }
    deployer.world.create("pods", NAMESPACE, body)
    assert any(one.startswith("1 Pod of services") for one in run(deployer).left)
    assert ("pods", NAMESPACE, "chat-1") in deployer.objects()


@pytest.mark.parametrize("after", [False, True])
def test_a_command_that_dies_at_any_call_is_completed_by_the_next(after: bool, tmp_path: Path) -> None:
    for number in range(0, 40, 3):
        with controller() as kube:
            (tmp_path / str(number)).mkdir()
            made = Deployer(kube, tmp_path / str(number))
            before = made.objects()
            with pytest.raises(CommandFailed):
                made.run()
            kube.world.troubles.crash = (number, after)
            with suppress(CommandFailed, ProvisionError):
                run(made)
            kube.world.troubles.crash, kube.world.troubles.is_down = None, False
            run(made)
            kube.world.look()
            assert made.objects() - before == STATE
