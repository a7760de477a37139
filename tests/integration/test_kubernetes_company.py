"""Namespaces as companies have them: quotas on limits, LimitRanges, PodSecurity, classes, service accounts, webhooks and old servers.

Each is found by `serve check` before anything is launched, is named by a launch, and is met by the patch that the documentation gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from policies.model import FailureKind
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import Cache
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Level
from skyserve_cli.deployment.cluster_objects import ClusterValues, objects
from tests.clouds.kubernetes.kube_admission import Admission, violations
from tests.clouds.kubernetes.kube_controller import PRICES, Controller, controller, order_of
from tests.clouds.kubernetes.kube_world import NAMESPACE
from tests.integration.test_kubernetes_agents import SECOND, agent_order

Json = dict[str, Any]
NON_ROOT = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000}}}
LIMITS = {"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}]}}


@contextmanager
def company(**cluster: Any) -> Iterator[Controller]:
    with controller(cluster=Cluster("prod", prices=PRICES, agent_image="agent:1", **cluster)) as made:
        yield made


def away(_: Json) -> str | None:
    raise ConnectionError("dial tcp 10.0.0.1:443: connect: connection refused")


def denied(pod: Json) -> str | None:
    return None if (pod["metadata"].get("annotations") or {}).get("cost-centre") else "no cost-centre"


K = FailureKind
#: What the namespace has, what a launch without a patch says, and the patch with which it is accepted.
NAMESPACES: Mapping[str, tuple[Mapping[str, Any], K, str, Json | None]] = {
    "a limit that is smaller than the request": (
        {
            "limits": {
                "default": {"cpu": "500m", "memory": "512Mi"},
                "defaultRequest": {"cpu": "100m", "memory": "128Mi"},
            }
        },
        K.REFUSED,
        "must be less than or equal to cpu limit",
        LIMITS,
    ),
    "a largest limit": (
        {"limits": {"max": {"memory": "2Gi"}}},
        K.REFUSED,
        "must be less than or equal to memory limit",
        LIMITS,
    ),
    "pod security": (
        {"security": "restricted"},
        K.REFUSED,
        'violates PodSecurity "restricted:latest"',
        NON_ROOT,
    ),
    "a webhook that denies": (
        {"webhooks": {"costs.example.com": denied}},
        K.REFUSED,
        'admission webhook "costs.example.com" denied the request: no cost-centre',
        {"metadata": {"annotations": {"cost-centre": "42"}}},
    ),
    "a webhook that is away": (
        {"webhooks": {"w.example.com": away}},
        K.TRANSIENT,
        'failed calling webhook "w.example.com"',
        None,
    ),
    "a quota that is used up": ({"quota": ("team", {"pods": 0})}, K.QUOTA, "exceeded quota: team", None),
}


@pytest.mark.parametrize(("admission", "kind", "sentence", "patch"), NAMESPACES.values(), ids=NAMESPACES)
def test_what_a_namespace_refuses_is_found_before_a_launch(
    admission: Mapping[str, Any], kind: K, sentence: str, patch: Json | None
) -> None:
    with company() as kube:
        kube.world.admission = Admission(**admission)
        before = kube.world.store.version
        found = [one for one in kube.cloud.check() if "admission" in one.what]
        assert kube.world.store.version == before, "a check changes nothing"
        assert sentence in found[0].message
        assert found[0].level is (Level.MISSING if kind is K.REFUSED else Level.NOTE)
        with pytest.raises(ProvisionError) as raised:
            kube.cloud.launch(order_of())
        assert raised.value.kind is kind
        assert sentence in raised.value.message
        assert kube.world.pod_names() == []
        if patch is not None:
            kube.cloud.launch(order_of("chat-2", pod=json.dumps(patch)))
            assert kube.world.pod_names() == ["chat-2"]
    if patch is not None:
        with company(
            pod=patch, agent_pod={"metadata": patch["metadata"]} if "metadata" in patch else {}
        ) as kube:
            kube.world.admission = Admission(**admission)
            replicas = next(one for one in kube.cloud.check() if one.what == "prod: admission of replicas")
            assert (replicas.level, replicas.message) == (Level.FINE, "accepted")


def test_limits_are_set_where_the_quota_of_the_namespace_wants_them() -> None:
    with company() as kube:
        hard = {"limits.cpu": 64.0, "limits.memory": 256e9, "requests.cpu": 64.0}
        kube.world.admission.quota = ("team", hard)
        found = {one.what: one.message for one in kube.cloud.check()}
        assert found["prod: admission of replicas"] == (
            "accepted; the quota wants limits of cpu, memory, which are set to the requests"
        )
        assert "must specify limits.cpu for: agent" in found["prod: admission of load balancers"]
        kube.cloud.launch(order_of())
        kube.cloud.launch(order_of("chat-2"))
        assert kube.world.counts["create pods"] == 2 + 3 + 1  # dry runs, and one that was refused
        for name in ("chat-1", "chat-2"):
            (main,) = kube.world.store.get("pods", NAMESPACE, name)["spec"]["containers"]
            assert (
                main["resources"]["limits"] == main["resources"]["requests"] == {"cpu": "2", "memory": "4G"}
            )
        # A container of a patch requests what the patch says, and no more.
        patch = {"spec": {"containers": [{"name": "exporter", "image": "exporter:1"}]}}
        with pytest.raises(ProvisionError, match=r"must specify limits.cpu for: exporter; .*kubernetes.pod"):
            kube.cloud.launch(order_of("chat-3", pod=json.dumps(patch)))


@pytest.mark.parametrize(
    ("settings", "patch", "sentence", "make"),
    [
        (
            {"service_account": "nope"},
            None,
            'serviceaccount "nope" not found; correct service_account in config.yaml',
            lambda kube: kube.world.create("serviceaccounts", NAMESPACE, account("nope")),
        ),
        (
            {"priority_class": "nope"},
            None,
            "no PriorityClass with name nope was found",
            lambda kube: kube.world.admission.priority_classes.add("nope"),
        ),
        (
            {},
            {"spec": {"runtimeClassName": "gvisor"}},
            'RuntimeClass "gvisor" not found',
            lambda kube: kube.world.admission.runtime_classes.add("gvisor"),
        ),
    ],
)
def test_names_that_do_not_exist_are_no_permission_and_are_not_tried_for_ever(
    settings: Json, patch: Json | None, sentence: str, make: Callable[[Controller], object]
) -> None:
    with company(**settings, pod=patch or {}) as kube:
        found = [one for one in kube.cloud.check() if one.what == "prod: admission of replicas"]
        assert (found[0].level, sentence in found[0].message) == (Level.MISSING, True)
        with pytest.raises(ProvisionError) as raised:
            kube.cloud.launch(order_of())
        assert raised.value.kind is K.REFUSED
        assert sentence in raised.value.message
        make(kube)
        kube.cloud.launch(order_of())


def account(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}


def test_a_claim_that_is_not_there_is_found_before_a_pod_waits_for_it() -> None:
    volume = {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}
    with company(pod={"spec": {"volumes": [volume]}}) as kube:
        found = [one for one in kube.cloud.check() if one.what == "prod: admission of replicas"]
        assert found[0].level is Level.MISSING
        assert (
            "there is no PersistentVolumeClaim weights in the namespace ml: make it first" in found[0].message
        )
        kube.world.troubles.denied = {("get", "persistentvolumeclaims")}
        seen = {one.what: one.message for one in kube.cloud.check()}
        assert seen["prod: claims"] == "cannot be seen: the role may not get persistentvolumeclaims"
        assert seen["prod: admission of replicas"] == "accepted"
        kube.world.troubles.denied = set()
        kube.world.create("persistentvolumeclaims", NAMESPACE, claim("weights", ["ReadWriteMany"]))
        found = [one for one in kube.cloud.check() if one.what == "prod: admission of replicas"]
        assert [one.message for one in found] == ["accepted"]


@pytest.mark.parametrize(
    ("modes", "security", "cache", "sentence"),
    [
        ([], "", Cache("o/-/chat", ("HF_HOME",)), None),
        (
            [],
            "baseline",
            Cache("o/-/chat", ("HF_HOME",)),
            "write cache: {kind: pvc, claim: NAME} in the service file",
        ),
        (["ReadWriteMany"], "baseline", Cache("o/-/chat", ("HF_HOME",), "weights"), None),
        ([], "", Cache("o/-/chat", ("HF_HOME",), "weights"), "there is no PersistentVolumeClaim weights"),
        (
            ["ReadWriteOnce"],
            "",
            Cache("o/-/chat", ("HF_HOME",), "weights"),
            "is ReadWriteOnce, so the next replica waits",
        ),
    ],
)
def test_a_cache_that_a_namespace_does_not_let_be_is_named_before_a_launch(
    modes: list[str], security: str, cache: Cache, sentence: str | None
) -> None:
    with company() as kube:
        if security:
            kube.world.admission.security = security
        if modes:
            kube.world.create("persistentvolumeclaims", NAMESPACE, claim("weights", modes))
        before = kube.world.store.version
        refused = [str(why) for _, why in kube.cloud.rehearse(order_of(cache=cache)) if why is not None]
        assert kube.world.store.version == before
        assert len(refused) == (sentence is not None)
        assert (sentence or "") in "".join(refused)


def claim(name: str, modes: list[str]) -> Json:
    spec = {"accessModes": modes, "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_load_balancers_and_controllers_pass_pod_security_restricted() -> None:
    with company(pod=NON_ROOT) as kube:
        kube.world.admission.security = "restricted"
        assert {one.message for one in kube.cloud.check() if "admission" in one.what} == {"accepted"}
        agent = kube.cloud.launch(agent_order())
        kube.cloud.run_agent(agent, SECOND)
        kube.world.look()
        assert len(kube.world.pod_names()) == 1
    for database in ("", "pg"):
        values = ClusterValues("models", "r.example.com/skyserve:2", {}, database_secret=database)
        (template,) = (one["spec"]["template"] for one in objects(values) if one["kind"] == "Deployment")
        assert not list(violations(template["spec"], "restricted"))


def test_the_patch_of_load_balancers_is_laid_over_their_pods() -> None:
    patch = {
        "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": {"imagePullSecrets": [{"name": "registry"}], "containers": [{"name": "agent", "tty": False}]},
    }
    with company(agent_pod=patch) as kube:
        agent = kube.cloud.launch(agent_order())
        kube.cloud.run_agent(agent, SECOND)
        deployment = kube.world.store.get("deployments", NAMESPACE, "lb-1")
        template = deployment["spec"]["template"]
        assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]


# --- what `serve check` says of the cluster -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "level", "message"),
    [
        ("v1.24.17", Level.MISSING, "it is v1.24.17; the oldest that works is 1.25"),
        ("v1.25.0", Level.FINE, "v1.25.0"),
        ("v1.33.1-eks-f1e2d3c", Level.FINE, "v1.33.1-eks-f1e2d3c"),
    ],
)
def test_the_version_of_the_server(release: str, level: Level, message: str) -> None:
    with company() as kube:
        kube.world.version = release
        (found,) = [one for one in kube.cloud.check() if one.what == "prod: version"]
        assert (found.level, found.message) == (level, message)


def test_why_no_node_takes_our_pods() -> None:
    with company() as kube:
        for name, change in (
            ("fixed", lambda node: node["spec"].update(unschedulable=True)),
            ("spot", lambda node: node["status"].update(conditions=[{"type": "Ready", "status": "Unknown"}])),
            ("fixed-gpu", lambda node: node["metadata"]["labels"].pop("nvidia.com/gpu.product")),
            ("spot-gpu", lambda node: node["spec"]["taints"].append({"key": "team", "effect": "NoSchedule"})),
        ):
            node = kube.world.store.get("nodes", "", name)
            change(node)
            if name == "spot":  # as the node controller does
                node["spec"]["taints"] = [{"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}]
            kube.world.store.update("nodes", node)
        (found,) = [one for one in kube.cloud.check() if one.what == "prod: nodes"]
        assert found.level is Level.MISSING
        assert found.message == (
            "none of 4 takes our Pods: 1 cordoned, 1 not ready, 1 with the taint team, which no toleration of ours covers, "
            "1 without a label that names the kind of nvidia.com/gpu"
        )


def test_accelerators_without_a_name_are_noted() -> None:
    with company() as kube:
        node = kube.world.store.get("nodes", "", "spot-gpu")
        del node["metadata"]["labels"]["nvidia.com/gpu.product"]
        kube.world.store.update("nodes", node)
        (found,) = [one for one in kube.cloud.check() if one.what == "prod: labels of nodes"]
        assert found.message == "1 of 4 have accelerators of which no label says the kind: they are not used"
