"""The clouds that rent machines under the contract: the fleet over each cloud's machines, by the unmodified official SDK,
against servers that are as strict as the clouds. Hosts are in memory."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.assembly import within
from provisioners.contract.machines import MachinesSubject
from provisioners.offers.catalog import Catalog, packaged
from provisioners.port.base import Candidate, LaunchOrder
from provisioners.port.regions import LONGEST_SILENT_S
from provisioners.port.vm import Machines, machine_token
from tests.clouds.aws.aws_bench import aws_bench
from tests.clouds.azure.azure_harness import azure
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import VM
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_controller import controller
from tests.clouds.gcp.gcp_parts import Fault


@dataclass(frozen=True)
class SmallCatalog:
    """What a world has of a cloud's packaged catalog: these regions, and of them these zones (None: all)."""

    cloud: str
    regions: tuple[str, ...]
    zones: tuple[str, ...] | None = None

    def read(self) -> Catalog:
        listings = within(packaged().of(self.cloud), self.regions, self.cloud).listings
        if self.zones is None:
            return Catalog(listings)
        kept = [
            replace(one, spot={zone: price for zone, price in one.spot.items() if zone in self.zones})
            for one in listings
        ]
        return Catalog(tuple(one for one in kept if one.spot))


class RentedSubject(MachinesSubject):
    catalog: ClassVar[SmallCatalog]

    def __init__(self, _home: Path) -> None:
        super().__init__()

    def listed_types(self) -> Catalog:
        return self.catalog.read()

    #: The responses of the cloud to launches that it refuses in a region: (HTTP status, code, message).
    refusals: ClassVar[tuple[tuple[int, str, str], ...]]

    @abstractmethod
    def refuse(self, region: str, refusal: tuple[int, str, str]) -> None:
        """From now on launches in the region are refused, until `relent`."""

    @abstractmethod
    def relent(self) -> None:
        """No trouble of any kind any more."""

    @abstractmethod
    def billed(self) -> int:
        """How many machines there really are."""


class AwsSubject(RentedSubject):
    catalog = SmallCatalog("aws", ("us-east-1", "us-west-2"))
    accelerator_count = 4.0

    def open(self) -> None:
        self.bench = self.stack.enter_context(
            aws_bench(self.stack.enter_context(pytest.MonkeyPatch.context()))
        )
        self.world, self.now, self.sleep = self.bench.world, self.bench.time.now, self.bench.time.sleep

    def machines(self) -> Machines:
        return self.bench.fresh(regions=self.catalog.regions)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        taken = len(self.world.live(skyserve_capacity=capacity_type.value))
        market = "spot" if capacity_type is CapacityType.SPOT else "on-demand"
        instance_type = self.offer(Candidate(use_spot=capacity_type is CapacityType.SPOT)).instance_type
        self.world.room[zone.name, instance_type, market] = max(0, count - taken)

    def preempt_node(self, token: str, rank: int) -> None:
        (instance,) = self.world.live(skyserve_token=machine_token(token, rank))
        self.world.preempt(instance)

    def warn_node(self, token: str, rank: int) -> None:
        """EC2's own lists tell, too."""
        (instance,) = self.world.live(skyserve_token=machine_token(token, rank))
        self.world.warn(instance)

    def cut_answers(self) -> None:
        self.world.cut("RunInstances", times=50, after=True)

    def calm(self) -> None:
        self.world.calm()

    def exhaust_quota(self, offer: Offer) -> str:
        self.world.quota_vcpus[offer.zone.region, "L-3819A6DF"] = 0
        return "L-3819A6DF"

    def refuse_us(self) -> None:
        self.world.fail("*", "AuthFailure", times=1000)

    refusals = (
        (400, "InvalidParameterCombination", "is not supported in your requested Availability Zone"),
        (400, "InvalidParameterValue", "Invalid value 'x' for InstanceType."),
        (400, "InvalidAMIID.NotFound", ""),
        (400, "SomethingNew", "never heard of"),
        (403, "UnauthorizedOperation", "explicit deny in a service control policy"),
        (401, "OptInRequired", "You are not subscribed to this service."),
        (403, "UnauthorizedOperation", "not authorized to perform: ec2:RunInstances"),
        (400, "MaxSpotInstanceCountExceeded", ""),
        (400, "VolumeLimitExceeded", ""),
        (500, "InsufficientInstanceCapacity", ""),
    )

    def refuse(self, region: str, refusal: tuple[int, str, str]) -> None:
        _, code, message = refusal
        self.world.fail("RunInstances", code, times=10_000, region=region, message=message)

    def relent(self) -> None:
        self.world.calm()

    def billed(self) -> int:
        return len(self.world.live())

    def throttle(self) -> None:
        self.world.fail("RunInstances", "RequestLimitExceeded", times=8)

    def launch_to_fail(self, order: LaunchOrder) -> None:
        instance = self.cloud.launch(order)
        self.world.end(instance.id, "Server.InternalError", "Server.InternalError: Internal error on launch")

    def mute(self, zone: Zone) -> None:
        self.world.fail("*", "InternalError", times=10_000, region=zone.region)

    def unmute(self) -> None:
        self.world.calm()
        self.sleep(LONGEST_SILENT_S)  # until it is asked again

    def list_late(self, seconds: float) -> None:
        self.world.listed_after_s = seconds


class GcpSubject(RentedSubject):
    catalog = SmallCatalog(
        "gcp",
        ("us-central1", "us-east1", "europe-west4"),
        ("us-central1-a", "us-central1-b", "us-central1-c", "us-east1-b", "europe-west4-a"),
    )

    def open(self) -> None:
        self.controller = self.stack.enter_context(controller())
        self.world = self.controller.world
        self.now, self.sleep = self.world.clock.now, self.world.advance

    def machines(self) -> Machines:
        return self.controller.another()

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.world.room[zone.name, capacity_type is CapacityType.SPOT] = count

    def preempt_node(self, token: str, rank: int) -> None:
        name = machine_token(token, rank)
        (zone,) = [zone for zone, found in self.world.instances if found == name]
        self.world.preempt(zone, name)

    def cut_answers(self) -> None:
        self.world.faults.append(Fault("compute.instances.insert", after=True, times=50))

    def calm(self) -> None:
        self.world.faults.clear()
        self.world.dead_token = False

    def exhaust_quota(self, offer: Offer) -> str:
        self.world.quotas[offer.zone.region, "PREEMPTIBLE_NVIDIA_L4_GPUS"] = 0.0
        return "PREEMPTIBLE_NVIDIA_L4_GPUS"

    def refuse_us(self) -> None:
        self.world.dead_token = True

    refusals = (
        (
            412,
            "conditionNotMet",
            "Location x violates constraint constraints/gcp.resourceLocations on the resource x",
        ),
        (412, "conditionNotMet", "Constraint constraints/compute.newOne violated for project 1"),
        (400, "invalid", "Invalid value for field 'zone': 'x'. Unknown zone."),
        (400, "badRequest", "[pd-balanced] features are not compatible for creating instance."),
        (400, "invalid", "Instance type x only supports Spot or Flex-start provisioning model"),
        (400, "somethingNew", "never heard of"),
        (403, "quotaExceeded", "Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region x."),
        (403, "forbidden", "Location x not found or access is unauthorized."),
        (503, "backendError", "The zone does not have enough resources available"),
    )

    def refuse(self, region: str, refusal: tuple[int, str, str]) -> None:
        self.world.refusals[region] = refusal

    def relent(self) -> None:
        self.world.refusals.clear()
        self.world.room.clear()
        self.world.failing.clear()

    def billed(self) -> int:
        return len(self.world.alive())

    def throttle(self) -> None:
        self.world.faults.append(Fault("compute.instances.insert", 429, "rateLimitExceeded", times=3))

    def launch_to_fail(self, order: LaunchOrder) -> None:
        self.cloud.launch(replace(order, token=f"{order.token}-before"))  # the network is there after this
        self.world.operation_s = 150.0  # longer than anybody waits for it
        self.empty(order.offer.zone, order.offer.capacity_type)
        self.cloud.launch(order)

    def mute(self, zone: Zone) -> None:
        self.world.unreachable = {name for name in self.world.zones if name.startswith(zone.region)}

    def unmute(self) -> None:
        self.world.unreachable = set()

    def list_late(self, seconds: float) -> None:
        self.world.list_lag_s = seconds


class AzureSubject(RentedSubject):
    catalog = SmallCatalog("azure", ("eastus", "westeurope"))
    accelerator = "T4"
    accelerator_count = 4.0

    def open(self) -> None:
        self.world = AzureWorld()
        self.server = self.stack.enter_context(AzureServer(self.world).running())
        self.now, self.sleep = self.world.clock.now, self.world.pass_time

    def machines(self) -> Machines:
        return azure(self.server)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        is_spot = capacity_type is CapacityType.SPOT
        size = self.offer(Candidate(use_spot=is_spot)).instance_type
        living = [
            vm
            for vm in self.world.resources.values()
            if vm.kind == VM and (vm.body["properties"].get("priority") == "Spot") is is_spot
        ]
        self.world.room[zone.name, size, is_spot] = max(0, count - len(living))

    def preempt_node(self, token: str, rank: int) -> None:
        self.world.preempt(machine_token(token, rank))

    def cut_answers(self) -> None:
        self.server.fail("PUT", "/virtualMachines/", 0, is_after=True, times=50)

    def calm(self) -> None:
        self.server.faults.clear()
        self.world.token = "good-token"

    def exhaust_quota(self, offer: Offer) -> str:
        self.world.quota[offer.zone.region, "lowPriorityCores"] = 0
        return "LowPriorityCores"

    def refuse_us(self) -> None:
        self.world.token = "another"

    refusals = (
        (400, "InvalidParameter", "The requested VM size X is not available in the current region."),
        (409, "OperationNotAllowed", "The specified size 'X' does not support Spot priority"),
        (400, "BadRequest", "The selected VM size 'X' cannot boot Hypervisor Generation '2'"),
        (400, "InvalidAvailabilityZone", ""),
        (404, "PlatformImageNotFound", ""),
        (403, "RequestDisallowedByPolicy", "disallowed by policy 'Allowed locations'"),
        (403, "RequestDisallowedByPolicy", "disallowed by policy 'Require a tag'"),
        (400, "SomethingNew", "never heard of"),
        (409, "OperationNotAllowed", "exceeding approved LowPriorityCores quota. Current Limit: 0,"),
        (409, "SkuNotAvailable", ""),
    )

    def refuse(self, region: str, refusal: tuple[int, str, str]) -> None:
        status, code, message = refusal
        path = rf"-{region}-[^/]*/providers/.*virtualMachines/"
        self.server.fail("PUT", path, status, code, message, times=10_000)

    def relent(self) -> None:
        self.server.faults.clear()
        self.world.room.clear()
        self.world.failing, self.world.allocate_s = "at once", type(self.world)().allocate_s

    def billed(self) -> int:
        return len(self.world.alive())

    def throttle(self) -> None:
        wait = {"Retry-After": "17"}
        self.server.fail("PUT", "/virtualMachines/", 429, "TooManyRequests", "slow", headers=wait, times=8)

    def launch_to_fail(self, order: LaunchOrder) -> None:
        self.world.failing, self.world.allocate_s = "later", 300.0  # longer than anybody waits for it
        self.empty(order.offer.zone, order.offer.capacity_type)
        self.cloud.launch(order)

    def mute(self, zone: Zone) -> None:
        """Its machines are not listed, and not found by name either."""
        self.world.mute = zone.region
        self.server.fail(
            "GET",
            rf"-{zone.region}-[^/]*/providers/.*virtualMachines/",
            503,
            "ServerTimeout",
            "x",
            times=10_000,
        )

    def unmute(self) -> None:
        self.world.mute = ""
        self.server.faults.clear()

    def list_late(self, seconds: float) -> None:
        self.world.unseen_s = seconds

    def close(self) -> None:
        super().close()
        assert self.world.violations == []
