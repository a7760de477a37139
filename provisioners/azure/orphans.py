"""Leftovers on Azure: parts without a machine, and what the machines of an owner shared.

Everything in a resource group that carries the owner's tag is the owner's; the names of the parts say of which machine
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from provisioners.azure.api import Arm
from provisioners.azure.errors import CLOUD
from provisioners.azure.translate import (
    ADDRESS_SUFFIX,
    DISK_SUFFIX,
    ENDED_AT_TAG,
    NIC_SUFFIX,
    group_of,
    machine_of,
    name_of,
)
from provisioners.port.errors import InvalidRequestError, ProvisionError
from provisioners.port.vm import OWNER_TAG, MachineState, OrphanedResource, Silent

GROUP = "resource group"
CARD, ADDRESS, DISK = "network interface", "public address", "disk"
MACHINE, RECORD = "virtual machine", "record"

RECORD_KEPT_S = 24 * 3600.0
_POLL_S = 3.0
_USD_MONTH = {
    CARD: 0.0,
    ADDRESS: 3.65,
    RECORD: 0.0,
}  # "IP addresses pricing", a standard one; a disk's has many steps


def orphans(arm: Arm, owner: str, now: float, silent: Silent | None = None) -> list[OrphanedResource]:
    """Cards, addresses and disks of machines that are not there.

    Spot machines that Azure has switched off and not deleted; and records of the long dead. In an order in which they can
    be removed.
    """
    found: list[OrphanedResource] = []
    for group in groups(arm, owner):
        try:
            found += list(_orphans_in(arm, group, now))
        except ProvisionError as error:
            if silent is None:
                raise
            silent(f"resource group {group}", error)
    return found


def _orphans_in(arm: Arm, group: str, now: float) -> Iterator[OrphanedResource]:
    network, compute = arm.network, arm.compute
    # What belongs to machines first, the machines after: of a machine that starts meanwhile both are seen.
    cards = [
        (card.id or "", card.location or "") for card in arm.all_in(network.network_interfaces.list, group)
    ]
    addresses = [
        (ip.id or "", ip.location or "") for ip in arm.all_in(network.public_ip_addresses.list, group)
    ]
    disks = [
        (disk.id or "", disk.location or "")
        for disk in arm.all_in(compute.disks.list_by_resource_group, group)
    ]
    records = arm.all_in(compute.ssh_public_keys.list_by_resource_group, group)
    vms = arm.all_in(compute.virtual_machines.list, group)
    alive = {vm.name or "" for vm in vms}
    for kind, suffix, parts in (
        (CARD, NIC_SUFFIX, cards),
        (ADDRESS, ADDRESS_SUFFIX, addresses),
        (DISK, DISK_SUFFIX, disks),
    ):
        for id_, region in parts:
            token = name_of(id_).removesuffix(suffix)
            if id_.endswith(suffix) and token not in alive and arm.vm(group, token) is None:
                yield OrphanedResource(kind, id_, region, token, usd_month=_USD_MONTH.get(kind))
    for name in sorted(alive):
        vm = arm.vm(group, name)
        machine = None if vm is None else machine_of(vm)
        if machine is not None and machine.state is MachineState.PREEMPTED:
            yield OrphanedResource(
                MACHINE, machine.id, machine.zone.region, machine.token, machine.launched_at
            )
    for record in records:
        ended_at = (record.tags or {}).get(ENDED_AT_TAG)
        if record.id and record.name not in alive and ended_at and float(ended_at) < now - RECORD_KEPT_S:
            yield OrphanedResource(RECORD, record.id, record.location, usd_month=0.0)


def remove(arm: Arm, orphan: OrphanedResource) -> None:
    """Return when Azure has promised it. An address cannot go before its card has gone: a TransientError till then."""
    group, name = group_of(orphan.id), name_of(orphan.id)
    network, compute = arm.network, arm.compute
    match orphan.kind:
        case "network interface":
            arm.find(lambda: network.network_interfaces.begin_delete(group, name, polling=False).result())
        case "public address":
            arm.find(lambda: network.public_ip_addresses.begin_delete(group, name, polling=False).result())
        case "disk":
            arm.find(lambda: compute.disks.begin_delete(group, name, polling=False).result())
        case "virtual machine":
            arm.delete_vm(group, name)
        case "record":
            arm.find(lambda: compute.ssh_public_keys.delete(group, name))
        case other:
            raise InvalidRequestError(f"Azure has no orphans of the kind {other!r}", cloud=CLOUD)


def delete_shared(
    arm: Arm, owner: str, wait_s: float, now: Callable[[], float], sleep: Callable[[float], None]
) -> Sequence[str]:
    """Delete the owner's resource groups, all at once, and wait. A group with a machine in it stays, and is reported."""
    problems, deleted = [], []
    for group in groups(arm, owner):
        alive = sorted(vm.name or "" for vm in arm.all_in(arm.compute.virtual_machines.list, group))
        if alive:
            problems.append(f"resource group {group} still has machines: {', '.join(alive)}")
            continue
        try:
            _delete_group(arm, group)
        except ProvisionError as error:
            problems.append(f"resource group {group} cannot be deleted: {error.message}")
        else:
            deleted.append(group)
    give_up_at = now() + wait_s
    for group in deleted:
        while _group_stands(arm, group):
            if now() >= give_up_at:
                problems.append(f"resource group {group} is still being deleted")
                break
            sleep(_POLL_S)
    return problems


def groups(arm: Arm, owner: str) -> list[str]:
    """Return names of the owner's resource groups."""
    return [group.id for group in shared(arm, owner)]


def shared(arm: Arm, owner: str) -> list[OrphanedResource]:
    """Return the owner's resource groups, with the networks in them; they cost nothing themselves."""
    wanted = f"tagName eq '{OWNER_TAG}' and tagValue eq '{owner}'"
    found = arm.call(lambda: list(arm.resources.resource_groups.list(filter=wanted)))
    ours = [group for group in found if group.name and (group.tags or {}).get(OWNER_TAG) == owner]
    return sorted(
        (OrphanedResource(GROUP, group.name or "", group.location, usd_month=0.0) for group in ours),
        key=lambda group: group.id,
    )


def owners(arm: Arm) -> list[str]:
    """Return whose resource groups there are: all that is made for an owner is in one."""
    listed = arm.call(lambda: list(arm.resources.resource_groups.list(filter=f"tagName eq '{OWNER_TAG}'")))
    found = {(group.tags or {}).get(OWNER_TAG, "") for group in listed}
    return sorted(found - {""})


def _delete_group(arm: Arm, group: str) -> None:
    arm.find(lambda: arm.resources.resource_groups.begin_delete(group, polling=False).result())


def _group_stands(arm: Arm, group: str) -> bool:
    return arm.find(lambda: arm.resources.resource_groups.get(group)) is not None
