"""Machines of Azure.

One PUT makes a machine with its card, address and disk, named by the order's token (`azure_shapes`); deleting the
machine deletes them. A PUT of the same name is the same machine, so a response that was lost is requested again.

Azure accepts orders that it cannot fill: a machine whose allocation fails seconds later stays behind as "Failed", with a
card and an address, and a spot machine may be taken back before it ever ran, which shows as a 404 out of nowhere. So
`create` watches until the machine has power, up to `AzureSettings.allocation_wait_s`, undoes what has failed and raises
what it means; what takes longer is PENDING and shows in `machines`.

A spot machine that Azure takes back is deleted, disk and all (evictionPolicy Delete: nothing of it is billed, and its
cores count towards no quota). It is known as PREEMPTED by its record: see `azure_shapes`. A user who deletes a spot
machine in the portal is therefore taken for Azure.

Subscription-wide lists lag behind by seconds. A machine that was just created may be missing from `machines`, unless it
has its record already: what a record speaks of is requested by name before it counts as dead.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from azure.core.credentials import TokenCredential
from azure.identity import DefaultAzureCredential
from azure.mgmt.compute.models import VirtualMachine

from policies.model import CapacityType, Scope
from provisioners.azure import check as azure_check
from provisioners.azure import orphans as azure_orphans
from provisioners.azure.api import Arm
from provisioners.azure.discovery import discover
from provisioners.azure.errors import CLOUD, AzureFailure, error_of
from provisioners.azure.network import Networks, addresses_by_vm
from provisioners.azure.outbound import outbound
from provisioners.azure.prices import region_spot_prices
from provisioners.azure.settings import AzureSettings
from provisioners.azure.sovereign_clouds import CLOUDS
from provisioners.azure.translate import (
    DISK_SUFFIX,
    ENDED_TAG,
    IMAGES,
    Addresses,
    failure_of,
    group_name,
    group_of,
    is_deleting,
    machine_body,
    machine_of,
    machine_of_record,
    name_of,
    record_body,
    statuses_of,
)
from provisioners.clock import unix_now
from provisioners.offers.catalog.discovered import Discovery, Progress
from provisioners.offers.catalog.model import Shape
from provisioners.offers.reservations import reserved_for
from provisioners.port.errors import InvalidRequestError, ProvisionError, RefusedError, TransientError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import (
    OWNER_TAG,
    Finding,
    Machine,
    MachineOrder,
    MachineState,
    OrphanedResource,
    Silent,
    default_image,
    in_region,
)

_POLL_S = 3.0
_ABSENT_S = 20.0  # Azure returns 404 for a moment after it has accepted a machine

# Something the machine refers to is gone: it was removed meanwhile.
_NETWORK_IS_GONE = frozenset(
    {"ResourceGroupNotFound", "InvalidResourceReference", "ResourceNotFound", "NotFound"}
)


class AzureMachines:
    """See the module. `credential` is by default what the environment, `az login` or a managed identity gives."""

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        settings: AzureSettings,
        *,
        credential: TokenCredential | None = None,
        authentication_policy: object | None = None,
        now: Callable[[], float] = unix_now,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        self._now = now
        self._sleep = sleep
        sovereign = CLOUDS[settings.cloud]
        self._arm = Arm(
            settings.subscription_id,
            credential
            if credential is not None
            else DefaultAzureCredential(authority=sovereign.authority, process_timeout=20),
            base_url=settings.arm_url,
            cloud_setting=sovereign.setting,
            authentication_policy=authentication_policy,
            now=now,
            sleep=sleep,
            rng=rng if rng is not None else random.Random(),
        )
        self._records = Records(self._arm, settings.subscription_id, settings.labels, now)
        self.cloud_clock = self._arm.clock
        self.closed = ClosedRegions(now)
        self._known_addresses: Mapping[str, Addresses] = {}  # of whole ones, by the id of the machine
        self._networks = Networks(
            self._arm, settings.subnet_ids, settings.use_private_ip, now, sleep, settings.labels
        )

    # --- One machine --------------------------------------------------------------------------------------------------

    def create(self, order: MachineOrder) -> Machine:
        group = group_name(order.owner, order.service, order.zone.region)
        vm = self._arm.vm(group, order.token)
        if vm is None or is_deleting(vm):
            dead = self._records.machine(group, order.token, vm)
            if dead is not None:
                return dead
        if vm is None:
            self._order(group, order)
        elif is_deleting(vm):
            raise TransientError(
                f"an earlier {order.token} is still being deleted",
                cloud=CLOUD,
                zone=order.zone,
                retry_after_s=10.0,
            )
        elif (vm.tags or {}).get(OWNER_TAG) != order.owner:
            raise InvalidRequestError(f"{vm.id} belongs to another owner", cloud=CLOUD, zone=order.zone)
        try:
            outcome = self._await_power(group, order)
            if isinstance(outcome, Machine):
                self._records.write(outcome)
                self._label_disk(group, order)
                return outcome
        except TransientError:
            raise  # the same order will find it
        except ProvisionError:
            self._undo(group, order)
            raise
        self._undo(group, order)
        raise outcome

    def destroy(self, machine: Machine) -> None:
        if "/resourcegroups/" not in machine.id.lower():
            return  # an id that Azure never gave
        group, name = group_of(machine.id), name_of(machine.id)
        record = self._arm.find(lambda: self._arm.compute.ssh_public_keys.get(group, name))
        if record is None or ENDED_TAG not in (record.tags or {}):
            ended = MachineState.TERMINATED
            if machine.state is MachineState.PREEMPTED:
                ended = MachineState.PREEMPTED
            try:  # before it is so: an absence must not be taken for Azure's doing
                self._records.write(machine, ended)
            except ProvisionError as error:
                if error.code == "ResourceGroupNotFound":
                    return
                raise
        self._arm.delete_vm(group, name)

    def _order(self, group: str, order: MachineOrder) -> None:
        """The PUT. A network that is not there any more is set up again, once."""
        try:
            self._put(group, order)
        except ProvisionError as error:
            if error.code not in _NETWORK_IS_GONE:
                raise
            self._networks.doubt(order)
            self._put(group, order)

    def _put(self, group: str, order: MachineOrder) -> None:
        settings = self._settings
        body: Any = machine_body(
            order,
            self._networks.place(order),
            order.image or default_image(order, IMAGES),
            settings.identity,
            settings.dead_man_identity,
            self._encryption_set(order),
            reserved_for(order, settings.reservations),
        )
        put = self._arm.compute.virtual_machines.begin_create_or_update
        self._arm.call(
            lambda: put(group, order.token, body, polling=False).result(), order.zone, order.capacity_type
        )

    def _encryption_set(self, order: MachineOrder) -> str | None:
        """RefusedError where sets are named and the region has none: its disks would not be encrypted by them."""
        region, named = order.zone.region, self._settings.disk_encryption_set
        found = in_region(named, region)
        if found is None and named is not None:
            raise RefusedError(
                f"clouds.azure.disk_encryption_set has none for {region}",
                cloud=CLOUD,
                code="NoDiskEncryptionSet",
                zone=order.zone,
                scope=Scope.REGION,
            )
        return found

    def _label_disk(self, group: str, order: MachineOrder) -> None:
        """The disk gets the machine's tags, which cannot be ordered with it.

        Only billing uses them, so the machine is none the worse without; sending the order once more does this once more.
        """
        if order.labels:
            update: Any = {"tags": order.tags}
            begin = self._arm.compute.disks.begin_update
            with contextlib.suppress(ProvisionError):
                self._arm.call(
                    lambda: begin(group, order.token + DISK_SUFFIX, update, polling=False).result()
                )

    def _await_power(self, group: str, order: MachineOrder) -> Machine | ProvisionError:
        """The machine once it runs, or what Azure has made of it by then; or what its failure means."""
        started_at = seen_at = self._now()
        while True:
            vm = self._arm.vm(group, order.token)
            machine = None if vm is None else machine_of(vm)
            now = self._now()
            if vm is None or machine is None:
                if now - seen_at >= _ABSENT_S:
                    spot = order.capacity_type is CapacityType.SPOT
                    return self._failed("SpotEvicted" if spot else "OperationPreempted", "it is gone", order)
            elif machine.state is MachineState.FAILED:
                return self._failed(*failure_of(statuses_of(vm)), order)
            elif (
                machine.state is not MachineState.PENDING
                or now - started_at >= self._settings.allocation_wait_s
            ):
                return machine
            else:
                seen_at = now
            self._sleep(_POLL_S)

    def _failed(self, code: str, message: str, order: MachineOrder) -> ProvisionError:
        return error_of(AzureFailure(code, None, message), self._now(), order.zone, order.capacity_type)

    def _undo(self, group: str, order: MachineOrder) -> None:
        """Delete what has failed. If that cannot be requested either, it shows as FAILED and is destroyed later."""
        with contextlib.suppress(ProvisionError):
            self._arm.delete_vm(group, order.token)

    # --- All of an owner's --------------------------------------------------------------------------------------------

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        # The lists are the subscription's, and an error of theirs is one of all regions. A region is silent alone only for
        # the machines that are requested by name.
        found: dict[str, Machine] = {}
        for machine in self._listed(owner):
            found[machine.id.lower()] = machine
        for machine in self._unlisted(owner, found, silent):
            found[machine.id.lower()] = machine
        return sorted(found.values(), key=lambda machine: (machine.token, machine.rank))

    def _listed(self, owner: str) -> Iterator[Machine]:
        compute = self._arm.compute.virtual_machines
        vms = self._arm.call(lambda: list(compute.list_all()))
        ours = [vm for vm in vms if (vm.tags or {}).get(OWNER_TAG) == owner]
        if not ours:
            return
        views = {
            (vm.id or "").lower(): vm.properties.instance_view
            for vm in self._arm.call(lambda: list(compute.list_all(status_only="true")))
            if vm.properties is not None
        }
        addresses = self._addresses_of({(vm.id or "").lower() for vm in ours})
        for vm in ours:
            key = (vm.id or "").lower()
            if vm.properties is not None and key in views:
                vm.properties.instance_view = views[key]
            machine = machine_of(vm, addresses.get(key))
            if machine is not None:
                yield machine

    def _addresses_of(self, vm_ids: Collection[str]) -> Mapping[str, Addresses]:
        """They are static: only a machine that has none yet makes us list the subscription's cards and addresses."""
        if all(key in self._known_addresses for key in vm_ids):
            return self._known_addresses
        listed = addresses_by_vm(self._arm)
        is_private = self._settings.use_private_ip
        self._known_addresses = {
            key: at
            for key, at in listed.items()
            if key in vm_ids and (at.private if is_private else at.public)
        }
        return listed

    def _unlisted(
        self, owner: str, listed: Mapping[str, Machine], silent: Silent | None
    ) -> Iterator[Machine]:
        """Yield the dead, and those that the list does not show yet."""
        unseen: set[str] = set()
        for record in self._arm.call(lambda: list(self._arm.compute.ssh_public_keys.list_by_subscription())):
            tags = record.tags or {}
            if tags.get(OWNER_TAG) != owner or record.id is None:
                continue
            group, token = group_of(record.id), name_of(record.id)
            machine = machine_of_record(record, self._records.vm_id(group, token))
            if machine is None or machine.id.lower() in listed:
                continue
            if ENDED_TAG in tags:
                yield machine
                continue
            if machine.zone.region in unseen:
                continue
            try:
                vm = self._arm.vm(group, token)
                alive = None if vm is None else machine_of(vm)
                gone = self._records.mark_gone(machine) if alive is None else alive
            except TransientError as error:
                if silent is None:
                    raise
                unseen.add(machine.zone.region)
                silent(machine.zone.region, error)
            else:
                yield gone

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        fetch, url = self._arm.get_public, self._settings.prices_url
        prices: dict[tuple[str, str], float] = {}
        for region in regions:
            try:
                prices |= region_spot_prices(fetch, url, region, self._now(), instance_types)
            except ProvisionError as error:
                if silent is None:
                    raise
                silent(region, error)
        return prices

    def check(self) -> Sequence[Finding]:
        settings = self._settings
        regions = settings.regions or tuple(settings.subnet_ids)
        found = list(azure_check.findings(self._arm, regions))
        if not found[0].ok or not settings.use_private_ip:
            return found
        return [*found, *outbound(self._arm, settings.subnet_ids)]

    # --- Tidying up ---------------------------------------------------------------------------------------------------

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return azure_orphans.orphans(self._arm, owner, self._now(), silent)

    def remove(self, orphan: OrphanedResource) -> None:
        azure_orphans.remove(self._arm, orphan)

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return azure_orphans.shared(self._arm, owner)

    def owners(self, silent: Silent | None = None) -> Sequence[str]:
        return azure_orphans.owners(self._arm)

    def discover(self, known: Sequence[Shape], progress: Progress) -> Discovery:
        return discover(self._arm, self._settings.regions, known, self._now(), progress)

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self._networks.admit(owner, access)

    def delete_shared(self, owner: str) -> Sequence[str]:
        """Deletes the resource groups, and with them all that is in them. A group with a machine in it stays."""
        return azure_orphans.delete_shared(
            self._arm, owner, self._settings.forget_wait_s, self._now, self._sleep
        )


# Records of machines, which outlive them: an SSH public key resource of the machine's name, with tags.
#
# Azure forgets a machine that is deleted, a spot machine that it takes back included. The record says what it was and how it terminated.


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
