"""A small Azure: what it has room for, what stands in it, and what time does to that. `azure_server` speaks HTTP for it.

Time is `clock`, which tests move; a resource changes when the time for it has come and someone looks. Everything that is
sent and returned is held against two descriptions of the API (`azure_contract`); faults are refused, and kept in
`violations`, which a test that is over should find empty.
"""

from __future__ import annotations

import base64
import binascii
import copy
import datetime
import heapq
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.clouds.azure.azure_contract import request_problems
from tests.clouds.meter import ADDRESS_USD_HOUR, DISK_USD_HOUR, MACHINE_USD_HOUR

VM = "microsoft.compute/virtualmachines"
KEY = "microsoft.compute/sshpublickeys"
DISK = "microsoft.compute/disks"
NIC = "microsoft.network/networkinterfaces"
IP = "microsoft.network/publicipaddresses"
NSG = "microsoft.network/networksecuritygroups"
NET = "microsoft.network/virtualnetworks"
GROUP = "microsoft.resources/resourcegroups"

Body = dict[str, Any]


class Clock:
    """Virtual time; a sleep moves it. Thread-safe."""

    def __init__(self, now: float = 1_780_000_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class Refusal(Exception):
    """A response that is an error."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


@dataclass(frozen=True, slots=True)
class Size:
    cores: int
    family: str
    memory_gb: int = 8
    gpus: int = 0
    spot: bool = True
    memory_gb: int = 8
    gpus: int = 0
    spot: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """The parts of a machine that starts, for tests that boot it."""

    id: str
    name: str
    region: str
    private_ip: str
    public_ip: str | None
    user: str
    public_key: str
    user_data: str
    is_spot: bool


@dataclass(slots=True)
class Resource:
    id: str
    kind: str
    body: Body
    since: float
    power: str = ""
    failure: tuple[str, str] | None = None  # code and message of a creation that failed
    facts: Facts | None = None
    serial: int = 0
    place: tuple[str, str, bool] | None = None  # whose room the machine takes, and gives back

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[-1]

    @property
    def state(self) -> str:
        return str(self.body["properties"].get("provisioningState", "Succeeded"))

    @state.setter
    def state(self, value: str) -> None:
        self.body["properties"]["provisioningState"] = value


SIZES = {
    "Standard_NC4as_T4_v3": Size(4, "standardNCASv3_T4Family", 28, 1),
    "Standard_NC24ads_A100_v4": Size(24, "StandardNCADSA100v4Family", 220, 1),
    "Standard_D2s_v5": Size(2, "standardDSv5Family"),
}
REGIONS = {"eastus": ("1", "2", "3"), "westeurope": ("1", "2", "3"), "northcentralus": ()}
IMAGES = {"microsoft-dsvm:ubuntu-hpc:2204:latest", "Canonical:ubuntu-24_04-lts:server:latest"}

_NO_ROOM = "Allocation failed. We do not have sufficient capacity for the requested VM size in this zone."


@dataclass(eq=False)
class World:
    clock: Clock = field(default_factory=Clock)
    subscription: str = "00000000-aaaa-bbbb-cccc-000000000005"
    token: str = "good-token"
    clock_off_s: float = 0.0  # how far Azure's clock is ahead of the caller's
    identities: dict[str, list[str]] = field(default_factory=dict)  # of machines: what they may do, by token

    # Controls. Keys of `room`: (zone name or region, size, is_spot), room for that many more; no entry is any number. How a machine for which
    # there is no room fails: at once, or after it was accepted, as "Failed" or by vanishing.
    room: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    failing: str = "at once"  # | "later" | "vanishes"
    quota: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # (region, family or lowPriorityCores): vCPUs
    actions: list[str] = field(default_factory=lambda: ["*"])
    not_actions: list[str] = field(default_factory=list)
    registered: bool = True
    subscription_state: str = "Enabled"
    closed_sizes: set[str] = field(default_factory=set)
    closed_zones: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)  # by region and size
    required_tags: frozenset[str] = frozenset()  # by policies of the organisation
    requires_encryption_set: bool = False
    prices: list[Body] = field(default_factory=list)
    settle_s: float = 1.0
    allocate_s: float = 5.0
    boot_s: float = 40.0
    delete_s: float = 8.0
    evict_s: float = 2.0
    mute: str = ""  # a region whose machines are in no list
    unseen_s: float = 0.0  # lists of the whole subscription are so late
    absent_s: float = 0.0  # and a machine that was just accepted is 404 for so long
    page_size: int = 3

    on_launch: Callable[[Facts], None] | None = None
    on_gone: Callable[[Facts], None] | None = None
    private_ips: Iterator[str] = field(default_factory=lambda: (f"10.64.0.{n}" for n in itertools.count(4)))
    public_ips: Iterator[str] = field(default_factory=lambda: (f"203.0.113.{n}" for n in itertools.count(1)))

    resources: dict[str, Resource] = field(default_factory=dict)  # by id in lower case
    violations: list[str] = field(default_factory=list)
    launched: int = 0  # machines that ever had power

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._calls_out: list[Callable[[], None]] = []

    # --- For tests ----------------------------------------------------------------------------------------------------

    def alive(self, kind: str = VM) -> list[str]:
        """Names of what stands now, whatever its state."""
        with self.at_work():
            return sorted(each.name for each in self.resources.values() if each.kind == kind)

    def parts(self) -> list[str]:
        """Everything that costs money or is in the way: machines, cards, addresses and disks."""
        return sorted(name for kind in (VM, NIC, IP, DISK) for name in self.alive(kind))

    def usd_hour(self) -> float:
        """The resources that are billed now. A machine that was switched off from inside ("stopped") costs what a running one does, one that is
        deallocated only its disk and address ("States and billing status of Azure Virtual Machines")."""
        with self.at_work():
            powers = [each.power for each in self.resources.values() if each.kind == VM]
        machines = sum(power in ("running", "stopping", "stopped") for power in powers)
        parts = len(self.alive(DISK)) * DISK_USD_HOUR + len(self.alive(IP)) * ADDRESS_USD_HOUR
        return machines * MACHINE_USD_HOUR + parts

    def pass_time(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        with self.at_work():
            pass

    def preempt(self, name: str) -> None:
        """Take a spot machine back, with all that came with it."""
        with self.at_work():
            vm = self._vm(name)
            assert vm.body["properties"].get("priority") == "Spot", f"{name} is no spot machine"
            self._start_delete(vm, self.evict_s)

    def switch_off(self, name: str, power: str = "stopped") -> None:
        with self.at_work():
            self._vm(name).power = power

    def strip(self, name: str) -> None:
        """Lose a machine without its parts, as no cascade would: what `orphans` is there for."""
        with self.at_work():
            del self.resources[self._vm(name).id.lower()]

    def lose_group(self, group: str) -> None:
        """Someone deletes a resource group by hand."""
        with self.at_work():
            self._drop_group(f"/subscriptions/{self.subscription}/resourcegroups/{group}".lower())

    # --- For the server -----------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Up to date, and no one else at it. Hooks are called when the lock is free again."""
        with self._lock:
            self._catch_up()
            try:
                yield
            finally:
                self._catch_up()
                calls, self._calls_out = self._calls_out, []
        for call in calls:
            call()

    def put(self, id_: str, kind: str, body: Body) -> tuple[int, Resource]:
        problems = request_problems(kind, body)
        if problems:
            self.violations += [f"PUT {id_}: {problem}" for problem in problems]
            raise Refusal(400, "InvalidRequestContent", "; ".join(problems))
        self._check_tags(body)
        self._check_policies(id_, body)
        old = self.resources.get(id_.lower())
        if kind == GROUP:
            if old is not None and old.state == "Deleting":
                raise Refusal(
                    409, "ResourceGroupBeingDeleted", f"The resource group {old.name} is being deleted."
                )
        else:
            self._check_group(id_)
        self._check_location(body, old)
        match kind:
            case "microsoft.compute/virtualmachines":
                return self._put_vm(id_, body, old)
            case "microsoft.compute/sshpublickeys" | "microsoft.resources/resourcegroups":
                return self._store(id_, kind, body, old, "Succeeded")
            case "microsoft.network/networksecuritygroups":
                self._check_rules(body)
                status, resource = self._store(id_, kind, body, old, "Updating")
                for rule in resource.body["properties"].setdefault("securityRules", []):
                    rule["id"] = f"{id_}/securityRules/{rule['name']}"
                    rule["properties"]["provisioningState"] = "Succeeded"
            case "microsoft.network/virtualnetworks":
                status, resource = self._store(id_, kind, body, old, "Updating")
                for subnet in resource.body["properties"].get("subnets", []):
                    subnet["id"] = f"{id_}/subnets/{subnet['name']}"
            case _:
                raise Refusal(405, "MethodNotAllowed", f"{kind} is not made by hand here")
        self._later(self.settle_s, lambda: self._settle(resource))
        return status, resource

    def patch_tags(self, id_: str, kind: str, body: Body) -> Resource:
        """Of disks alone, and nothing but tags, is all that is needed."""
        resource = self.resources.get(id_.lower())
        if resource is None:
            raise Refusal(404, "ResourceNotFound", f"The Resource '{id_}' was not found.")
        if kind != DISK or set(body) != {"tags"}:
            raise Refusal(405, "MethodNotAllowed", f"{kind} is not changed here")
        self._check_tags(body)
        resource.body["tags"] = dict(body["tags"])
        return resource

    def delete(self, id_: str, kind: str) -> int:
        resource = self.resources.get(id_.lower())
        if resource is None:
            if kind == GROUP:
                raise Refusal(404, "ResourceGroupNotFound", f"Resource group '{id_}' could not be found.")
            self._check_group(id_)
            return 204
        match kind:
            case "microsoft.compute/virtualmachines":
                self._start_delete(resource, self.delete_s)
            case "microsoft.resources/resourcegroups":
                resource.state = "Deleting"
                self._later(self.delete_s, lambda: self._drop_group(resource.id.lower()))
            case "microsoft.network/networkinterfaces":
                if self._stands(resource.body["properties"].get("virtualMachine")):
                    raise Refusal(400, "NicInUse", f"Network Interface {id_} is used by existing resource.")
                self._later(1.0, lambda: self.resources.pop(resource.id.lower(), None))
            case "microsoft.network/publicipaddresses":
                card = (resource.body["properties"].get("ipConfiguration") or {}).get("id", "")
                if card.split("/ipConfigurations/")[0].lower() in self.resources:
                    raise Refusal(
                        400, "PublicIPAddressCannotBeDeleted", f"{id_} is still allocated to {card}."
                    )
                self._later(1.0, lambda: self.resources.pop(resource.id.lower(), None))
            case "microsoft.compute/disks":
                if self._stands({"id": resource.body.get("managedBy", "")}):
                    raise Refusal(409, "OperationNotAllowed", f"Disk {resource.name} is attached to a VM.")
                del self.resources[resource.id.lower()]
            case "microsoft.compute/sshpublickeys":
                del self.resources[resource.id.lower()]
                return 200
        return 202

    def get(self, id_: str, kind: str, with_view: bool) -> Body:
        resource = self.resources.get(id_.lower())
        hidden = resource is not None and kind == VM and self.clock.now() - resource.since < self.absent_s
        if resource is None or hidden:
            if kind == GROUP:
                raise Refusal(404, "ResourceGroupNotFound", f"Resource group '{id_}' could not be found.")
            self._check_group(id_)
            raise Refusal(404, "ResourceNotFound", f"The Resource '{id_}' was not found.")
        return self.answer(resource, with_view)

    def answer(self, resource: Resource, with_view: bool = False) -> Body:
        body = copy.deepcopy(resource.body)
        if resource.kind == VM:
            body["properties"]["osProfile"].pop("customData", None)  # Azure keeps it to itself
            if with_view:
                body["properties"]["instanceView"] = {"statuses": _statuses(resource)}
        return body

    def types_below(self, id_: str) -> set[str]:
        """The types of the resources in a group."""
        return {
            each.kind for key, each in self.resources.items() if key.startswith(f"{id_.lower()}/providers/")
        }

    def seen_in_lists(self, kind: str, group: str | None) -> list[Resource]:
        prefix = f"/subscriptions/{self.subscription}/resourcegroups/{group or ''}".lower()
        late = 0.0 if group else self.unseen_s
        return [
            each
            for key, each in sorted(self.resources.items())
            if each.kind == kind
            and not (kind == VM and self.mute and each.body["location"] == self.mute)
            and key.startswith(prefix + ("/" if group else ""))
            and self.clock.now() - each.since >= late
        ]

    def cores_used(self, region: str, name: str) -> int:
        used = 0
        for vm in self.resources.values():
            if vm.kind == VM and vm.body["location"] == region and vm.failure is None:
                size = SIZES[vm.body["properties"]["hardwareProfile"]["vmSize"]]
                spot = vm.body["properties"].get("priority") == "Spot"
                used += size.cores if name == ("lowPriorityCores" if spot else size.family) else 0
        return used

    # --- Machines -----------------------------------------------------------------------------------------------------

    def _put_vm(self, id_: str, body: Body, old: Resource | None) -> tuple[int, Resource]:
        self._check_vm(id_, body)
        if old is not None:
            if old.state == "Deleting":
                raise Refusal(409, "Conflict", f"{old.name} is being deleted.")
            if _identity(old.body) != _identity(body):
                raise Refusal(
                    409, "PropertyChangeNotAllowed", "Changing property 'osProfile' is not allowed."
                )
            return 200, old
        size_name = body["properties"]["hardwareProfile"]["vmSize"]
        spot = body["properties"].get("priority") == "Spot"
        region, zones = body["location"], body.get("zones") or []
        place = f"{region}-{zones[0]}" if zones else region
        self._check_quota(region, size_name, spot)
        key = (place, size_name, spot)
        room = self.room.get(key)
        if room == 0 and self.failing == "at once":
            text = f"The requested VM size '{size_name}' is currently not available in location '{region}'."
            raise Refusal(409, "SkuNotAvailable", text)
        if room:
            self.room[key] = room - 1
        _, vm = self._store(id_, VM, body, None, "Creating")
        vm.place = key if room else None
        now = datetime.datetime.fromtimestamp(self.clock.now(), datetime.UTC)
        vm.body["properties"] |= {
            "vmId": f"vm-{vm.serial}",
            "timeCreated": now.isoformat().replace("+00:00", "Z"),
        }
        self._make_parts(vm)
        if room == 0:
            self._later(self.allocate_s, lambda: self._fail(vm, zonal=bool(zones)))
        else:
            self._later(self.allocate_s, lambda: self._power_on(vm))
        return 201, vm

    def _make_parts(self, vm: Resource) -> None:
        """The card, the address and the disk that a machine is ordered with."""
        prefix, profile = vm.id.split("/providers/")[0], vm.body["properties"]["networkProfile"]
        common = {"location": vm.body["location"]}
        references = []
        address: str | None = None
        for card in profile["networkInterfaceConfigurations"]:
            nic_id = f"{prefix}/providers/Microsoft.Network/networkInterfaces/{card['name']}"
            configuration = copy.deepcopy(card["properties"]["ipConfigurations"][0])
            ordered = configuration["properties"].pop("publicIPAddressConfiguration", None)
            private_ip = next(self.private_ips)
            configuration |= {"id": f"{nic_id}/ipConfigurations/{configuration['name']}"}
            configuration["properties"]["privateIPAddress"] = private_ip
            if ordered is not None:
                address = next(self.public_ips)
                ip_id = f"{prefix}/providers/Microsoft.Network/publicIPAddresses/{ordered['name']}"
                properties = {
                    "ipAddress": address,
                    "publicIPAllocationMethod": "Static",
                    "ipConfiguration": {"id": configuration["id"]},
                    "deleteOption": ordered["properties"].get("deleteOption", "Detach"),
                }
                body = {
                    **common,
                    "sku": ordered["sku"],
                    "tags": ordered.get("tags", {}),
                    "properties": properties,
                }
                self._store(ip_id, IP, body, None, "Succeeded")
                configuration["properties"]["publicIPAddress"] = {"id": ip_id}
            nic: Body = {
                "virtualMachine": {"id": vm.id},
                "networkSecurityGroup": card["properties"]["networkSecurityGroup"],
                "ipConfigurations": [configuration],
            }
            self._store(
                nic_id, NIC, {**common, "tags": card.get("tags", {}), "properties": nic}, None, "Succeeded"
            )
            option = card["properties"].get("deleteOption", "Detach")
            references.append({"id": nic_id, "properties": {"primary": True, "deleteOption": option}})
        profile["networkInterfaces"] = references
        os_disk = vm.body["properties"]["storageProfile"]["osDisk"]
        disk_id = f"{prefix}/providers/Microsoft.Compute/disks/{os_disk['name']}"
        properties = {"creationData": {"createOption": "FromImage"}, "diskState": "Attached"}
        # The disk has no tags of its own: no one may rely on them.
        self._store(
            disk_id, DISK, {**common, "managedBy": vm.id, "properties": properties}, None, "Succeeded"
        )
        os_disk["managedDisk"]["id"] = disk_id
        login = vm.body["properties"]["osProfile"]
        vm.facts = Facts(
            id=vm.id,
            name=vm.name,
            region=vm.body["location"],
            private_ip=private_ip,
            public_ip=address,
            user=login["adminUsername"],
            public_key=login["linuxConfiguration"]["ssh"]["publicKeys"][0]["keyData"],
            user_data=base64.b64decode(login.get("customData", "")).decode(),
            is_spot=vm.body["properties"].get("priority") == "Spot",
        )

    def _power_on(self, vm: Resource) -> None:
        if vm.id.lower() not in self.resources or vm.state == "Deleting":
            return
        vm.power = "running"
        self.launched += 1
        self._later(self.boot_s, lambda: self._settle(vm))
        if self.on_launch is not None and vm.facts is not None:
            self._calls_out.append(lambda hook=self.on_launch, facts=vm.facts: hook(facts))

    def _fail(self, vm: Resource, zonal: bool) -> None:
        if vm.id.lower() not in self.resources or vm.state == "Deleting":
            return
        if self.failing == "vanishes":
            self._drop_vm(vm)
            return
        vm.failure = ("OverconstrainedZonalAllocationRequest" if zonal else "AllocationFailed", _NO_ROOM)
        vm.state = "Failed"

    def _start_delete(self, vm: Resource, seconds: float) -> None:
        if vm.state != "Deleting":
            vm.state = "Deleting"
            self._later(seconds, lambda: self._drop_vm(vm))

    def _drop_vm(self, vm: Resource) -> None:
        """With whatever was ordered to go with it."""
        if self.resources.pop(vm.id.lower(), None) is None:
            return
        if vm.place is not None and vm.place in self.room:
            self.room[vm.place] += 1
        properties = vm.body["properties"]
        for reference in properties["networkProfile"]["networkInterfaces"]:
            if reference["properties"]["deleteOption"] == "Delete":
                nic = self.resources.pop(reference["id"].lower())
                for configuration in nic.body["properties"]["ipConfigurations"]:
                    ip_id = (configuration["properties"].get("publicIPAddress") or {}).get("id", "").lower()
                    ip = self.resources.get(ip_id)
                    if ip is not None and ip.body["properties"]["deleteOption"] == "Delete":
                        del self.resources[ip_id]
        if properties["storageProfile"]["osDisk"].get("deleteOption") == "Delete":
            del self.resources[properties["storageProfile"]["osDisk"]["managedDisk"]["id"].lower()]
        if vm.power and self.on_gone is not None and vm.facts is not None:
            self._calls_out.append(lambda hook=self.on_gone, facts=vm.facts: hook(facts))

    def _drop_group(self, key: str) -> None:
        for vm in [each for each in self.resources.values() if each.kind == VM]:
            if vm.id.lower().startswith(key + "/"):
                self._drop_vm(vm)
        for each in [each for each in self.resources if each == key or each.startswith(key + "/")]:
            del self.resources[each]

    # --- Checks -------------------------------------------------------------------------------------------------------

    def _check_vm(self, id_: str, body: Body) -> None:
        properties = body["properties"]
        name, region = id_.rsplit("/", 1)[-1], body["location"]
        login, spot = properties["osProfile"], properties.get("priority") == "Spot"
        image = properties["storageProfile"]["imageReference"]
        wanted = ":".join(image.get(part, "") for part in ("publisher", "offer", "sku", "version"))
        rules = [
            (re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?", name), "the name"),
            (name == login["computerName"], "computerName"),
            (properties["hardwareProfile"]["vmSize"] in SIZES, "vmSize"),
            (set(body.get("zones") or []) <= set(REGIONS[region]), "zones"),
            (
                spot or not {"evictionPolicy", "billingProfile"} & set(properties),
                "evictionPolicy without Spot",
            ),
            (_is_base64(login.get("customData", "")), "customData"),
            (len(login.get("customData", "")) <= 87380, "customData: more than 64 kB"),
            (properties["networkProfile"].get("networkApiVersion"), "networkApiVersion"),
            (login["linuxConfiguration"]["disablePasswordAuthentication"] is True, "adminPassword"),
        ]
        for is_right, what in rules:
            if not is_right:
                raise Refusal(400, "InvalidParameter", f"The value of parameter {what} is invalid.")
        for key in login["linuxConfiguration"]["ssh"]["publicKeys"]:
            if (
                key["path"] != f"/home/{login['adminUsername']}/.ssh/authorized_keys"
                or " " not in key["keyData"]
            ):
                raise Refusal(
                    400, "InvalidParameter", "The value of parameter linuxConfiguration.ssh is invalid."
                )
        if "id" not in image and wanted not in IMAGES:
            raise Refusal(404, "PlatformImageNotFound", f"The platform image '{wanted}' is not available.")
        for card in properties["networkProfile"]["networkInterfaceConfigurations"]:
            subnet = card["properties"]["ipConfigurations"][0]["properties"]["subnet"]["id"]
            self._check_reference(subnet.split("/subnets/")[0], region)
            self._check_reference(card["properties"]["networkSecurityGroup"]["id"], region)

    def _check_reference(self, id_: str, region: str) -> None:
        found = self.resources.get(id_.lower())
        if found is None:
            raise Refusal(400, "InvalidResourceReference", f"Resource {id_} referenced was not found.")
        if found.state != "Succeeded":
            raise Refusal(409, "ReferencedResourceNotProvisioned", f"{id_} is not in Succeeded state.")
        if found.body["location"] != region:
            raise Refusal(400, "InvalidResourceReference", f"{id_} is in another region.")

    def _check_quota(self, region: str, size_name: str, spot: bool) -> None:
        size = SIZES[size_name]
        name = "lowPriorityCores" if spot else size.family
        limit = self.quota.get((region, name))
        used = self.cores_used(region, name)
        if limit is not None and used + size.cores > limit:
            shown = "LowPriorityCores" if spot else f"{name} Cores"
            raise Refusal(
                409,
                "OperationNotAllowed",
                f"Operation could not be completed as it results in exceeding approved {shown} quota. Additional "
                f"details - Deployment Model: Resource Manager, Location: {region}, Current Limit: {limit}, Current "
                f"Usage: {used}, Additional Required: {size.cores}, (Minimum) New Limit Required: {used + size.cores}.",
            )

    def _check_rules(self, body: Body) -> None:
        rules = [
            rule["properties"] | {"name": rule["name"]}
            for rule in body["properties"].get("securityRules", [])
        ]
        for rule in rules:
            if not 100 <= rule["priority"] <= 4096 or not rule["sourceAddressPrefixes"]:
                raise Refusal(400, "SecurityRuleInvalidPriority", f"Security rule {rule['name']} is invalid.")
        if len({rule["priority"] for rule in rules}) < len(rules) or len(
            {rule["name"] for rule in rules}
        ) < len(rules):
            raise Refusal(400, "SecurityRuleConflict", "Security rules have the same priority or name.")

    def _check_tags(self, body: Body) -> None:
        tags = body.get("tags", {})
        if len(tags) > 50 or any(re.search(r"[<>%&\\?/]", name) for name in tags):
            raise Refusal(400, "InvalidTagNameCharacters", f"The tag names {sorted(tags)} are not allowed.")
        if any(len(name) > 512 or len(value) > 256 for name, value in tags.items()):
            raise Refusal(400, "InvalidTag", "A tag is too long.")

    def _check_policies(self, id_: str, body: Body) -> None:
        """Those of the organisation, for new resources and for the cards and addresses that come with it."""
        profile = body.get("properties", {}).get("networkProfile", {})
        made = [body, *profile.get("networkInterfaceConfigurations", [])]
        for card in made[1:]:
            address = card["properties"]["ipConfigurations"][0]["properties"]
            made += (
                [address["publicIPAddressConfiguration"]] if "publicIPAddressConfiguration" in address else []
            )
        disk = body.get("properties", {}).get("storageProfile", {}).get("osDisk")
        if any(not self.required_tags <= set(each.get("tags", {})) for each in made):
            raise _disallowed(id_, "Require a tag on resources")
        if (
            self.requires_encryption_set
            and disk is not None
            and "diskEncryptionSet" not in disk["managedDisk"]
        ):
            raise _disallowed(id_, "Managed disks should use a customer-managed key")

    def _check_group(self, id_: str) -> None:
        key = id_.lower().split("/providers/")[0]
        group = self.resources.get(key)
        if group is None:
            name = key.rsplit("/", 1)[-1]
            raise Refusal(404, "ResourceGroupNotFound", f"Resource group '{name}' could not be found.")
        if group.state == "Deleting":
            raise Refusal(
                409, "ResourceGroupBeingDeleted", f"The resource group '{group.name}' is being deleted."
            )

    def _check_location(self, body: Body, old: Resource | None) -> None:
        if body["location"] not in REGIONS:
            known = ", ".join(REGIONS)
            raise Refusal(
                400, "LocationNotAvailableForResourceType", f"'{body['location']}' is none of {known}."
            )
        if old is not None and old.body["location"] != body["location"]:
            raise Refusal(409, "InvalidResourceLocation", f"{old.name} exists in {old.body['location']}.")

    # --- Housekeeping -------------------------------------------------------------------------------------------------

    def _vm(self, name: str) -> Resource:
        return next(each for each in self.resources.values() if each.kind == VM and each.name == name)

    def _stands(self, reference: Body | None) -> bool:
        return reference is not None and reference["id"].lower() in self.resources

    def _store(
        self, id_: str, kind: str, body: Body, old: Resource | None, state: str
    ) -> tuple[int, Resource]:
        stored = copy.deepcopy(body)
        provider, *names = (
            id_.split("/providers/")[-1].split("/") if "/providers/" in id_ else ("Microsoft.Resources",)
        )
        kind_name = names[0] if names else "resourceGroups"
        stored |= {"id": id_, "name": id_.rsplit("/", 1)[-1], "type": f"{provider}/{kind_name}"}
        stored.setdefault("properties", {})
        since = self.clock.now() if old is None else old.since
        resource = Resource(id_, kind, stored, since, serial=next(self._numbers))
        if kind != KEY:
            resource.state = state
        self.resources[id_.lower()] = resource
        return (201 if old is None else 200), resource

    def _settle(self, resource: Resource) -> None:
        if resource.state in ("Updating", "Creating"):
            resource.state = "Succeeded"

    def _later(self, seconds: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (self.clock.now() + seconds, next(self._numbers), what))

    def _catch_up(self) -> None:
        while self._events and self._events[0][0] <= self.clock.now():
            heapq.heappop(self._events)[2]()


def _disallowed(id_: str, policy: str) -> Refusal:
    text = (
        f"Resource '{id_.rsplit('/', 1)[-1]}' was disallowed by policy. Policy identifiers: "
        f'[{{"policyAssignment":{{"name":"{policy}","id":"/x"}}}}]'
    )
    return Refusal(403, "RequestDisallowedByPolicy", text)


def _statuses(vm: Resource) -> list[Body]:
    if vm.failure is not None:
        code, message = vm.failure
        return [{"code": f"ProvisioningState/failed/{code}", "level": "Error", "message": message}]
    state = {"Creating": "creating", "Deleting": "deleting"}.get(vm.state, "succeeded")
    found = [{"code": f"ProvisioningState/{state}", "level": "Info"}]
    return [*found, {"code": f"PowerState/{vm.power}", "level": "Info"}] if vm.power else found


def _identity(body: Body) -> Any:
    """What a PUT of a machine that exists may not change."""
    properties = body["properties"]
    return (
        body.get("zones"),
        properties["hardwareProfile"],
        properties.get("priority"),
        properties["osProfile"],
        properties["storageProfile"]["imageReference"],
    )


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error:
        return False
    return True
