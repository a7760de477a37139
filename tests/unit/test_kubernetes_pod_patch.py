"""`kubernetes.pod`: what a patch may say, what becomes of the Pod, and what a Pod gets that no patch speaks of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from kubernetes_validate.utils import all_versions, schema_contents

from policies.model import CapacityType, Offer, Zone
from provisioners.kubernetes import pod_rules, pod_schema, translate
from provisioners.kubernetes.files import PackedFiles
from provisioners.kubernetes.pod_patch import laid_over, merged
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import LaunchOrder
from skyserve_cli.config_teams import PodPrivilege
from tests.clouds.kubernetes.kube_schemas import check

Json = dict[str, Any]
CLUSTER = Cluster("prod")
OFFER = Offer(Zone("kubernetes", "prod", "zone-a"), "4cpu-16gb", "L4", 1.0, CapacityType.SPOT, 0.4)
ORDER = LaunchOrder("chat-1", "me", "chat", 1, 1, OFFER, setup=None, run="serve", secrets={"KEY": "x"})
FILES = PackedFiles(pieces=({"00-0": b"x"},), targets=("work",), copied={})


def made(service: Json | None = None, operator: Json | None = None, **more: Any) -> Json:
    """Return the Pod under both patches, which the schema of Kubernetes accepts."""
    cluster = replace(CLUSTER, pod=operator or {}, **more.pop("cluster", {}))
    order = replace(ORDER, pod=None if service is None else json.dumps(service))
    pod = translate.pod_of(order, 0, cluster, "ml", files=FILES, **more)
    check(pod)
    return pod


def of_main(**keys: Any) -> Json:
    return {"spec": {"containers": [{"name": "main", **keys}]}}


def main_of(pod: Json) -> Json:
    found: Json = pod["spec"]["containers"][0]
    assert found["name"] == "main"
    return found


# --- the table of keys ----------------------------------------------------------------------------------------


def test_the_table_has_the_keys_of_kubernetes_and_their_kinds() -> None:
    version = next(one for one in reversed(all_versions()) if one.startswith("1.33"))
    schemas = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)[
        "$defs"
    ]
    core = next(key for key in schemas if key.endswith("core.v1.PodSpec")).removesuffix("PodSpec")
    for kind in pod_schema._TABLE:
        if kind in ("Pod", "ObjectMeta"):
            continue
        properties = schemas[f"{core}{kind}"]["properties"]
        assert pod_schema.keys_of(kind).keys() == properties.keys(), kind
        for key, value in pod_schema.keys_of(kind).items():
            types = properties[key].get("type", ["object"])
            expected = {"strings": "object", "amounts": "object", "any": "object"}.get(value, value)
            expected = "array" if value.startswith("[") else "object" if expected[0].isupper() else expected
            assert expected in ([types] if isinstance(types, str) else types), f"{kind}.{key}"


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ([], "must be a mapping"),
        ({"spce": {}}, "spce: a Pod has no such key; did you mean spec?"),
        ({"spec": {"tolerations": {}}}, "spec.tolerations: must be a list"),
        ({"spec": {"runtimeClassName": 1}}, "spec.runtimeClassName: must be text"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork: must be true or false"),
        ({"spec": {"priority": True}}, "spec.priority: must be a whole number"),
        (
            {"spec": {"containers": [{}]}},
            "spec.containers[0]: must have name, by which it is found in the Pod",
        ),
        ({"spec": {"containers": [None]}}, "spec.containers[0]: must not be empty"),
        (of_main(resources={"limits": {"memory": "24 GB"}}), "must be an amount, such as 2, 500m or 16Gi"),
        (of_main(securityContext={"runAsNonroot": True}), "did you mean runAsNonRoot?"),
        (of_main(volumeMounts=[{"name": "w"}]), "spec.containers[0].volumeMounts[0]: must have mountPath"),
        ({"metadata": {"annotations": {"x": True}}}, 'must be text: put it in quotes, such as "true"'),
        ({"spec": {"$retainKeys": ["a"]}}, "only $patch is understood, with replace or delete"),
        ({"spec": {"dnsConfig": {}, "affinity": {"$patch": "merge"}}}, "must be replace or delete"),
    ],
)
def test_what_is_no_part_of_a_pod_is_named_by_its_path(patch: Any, problem: str) -> None:
    assert problem in str(pod_rules.problems(patch)[0])


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ({"kind": "Deployment"}, "kind: must be Pod, if it is given"),
        ({"metadata": {"name": "x"}}, "metadata.name: a Pod has no such key"),
        ({"metadata": {"ownerReferences": []}}, "metadata.ownerReferences: a Pod has no such key"),
        ({"metadata": {"labels": {"skyserve-owner": "x"}}}, "the product finds its Pods by it"),
        ({"metadata": {"annotations": {"skyserve.dev/zone": "x"}}}, "the product finds its Pods by it"),
        ({"metadata": {"labels": {"a": "b c"}}}, "Kubernetes has no such label"),
        ({"metadata": None}, "it cannot be removed or replaced as a whole"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy: it cannot be set"),
        ({"spec": {"hostname": "x"}}, "spec.hostname: it cannot be set"),
        ({"spec": {"nodeName": "n1"}}, "the scheduler chooses the node; use nodeSelector or affinity"),
        ({"spec": {"affinity": {"nodeAffinity": None}}}, "spec.affinity.nodeAffinity: parts of it"),
        (
            {"spec": {"tolerations": [{"$patch": "replace"}]}},
            "spec.tolerations: parts of it are the product's",
        ),
        ({"spec": {"containers": [{"name": "main", "$patch": "delete"}]}}, "main cannot be removed"),
        ({"spec": {"containers": [{"name": "proxy"}]}}, "spec.containers[0].image: is missing: only main is"),
        (
            of_main(command=["sh"]),
            "spec.containers[0].command: it cannot be set: set run in the service file",
        ),
        (of_main(image="x"), "set resources.image_id in the service file"),
        (of_main(env=[{"name": "SKYSERVE_RUN", "value": "x"}]), "SKYSERVE_RUN is set by the product"),
        (of_main(env=None), "spec.containers[0].env: parts of it are the product's"),
        (of_main(ports=[{"containerPort": 8080, "$patch": "delete"}]), "set resources.ports"),
        (
            of_main(volumeMounts=[{"name": "w", "mountPath": "/skyserve/"}]),
            "/skyserve/ belongs to the product",
        ),
        (of_main(resources={"limits": {"nvidia.com/gpu": 2}}), "set resources.accelerators"),
        ({"spec": {"volumes": [{"name": "files", "emptyDir": {}}]}}, "files belongs to the product"),
        (
            {"spec": {"volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "c"}}]}},
            "work must be empty for each Pod",
        ),
        (
            {"spec": {"initContainers": [{"name": "files"}]}},
            "its resources and securityContext are those of main",
        ),
    ],
)
def test_what_the_product_needs_cannot_be_overridden(patch: Json, problem: str) -> None:
    (found,) = pod_rules.problems(patch)
    assert problem in str(found)


@pytest.mark.parametrize("key", ["command", "ports", "image", "readinessProbe"])
def test_of_a_load_balancer_other_keys_are_the_products(key: str) -> None:
    value: Any = {"image": "x", "readinessProbe": {}}.get(key, [])
    (found,) = pod_rules.problems({"spec": {"containers": [{"name": "agent", key: value}]}}, pod_rules.AGENT)
    assert found.at == ("spec", "containers", 0, key)


# --- the merge ------------------------------------------------------------------------------------------------

WEIGHTS = {"name": "weights", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}


def test_lists_are_merged_by_their_keys_and_others_replaced() -> None:
    sidecar = {"name": "exporter", "image": "r.example.com/exporter:1"}
    patch = {
        "metadata": {
            "labels": {"kueue.x-k8s.io/queue-name": "q"},
            "annotations": {"sidecar.istio.io/inject": "false"},
        },
        "spec": {
            "schedulerName": "volcano",
            "containers": [
                {
                    "name": "main",
                    "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                    "ports": [{"containerPort": 9400, "name": "metrics"}],
                    "volumeMounts": [{"name": "weights", "mountPath": "/weights"}],
                    "resources": {"limits": {"memory": "24Gi"}},
                },
                sidecar,
            ],
            "volumes": [WEIGHTS, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
            "imagePullSecrets": [{"name": "registry"}],
            "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
        },
    }
    assert not pod_rules.problems(patch)
    before, pod = made(), made(patch)
    main, own = main_of(pod), main_of(before)
    assert pod["metadata"]["labels"] == {**before["metadata"]["labels"], "kueue.x-k8s.io/queue-name": "q"}
    assert [one["name"] for one in pod["spec"]["containers"]] == ["main", "exporter"]
    assert main["env"] == [*own["env"], patch["spec"]["containers"][0]["env"][0]]  # type: ignore[index]
    assert [one["containerPort"] for one in main["ports"]] == [8080, 9400]
    assert [one["mountPath"] for one in main["volumeMounts"]] == ["/skyserve", "/dev/shm", "/weights"]
    assert main["command"] == own["command"]
    assert main["resources"] == {
        "requests": own["resources"]["requests"],
        "limits": {"nvidia.com/gpu": "1", "memory": "24Gi"},
    }
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    assert volumes["shm"] == patch["spec"]["volumes"][1]  # type: ignore[index]
    assert volumes.keys() == {"work", "shm", "files", "weights"}


BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "nodeSelector": {"a": "1"},
        "dnsConfig": {"nameservers": ["10.0.0.1"], "searches": ["a"]},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "containers": [{"name": "main", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}],
        "volumes": [{"name": "v", "emptyDir": {}}],
    },
}
A, B, C = ({"key": key, "operator": "Exists"} for key in "abc")


@pytest.mark.parametrize(
    ("patch", "path", "result"),
    [
        pytest.param({"nodeSelector": {"a": None, "b": "2"}}, "nodeSelector", {"b": "2"}, id="null removes"),
        pytest.param(
            {"nodeSelector": {"$patch": "replace", "b": "2"}},
            "nodeSelector",
            {"b": "2"},
            id="replace a mapping",
        ),
        pytest.param({"nodeSelector": {"$patch": "delete"}}, "nodeSelector", None, id="delete a mapping"),
        pytest.param(
            {"dnsConfig": {"searches": ["b"]}},
            "dnsConfig",
            {"nameservers": ["10.0.0.1"], "searches": ["b"]},
            id="a plain list is replaced",
        ),
        pytest.param(
            {"tolerations": [A]},
            "tolerations",
            [{"key": "gpu", "operator": "Exists"}, A],
            id="tolerations are added",
        ),
        pytest.param(
            {
                "containers": [
                    {
                        "name": "main",
                        "env": [{"name": "A", "valueFrom": {}}, {"name": "B", "$patch": "delete"}],
                    }
                ]
            },
            "containers",
            [{"name": "main", "env": [{"name": "A", "valueFrom": {}}]}],
            id="a variable is replaced whole, another one deleted",
        ),
        pytest.param(
            {"containers": [{"name": "main", "env": [{"$patch": "replace"}, {"name": "C", "value": "3"}]}]},
            "containers",
            [{"name": "main", "env": [{"name": "C", "value": "3"}]}],
            id="replace a list",
        ),
        pytest.param(
            {"volumes": [WEIGHTS | {"name": "v"}]},
            "volumes",
            [WEIGHTS | {"name": "v"}],
            id="a volume is whole",
        ),
        pytest.param(
            {"securityContext": {"runAsUser": 1, "fsGroup": None}},
            "securityContext",
            {"runAsUser": 1},
            id="new, no nulls",
        ),
    ],
)
def test_how_a_patch_is_merged(patch: Json, path: str, result: Any) -> None:
    found = merged(BASE, {"spec": patch})
    assert found["spec"].get(path) == result
    assert BASE["spec"]["nodeSelector"] == {"a": "1"}  # type: ignore[index]


def test_a_required_affinity_keeps_the_pod_in_the_zone_of_its_offer() -> None:
    terms = [{"matchExpressions": [A]}, {"matchExpressions": [B], "matchFields": [C]}]
    patch = {
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
                }
            }
        }
    }
    key = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")

    def terms_of(pod: Json) -> list[Json]:
        found: Any = pod["spec"]
        for one in key:
            found = found[one]
        return list(found)

    before, after = terms_of(made()), terms_of(made(patch))
    assert len(after) == 2 * len(before)
    assert after[0] == {"matchExpressions": [*before[0]["matchExpressions"], A]}
    assert after[1] == {"matchExpressions": [*before[0]["matchExpressions"], B], "matchFields": [C]}


def test_the_configuration_has_the_last_word() -> None:
    service = {
        "spec": {"runtimeClassName": "runc", "securityContext": {"runAsUser": 0}, "priorityClassName": "high"}
    }
    operator = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000}}}
    spec = made(service, operator, cluster={"runtime_class": "gvisor"})["spec"]
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["priorityClassName"] == "high"
    assert spec["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": True,
        "runAsUser": 1000,
    }


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"spec": {"nodeSelector": {"a": None}, "tolerations": [A]}},
        {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "$patch": "delete"}], "tty": True}]}},
        {"spec": {"volumes": [WEIGHTS]}},
    ],
)
@pytest.mark.parametrize(
    "then",
    [
        {},
        {"spec": {"nodeSelector": {"b": "2"}, "tolerations": [B]}},
        {"spec": {"containers": [{"name": "main", "env": [{"name": "C", "value": "3"}]}]}},
        {"spec": {"volumes": [{"name": "weights", "emptyDir": {}}], "nodeSelector": None}},
    ],
)
def test_two_patches_laid_over_each_other_do_what_they_do_one_after_the_other(
    first: Json, then: Json
) -> None:
    assert merged(BASE, laid_over(first, then)) == merged(merged(BASE, first), then)


# --- what a Pod gets besides ----------------------------------------------------------------------------------

NON_ROOT = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000}}}


@pytest.mark.parametrize(
    ("patch", "context"),
    [
        pytest.param({}, {"allowPrivilegeEscalation": False}, id="an image that runs as root"),
        pytest.param(
            NON_ROOT, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}, id="not as root"
        ),
        pytest.param(
            of_main(securityContext={"runAsUser": 7}),
            {"allowPrivilegeEscalation": False, "runAsUser": 7, "capabilities": {"drop": ["ALL"]}},
            id="another user",
        ),
        pytest.param(
            of_main(securityContext={"runAsNonRoot": True, "capabilities": {"drop": []}}),
            {"allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": []}},
            id="capabilities of its own",
        ),
        pytest.param(of_main(securityContext={"privileged": True}), {"privileged": True}, id="privileged"),
        pytest.param(
            of_main(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
            {"capabilities": {"add": ["SYS_ADMIN"]}},
            id="an administrator",
        ),
        pytest.param(of_main(securityContext={"allowPrivilegeEscalation": None}), {}, id="removed"),
    ],
)
def test_the_security_context_of_the_containers(patch: Json, context: Json) -> None:
    pod = made(patch)
    assert main_of(pod)["securityContext"] == context
    assert pod["spec"]["initContainers"][0]["securityContext"] == context
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize(
    ("patch", "limited", "requests", "limits"),
    [
        pytest.param({}, (), {"cpu": "4", "memory": "16G"}, {}, id="no limits unless they are wanted"),
        pytest.param(
            {},
            ("cpu", "memory"),
            {"cpu": "4", "memory": "16G"},
            {"cpu": "4", "memory": "16G"},
            id="the namespace wants them",
        ),
        pytest.param(
            of_main(resources={"limits": {"memory": "8Gi"}}),
            (),
            {"cpu": "4", "memory": "8Gi"},
            {"memory": "8Gi"},
            id="a limit below the request lowers it",
        ),
        pytest.param(
            of_main(resources={"limits": {"memory": "24Gi"}, "requests": {"ephemeral-storage": "9Gi"}}),
            ("cpu", "ephemeral-storage"),
            {"cpu": "4", "memory": "16G", "ephemeral-storage": "9Gi"},
            {"memory": "24Gi", "cpu": "4", "ephemeral-storage": "9Gi"},
            id="those that are given stay",
        ),
    ],
)
def test_limits_and_requests_agree(
    patch: Json, limited: tuple[str, ...], requests: Json, limits: Json
) -> None:
    pod = made(patch, limited=limited)
    assert main_of(pod)["resources"] == {
        "requests": {**requests, "nvidia.com/gpu": "1"},
        "limits": {"nvidia.com/gpu": "1", **limits},
    }
    unpacker = pod["spec"]["initContainers"][0]["resources"]
    assert unpacker == {"requests": requests, **({"limits": limits} if limits else {})}


# --- privileges -----------------------------------------------------------------------------------------------


def test_the_privileges_that_a_team_may_have_are_those_that_are_found() -> None:
    assert get_args(PodPrivilege) == pod_rules.PRIVILEGES


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}, "hostPath"),
        ({"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}, "secrets"),
        ({"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]}, "secrets"),
        (
            {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]},
            "serviceAccountName",
        ),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"hostPID": True}, "hostPID"),
        ({"hostIPC": True}, "hostIPC"),
        ({"serviceAccountName": "x"}, "serviceAccountName"),
        ({"automountServiceAccountToken": True}, "serviceAccountName"),
        ({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}, "privileged"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "privileged"),
        ({"securityContext": {"seccompProfile": None}}, "privileged"),
        (of_main(securityContext={"privileged": True})["spec"], "privileged"),
        (of_main(securityContext={"allowPrivilegeEscalation": None})["spec"], "privileged"),
        (of_main(securityContext={"capabilities": {"add": ["NET_ADMIN"]}})["spec"], "privileged"),
        (of_main(ports=[{"containerPort": 1, "hostPort": 1}])["spec"], "hostNetwork"),
        (of_main(envFrom=[{"secretRef": {"name": "s"}}])["spec"], "secrets"),
        (
            {
                "initContainers": [
                    {"name": "x", "image": "x", "env": [{"name": "A", "valueFrom": {"secretKeyRef": {}}}]}
                ]
            },
            "secrets",
        ),
    ],
)
def test_a_privilege_is_found_wherever_it_is(spec: Json, name: str) -> None:
    patch = {"spec": spec}
    assert not pod_rules.problems(patch)
    assert {found for found, _ in pod_rules.privileges(patch)} == {name}
    assert not list(pod_rules.beyond(patch, (name,), "kubernetes.pod"))
    (sentence,) = pod_rules.beyond(patch, (), "kubernetes.pod")
    assert sentence.startswith("kubernetes.pod.spec.")
    assert sentence.endswith(f": operators may not set {name}")


def test_what_concerns_the_pod_alone_is_no_privilege() -> None:
    patch = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "volumes": [WEIGHTS, {"name": "c", "configMap": {"name": "c"}}],
            "priorityClassName": "high",
            "securityContext": {"runAsNonRoot": True},
            "tolerations": [A],
        },
    }
    assert pod_rules.privileges(patch) == []


def test_images_of_sidecars_are_held_against_those_of_the_team() -> None:
    patch = {
        "spec": {
            "containers": [{"name": "x", "image": "docker.io/x:1"}],
            "volumes": [{"name": "v", "image": {"reference": "y"}}],
        }
    }
    assert list(pod_rules.other_images(patch, None, "p")) == []
    assert list(pod_rules.other_images(patch, ("docker:docker.io/*",), "p")) == [
        "p.spec.volumes[0].image: y: operators may use docker:docker.io/*"
    ]


def test_a_patch_that_is_nested_too_deeply_is_refused() -> None:
    deep: Json = {}
    for _ in range(2000):
        deep = {"a": deep}
    (found,) = pod_rules.problems({"spec": {"dnsConfig": deep}})
    assert str(found) == "is nested too deeply"


@pytest.mark.parametrize("key", ["env", "volumeMounts", "ports"])
def test_lists_of_the_main_container_are_not_replaced(key: str) -> None:
    found = pod_rules.problems(of_main(**{key: [{"$patch": "replace"}]}))
    assert found[0].at == ("spec", "containers", 0, key)


def test_sources_that_are_no_list_are_left_to_the_server() -> None:
    assert pod_rules.privileges({"spec": {"volumes": [{"name": "v", "projected": {"sources": 5}}]}}) == []
