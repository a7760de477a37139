"""A controller that cannot trust its probes, tick by tick: what it does, and what it reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from policies.brake import HELD_FOR_BALANCERS, HELD_OFFLINE, Evidence
from policies.health import FailedProbe, Work
from policies.history import Load
from policies.model import ReplicaState
from skyserve_cli.controller.reconcile.evidence import ONLINE_S, DaemonEvidence
from skyserve_cli.controller.reconcile.inputs import Doubts
from tests.unit.test_controller_reconciler import World, a_replica

S = ReplicaState
SILENT = FailedProbe(999.0, reached=False)


@dataclass
class DoubtfulWorld(World):
    evidence: Evidence = field(default_factory=Evidence)

    def doubts(self) -> Doubts:
        return Doubts(evidence=lambda _: self.evidence)


@pytest.fixture
def world() -> Iterator[DoubtfulWorld]:
    world = DoubtfulWorld()
    world.up()
    yield world
    world.store.close()


def test_a_doubt_is_reported_once_and_passes_by_itself(world: DoubtfulWorld) -> None:
    lost = a_replica(1, S.NOT_READY, since=0.0)
    world.has(lost, a_replica(2))
    world.lists(world.instance_of(lost), world.instance_of(a_replica(2)))
    world.evidence = Evidence(failed={1: SILENT}, responsive={1})
    reconciler = world.reconciler()
    for _ in range(5):
        reconciler.tick()
        assert world.fleet() == "1:NOT_READY 2:READY"
    assert HELD_FOR_BALANCERS in world.row().notes
    assert sum(line.record.kind == "note" for line in world.store.events(None)) == 1
    world.evidence = Evidence(failed={})  # its probes pass again, which is not reported yet
    reconciler.tick()
    assert "cut off" not in world.row().notes
    assert world.fleet() == "1:NOT_READY 2:READY"


def test_a_replica_that_nothing_speaks_for_is_terminated(world: DoubtfulWorld) -> None:
    lost = a_replica(1, S.NOT_READY, since=0.0)
    world.has(lost, a_replica(2))
    world.lists(world.instance_of(lost), world.instance_of(a_replica(2)))
    world.evidence = Evidence(failed={1: SILENT}, online=True)
    world.reconciler().tick()
    assert "1:TERMINATING 2:READY" in world.fleet()


def test_a_whole_fleet_that_is_not_reached_while_nothing_else_responds_either(world: DoubtfulWorld) -> None:
    fleet = [a_replica(number, S.NOT_READY, since=0.0) for number in (1, 2)]
    world.has(*fleet)
    world.lists(*map(world.instance_of, fleet))
    world.evidence = Evidence(failed={1: SILENT, 2: SILENT}, online=False)
    world.reconciler().tick()
    assert world.fleet() == "1:NOT_READY 2:NOT_READY"
    assert HELD_OFFLINE in world.row().notes


# --- what the daemon knows -------------------------------------------------------------------------------------


class _Parts:
    """Everything that the daemon's evidence is made of."""

    def __init__(self) -> None:
        self.since = 50.0
        self.time = 1000.0
        self.reached: float | None = None

    def now(self) -> float:
        return self.time

    def at(self, instant: float) -> float:
        return 1000.0 + instant

    def work(self, service: str) -> dict[int, Work]:
        return {1: Work(at=3.0, waiting=2)}

    def failed(self, service: str) -> dict[int, FailedProbe]:
        return {1: SILENT}

    def load(self, service: str) -> Load:
        return Load(responsive=frozenset({1, 2}))

    def loads(self, service: str) -> list[Load]:
        return [Load(responsive=frozenset({2, 3})), Load()]

    def reached_at(self) -> float | None:
        return self.reached


def test_what_the_daemon_knows_is_the_sum_of_its_parts() -> None:
    parts, other = _Parts(), _Parts()
    evidence = DaemonEvidence(parts, parts, parts, parts, (parts, other), parts)
    assert evidence.of("chat") == Evidence(
        50.0, {1: SILENT}, {1, 2, 3}, None, {1: Work(at=1003.0, waiting=2)}
    )  # nothing is on another machine
    parts.reached = float("-inf")
    assert evidence.of("chat").online is True  # it has just started, and nothing had the time to respond
    parts.time += ONLINE_S + 1.0
    assert evidence.of("chat").online is False
    other.reached = parts.time - ONLINE_S
    assert evidence.of("chat").online is True
