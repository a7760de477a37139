"""What the store still knows of a service's past."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, StateChange
from tests.unit.databases import KINDS, empty_database

S = ReplicaState
SPOT = Offer(Zone("local", "r1", "r1-a"), "m", "L4", 1.0, CapacityType.SPOT, 0.25, 1.0)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = Store(Database(empty_database(request.param, tmp_path)))
    for name in ("chat", "other"):
        store.put_service(
            name, {"run": "x"}, replica_hash="h", sealed_secrets=b"", lb_port=1, target=2, mode=None, now=0.0
        )  # fmt: skip
    yield store
    store.close()


def happens(
    store: Store, at: float, *replicas: Replica, name: str = "chat", wanted: int | None = None
) -> None:
    story = [EventRecord("ProbePassed", "", replica.id, replica.state.value) for replica in replicas]
    if wanted is not None:
        story.append(EventRecord("scale", "", state=str(wanted)))
    store.commit(
        name, now=at, changed=replicas, memory=None, target=2, notes="", records=story, wanted=wanted
    )  # fmt: skip


def a_replica(replica_id: int, state: S = S.READY, ended_at: float | None = None) -> Replica:
    return Replica(replica_id, 1, SPOT, state, 1.0, 1.0, launched_at=1.0, ended_at=ended_at)


def lives(store: Store, replica_id: int, ended_at: float) -> None:
    happens(store, 5.0, a_replica(replica_id))
    happens(store, ended_at, a_replica(replica_id, S.GONE, ended_at))


def test_whoever_lived_then_and_all_that_became_of_them(store: Store) -> None:
    happens(store, 2.0, wanted=2)
    lives(store, 1, 50.0)
    lives(store, 2, 150.0)
    happens(store, 6.0, a_replica(3))
    happens(store, 7.0, a_replica(1), name="other", wanted=5)
    history = store.history("chat", since=100.0, most=10)
    assert [replica.id for replica in history.replicas] == [2, 3]
    assert history.changes == (
        StateChange(2.0, None, "2"),
        StateChange(5.0, 2, "READY"),
        StateChange(150.0, 2, "GONE"),
        StateChange(6.0, 3, "READY"),
    )
    assert (history.since, history.complete_from) == (100.0, 100.0)


def test_a_service_wants_what_was_written_last(store: Store) -> None:
    happens(store, 2.0, wanted=2)
    happens(store, 3.0, a_replica(1))
    assert [(row.name, row.wanted) for row in store.services()] == [("chat", 2), ("other", 0)]
    store.forget()
    assert [row.wanted for row in store.services()] == [2, 0]


def test_rows_that_were_folded_away_are_missed(store: Store) -> None:
    for number, ended_at in enumerate((50.0, 80.0, 60.0, 90.0), start=1):
        lives(store, number, ended_at)
    assert store.archive_replicas(before=85.0, keep=1) == 3
    history = store.history("chat", since=0.0, most=10)
    assert ([replica.id for replica in history.replicas], history.complete_from) == ([4], 80.0)
    assert store.history("chat", since=85.0, most=10).complete_from == 85.0, "those ended before"


WANTED = (2.0, None)
LATER = ((61.0, None), (5.0, 3), (200.0, 3), (201.0, 9))


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "keep", "left"),
    [
        pytest.param(1e9, 0, [WANTED, (60.0, 1), *LATER[:-1]], id="all that nothing needs"),
        pytest.param(1e9, 4, [WANTED, (60.0, 1), *LATER], id="but the newest four"),
        pytest.param(55.0, 0, [WANTED, (50.0, 2), (5.0, 1), (60.0, 1), *LATER], id="the oldest"),
        pytest.param(1e9, 99, None, id="nothing"),
    ],
)
def test_of_the_story_stays_what_is_new_or_needed(
    store: Store, before: float, keep: int, left: list[tuple[float, int | None]] | None
) -> None:
    happens(store, 2.0, wanted=2)
    lives(store, 2, 50.0)
    lives(store, 1, 60.0)
    happens(store, 61.0, wanted=1)
    lives(store, 3, 200.0)
    store.archive_replicas(before=100.0, keep=0)
    note = EventRecord("note", "of a replica that is folded", 9)
    store.commit("chat", now=201.0, changed=(), memory=None, target=2, notes="", records=[note])
    history = store.history("chat", since=55.0, most=10)
    told = [(line.at, line.record.replica_id) for line in store.events("chat")]
    number = len(store.events(None))
    dropped = store.prune_events(before=before, keep=keep)
    assert dropped == number - len(store.events(None))
    kept = [(line.at, line.record.replica_id) for line in store.events("chat")]
    assert kept == (told if left is None else left)
    assert store.prune_events(before=before, keep=keep) == 0
    assert store.history("chat", since=55.0, most=10) == history


def test_of_too_many_the_last_to_end_are_told(store: Store) -> None:
    happens(store, 2.0, a_replica(1))
    for number, ended_at in enumerate((50.0, 80.0, 60.0, 90.0), start=2):
        lives(store, number, ended_at)
    history = store.history("chat", since=0.0, most=3)
    assert [replica.id for replica in history.replicas] == [1, 3, 5]
    assert history.complete_from == 60.0


def test_of_too_many_changes_the_last_are_told(store: Store) -> None:
    for at in range(1, 16):
        happens(store, float(at), a_replica(1, S.READY if at % 2 else S.NOT_READY))
    history = store.history("chat", since=0.0, most=1)
    assert [change.at for change in history.changes] == [float(at) for at in range(6, 16)]
    assert history.complete_from == 5.0


def test_nothing_of_nobody(store: Store) -> None:
    history = store.history("ghost", since=3.0, most=10)
    assert (history.replicas, history.changes, history.complete_from) == ((), (), 3.0)
