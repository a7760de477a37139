"""docs/howto/company-cluster.md: each patch on it makes a Pod that Kubernetes knows, and that the namespace it is for admits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.model import CapacityType, Offer, Zone
from provisioners.kubernetes import agent_objects, pod_rules, translate
from provisioners.kubernetes.dead_man import job_of
from provisioners.kubernetes.settings import Cluster
from provisioners.port.agents import AgentRelease
from provisioners.port.base import Cache, LaunchOrder
from skyserve_cli.config_kubernetes import KubernetesConfig
from skyserve_cli.controller.reconcile.mappers import cache_of
from skyserve_cli.spec.load import load_text
from tests.clouds.kubernetes import kube_schemas
from tests.clouds.kubernetes.kube_admission import Admission, violations

Json = dict[str, Any]
PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "company-cluster.md").read_text()
OFFER = Offer(Zone("kubernetes", "prod", "zone-a"), "4cpu-16gb", "L4", 1.0, CapacityType.ON_DEMAND, 0.4)
ORDER = LaunchOrder("chat-1", "me", "chat", 1, 1, OFFER, None, "serve", secrets={"A": "b"})


def blocks() -> list[tuple[str, Json]]:
    """Return each block of YAML with the heading above it."""
    found, heading = [], ""
    for line in re.finditer(r"^#+ ([^\n]*)$|```yaml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL):
        heading = line[1] or heading
        if line[2]:
            found.append((heading, yaml.safe_load(line[2])))
    return found


def pods_of(block: Json) -> list[Json]:
    """Return the Pods of a replica and of a load balancer under the patches of a block."""
    if "clouds" in block:
        cluster = KubernetesConfig.model_validate(block["clouds"]["kubernetes"]).clusters()[0]
        order = ORDER
    else:
        text = yaml.safe_dump({"name": "x", "service": {}, "run": "x", **block})
        spec = load_text(text, needs_values=False).spec
        cluster = Cluster("prod")
        order = replace(ORDER, pod=spec.pod, cache=cache_of("me", "", "chat", spec))
    cluster = replace(cluster, agent_image=cluster.agent_image or "agent:1")
    deployment = agent_objects.deployment_of(ORDER, cluster)
    template = agent_objects.with_release(deployment, AgentRelease("r", (), (8000,)), cluster, "")["spec"][
        "template"
    ]
    template["metadata"]["name"] = "agent"
    return [translate.pod_of(order, 0, cluster, "ml"), {"apiVersion": "v1", "kind": "Pod", **template}]


BLOCKS = [(heading, block) for heading, block in blocks() if "kubernetes" in block or "clouds" in block]


def test_the_page_has_a_patch_for_each_kind_of_namespace() -> None:
    assert {heading for heading, _ in BLOCKS} == {
        "Change the Pods",
        "What a service file may not do",
        "PodSecurity",
        "Quotas and LimitRanges",
        "Queues",
        "Meshes",
        "Private registries",
        "Weights that outlive a replica",
        "Weights on a volume",
        "No way out",
    }


@pytest.mark.parametrize(("heading", "block"), BLOCKS)
def test_each_patch_makes_pods_that_kubernetes_knows(heading: str, block: Json) -> None:
    for pod in pods_of(block):
        kube_schemas.check(pod)


def test_the_patch_for_pod_security_passes_restricted_and_load_balancers_and_the_reaper_do_without() -> None:
    (block,) = [block for heading, block in BLOCKS if heading == "PodSecurity"]
    for pod in pods_of(block):
        assert list(violations(pod["spec"], "restricted")) == []
    plain = translate.pod_of(ORDER, 0, Cluster("prod"), "ml")
    assert list(violations(plain["spec"], "baseline")) == []
    job = job_of("me", "ml", Cluster("prod"))["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert list(violations(job, "restricted")) == []


def test_a_cache_in_a_claim_passes_restricted_and_one_on_a_node_is_where_the_cluster_says() -> None:
    claim, node = [block for heading, block in BLOCKS if heading == "Weights that outlive a replica"]
    pod = pods_of(claim)[0]
    assert list(violations(pod["spec"], "restricted")) == []
    assert pod["spec"]["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "weights"}
    cluster = KubernetesConfig.model_validate(node["clouds"]["kubernetes"]).clusters()[0]
    kept = translate.pod_of(replace(ORDER, cache=Cache("me/-/chat", ("HF_HOME",))), 0, cluster, "ml")
    assert kept["spec"]["volumes"][-1]["hostPath"]["path"] == "/mnt/disks/ssd0/skyserve/ml/me/-/chat"
    (made,) = [block for heading, block in blocks() if block.get("kind") == "PersistentVolumeClaim"]
    kube_schemas.check(made)


def test_the_patch_for_quotas_is_admitted_where_each_limit_is_wanted() -> None:
    (block,) = [block for heading, block in BLOCKS if heading == "Quotas and LimitRanges"]
    for pod, hard in zip(
        pods_of(block),
        (
            {"limits.cpu": 64, "limits.memory": 1e12, "limits.ephemeral-storage": 1e12},
            {"limits.cpu": 64, "limits.memory": 1e12},
        ),
        strict=True,
    ):
        Admission(quota=("team", hard)).admit_pod(pod, [], [])


def test_the_privileges_are_those_of_the_table() -> None:
    table = PAGE.partition("| privilege | keys |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert tuple(named) == pod_rules.PRIVILEGES
