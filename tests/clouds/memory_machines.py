"""A cloud of machines in memory, and hosts in memory: what the fleet's own tests stand on. Time is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.model import CapacityType, Zone
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import (
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    Refusal,
    TransientError,
)
from provisioners.port.firewall import FirewallAccess, Opening, openings
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import (
    Finding,
    Machine,
    MachineOrder,
    MachineState,
    OrphanedResource,
    Silent,
    machine_token,
)

CLOUD = "memory"
ZONES = (Zone(CLOUD, "us", "us-a"), Zone(CLOUD, "us", "us-b"), Zone(CLOUD, "eu", "eu-a"))


@dataclass(slots=True)
class _Kept:
    order: MachineOrder
    id: str
    launched_at: float
    end: tuple[MachineState, str] | None = None
    preempt_at: float | None = None
    refusal: Refusal | None = None


@dataclass
class MemoryMachines:
    """PENDING for `boot_s`; missing from lists for `late_s`. `before` and `after` are called around every creation and
    destruction with its name and token, and may raise."""

    name: ClassVar[str] = CLOUD
    now: Callable[[], float]
    boot_s: float = 30.0
    late_s: float = 0.0
    room: dict[tuple[str, CapacityType], int] = field(default_factory=dict)
    before: Callable[[str, str], None] = lambda call, token: None
    after: Callable[[str, str], None] = lambda call, token: None
    kept: dict[str, _Kept] = field(default_factory=dict)
    left: list[OrphanedResource] = field(default_factory=list)  # belongs to no machine
    common: list[OrphanedResource] = field(default_factory=list)  # what machines share
    access: dict[str, FirewallAccess] = field(default_factory=dict)  # by owner
    lock: threading.Lock = field(default_factory=threading.Lock)
    mute: set[str] = field(default_factory=set)  # regions that do not respond
    closed: ClosedRegions = field(init=False)

    def __post_init__(self) -> None:
        self.closed = ClosedRegions(self.now)

    def create(self, order: MachineOrder) -> Machine:
        self.before("create", order.token)
        if order.zone.region in self.mute:
            raise lost()
        with self.lock:
            if order.token not in self.kept:
                self._check(order)
                number = len(self.kept) + 1
                self.kept[order.token] = _Kept(order, f"m-{number}", self.now())
            made = self._machine(self.kept[order.token])
        self.after("create", order.token)
        return made

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        for region in sorted(self.mute):
            if silent is None:
                raise lost()
            silent(region, lost())
        with self.lock:
            mine = [
                one
                for one in self.kept.values()
                if one.order.owner == owner and one.order.zone.region not in self.mute
            ]
            return [self._machine(one) for one in mine if self.now() >= one.launched_at + self.late_s]

    def destroy(self, machine: Machine) -> None:
        self.before("destroy", machine.token)
        with self.lock:
            kept = self.kept.get(machine.token)
            is_left = kept is not None and (kept.end is None or kept.end[0] is MachineState.FAILED)
            if kept is not None and is_left and kept.id == machine.id:
                kept.end = MachineState.TERMINATED, ""
        self.after("destroy", machine.token)

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        return {}

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return list(self.left)

    def remove(self, orphan: OrphanedResource) -> None:
        self.before("remove", orphan.id)
        with self.lock:
            self.left = [one for one in self.left if one != orphan]
        self.after("remove", orphan.id)

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return list(self.common)

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self.before("admit", owner)
        with self.lock:
            self.access[owner] = access
        self.after("admit", owner)

    def open(self, token: str) -> frozenset[Opening]:
        """The open ports of a machine."""
        with self.lock:
            order = self.kept[token].order
            access = self.access.get(order.owner, FirewallAccess(frozenset(order.sources)))
            return openings(access, order.service, order.ports, order.public_ports)

    def delete_shared(self, owner: str) -> Sequence[str]:
        self.before("delete_shared", owner)
        with self.lock:
            self.common.clear()
        self.after("delete_shared", owner)
        return ()

    def check(self) -> Sequence[Finding]:
        return ()

    def take(self, token: str, message: str = "taken") -> None:
        with self.lock:
            self.kept[token].end = MachineState.PREEMPTED, message

    def live(self) -> list[str]:
        with self.lock:
            return [token for token, one in self.kept.items() if one.end is None]

    def _check(self, order: MachineOrder) -> None:
        if order.zone not in ZONES:
            raise InvalidRequestError(f"there is no zone {order.zone}", cloud=CLOUD, zone=order.zone)
        room = self.room.get((order.zone.name, order.capacity_type))
        taken = sum(
            one.end is None and (one.order.zone, one.order.capacity_type) == (order.zone, order.capacity_type)
            for one in self.kept.values()
        )
        if room is not None and taken >= room:
            raise CapacityError(f"{order.zone} is full", cloud=CLOUD, code="Full", zone=order.zone)

    def _machine(self, kept: _Kept) -> Machine:
        order = kept.order
        state = MachineState.RUNNING if self.now() >= kept.launched_at + self.boot_s else MachineState.PENDING
        state, message = kept.end or (state, "")
        number = int(kept.id.removeprefix("m-"))
        return Machine(
            id=kept.id,
            token=order.token,
            owner=order.owner,
            service=order.service,
            replica_id=order.replica_id,
            rank=order.rank,
            num_nodes=order.num_nodes,
            zone=order.zone,
            capacity_type=order.capacity_type,
            state=state,
            address=f"10.0.0.{number}" if state is MachineState.RUNNING else None,
            private_address=f"192.168.0.{number}",
            launched_at=kept.launched_at,
            preempt_at=kept.preempt_at,
            message=message,
            refusal=kept.refusal,
            role=order.role,
        )


def order_of(order: LaunchOrder, rank: int) -> MachineOrder:
    """As a cloud's own would, without keys."""
    return MachineOrder(
        token=machine_token(order.token, rank),
        owner=order.owner,
        service=order.service,
        replica_id=order.replica_id,
        rank=rank,
        num_nodes=order.num_nodes,
        zone=order.offer.zone,
        instance_type=order.offer.instance_type,
        capacity_type=order.offer.capacity_type,
        public_key="ssh-ed25519 AAAA test",
    )


class Trouble:
    """Raises the error it is configured with, at the call of that number (from 0), and is quiet after."""

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at = at
        self.error = error
        self.calls = 0

    def __call__(self, call: str, token: str) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number == self.at:
            raise self.error()


def lost() -> ProvisionError:
    return TransientError("the answer is lost", cloud=CLOUD)


class KilledError(BaseException):
    """The process ends here."""
