"""The tick, over a real store and small stand-ins for the world: in which order things happen, and what a kill,
a quiet world, an unseen cloud or another service's trouble do to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lb.config.demand import Demand
from lb.config.schema import Readiness
from policies.goals import Quota, ScalingGoal, UpdateMode
from policies.history import Load
from policies.model import (
    Bootstrapped,
    CapacityType,
    Drained,
    EndReason,
    Event,
    FailureKind,
    Launched,
    LaunchFailed,
    Memory,
    Offer,
    Preempted,
    ProbeFailed,
    ProbePassed,
    Replica,
    ReplicaState,
    Terminated,
    Zone,
)
from provisioners.port.base import Instance, InstanceState, Requirements
from skyserve_cli.controller.reconcile.inputs import (
    NO_DOUBTS,
    NO_LIMITS,
    BalancerPorts,
    Budget,
    Doubts,
    ReplicaPorts,
)
from skyserve_cli.controller.reconcile.mappers import token_of
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    OperationKind,
    ProbeOrder,
    Specs,
)
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.spec import spec_from_json, spec_to_json
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow

S = ReplicaState
ZONES = [Zone("sky", "r", name) for name in ("a", "b", "c")]
OFFERS = tuple(Offer(zone, "m", None, 0.0, CapacityType.SPOT, 0.3 + i / 10) for i, zone in enumerate(ZONES))
SPEC = ServiceSpec("chat", "run", scaling=ScalingGoal(2, 2), drain_timeout_s=60.0)


class Killed(BaseException):
    """The process ends here."""


@dataclass
class World:
    """Every port at once. `log` is the order in which the ports were called; `rows_at` what the store said then."""

    store: Store = field(default_factory=lambda: Store(Database("sqlite://")))
    time: float = 1000.0
    offers: tuple[Offer, ...] | None = OFFERS
    events: list[tuple[str, Event]] = field(default_factory=list)
    listings: list[InstanceListing] = field(default_factory=list)
    loads: dict[str, Load] = field(default_factory=dict)
    minutes: dict[str, Demand] = field(default_factory=dict)
    specs: dict[tuple[str, int], ServiceSpec] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)  # services whose spec cannot be read
    unprobeable: set[str] = field(default_factory=set)
    die_at: str = ""
    log: list[str] = field(default_factory=list)
    rows_at: dict[str, list[ServiceRow]] = field(default_factory=dict)
    agents: Mapping[str, AgentOrder | None] = field(default_factory=dict)
    probes: Sequence[ProbeOrder] = ()
    calls: Sequence[CloudOperation] = ()
    watched: frozenset[str] = frozenset()
    abandoned: list[str] = field(default_factory=list)
    asked: list[Requirements] = field(default_factory=list)

    def reconciler(self) -> Reconciler:
        """A new process."""
        return Reconciler(
            self,
            self.store,
            self.specs_port(),
            ReplicaPorts(frozenset({"sky"}), _Offers(self), _Runner(self), _Witness(self), _Prober(self)),
            self.balancers(),
            budget=self.budget(),
            doubts=self.doubts(),
        )

    def specs_port(self) -> Specs:
        return _Specs(self)

    def balancers(self) -> BalancerPorts:
        return BalancerPorts(_Fleet(self), "127.0.0.1")

    def budget(self) -> Budget:
        return NO_LIMITS

    def doubts(self) -> Doubts:
        return NO_DOUBTS

    def now(self) -> float:
        return self.time

    def told(self, hand: str) -> None:
        if self.die_at == hand:
            raise Killed
        self.log.append(hand)
        self.rows_at[hand] = self.store.services()

    # --- what a test does

    def up(self, spec: ServiceSpec = SPEC, mode: UpdateMode | None = None, replica_hash: str = "") -> int:
        return self.store.put_service(
            spec.name,
            spec_to_json(spec),
            replica_hash=replica_hash or spec.replica_hash(),
            sealed_secrets=b"",
            lb_port=30001,
            target=1,
            mode=mode,
            now=self.time,
        )

    def has(self, *replicas: Replica, name: str = "chat", memory: Memory | None = None) -> None:
        given = memory or Memory(next_replica_id=50)
        self.store.commit(name, now=self.time, changed=replicas, memory=given, target=2, notes="", records=())

    def happens(self, *events: Event, name: str = "chat") -> None:
        self.events += [(name, event) for event in events]

    def lists(self, *instances: Instance, cloud: str = "sky") -> None:
        self.listings.append(InstanceListing(cloud, self.time, instances))

    # --- queries of tests

    def row(self, name: str = "chat") -> ServiceRow:
        (found,) = [row for row in self.store.services(down=True) if row.name == name]
        return found

    def fleet(self, name: str = "chat") -> str:
        """ "1:READY 2:DRAINING" """
        return " ".join(f"{replica.id}:{replica.state.value}" for replica in self.row(name).replicas)

    def calling(self) -> str:
        return " ".join(f"{call.kind.value} {call.replica.id}" for call in self.calls)

    def targets(self, name: str = "chat") -> str:
        order = self.agents[name]
        assert order is not None
        return " ".join(f"{target.id}:{target.state.value}" for target in order.table.targets)

    def story(self) -> list[str]:
        return [
            f"{line.record.kind} {line.record.replica_id or ''}".strip() for line in self.store.events(None)
        ]

    def instance_of(
        self, replica: Replica, state: InstanceState = InstanceState.RUNNING, **more: Any
    ) -> Instance:
        owner = self.store.database.owner()
        known = [row for row in self.store.services() if row.name == "chat"] or [self.row()]
        token = token_of(owner, "chat", known[0].incarnation, replica.id, replica.offer)
        plain = Instance(
            replica.instance_id or f"i-{replica.id}", token, owner, "chat", replica.id,
            replica.zone, CapacityType.SPOT, state, endpoint=f"http://h:{replica.id}",
        )  # fmt: skip
        return replace(plain, **more)


class _Hand:
    def __init__(self, world: World) -> None:
        self.world = world


class _Runner(_Hand):
    def ensure(self, calls: Sequence[CloudOperation]) -> None:
        self.world.told("calls")
        self.world.calls = calls

    def drain(self) -> Sequence[tuple[str, Event]]:
        events, self.world.events = self.world.events, []
        return events

    def abandon(self, orphan: Instance) -> None:
        self.world.abandoned.append(orphan.id)


class _Witness(_Hand):
    def trouble(self) -> Mapping[str, str]:
        return {}

    def watch(self, clouds: frozenset[str]) -> None:
        self.world.told("watch")
        self.world.watched = clouds

    def drain(self) -> Sequence[InstanceListing]:
        listings, self.world.listings = self.world.listings, []
        return listings


class _Prober(_Hand):
    def watch(self, orders: Sequence[ProbeOrder]) -> None:
        self.world.told("probes")
        self.world.probes = orders

    def drain(self) -> Sequence[tuple[str, Event]]:
        return ()


class _Fleet(_Hand):
    def ensure(self, orders: Mapping[str, AgentOrder | None]) -> None:
        self.world.told("tables")
        self.world.agents = dict(orders)

    def load(self, service: str) -> Load:
        return self.world.loads.get(service, Load())

    def demand(self, service: str) -> Demand | None:
        return self.world.minutes.get(service)


class _Offers(_Hand):
    def get(self, need: Requirements) -> tuple[Offer, ...] | None:
        self.world.asked.append(need)
        return self.world.offers


class _Specs(_Hand):
    def get(self, service: str, version: int) -> ServiceSpec:
        if service in self.world.broken:
            raise ValueError(f"{service} cannot be read")

        if (service, version) not in self.world.specs:
            spec = spec_from_json(dict(self.world.store.version(service, version).spec))
            self.world.specs[service, version] = spec
        return self.world.specs[service, version]

    def trouble(self, service: str, version: int) -> str:
        return ""

    def probe(self, service: str, version: int) -> Probe:
        if service in self.world.unprobeable:
            raise ValueError(f"{service} cannot be probed")
        return self.get(service, version).probe


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.up()
    yield world
    world.store.close()


def a_replica(replica_id: int, state: ReplicaState = S.READY, version: int = 1, **more: Any) -> Replica:
    plain = Replica(replica_id, version, OFFERS[replica_id % 3], state, 990.0, 900.0)
    if state is not S.REQUESTED:
        plain = replace(plain, instance_id=f"i-{replica_id}", launched_at=950.0)
    if state not in (S.REQUESTED, S.PROVISIONING):
        plain = replace(plain, endpoint=f"http://h:{replica_id}")
    return replace(plain, **more)


# --- the order of things ---------------------------------------------------------------------------------------


def test_intents_are_in_the_store_before_any_hand_is_told(world: World) -> None:
    world.reconciler().tick()
    assert world.log == ["tables", "probes", "calls", "watch"]
    for hand in ("tables", "calls"):
        (row,) = world.rows_at[hand]
        assert [replica.state for replica in row.replicas] == [S.REQUESTED] * 2
    assert world.calling() == "launch 1 launch 2"
    assert {call.replica for call in world.calls} == set(world.row().replicas)
    assert world.row().memory.next_replica_id == 3


@pytest.mark.parametrize(("failed", "path"), [((), "/ready"), ((2,), SPEC.probe.path)])
def test_replicas_that_an_update_keeps_are_probed_by_its_probe(
    world: World, failed: tuple[int, ...], path: str
) -> None:
    world.up(replace(SPEC, probe=replace(SPEC.probe, path="/ready")), UpdateMode.ROLLING)
    assert world.row().same_replicas == {1}
    world.has(
        a_replica(1, S.STARTING),
        memory=Memory(next_replica_id=50, rollout={"failed": list(failed), "good": 1}),
    )
    world.lists(*[world.instance_of(replica) for replica in world.row().replicas])
    world.reconciler().tick()
    assert [order.probe.path for order in world.probes] == [path]


def test_a_table_shrinks_before_the_machine_is_ended(world: World) -> None:
    world.has(a_replica(1), a_replica(2), a_replica(3, S.DRAINING, drain_by=1000.0))
    world.lists(*[world.instance_of(replica) for replica in world.row().replicas])
    world.reconciler().tick()
    assert world.log.index("tables") < world.log.index("calls")
    assert world.targets() == "1:ready 2:ready"
    assert world.calling() == "terminate 3"


@pytest.mark.parametrize("hand", ["tables", "probes", "calls", "watch"])
def test_a_controller_killed_anywhere_after_the_commit_goes_on_where_the_rows_stand(
    world: World, hand: str
) -> None:
    world.die_at = hand
    with pytest.raises(Killed):
        world.reconciler().tick()
    before = world.row()
    world.die_at = ""
    world.lists()
    world.reconciler().tick()
    assert world.row() == before
    assert world.calling() == "launch 1 launch 2"


def test_a_replica_comes_up_step_by_step(world: World) -> None:
    reconciler = world.reconciler()
    reconciler.tick()
    world.lists()
    world.happens(Launched(1, "i-1"), Launched(2, "i-2"))
    reconciler.tick()
    assert world.fleet() == "1:PROVISIONING 2:PROVISIONING"
    assert world.calling() == ""
    first, second = world.row().replicas
    world.time += 1
    world.lists(world.instance_of(first), world.instance_of(second, InstanceState.SETUP))
    reconciler.tick()
    assert world.fleet() == "1:STARTING 2:PROVISIONING"
    assert [(order.replica_id, order.endpoint, order.passing) for order in world.probes] == [
        (1, "http://h:1", None)
    ]
    assert world.targets() == ""
    world.happens(ProbePassed(1))
    reconciler.tick()
    assert world.fleet() == "1:READY 2:PROVISIONING"
    assert [order.passing for order in world.probes] == [True]
    assert world.targets() == "1:ready"
    world.happens(ProbeFailed(1, "503"))
    reconciler.tick()
    assert [order.passing for order in world.probes] == [False]
    assert world.targets() == "1:unhealthy"
    assert world.row().memory.rollout == {"good": 1, "serving": 1}
    assert world.story() == [
        "goal", "scale", "Launch 1", "Launch 2", "Launched 1", "Launched 2", "Bootstrapped 1", "ProbePassed 1", "ProbeFailed 1",
    ]  # fmt: skip


def test_the_agent_has_the_services_port_and_outlives_the_last_replica_of_a_service_that_is_up(
    world: World,
) -> None:
    world.offers = ()
    world.reconciler().tick()
    order = world.agents["chat"]
    assert order is not None
    assert (order.host, order.port, order.tls) == ("127.0.0.1", 30001, None)


# --- quiet -----------------------------------------------------------------------------------------------------


def test_a_quiet_tick_writes_nothing(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    reconciler = world.reconciler()
    listed = [world.instance_of(replica) for replica in world.row().replicas]
    for _ in range(3):
        world.lists(*listed)
        reconciler.tick()
        world.time += 1
    before, story = world.row(), world.story()
    written = _changes(world.store)
    for _ in range(5):
        world.lists(*listed)
        reconciler.tick()
        world.time += 1
    assert (world.row(), world.story()) == (before, story)
    assert _changes(world.store) == written


def _changes(store: Store) -> int:
    """How many rows were ever written over this connection."""
    with store.database.engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert raw is not None
        return int(raw.total_changes)


def test_a_note_is_told_once_and_stands_while_nothing_can_be_planned(world: World) -> None:
    world.offers = ()
    reconciler = world.reconciler()
    for _ in range(3):
        reconciler.tick()
    assert world.row().notes == "no offer fits version 1"
    world.offers = None
    reconciler.tick()
    assert world.row().notes == "no offer fits version 1"
    assert world.story() == ["goal", "scale", "note"]


def test_how_many_are_wanted_is_told_when_it_changes(world: World) -> None:
    def told() -> list[tuple[str | None, str]]:
        stories = [line.record for line in world.store.events(None)]
        return [(story.state, story.message) for story in stories if story.kind == "scale"]

    world.reconciler().tick()
    world.reconciler().tick()  # another controller, of the same database
    assert (told(), world.row().wanted) == ([("2", "2 replicas wanted")], 2)
    world.offers = None
    world.reconciler().tick()  # nothing can be planned, and as many are wanted as before
    assert len(told()) == 1
    world.store.set_down("chat", purge=False, now=world.time)
    world.reconciler().tick()
    assert (told()[1:], world.row().wanted) == ([("0", "0 replicas wanted, 2 before")], 0)


# --- unknown states ------------------------------------------------------------------------------------------


def test_enabled_clouds_are_watched_before_there_is_a_service() -> None:
    """Or orphans of an earlier life would be found only when a service comes up."""
    world = World()
    reconciler = world.reconciler()
    for _ in range(2):
        reconciler.tick()
        assert world.watched == {"sky"}
    world.store.close()


def test_nothing_is_planned_before_every_cloud_with_a_replica_was_seen(world: World) -> None:
    """One of two is gone, but a controller that has just started cannot know: first it looks."""
    elsewhere = replace(OFFERS[0], zone=Zone("far", "r", "x"))
    world.has(a_replica(1), a_replica(2, offer=elsewhere), a_replica(3))
    reconciler = world.reconciler()
    reconciler.tick()
    assert world.watched == {"sky", "far"}
    world.lists(*[world.instance_of(r) for r in world.row().replicas if r.zone.cloud == "sky"])
    reconciler.tick()
    assert world.fleet() == "1:READY 2:READY 3:READY"
    world.lists(cloud="far")
    reconciler.tick()
    assert world.fleet() == "1:READY 3:READY"
    assert world.calling() == ""


def test_outstanding_calls_do_not_wait_for_the_clouds_to_be_seen(world: World) -> None:
    world.has(a_replica(1, S.REQUESTED), a_replica(2, S.TERMINATING))
    world.reconciler().tick()
    assert world.calling() == "launch 1 terminate 2"


def test_nothing_is_planned_before_the_offers_are_known(world: World) -> None:
    world.offers = None
    reconciler = world.reconciler()
    reconciler.tick()
    assert world.fleet() == ""
    world.offers = OFFERS
    reconciler.tick()
    assert world.fleet() == "1:REQUESTED 2:REQUESTED"


def test_down_waits_for_nobody(world: World) -> None:
    """Neither for offers nor for a listing: a cloud that is disabled or away does not keep a service up."""
    world.has(a_replica(1), a_replica(2, S.STARTING))
    world.store.set_down("chat", purge=False, now=world.time)
    world.offers = None
    world.reconciler().tick()
    assert world.fleet() == "1:DRAINING 2:TERMINATING"
    assert world.asked == []


def test_down_to_the_end(world: World) -> None:
    world.has(a_replica(1), a_replica(2, S.STARTING))
    world.store.set_down("chat", purge=False, now=world.time)
    reconciler = world.reconciler()
    reconciler.tick()
    assert world.targets() == "1:draining"
    world.loads["chat"] = Load(empty=frozenset({1}), known=True)
    world.happens(Terminated(2))
    reconciler.tick()
    assert (world.fleet(), world.calling(), world.targets()) == ("1:TERMINATING", "terminate 1", "")
    world.happens(Terminated(1))
    reconciler.tick()
    assert world.fleet() == ""
    assert world.agents == {}
    reasons = [replica.end_reason for replica in world.store.replicas("chat")]
    assert reasons == [EndReason.SERVICE_DOWN] * 2


# --- what happens ---------------------------------------------------------------------------------------------


def test_a_preempted_replica_is_replaced_elsewhere_in_the_same_tick(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    taken, kept = world.row().replicas
    world.lists(world.instance_of(taken, InstanceState.PREEMPTED), world.instance_of(kept))
    world.reconciler().tick()
    assert world.fleet() == "2:READY 50:REQUESTED"
    assert world.row().replicas[1].zone not in (taken.zone, kept.zone)
    assert world.targets() == "2:ready"
    assert [r.end_reason for r in world.store.replicas("chat") if r.state is S.GONE] == [EndReason.PREEMPTED]


def test_events_of_one_tick_are_taken_in_order(world: World) -> None:
    world.has(a_replica(1, S.STARTING), a_replica(2))
    world.lists(*[world.instance_of(replica) for replica in world.row().replicas])
    world.happens(ProbePassed(1), ProbeFailed(1), Preempted(2), ProbePassed(2))
    world.reconciler().tick()
    assert world.fleet() == "1:NOT_READY 50:REQUESTED"


def test_an_event_nobody_can_handle_is_set_aside_with_its_story(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    world.lists(*[world.instance_of(replica) for replica in world.row().replicas])
    world.happens(Bootstrapped(1, "http://elsewhere"), Terminated(99))
    world.reconciler().tick()
    assert world.fleet() == "1:READY 2:READY"
    assert world.row().replicas[0].endpoint == "http://h:1"
    assert world.story() == ["goal", "error 1", "scale"]


def test_a_killed_replica_drains_and_is_replaced(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    world.store.kill_replica("chat", 1, now=world.time)
    reconciler = world.reconciler()
    world.lists(*[world.instance_of(replica) for replica in world.row().replicas])
    reconciler.tick()
    assert world.fleet() == "1:DRAINING 2:READY 50:REQUESTED"
    reconciler.tick()
    assert world.fleet() == "1:DRAINING 2:READY 50:REQUESTED"


def test_a_version_that_fails_is_answered_with_offers_for_the_one_that_works(world: World) -> None:
    """The two need different machines; the tick that learns of the failure must not mix them up."""
    big = replace(SPEC, resources=(ResourceChoice(accelerator="H100", accelerator_count=8.0),))
    world.up(big, UpdateMode.ROLLING)
    memory = Memory(50, rollout={"good": 1})
    world.has(a_replica(1), a_replica(2, S.REQUESTED, version=2), memory=memory)
    world.lists(world.instance_of(world.row().replicas[0]))
    world.happens(LaunchFailed(2, FailureKind.CONFIG, "no such machine"))
    world.reconciler().tick()
    assert [candidate.accelerator for candidate in world.asked[-1].candidates] == [None]
    assert [(replica.id, replica.version) for replica in world.row().replicas] == [(1, 1), (50, 1)]


# --- orphans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.PROVISIONING, S.STARTING, S.READY])
def test_the_order_of_an_instance_that_nobody_attends_is_sent_again(
    world: World, state: ReplicaState
) -> None:
    replica, other = a_replica(1, state), a_replica(2)
    world.has(replica, other)
    reconciler = world.reconciler()
    world.lists(world.instance_of(replica, InstanceState.UNSUPERVISED), world.instance_of(other))
    reconciler.tick()
    assert world.calling() == "attend 1"
    reconciler.tick()
    assert world.calling() == ""  # until it is seen so again


def test_an_orphan_is_terminated_by_the_third_listing_of_a_controller_at_the_earliest(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    mine = [world.instance_of(replica) for replica in world.row().replicas]
    orphan = replace(mine[0], id="i-stray", token="t-stray")
    reconciler = world.reconciler()
    for _ in range(2):
        world.lists(*mine, orphan)
        reconciler.tick()
        assert world.abandoned == []
    world.lists(*mine, orphan)
    reconciler.tick()
    assert world.abandoned == ["i-stray"]


def test_an_orphan_is_seen_twice_before_it_is_terminated(world: World) -> None:
    world.has(a_replica(1), a_replica(2))
    mine = [world.instance_of(replica) for replica in world.row().replicas]
    orphan = replace(mine[0], id="i-stray", token="t-stray")
    reconciler = world.reconciler()
    for _ in range(4):
        world.lists(*mine)
        reconciler.tick()
    world.lists(*mine, orphan)
    reconciler.tick()
    assert world.abandoned == []
    world.lists(*mine, orphan)
    reconciler.tick()
    assert world.abandoned == ["i-stray"]


def test_what_is_launched_while_it_is_listed_is_no_orphan(world: World) -> None:
    reconciler = world.reconciler()
    reconciler.tick()
    for _ in range(3):
        world.lists(*[world.instance_of(replica, InstanceState.PENDING) for replica in world.row().replicas])
        reconciler.tick()
    assert world.abandoned == []


def test_two_listings_in_one_tick_count_twice_but_of_the_same_cloud_only(world: World) -> None:
    orphan = Instance(
        "i-9",
        "t-9",
        world.store.database.owner(),
        "chat",
        9,
        ZONES[0],
        CapacityType.SPOT,
        InstanceState.RUNNING,
    )
    reconciler = world.reconciler()
    world.lists()
    world.lists()
    world.lists(orphan)
    world.lists(cloud="far")
    reconciler.tick()
    assert world.abandoned == []
    world.lists(orphan)
    reconciler.tick()
    assert world.abandoned == ["i-9"]


# --- trouble ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["spec", "probe"], ids=["its spec cannot be read", "it cannot be probed"])
def test_one_services_trouble_stops_no_other_and_takes_nothing_down(world: World, trouble: str) -> None:
    world.up(replace(SPEC, name="other"))
    reconciler = world.reconciler()
    world.has(a_replica(1), a_replica(2))
    mine = [world.instance_of(replica) for replica in world.row().replicas]
    world.lists(*mine)
    reconciler.tick()
    order = world.agents["chat"]
    (world.broken if trouble == "spec" else world.unprobeable).add("chat")
    for _ in range(3):
        world.lists(*mine)
        reconciler.tick()
    assert world.agents["chat"] == order is not None
    assert world.fleet() == "1:READY 2:READY"
    assert world.abandoned == []
    assert world.fleet("other") == "1:REQUESTED 2:REQUESTED"
    assert {call.service for call in world.calls} == {"other"}
    world.broken.clear()
    world.unprobeable.clear()
    world.happens(Preempted(1))
    world.lists(mine[1])
    reconciler.tick()
    assert world.fleet() == "2:READY 50:REQUESTED"


def test_a_service_in_trouble_from_the_start_keeps_the_load_balancer_it_has(world: World) -> None:
    world.has(a_replica(1))
    world.broken.add("chat")
    world.reconciler().tick()
    assert world.agents == {"chat": None}


def test_an_answer_lost_with_a_failed_commit_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is away for one tick: the rows stand as they were, so the call is still outstanding."""
    reconciler = world.reconciler()
    reconciler.tick()
    with monkeypatch.context() as away:
        away.setattr(world.store, "commit_all", _locked)
        world.happens(Launched(1, "i-1"))
        reconciler.tick()
        assert world.calling() == ""
    world.lists()
    reconciler.tick()
    assert world.calling() == "launch 1 launch 2"


def _locked(*_: Any, **__: Any) -> None:
    raise OSError("database is locked")


def test_states_of_targets_are_the_agents_words() -> None:
    assert {state.value for state in Readiness} == {"ready", "loaded", "unhealthy", "draining"}
    assert {kind.value for kind in OperationKind} == {"launch", "attend", "terminate"}


# --- what machines report between two listings -----------------------------------------------------------------


def reports(world: World, *instances: Instance) -> None:
    world.listings.append(InstanceListing("sky", world.time, instances, is_listing=False))


def test_a_reported_notice_drains_in_the_same_tick(world: World) -> None:
    warned, other = a_replica(1), a_replica(2)
    reconciler = world.reconciler()
    world.has(warned, other)
    world.lists(world.instance_of(warned), world.instance_of(other))
    reconciler.tick()
    reports(world, world.instance_of(warned, preempt_at=world.time + 30.0))
    reconciler.tick()
    assert "1:draining" in world.targets()
    assert "2:ready" in world.targets(), "that it is missing in a report means nothing"
    assert "2:READY" in world.fleet()


def test_reports_are_no_listing_of_the_cloud(world: World) -> None:
    """Nothing is planned on them after a start, and they make no machine an orphan."""
    mine = a_replica(1)
    reconciler = world.reconciler()
    world.has(mine)
    orphan = replace(world.instance_of(a_replica(9)), token="stray")
    for _ in range(3):
        reports(world, world.instance_of(mine), orphan)
        reconciler.tick()
    assert (world.fleet(), world.calling(), world.abandoned) == ("1:READY", "", [])
    world.lists(world.instance_of(mine))
    reconciler.tick()
    assert world.calling().startswith("launch")


@dataclass
class LimitedView(World):
    """With a budget for all services together."""

    most: float = 1.0

    def budget(self) -> Budget:
        return Budget(max_usd_hour=self.most)


def test_services_share_the_budget_of_the_home_and_the_next_gets_what_becomes_free() -> None:
    world = LimitedView(offers=OFFERS[:1])  # 0.3 USD per hour
    world.up()
    world.up(replace(SPEC, name="embed"))
    controller = world.reconciler()
    world.lists()
    for _ in range(3):
        controller.tick()
    assert [len(world.row(name).replicas) for name in ("chat", "embed")] == [2, 1]
    (note,) = [row.notes for row in world.store.services() if row.notes]
    assert "1 replica is not launched for the budget (controller.max_usd_hour in config.yaml)" in note
    before = world.row("embed")
    world.time += 30.0
    controller.tick()
    assert world.row("embed") == before  # nothing is written while nothing is available
    world.store.set_down("chat", purge=True, now=world.time)
    controller.tick()
    assert len(world.row("embed").replicas) == 1  # a replica that is being terminated still costs
    world.happens(*(Terminated(replica.id) for replica in world.row("chat").replicas))
    controller.tick()
    world.time += 61.0
    controller.tick()
    assert len(world.row("embed").replicas) == 2
    assert world.row("embed").notes == ""


@dataclass
class TeamWorld(World):
    """With the quota of the team research."""

    quota: Quota = Quota()  # noqa: RUF009 - frozen

    def budget(self) -> Budget:
        return Budget(quotas={"research": self.quota})

    def up_of(self, name: str, size: int, team: str = "research") -> None:
        spec = replace(SPEC, name=name, scaling=ScalingGoal(size, size))
        self.store.put_service(
            name,
            spec_to_json(spec),
            replica_hash=spec.replica_hash(),
            sealed_secrets=b"",
            lb_port=30001,
            target=size,
            mode=None,
            now=self.time,
            team=team,
        )

    def sizes(self) -> dict[str, int]:
        return {row.name: len(row.replicas) for row in self.store.services()}


def test_services_of_a_team_share_its_quota_fairly_and_others_do_not_count() -> None:
    world = TeamWorld(offers=OFFERS[:1], quota=Quota(max_replicas=6))
    for name in ("a", "b"):
        world.up_of(name, 8)
    world.up_of("other", 3, team="")
    controller = world.reconciler()
    world.lists()
    for _ in range(3):
        controller.tick()
    assert world.sizes() == {"a": 3, "b": 3, "other": 3}
    note = world.row("a").notes
    assert "replicas are not launched for the quota of the team research (max_replicas, 6)" in note
    before = world.row("a"), world.row("b")
    controller = world.reconciler()  # killed, and started again
    world.lists()
    for _ in range(3):
        world.time += 61.0
        controller.tick()
    assert world.sizes() == {"a": 3, "b": 3, "other": 3}
    assert [len(row.replicas) for row in before] == [3, 3]


def test_nothing_is_terminated_for_a_quota_that_was_lowered_and_room_goes_to_who_has_less() -> None:
    world = TeamWorld(offers=OFFERS[:1], quota=Quota(max_replicas=4))
    world.up_of("a", 4)
    controller = world.reconciler()
    world.lists()
    controller.tick()
    assert world.sizes() == {"a": 4}
    world.quota = Quota(max_replicas=2)
    world.up_of("b", 4)
    controller = world.reconciler()
    world.lists()
    controller.tick()
    assert world.sizes() == {"a": 4, "b": 0}
    gone = [replica.id for replica in world.row("a").replicas[:3]]
    for id in gone:
        world.store.kill_replica("a", id, now=world.time)
    controller.tick()
    assert world.sizes() == {"a": 4, "b": 0}  # one that is being terminated still counts
    world.happens(*(Terminated(id) for id in gone), name="a")
    controller.tick()
    world.time += 61.0
    controller.tick()
    assert world.sizes() == {"a": 1, "b": 1}


def test_a_month_that_has_cost_its_budget_launches_nothing_until_the_next() -> None:
    world = TeamWorld(offers=OFFERS[:1], quota=Quota(max_usd_month=1.0))  # 0.3 USD per hour
    world.time = 1_764_547_200.0 - 7200.0  # two hours before 2025-12-01 UTC
    world.up_of("chat", 2)
    ready = [replace(a_replica(number), offer=OFFERS[0], launched_at=world.time) for number in (1, 2)]
    world.has(*ready, name="chat")
    controller = world.reconciler()
    world.time += 6600.0  # 2 * 0.3 USD * 1.83 h
    world.lists(*(world.instance_of(one) for one in ready))
    world.store.kill_replica("chat", 2, now=world.time)
    controller.tick()
    world.happens(Drained(2), name="chat")
    controller.tick()
    world.happens(Terminated(2), name="chat")
    for _ in range(2):
        controller.tick()
    assert world.sizes() == {"chat": 1}
    assert "for the budget of the team research (max_usd_month, 1)" in world.row("chat").notes
    world.time += 660.0  # the next month
    controller.tick()
    assert world.sizes() == {"chat": 2}
    assert world.row("chat").notes == ""
