"""From a machine's report to the target table: the real witness, store, reconciler and ticker, and no listing between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.fernet import Fernet

from lb.config.schema import Readiness
from policies.goals import ScalingGoal
from policies.history import Load
from policies.model import CapacityType, Event, Memory, Offer, Replica, ReplicaState
from provisioners.contract.memory_hosts import MemoryHosts
from provisioners.port.base import Instance, InstanceState, Requirements
from provisioners.port.host_port import HostReport
from provisioners.port.vm import Machine, Silent
from provisioners.vm_provisioner import VmProvisioner
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.instance_poller import ThreadInstancePoller
from skyserve_cli.controller.persistence.leadership import Leadership
from skyserve_cli.controller.reconcile.clock import Steady, SystemClock
from skyserve_cli.controller.reconcile.inputs import BalancerPorts, ReplicaPorts
from skyserve_cli.controller.reconcile.mappers import order_of
from skyserve_cli.controller.reconcile.ports import AgentOrder, CloudOperation, ProbeOrder
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.controller.ticker import Ticker
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ResourceChoice, ServiceSpec
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.clouds.memory_machines import CLOUD, ZONES, MemoryMachines
from tests.clouds.memory_machines import order_of as machine_order

NEVER_S = 3600.0
PATIENCE_S = 60.0
OFFER = Offer(ZONES[0], "g1", None, 0.0, CapacityType.SPOT, 0.3)
SPEC = ServiceSpec("chat", "exec run", resources=(ResourceChoice(use_spot=True),), scaling=ScalingGoal(1, 1))


class Time:
    """It passes when the test moves it, so that nothing is polled."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


class CountedMachines(MemoryMachines):
    listings = 0

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        self.listings += 1
        return super().machines(owner, silent)


class MemoryFleet(VmProvisioner):
    name = CLOUD


@dataclass
class OrphanRemover:
    """The other hands: nothing is launched, probed or offered; tables are kept in order."""

    states: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def ensure(self, orders: Mapping[str, AgentOrder | None] | Sequence[CloudOperation]) -> None:
        order = orders.get("chat") if isinstance(orders, Mapping) else None
        if order is not None:
            self.states.put(" ".join(target.state.value for target in order.table.targets))

    def load(self, service: str) -> Load:
        return Load()

    def drain(self) -> list[tuple[str, Event]]:
        return []

    def abandon(self, orphan: Instance) -> None:
        raise AssertionError(orphan)

    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        """No probe is needed."""

    def get(self, need: Requirements) -> tuple[Offer, ...]:
        return ()


def awaited(states: queue.SimpleQueue[str], wanted: str) -> None:
    while states.get(timeout=PATIENCE_S) != wanted:
        pass


def test_a_notice_leaves_the_table_without_a_listing() -> None:
    time, store, hands = Time(), Store(Database("sqlite://")), OrphanRemover()
    machines, hosts = CountedMachines(time.now), MemoryHosts(time.now)
    fleet = MemoryFleet(machines, hosts, machine_order, lambda need: (), time.now)
    owner = store.database.owner()
    store.put_service(
        "chat",
        spec_to_json(SPEC),
        replica_hash="h",
        sealed_secrets=b"",
        lb_port=1,
        target=1,
        mode=None,
        now=0.0,
    )
    (row,) = store.services()
    ready = Replica(
        1,
        1,
        OFFER,
        ReplicaState.READY,
        0.0,
        0.0,
        endpoint="http://10.0.0.1:8000",
        launched_at=0.0,
        ready_at=0.0,
    )
    order = order_of(owner, "chat", row.incarnation, ready, SPEC, {})
    instance = fleet.launch(order)
    ready = replace(ready, instance_id=instance.id)
    store.commit("chat", now=0.0, changed=[ready], memory=Memory(2), target=1, notes="", records=())
    time.at += 200.0  # it runs
    hosts.reports[order.token] = HostReport(InstanceState.RUNNING, 8000)

    woken = threading.Event()
    instance_poller = ThreadInstancePoller(lambda name: fleet, owner, time, woken.set, {CLOUD: NEVER_S})
    reconciler = Reconciler(
        time,
        store,
        SpecCache(store, SecretBox(Fernet.generate_key())),
        ReplicaPorts(frozenset({CLOUD}), hands, hands, instance_poller, hands),
        BalancerPorts(hands, "127.0.0.1"),
    )
    clock = SystemClock(time.now, Steady(time.now, counts_suspension=True))
    leadership = Leadership(store, "here", "this one", time)
    leadership.step()
    ticker = Ticker(reconciler, store, clock, woken, NEVER_S, leadership)
    ticker.start()
    try:
        woken.set()
        while not instance_poller.last(CLOUD):  # the first listing wakes the tick
            awaited(hands.states, Readiness.READY.value)
        hosts.set_report(order.token, HostReport(InstanceState.RUNNING, 8000, preempt_at=time.at + 30.0))
        awaited(hands.states, Readiness.DRAINING.value)
        assert machines.listings == 1
    finally:
        ticker.stop()
        instance_poller.close()
        store.close()
