"""The network our machines live in, and the few ports that are open in it.

Each owner has a network of their own (Google's `default` one is open to the world on port 22), with a subnetwork in
every region and four kinds of rules: the owner's machines reach each other; port 22 of all of them is open to the controller;
the ports of a service's replicas to the controller and to the service's load balancers; the ports of load balancers to
any address. A rule is bound to machines by a network tag: the owner's, or one that is the rule's own name, which follows from
the service and the ports. So machines of different services do not open each other's ports, and `admit` changes nothing but
the sources of rules that are there.

Networks and rules cannot be labelled. Their names begin with a digest of the owner, and their description says the
rest. A rule that names no source would admit any address: ours name the owner's tag, too, whose machines the first rule lets in
anyway. Everything here may be done by several controllers of one owner at once.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence

from google.cloud import compute_v1

from policies.model import CapacityType
from provisioners.access import ANYWHERE, SSH_PORT, Access, ports_of_text, ports_text
from provisioners.errors import InvalidRequestError, ProvisionError, TransientError
from provisioners.gcp.api import GcpApi, failure_of
from provisioners.gcp.errors import ALREADY_EXISTS, CLOUD
from provisioners.gcp.order import last
from provisioners.machines import Leftover, MachineOrder

_ABOUT = re.compile(r"; service (\S*), ports ([\d ]+)(, public)?$")
_MAKING_TIMEOUT_S = 180.0  # a network with subnetworks in all regions takes a minute


class GcpNetwork:
    """The networks and rules of one project. Thread-safe.

    `network` is the name of one that exists and is used as it is, subnetworks and all; None makes an owner's own.
    """

    def __init__(self, api: GcpApi, network: str | None) -> None:
        self._api = api
        self._network = network
        self._lock = threading.Lock()
        self._made: set[str] = set()  # what was seen to be there
        self._access: dict[str, Access] = {}  # by owner, as last admitted

    def ensure(self, order: MachineOrder) -> tuple[str, tuple[str, ...]]:
        """Make what is missing: (the network's path, the network tags of a machine with the order's ports)."""
        owner, name, prefix = order.owner, self._network or prefix_of(order.owner), prefix_of(order.owner)
        path = f"global/networks/{name}"
        with self._lock:  # the first launches of all threads wait for one of them
            access = self._access.get(owner, Access()).with_sources(order.sources)
            outer = outer_rules(owner, path, access, order.service, order.ports, order.public_ports)
            if self._network is None:
                self._once(name, lambda: self._make_network(owner, name))
            for rule in (_inner_rule(owner, path), *outer):
                self._once(rule.name, lambda rule=rule: self._make_rule(rule))  # type: ignore[misc]
        return path, (prefix, *(rule.name for rule in outer[1:]))

    def admit(self, owner: str, access: Access) -> None:
        """Change the sources of the owner's rules."""
        with self._lock:
            self._access[owner] = access
            failures = []
            for rule in self._listed(owner):
                about = _ABOUT.search(rule.description)
                if about is None:
                    continue  # among the owner's machines, or of an earlier version
                ports, path = ports_of_text(about[2]), f"global/networks/{last(rule.network)}"
                if not about[1]:
                    wanted = _ssh_rule(owner, path, access)
                else:
                    wanted = _rule(owner, path, access, about[1], ports, is_public=about[3] is not None)
                if wanted.name == rule.name and not _is_same(rule, wanted):
                    try:
                        self._put_right(wanted)
                    except ProvisionError as error:
                        failures.append(error)
        if failures:
            raise failures[0]

    def doubt(self) -> bool:
        """Something that was there is gone: look again at the next launch. Whether that can mend it."""
        with self._lock:
            self._made.clear()
        return self._network is None

    def forget(self, owner: str) -> list[str]:
        """Remove the owner's rules and network. Sentences about what could not be."""
        self.doubt()
        prefix, kept = prefix_of(owner), []
        project = self._api.project
        firewalls = self._api.client(compute_v1.FirewallsClient)
        for name in self._rules(owner):
            request = compute_v1.DeleteFirewallRequest(project=project, firewall=name)
            kept += self._remove(f"firewall rule {name}", firewalls.delete_unary, request, name)
        networks = self._api.client(compute_v1.NetworksClient)
        if self._network is None and not kept:
            delete = compute_v1.DeleteNetworkRequest(project=project, network=prefix)
            kept += self._remove(f"network {prefix}", networks.delete_unary, delete, prefix)
        return kept

    def shared(self, owner: str) -> list[Leftover]:
        """The owner's rules and network; neither costs anything."""
        found = [Leftover("firewall rule", name, "global", usd_month=0.0) for name in self._rules(owner)]
        if self._network is None:
            name = prefix_of(owner)
            get = compute_v1.GetNetworkRequest(project=self._api.project, network=name)
            if self._api.find(self._api.client(compute_v1.NetworksClient).get, get, name) is not None:
                found.append(Leftover("network", name, "global", usd_month=0.0))
        return found

    def owners(self) -> set[str]:
        """Whose rules there are, by their descriptions."""
        request = compute_v1.ListFirewallsRequest(project=self._api.project)
        listed = self._api.listed(self._api.client(compute_v1.FirewallsClient).list, request)
        told = (rule.description.partition(";")[0] for rule in listed)
        start = _description("")
        owners = {whose.removeprefix(start) for whose in told if whose.startswith(start)}
        return {owner for owner in owners if owner}

    def _rules(self, owner: str) -> list[str]:
        return [rule.name for rule in self._listed(owner)]

    def _listed(self, owner: str) -> list[compute_v1.Firewall]:
        """The owner's firewall rules."""
        request = compute_v1.ListFirewallsRequest(project=self._api.project)
        listed: list[compute_v1.Firewall] = self._api.listed(
            self._api.client(compute_v1.FirewallsClient).list, request
        )
        start, whose = f"{prefix_of(owner)}-", _description(owner)
        return [
            rule
            for rule in listed
            if rule.name.startswith(start) and rule.description.partition(";")[0] == whose
        ]

    def _once(self, name: str, make: Callable[[], None]) -> None:
        if name not in self._made:
            make()
            self._made.add(name)

    def _make_network(self, owner: str, name: str) -> None:
        client, project = self._api.client(compute_v1.NetworksClient), self._api.project
        get = compute_v1.GetNetworkRequest(project=project, network=name)
        if self._api.find(client.get, get, name) is None:
            network = compute_v1.Network(
                name=name, auto_create_subnetworks=True, description=_description(owner)
            )
            insert = compute_v1.InsertNetworkRequest(project=project, network_resource=network)
            self._insert(client.insert_unary, insert, f"network {name}")

    def _make_rule(self, rule: compute_v1.Firewall) -> None:
        client, project = self._api.client(compute_v1.FirewallsClient), self._api.project
        get = compute_v1.GetFirewallRequest(project=project, firewall=rule.name)
        found = self._api.find(client.get, get, rule.name)
        if found is None:
            insert = compute_v1.InsertFirewallRequest(project=project, firewall_resource=rule)
            self._insert(client.insert_unary, insert, f"firewall rule {rule.name}")
        elif not _is_same(found, rule):
            self._put_right(rule)

    def _put_right(self, rule: compute_v1.Firewall) -> None:
        """One call, so there is no moment without a rule or with a half one. Not a patch: that leaves alone what the new rule
        does not name, such as the last source."""
        client, project = self._api.client(compute_v1.FirewallsClient), self._api.project
        update = compute_v1.UpdateFirewallRequest(project=project, firewall=rule.name, firewall_resource=rule)
        self._finish(self._api.call(client.update_unary, update), f"firewall rule {rule.name}")

    def _insert(self, method: Callable[..., compute_v1.Operation], request: object, what: str) -> None:
        try:
            operation = self._api.call(method, request)
        except ProvisionError as error:
            if error.code == ALREADY_EXISTS:
                # Somebody else was quicker, and may not be done with it.
                raise TransientError(f"{what} is being made by somebody else", cloud=CLOUD) from error
            raise
        self._finish(operation, what)

    def _remove(
        self, what: str, method: Callable[..., compute_v1.Operation], request: object, name: str
    ) -> list[str]:
        try:
            operation = self._api.find(method, request, name)
            if operation is not None:
                self._finish(operation, what)
        except ProvisionError as error:
            return [f"{what} could not be removed: {error.message}"]
        return []

    def _finish(self, operation: compute_v1.Operation, what: str) -> None:
        done = self._api.wait(operation, _MAKING_TIMEOUT_S)
        if done.error.errors:
            raise failure_of(done, None, CapacityType.ON_DEMAND, self._api.now())
        if done.status != compute_v1.Operation.Status.DONE:
            raise TransientError(f"{what} is still being made", cloud=CLOUD)


def prefix_of(owner: str) -> str:
    """With which the names of all that is the owner's begin; the owner's network and tag are named so."""
    return f"skyserve-{hashlib.sha256(owner.encode()).hexdigest()[:8]}"


def outer_rules(
    owner: str,
    network: str,
    access: Access,
    service: str,
    ports: Sequence[int],
    public_ports: Sequence[int],
) -> list[compute_v1.Firewall]:
    """What is open on a machine to others than the owner's machines. The first rule is for port 22 and bound to the owner's
    tag, the others are bound to tags of their names."""
    rules = [_ssh_rule(owner, network, access)]
    if ports:
        rules.append(_rule(owner, network, access, service, ports, is_public=False))
    if public_ports:
        rules.append(_rule(owner, network, access, service, public_ports, is_public=True))
    return rules


def _ssh_rule(owner: str, network: str, access: Access) -> compute_v1.Firewall:
    try:
        sources = access.to_ssh()
    except ValueError as error:
        raise InvalidRequestError(f"sources must be CIDR blocks: {error}", cloud=CLOUD) from error
    rule = _outer_rule(owner, network, "", [SSH_PORT], sources, is_public=False)
    rule.target_tags = [prefix_of(owner)]
    return rule


def _rule(
    owner: str, network: str, access: Access, service: str, ports: Sequence[int], *, is_public: bool
) -> compute_v1.Firewall:
    try:
        sources = (ANYWHERE,) if is_public else access.to_replicas(service)
    except ValueError as error:
        raise InvalidRequestError(f"sources must be CIDR blocks: {error}", cloud=CLOUD) from error
    return _outer_rule(owner, network, service, ports, sources, is_public=is_public)


def _outer_rule(
    owner: str,
    network: str,
    service: str,
    ports: Sequence[int],
    sources: Sequence[str],
    *,
    is_public: bool,
) -> compute_v1.Firewall:
    about = f"; service {service}, ports {ports_text(ports)}{', public' if is_public else ''}"
    digest = hashlib.sha256(f"{network}{about}".encode()).hexdigest()[:8]
    name = f"{prefix_of(owner)}-{digest}"
    return compute_v1.Firewall(
        name=name,
        network=network,
        description=_description(owner) + about,
        direction="INGRESS",
        disabled=False,
        source_ranges=[block for block in sources if ":" not in block],  # the network has no other addresses
        source_tags=[prefix_of(owner)],
        target_tags=[name],
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=ports_text(ports).split())],
    )


def _inner_rule(owner: str, network: str) -> compute_v1.Firewall:
    """The owner's machines among themselves: the nodes of one replica talk on whatever port they like."""
    tag = prefix_of(owner)
    return compute_v1.Firewall(
        name=f"{tag}-inner",
        network=network,
        description=_description(owner),
        direction="INGRESS",
        disabled=False,
        source_tags=[tag],
        target_tags=[tag],
        allowed=[compute_v1.Allowed(I_p_protocol="all")],
    )


def _description(owner: str) -> str:
    return f"skyserve: machines of owner {owner}"


def _is_same(found: compute_v1.Firewall, wanted: compute_v1.Firewall) -> bool:
    def essence(rule: compute_v1.Firewall) -> tuple[object, ...]:
        allowed = sorted((entry.I_p_protocol, tuple(sorted(entry.ports))) for entry in rule.allowed)
        lists = (rule.source_ranges, rule.source_tags, rule.target_tags, rule.denied)
        return (
            allowed,
            *(sorted(map(str, entries)) for entries in lists),
            rule.direction,
            rule.disabled,
            last(rule.network),
        )

    return essence(found) == essence(wanted)
