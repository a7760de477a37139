"""From the nodes of a cluster to offers and prices, and why there are none. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.kubernetes import nodes, placement, prices
from provisioners.kubernetes.settings import Cluster, NodePool, NodePrice
from provisioners.port.base import Candidate, Requirements

NOW = 1_800_000_000.0
CREATED = "2027-01-15T08:00:00Z"  # NOW
ZONE = Zone("kubernetes", "prod", "zone-a")
CLUSTER = Cluster("prod")


def node(
    name: str, *, spot: bool = False, gpus: int = 0, taints: list[dict[str, str]] | None = None, **labels: str
) -> dict[str, Any]:
    marks = {
        placement.ZONE_LABEL: "zone-a",
        **{key.replace("__", "/"): value for key, value in labels.items()},
    }
    marks |= {"karpenter.sh/capacity-type": "spot"} if spot else {}
    marks |= {"nvidia.com/gpu.product": "NVIDIA-L4"} if gpus else {}
    has = {"cpu": "7910m", "memory": "29Gi", "nvidia.com/gpu": str(gpus)}
    return {
        "metadata": {"name": name, "labels": marks},
        "spec": {"taints": taints or []},
        "status": {"allocatable": has},
    }


def offers(
    candidate: Candidate, *known: dict[str, Any], cluster: Cluster = CLUSTER, num_nodes: int = 1
) -> list[Offer]:
    shapes = nodes.shapes_of(known, cluster)
    return nodes.offers_of(Requirements((candidate,), num_nodes=num_nodes), [(cluster, shapes)])


def test_offers_are_of_nodes_that_could_hold_the_pod() -> None:
    (found,) = offers(
        Candidate(accelerator="L4", accelerator_count=2), node("a", gpus=4), node("b", gpus=1), node("c")
    )
    assert found == Offer(ZONE, "3.5cpu-14gb", "L4", 2.0, CapacityType.ON_DEMAND, 0.0, 0.0, places=2)
    assert offers(Candidate(accelerator="L4", accelerator_count=8), node("a", gpus=4)) == []
    assert offers(Candidate(cpus="8+"), node("a")) == []
    assert offers(Candidate(use_spot=True), node("a")) == []
    assert [one.instance_type for one in offers(Candidate(cpus="4", memory="8+"), node("a"))] == ["4cpu-8gb"]


def test_nodes_that_take_no_pod_of_ours_are_left_out() -> None:
    tainted = node("a", taints=[{"key": "team", "value": "other", "effect": "NoSchedule"}])
    assert offers(Candidate(), tainted) == []
    cluster = replace(CLUSTER, tolerations=({"key": "team", "operator": "Exists"},))
    assert len(offers(Candidate(), tainted, cluster=cluster)) == 1
    cordoned = node("a")
    cordoned["spec"]["unschedulable"] = True
    assert offers(Candidate(), cordoned) == []
    assert offers(Candidate(), node("a"), cluster=replace(CLUSTER, node_selector={"pool": "engines"})) == []


def test_a_pool_that_is_scaled_from_zero_is_offered_from_the_file() -> None:
    pool = NodePool(
        "zone-b", "L4", 1, 7.0, 26.0, spot=True, labels={"cloud.google.com/gke-accelerator": "nvidia-l4"}
    )
    (found,) = offers(Candidate(accelerator="L4", use_spot=True), cluster=replace(CLUSTER, pools=(pool,)))
    assert (found.zone.name, found.places, found.capacity_type) == ("zone-b", None, CapacityType.SPOT)
    shapes = nodes.shapes_of([], replace(CLUSTER, pools=(pool,)))
    assert nodes.accelerator_labels(shapes, "L4") == [("cloud.google.com/gke-accelerator", "nvidia-l4")]


def test_prices_are_those_of_the_file_and_nothing_else() -> None:
    table = {"L4": NodePrice(0.8, 0.2), "cpu": NodePrice(0.1)}
    assert prices.usd_hour(table, "L4", 2, CapacityType.SPOT) == 0.4
    assert prices.usd_hour(table, "L4", 2, CapacityType.ON_DEMAND) == 1.6
    assert prices.usd_hour(table, None, 0, CapacityType.SPOT) == 0.1
    assert prices.usd_hour(table, "H100", 1, CapacityType.ON_DEMAND) == 0.0


@pytest.mark.parametrize(
    ("region", "names"),
    [
        (None, ["prod"]),
        ("*", ["prod"]),
        ("prod", ["prod"]),
        ("prod:ml", ["prod"]),
        ("prod:batch", ["prod:batch"]),
        ("x", []),
    ],
)
def test_a_context_alone_means_its_first_namespace(region: str | None, names: list[str]) -> None:
    clusters = [Cluster("prod", "prod", "ml"), Cluster("prod:batch", "prod", "batch", is_first=False)]
    assert [one.region for one in clusters if one.is_meant(region)] == names


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("NVIDIA-L4", "L4"),
        ("Tesla-T4-SHARED", "T4"),
        ("NVIDIA-A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("nvidia-tesla-a100", "A100"),
        ("nvidia-h100-80gb", "H100"),
        ("a10g", "A10G"),
        ("NVIDIA-GeForce-RTX-4090", "RTX-4090"),
    ],
)
def test_names_of_accelerators(value: str, name: str) -> None:
    assert placement.named(value) == name


@pytest.mark.parametrize(("ready", "count"), [("True", 1), ("False", 0), ("Unknown", 0)])
def test_a_node_that_is_not_ready_is_not_offered_and_its_gpus_are_gone(ready: str, count: int) -> None:
    one = node("a", gpus=4)
    one["status"]["conditions"] = [{"type": "Ready", "status": ready}]
    assert len(nodes.shapes_of([one], CLUSTER)) == count


def test_why_there_is_no_offer() -> None:
    shapes = nodes.shapes_of([node("a", gpus=4)], CLUSTER)
    known = [(CLUSTER, shapes)]
    asked = {
        "region": Candidate(region="nowhere"),
        "use_spot": Candidate(use_spot=True),
        "zone": Candidate(zone="zone-x"),
        "accelerator": Candidate(accelerator="H100"),
        "accelerator_count": Candidate(accelerator="L4", accelerator_count=8),
    }
    for field, candidate in asked.items():
        found = nodes.explain_no_offer(candidate, known)
        assert found is not None
        assert found.field == field
    assert nodes.explain_no_offer(Candidate(accelerator="L4"), known) is None
