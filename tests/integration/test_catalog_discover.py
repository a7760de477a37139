"""What accounts can have, by the official SDKs against strict fakes of three clouds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from policies.model import CapacityType, Zone
from provisioners.offers.catalog import Catalog, packaged
from provisioners.offers.catalog.discovered import (
    Discovery,
    RegionalType,
    reasons,
    shapes_of,
    with_discovered,
)
from provisioners.port.errors import ProvisionError
from tests.clouds.aws.aws_bench import AwsBench, aws_bench
from tests.clouds.azure.azure_harness import azure
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_controller import Controller, controller
from tests.clouds.gcp.gcp_ground import MachineType

SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    with aws_bench(monkeypatch) as opened:
        yield opened


@pytest.fixture
def gcp() -> Iterator[Controller]:
    with controller() as found:
        yield found


@pytest.fixture
def azure_world() -> Iterator[tuple[AzureWorld, AzureServer]]:
    world = AzureWorld()
    with AzureServer(world).running() as server:
        yield world, server
    assert world.violations == []


def quiet(done: int, of: int, what: str) -> None:
    pass


def by_place(found: Discovery) -> dict[tuple[str, str], RegionalType]:
    return {(one.shape.name, one.region): one for one in found.offerings}


# --- AWS -----------------------------------------------------------------------------------------------------------------


def test_aws_lists_types_zones_markets_and_quotas(bench: AwsBench) -> None:
    bench.world.page_size = 40
    bench.world.quota_vcpus |= {
        ("us-east-1", "L-DB2E81BA"): 64,
        ("us-east-1", "L-3819A6DF"): 0,
        ("us-west-2", "L-DB2E81BA"): 8,
    }
    machines = bench.fresh(regions=("us-east-1", "us-west-2"))
    seen: list[tuple[int, int]] = []
    found = machines.discover(shapes_of(packaged(), "aws"), lambda done, of, what: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    assert (found.regions, found.notes) == (("us-east-1", "us-west-2"), ())
    offered = by_place(found)
    l4 = offered["g6.xlarge", "us-east-1"]
    assert (l4.shape.accelerator, l4.shape.accelerator_count, l4.shape.vcpus, l4.shape.memory_gib) == (
        "L4",
        1,
        4,
        16,
    )
    assert set(l4.zones) <= {f"use1-az{number}" for number in range(1, 7)}
    assert len(l4.zones) >= 3
    why = "the quota All G and VT Spot Instance Requests (L-3819A6DF) is 0 vCPUs in us-east-1, and g6.xlarge has 4"
    assert l4.closed == {SPOT: why}
    assert ON_DEMAND in offered["g6.12xlarge", "us-west-2"].closed  # 48 of 8 vCPUs
    assert ON_DEMAND not in offered["g6.xlarge", "us-west-2"].closed
    assert offered["p4de.24xlarge", "us-east-1"].shape.accelerator == "A100-80GB"
    assert offered["p4d.24xlarge", "us-east-1"].shape.accelerator == "A100"
    assert not any(one.shape.name.startswith("g5g") for one in found.offerings)  # of another architecture
    assert {one.shape.name for one in found.offerings if one.shape.accelerator is None} <= {
        shape.name for shape in shapes_of(packaged(), "aws") if shape.accelerator is None
    }


def test_aws_shapes_are_those_of_the_catalog(bench: AwsBench) -> None:
    found = bench.fresh(regions=("us-east-1",)).discover(shapes_of(packaged(), "aws"), quiet)
    known = {shape.name: shape for shape in shapes_of(packaged(), "aws")}
    both = [(one.shape, known[one.shape.name]) for one in found.offerings if one.shape.name in known]
    assert len(both) >= 20
    assert [pair for pair in both if pair[0] != replace(pair[1], no_on_demand=False)] == []


def test_aws_adds_what_the_catalog_lacks(bench: AwsBench) -> None:
    found = bench.fresh(regions=("us-east-1",)).discover(shapes_of(packaged(), "aws"), quiet)
    known = packaged().of("aws")
    lacking = Catalog(tuple(each for each in known.listings if not each.shape.name.startswith("g6.")))
    merged = Catalog(tuple(with_discovered(lacking.listings, [found])))
    rows = [row for row in merged.by_accelerator["L4"] if row.shape.name == "g6.xlarge"]
    assert {row.zone.region for row in rows} == {"us-east-1"}
    assert all(row.spot is None for row in rows)


def test_aws_goes_on_without_quotas_and_without_a_region(bench: AwsBench) -> None:
    bench.world.denied = {"ListServiceQuotas"}
    bench.world.fail("DescribeInstanceTypes", "UnauthorizedOperation", times=9, region="us-west-2")
    found = bench.fresh(regions=("us-east-1", "us-west-2")).discover(shapes_of(packaged(), "aws"), quiet)
    assert found.regions == ("us-east-1",)
    assert all(one.closed.keys() <= {SPOT} for one in found.offerings)
    assert sorted(note.partition(":")[0] for note in found.notes) == [
        "quotas of us-east-1",
        "quotas of us-west-2",
        "us-west-2",
    ]
    reason = reasons([found], lambda: found.at)
    l4 = by_place(found)["g6.xlarge", "us-east-1"].shape
    assert reason(l4, Zone("aws", "us-west-2", "usw2-az1"), SPOT) == ""


# --- Google Cloud --------------------------------------------------------------------------------------------------------


def test_gcp_lists_types_zones_and_quotas(gcp: Controller) -> None:
    gcp.world.machine_types = {
        **gcp.world.machine_types,
        "a3-megagpu-8g": MachineType(208, 1872 * 1024, (("nvidia-h100-mega-80gb", 8),)),
        "ct5lp-hightpu-1t": MachineType(24, 49152, (("ct5lp", 1),)),
    }
    gcp.world.quotas |= {
        ("us-central1", "NVIDIA_L4_GPUS"): 0,
        ("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS"): 4,
    }
    known = shapes_of(packaged(), "gcp")
    found = gcp.machines.discover(known, quiet)
    offered = by_place(found)
    assert set(found.regions) == {"us-central1", "us-east1", "europe-west4"}
    l4 = offered["g2-standard-4", "us-central1"]
    assert l4.zones == ("us-central1-a", "us-central1-b", "us-central1-c")
    assert l4.closed == {ON_DEMAND: "the quota NVIDIA_L4_GPUS is 0 in us-central1, and g2-standard-4 has 1"}
    assert offered["g2-standard-4", "us-east1"].closed == {}
    assert offered["a2-highgpu-1g", "us-central1"].shape.accelerator == "A100"
    assert offered["a3-megagpu-8g", "us-east1"].shape.accelerator == "H100-MEGA"
    assert not any("tpu" in one.shape.name for one in found.offerings)
    attached = {one.shape.name for one in found.offerings if "+" in one.shape.name}
    assert attached
    assert attached <= {shape.name for shape in known}
    assert all(one.zones == ("us-central1-a",) for one in found.offerings if "+" in one.shape.name)


# --- Azure ---------------------------------------------------------------------------------------------------------------


def test_azure_lists_sizes_zones_restrictions_and_quotas(azure_world: tuple[AzureWorld, AzureServer]) -> None:
    world, server = azure_world
    world.quota |= {("eastus", "lowPriorityCores"): 3, ("eastus", "StandardNCADSA100v4Family"): 0}
    world.closed_zones["westeurope", "Standard_NC4as_T4_v3"] = ("2",)
    found = azure(server, regions=()).discover(shapes_of(packaged(), "azure"), quiet)
    offered = by_place(found)
    assert found.regions == ("eastus", "northcentralus", "westeurope")
    t4 = offered["Standard_NC4as_T4_v3", "eastus"]
    assert (t4.shape.accelerator, t4.shape.accelerator_count, t4.shape.vcpus) == ("T4", 1, 4)
    assert t4.zones == ("eastus-1", "eastus-2", "eastus-3")
    why = "the quota lowPriorityCores is 3 vCPUs in eastus, and Standard_NC4as_T4_v3 has 4"
    assert t4.closed == {SPOT: why}
    assert set(offered["Standard_NC24ads_A100_v4", "eastus"].closed) == {SPOT, ON_DEMAND}
    assert offered["Standard_NC4as_T4_v3", "westeurope"].zones == ("westeurope-1", "westeurope-3")
    assert offered["Standard_NC4as_T4_v3", "northcentralus"].zones == ("northcentralus",)


def test_azure_sizes_that_are_closed_have_the_reason(azure_world: tuple[AzureWorld, AzureServer]) -> None:
    world, server = azure_world
    world.closed_sizes = {"Standard_NC4as_T4_v3"}
    found = azure(server, regions=("eastus",)).discover(shapes_of(packaged(), "azure"), quiet)
    t4 = by_place(found)["Standard_NC4as_T4_v3", "eastus"]
    assert t4.zones == ()
    reason = reasons([found], lambda: found.at)
    assert "Azure has closed Standard_NC4as_T4_v3 in eastus" in reason(
        t4.shape, Zone("azure", "eastus", "eastus-1"), SPOT
    )


def test_credentials_that_do_not_work_are_an_error(azure_world: tuple[AzureWorld, AzureServer]) -> None:
    world, server = azure_world
    world.not_actions = ["Microsoft.Compute/skus/read"]
    with pytest.raises(ProvisionError, match="skus"):
        azure(server, regions=("eastus",)).discover(shapes_of(packaged(), "azure"), quiet)
