"""What the machines of a service share in a region: a resource group, a network, a security group. All are free.

Each is set up when the first machine needs it, is left as it is when it fits, and goes with the resource group. The
security group lets in what the orders name and nothing else; Azure's own default rules let machines of one network talk
to each other and drop the rest. Open ports add up: two versions of a service run side by side during an update, and a
port is closed when the group goes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from azure.mgmt.network.models import NetworkSecurityGroup, SecurityRule

from policies.model import Zone
from provisioners.azure.client import Arm
from provisioners.azure.errors import CLOUD
from provisioners.azure.shapes import Place, group_name
from provisioners.errors import TransientError
from provisioners.machines import OWNER_TAG, SERVICE_TAG, MachineOrder

SECURITY_GROUP = "machines"
NETWORK = "network"
SUBNET = "machines"

_ADDRESSES = "10.64.0.0/16"
_SSH = 22
_ANYWHERE = ("0.0.0.0/0",)
_FIRST_PRIORITY = 100  # of 100 to 4096; a lower number goes first, and ours only allow
_SETTLE_S = 90.0
_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Opening:
    """Sources that may reach ports: one rule of a security group. IPv4, as the machines' addresses are."""

    sources: tuple[str, ...]
    ports: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"from-{hashlib.sha256(','.join(self.sources).encode()).hexdigest()[:12]}"


def opening_of(order: MachineOrder) -> Opening | None:
    """What the order opens; nothing if it names no source."""
    sources = tuple(
        sorted({cidr for cidr in order.sources if ipaddress.ip_network(cidr, strict=False).version == 4})
    )
    return Opening(sources, tuple(sorted({_SSH, *order.ports}))) if sources else None


def openings_of(order: MachineOrder) -> tuple[Opening | None, ...]:
    """Everything that the order opens, and to whom."""
    public = (Opening(_ANYWHERE, tuple(sorted(order.public_ports))),) if order.public_ports else ()
    return (opening_of(order), *public)


def rules_with(opening: Opening, rules: list[SecurityRule]) -> list[dict[str, Any]] | None:
    """The rules that let the opening in beside what is there, or None if they do already."""
    kept = [_rule_body(rule) for rule in rules if rule.name != opening.name]
    before = next((rule for rule in rules if rule.name == opening.name), None)
    open_ports = set() if before is None else set(_rule_body(before)["properties"]["destinationPortRanges"])
    wanted = open_ports | {str(port) for port in opening.ports}
    if wanted == open_ports:
        return None
    taken = {body["properties"]["priority"] for body in kept}
    priority = next(number for number in range(_FIRST_PRIORITY, 4097) if number not in taken)
    properties = {
        "protocol": "Tcp",
        "direction": "Inbound",
        "access": "Allow",
        "priority": priority,
        "sourceAddressPrefixes": list(opening.sources),
        "sourcePortRange": "*",
        "destinationAddressPrefix": "*",
        "destinationPortRanges": sorted(wanted, key=int),
    }
    return [*kept, {"name": opening.name, "properties": properties}]


def _rule_body(rule: SecurityRule) -> dict[str, Any]:
    """A rule as it was told, without what only Azure writes."""
    told = rule.as_dict()
    properties = {key: value for key, value in told["properties"].items() if key != "provisioningState"}
    properties.setdefault("destinationPortRanges", [])
    return {"name": told["name"], "properties": properties}


class Networks:
    """Sets up what is shared. Thread-safe: of many machines that start at once, the first one does it."""

    def __init__(
        self,
        arm: Arm,
        subnet_ids: Mapping[str, str],
        use_private_ip: bool,
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._arm = arm
        self._subnet_ids = subnet_ids
        self._use_private_ip = use_private_ip
        self._now = now
        self._sleep = sleep
        self._guard = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._ready: dict[tuple[str, Opening | None], Place] = {}

    def place(self, order: MachineOrder) -> Place:
        """Where the order's machine goes; sets up what is not there yet."""
        group = group_name(order.owner, order.service, order.zone.region)
        with self._guard:
            lock = self._locks[group]
        with lock:
            for opening in openings_of(order):
                if (group, opening) not in self._ready:
                    self._ready[group, opening] = self._set_up(group, opening, order)
            return self._ready[group, opening]

    def doubt(self, order: MachineOrder) -> None:
        """Look again next time: something that was there is not any more."""
        group = group_name(order.owner, order.service, order.zone.region)
        with self._guard:
            lock = self._locks[group]
        with lock:
            self._ready = {key: place for key, place in self._ready.items() if key[0] != group}

    def _set_up(self, group: str, opening: Opening | None, order: MachineOrder) -> Place:
        region = order.zone.region
        tags = {OWNER_TAG: order.owner, SERVICE_TAG: order.service}
        common: Any = {"location": region, "tags": tags}
        if not self._group_stands(group):
            self._arm.call(
                lambda: self._arm.resources.resource_groups.create_or_update(group, common), zone=order.zone
            )
        security_group_id = self._security_group(group, opening, common, order.zone)
        subnet_id = self._subnet_ids.get(region) or self._subnet(group, common, order.zone)
        return Place(subnet_id, security_group_id, self._use_private_ip)

    def _group_stands(self, group: str) -> bool:
        found = self._arm.find(lambda: self._arm.resources.resource_groups.get(group))
        state = None if found is None or found.properties is None else found.properties.provisioning_state
        if state == "Deleting":
            raise TransientError(f"resource group {group} is being deleted", cloud=CLOUD, retry_after_s=30.0)
        return found is not None

    def _security_group(self, group: str, opening: Opening | None, common: dict[str, Any], zone: Zone) -> str:
        client = self._arm.network.network_security_groups
        found = self._arm.find(lambda: client.get(group, SECURITY_GROUP))
        rules = [] if found is None else _rules_of(found)
        wanted = rules_with(opening, rules) if opening is not None else None
        if found is None or wanted is not None:
            body: Any = {**common, "properties": {"securityRules": wanted or []}}
            self._arm.call(
                lambda: client.begin_create_or_update(group, SECURITY_GROUP, body, polling=False).result(),
                zone,
            )
        settled = self._settled(lambda: client.get(group, SECURITY_GROUP), SECURITY_GROUP)
        return str(settled.id)

    def _subnet(self, group: str, common: dict[str, Any], zone: Zone) -> str:
        client = self._arm.network.virtual_networks
        if self._arm.find(lambda: client.get(group, NETWORK)) is None:
            subnet = {"name": SUBNET, "properties": {"addressPrefix": _ADDRESSES}}
            space = {"addressPrefixes": [_ADDRESSES]}
            body: Any = {**common, "properties": {"addressSpace": space, "subnets": [subnet]}}
            self._arm.call(
                lambda: client.begin_create_or_update(group, NETWORK, body, polling=False).result(), zone
            )
        settled = self._settled(lambda: client.get(group, NETWORK), NETWORK)
        return f"{settled.id}/subnets/{SUBNET}"

    def _settled(self, get: Callable[[], Any], name: str) -> Any:
        """The resource once Azure is done with it: a machine cannot refer to it before."""
        give_up_at = self._now() + _SETTLE_S
        while True:
            found = self._arm.call(get)
            state = found.properties.provisioning_state
            if state == "Succeeded":
                return found
            if state == "Failed" or self._now() >= give_up_at:
                raise TransientError(f"{name} is not set up yet ({state})", cloud=CLOUD, retry_after_s=10.0)
            self._sleep(_POLL_S)


def _rules_of(group: NetworkSecurityGroup) -> list[SecurityRule]:
    return list((group.properties.security_rules if group.properties else None) or [])
