"""A `Provisioner` over `Machines`: the part that all clouds that rent machines share.

*Two sources.* The cloud reports whether a machine runs (`Machines`), the machine reports what runs on it (`Hosts`, which sets machines
up over SSH and supervises them). `node_states.state_of` makes one state of the two.

*Unsupervised machines.* What a machine is set up with is in the order, secrets included, and is kept in memory only. A machine that
runs without a supervisor, because the process that set it up has exited, shows as UNSUPERVISED. The caller then sends its order
again, which is safe at any time, and the setup continues where it was.

*Several nodes.* The machines of a replica are requested one by one, with tokens that follow from the replica's. If one cannot be
launched, the others are destroyed before the error is raised. If that is interrupted too, the rest shows as BROKEN, or as
UNSUPERVISED, and the controller terminates it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from policies.model import Offer, Zone
from provisioners.clock import unix_now
from provisioners.cloud_clock import ClockSource, CloudClock
from provisioners.multi_node import for_each, instance_of_nodes
from provisioners.port.base import Instance, InstanceList, InstanceState, LaunchOrder, Requirements, is_silent
from provisioners.port.commands import HostConnection, Login
from provisioners.port.errors import InvalidRequestError, ProvisionError, RegionClosedError, TransientError
from provisioners.port.host_port import HostReport, Hosts
from provisioners.port.vm import (
    MAX_TOKEN,
    Finding,
    Machine,
    MachineOrder,
    Machines,
    MachineState,
    Silent,
    machine_token,
    replica_token,
)
from provisioners.remote.bootstrap_steps import ROOT

_TOKEN = re.compile(rf"[a-z0-9]([a-z0-9-]{{0,{MAX_TOKEN - 2}}}[a-z0-9])?")

_AT_ONCE = 8  # machines of one replica that are requested side by side
BUSY_POLL_S = 10.0  # between two listings while something comes or goes
CONSISTENT_AFTER_S = 60.0  # what a cloud has accepted for less than this may be missing from its lists


class OrderOf(Protocol):
    """How a replica's order becomes one machine's: user, keys, user data, image, ports."""

    def __call__(self, order: LaunchOrder, rank: int) -> MachineOrder: ...


class VmProvisioner:
    """A `Provisioner`, a `ReportSource`, a `LogSource` and a `LoginSource`. A cloud's own class gives it its `name`.

    `offer` implements `offers`. Nothing is remembered that is not somewhere else as well, but for the orders of machines
    being brought up.
    """

    name: ClassVar[str]
    steady_poll_s: ClassVar[float] = BUSY_POLL_S

    def __init__(
        self,
        machines: Machines,
        hosts: Hosts,
        order_of: OrderOf,
        offer: Callable[[Requirements], Sequence[Offer]],
        now: Callable[[], float] = unix_now,
    ) -> None:
        self.machines = machines
        self._hosts = hosts
        self._order_of = order_of
        self._offer = offer
        self._now = now
        self._clock = machines.cloud_clock if isinstance(machines, ClockSource) else CloudClock(now)
        self._orders: dict[str, LaunchOrder] = {}  # by the replica's token, while it runs and we know it
        self._launching: set[str] = set()
        self._seen: dict[str, tuple[Machine, ...]] = {}  # by the replica's token, as last listed
        self._young: dict[str, float] = {}  # tokens, and when the cloud accepted them
        self._forgetting = False
        self._changed: Callable[[], None] = _ignore
        self._lock = threading.Lock()
        self._forgotten = threading.Condition(self._lock)

    def check(self) -> Sequence[Finding]:
        """Return what `serve check` reports about the cloud: nothing is launched or changed."""
        return self.machines.check()

    # --- Provisioner

    def offers(self, need: Requirements) -> Sequence[Offer]:
        closed = self.machines.closed.why()
        found = self._offer(need)
        return [offer for offer in found if offer.zone.region not in closed] if closed else found

    def launch(self, order: LaunchOrder) -> Instance:
        self._check(order)
        with self._forgotten:
            self._forgotten.wait_for(lambda: not self._forgetting)
            self._launching.add(order.token)
        try:
            try:
                machines = self._create_all(order)
            except RegionClosedError as error:
                self.machines.closed.note(error)
                raise
            with self._lock:
                self._seen[order.token] = machines
                self._young[order.token] = self._now()
                if not any(is_lost(machine) for machine in machines):
                    self._orders[order.token] = order
        finally:
            with self._lock:
                self._launching.discard(order.token)
        self._changed()
        return self._instance(order.token, machines)

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        return [one for one in self._list(owner, None, frozenset) if service in (None, one.service)]

    def poll_s(self) -> float:
        """Return how long the last listing will do: `steady_poll_s` while nothing comes or goes.

        Changes of a running machine show sooner in its own reports and in probes.
        """
        with self._lock:
            states = {machine.state for group in self._seen.values() for machine in group}
            is_busy = bool(self._launching or self._young) or any(
                state is not MachineState.RUNNING and not state.is_gone for state in states
            )
        return BUSY_POLL_S if is_busy else self.steady_poll_s

    # --- RegionalSource

    def listing(self, owner: str) -> InstanceList:
        silent: dict[str, ProvisionError] = {}
        instances = self._list(owner, silent.__setitem__, lambda: frozenset(silent))
        return InstanceList(instances, dict(sorted(silent.items())), self.machines.closed.why())

    def _list(self, owner: str, note: Silent | None, silent: Callable[[], frozenset[str]]) -> list[Instance]:
        with self._lock:
            launching = set(
                self._launching
            )  # before the cloud is called: what starts later may be half listed
            asked_at = self._now()
        groups = by_replica(self.machines.machines(owner, note))
        unseen = silent()
        with self._lock:
            launching |= self._launching
            self._young = {t: at for t, at in self._young.items() if at > asked_at - CONSISTENT_AFTER_S}
            for token in self._young:
                if token not in groups and token in self._seen and self._seen[token][0].owner == owner:
                    groups[token] = self._seen[token]
            self._seen.update(groups)
            for token, group in list(self._seen.items()):
                is_gone = token not in groups and not is_silent(group[0].zone, unseen)
                if is_gone and token not in launching and group[0].owner == owner:
                    self._forget(token)
        return [
            self._instance(
                token, group, whole=token not in launching and not is_silent(group[0].zone, unseen)
            )
            for token, group in groups.items()
        ]

    def terminate(self, instance: Instance) -> None:
        group = self._group_of(instance)
        with self._lock:
            orders = self._orders.pop(instance.token, None)
            self._young.pop(instance.token, None)
        num_nodes = max([one.num_nodes for one in group] + [orders.num_nodes if orders else 1])
        for rank in range(num_nodes):
            self._hosts.release(machine_token(instance.token, rank))
        for_each(_AT_ONCE, self.machines.destroy, [one for one in group if not one.state.is_gone])
        with self._lock:
            self._seen.pop(instance.token, None)

    # --- ReportSource

    def on_report(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._hosts.on_report(changed)

    def reported(self, owner: str) -> Sequence[Instance]:
        with self._lock:
            seen = [(token, group) for token, group in self._seen.items() if group[0].owner == owner]
        # A group that was listed while it was launched may lack nodes that exist: only a listing can call them lost.
        return [self._instance(token, group) for token, group in seen if len(group) == group[0].num_nodes]

    # --- what machines share

    def delete_shared(self, owner: str) -> Sequence[str]:
        """`Machines.delete_shared`, and launches kept apart from it.

        While one is under way, or a machine runs, nothing is removed, and the sentence says so; one that begins meanwhile
        waits for the end, and makes again what it needs.
        """
        with self._forgotten:
            if self._launching or self._forgetting:
                return (f"{self.name} has a launch under way, so nothing that machines share is removed",)
            self._forgetting = True
        try:
            alive = [one.id for one in self.machines.machines(owner) if not one.state.is_gone]
            if alive:
                return (
                    f"{self.name} still has {', '.join(alive)}, so nothing that machines share is removed",
                )
            return self.machines.delete_shared(owner)
        finally:
            with self._forgotten:
                self._forgetting = False
                self._forgotten.notify_all()

    def addresses(self, owner: str) -> frozenset[str]:
        """Of the owner's machines, as last listed."""
        with self._lock:
            machines = [one for group in self._seen.values() for one in group if one.owner == owner]
        return frozenset(one.address for one in machines if one.address is not None and not one.state.is_gone)

    def running(self, owner: str) -> list[str]:
        """Return the tokens of the owner's machines that ran when they were last listed."""
        with self._lock:
            machines = [one for group in self._seen.values() for one in group if one.owner == owner]
        return [one.token for one in machines if one.state is MachineState.RUNNING]

    def clock_warning(self) -> str:
        """Return a sentence if the cloud's clock and ours differ by more than a few seconds; else ""."""
        return self._clock.warning()

    def usd_hour(self, machine: Machine) -> float | None:
        """About what the machine costs; None where it is unknown."""
        return None

    # --- LogSource

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        machine = self._node(instance, node)
        return b"" if machine is None else self._hosts.read_log(machine, offset, max_bytes)

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        machine = self._node(instance, node)
        return (0, 0) if machine is None else self._hosts.log_window(machine)

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        machine = self._node(instance, node)
        return b"" if machine is None else self._hosts.log_times(machine, after, offset, most)

    # --- LoginSource

    def log_in(self, instance: Instance) -> HostConnection:
        return self._hosts.log_in(self._reachable(instance, 0))

    def login(self, instance: Instance, node: int = 0) -> Login:
        return self._hosts.login(self._reachable(instance, node))

    def work_folder(self, instance: Instance, node: int = 0) -> str:
        return f"{ROOT}/machines/{machine_token(instance.token, node)}/work"

    def _reachable(self, instance: Instance, node: int) -> Machine:
        machine = self._node(instance, node)
        if machine is None or machine.address is None:
            raise TransientError(f"{instance.id} has no address yet", cloud=self.name, zone=instance.zone)
        return machine

    # --- inside

    def _check(self, order: LaunchOrder) -> None:
        zone = order.offer.zone
        if not _TOKEN.fullmatch(order.token):
            raise InvalidRequestError(
                f"{order.token!r} is no token: up to {MAX_TOKEN} lower-case letters, digits and hyphens",
                cloud=self.name,
            )
        if zone.cloud != self.name:
            raise InvalidRequestError(f"{zone} is not in {self.name}", cloud=self.name, zone=zone)

    def _create_all(self, order: LaunchOrder) -> tuple[Machine, ...]:
        """Return all machines of the replica, or an error and none of them."""
        orders = [self._order_of(order, rank) for rank in range(order.num_nodes)]
        try:
            return tuple(for_each(_AT_ONCE, self.machines.create, orders))
        except TransientError:
            raise  # the same order again finds what there is
        except ProvisionError as error:
            self._give_back(order, error)
            raise

    def _give_back(self, order: LaunchOrder, error: ProvisionError) -> None:
        """Destroy the machines of a replica that cannot be completed."""
        if order.num_nodes == 1:
            return
        left = by_replica(self._near(order.owner, order.offer.zone)).get(order.token, ())
        try:
            for_each(_AT_ONCE, self.machines.destroy, [one for one in left if not one.state.is_gone])
        except ProvisionError as stuck:
            raise TransientError(
                f"{error.message}; what was launched of it is not destroyed yet: {stuck.message}",
                cloud=self.name,
                zone=order.offer.zone,
                retry_after_s=5.0,
            ) from stuck

    def _instance(self, token: str, group: Sequence[Machine], whole: bool = True) -> Instance:
        """`whole`: an unlisted machine is lost, and not merely on its way."""
        with self._lock:
            order = self._orders.get(token)
        if order is not None:
            self._supervise(order, group)
        by_rank = {machine.rank: machine for machine in group}
        nodes = []
        for rank in range(max(group[0].num_nodes, 1)):
            machine = by_rank.get(rank)
            if machine is None:
                state = MachineState.TERMINATED if whole else MachineState.PENDING
                machine = replace(
                    group[0], id="", rank=rank, state=state, message="", preempt_at=None, refusal=None
                )
            nodes.append(self._node_instance(token, machine))
        return instance_of_nodes(nodes)

    def _supervise(self, order: LaunchOrder, group: Sequence[Machine]) -> None:
        """Once all of them run and can be reached: only then do they know each other's addresses."""
        ready = [one for one in group if one.state is MachineState.RUNNING and one.address]
        if len(ready) == order.num_nodes:
            by_rank = sorted(ready, key=rank_of)
            node_ips = [one.private_address or one.address or "" for one in by_rank]
            for machine in by_rank:
                self._hosts.supervise(machine, order, node_ips)

    def _node_instance(self, token: str, machine: Machine) -> Instance:
        report = self._hosts.report(machine) if machine.state is MachineState.RUNNING else None
        with self._lock:
            awaited = token in self._orders or token in self._launching
        state, message = state_of(machine, report, awaited)
        announced = (machine.preempt_at, report.preempt_at if report else None)
        notices = [self._clock.ours(at) for at in announced if at is not None]
        retire_at = None if report is None else report.retire_at
        endpoint = None
        if report is not None and machine.address is not None and state is InstanceState.RUNNING:
            host = f"[{machine.address}]" if ":" in machine.address else machine.address
            endpoint = f"{'https' if report.is_tls else 'http'}://{host}:{report.port}"
        return Instance(
            id=machine.id,
            token=token,
            owner=machine.owner,
            service=machine.service,
            replica_id=machine.replica_id,
            zone=machine.zone,
            capacity_type=machine.capacity_type,
            state=state,
            endpoint=endpoint,
            preempt_at=min(notices, default=None),
            retire_at=self._clock.ours(retire_at) if retire_at else retire_at,
            message=message,
            refusal=machine.refusal,
            lease=None if report is None else report.lease,
        )

    def _group_of(self, instance: Instance) -> tuple[Machine, ...]:
        """Return what there is of the instance.

        Listed from the cloud, unless all of it has been seen. A machine that the cloud does not list is taken at its word that
        it exists: lists may be late.
        """
        with self._lock:
            seen = self._seen.get(instance.token, ())
        if not seen or len(seen) < seen[0].num_nodes:
            seen = by_replica(self._near(instance.owner, instance.zone)).get(instance.token, ())
        if not instance.id or any(machine.id == instance.id for machine in seen):
            return seen
        return () if seen else (head_of(instance),)

    def _near(self, owner: str, zone: Zone) -> Sequence[Machine]:
        """Return all machines in the zone, and what else responds. Raises if the zone or its region does not."""
        silent: dict[str, ProvisionError] = {}
        found = self.machines.machines(owner, silent.__setitem__)
        for place, error in silent.items():
            if is_silent(zone, {place}):
                raise error
        return found

    def _node(self, instance: Instance, node: int) -> Machine | None:
        """Of a machine that does not run there is nothing to read."""
        running = (one for one in self._group_of(instance) if one.state is MachineState.RUNNING)
        return next((one for one in running if one.rank == node), None)

    def _forget(self, token: str) -> None:
        """The cloud has forgotten it. With the lock held."""
        group = self._seen.pop(token)
        self._orders.pop(token, None)
        for machine in group:
            self._hosts.release(machine.token)


def _ignore() -> None:
    """The callback before `on_report` is called."""


def state_of(machine: Machine, report: HostReport | None, awaited: bool) -> tuple[InstanceState, str]:
    """Return one state from what the cloud and the machine report. `awaited`: a launch of this process will set it up."""
    match machine.state:
        case MachineState.PENDING:
            return InstanceState.PENDING, machine.message
        case MachineState.STOPPING:
            return InstanceState.STOPPING, machine.message
        case MachineState.PREEMPTED:
            return InstanceState.PREEMPTED, machine.message
        case MachineState.TERMINATED:
            return InstanceState.TERMINATED, machine.message
        case MachineState.FAILED:
            return (
                InstanceState.BROKEN,
                machine.message or "the cloud accepted it and then failed to start it",
            )
        case MachineState.RUNNING:
            if report is not None:
                return report.state, report.message
            return (InstanceState.PENDING if awaited else InstanceState.UNSUPERVISED), machine.message


def by_replica(machines: Iterable[Machine]) -> dict[str, tuple[Machine, ...]]:
    """Return the machines of each replica by rank, under its token.

    Of several of one rank (one that terminated, and the one that replaced it) it is the live one.
    """
    groups: dict[str, dict[int, Machine]] = {}
    for machine in machines:
        token = replica_token(machine)
        ranks = groups.setdefault(token, {})
        known = ranks.get(machine.rank)
        if known is None or known.state.is_gone:
            ranks[machine.rank] = machine
    return {token: tuple(sorted(ranks.values(), key=rank_of)) for token, ranks in groups.items()}


def head_of(instance: Instance) -> Machine:
    """Return the head machine, as far as it is known from the instance alone."""
    return Machine(
        id=instance.id,
        token=instance.token,
        owner=instance.owner,
        service=instance.service,
        replica_id=instance.replica_id,
        rank=0,
        num_nodes=1,
        zone=instance.zone,
        capacity_type=instance.capacity_type,
        state=MachineState.PENDING,
    )


def is_lost(machine: Machine) -> bool:
    return machine.state.is_gone or machine.state in (MachineState.STOPPING, MachineState.FAILED)


def rank_of(machine: Machine) -> int:
    return machine.rank
