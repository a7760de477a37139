"""The clouds under the contract: how to make each, how to empty a zone, how to lose a response.

Here are those that are in memory or on this machine; `contract_rented` has those behind an official SDK, `contract_ssh`
real hosts.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

import pytest

from policies.model import CapacityType, FailureKind, Offer, Zone
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.contract.subject import SPOT, Subject
from provisioners.local import controls as local_controls
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.store import LocalStore
from provisioners.offers.zone_offers import ZonePrices, offers_for
from provisioners.port.base import InstanceState, LaunchOrder, Provisioner, Requirements
from provisioners.port.errors import QuotaError, Refusal, TransientError
from provisioners.port.host_port import HostReport
from provisioners.port.vm import MachineState, machine_token
from provisioners.vm_provisioner import VmProvisioner
from tests.clouds.fake import DEFAULT_PRICES, FakeProvisioner
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines, Trouble, lost, order_of


class FakeSubject(Subject):
    def __init__(self, _home: Path) -> None:
        self.time = 1000.0
        self.cloud: FakeProvisioner = FakeProvisioner(lambda: self.time)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.cloud.set_capacity(zone.name, count, capacity_type)

    def preempt_node(self, token: str, rank: int) -> None:
        self.cloud.preempt_node(token, rank)

    def warn_node(self, token: str, rank: int) -> None:
        self.cloud.preempt(token, notice_s=1e6)  # its nodes are warned together

    def report_notice(self, token: str, rank: int) -> None:
        self.warn_node(token, rank)

    def lose_response(self, order: LaunchOrder) -> None:
        self.cloud.fail_next_launch(TransientError("lost", cloud="fake"), after_creation=True)
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def exhaust_quota(self, offer: Offer) -> str:
        error = QuotaError("the quota 'GPUS' is used up", cloud="fake", zone=offer.zone)
        self.cloud.fail_next_launch(error)
        return "GPUS"

    def throttle(self) -> None:
        self.cloud.fail_next_launch(TransientError("too many calls", cloud="fake"))

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

    def preempt_node(self, token: str, rank: int) -> None:
        local_controls.preempt(self.home, token, node=rank)

    def warn_node(self, token: str, rank: int) -> None:
        local_controls.preempt(self.home, token, notice_s=1e6, node=rank)

    def lose_response(self, order: LaunchOrder) -> None:
        """A launcher that crashes with the response in its hands."""
        launcher = os.fork()
        if launcher == 0:
            try:
                LocalProvisioner(self.home).launch(order)
            finally:
                os._exit(0)
        os.waitpid(launcher, 0)

    def restarted(self) -> Provisioner:
        return LocalProvisioner(self.home)

    def pass_time(self) -> None:
        sleep(0.02)

    def close(self) -> None:
        for owner in ("owner-1", "owner-2"):
            for instance in self.cloud.instances(owner):
                self.cloud.terminate(instance)
        for node in LocalStore(self.home).nodes():
            assert not node.is_host_alive()
            assert not local_process.marked(LocalStore(self.home).node_id(node))


class MemoryFleet(VmProvisioner):
    name = CLOUD


class FleetSubject(Subject):
    """The fleet over machines in memory."""

    def __init__(self, _home: Path) -> None:
        self.time = 1000.0
        self.machines = MemoryMachines(lambda: self.time)
        self.cloud = self.restarted()

    def restarted(self) -> MemoryFleet:
        prices = [
            ZonePrices(zone, one.spot_usd_hour, one.on_demand_usd_hour)
            for zone, one in zip(ZONES, DEFAULT_PRICES, strict=True)
        ]

        def offer(need: Requirements) -> list[Offer]:
            return offers_for(need, prices, instance_type=CLOUD)

        self.hosts = MemoryHosts(lambda: self.time)
        return MemoryFleet(self.machines, self.hosts, order_of, offer, lambda: self.time)

    def set_room(self, zone: Zone, capacity_type: CapacityType, count: int) -> None:
        self.machines.room[zone.name, capacity_type] = count

    def preempt_node(self, token: str, rank: int) -> None:
        self.machines.take(machine_token(token, rank))

    def warn_node(self, token: str, rank: int) -> None:
        self.machines.kept[machine_token(token, rank)].preempt_at = self.time + 1e6

    def report_notice(self, token: str, rank: int) -> None:
        report = HostReport(InstanceState.RUNNING, 8000, preempt_at=self.time + 1e6)
        self.hosts.set_report(machine_token(token, rank), report)

    def lose_response(self, order: LaunchOrder) -> None:
        self.machines.after = Trouble(0, lost)
        with pytest.raises(TransientError):
            self.cloud.launch(order)

    def exhaust_quota(self, offer: Offer) -> str:
        error = QuotaError("the quota 'GPUS' is used up", cloud=CLOUD, zone=offer.zone)
        self.machines.before = Trouble(0, lambda: error)
        return "GPUS"

    def throttle(self) -> None:
        self.machines.before = Trouble(0, lambda: TransientError("too many calls", cloud=CLOUD))

    def launch_to_fail(self, order: LaunchOrder) -> None:
        self.cloud.launch(order)
        failed = self.machines.kept[order.token]
        failed.end = (MachineState.FAILED, "it could not be allocated")
        failed.refusal = Refusal(FailureKind.CAPACITY)

    def mute(self, zone: Zone) -> None:
        self.machines.mute.add(zone.region)

    def unmute(self) -> None:
        self.machines.mute.clear()

    def list_late(self, seconds: float) -> None:
        self.machines.late_s = seconds

    def pass_time(self) -> None:
        self.time += 10.0

    def close(self) -> None:
        """It was all in memory."""
