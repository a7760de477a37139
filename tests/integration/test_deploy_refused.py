"""`serve controller deploy` where the cluster would refuse a part of it: the reason is named, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyserve_cli.deployment import cluster_objects
from skyserve_cli.deployment.cluster import ClusterDeployment, ClusterOptions, ClusterTarget
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed
from tests.clouds.kubernetes.kube_admission import Admission
from tests.clouds.kubernetes.kube_controller import Controller, controller
from tests.clouds.kubernetes.kube_world import NAMESPACE

#: Of one controller, and of two.
WANTED = [
    body
    for database in ("", "any")
    for body in cluster_objects.objects(
        cluster_objects.ClusterValues(NAMESPACE, "any", {}, database_secret=database)
    )
]


class Deployer:
    def __init__(self, kube: Controller, folder: Path) -> None:
        self.world = kube.world
        self.kubeconfig = str(kube.server.kubeconfig(folder / "kubeconfig"))
        self.home = Home(folder / "home", "")
        self.home.create()
        self.storage_class = ""

    def objects(self) -> set[tuple[str, str, str]]:
        return set(self.world.store.objects)

    def run(self, namespace: str = NAMESPACE) -> None:
        """Deploy; the controller itself never starts, as there is no kubelet."""
        target = ClusterTarget("test", namespace, self.kubeconfig)
        options = ClusterOptions(
            "test", image="controller:1", storage_class=self.storage_class, timeout_s=0.0
        )
        ClusterDeployment(self.home, target, options, lambda _: None).run()

    def all_rights(self, without: frozenset[tuple[str, str]] = frozenset()) -> None:
        """Give what a deployment needs, and what its Roles grant."""
        rights = {(one.verb, one.resource) for one in cluster_objects.rights(WANTED)}
        rights |= {(verb, resource) for verb in ("get", "create") for resource in ("namespaces", "pods")}
        rights |= {
            (verb, resource)
            for body in WANTED
            for rule in body.get("rules") or ()
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        self.world.troubles.allowed = frozenset(rights - without)


@pytest.fixture
def deployer(tmp_path: Path) -> Iterator[Deployer]:
    with controller() as kube:
        yield Deployer(kube, tmp_path)


def old(deployer: Deployer) -> None:
    deployer.world.version = "v1.24.3"


def may_not_grant(deployer: Deployer) -> None:
    deployer.all_rights(without=frozenset({("delete", "pods"), ("watch", "nodes")}))


def without_memory(deployer: Deployer) -> None:
    deployer.world.admission = Admission(limits={"max": {"memory": "1Gi"}})


def with_a_quota(deployer: Deployer) -> None:
    deployer.world.admission = Admission(quota=("team", {"limits.cpu": 8.0}))


def denied(deployer: Deployer) -> None:
    deployer.world.admission = Admission(webhooks={"costs.example.com": lambda _: "no cost-centre"})


def with_a_class(deployer: Deployer) -> None:
    deployer.storage_class = "fats"
    body = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "fast"},
        "provisioner": "x",
    }
    deployer.world.create("storageclasses", "", body)


REFUSED: dict[str, tuple[Callable[[Deployer], None], str]] = {
    "an old server": (old, "the server's version: it is v1.24.3; the oldest that works is 1.25"),
    "rights that are granted and not held": (may_not_grant, "you do not hold what it grants: delete pods"),
    "a LimitRange": (without_memory, "maximum memory usage per Container is 1Gi, but limit is 2Gi"),
    "a quota on limits": (with_a_quota, "must specify limits.cpu for: home,controller"),
    "a storage class that is misspelled": (with_a_class, "there is no storage class fats (there is: fast)"),
    "a webhook": (denied, 'admission webhook "costs.example.com" denied the request: no cost-centre'),
}


@pytest.mark.parametrize(("prepare", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_refused_is_named_and_nothing_is_changed(
    deployer: Deployer, prepare: Callable[[Deployer], None], sentence: str
) -> None:
    prepare(deployer)
    before, version = deployer.objects(), deployer.world.store.version
    with pytest.raises(CommandFailed) as raised:
        deployer.run()
    assert sentence in str(raised.value)
    assert str(raised.value).endswith("; nothing was changed")
    assert (deployer.objects(), deployer.world.store.version) == (before, version)


def test_in_a_namespace_that_is_made_the_rights_are_reviewed_one_by_one(deployer: Deployer) -> None:
    may_not_grant(deployer)
    before = deployer.objects()
    with pytest.raises(
        CommandFailed, match=r"you do not hold what its Roles grant: delete pods, watch nodes; nothing was"
    ):
        deployer.run("models")
    assert deployer.objects() == before


def test_in_a_namespace_that_is_made_the_rest_is_asked_before_anything_else_is_made(
    deployer: Deployer,
) -> None:
    with_a_quota(deployer)
    before = deployer.objects()
    with pytest.raises(
        CommandFailed, match=r"must specify limits.cpu for: home,controller; nothing was changed but"
    ):
        deployer.run("models")
    assert deployer.objects() - before == {
        ("namespaces", "", "models"),
        ("serviceaccounts", "models", "default"),
    }


@pytest.mark.parametrize("namespace", [NAMESPACE, "models"])
def test_who_holds_everything_deploys_twice_in_a_restricted_namespace(
    deployer: Deployer, namespace: str
) -> None:
    deployer.all_rights()
    deployer.world.admission.security = "restricted"
    for _ in range(2):
        with pytest.raises(CommandFailed, match="no controller is ready after 0 s"):
            deployer.run(namespace)
    assert ("deployments", namespace, "skyserve-controller") in deployer.objects()
