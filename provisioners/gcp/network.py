"""The network our machines live in, and the few ports that are open in it.

Each owner has a network of their own (Google's `default` one is open to the world on port 22), with a subnetwork in
every region, unless the user names a network or subnetworks, which may be those of another project (Shared VPC). There are
four kinds of rules: the machines of a service reach each other; port 22 of all machines is open to the controller; the ports of a
service's replicas to the controller and to the service's load balancers; the ports of load balancers to any address. A rule
is bound to machines by a network tag that is the rule's own name, which follows from the network, the
service and the ports. So machines of different services neither reach nor open each other's ports, and `admit` changes nothing but
the sources of rules that are there. Rules belong to the project of their network.

Networks and rules cannot be labelled. Their names begin with a digest of the owner, and their description says the
rest. A rule that names no source would admit any address: ours name a tag of no machine, too. Everything here may be done by several controllers of one owner at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from google.cloud import compute_v1

from policies.model import CapacityType, Scope
from provisioners.gcp.api import GcpApi, failure_of
from provisioners.gcp.errors import ALREADY_EXISTS, CLOUD
from provisioners.gcp.firewall_rules import (
    description_of,
    inner_rule,
    is_same,
    outer_rules,
    prefix_of,
    renewed,
)
from provisioners.gcp.paths import Network, NetworkSetup, network_of, network_of_url, subnetwork_of
from provisioners.port.errors import ProvisionError, RefusedError, TransientError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import MachineOrder, OrphanedResource

TAG = "skyserve"  # of machines whose rules are the user's, to write those for
_MAKING_TIMEOUT_S = 180.0  # a network with subnetworks in all regions takes a minute


class Attachment(NamedTuple):
    """Where the card of a machine belongs. A subnetwork implies its network, a network alone its subnetwork of the region."""

    network: str = ""
    subnetwork: str = ""
    tags: tuple[str, ...] = ()


class GcpNetwork:
    """The networks of one project's machines, and their rules. Thread-safe."""

    def __init__(self, api: GcpApi, setup: NetworkSetup) -> None:
        self._api = api
        self._setup = setup
        self._lock = threading.Lock()
        self._made: set[tuple[str, str]] = set()  # (project, name): what was seen to be there
        self._networks: dict[str, Network] = {}  # by the path of a subnetwork
        self._access: dict[str, FirewallAccess] = {}  # by owner, as last admitted

    def ensure(self, order: MachineOrder) -> Attachment:
        """Make missing parts. Returns where a machine with the order's ports belongs, with its network tags."""
        owner, setup, own = order.owner, self._setup, self._api.project
        prefix, subnetwork = prefix_of(owner), setup.subnets.get(order.zone.region, "")
        if setup.subnets and not subnetwork and setup.network is None:
            raise RefusedError(
                f"clouds.gcp.subnets names no subnetwork for {order.zone.region}",
                cloud=CLOUD,
                code="NoSubnetwork",
                zone=order.zone,
                scope=Scope.REGION,
            )
        if not setup.manage_firewall and not setup.makes_networks:
            named = "" if subnetwork else network_of(setup.network or "", own).path_from(own)
            return Attachment(named, subnetwork, (TAG, prefix))
        with self._lock:  # the first launches of all threads wait for one of them
            network = self._network_for(order)
            path = network.path_from(network.project)
            access = self._access.get(owner, FirewallAccess()).with_sources(order.sources)
            outer = outer_rules(
                owner, network.path_from(own), access, order.service, order.ports, order.public_ports
            )
            if network == Network(own, prefix):
                self._once(network, lambda: self._make_network(owner, prefix))
            rules = (inner_rule(owner, network.path_from(own), order.service), *outer)
            for rule in rules:
                rule.network = path
                named_rule = Network(network.project, rule.name)
                self._once(named_rule, lambda rule=rule: self._make_rule(network.project, rule))  # type: ignore[misc]
        tags = tuple(rule.name for rule in rules)
        return Attachment("" if subnetwork else network.path_from(own), subnetwork, tags)

    def admit(self, owner: str, access: FirewallAccess) -> None:
        """Change the sources of the owner's rules."""
        own = self._api.project
        with self._lock:
            self._access[owner] = access
            failures = []
            for project, rule in self._listed(owner):
                network = network_of_url(rule.network)
                wanted = renewed(rule, owner, Network(project, network.name).path_from(own), access)
                if wanted is not None:
                    wanted.network = rule.network
                    try:
                        self._put_right(project, wanted)
                    except ProvisionError as error:
                        failures.append(error)
        if failures:
            raise failures[0]

    def doubt(self) -> bool:
        """Something that was there is gone: look again at the next launch. Returns whether that can replace it."""
        with self._lock:
            self._made.clear()
            self._networks.clear()
        return self._setup.makes_networks

    def delete_shared(self, owner: str) -> list[str]:
        """Remove the owner's rules and network. Sentences about what could not be."""
        self.doubt()
        prefix, kept = prefix_of(owner), []
        firewalls = self._api.client(compute_v1.FirewallsClient)
        for project, rule in list(self._listed(owner)):
            request = compute_v1.DeleteFirewallRequest(project=project, firewall=rule.name)
            kept += self._remove(f"firewall rule {rule.name}", firewalls.delete_unary, request, rule.name)
        networks = self._api.client(compute_v1.NetworksClient)
        if self._setup.makes_networks and not kept:
            delete = compute_v1.DeleteNetworkRequest(project=self._api.project, network=prefix)
            kept += self._remove(f"network {prefix}", networks.delete_unary, delete, prefix)
        return kept

    def shared(self, owner: str) -> list[OrphanedResource]:
        """Return the owner's rules and network; neither costs anything."""
        found = [
            OrphanedResource("firewall rule", rule.name, "global", usd_month=0.0)
            for _, rule in self._listed(owner)
        ]
        if self._setup.makes_networks:
            name = prefix_of(owner)
            get = compute_v1.GetNetworkRequest(project=self._api.project, network=name)
            if self._api.find(self._api.client(compute_v1.NetworksClient).get, get, name) is not None:
                found.append(OrphanedResource("network", name, "global", usd_month=0.0))
        return found

    def owners(self) -> set[str]:
        """Return whose rules there are, by their descriptions."""
        owners_named = (rule.description.partition(";")[0] for _, rule in self._every_rule())
        start = description_of("")
        owners = {whose.removeprefix(start) for whose in owners_named if whose.startswith(start)}
        return {owner for owner in owners if owner}

    def _network_for(self, order: MachineOrder) -> Network:
        """Return the network of the order's machine, of which the rules are."""
        own, path = self._api.project, self._setup.subnets.get(order.zone.region)
        if path is not None:
            if path not in self._networks:
                self._networks[path] = self._find_network(path, order)
            return self._networks[path]
        if self._setup.network is not None:
            return network_of(self._setup.network, own)
        return Network(own, prefix_of(order.owner))

    def _find_network(self, path: str, order: MachineOrder) -> Network:
        project, region, name = subnetwork_of(path)
        get = compute_v1.GetSubnetworkRequest(project=project, region=region, subnetwork=name)
        found = self._api.find(self._api.client(compute_v1.SubnetworksClient).get, get, name)
        if found is None:
            raise RefusedError(
                f"there is no subnetwork {path}: check clouds.gcp.subnets",
                cloud=CLOUD,
                code="notFound",
                zone=order.zone,
                scope=Scope.REGION,
            )
        return network_of_url(found.network)

    def _listed(self, owner: str) -> Iterator[tuple[str, compute_v1.Firewall]]:
        """Yield the owner's firewall rules, each with its project."""
        start, whose = f"{prefix_of(owner)}-", description_of(owner)
        for project, rule in self._every_rule():
            if rule.name.startswith(start) and rule.description.partition(";")[0] == whose:
                yield project, rule

    def _every_rule(self) -> Iterator[tuple[str, compute_v1.Firewall]]:
        if not self._setup.manage_firewall:
            return
        client = self._api.client(compute_v1.FirewallsClient)
        for project in self._setup.projects(self._api.project):
            for rule in self._api.listed(client.list, compute_v1.ListFirewallsRequest(project=project)):
                yield project, rule

    def _once(self, thing: Network, make: Callable[[], None]) -> None:
        if thing not in self._made:
            make()
            self._made.add(thing)

    def _make_network(self, owner: str, name: str) -> None:
        client, project = self._api.client(compute_v1.NetworksClient), self._api.project
        get = compute_v1.GetNetworkRequest(project=project, network=name)
        if self._api.find(client.get, get, name) is None:
            network = compute_v1.Network(
                name=name, auto_create_subnetworks=True, description=description_of(owner)
            )
            insert = compute_v1.InsertNetworkRequest(project=project, network_resource=network)
            self._insert(client.insert_unary, insert, f"network {name}")

    def _make_rule(self, project: str, rule: compute_v1.Firewall) -> None:
        client = self._api.client(compute_v1.FirewallsClient)
        get = compute_v1.GetFirewallRequest(project=project, firewall=rule.name)
        found = self._api.find(client.get, get, rule.name)
        if found is None:
            insert = compute_v1.InsertFirewallRequest(project=project, firewall_resource=rule)
            self._insert(client.insert_unary, insert, f"firewall rule {rule.name}")
        elif not is_same(found, rule):
            self._put_right(project, rule)

    def _put_right(self, project: str, rule: compute_v1.Firewall) -> None:
        """One call, so there is no moment without a rule or with a half one.

        Not a patch: that leaves alone what the new rule does not name, such as the last source.
        """
        client = self._api.client(compute_v1.FirewallsClient)
        update = compute_v1.UpdateFirewallRequest(project=project, firewall=rule.name, firewall_resource=rule)
        self._finish(self._api.call(client.update_unary, update), update, f"firewall rule {rule.name}")

    def _insert(self, method: Callable[..., compute_v1.Operation], request: _InProject, what: str) -> None:
        try:
            operation = self._api.call(method, request)
        except ProvisionError as error:
            if error.code == ALREADY_EXISTS:
                # Another process was quicker, and may not be done with it.
                raise TransientError(f"{what} is being made by another process", cloud=CLOUD) from error
            raise
        self._finish(operation, request, what)

    def _remove(
        self, what: str, method: Callable[..., compute_v1.Operation], request: _InProject, name: str
    ) -> list[str]:
        try:
            operation = self._api.find(method, request, name)
            if operation is not None:
                self._finish(operation, request, what)
        except ProvisionError as error:
            return [f"{what} could not be removed: {error.message}"]
        return []

    def _finish(self, operation: compute_v1.Operation, request: _InProject, what: str) -> None:
        done = self._api.wait(operation, _MAKING_TIMEOUT_S, project=request.project)
        if done.error.errors:
            raise failure_of(done, None, CapacityType.ON_DEMAND, self._api.now())
        if done.status != compute_v1.Operation.Status.DONE:
            raise TransientError(f"{what} is still being made", cloud=CLOUD)


class _InProject(Protocol):
    """A request about something of a project."""

    project: str
