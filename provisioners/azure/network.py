"""What the machines of a service share in a region: a resource group, a network, two security groups. All are free.

Each is set up when the first machine needs it, is left as it is when it fits, and goes with the resource group. One security
group is for replicas, the other for load balancers, whose ports are open to any address. A security group lets in what `firewall`
says for its ports and nothing else; Azure's own default rules let machines of one network talk to each other and drop the
rest. Its tags have the ports, so `admit` knows from the group alone which rules it should have. Ports add up: two versions of
a service run side by side during an update, and a port is closed when the group goes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from azure.mgmt.network.models import NetworkSecurityGroup, SecurityRule

from policies.model import Role, Zone
from provisioners.azure.api import Arm
from provisioners.azure.errors import CLOUD
from provisioners.azure.translate import Addresses, NetworkIds, group_name, group_of, name_of
from provisioners.port.errors import InvalidRequestError, ProvisionError, TransientError
from provisioners.port.firewall import ANYWHERE, SSH_PORT, FirewallAccess, ports_of_text, ports_text
from provisioners.port.vm import OWNER_TAG, PORTS_TAG, PUBLIC_PORTS_TAG, SERVICE_TAG, MachineOrder

SECURITY_GROUPS: Mapping[Role, str] = {
    Role.REPLICA: "replicas",
    Role.LOAD_BALANCER: "load-balancers",
    Role.CONTROLLER: "controllers",
}
NETWORK = "network"
SUBNET = "machines"

_ADDRESSES = "10.64.0.0/16"
_FIRST_PRIORITY = 100  # of 100 to 4096; a lower number goes first, and ours only allow
_SETTLE_S = 90.0
_POLL_S = 2.0
_SSH, _PORTS, _PUBLIC = "skyserve-ssh", "skyserve-ports", "skyserve-public"


def rules_with(
    rules: Sequence[SecurityRule],
    access: FirewallAccess,
    service: str,
    ports: Sequence[int],
    public_ports: Sequence[int],
) -> list[dict[str, Any]] | None:
    """Return all rules of a security group whose machines have these ports, those that are not ours as they are.

    None if they are so already. A rule cannot be without a source, so there is none where no address is let in.
    """
    theirs = [_rule_body(rule) for rule in rules if rule.name not in (_SSH, _PORTS, _PUBLIC)]
    ours = {
        _SSH: (access.to_ssh(), [SSH_PORT]),
        _PORTS: (access.to_replicas(service), ports),
        _PUBLIC: ((ANYWHERE,), public_ports),
    }
    taken = {body["properties"]["priority"] for body in theirs}
    free = (number for number in range(_FIRST_PRIORITY, 4097) if number not in taken)
    wanted = []
    for name, (sources, open_ports) in ours.items():
        priority, four = next(free), [block for block in sources if ":" not in block]
        if four and open_ports:
            wanted.append(_our_rule(name, priority, four, ports_text(open_ports).split()))
    found = [_rule_body(rule) for rule in rules if rule.name in ours]
    is_so = sorted(map(_essence, found)) == sorted(map(_essence, wanted))
    return None if is_so else [*theirs, *wanted]


def _our_rule(name: str, priority: int, sources: list[str], ports: list[str]) -> dict[str, Any]:
    properties = {
        "protocol": "Tcp",
        "direction": "Inbound",
        "access": "Allow",
        "priority": priority,
        "sourceAddressPrefixes": sources,
        "sourcePortRange": "*",
        "destinationAddressPrefix": "*",
        "destinationPortRanges": ports,
    }
    return {"name": name, "properties": properties}


def _essence(body: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a rule of ours does; its priority says nothing, as all of them allow."""
    properties = body["properties"]
    sources, ports = properties.get("sourceAddressPrefixes"), properties.get("destinationPortRanges")
    return body["name"], properties.get("access"), sorted(sources or ()), sorted(ports or ())


def _rule_body(rule: SecurityRule) -> dict[str, Any]:
    """Return a rule as we wrote it, without what only Azure writes."""
    given = rule.as_dict()
    properties = {key: value for key, value in given["properties"].items() if key != "provisioningState"}
    properties.setdefault("destinationPortRanges", [])
    return {"name": given["name"], "properties": properties}


class Networks:
    """Sets up shared resources, with the user's `labels`. Thread-safe: of many machines that start at once, the first one does it."""

    def __init__(
        self,
        arm: Arm,
        subnet_ids: Mapping[str, str],
        use_private_ip: bool,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._arm = arm
        self._labels = labels or {}
        self._subnet_ids = subnet_ids
        self._use_private_ip = use_private_ip
        self._now = now
        self._sleep = sleep
        self._guard = threading.Lock()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._ready: dict[tuple[object, ...], NetworkIds] = {}
        self._access: dict[str, FirewallAccess] = {}  # by owner, as last admitted

    def place(self, order: MachineOrder) -> NetworkIds:
        """Return where the order's machine goes; sets up missing parts."""
        group = group_name(order.owner, order.service, order.zone.region)
        key = (group, order.role, order.ports, order.public_ports, order.sources)
        with self._lock_of(group):
            if key not in self._ready:
                self._ready[key] = self._set_up(group, order)
            return self._ready[key]

    def doubt(self, order: MachineOrder) -> None:
        """Look again next time: something that was there is not any more."""
        group = group_name(order.owner, order.service, order.zone.region)
        with self._lock_of(group):
            self._ready = {key: place for key, place in self._ready.items() if key[0] != group}

    def admit(self, owner: str, access: FirewallAccess) -> None:
        """Change the rules of the owner's security groups."""
        self._access[owner] = access  # before they are listed: a group that is made now has it already
        client = self._arm.network.network_security_groups
        failures: list[ProvisionError] = []
        for listed in self._arm.call(lambda: list(client.list_all())):
            tags, id_ = listed.tags or {}, listed.id or ""
            if tags.get(OWNER_TAG) == owner and PORTS_TAG in tags:
                group, name = group_of(id_), name_of(id_)
                try:
                    with self._lock_of(group):
                        self._put_right(group, name, owner)
                except ProvisionError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _put_right(self, group: str, name: str, owner: str) -> None:
        """With the lock of the resource group held."""
        client = self._arm.network.network_security_groups
        found = self._arm.find(lambda: client.get(group, name))
        if found is None:
            return
        tags = dict(found.tags or {})
        ports, public = ports_of_text(tags[PORTS_TAG]), ports_of_text(tags.get(PUBLIC_PORTS_TAG, ""))
        service = tags.get(SERVICE_TAG, "")
        rules = rules_with(_rules_of(found), self._access[owner], service, ports, public)
        if rules is not None:
            body: Any = {
                "location": found.location,
                "tags": tags,
                "properties": {"securityRules": rules},
            }
            self._arm.call(lambda: client.begin_create_or_update(group, name, body, polling=False).result())

    def _lock_of(self, group: str) -> threading.Lock:
        with self._guard:
            return self._locks[group.lower()]

    def _set_up(self, group: str, order: MachineOrder) -> NetworkIds:
        region = order.zone.region
        tags = {**self._labels, OWNER_TAG: order.owner, SERVICE_TAG: order.service}
        common: Any = {"location": region, "tags": tags}
        if not self._group_stands(group):
            self._arm.call(
                lambda: self._arm.resources.resource_groups.create_or_update(group, common), zone=order.zone
            )
        security_group_id = self._security_group(group, order, common)
        subnet_id = self._subnet_ids.get(region) or self._subnet(group, common, order.zone)
        return NetworkIds(subnet_id, security_group_id, self._use_private_ip)

    def _group_stands(self, group: str) -> bool:
        found = self._arm.find(lambda: self._arm.resources.resource_groups.get(group))
        state = None if found is None or found.properties is None else found.properties.provisioning_state
        if state == "Deleting":
            raise TransientError(f"resource group {group} is being deleted", cloud=CLOUD, retry_after_s=30.0)
        return found is not None

    def _security_group(self, group: str, order: MachineOrder, common: dict[str, Any]) -> str:
        client, name = self._arm.network.network_security_groups, SECURITY_GROUPS[order.role]
        found = self._arm.find(lambda: client.get(group, name))
        tags = {} if found is None else dict(found.tags or {})
        ports = {*ports_of_text(tags.get(PORTS_TAG, "")), *order.ports}
        public = {*ports_of_text(tags.get(PUBLIC_PORTS_TAG, "")), *order.public_ports}
        wanted_tags = {
            **tags,  # a policy of the organisation may have added some
            **common["tags"],
            PORTS_TAG: ports_text(ports),
            PUBLIC_PORTS_TAG: ports_text(public),
        }
        access = self._access.get(order.owner, FirewallAccess()).with_sources(order.sources)
        try:
            rules = rules_with(
                [] if found is None else _rules_of(found),
                access,
                order.service,
                sorted(ports),
                sorted(public),
            )
        except ValueError as error:
            raise InvalidRequestError(f"not a CIDR block: {error}", cloud=CLOUD, zone=order.zone) from error
        if found is None or rules is not None or tags != wanted_tags:
            if rules is None:
                rules = [] if found is None else [_rule_body(rule) for rule in _rules_of(found)]
            body: Any = {**common, "tags": wanted_tags, "properties": {"securityRules": rules}}
            self._arm.call(
                lambda: client.begin_create_or_update(group, name, body, polling=False).result(), order.zone
            )
        settled = self._settled(lambda: client.get(group, name), name)
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


def addresses_by_vm(arm: Arm) -> dict[str, Addresses]:
    """Return the addresses of all machines of the subscription, by the machine's id in lower case: Azure's spelling varies."""
    network = arm.network
    public = {
        (ip.id or "").lower(): ip.properties.ip_address
        for ip in arm.call(lambda: list(network.public_ip_addresses.list_all()))
        if ip.properties is not None
    }
    found = {}
    for card in arm.call(lambda: list(network.network_interfaces.list_all())):
        if card.properties is None or card.properties.virtual_machine is None:
            continue
        for entry in (card.properties.ip_configurations or [])[:1]:
            at = entry.properties
            if at is not None:
                ip_id = "" if at.public_ip_address is None else at.public_ip_address.id or ""
                key = (card.properties.virtual_machine.id or "").lower()
                found[key] = Addresses(public.get(ip_id.lower()), at.private_ip_address)
    return found
