"""Which transactions are under way, in virtual time, and what the deadline of a caller means for what it requested."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.transactions import (
    SLOW_S,
    Deadline,
    DeadlinePassedError,
    Transactions,
    set_deadline,
)


@dataclass
class Time:
    at: float = 100.0

    def now(self) -> float:
        return self.at


def test_a_database_is_slow_from_the_begin_of_the_first_slow_transaction_to_the_end_of_a_fast_one() -> None:
    time = Time()
    found = Transactions(time.now)
    assert (found.slow_for_s(), found.longest_s()) == (0.0, 0.0)
    with found.one():
        time.at += SLOW_S / 2
        assert (found.slow_for_s(), found.longest_s()) == (0.0, SLOW_S / 2)
    with found.one():
        time.at += SLOW_S
        assert found.slow_for_s() == SLOW_S
    time.at += 1.0
    assert found.slow_for_s() == SLOW_S + 1.0, "none has shown that it is over"
    with found.one():
        time.at += SLOW_S
    assert found.slow_for_s() == 2 * SLOW_S + 1.0
    with found.one():
        time.at += 0.01
    assert (found.slow_for_s(), found.longest_s()) == (0.0, 0.0)


def test_a_transaction_that_fails_is_over_and_each_thread_has_its_own() -> None:
    time = Time()
    found = Transactions(time.now)
    with pytest.raises(ValueError, match="x"), found.one():
        raise ValueError("x")
    assert found.longest_s() == 0.0
    begun, over = threading.Event(), threading.Event()

    def other() -> None:
        with found.one():
            begun.set()
            over.wait(30.0)

    thread = threading.Thread(target=other, name="other")
    thread.start()
    assert begun.wait(30.0)
    time.at += 5.0
    assert (found.longest_s(), found.longest_s("other"), found.longest_s("none")) == (5.0, 5.0, 0.0)
    over.set()
    thread.join()


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Database("sqlite://"))
    put(store)
    yield store
    set_deadline(None)
    store.close()


def put(store: Store) -> None:
    store.put_service(
        "chat", {}, replica_hash="", sealed_secrets=b"", lb_port=1, target=1, mode=None, now=1.0
    )


def is_down(store: Store) -> bool:
    set_deadline(None)
    (row,) = store.services(down=True)
    return row.down


def test_nothing_is_stored_after_the_deadline(store: Store) -> None:
    time = Time()
    set_deadline(Deadline(5.0, time.now))
    store.services(down=True)
    time.at += 5.0
    with pytest.raises(DeadlinePassedError):
        store.services(down=True)
    with pytest.raises(DeadlinePassedError):
        store.set_down("chat", purge=False, now=2.0)
    assert not is_down(store)


def test_a_transaction_that_is_under_way_at_the_deadline_is_rolled_back(store: Store) -> None:
    deadline = Deadline(5.0, Time().now)
    set_deadline(deadline)

    def write() -> None:
        with store.database.writing() as c:
            c.exec_driver_sql("update services set down = 1")
            assert deadline.expire(), "what responds to the caller has given it up"

    with pytest.raises(DeadlinePassedError):
        write()
    assert not is_down(store)


def test_what_is_being_stored_is_not_given_up(store: Store) -> None:
    time = Time()
    deadline = Deadline(5.0, time.now)
    set_deadline(deadline)
    store.set_down("chat", purge=False, now=2.0)
    time.at += 100.0
    assert not deadline.expire()
    assert is_down(store)
