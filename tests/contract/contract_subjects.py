"""The clouds under the contract: how to make each, how to empty a zone, how to lose an answer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from policies.model import CapacityType, Offer, Zone
from provisioners.base import Candidate, Instance, LaunchOrder, Provisioner, Requirements
from provisioners.candidates import offers_of
from provisioners.catalog import Catalog, packaged
from provisioners.errors import TransientError
from provisioners.fake import DEFAULT_PRICES, FakeProvisioner
from provisioners.fleet import FleetProvisioner
from provisioners.local import controls as local_controls
from provisioners.local import process as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.store import LocalStore
from provisioners.machines import machine_token
from provisioners.offering import ZonePrices, offers_for
from provisioners.rented import Rent
from provisioners.rented import order_of as rented_order_of
from tests.clouds.aws.aws_bench import aws_bench
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryHosts, MemoryMachines, Trouble, lost, order_of

SPOT = Candidate(use_spot=True)
ON_DEMAND = Candidate(use_spot=False)


class Subject(ABC):
    """One cloud under the contract."""

    cloud: Provisioner
    accelerator_count = 2.0  # of L4, in one machine

    @abstractmethod
    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        """Room for so many nodes in the zone, those that live there included."""

    def empty(self, zone: Zone, capacity_type: CapacityType) -> None:
        """Leave no room in the zone for new launches."""
        self.set_room(zone, capacity_type, 0)

    @abstractmethod
    def lose_node(self, token: str, rank: int) -> None:
        """The cloud takes one node of an instance."""

    @abstractmethod
    def warn_node(self, token: str, rank: int) -> None:
        """The cloud says that it will take one node of an instance, long before it does."""

    @abstractmethod
    def lose_answer(self, order: LaunchOrder) -> None:
        """Send the order; the cloud accepts it and the answer never arrives."""

    @abstractmethod
    def pass_time(self) -> None:
        """A moment, for `eventually`."""

    @abstractmethod
    def close(self) -> None:
        """Check and remove what is left."""

    def eventually(self, holds: Callable[[], bool]) -> bool:
        for _ in range(200):
            if holds():
                return True
            self.pass_time()
        return False

    def offer(self, candidate: Candidate = SPOT) -> Offer:
        return self.cloud.offers(Requirements((candidate,)))[0]

    def order(
        self,
        replica_id: int = 1,
        owner: str = "owner-1",
        service: str = "chat",
        offer: Offer | None = None,
        num_nodes: int = 1,
    ) -> LaunchOrder:
        return LaunchOrder(
            token=f"{owner}-{service}-{replica_id}",
            owner=owner,
            service=service,
            replica_id=replica_id,
            version=1,
            offer=offer or self.offer(),
            setup=None,
            run="exec sleep 1000",
            num_nodes=num_nodes,
        )

    def listed(self, owner: str = "owner-1", service: str | None = None) -> dict[str, Instance]:
        return {instance.token: instance for instance in self.cloud.instances(owner, service)}


class FakeSubject(Subject):
    def __init__(self, _home: Path) -> None:
        self.time = 1000.0
        self.cloud: FakeProvisioner = FakeProvisioner(lambda: self.time)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.cloud.set_capacity(zone.name, count, capacity_type)

    def lose_node(self, token: str, rank: int) -> None:
        self.cloud.lose_node(token, rank)

    def warn_node(self, token: str, rank: int) -> None:
        self.cloud.preempt(token, notice_s=1e6)  # its nodes are warned together

    def lose_answer(self, order: LaunchOrder) -> None:
        self.cloud.fail_next_launch(TransientError("lost", cloud="fake"), after_creation=True)
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def pass_time(self) -> None:
        self.time += 10.0

    def close(self) -> None:
        """It was all in memory."""


class LocalSubject(Subject):
    def __init__(self, home: Path) -> None:
        self.home = home
        self.cloud: LocalProvisioner = LocalProvisioner(home)
        self.cloud.offers(Requirements((SPOT,)))  # writes cloud.yaml
        config = home / "local" / "cloud.yaml"
        config.write_text(config.read_text().replace("cold_start_s: 0.5", "cold_start_s: 0.05"))

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        local_controls.set_capacity(self.home, zone.name, count, capacity_type)

    def lose_node(self, token: str, rank: int) -> None:
        local_controls.preempt(self.home, token, node=rank)

    def warn_node(self, token: str, rank: int) -> None:
        local_controls.preempt(self.home, token, notice_s=1e6, node=rank)

    def lose_answer(self, order: LaunchOrder) -> None:
        """A launcher that dies with the answer in its hands."""
        launcher = os.fork()
        if launcher == 0:
            try:
                LocalProvisioner(self.home).launch(order)
            finally:
                os._exit(0)
        os.waitpid(launcher, 0)

    def pass_time(self) -> None:
        sleep(0.02)

    def close(self) -> None:
        for owner in ("owner-1", "owner-2"):
            for instance in self.cloud.instances(owner):
                self.cloud.terminate(instance)
        for node in LocalStore(self.home).nodes():
            assert not node.is_host_alive()
            assert not local_process.marked(LocalStore(self.home).node_id(node))


class MemoryFleet(FleetProvisioner):
    name = CLOUD


class AwsFleet(FleetProvisioner):
    name = "aws"


class FleetSubject(Subject):
    """The fleet over machines in memory."""

    def __init__(self, _home: Path) -> None:
        self.time = 1000.0
        self.machines = MemoryMachines(lambda: self.time)
        hosts = MemoryHosts(lambda: self.time)
        prices = [
            ZonePrices(zone, one.spot_usd_hour, one.on_demand_usd_hour)
            for zone, one in zip(ZONES, DEFAULT_PRICES, strict=True)
        ]

        def offer(need: Requirements) -> list[Offer]:
            return offers_for(need, prices, instance_type=CLOUD)

        self.cloud = MemoryFleet(self.machines, hosts, order_of, offer, lambda: self.time)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.machines.room[zone.name, capacity_type] = count

    def lose_node(self, token: str, rank: int) -> None:
        self.machines.take(machine_token(token, rank))

    def warn_node(self, token: str, rank: int) -> None:
        self.machines.kept[machine_token(token, rank)].preempt_at = self.time + 1e6

    def lose_answer(self, order: LaunchOrder) -> None:
        self.machines.after = Trouble(0, lost)
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def pass_time(self) -> None:
        self.time += 10.0

    def close(self) -> None:
        """It was all in memory."""


class AwsSubject(Subject):
    """The fleet over EC2, by the official SDK; hosts in memory. Where nothing is said of accelerators, L4 is meant: only of
    machines with them do we know spot prices."""

    accelerator_count = 4.0

    def __init__(self, _home: Path) -> None:
        self.stack = ExitStack()
        self.bench = self.stack.enter_context(
            aws_bench(self.stack.enter_context(pytest.MonkeyPatch.context()))
        )
        self.world, now = self.bench.world, self.bench.time.now
        self.machines = self.bench.fresh(regions=("us-east-1", "us-west-2"))
        regions = ("us-east-1", "us-west-2")
        catalog = Catalog(tuple(one for one in packaged().of("aws").listings if one.region in regions))

        def accelerated(candidate: Candidate) -> Candidate:
            return candidate if candidate.accelerator else replace(candidate, accelerator="L4")

        def machine_order(order: LaunchOrder, rank: int) -> object:
            return rented_order_of(order, rank, bytes(32), Rent())

        self.cloud = AwsFleet(
            self.machines,
            MemoryHosts(now),
            machine_order,  # type: ignore[arg-type]
            lambda need: offers_of(
                replace(need, candidates=tuple(map(accelerated, need.candidates))), catalog
            ),
            now,
        )

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        taken = len(self.world.live(skyserve_capacity=capacity_type.value))
        market = "spot" if capacity_type is CapacityType.SPOT else "on-demand"
        instance_type = self.offer(Candidate(use_spot=capacity_type is CapacityType.SPOT)).instance_type
        self.world.room[zone.name, instance_type, market] = max(0, count - taken)

    def lose_node(self, token: str, rank: int) -> None:
        (instance,) = self.world.live(skyserve_token=machine_token(token, rank))
        self.world.preempt(instance)

    def warn_node(self, token: str, rank: int) -> None:
        (instance,) = self.world.live(skyserve_token=machine_token(token, rank))
        self.world.warn(instance)

    def lose_answer(self, order: LaunchOrder) -> None:
        self.world.cut("RunInstances", times=50, after=True)
        with pytest.raises(TransientError):
            self.cloud.launch(order)
        self.world.calm()

    def pass_time(self) -> None:
        self.bench.time.sleep(10.0)

    def close(self) -> None:
        self.stack.close()


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "aws": AwsSubject,
    "fake": FakeSubject,
    "fleet": FleetSubject,
    "local": LocalSubject,
}
