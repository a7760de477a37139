"""Google Cloud: machines are Compute Engine instances.

An instance's name follows from the order's token, and names are unique in a zone: however often an order is sent, by
however many controllers, there is one instance. What became of an order whose response was lost is read from the zone's
operations, which Google keeps for two weeks, before anything is requested again; the insertion carries an idempotency
key besides. A stock-out is seldom refused at once: the insertion is accepted and fails seconds later, so it is waited
for, a bounded time.

A spot machine that is preempted is deleted with its disk (`gcp_order`). That it was preempted and not deleted by
the preemption is reported by an operation of the type `compute.instances.preempted`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from google.auth.credentials import Credentials
from google.cloud import compute_v1

from policies.model import Zone
from provisioners.clock import unix_now
from provisioners.gcp.api import GcpApi, failure_of
from provisioners.gcp.check import check_project
from provisioners.gcp.discovery import discover
from provisioners.gcp.error_codes import REQUIRES_OS_LOGIN
from provisioners.gcp.errors import ALREADY_EXISTS, CLOUD
from provisioners.gcp.network import GcpNetwork
from provisioners.gcp.orphans import GcpOrphans
from provisioners.gcp.paths import NetworkSetup
from provisioners.gcp.prices import spot_prices
from provisioners.gcp.protection import Protection
from provisioners.gcp.translate import (
    accepted,
    instance_of,
    last,
    machine_of,
    name_of,
    owned,
    request_id,
    same_tags,
    unix_s,
)
from provisioners.machine_memory import MachineMemory, key_of
from provisioners.offers.catalog.discovered import Discovery, Progress
from provisioners.offers.catalog.model import Shape
from provisioners.offers.reservations import Reservations, reserved_for
from provisioners.port.base import is_silent
from provisioners.port.errors import InvalidRequestError, ProvisionError, RefusedError, TransientError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import Finding, Machine, MachineOrder, MachineState, OrphanedResource, Silent

_INSERT_WAIT_S = 60.0  # stock-outs show within seconds; what takes longer is reported as pending
_SHOW_S = 60.0  # until an instance whose insertion is done can be seen by everybody
_PREEMPTION_S = 30.0  # from Google's signal to the end of a spot machine
_PREEMPTED = "compute.instances.preempted"

_S = MachineState
_DONE = compute_v1.Operation.Status.DONE


class GcpMachines:
    """`Machines` on Compute Engine.

    `project` and `credentials` default to the application default ones; `endpoint` is another server than Google's
    (the default credentials are not sent over plain http). `network`, `subnets`, `manage_firewall` and `use_private_ip`: see
    `NetworkSetup`; with the last one the controller is inside of the network, and machines get no public address.
    `shielded` and `kms_key`: see `Protection`. `os_login`: "true" leaves to the project whether OS Login is on, "false" turns it
    off on our instances, "auto" does so unless the organisation requires it. `regions` are those of which `check` speaks.
    Spot prices need an API key for the Cloud Billing catalog.
    """

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        project: str | None = None,
        *,
        credentials: Credentials | None = None,
        endpoint: str | None = None,
        network: str | None = None,
        subnets: Mapping[str, str] | None = None,
        manage_firewall: bool = True,
        use_private_ip: bool = False,
        regions: Sequence[str] = (),
        shielded: bool = False,
        os_login: str = "auto",
        kms_key: str | Mapping[str, str] | None = None,
        billing_api_key: str | None = None,
        service_account: str | None = None,
        dead_man_account: str | None = None,
        reservations: Reservations = MappingProxyType({}),
        now: Callable[[], float] = unix_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._api = GcpApi(project, credentials, endpoint, now=now, sleep=sleep)
        self._setup = NetworkSetup(network, subnets or {}, manage_firewall, use_private_ip)
        self._network = GcpNetwork(self._api, self._setup)
        self._regions = tuple(regions)
        self._os_login = os_login
        self._protection = Protection(shielded, os_login == "true", kms_key)
        self._orphans = GcpOrphans(self._api)
        self._memory = MachineMemory()
        self.cloud_clock = self._api.clock
        self.closed = ClosedRegions(now)
        self._public = not use_private_ip
        self._billing_api_key = billing_api_key
        self._service_account = service_account
        self._dead_man_account = dead_man_account
        self._reservations = reservations

    def create(self, order: MachineOrder) -> Machine:
        try:
            return self._create(order)
        except RefusedError as error:
            if REQUIRES_OS_LOGIN not in error.message or not self._may_leave_os_login():
                raise
        return self._create(order)

    def _may_leave_os_login(self) -> bool:
        """Turn OS Login off no more, if that was tried and is left to us."""
        was_tried = self._os_login == "auto" and not self._protection.leaves_os_login
        if was_tried:
            self._protection = replace(self._protection, leaves_os_login=True)
        return was_tried

    def _create(self, order: MachineOrder) -> Machine:
        history = self._history(order.zone, name_of(order.token))
        insertions = [operation for operation in history if operation.operation_type == "insert"]
        current = next((operation for operation in insertions if not operation.error.errors), None)
        if current is None:
            try:
                current = self._insert(order, failures=len(insertions))
            except ProvisionError as error:
                if error.code != ALREADY_EXISTS:
                    raise
                return self._adopt(order)
        return self._await(order, current)

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        # In this order: machines made from now on are in both.
        expected = self._memory.alive(owner)
        unseen: set[str] = set()

        def note(place: str, error: ProvisionError) -> None:
            unseen.add(place)
            if silent is not None:
                silent(place, error)

        listed = {
            key_of(one.zone, one.id): one for one in self._list(owner, None if silent is None else note)
        }

        def list_zone(machine: Machine, about: Callable[[Machine], Machine]) -> Machine | None:
            """Return what `about` finds out; None if the machine's zone does not respond."""
            if is_silent(machine.zone, unseen):
                return None
            try:
                return about(machine)
            except TransientError as error:
                if silent is None:
                    raise
                note(machine.zone.name, error)
                return None

        for key, machine in listed.items():
            self._memory.note(machine)
            if machine.state is _S.STOPPING and not self._memory.is_termination_ours(machine):
                listed[key] = list_zone(machine, self._with_notice) or machine
        missing = [
            list_zone(machine, self._recheck) for key, machine in expected.items() if key not in listed
        ]
        ended = self._memory.ended(owner, self._api.now())
        found = {key_of(one.zone, one.id): one for one in missing if one is not None}
        return list({**ended, **found, **listed}.values())

    def destroy(self, machine: Machine) -> None:
        self._memory.record_termination(machine.zone, machine.id)
        if self._delete(machine.zone, machine.id):
            return
        # Nothing of that name is to be seen. Unless it is just being made, it is gone.
        history = self._history(machine.zone, machine.id)
        ended = _ended_machine(machine, history, self._api.now())
        if ended is not None and ended.state is _S.PENDING:
            raise TransientError("the machine is still being made", cloud=CLOUD, zone=machine.zone)
        if history:
            over = (
                ended if ended is not None and ended.state.is_gone else replace(machine, state=_S.TERMINATED)
            )
            self._memory.mark_gone(over, self._api.now())

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        """Return one price list for all regions: they have prices together, or an error is raised."""
        if self._billing_api_key is None:
            return {}
        return spot_prices(self._api, self._billing_api_key, regions)

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return self._orphans.of(owner, silent)

    def remove(self, orphan: OrphanedResource) -> None:
        self._orphans.remove(orphan)

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return self._network.shared(owner)

    def owners(self, silent: Silent | None = None) -> Sequence[str]:
        return sorted(self._orphans.owners(silent) | self._network.owners())

    def discover(self, known: Sequence[Shape], progress: Progress) -> Discovery:
        return discover(self._api, known, progress)

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self._network.admit(owner, access)

    def delete_shared(self, owner: str) -> Sequence[str]:
        return self._network.delete_shared(owner)

    def check(self) -> Sequence[Finding]:
        return check_project(self._api, self._setup, self._regions)

    # --- making ---------------------------------------------------------------------------------------------

    def _insert(self, order: MachineOrder, failures: int) -> compute_v1.Operation:
        # Said before anything is made around it: an order that is wrong leaves nothing.
        protection = self._protection
        draft = instance_of(
            order,
            project=self._api.project,
            network_tags=(),
            public=self._public,
            service_account=self._service_account,
            dead_man_account=self._dead_man_account,
            protection=protection,
            reservation=reserved_for(order, self._reservations),
        )
        place = self._network.ensure(order)
        for key in ("network", "subnetwork"):
            if value := getattr(place, key):
                setattr(draft.network_interfaces[0], key, value)
        draft.tags = compute_v1.Tags(items=list(place.tags))
        request = compute_v1.InsertInstanceRequest(
            project=self._api.project,
            zone=order.zone.name,
            request_id=request_id(
                self._api.project,
                order.zone,
                order.token,
                failures,
                "/os-login" if protection.leaves_os_login else "",
            ),
            instance_resource=draft,
        )
        insert = self._api.client(compute_v1.InstancesClient).insert_unary
        try:
            return self._api.call(insert, request, zone=order.zone, capacity_type=order.capacity_type)
        except ProvisionError as error:
            # The network was removed since we saw it: made again at the next try.
            if f"/networks/{last(place.network)}" in error.message and self._network.doubt():
                raise TransientError(error.message, cloud=CLOUD, code=error.code, zone=order.zone) from error
            raise

    def _await(self, order: MachineOrder, operation: compute_v1.Operation) -> Machine:
        """Wait for an insertion that was accepted.

        From here on there may be a machine, and no error says otherwise but the operation's own.
        """
        pending = accepted(order, unix_s(operation.insert_time) or self._api.now())
        self._memory.note(pending)
        try:
            operation = self._api.wait(operation, _INSERT_WAIT_S, order.zone)
            found = self._get(order.zone, pending.id) if operation.status == _DONE else None
        except ProvisionError:
            return pending
        if operation.status != _DONE:
            return pending
        if found is not None and not _is_dead(found):
            return self._ours(order, found)
        if not operation.error.errors:
            return self._recheck(pending)
        # The insertion failed. Its remains, if any, are of no use.
        if found is not None and same_tags(order, found.labels):
            self._delete(order.zone, pending.id)
        failure = failure_of(operation, order.zone, order.capacity_type, self._api.now())
        self._memory.drop(order.zone, pending.id)
        raise failure

    def _adopt(self, order: MachineOrder) -> Machine:
        """Return the instance whose name is taken: ours, or that of another owner."""
        found = self._get(order.zone, name_of(order.token))
        if found is None:
            raise TransientError("the machine is being made", cloud=CLOUD, zone=order.zone)
        return self._ours(order, found)

    def _ours(self, order: MachineOrder, found: compute_v1.Instance) -> Machine:
        machine = machine_of(found, public=self._public) if same_tags(order, found.labels) else None
        if machine is None:
            self._memory.drop(order.zone, found.name)
            raise InvalidRequestError(
                f"{found.name} in {order.zone.name} is an instance of another owner: rename or delete it",
                cloud=CLOUD,
                code=ALREADY_EXISTS,
                zone=order.zone,
            )
        self._memory.note(machine)
        return machine

    # --- looking --------------------------------------------------------------------------------------------

    def _list(self, owner: str, silent: Silent | None) -> list[Machine]:
        request = compute_v1.AggregatedListInstancesRequest(project=self._api.project, filter=owned(owner))
        every = self._api.client(compute_v1.InstancesClient).aggregated_list
        scopes = self._api.listed(every, request, silent=silent)
        found = [
            machine_of(instance, public=self._public) for _, scope in scopes for instance in scope.instances
        ]
        return [machine for machine in found if machine is not None and machine.owner == owner]

    def _recheck(self, machine: Machine) -> Machine:
        """Return one that ought to be there and is not listed: alive after all, pending, or terminated."""
        found = self._get(machine.zone, machine.id)
        seen = machine_of(found, public=self._public) if found is not None else None
        if seen is not None and seen.token == machine.token:
            return seen
        ended = _ended_machine(machine, self._history(machine.zone, machine.id), self._api.now())
        if ended is None:
            return replace(machine, state=_S.TERMINATED, message="the machine is gone, the reason is unknown")
        if ended.state.is_gone:
            self._memory.mark_gone(ended, self._api.now())
        return ended

    def _with_notice(self, machine: Machine) -> Machine:
        """Return a machine that is on its way out, and not by our wish."""
        for operation in self._history(machine.zone, machine.id):
            if operation.operation_type == _PREEMPTED:
                began = unix_s(operation.insert_time) or self._api.now()
                return replace(
                    machine, preempt_at=began + _PREEMPTION_S, message="Compute Engine preempts it"
                )
        return machine

    def _history(self, zone: Zone, name: str) -> list[compute_v1.Operation]:
        """Return everything that was done to the instance of that name, the newest first."""
        request = compute_v1.ListZoneOperationsRequest(
            project=self._api.project, zone=zone.name, filter=f"targetLink:instances/{name}"
        )
        listed: list[Any] = self._api.listed(
            self._api.client(compute_v1.ZoneOperationsClient).list, request, zone=zone
        )
        # The filter is a substring, so there may be others among them.
        own = [operation for operation in listed if last(operation.target_link) == name]
        return sorted(own, key=lambda operation: unix_s(operation.insert_time) or 0.0)[::-1]

    def _get(self, zone: Zone, name: str) -> compute_v1.Instance | None:
        request = compute_v1.GetInstanceRequest(project=self._api.project, zone=zone.name, instance=name)
        return self._api.find(self._api.client(compute_v1.InstancesClient).get, request, name, zone=zone)

    def _delete(self, zone: Zone, name: str) -> bool:
        """Return whether there was anything to delete."""
        request = compute_v1.DeleteInstanceRequest(project=self._api.project, zone=zone.name, instance=name)
        delete = self._api.client(compute_v1.InstancesClient).delete_unary
        return self._api.find(delete, request, name, zone=zone) is not None


def _is_dead(instance: compute_v1.Instance) -> bool:
    return instance.status in ("STOPPING", "STOPPED", "TERMINATED", "DEPROVISIONING")


def _ended_machine(machine: Machine, history: Sequence[compute_v1.Operation], now: float) -> Machine | None:
    """Return what the operations (newest first) say of a machine that is not to be seen; None if they say nothing of it."""
    end: Machine | None = None
    for operation in history:
        failed = bool(operation.error.errors)
        if operation.operation_type == "insert":
            if end is not None:
                return end
            if operation.status != _DONE:
                return replace(machine, state=_S.PENDING)
            if failed:
                error = failure_of(operation, machine.zone, machine.capacity_type, now)
                refusal = None if isinstance(error, TransientError) else error.refusal
                message = f"it could not be made: {error.message}"
                return replace(machine, state=_S.FAILED, message=message, refusal=refusal)
            fresh = now < (unix_s(operation.end_time) or 0.0) + _SHOW_S
            return replace(machine, state=_S.PENDING) if fresh else None
        if operation.operation_type == _PREEMPTED and not failed:
            end = replace(machine, state=_S.PREEMPTED, preempt_at=None, message="Compute Engine preempted it")
        elif operation.operation_type == "delete" and not failed:
            end = replace(
                machine, state=_S.TERMINATED, preempt_at=None, message=f"deleted by {operation.user}"
            )
    return end
