"""One service whose row cannot be read, or whose turns fail or take long, is its own problem: all others go on."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from policies.goals import ScalingGoal, UpdateMode
from policies.model import Launched, ProbeFailed, Progressed, Replica, ReplicaState
from policies.placement import fleet
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.reconcile import reconciler as reconcile_module
from skyserve_cli.controller.reconcile.fleets import MOST_LAUNCHES
from skyserve_cli.controller.reconcile.inputs import Budget
from skyserve_cli.controller.reconcile.ports import Specs
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.slow_turns import LARGE, LARGE_REST, REST, SlowTurns
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.spec.load import load_text
from skyserve_cli.state import tables as t
from tests.unit.test_controller_reconciler import OFFERS, SPEC, World, a_replica

S = ReplicaState
KEY = b"c2ltdWxhdGVkLXNpbXVsYXRlZC1zaW11bGF0ZWQtLSE="


class Stored(World):
    """With the specs of the database, as the daemon has them, unless some are `broken`; and with a stopwatch."""

    stopwatch: Callable[[], float] = staticmethod(lambda: 0.0)

    def specs_port(self) -> Specs:
        return super().specs_port() if self.broken else SpecCache(self.store, SecretBox(KEY))

    def budget(self) -> Budget:
        return Budget(stopwatch=self.stopwatch)


@pytest.fixture
def world() -> Iterator[Stored]:
    """The services chat, which is to be in trouble, and other."""
    world = Stored()
    world.up()
    world.up(replace(SPEC, name="other"))
    yield world
    world.store.close()


def reconciler(world: Stored, stopwatch: Callable[[], float] = lambda: 0.0) -> Reconciler:
    world.stopwatch = stopwatch
    return world.reconciler()


def damage(world: Stored, table: sa.Table, column: str, text: str) -> None:
    """Write it into the row of chat, as no program of ours does."""
    named = "name" if table is t.services else "service"
    with world.store.database.writing() as c:
        c.execute(sa.text(f"UPDATE {table.name} SET {column} = :text WHERE {named} = 'chat'"), {"text": text})  # noqa: S608
    world.store.forget()


def tick(made: Reconciler, world: World, times: int = 1) -> None:
    for _ in range(times):
        world.time += 1.0
        world.lists(*(world.instance_of(one) for one in world.row().replicas))
        made.tick()


def notes(world: Stored, name: str = "chat") -> list[str]:
    return [line.record.message for line in world.store.events(name) if line.record.kind == "note"]


DAMAGES = {
    "not a number": (t.versions, "spec", json.dumps({"name": "chat", "run": "x", "drain_timeout_s": None})),
    "no JSON": (t.versions, "spec", '{"name": "ch'),
    "another kind of JSON": (t.versions, "spec", "[1]"),
    "a state of a newer program": (t.replicas, "state", "HIBERNATING"),
}


class SlowToDecide:
    """The stopwatch of `reconciler` stands still but in the turns of chat, which take `took_s` each."""

    def __init__(self, world: Stored, took_s: float = 3.0) -> None:
        self.took_s = took_s
        self.turns = Counter[str]()
        self._spent_s = 0.0
        self.reconciler = reconciler(world, stopwatch=lambda: self._spent_s)
        self._decide = self.reconciler._service_turn.decide
        self.reconciler._service_turn.decide = self._slowly  # type: ignore[method-assign]

    def _slowly(self, row: Any, *rest: Any) -> Any:
        self.turns[row.name] += 1
        self._spent_s += self.took_s if row.name == "chat" else 0.0
        return self._decide(row, *rest)


@pytest.mark.parametrize(("table", "column", "text"), DAMAGES.values(), ids=DAMAGES)
def test_a_row_that_cannot_be_read_is_left_alone_and_the_others_go_on(
    world: World, table: sa.Table, column: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.has(a_replica(1), name="chat")
    damage(world, table, column, text)
    made = reconciler(world)
    with caplog.at_level(logging.ERROR):
        tick(made, world, 5)
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text
    assert len(notes(world)) == 1
    assert "`serve down chat` terminates its machines" in world.row().notes
    assert [one.id for one in world.row().replicas] == [1]
    assert world.agents["chat"] is None  # its load balancer goes on with the table it has
    assert len(world.row("other").replicas) == 2
    assert {call.service for call in world.calls} == {"other"}


@pytest.mark.parametrize(("table", "column", "text"), DAMAGES.values(), ids=DAMAGES)
def test_down_works_whatever_cannot_be_read(world: Stored, table: sa.Table, column: str, text: str) -> None:
    world.has(a_replica(1), a_replica(2, S.STARTING), name="chat")
    damage(world, table, column, text)
    made = reconciler(world)
    tick(made, world)
    world.store.set_down("chat", purge=True, now=world.time)
    tick(made, world, 2)
    assert {one.state for one in world.row().replicas} == {S.TERMINATING}
    assert {call.replica.id for call in world.calls if call.service == "chat"} == {1, 2}
    order = world.agents.get("chat")
    if order is not None and table is t.versions:  # its own keys are not known, so none opens it
        assert [key.sha256 for key in order.table.access.keys] == ["0" * 64]


def test_an_update_replaces_what_cannot_be_read(world: Stored) -> None:
    damage(world, t.versions, "spec", "{}")
    made = reconciler(world)
    tick(made, world)
    assert "cannot be read" in world.row().notes
    world.up(SPEC, mode=world.row().update_mode)
    tick(made, world, 2)
    assert len(world.row().replicas) == 2
    assert "cannot be read" not in world.row().notes


def test_damaged_memory_is_as_none(world: Stored) -> None:
    damage(world, t.services, "memory", "{")
    damage(world, t.services, "update_mode", "sideways")
    tick(reconciler(world), world)
    assert len(world.row().replicas) == 2


def test_a_turn_that_raises_is_said_once(world: Stored, caplog: pytest.LogCaptureFixture) -> None:
    world.broken.add("chat")
    made = world.reconciler()
    with caplog.at_level(logging.ERROR):
        tick(made, world, 5)
    assert len(caplog.records) == 1
    assert notes(world) == [world.row().notes]
    assert world.row().notes.startswith("its last turn failed (ValueError), and its replicas are left")
    assert len(world.row("other").replicas) == 2
    world.broken.clear()
    tick(made, world)
    assert "its last turn failed" not in world.row().notes


def test_a_tick_launches_a_bounded_number_of_replicas_of_a_service(world: Stored) -> None:
    many = load_text("name: chat\nservice: {replicas: 10000}\nrun: x\nresources: {use_spot: true}").spec
    world.up(many, mode=world.row().update_mode)
    made = reconciler(world)
    sizes = []
    for _ in range(2):
        tick(made, world)
        sizes.append(len(world.row().replicas))
    assert sizes == [MOST_LAUNCHES, 2 * MOST_LAUNCHES]
    assert len(world.row("other").replicas) == 2


def test_a_service_whose_turns_take_long_rests_and_the_others_do_not(world: Stored) -> None:
    slow = SlowToDecide(world)
    made = slow.reconciler
    for number in range(90):
        world.has(replace(world.row("other").replicas[0], since=number), name="other") if number > 1 else None
        tick(made, world)
    assert slow.turns["other"] > 60
    assert slow.turns["chat"] <= 90 / (3 * REST) + 2
    assert notes(world) == ["deciding about it takes 3.0 s, so it is decided about every 30 s at most"]
    assert len(world.row().replicas) == 2


def test_what_happens_to_a_service_that_rests_is_kept_for_its_next_turn(world: Stored) -> None:
    made = SlowToDecide(world).reconciler
    tick(made, world, times=2)
    assert made._slow.rests("chat", (), world.time)
    world.happens(Launched(1, "i-1"))
    for _ in range(40):
        world.time += 1.0
        made.tick()
    assert world.fleet() == "1:PROVISIONING 2:REQUESTED"


def test_one_slow_turn_is_no_reason_to_rest_and_two_in_a_row_are() -> None:
    spent = 0.0
    slow = SlowTurns(lambda: spent)
    for took_s, rests in ((3.0, False), (0.1, False), (3.0, False), (3.0, True), (0.4, False)):
        with slow.turn("chat", (), 100.0):
            spent += took_s
        assert slow.rests("chat", (), 100.0) is rests


def test_a_large_service_rests_after_each_turn_but_not_from_what_clouds_list() -> None:
    spent = 0.0
    slow = SlowTurns(lambda: spent)
    for replicas, now, has_listings, rests in (
        (LARGE - 1, 100.0, False, False),
        (LARGE, 100.0, False, True),
        (LARGE, 100.0, True, False),
        (LARGE, 100.0 + 0.01 * LARGE_REST, False, False),
    ):
        with slow.turn("chat", (), 100.0, replicas) as turn:
            spent += 0.01
        assert slow.rests("chat", (), now, has_listings=has_listings) is rests
        assert turn.remark == ""


def test_a_large_service_is_decided_about_after_the_others_also_before_it_is_launched(world: Stored) -> None:
    world.up(replace(SPEC, name="big", scaling=ScalingGoal(LARGE, LARGE)))
    made = reconciler(world)
    passes: list[list[str]] = []
    decide = made._decide

    def noted(*args: Any, **options: Any) -> Any:
        found = decide(*args, **options)
        passes.append([one.row.name for one in found[1]])
        return found

    made._decide = noted  # type: ignore[method-assign]
    tick(made, world)  # what it wants is not known yet
    passes.clear()
    assert 0 < len(world.row("big").replicas) < LARGE
    tick(made, world)
    assert passes[1] == ["big"]
    assert "big" not in passes[0]


def test_a_service_that_rests_makes_no_call_again_that_has_its_result(world: Stored) -> None:
    made = SlowToDecide(world).reconciler
    tick(made, world, times=2)
    assert {call.replica.id for call in world.calls if call.service == "chat"} == {1, 2}
    world.happens(Launched(1, "i-1"))
    world.happens(Progressed(2, "trying again"))
    tick(made, world)
    assert made._slow.rests("chat", (), world.time)
    assert {call.replica.id for call in world.calls if call.service == "chat"} == {2}


def test_what_a_cloud_lists_while_a_service_rests_is_seen_after_its_rest(world: Stored) -> None:
    slow = SlowToDecide(world, took_s=0.0)
    made = slow.reconciler
    world.has(*(a_replica(number, S.READY) for number in (1, 2)), name="chat")
    tick(made, world, times=4)
    slow.took_s = 3.0
    world.happens(ProbeFailed(1, "x"))
    tick(made, world, times=3)
    assert world.fleet() == "1:NOT_READY 2:READY"
    assert made._slow.rests("chat", (), world.time)
    for _ in range(40):
        world.time += 1.0
        world.lists()  # both are gone
        made.tick()
    assert not {one.id for one in world.row().replicas} & {1, 2}


def test_a_large_service_is_decided_about_after_the_others_have_what_they_need(
    world: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile_module, "LARGE", 2)
    one = replace(SPEC.scaling, min_replicas=1, max_replicas=1)
    world.up(replace(SPEC, name="other", scaling=one), UpdateMode.ROLLING)
    made = reconciler(world)
    tick(made, world)
    assert [len(world.row(name).attempts) for name in ("chat", "other")] == [2, 1]
    decide, decided = made._service_turn.decide, list[tuple[str, list[str]]]()

    def watched(row: Any, *rest: Any) -> Any:
        decided.append((row.name, list(world.log)))
        return decide(row, *rest)

    made._service_turn.decide = watched  # type: ignore[method-assign]
    world.log.clear()
    world.happens(Launched(1, "i-1"))
    world.happens(Launched(1, "i-1"), name="other")
    tick(made, world)
    assert decided == [("other", []), ("chat", ["tables", "probes", "calls"])]
    assert world.log == ["tables", "probes", "calls"] * 2 + ["watch"]
    assert S.REQUESTED not in {world.row(name).replicas[0].state for name in ("chat", "other")}
    assert {call.key for call in world.calls} == {("chat", 2)}


def test_what_happened_to_a_large_service_is_kept_where_the_database_fails_before_its_turn(
    world: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile_module, "LARGE", 1)
    made = reconciler(world)
    tick(made, world)
    services, reads = world.store.services, 0

    def once(**more: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads > 1:
            raise OperationalError("", None, Exception("it is away"))
        return services(**more)

    monkeypatch.setattr(world.store, "services", once)
    world.happens(Launched(1, "i-1"))
    world.time += 1.0
    made.tick()
    monkeypatch.undo()
    assert world.fleet() == "1:REQUESTED 2:REQUESTED"
    made.tick()
    assert world.fleet() == "1:PROVISIONING 2:REQUESTED"


def test_what_a_failed_turn_began_with_is_kept_for_the_next() -> None:
    slow = SlowTurns(lambda: 0.0)
    with suppress(ValueError), slow.turn("chat", (Launched(1, "i-1"),), 100.0):
        raise ValueError
    assert slow.keeps("chat")
    with slow.turn("chat", (Launched(2, "i-2"),), 101.0) as turn:
        assert turn.events == [Launched(1, "i-1"), Launched(2, "i-2")]
    assert not slow.keeps("chat")


def naive_ends(replicas: list[Replica], keep: int) -> list[int]:
    """The order of `fleet.ends`, as its docstring has it."""
    in_zone, left, chosen = Counter(one.zone for one in replicas), list(replicas), []
    for _ in range(len(replicas) - keep):
        last = min(
            left, key=lambda r: (fleet._ENDING_ORDER[r.state], r.version, False, -in_zone[r.zone], -r.id)
        )
        left.remove(last)
        in_zone[last.zone] -= 1
        chosen.append(last.id)
    return chosen


def test_the_order_of_ends_does_not_depend_on_how_it_is_found() -> None:
    rng = random.Random(1)
    for _ in range(200):
        replicas = [
            replace(
                a_replica(number, rng.choice([S.READY, S.STARTING, S.NOT_READY])),
                version=rng.choice([1, 2]),
                offer=rng.choice(OFFERS),
            )
            for number in rng.sample(range(100), rng.randrange(1, 20))
        ]
        keep = rng.randrange(len(replicas) + 1)
        assert [one.replica_id for one in fleet.ends(replicas, keep, "x")] == naive_ends(replicas, keep)
