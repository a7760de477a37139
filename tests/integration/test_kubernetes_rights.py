"""The role of the manifests over an API that enforces it: enough for a life of the controller, and each missing verb is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from provisioners.kubernetes.api import KubeApi
from provisioners.kubernetes.pod_events import STUCK_S
from provisioners.kubernetes.settings import Cluster
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Level
from skyserve_cli.controller.leader_label import CONTROLLERS, LABEL, LeaderLabel
from tests.clouds.kubernetes.kube_controller import OWNER, PRICES, Controller, controller, order_of
from tests.clouds.kubernetes.kube_world import NAMESPACE
from tests.integration.test_kubernetes_agents import SECOND, agent_order
from tests.integration.test_kubernetes_pods import until

CLUSTER = Cluster("prod", prices=PRICES, agent_image="agent:1")
MANIFEST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "two-controllers" / "permissions.yaml"


def rights() -> list[tuple[str, str, bool]]:
    """Return verb and resource of every rule of the manifest, and whether it is of the namespace."""
    return [
        (verb, resource, one["kind"] == "Role")
        for one in yaml.safe_load_all(MANIFEST.read_text())
        if one["kind"] in ("Role", "ClusterRole")
        for rule in one["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


@contextmanager
def cluster(allowed: frozenset[tuple[str, str]], root: Path) -> Iterator[Controller]:
    """A cluster with the Pods of two controllers, of which the second one led."""
    with controller(root, cluster=CLUSTER) as kube:
        for number in (1, 2):
            labels = {**CONTROLLERS, LABEL: "true" if number == 2 else "false"}
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"controller-{number}", "labels": labels},
                "spec": {"containers": [{"name": "main", "image": "i", "command": ["sleep", "1000"]}]},
            }
            kube.world.create("pods", NAMESPACE, body)
        kube.world.troubles.allowed = allowed
        yield kube


def leader_of(kube: Controller) -> list[str]:
    pods = kube.world.store.list("pods", NAMESPACE)
    return [
        one["metadata"]["name"] for one in pods if (one["metadata"].get("labels") or {}).get(LABEL) == "true"
    ]


def live(kube: Controller) -> list[str]:
    """Do everything that a controller does with a cluster. Return the sentences of all errors but those of `serve check`."""
    errors: list[str] = []
    order = order_of(run="echo hello; exec sleep 1000", num_nodes=2, secrets={"A": "b"})

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except ProvisionError as error:
            errors.append(error.message)

    api = KubeApi("prod", None, lambda: kube._client(None, None))
    LeaderLabel(lambda: api, "controller-1", lambda: True, lambda: kube.clock[0]).step()
    kube.world.troubles.crash = (4, True)  # the one before has died when it had made a Secret
    attempt(lambda: kube.cloud.launch(order))
    kube.restart()
    attempt(lambda: kube.cloud.launch(order))
    attempt(lambda: kube.cloud.listing(OWNER))
    if any(kube.world.troubles.refuses("watch", one) for one in ("pods", "deployments")):
        # A thread finds it out, at its second try.
        assert until(
            lambda: any("cannot watch" in one for one in errors),
            lambda: attempt(lambda: kube.cloud.listing(OWNER)),
        )
    kube.advance(1.0)
    attempt(lambda: kube.cloud.instances(OWNER))
    live_of_a_stuck_pod(kube, attempt)
    for instance in kube.cloud.reported(OWNER):
        attempt(lambda instance=instance: kube.cloud.read_log(instance, 0, 1000))
        attempt(lambda instance=instance: kube.cloud.terminate(instance))
    attempt(lambda: kube.cloud.listing(OWNER))  # which writes events of what it sees
    live_of_an_agent(kube, attempt)
    return [one for one in errors if not one.startswith("the cluster prod does not respond")]  # the crash


def live_of_a_stuck_pod(kube: Controller, attempt: Callable[[Callable[[], object]], None]) -> None:
    """A Pod on a node that cannot start it, of which the events alone say why."""
    assert kube.world.kubelet is not None
    kube.world.kubelet.without_network |= {"fixed", "spot"}
    attempt(lambda: kube.cloud.launch(order_of("stuck-1")))
    kube.advance(STUCK_S)
    attempt(lambda: kube.cloud.instances(OWNER))
    attempt(lambda: kube.cloud.listing(OWNER))
    kube.world.kubelet.without_network.clear()


def live_of_an_agent(kube: Controller, attempt: Callable[[Callable[[], object]], None]) -> None:
    """The same with a load balancer, whose launch was interrupted."""
    order = agent_order()
    kube.world.troubles.crash = (3, True)  # after its PodDisruptionBudget
    attempt(lambda: kube.cloud.launch(order))
    kube.restart()
    attempt(lambda: kube.cloud.launch(order))
    for instance in kube.cloud.reported(OWNER):
        if instance.token == order.token:
            attempt(lambda instance=instance: kube.cloud.run_agent(instance, SECOND))
            attempt(lambda instance=instance: kube.cloud.terminate(instance))


def test_the_role_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    allowed = frozenset((verb, resource) for verb, resource, _ in rights())
    with cluster(allowed, tmp_path) as kube, caplog.at_level(logging.WARNING):
        assert live(kube) == []
        unseen = [one for one in kube.cloud.check() if one.level is not Level.FINE]
        assert [(one.what, one.level) for one in unseen] == [("prod: quotas", Level.NOTE)]
        assert unseen[0].message == "cannot be seen: the role may not list resourcequotas"
        found = {one.what: one.message for one in kube.cloud.check()}
        assert found["prod: nodes"].endswith("; what is free cannot be seen: the role may not list pods")
        assert leader_of(kube) == ["controller-1"]
    assert caplog.text == ""


@pytest.mark.parametrize(("verb", "resource", "is_required"), rights())
def test_each_verb_is_needed_and_the_error_names_it(
    verb: str, resource: str, is_required: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = frozenset((one, other) for one, other, _ in rights()) - {(verb, resource)}
    with cluster(allowed, tmp_path) as kube, caplog.at_level(logging.WARNING):
        named = f'cannot {verb} resource "{resource}"'
        met = [sentence for sentence in [*live(kube), caplog.text] if named in sentence]
        findings = [one for one in kube.cloud.check() if one.level is not Level.FINE]
    asked = [one for one in findings if f"permission {verb} {resource}" in one.what or named in one.message]
    assert asked, findings
    # Without a right to nodes there are the pools of config.yaml, so that `serve check` alone says it.
    assert met or not is_required
