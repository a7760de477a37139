"""A cloud in memory: the port's reference implementation.

Time is injected and nothing happens by itself: an instance's state follows from how much time has passed since
its launch. Trouble is ordered in advance (`fail_next_launch`) or caused at once (`preempt`, `set_capacity`, …).
Passes the same contract suite as the real clouds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar

from policies.model import CapacityType, Offer, Zone
from provisioners.multi_node import state_of_nodes, who_is_lost
from provisioners.offers.zone_offers import ZonePrices, offers_for
from provisioners.port.base import Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError, InvalidRequestError, ProvisionError

CLOUD = "fake"
DEFAULT_PRICES = (
    ZonePrices(Zone(CLOUD, "us", "us-a"), 0.30, 1.00),
    ZonePrices(Zone(CLOUD, "us", "us-b"), 0.33, 1.00),
    ZonePrices(Zone(CLOUD, "eu", "eu-a"), 0.36, 1.10),
)


@dataclass(slots=True)
class _FakeInstance:
    """What the cloud knows of one instance; all else follows from it and the time.

    Its nodes boot in step and differ only in whether they are lost.
    """

    order: LaunchOrder
    launched_at: float
    preempt_at: float | None = None
    stopped: bool = False
    failure: tuple[InstanceState, str] | None = None
    lost: set[int] = field(default_factory=set)


class FakeProvisioner:
    """`calls` is the log of all calls: ("launch" | "terminate", token).

    An accepted launch is PENDING for `boot_s`, then in SETUP for `setup_s`, then RUNNING.
    """

    name: ClassVar[str] = CLOUD

    def __init__(
        self,
        now: Callable[[], float],
        *,
        prices: Sequence[ZonePrices] = DEFAULT_PRICES,
        boot_s: float = 30.0,
        setup_s: float = 60.0,
    ) -> None:
        self.calls: list[tuple[str, str]] = []
        self._now = now
        self._prices = prices
        self._boot_s = boot_s
        self._setup_s = setup_s
        self._machines: dict[str, _FakeInstance] = {}
        self._capacity: dict[tuple[str, CapacityType], int] = {}
        self._troubles: list[tuple[ProvisionError, bool]] = []
        self._lock = Lock()
        self._changed: Callable[[], None] = lambda: None

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return offers_for(need, self._prices, instance_type=CLOUD)

    def launch(self, order: LaunchOrder) -> Instance:
        with self._lock:
            self.calls.append(("launch", order.token))
            error, after_creation = self._troubles.pop(0) if self._troubles else (None, False)
            if error is not None and not after_creation:
                raise error
            if order.token not in self._machines:
                self._check(order)
                self._machines[order.token] = _FakeInstance(order, self._now())
            if error is not None:
                raise error
            return self._instance(self._machines[order.token])

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        with self._lock:
            return [
                self._instance(machine)
                for machine in self._machines.values()
                if machine.order.owner == owner and service in (None, machine.order.service)
            ]

    def terminate(self, instance: Instance) -> None:
        with self._lock:
            self.calls.append(("terminate", instance.token))
            machine = self._machines.get(instance.token)
            if machine is not None and not self._state(machine).is_gone:
                machine.stopped = True

    def on_report(self, changed: Callable[[], None]) -> None:
        self._changed = changed

    def reported(self, owner: str) -> Sequence[Instance]:
        """Return its machines report notices at once, and nothing else by themselves."""
        with self._lock:
            return [self._instance(one) for one in self._machines.values() if one.order.owner == owner]

    # --- What a test does to the cloud --------------------------------------------------------------------

    def fail_next_launch(self, error: ProvisionError, *, after_creation: bool = False) -> None:
        """The next launch (after those already ordered to fail) raises `error`.

        With `after_creation` the instance exists anyway: a lost response.
        """
        with self._lock:
            self._troubles.append((error, after_creation))

    def set_capacity(self, zone: str, capacity: int, capacity_type: CapacityType = CapacityType.SPOT) -> None:
        """Room for new launches. What runs goes on running: taking it is `preempt`."""
        with self._lock:
            self._capacity[zone, capacity_type] = capacity

    def preempt(self, token: str, notice_s: float = 0.0) -> None:
        """Take the instance, all nodes of it, `notice_s` from now."""
        with self._lock:
            self._machines[token].preempt_at = self._now() + notice_s
        if notice_s > 0:
            self._changed()

    def preempt_node(self, token: str, rank: int) -> None:
        """Take one node of the instance, now."""
        with self._lock:
            self._machines[token].lost.add(rank)

    def fail(self, token: str, state: InstanceState, message: str) -> None:
        """Put the instance in SETUP_FAILED, RUN_EXITED or, for a machine that died by itself, TERMINATED."""
        with self._lock:
            self._machines[token].failure = (state, message)

    # --- The truth, from orders and the time --------------------------------------------------------

    def _check(self, order: LaunchOrder) -> None:
        zone, capacity_type = order.offer.zone, order.offer.capacity_type
        if zone not in [known.zone for known in self._prices]:
            raise InvalidRequestError(f"there is no zone {zone}", cloud=CLOUD, zone=zone)
        if not re.fullmatch(r"[a-z0-9-]{1,63}", order.token):
            raise InvalidRequestError(f"{order.token!r} is no token", cloud=CLOUD, zone=zone)
        taken = sum(
            machine.order.num_nodes - len(machine.lost)
            for machine in self._machines.values()
            if machine.order.offer.zone == zone
            and machine.order.offer.capacity_type is capacity_type
            and not self._state(machine).is_gone
        )
        wanted = taken + order.num_nodes
        if wanted > self._capacity.get((zone.name, capacity_type), wanted):
            raise CapacityError(f"{zone} has no {capacity_type.value} capacity", cloud=CLOUD, zone=zone)

    def _instance(self, machine: _FakeInstance) -> Instance:
        order, state = machine.order, self._state(machine)
        return Instance(
            id=f"fake-{order.token}",
            token=order.token,
            owner=order.owner,
            service=order.service,
            replica_id=order.replica_id,
            zone=order.offer.zone,
            capacity_type=order.offer.capacity_type,
            state=state,
            endpoint=f"http://{order.token}.fake:{order.port or 8080}",
            preempt_at=None if state.is_gone else machine.preempt_at,
            message=self._message(machine, state),
        )

    def _message(self, machine: _FakeInstance, state: InstanceState) -> str:
        if state is InstanceState.BROKEN:
            return who_is_lost(sorted(machine.lost), machine.order.num_nodes)
        return machine.failure[1] if machine.failure and state is machine.failure[0] else ""

    def _state(self, machine: _FakeInstance) -> InstanceState:
        if machine.stopped:
            return InstanceState.TERMINATED
        if machine.preempt_at is not None and self._now() >= machine.preempt_at:
            return InstanceState.PREEMPTED
        if machine.lost:
            return state_of_nodes([self._of_node(machine, rank) for rank in range(machine.order.num_nodes)])
        return self._of_node(machine, 0)

    def _of_node(self, machine: _FakeInstance, rank: int) -> InstanceState:
        if rank in machine.lost:
            return InstanceState.PREEMPTED
        if machine.failure is not None:
            return machine.failure[0]
        age_s = self._now() - machine.launched_at
        if age_s < self._boot_s:
            return InstanceState.PENDING
        return InstanceState.SETUP if age_s < self._boot_s + self._setup_s else InstanceState.RUNNING
