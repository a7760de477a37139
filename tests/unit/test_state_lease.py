"""The lease: one term at a time, on the database's clock or a watcher's own, and no commit of a term that is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import Memory
from skyserve_cli.state.database import Database
from skyserve_cli.state.lease import NO_TERM, ControllerLease, LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord
from tests.unit.databases import KINDS, empty_database

TTL_S = 6.0


class Now:
    """The database's clock."""

    at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_database(request.param, tmp_path)


@pytest.fixture
def stores(url: str, now: Now) -> Iterator[tuple[Store, Store]]:
    """Two controllers' of one database."""
    one, other = Store(Database(url, database_clock=now)), Store(Database(url, database_clock=now))
    yield one, other
    one.close()
    other.close()


def take(store: Store, holder: str, unrenewed: ControllerLease | None = None) -> ControllerLease | None:
    return store.take_lease(holder, f"about {holder}", ttl_s=TTL_S, unrenewed=unrenewed)


def write(store: Store) -> None:
    store.append_event(EventRecord("note", "written"), now=0.0)


def test_the_first_term(stores: tuple[Store, Store]) -> None:
    one, _ = stores
    assert not one.database.lease().is_live
    assert take(one, "a") == ControllerLease("a", "about a", 1000, 0, 1006.0, 1000.0, 0)
    assert one.database.lease().is_live


def test_a_lease_that_is_held_is_not_taken(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    take(one, "a")
    now.at += TTL_S - 0.01
    assert take(other, "b") is None


def test_a_lease_that_is_renewed_is_held(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    term = take(one, "a")
    assert term is not None
    for _ in range(5):
        now.at += TTL_S - 1.0
        assert one.database.renew_lease(term.epoch, ttl_s=TTL_S) is not None
        assert take(other, "b") is None


def test_a_lease_that_has_run_out_begins_a_higher_epoch(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    first = take(one, "a")
    now.at += TTL_S
    second = take(other, "b")
    assert first is not None
    assert second is not None
    assert second.epoch > first.epoch
    assert one.database.renew_lease(first.epoch, ttl_s=TTL_S) is None


def test_the_epoch_grows_although_the_clock_is_set_back(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    first = take(one, "a")
    assert first is not None
    one.database.release_lease(first.epoch)
    now.at -= 500.0
    second = take(other, "b")
    assert second is not None
    assert second.epoch == first.epoch + 1


def test_the_same_holder_goes_on_at_once(stores: tuple[Store, Store]) -> None:
    one, other = stores
    first = take(one, "a")
    second = take(other, "a")
    assert first is not None
    assert second is not None
    assert second.epoch == first.epoch + 1
    with pytest.raises(LeaseLostError):
        write(one)


def test_a_released_lease_is_free(stores: tuple[Store, Store]) -> None:
    one, other = stores
    term = take(one, "a")
    assert term is not None
    one.database.release_lease(term.epoch)
    assert not other.database.lease().is_live
    assert take(other, "b") is not None


def test_a_release_that_comes_too_late_changes_nothing(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    first = take(one, "a")
    now.at += TTL_S
    second = take(other, "b")
    assert first is not None
    assert second is not None
    one.database.release_lease(first.epoch)
    assert other.database.lease() == replace(second, read_at=now.at)


def test_a_lease_that_was_not_renewed_is_taken_whatever_the_clock_says(
    stores: tuple[Store, Store], now: Now
) -> None:
    one, other = stores
    take(one, "a")
    now.at -= 8 * 3600.0  # set back: it would run out in eight hours
    watched = other.database.lease()
    assert take(other, "b") is None
    assert take(other, "b", unrenewed=watched) is not None


def test_a_lease_that_was_renewed_meanwhile_is_not_taken(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    term = take(one, "a")
    assert term is not None
    watched = other.database.lease()
    one.database.renew_lease(term.epoch, ttl_s=TTL_S)
    assert take(other, "b", unrenewed=watched) is None


def test_a_store_without_the_lease_writes_nothing(stores: tuple[Store, Store], now: Now) -> None:
    one, other = stores
    other.database.fence(NO_TERM)
    take(one, "a")
    write(one)
    for writing in (
        lambda: write(other),
        lambda: other.set_down("chat", purge=False, now=0.0),
        lambda: other.kill_replica("chat", 1, now=0.0),
        lambda: other.move_instants(1.0),
        lambda: other.archive_replicas(before=0.0),
        lambda: other.prune_events(before=0.0),
        lambda: other.database.put_fingerprints({"sealing.key": "x"}),
        lambda: other.commit(
            "chat",
            now=0.0,
            changed=(),
            memory=Memory(),
            target=1,
            notes="",
            records=[EventRecord("note", "x")],
        ),
        lambda: other.put_service(
            "chat",
            {},
            replica_hash="",
            sealed_secrets=b"",
            lb_port=1,
            target=1,
            mode=None,
            now=0.0,
        ),
    ):
        with pytest.raises(LeaseLostError):
            writing()
    now.at += TTL_S
    take(other, "b")
    write(other)
    with pytest.raises(LeaseLostError):
        write(one)
    assert [line.record.message for line in one.events(None)] == ["written", "written"]
    assert one.services(down=True) == []


def test_the_databases_own_clock(url: str) -> None:
    store = Store(Database(url))
    term = take(store, "a")
    assert term is not None
    assert term.expires_at - term.read_at == pytest.approx(TTL_S, abs=0.5)
    assert term.read_at == pytest.approx(time.time(), abs=60.0)  # of this host, too
    assert term.epoch == pytest.approx(term.read_at, abs=2.0)
    store.close()


def test_stores_of_one_database_in_memory_see_each_other() -> None:
    now = Now()
    one = Store(Database("sqlite://", database_clock=now))
    other = Store(Database("sqlite://", database_clock=now, shared_with=one.database))
    take(one, "a")
    assert take(other, "b") is None
    one.put_service("chat", {}, replica_hash="", sealed_secrets=b"", lb_port=1, target=1, mode=None, now=0.0)
    assert [row.name for row in other.services()] == ["chat"]
    one.set_down("chat", purge=False, now=0.0)
    assert other.services() == []
    assert one.database.owner() == other.database.owner()
