"""What the store remembers of its services: kept up with its own writes, read again after those of others."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import Connection

from policies.goals import UpdateMode
from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from skyserve_cli.state import snapshot
from skyserve_cli.state.database import Database
from skyserve_cli.state.read_cache import ReadCache
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import Commit, ServiceRow
from tests.kit.rows import a_row

OFFER = Offer(Zone("local", "r1", "r1-a"), "m", "L4", 0.5, CapacityType.SPOT, 0.25, 1.0)


def commit(name: str, *numbers: int, state: ReplicaState = ReplicaState.READY) -> Commit:
    changed = [Replica(number, 1, OFFER, state, 1001.0, 1000.0) for number in numbers]
    return Commit(name, now=1.0, changed=changed, memory=None, target=1, notes="", records=())


@pytest.mark.parametrize(
    ("writes", "count", "replicas", "has_old_goals"),
    [
        ([(8, [commit("a", 1)])], 8, [1], False),
        ([(8, [commit("a", 1)]), (9, [commit("a", 2)])], 9, [1, 2], False),
        ([(9, [commit("a", 2)]), (8, [commit("a", 1)])], 9, [1, 2], False),
        ([(9, [commit("a", 2)])], 7, [], False),
        ([(7, [commit("a", 1)])], 7, [], False),
        ([(8, [commit("b", 1)])], 7, [], False),
        ([(8, [])], 8, [], True),
        ([(9, []), (8, [commit("a", 1)])], 9, [1], True),
    ],
    ids=[
        "one",
        "two",
        "in another order",
        "a gap",
        "an old one",
        "a service it does not know",
        "a goal",
        "both",
    ],
)
def test_it_follows_what_was_written(
    writes: list[tuple[int, list[Commit]]], count: int, replicas: list[int], has_old_goals: bool
) -> None:
    kept = ReadCache(7, {"a": a_row(name="a")})
    for number, commits in writes:
        kept.follow(number, commits)
    assert (kept.count, [one.id for one in kept.rows["a"].replicas]) == (count, replicas)
    assert kept.has_old_goals is has_old_goals


# --- the store ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(Database(f"sqlite:///{tmp_path / 'state.db'}"))
    for name in ("a", "b"):
        put(store, name)
    store.services()
    store.commit_all([commit("a", 1, 2), commit("b", 1)])
    yield store
    store.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each reading of rows, whether it read replicas."""
    found: list[bool] = []
    read = snapshot.read_services

    def watched(c: Connection, **more: Any) -> list[ServiceRow]:
        found.append(more.get("before") is None)
        return read(c, **more)

    monkeypatch.setattr(snapshot, "read_services", watched)
    return found


def put(store: Store, name: str, mode: UpdateMode | None = None) -> None:
    new = {"replica_hash": "h", "sealed_secrets": b"x", "lb_port": 1, "target": 2}
    store.put_service(name, {"run": "x"}, mode=mode, now=1000.0, **new)  # type: ignore[arg-type]


def live(rows: Collection[ServiceRow]) -> dict[str, list[int]]:
    return {row.name: [one.id for one in row.attempts] for row in rows}


GOALS: dict[str, Any] = {
    "a new service": lambda store: put(store, "c"),
    "an update": lambda store: put(store, "b", UpdateMode.ROLLING),
    "down": lambda store: store.set_down("b", purge=False, now=1001.0),
    "the end of a replica": lambda store: store.kill_replica("b", 1, now=1001.0),
}


@pytest.mark.parametrize("write", GOALS.values(), ids=GOALS)
def test_a_goal_reads_no_replica_again_and_no_other_row_changes(
    store: Store, reads: list[bool], write: Any
) -> None:
    before = {row.name: row for row in store.services()}
    write(store)
    after = {row.name: row for row in store.services()}
    assert reads == [False]
    assert after["a"] is before["a"]
    assert list(after.values()) == Store.services(Store(store.database))
    assert live(after.values()) | {"c": []} == {"a": [1, 2], "b": [1], "c": []}


def test_a_service_that_is_down_and_has_nothing_left_is_not_shown(store: Store) -> None:
    store.services()
    store.set_down("b", purge=True, now=1001.0)
    store.services()
    store.commit_all([commit("b", 1, state=ReplicaState.GONE)])
    assert live(store.services()) == {"a": [1, 2]}
    put(store, "b")
    assert live(store.services()) == {"a": [1, 2], "b": []}


def test_a_replica_that_is_to_end_is_known_after_a_tick_that_was_decided_before(store: Store) -> None:
    store.services()
    store.kill_replica("a", 1, now=1001.0)
    store.commit_all([commit("a", 1, state=ReplicaState.GONE)])  # its kill is struck out
    store.commit_all([commit("a", 3)])
    (row, _) = store.services()
    assert (row.killed, live([row])) == (frozenset(), {"a": [2, 3]})
    assert list(store.services()) == Store.services(Store(store.database))


def test_what_another_process_writes_is_read_again(store: Store, reads: list[bool]) -> None:
    other = Store(Database(str(store.database.url)))
    store.services()
    put(other, "c")
    other.commit_all([commit("a", 3)])
    assert live(store.services()) == {"a": [1, 2, 3], "b": [1], "c": []}
    assert reads[-1] is True
    other.close()


def test_a_reader_waits_for_the_cache_of_a_write_that_has_just_ended(
    store: Store, reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, follow = store._read_cache, ReadCache.follow
    written, goes_on = threading.Event(), threading.Event()
    found: list[dict[str, list[int]]] = []

    def late(self: ReadCache, count: int, commits: Any) -> None:
        store._lock.release()  # as if the writer had not come so far
        written.set()
        goes_on.wait(10.0)
        store._lock.acquire()
        follow(self, count, commits)

    monkeypatch.setattr(ReadCache, "follow", late)
    monkeypatch.setattr(type(store._lock), "wait_for", _waiting(goes_on))
    writer = threading.Thread(target=lambda: store.commit_all([commit("a", 3)]))
    writer.start()
    assert written.wait(10.0)
    store._writers = 1  # the late writer has already said that it is done
    found.append(live(store.services()))
    writer.join(10.0)
    assert found == [{"a": [1, 2, 3], "b": [1]}]
    assert (reads, store._read_cache is kept) == ([], True)


def _waiting(goes_on: threading.Event) -> Any:
    wait_for = threading.Condition.wait_for

    def waited(self: threading.Condition, predicate: Any, timeout: float | None = None) -> Any:
        goes_on.set()
        return wait_for(self, predicate, timeout)

    return waited
