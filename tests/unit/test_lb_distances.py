"""Round trips to the replicas of other regions: when they are measured, of what, and for whom."""

from __future__ import annotations

import asyncio

from lb.config.regions import Place, Regions
from lb.config.schema import Table, Target
from lb.core.distances import Distance
from lb.core.targets import TargetTable
from lb.engines.distance_prober import EVERY_S, LOOK_S, Address, DistanceProber


class World:
    """An agent in us, with connects that take what `takes_s` says by host."""

    def __init__(self, *targets: Target, places: tuple[Place, ...] = ()) -> None:
        self.now = 0.0
        self.takes_s: dict[str, float] = {}
        self.connects: list[tuple[float, str]] = []
        self.table = TargetTable(self._described(targets, places), 0.0)
        self.prober = DistanceProber(self.table, "us", lambda: self.now, self._connect)

    @staticmethod
    def _described(targets: tuple[Target, ...], places: tuple[Place, ...]) -> Table:
        return Table("s", "1", targets, regions=Regions("aws/us#1", "aws/us", places=places))

    def push(self, *targets: Target, places: tuple[Place, ...] = ()) -> None:
        self.table.apply(self._described(targets, places), self.now)

    async def _connect(self, address: Address) -> float:
        self.connects.append((self.now, address.host))
        if address.host not in self.takes_s:
            raise OSError("no route")
        return self.takes_s[address.host]

    async def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.prober.tick()
            await settle()
            self.now += LOOK_S

    def distances(self) -> dict[str, float]:
        return {view.id: view.rtt_s for view in self.table.views(self.now)}


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def target(name: str, region: str) -> Target:
    return Target(name, f"http://{name}:8000", region=region)


async def test_one_replica_of_each_other_region_is_connected_to_every_ten_seconds() -> None:
    w = World(target("a", "us"), target("b", "eu"), target("c", "eu"), target("d", "asia"), target("e", ""))
    w.takes_s = {"b": 0.09, "d": 0.15}
    await w.run(100.0)
    assert w.distances() == {"a": 0.0, "b": 0.09, "c": 0.09, "d": 0.15, "e": 0.0}
    assert {host for _, host in w.connects} == {"b", "d"}
    assert len(w.connects) <= 2 * (100.0 / EVERY_S + 3)


async def test_a_place_without_a_replica_of_ours_is_measured_and_reported() -> None:
    w = World(target("a", "us"), places=(Place("aws/eu", "https://far"), Place("aws/asia", "http://dead:1")))
    w.takes_s = {"far": 0.09}
    await w.run(5.0)
    assert w.prober.rtts_ms() == {"aws/eu": 90.0}
    assert w.distances() == {"a": 0.0}


async def test_replicas_that_join_have_the_distance_of_their_region_at_once() -> None:
    w = World(target("a", "us"), places=(Place("aws/eu", "http://b:8000"),))
    w.takes_s = {"b": 0.09}
    await w.run(5.0)
    before = len(w.connects)
    w.push(
        target("a", "us"), target("c", "eu"), target("b", "eu"), places=(Place("aws/eu", "http://b:8000"),)
    )
    await w.run(LOOK_S)
    assert w.distances() == {"a": 0.0, "b": 0.09, "c": 0.09}
    assert len(w.connects) == before
    assert {host for _, host in w.connects} == {"b"}


async def test_a_region_that_does_not_respond_keeps_its_last_distance() -> None:
    w = World(target("b", "eu"))
    w.takes_s = {"b": 0.09}
    await w.run(1.0)
    w.takes_s = {}
    await w.run(60.0)
    assert w.distances() == {"b": 0.09}


async def test_a_delay_of_one_connect_is_not_the_distance() -> None:
    w = World(target("b", "eu"))
    w.takes_s = {"b": 0.09}
    await w.run(5.0)
    w.takes_s = {"b": 0.3}
    await w.run(EVERY_S)
    assert w.distances() == {"b": 0.09}
    await w.run(6 * EVERY_S)
    assert w.distances() == {"b": 0.3}, "the route has changed"


# --- the window


def test_a_distance_is_the_minimum_of_a_window() -> None:
    distance = Distance()
    assert distance.observe(0.09, 0.0) == 0.09
    assert distance.observe(0.30, 1.0) == 0.09
    assert distance.observe(0.08, 2.0) == 0.08
    assert distance.deviation_s > 0


def test_a_longer_route_is_believed_after_the_window() -> None:
    distance = Distance()
    distance.observe(0.09, 0.0)
    found = [distance.observe(0.2, float(second)) for second in range(1, 16)]
    assert found[3] == 0.09
    assert found[-1] == 0.2


def test_a_distance_survives_rare_polls() -> None:
    distance = Distance()
    for poll in range(10):
        found = distance.observe(0.09 if poll % 2 else 0.2, poll * 20.0, every_s=20.0)
    assert found == 0.09
