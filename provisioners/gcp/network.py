"""The network our machines live in, and the few ports that are open in it.

Each owner has a network of their own (Google's `default` one is open to the world on port 22), with a subnetwork in
every region and two kinds of rules: the owner's machines reach each other, and a set of ports is reachable from a set of
sources. The latter is bound to machines by a network tag that is the rule's own name, which follows from the ports and
sources: a rule is never changed, and machines of different services do not open each other's ports.

Networks and rules cannot be labelled. Their names begin with a digest of the owner, and their description says the
rest. Everything here may be done by several controllers of one owner at once.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
from collections.abc import Callable, Sequence

from google.cloud import compute_v1

from policies.model import CapacityType
from provisioners.errors import InvalidRequestError, ProvisionError, TransientError
from provisioners.gcp.api import GcpApi, failure_of
from provisioners.gcp.errors import ALREADY_EXISTS, CLOUD
from provisioners.gcp.order import last
from provisioners.machines import Leftover

SSH_PORT = 22
_ANYWHERE = ("0.0.0.0/0",)
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

    def ensure(
        self, owner: str, ports: Sequence[int], sources: Sequence[str], public_ports: Sequence[int] = ()
    ) -> tuple[str, tuple[str, ...]]:
        """Make what is missing: (the network's path, the network tags of a machine with these ports)."""
        name, prefix = self._network or prefix_of(owner), prefix_of(owner)
        path = f"global/networks/{name}"
        wanted = [_inner_rule(owner, path)]
        outer = outer_rule(owner, path, ports, sources)
        public = outer_rule(owner, path, public_ports, _ANYWHERE, ()) if public_ports else None
        wanted += [rule for rule in (outer, public) if rule is not None]
        with self._lock:  # the first launches of all threads wait for one of them
            if self._network is None:
                self._once(name, lambda: self._make_network(owner, name))
            for rule in wanted:
                self._once(rule.name, lambda rule=rule: self._make_rule(rule))  # type: ignore[misc]
        return path, (prefix, *(rule.name for rule in wanted[1:]))

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

    def _rules(self, owner: str) -> list[str]:
        """The names of the owner's firewall rules."""
        request = compute_v1.ListFirewallsRequest(project=self._api.project)
        listed = self._api.listed(self._api.client(compute_v1.FirewallsClient).list, request)
        start, description = f"{prefix_of(owner)}-", _description(owner)
        return [
            rule.name for rule in listed if rule.name.startswith(start) and rule.description == description
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
            patch = compute_v1.PatchFirewallRequest(
                project=project, firewall=rule.name, firewall_resource=rule
            )
            self._finish(self._api.call(client.patch_unary, patch), f"firewall rule {rule.name}")

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


def outer_rule(
    owner: str,
    network: str,
    ports: Sequence[int],
    sources: Sequence[str],
    always: Sequence[int] = (SSH_PORT,),
) -> compute_v1.Firewall | None:
    """These ports, and those that are open `always`, from the sources. None without sources: a rule that names none would
    admit everybody."""
    try:
        blocks = [ipaddress.ip_network(source, strict=False) for source in sources]
    except ValueError as error:
        raise InvalidRequestError(f"sources must be CIDR blocks: {error}", cloud=CLOUD) from error
    ranges = sorted({str(block) for block in blocks if block.version == 4})  # the network has no other
    if not ranges:
        return None
    open_ports = [str(port) for port in sorted({*always, *ports})]
    digest = hashlib.sha256(f"{network} {open_ports} {ranges}".encode()).hexdigest()[:8]
    name = f"{prefix_of(owner)}-{digest}"
    return compute_v1.Firewall(
        name=name,
        network=network,
        description=_description(owner),
        direction="INGRESS",
        disabled=False,
        source_ranges=ranges,
        target_tags=[name],
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=open_ports)],
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
