"""What the event log says of starts of replicas that have a cache: measured seconds, and what the start itself has printed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from policies.model import Replica, ReplicaState, Zone
from provisioners.port.base import Instance, Provisioner
from skyserve_cli.controller.output_part import MOST_READ, PATIENCE_S, CacheStarts, sentence_of
from skyserve_cli.state.values import EventRecord, StoredEvent
from tests.unit.test_controller_view import a_row
from tests.unit.test_output_reader import INSTANCE, Sky
from tests.unit.test_output_reader import replica as replica_of

S = ReplicaState
NAME = a_row().name
EMPTY = b"cache: /skyserve-cache/hf_home is empty\nloading\n"
WARM = b"fetching\r50%\ncache: /skyserve-cache/hf_home has 15G of earlier replicas\n"


class Log:
    """The event log of a store."""

    def __init__(self) -> None:
        self.events_: list[StoredEvent] = []

    def append_event(self, record: EventRecord, *, now: float, service: str = "") -> None:
        self.events_.append(StoredEvent(len(self.events_) + 1, now, service, record))

    def events(self, name: str | Collection[str] | None, **_: Any) -> list[StoredEvent]:
        return [one for one in self.events_ if one.service == name]

    @property
    def said(self) -> list[tuple[int | None, str]]:
        return [(one.record.replica_id, one.record.message) for one in self.events_]


def kept(number: int, state: ReplicaState) -> Replica:
    """A replica in a cluster."""
    one = replica_of(number, state)
    return replace(one, offer=replace(one.offer, zone=Zone("kubernetes", "prod", "a")))


class World:
    def __init__(self, log: Log | None = None) -> None:
        self.sky, self.log, self.now, self.has_cache = Sky(), log or Log(), 1000.0, True
        self.starts = CacheStarts(
            self.log,  # type: ignore[arg-type]
            self.find,
            lambda service, version: self.has_cache,
            lambda: self.now,
        )

    def find(self, replica: Replica) -> tuple[Provisioner, Instance | None]:
        return self.sky, INSTANCE

    def step(self, number: int, log: bytes, took_s: float, state: S = S.READY) -> None:
        self.sky.log = log
        ready_at = self.now if state is S.READY else None
        one = replace(kept(number, state), launched_at=self.now - took_s, ready_at=ready_at)
        self.starts.step([a_row(one)])


def test_a_start_that_finds_its_weights_is_held_against_the_last_that_did_not() -> None:
    world = World()
    world.step(1, EMPTY, 210.4)
    world.step(1, EMPTY, 999.0)
    world.step(2, WARM, 12.0)
    assert world.log.said == [
        (1, "ready after 210 s; its cache was empty"),
        (2, "ready after 12 s with 15G in its cache; replica 1 took 210 s with an empty one"),
    ]
    restarted = World(world.log)
    restarted.step(2, WARM, 12.0)
    restarted.step(3, WARM, 14.0)
    assert world.log.said[2:] == [
        (3, "ready after 14 s with 15G in its cache; replica 1 took 210 s with an empty one")
    ]


@pytest.mark.parametrize("state", [one for one in S if one is not S.READY])
def test_nothing_is_said_before_a_replica_is_ready(state: S) -> None:
    world = World()
    world.step(1, EMPTY, 5.0, state)
    assert world.log.said == []


def test_nothing_is_said_of_a_service_without_a_cache_nor_its_log_read() -> None:
    world = World()
    world.has_cache = False
    world.step(1, WARM, 5.0)
    assert (world.log.said, world.sky.calls) == ([], 0)


def test_what_is_not_known_is_read_again_for_a_while_and_then_not_said() -> None:
    world = World()
    one = replace(kept(1, S.READY), launched_at=world.now - 5.0, ready_at=world.now)
    others = (b"cache: is what this program calls its store\n", b"cache: /x has s3cret of earlier replicas\n")
    for log in (b"", *others):
        world.sky.log = log
        world.starts.step([a_row(one)])
    assert world.sky.calls == 3
    world.now += PATIENCE_S + 1.0
    world.sky.log = WARM
    world.starts.step([a_row(one)])
    assert (world.log.said, world.sky.calls) == ([], 3)


def test_a_round_reads_a_few_logs_and_the_next_ones_the_others() -> None:
    world = World()
    world.sky.log = EMPTY
    fleet = [
        replace(kept(at, S.READY), launched_at=world.now - 5.0, ready_at=world.now)
        for at in range(1, MOST_READ + 3)
    ]
    for count in (MOST_READ, MOST_READ + 2, MOST_READ + 2):
        world.starts.step([a_row(*fleet)])
        assert (world.sky.calls, len(world.log.said)) == (count, count)


def test_a_rented_machine_prints_nothing_and_is_not_read() -> None:
    world = World()
    offer = replace(replica_of(1, S.READY).offer, zone=Zone("aws", "us-east-1", "us-east-1a"))
    one = replace(replica_of(1, S.READY), offer=offer, launched_at=world.now - 5.0, ready_at=world.now)
    world.starts.step([a_row(one)])
    assert (world.log.said, world.sky.calls) == ([], 0)


@pytest.mark.parametrize(
    ("found", "empty", "sentence"),
    [
        ([], None, "ready after 9 s; its cache was empty"),
        (["15G"], None, "ready after 9 s with 15G in its cache"),
        (["15G", "2M"], (4, 90), "ready after 9 s with 15G and 2M in its cache; replica 4 took 90 s with an empty one"),
    ],
)  # fmt: skip
def test_the_sentences(found: list[str], empty: tuple[int, int] | None, sentence: str) -> None:
    assert sentence_of(9, found, empty) == sentence
