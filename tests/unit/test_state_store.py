"""The store on a real database: SQLite in a file and, where $SKYSERVE_TEST_POSTGRES_URL names one, PostgreSQL."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from policies.goals import UpdateMode
from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Role, Zone
from skyserve_cli.state.codec import replica_from_row, replica_to_row
from skyserve_cli.state.database import Database
from skyserve_cli.state.demand import KEEP_FOLDED_MINUTES, KEEP_MINUTES
from skyserve_cli.state.statements import RECENT_REPLICAS
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import (
    DemandRow,
    EventRecord,
    NoSuchServiceError,
    ServiceExistsError,
    ServiceRow,
    StillGoingDownError,
)
from tests.unit.databases import KINDS, empty_database

S = ReplicaState
SPOT = Offer(Zone("local", "r1", "r1-a"), "m", "L4", 0.5, CapacityType.SPOT, 0.25, 1.0)
ON_DEMAND = replace(SPOT, capacity_type=CapacityType.ON_DEMAND, price_usd_hour=1.0)


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_database(request.param, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(Database(url))
    yield store
    store.close()


def put(store: Store, name: str = "chat", mode: UpdateMode | None = None, **more: Any) -> int:
    given: dict[str, Any] = {
        "replica_hash": "h1",
        "sealed_secrets": b"\x00sealed",
        "lb_port": 30001,
        "target": 2,
        "now": 1000.0,
    }
    return store.put_service(name, {"run": "x"}, mode=mode, **(given | more))


def commit(store: Store, *changed: Replica, name: str = "chat", **more: Any) -> None:
    given: dict[str, Any] = {"now": 1001.0, "memory": None, "target": 2, "notes": "", "records": ()}
    store.commit(name, changed=changed, **(given | more))


def a_replica(replica_id: int, state: ReplicaState = S.READY, offer: Offer = SPOT, **more: Any) -> Replica:
    return replace(Replica(replica_id, 1, offer, state, 1001.0, 1000.0), **more)


def row(store: Store, name: str = "chat") -> ServiceRow:
    (found,) = [row for row in store.services(down=True) if row.name == name]
    return found


# --- goals ----------------------------------------------------------------------------------------------------


def test_a_new_service_is_all_there(store: Store) -> None:
    assert put(store) == 1
    found = row(store)
    assert (found.name, found.version, found.target, found.lb_port) == ("chat", 1, 2, 30001)
    assert (found.down, found.purge, found.update_mode) == (False, False, UpdateMode.ROLLING)
    assert (found.memory, found.replicas, found.killed) == (Memory(), (), frozenset())
    version = store.version("chat", 1)
    assert (version.spec, version.sealed_secrets, version.replica_hash) == ({"run": "x"}, b"\x00sealed", "h1")
    assert [line.record for line in store.events("chat")] == [EventRecord("goal", "up: version 1")]


def test_an_update_adds_a_version_and_takes_its_port(store: Store) -> None:
    put(store)
    commit(store, memory=Memory(5, {"a": 1}), notes="wait")
    assert put(store, mode=UpdateMode.BLUE_GREEN, lb_port=30007, target=9) == 2
    found = row(store)
    assert (found.version, found.update_mode, found.lb_port) == (2, UpdateMode.BLUE_GREEN, 30007)
    assert (found.target, found.memory, found.notes) == (2, Memory(5, {"a": 1}), "wait")


@pytest.mark.parametrize(
    ("before", "mode", "error"),
    [
        pytest.param("nothing", UpdateMode.ROLLING, NoSuchServiceError, id="update nothing"),
        pytest.param("up", None, ServiceExistsError, id="up twice"),
        pytest.param("down", UpdateMode.ROLLING, NoSuchServiceError, id="update what is down"),
        pytest.param("going down", None, StillGoingDownError, id="up while it goes down"),
    ],
)
def test_what_a_goal_may_not_be(store: Store, before: str, mode: UpdateMode | None, error: type) -> None:
    if before != "nothing":
        put(store)
    if before == "going down":
        commit(store, a_replica(1, S.TERMINATING))
    if "down" in before:
        store.set_down("chat", purge=False, now=1002.0)
    events = store.events(None)
    with pytest.raises(error) as raised:
        put(store, mode=mode)
    assert raised.type is error
    assert store.events(None) == events


def test_a_revived_name_goes_on_with_ids_and_versions(store: Store) -> None:
    put(store)
    commit(store, a_replica(1, S.GONE, ended_at=1001.0), memory=Memory(2, {"p": 1}, {"s": 1}, {"good": 1}))
    before = row(store)
    store.set_down("chat", purge=True, now=1002.0)
    assert put(store, now=2000.0, lb_port=30002, target=1) == 2
    after = row(store)
    assert after.memory == Memory(next_replica_id=2)
    assert (after.version, after.lb_port, after.target, after.created_at) == (2, 30002, 1, 2000.0)
    assert (after.down, after.purge) == (False, False)
    assert after.incarnation != before.incarnation


@pytest.mark.parametrize("purge", [False, True], ids=["with drain", "without drain"])
def test_down(store: Store, purge: bool) -> None:
    put(store)
    commit(store, a_replica(1))
    store.set_down("chat", purge=purge, now=1002.0)
    assert (row(store).down, row(store).purge) == (True, purge)
    assert [line.name for line in store.services()] == ["chat"]
    commit(store, a_replica(1, S.GONE, ended_at=1003.0))
    assert store.services() == []
    assert [line.name for line in store.services(down=True)] == ["chat"]


@pytest.mark.parametrize("act", ["down", "kill"])
def test_goals_for_a_service_that_is_not_there(store: Store, act: str) -> None:
    acts: dict[str, Callable[[], object]] = {
        "down": lambda: store.set_down("ghost", purge=False, now=1.0),
        "kill": lambda: store.kill_replica("ghost", 1, now=1.0),
    }
    with pytest.raises(NoSuchServiceError):
        acts[act]()
    assert store.events(None) == []


def test_a_kill_stands_until_its_replica_is_gone(store: Store) -> None:
    put(store)
    commit(store, a_replica(1), a_replica(2), a_replica(3, S.GONE, ended_at=1001.0))
    store.kill_replica("chat", 1, now=1002.0)
    store.kill_replica("chat", 1, now=1003.0)
    assert row(store).killed == {1}
    for dead in (3, 4):
        with pytest.raises(KeyError):
            store.kill_replica("chat", dead, now=1003.0)
    commit(store, a_replica(1, S.DRAINING))
    assert row(store).killed == {1}
    commit(store, a_replica(1, S.GONE, ended_at=1004.0))
    assert row(store).killed == frozenset()


def test_same_replicas_are_the_versions_with_the_current_ones_hash(store: Store) -> None:
    put(store, "other", replica_hash="h1")
    put(store, replica_hash="h1")
    for number, content in enumerate(["h2", "h1", "h1"], 2):
        assert put(store, mode=UpdateMode.ROLLING, replica_hash=content) == number
    assert row(store).same_replicas == {1, 3}
    assert row(store, "other").same_replicas == frozenset()


# --- the reconciler's ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replica",
    [
        pytest.param(Replica(1, 1, replace(SPOT, accelerator=None, on_demand_usd_hour=None), S.REQUESTED, 1.5, 0.5), id="bare"),
        pytest.param(
            Replica(
                2, 3, ON_DEMAND, S.DRAINING, 1.25, 0.5, "i-2", "http://h:1", 0.75, 1.0, 9.5, 10.0, None,
                EndReason.PREEMPTED, "30 s left: é\u4e16\U0001f600",
            ),
            id="full",
        ),
        pytest.param(a_replica(3, S.GONE, ended_at=5.0, end_reason=EndReason.CLOUD_ERROR), id="gone"),
    ],
)  # fmt: skip
def test_a_replica_comes_back_as_it_was(store: Store, replica: Replica) -> None:
    put(store)
    commit(store, replica)
    assert store.replicas("chat") == [replica]


@pytest.mark.parametrize("state", list(S), ids=lambda s: s.value)
def test_the_codec_knows_every_state(state: ReplicaState) -> None:
    fields = replica_to_row("chat", a_replica(1, state))
    assert replica_from_row(type("Row", (), fields)) == a_replica(1, state)


def test_the_photograph_holds_each_services_own_live_replicas(store: Store) -> None:
    for name in ("b", "a"):
        put(store, name)
    commit(store, a_replica(2), a_replica(1, S.REQUESTED), a_replica(3, S.GONE, ended_at=1.0), name="a")
    commit(store, a_replica(1), name="b")
    assert [(found.name, [r.id for r in found.replicas]) for found in store.services()] == [
        ("a", [1, 2]),
        ("b", [1]),
    ]


def test_a_commit_is_one_transaction(store: Store) -> None:
    put(store)
    commit(store, a_replica(1))
    before = (row(store), store.events(None), store.replicas("chat"))
    broken: Any = replace(a_replica(2), since=object())  # no database takes that as a number
    with pytest.raises((DBAPIError, sa.exc.StatementError)):
        commit(
            store,
            a_replica(1, S.GONE, ended_at=2.0),
            broken,
            memory=Memory(99),
            target=7,
            notes="changed",
            records=[EventRecord("note", "changed")],
        )
    assert (row(store), store.events(None), store.replicas("chat")) == before


def test_a_commit_whose_story_cannot_be_written_leaves_nothing(store: Store) -> None:
    put(store)
    with pytest.raises((DBAPIError, sa.exc.StatementError)):
        commit(store, a_replica(1), memory=Memory(2), records=[EventRecord("note", None)])  # type: ignore[arg-type]
    assert (row(store).replicas, row(store).memory) == ((), Memory())


def test_memory_survives_as_it_was(store: Store) -> None:
    memory = Memory(
        17, {"blocks": {"c/r/z|spot": {"until": 1.5, "failures": 2}}}, {"above": [1.0, 3]}, {"failed": [2]}
    )
    put(store)
    commit(store, memory=memory, target=4, notes="busy")
    assert (row(store).memory, row(store).target, row(store).notes) == (memory, 4, "busy")
    commit(store, target=5)
    assert (row(store).memory, row(store).target) == (memory, 5)


def test_the_owner_is_drawn_once(url: str) -> None:
    first, second = Store(Database(url)), Store(Database(url))
    assert first.database.owner() == second.database.owner() == first.database.owner()
    assert len(first.database.owner()) == 8
    first.close()
    second.close()


# --- money and the story ---------------------------------------------------------------------------------------


def test_money_is_price_times_time_since_the_cloud_accepted(store: Store) -> None:
    put(store)
    hour = 3600.0
    commit(
        store,
        a_replica(1, S.GONE, launched_at=0.0, ended_at=2 * hour),
        a_replica(2, S.READY, launched_at=hour),
        a_replica(3, S.READY, replace(ON_DEMAND, on_demand_usd_hour=None), launched_at=2 * hour),
        a_replica(4, S.GONE, ended_at=hour),  # never launched
        a_replica(5, S.REQUESTED),
    )
    spent = store.spent(3 * hour)["chat"]
    assert spent.usd == pytest.approx(0.25 * 2 + 0.25 * 2 + 1.0)
    assert spent.usd_on_demand == pytest.approx(1.0 * 2 + 1.0 * 2 + 1.0)


def test_a_service_without_replicas_has_cost_nothing(store: Store) -> None:
    put(store)
    assert (store.spent(1.0)["chat"].usd, store.spent(1.0)["chat"].usd_on_demand) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("keep", "before", "left"),
    [
        pytest.param(2, 1e9, [1, 8, 9], id="all but the newest two and the live one"),
        pytest.param(0, 1e9, [1], id="all but the live one"),
        pytest.param(2, 1004.0, [1, 4, 5, 6, 7, 8, 9], id="only what ended long ago"),
        pytest.param(99, 1e9, [1, 2, 3, 4, 5, 6, 7, 8, 9], id="nothing"),
    ],
)
def test_folding_drops_rows_and_keeps_the_totals(
    store: Store, keep: int, before: float, left: list[int]
) -> None:
    put(store)
    put(store, "other")
    ended = [
        a_replica(i, S.GONE, SPOT if i % 2 else ON_DEMAND, launched_at=100.0 * i, ended_at=1000.0 + i)
        for i in range(2, 10)
    ]
    commit(store, a_replica(1, launched_at=10.0), *ended)
    spent = store.spent(5000.0)
    assert store.archive_replicas(before=before, keep=keep) == 9 - len(left)
    assert store.archive_replicas(before=before, keep=keep) == 0
    assert [replica.id for replica in store.replicas("chat")] == left
    after = store.spent(5000.0)
    assert after.keys() == spent.keys()
    for name, money in spent.items():
        assert after[name].usd == pytest.approx(money.usd)
        assert after[name].usd_on_demand == pytest.approx(money.usd_on_demand)


def test_the_newest_replicas_are_shown_oldest_first(store: Store) -> None:
    put(store)
    commit(store, *[a_replica(i, S.GONE, ended_at=1.0) for i in range(1, 6)])
    assert [replica.id for replica in store.replicas("chat", limit=3)] == [3, 4, 5]


def test_the_story_is_read_in_pages(store: Store) -> None:
    put(store)
    put(store, "other")
    for number in range(5):
        commit(store, records=[EventRecord("note", f"line {number}", number, "READY")])
    pages, after = [], 0
    while page := store.events("chat", after=after, limit=2):
        pages.append([line.record.message for line in page])
        after = page[-1].seq
    assert pages == [["up: version 1", "line 0"], ["line 1", "line 2"], ["line 3", "line 4"]]
    newest = store.events("chat", limit=2, newest=True)
    assert [line.record for line in newest] == [
        EventRecord("note", "line 3", 3, "READY"),
        EventRecord("note", "line 4", 4, "READY"),
    ]
    assert [line.service for line in store.events(None, limit=2)] == ["chat", "other"]


# --- many at once ----------------------------------------------------------------------------------------------


def _at_once(jobs: list[Callable[[], object]]) -> list[str]:
    """What came of jobs that begin together: an exception's name, or the result."""
    barrier, outcomes = threading.Barrier(len(jobs)), []

    def run(job: Callable[[], object]) -> None:
        barrier.wait(10)
        try:
            outcomes.append(str(job()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sorted(outcomes)


def test_two_ups_at_once_make_one_service(store: Store) -> None:
    if "postgresql" in str(store.database.url):
        pytest.skip("there the second insert is refused by its key")
    assert _at_once([lambda: put(store)] * 6) == ["1", *["ServiceExistsError"] * 5]


def test_updates_at_once_get_a_version_each(store: Store) -> None:
    put(store)
    assert _at_once([lambda: put(store, mode=UpdateMode.ROLLING)] * 6) == ["2", "3", "4", "5", "6", "7"]


def test_commits_and_goals_at_once_lose_nothing(store: Store) -> None:
    put(store)
    commits: list[Callable[[], object]] = [
        lambda i=i: commit(store, a_replica(i), records=[EventRecord("note", str(i))])  # type: ignore[misc]
        for i in range(1, 7)
    ]
    goals: list[Callable[[], object]] = [lambda: put(store, mode=UpdateMode.ROLLING) and None] * 3
    assert _at_once(commits + goals) == ["None"] * 9
    assert len(row(store).replicas) == 6
    assert row(store).version == 4
    assert len(store.events("chat")) == 1 + 6 + 3


def test_a_reader_sees_one_state_while_a_writer_commits(store: Store) -> None:
    """Target and number of replicas change together; no snapshot shows one without the other."""
    put(store)
    commit(store, target=0)
    done = threading.Event()

    def write() -> None:
        for number in range(1, 40):
            commit(store, a_replica(number), target=number)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        found = row(store)
        assert found.target == len(found.replicas)
        seen.add(found.target)
    writer.join(60)
    assert row(store).target == 39


def _up(url: str, name: str) -> None:
    store = Store(Database(url))
    store.database.owner()
    put(store, name)
    for number in range(1, 11):
        commit(store, a_replica(number), name=name, memory=Memory(number + 1))
    store.close()


def test_processes_migrate_and_write_one_file_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_up, args=(url, f"s{number}")) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    store = Store(Database(url))
    assert [(found.name, len(found.replicas)) for found in store.services()] == [
        ("s0", 10),
        ("s1", 10),
        ("s2", 10),
    ]
    store.close()


def test_a_store_in_memory_is_one_database_for_all_threads() -> None:
    store = Store(Database("sqlite://"))
    put(store)
    outcomes = _at_once([lambda: put(store, mode=UpdateMode.ROLLING)] * 4)
    assert outcomes == ["2", "3", "4", "5"]
    store.close()


# --- the shape -------------------------------------------------------------------------------------------------


def test_a_migration_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database fails in the middle, as a kill would: the next start finds an empty one, not a half."""
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE versions (x)")  # in the way of the last table of the first migration
    connection.close()
    with pytest.raises(DBAPIError):
        Store(Database(f"sqlite:///{path}"))
    with sqlite3.connect(path) as connection:
        tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        connection.execute("DROP TABLE versions")
    connection.close()
    assert tables == {"versions"}
    store = Store(Database(f"sqlite:///{path}"))
    assert put(store) == 1
    store.close()


def test_an_open_database_is_safe_against_a_power_cut(tmp_path: Path) -> None:
    store = Store(Database(f"sqlite:///{tmp_path / 'state.db'}"))
    with sa.create_engine(store.database.url).connect() as other:
        assert other.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    with store.database.engine.connect() as own:
        assert own.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
        assert own.exec_driver_sql("PRAGMA busy_timeout").scalar() == 10_000
    store.close()


def test_everything_is_still_there_after_reopening(url: str) -> None:
    first = Store(Database(url))
    put(first)
    commit(first, a_replica(1), memory=Memory(2), records=[EventRecord("Launch", "why", 1, "REQUESTED")])
    told = (first.services(), first.events(None), first.database.owner())
    first.close()
    second = Store(Database(url))
    assert (second.services(), second.events(None), second.database.owner()) == told
    second.close()


def test_an_unknown_version_is_a_key_error(store: Store) -> None:
    with pytest.raises(KeyError):
        store.version("chat", 1)


# --- snapshots ------------------------------------------------------------------------------------------------


def test_another_process_s_writes_are_seen(url: str) -> None:
    controller, api = Store(Database(url)), Store(Database(url))
    put(api)
    assert [row.name for row in controller.services()] == ["chat"]
    api.set_down("chat", purge=True, now=5.0)
    assert [row.purge for row in controller.services(down=True)] == [True]
    assert controller.services() == []
    put(api)
    controller.commit("chat", now=6.0, changed=(), memory=None, target=3, notes="n", records=())
    put(api, mode=UpdateMode.ROLLING)
    controller.commit("chat", now=7.0, changed=(), memory=None, target=4, notes="m", records=())
    (seen,) = controller.services()
    assert (seen.version, seen.target, seen.notes) == (3, 4, "m")
    controller.close()
    api.close()


def test_what_is_kept_after_commits_is_what_would_be_read(store: Store) -> None:
    put(store)
    store.services()
    memory = Memory(7, {"zones": ("a", "b"), "n": {"1": 0.1}}, {"target": 2}, {})
    store.commit(
        "chat", now=1.0, changed=[a_replica(2), a_replica(1)], memory=memory, target=2, notes="", records=()
    )
    gone = replace(a_replica(1), state=ReplicaState.GONE, ended_at=2.0)
    store.commit("chat", now=2.0, changed=[gone], memory=None, target=2, notes="x", records=())
    kept = store.services()
    store.forget()
    assert kept == store.services()
    assert [replica.id for replica in kept[0].replicas] == [2]


def test_ended_replicas_of_many_services_are_one_query(store: Store) -> None:
    gone = {"state": S.GONE, "end_reason": EndReason.RUN_EXITED}
    names = [f"s{number}" for number in range(5)]
    for name in names:
        put(store, name)
        commit(
            store,
            a_replica(1, ended_at=100.0, **gone),
            a_replica(2, ended_at=900.0, **gone),
            a_replica(3),
            a_replica(4, ended_at=901.0, role=Role.LOAD_BALANCER, **gone),
            name=name,
        )
    asked: list[str] = []
    sa.event.listen(store.database.engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    found = store.recently_ended(names[:4], since=500.0)
    assert len([statement for statement in asked if "replicas" in statement]) == 1
    assert [(name, replica.id) for name, each in found.items() for replica in each] == [
        (name, 2) for name in names[:4]
    ]
    assert found["s0"] == [replica for replica in store.replicas("s0") if replica.id == 2]
    assert store.recently_ended([], since=0.0) == {}


def test_of_a_service_that_failed_often_only_the_newest_replicas_are_looked_through(store: Store) -> None:
    put(store)
    ended = [a_replica(n, S.GONE, ended_at=900.0) for n in range(1, RECENT_REPLICAS + 51)]
    commit(store, *ended)
    found = store.recently_ended(["chat"], since=0.0)["chat"]
    assert [replica.id for replica in found] == [*range(51, RECENT_REPLICAS + 51)]


# --- what services were asked for


def minute(number: int, requests: float = 10.0) -> DemandRow:
    return DemandRow(number, requests, 100.0, 20.0, 1.0, 2.0)


def test_minutes_are_kept_as_written_and_twice_is_once(store: Store) -> None:
    put(store)
    before = store.count()
    store.put_demand("chat", [minute(7), minute(8)])
    store.put_demand("chat", [minute(8), minute(9)])
    store.put_demand("other", [minute(1)])
    assert store.demand("chat") == [minute(7), minute(8), minute(9)]
    assert store.demand("chat", since=9) == [minute(9)]
    store.put_demand("chat", [minute(8, 5.0)], drop_from=8)
    assert store.demand("chat") == [minute(7), minute(8, 5.0)]
    assert store.count() == before


def test_minutes_become_means_of_ten_after_two_weeks_and_go_after_eight(store: Store) -> None:
    now = 100_000
    edge = (now - KEEP_MINUTES) // 10 * 10
    known = [edge - 25, *range(edge - 20, edge + 5)]
    store.put_demand("chat", [minute(number, float(number - edge)) for number in known])
    store.put_demand("chat", [minute(now - KEEP_FOLDED_MINUTES - 2000)])
    assert store.fold_demand(now) == 22 + 1
    assert [row.minute for row in store.demand("chat")] == list(range(edge, edge + 5))
    folded = store.demand("chat", folded=True)
    assert [(row.minute, row.requests) for row in folded] == [
        (edge - 30, -25.0),
        (edge - 20, -15.5),
        (edge - 10, -5.5),
    ]
    assert store.fold_demand(now) == 0
    assert store.demand("chat", folded=True) == folded
