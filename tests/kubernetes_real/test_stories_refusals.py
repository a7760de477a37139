"""What a real API server refuses: by quotas, limits, admission and roles. The sentence is the server's, and nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from policies.model import FailureKind
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import NodePool
from provisioners.port.base import InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import ProvisionError, QuotaError, RefusedError
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.rights import apply, documents, without
from tests.kubernetes_real.spaces import LABEL, SMALL, Space, insist
from tests.kubernetes_real.wire import Wire

S = InstanceState
pytestmark = pytest.mark.timeout(300)


def refused(space: Space, cloud: KubernetesProvisioner, **changes: Any) -> ProvisionError:
    """Return the error of a launch, of which nothing is left."""
    with pytest.raises(ProvisionError) as caught:
        cloud.launch(space.order(cloud, **changes))
    space.await_nothing()
    print(f"{caught.value.kind.value}: {caught.value.message}")
    return caught.value


def set_quota(space: Space, hard: dict[str, str]) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team-quota"},
        "spec": {"hard": hard},
    }
    space.api.create("resourcequotas", space.name, body)
    until(lambda: space.is_counted("team-quota"), "the quota is not in force")


def set_limits(space: Space, limits: dict[str, object]) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "limits"},
        "spec": {"limits": [{"type": "Container", **limits}]},
    }
    space.api.create("limitranges", space.name, body)


def test_a_quota_on_pods_is_a_quota_error_that_names_it(space: Space) -> None:
    set_quota(space, {"pods": "1"})
    cloud = space.controller()
    first = cloud.launch(space.order(cloud, "chat-1"))
    with pytest.raises(QuotaError, match="team-quota"):
        cloud.launch(space.order(cloud, "chat-2"))
    assert space.ours() == {"pods": 1}
    cloud.terminate(first)
    space.await_nothing()


def test_a_quota_that_is_met_in_the_middle_of_a_launch_leaves_nothing(space: Space) -> None:
    set_quota(space, {"services": "0"})
    error = refused(space, space.controller(), num_nodes=2, secrets={"A": "b"})
    assert error.kind is FailureKind.QUOTA


def test_a_quota_on_limits_is_met_by_a_pod_with_limits(space: Space) -> None:
    set_quota(space, {"limits.cpu": "64", "limits.memory": "64Gi"})
    cloud = space.controller()
    made = cloud.launch(space.order(cloud))
    (pod,) = space.api.list("pods", space.name)
    wanted = pod["spec"]["containers"][0]["resources"]
    assert {key: wanted["limits"][key] for key in ("cpu", "memory")} == {
        key: wanted["requests"][key] for key in ("cpu", "memory")
    }
    cloud.terminate(made)
    space.await_nothing()


def limit_ranges() -> list[object]:
    most, default = {"cpu": "50m", "memory": "10Mi"}, {"cpu": "50m", "memory": "100Mi"}
    return [
        pytest.param({"max": most, "default": most}, r"[Mm]aximum|limit", id="a maximum"),
        pytest.param({"default": default}, r"must be less than or equal to cpu limit", id="a default"),
    ]


@pytest.mark.parametrize(("limits", "sentence"), limit_ranges())
def test_a_limit_range_below_what_is_requested(
    space: Space, limits: dict[str, object], sentence: str
) -> None:
    set_limits(space, limits)
    error = refused(space, space.controller())
    assert isinstance(error, RefusedError)
    assert re.search(sentence, error.message)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"service_account": "nope"}, r'serviceaccount "nope" not found'),
        ({"priority_class": "nope"}, "no PriorityClass with name nope"),
        ({"runtime_class": "nope"}, r"RuntimeClass|runtimeclass"),
    ],
    ids=["a service account", "a priority class", "a runtime class"],
)
def test_what_the_settings_name_and_the_cluster_lacks_is_named(
    space: Space, settings: dict[str, Any], sentence: str
) -> None:
    error = refused(space, space.controller(**settings))
    assert re.search(sentence, error.message)


def test_a_namespace_that_does_not_exist_is_refused(space: Space) -> None:
    cloud = space.controller()
    order = space.order(cloud)
    with pytest.raises(ProvisionError, match="nowhere"):
        space.controller(namespace="nowhere").launch(order)


# --- one verb of the Roles removed at a time -------------------------------------------------------------------


def rights() -> list[tuple[str, str]]:
    """Return verb and resource of the printed Role for replicas."""
    return [
        (verb, resource)
        for body in documents("x")
        if body["kind"] == "Role" and body["metadata"]["name"] == "skyserve"
        for rule in body["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if resource != "events"  # without which nothing fails
    ]


def live(space: Space, *, has_watch: bool = True) -> list[str]:
    """Do what a controller does with replicas. Return the sentences of all errors."""
    errors: list[str] = []

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
        except ProvisionError as error:
            errors.append(error.message)

    order = space.order(
        space.controller(), num_nodes=2, secrets={"A": "b"}, run="echo hello; exec sleep 1000"
    )
    for number in (5, 7):  # the ones before have died when they had made some of it
        wire = Wire()
        wire.crash = number, True
        attempt(partial(space.controller(wire).launch, order))
    errors = [one for one in errors if not one.startswith("the cluster")]  # it does not respond any more
    cloud = space.controller()
    attempt(lambda: insist(lambda: cloud.launch(order), 4))

    def is_reported() -> bool:
        attempt(lambda: cloud.listing(OWNER))
        return has_watch or any("cannot watch" in one for one in errors)

    until(is_reported, "the missing right is not reported")  # a thread finds it out, at its second try
    attempt(lambda: cloud.instances(OWNER))
    end_all(cloud, attempt, order)
    return errors


def end_all(
    cloud: KubernetesProvisioner, attempt: Callable[[Callable[[], object]], None], order: LaunchOrder
) -> None:
    for one in cloud.reported(OWNER):
        attempt(partial(cloud.read_log, one, 0, 1000))
        attempt(partial(cloud.terminate, one))


def test_the_printed_roles_are_enough(space: Space) -> None:
    assert live(space) == []
    space.await_nothing()


@pytest.mark.parametrize(("verb", "resource"), rights(), ids=str)
def test_a_verb_that_is_missing_is_named_and_what_is_left_goes_when_it_is_back(
    space: Space, verb: str, resource: str
) -> None:
    bodies = list(documents(space.name))
    for body in without(bodies, verb, resource):
        apply(space.api, space.name, body)
    errors = live(space, has_watch=verb != "watch")
    named = [one for one in errors if f'cannot {verb} resource "{resource}"' in one]
    print("\n".join(errors))
    assert named, errors
    for body in bodies:
        apply(space.api, space.name, body)
    cloud = space.controller()
    for one in insist(lambda: cloud.instances(OWNER)):
        insist(partial(cloud.terminate, one))
    space.await_nothing()


def test_without_the_right_to_list_nodes_there_are_the_pools_that_the_settings_name(space: Space) -> None:
    for body in without(documents(space.name), "list", "nodes"):
        apply(space.api, space.name, body)
    assert space.controller().offers(Requirements((SMALL,))) == []
    pools = [NodePool(f"{space.name}-a", cpus=64.0, memory_gb=256.0, labels={LABEL: space.name})]
    cloud = space.controller(pools=pools)
    order = space.order(cloud)
    insist(lambda: cloud.launch(order))
    cloud.terminate(insist(lambda: cloud.instances(OWNER))[0])
    space.await_nothing()
