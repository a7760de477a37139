"""Records of machines, which outlive them: an SSH public key resource of the machine's name, with tags.

Azure forgets a machine that is deleted, a spot machine that it takes back included. The record says what it was and how it terminated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from azure.mgmt.compute.models import VirtualMachine

from policies.model import CapacityType
from provisioners.azure.api import Arm
from provisioners.azure.translate import (
    ENDED_TAG,
    group_of,
    machine_of,
    machine_of_record,
    name_of,
    record_body,
)
from provisioners.port.vm import Machine, MachineState


class Records:
    """Thread-safe. `labels` are the user's, which records carry as well."""

    def __init__(
        self, arm: Arm, subscription_id: str, labels: Mapping[str, str], now: Callable[[], float]
    ) -> None:
        self._arm = arm
        self._subscription_id = subscription_id
        self._labels = labels
        self._now = now

    def write(self, machine: Machine, ended: MachineState | None = None) -> None:
        """Write the record of the machine: that it runs, or how it `ended`."""
        body: Any = record_body(machine, ended, self._now(), self._labels)
        create = self._arm.compute.ssh_public_keys.create
        self._arm.call(lambda: create(group_of(machine.id), name_of(machine.id), body))

    def machine(self, group: str, token: str, vm: VirtualMachine | None) -> Machine | None:
        """Return the dead or dying machine of that token, if there is a record of it."""
        record = self._arm.find(lambda: self._arm.compute.ssh_public_keys.get(group, token))
        if record is None:
            return None
        if vm is not None:
            return machine_of(vm)
        machine = machine_of_record(record, self.vm_id(group, token))
        return machine if machine is None or ENDED_TAG in (record.tags or {}) else self.mark_gone(machine)

    def mark_gone(self, machine: Machine) -> Machine:
        """Write into the record that the machine is gone, and not by us."""
        spot = machine.capacity_type is CapacityType.SPOT
        ended = MachineState.PREEMPTED if spot else MachineState.TERMINATED
        self.write(machine, ended)
        record = self._arm.call(
            lambda: self._arm.compute.ssh_public_keys.get(group_of(machine.id), name_of(machine.id))
        )
        return machine_of_record(record, machine.id) or machine

    def vm_id(self, group: str, token: str) -> str:
        subscription = f"/subscriptions/{self._subscription_id}"
        return f"{subscription}/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{token}"
