"""A make-believe Google Cloud: one project, its instances, and the knobs that tests turn.

Strict where the real one is: names are unique, an idempotency key is remembered for an hour, capacity and quotas run out,
operations take their time and may fail after they were accepted, pages are short. `gcp_instances` has the machines,
`gcp_ground` the networks and the catalog, `gcp_server` the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.clouds.api_limits import Limits
from tests.clouds.gcp.gcp_discovery import Call
from tests.clouds.gcp.gcp_ground import PROJECT, SHARED
from tests.clouds.gcp.gcp_instances import Instances
from tests.clouds.gcp.gcp_parts import Fault, Refusal, not_found
from tests.clouds.gcp.gcp_permissions import needs_of
from tests.clouds.meter import ADDRESS_USD_HOUR, DISK_USD_HOUR, MACHINE_USD_HOUR

_WAIT_S = 120.0  # the longest response of a `wait`


@dataclass
class World(Instances):
    """What happens to a caller, and what tests do to machines. Every knob may be turned at any time."""

    dead_token: bool = False
    clock_off_s: float = 0.0  # how far Google's clock is ahead of the caller's
    identities: dict[str, frozenset[str]] = field(default_factory=dict)  # of machines: permissions by token
    faults: list[Fault] = field(default_factory=list)
    # The controller crashes at this call from now on (0 is the next): before it, or after its effect.
    crash: tuple[int, bool] | None = None
    is_down: bool = False  # it is dead: nothing that it sends arrives
    calls: list[Call] = field(default_factory=list)
    refused: list[tuple[str, list[str]]] = field(default_factory=list)  # requests that are none
    violations: list[str] = field(default_factory=list)  # our own malformed responses
    limits: Limits = field(init=False)  # by "read", "list", "wait" and "write"

    def __post_init__(self) -> None:
        self.limits = Limits(self.clock.now)

    # --- for tests ------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        """The names of instances that are billed."""
        with self._lock:
            self._settle()
            return sorted(name for (_, name) in self.instances)

    def preempt(self, zone: str, name: str) -> None:
        """Google takes a spot machine: a signal, and `preemption_s` later nothing is left."""
        with self._lock:
            self._settle()
            instance = self.instances[zone, name]
            assert instance["scheduling"]["instanceTerminationAction"] == "DELETE"
            instance["status"] = "STOPPING"
            self._operate(
                zone,
                "compute.instances.preempted",
                f"instances/{name}",
                lambda: self._vanish(zone, name, "preempted"),
                takes_s=self.preemption_s,
                user="system",
            )

    def stop(self, zone: str, name: str) -> None:
        """Someone shuts the machine down from inside: it stays, and its disk is billed."""
        with self._lock:
            self._settle()
            self.instances[zone, name]["status"] = "TERMINATED"

    def usd_hour(self) -> float:
        """The resources that are billed now: instances while they run, disks and addresses as long as they exist. An instance that has
        stopped gives its ephemeral address back, and keeps its disk ("VM instance lifecycle")."""
        with self._lock:
            self._settle()
            running = [
                one for one in self.instances.values() if one["status"] in ("RUNNING", "STAGING", "STOPPING")
            ]
            public = [one for one in running if one["networkInterfaces"][0].get("accessConfigs")]
            return (
                len(running) * MACHINE_USD_HOUR
                + len(public) * ADDRESS_USD_HOUR
                + len(self.disks) * DISK_USD_HOUR
            )

    def advance(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        with self._lock:
            self._settle()
        self._tell()

    def count(self, method: str) -> int:
        return sum(call.id == method for call in self.calls)

    # --- for the server -------------------------------------------------------------------------------------

    def enter(self, call: Call) -> int | None:
        """None if the caller has crashed by now; 1 if the caller crashes before the response, else 0."""
        with self._lock:
            if self.is_down or self.crash == (0, False):
                self.is_down, self.crash = True, None
                return None
            self.calls.append(call)
            left = self.crash
            if left is not None and left[0] > 0:
                self.crash = (left[0] - 1, left[1])
            return 1 if left == (0, True) else 0

    def leave(self, entered: int) -> bool:
        """After the call had its effect: whether its sender is dead now."""
        with self._lock:
            if entered:
                self.is_down, self.crash = True, None
            return bool(entered) or self.is_down

    def fault(self, method: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.method == method and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def handle(self, call: Call, headers: Mapping[str, str]) -> Any:
        """Obey a valid call."""
        if self.dead_token:
            raise Refusal(401, "authError", "Request had invalid authentication credentials.")
        project = call.path.get("project", PROJECT)
        if project not in (PROJECT, SHARED):
            raise not_found(f"projects/{project}")
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        for permission, where in needs_of(call.id, project, call.body):
            if not (
                permission in self.identities[token]
                if token in self.identities
                else self.allows(permission, where)
            ):
                raise Refusal(403, "forbidden", f"Required '{permission}' permission for 'projects/{where}'")
        if call.id.endswith("Operations.wait"):
            self._sit_out(call)
        try:
            with self._lock:
                self._settle()
                return deepcopy(_HANDLERS[call.id](self, call, headers))
        finally:
            self._tell()

    def _sit_out(self, call: Call) -> None:
        with self._lock:
            operation = self._operation(call)
        self.clock.sleep(min(_WAIT_S, operation.done_at - self.clock.now()))


_HANDLERS: Mapping[str, Callable[[World, Call, Mapping[str, str]], Any]] = {
    "compute.instances.insert": World._insert_instance,
    "compute.instances.get": World._get_instance,
    "compute.instances.delete": World._delete_instance,
    "compute.instances.aggregatedList": World._list_instances,
    "compute.zoneOperations.list": World._list_operations,
    "compute.zoneOperations.wait": World._wait,
    "compute.globalOperations.wait": World._wait,
    "compute.disks.aggregatedList": World._list_disks,
    "compute.disks.delete": World._delete_disk,
    "compute.addresses.aggregatedList": World._list_addresses,
    "compute.addresses.delete": World._delete_address,
    "compute.networks.get": World.get_network,
    "compute.networks.insert": World.insert_network,
    "compute.networks.delete": World.delete_network,
    "compute.subnetworks.get": World.get_subnetwork,
    "compute.subnetworks.testIamPermissions": World.test_subnetwork,
    "compute.routers.aggregatedList": World.list_routers,
    "compute.firewalls.get": World.get_firewall,
    "compute.firewalls.list": World.list_firewalls,
    "compute.firewalls.insert": World.insert_firewall,
    "compute.firewalls.update": World.update_firewall,
    "compute.firewalls.delete": World.delete_firewall,
    "compute.projects.get": World.get_project,
    "compute.regions.list": World.list_regions,
    "compute.machineTypes.aggregatedList": World.list_machine_types,
    "compute.acceleratorTypes.aggregatedList": World.list_accelerator_types,
    "cloudresourcemanager.projects.testIamPermissions": World.test_permissions,
    "cloudbilling.services.skus.list": World.list_skus,
}
