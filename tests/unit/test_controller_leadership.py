"""What a controller may do, and until when, by its own clock and whatever the database's does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

import pytest

from skyserve_cli.controller.persistence import key_fingerprints as fingerprints
from skyserve_cli.controller.persistence import leadership
from skyserve_cli.controller.persistence.key_fingerprints import ForeignKeysError
from skyserve_cli.controller.persistence.leadership import (
    TTL_S,
    Leadership,
    LeaseRenewer,
    NotLeadingError,
    holder_of,
)
from skyserve_cli.controller.reconcile.ports import OperationKind
from skyserve_cli.home import Home
from skyserve_cli.state.database import Database
from skyserve_cli.state.lease import NO_TERM, ControllerLease, LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

L, A, T = OperationKind.LAUNCH, OperationKind.ATTEND, OperationKind.TERMINATE


@dataclass
class Time:
    """`there` is the database's clock; both go on together unless one is set."""

    here: float = 50.0
    there: float = 1000.0

    def now(self) -> float:
        return self.here

    def database(self) -> float:
        return self.there

    def passes(self, seconds: float) -> None:
        self.here += seconds
        self.there += seconds


@dataclass
class World:
    time: Time = field(default_factory=Time)

    def __post_init__(self) -> None:
        self.first = Store(Database("sqlite://", database_clock=self.time.database))
        self.second = Store(
            Database("sqlite://", database_clock=self.time.database, shared_with=self.first.database)
        )
        self.a = Leadership(self.first, "a", "the controller on a", self.time)
        self.b = Leadership(self.second, "b", "the controller on b", self.time)
        self.second.database.fence(NO_TERM)


@pytest.fixture
def world() -> World:
    return World()


def test_one_leads_and_the_other_stands_by(world: World) -> None:
    world.a.step()
    world.b.step()
    assert (world.a.leads, world.b.leads) == (True, False)
    assert world.a.to_json() == {
        "leads": True,
        "epoch": 1000,
        "leader": "the controller on a",
        "unfit": "",
        "astray": False,
    }
    assert world.b.to_json() == {
        "leads": False,
        "epoch": 1000,
        "leader": "the controller on a",
        "unfit": "",
        "astray": False,
    }
    world.a.refuse_unless_leading()
    with pytest.raises(NotLeadingError, match="the controller on a leads; run the command there"):
        world.b.refuse_unless_leading()


@pytest.mark.parametrize(
    ("passed_s", "launches", "terminates"),
    [
        pytest.param(0.0, True, True, id="just renewed"),
        pytest.param(TTL_S / 2 - 0.1, True, True, id="more than half is left"),
        pytest.param(TTL_S / 2, True, False, id="half is left"),
        pytest.param(TTL_S - 0.1, True, False, id="a moment is left"),
        pytest.param(TTL_S, False, False, id="it has run out"),
    ],
)
def test_what_is_allowed(world: World, passed_s: float, launches: bool, terminates: bool) -> None:
    world.a.step()
    world.time.passes(passed_s)
    assert (world.a.allows(L), world.a.allows(A), world.a.allows(T)) == (launches, launches, terminates)
    assert world.a.may_terminate() is terminates
    assert world.a.leads  # no other controller has taken over yet
    world.a.step()
    assert world.a.allows(T)


def test_without_a_term_nothing_is_allowed(world: World) -> None:
    assert not any(world.a.allows(kind) for kind in OperationKind)


def test_a_lease_that_runs_out_goes_to_the_other(world: World) -> None:
    world.a.step()
    world.b.step()
    world.time.passes(TTL_S)
    world.b.step()
    assert world.b.leads
    assert not world.a.allows(L)
    with pytest.raises(LeaseLostError):
        world.first.append_event(EventRecord("note", "late"), now=0.0)
    world.a.step()  # awake again
    assert world.a.is_over
    assert not world.a.leads


def test_a_lease_that_is_renewed_is_kept(world: World) -> None:
    world.a.step()
    for _ in range(20):
        world.time.passes(TTL_S / 3)
        world.a.step()
        world.b.step()
    assert world.a.leads
    assert not world.b.leads


def test_a_state_that_is_not_ours_any_more_ends_what_we_do_and_not_the_term(world: World) -> None:
    found = [""]
    a = Leadership(world.first, "a", "the controller on a", world.time, astray=lambda lease: found[0])
    a.step()
    assert a.allows(L)
    found[0] = "state.db was deleted"
    a.step()
    assert (a.leads, a.is_over, a.allows(L), a.may_terminate()) == (False, False, False, False)
    assert (a.to_json()["unfit"], a.to_json()["astray"]) == ("state.db was deleted", True)
    with pytest.raises(NotLeadingError, match=r"must not lead: state\.db was deleted"):
        a.refuse_unless_leading()
    with pytest.raises(LeaseLostError):
        world.first.append_event(EventRecord("note", "late"), now=0.0)
    found[0] = ""  # it is back, and what this process knows is of before
    a.step()
    assert a.is_over


def test_a_state_that_is_not_ours_is_not_led_at_all(world: World) -> None:
    a = Leadership(
        world.first,
        "a",
        "the controller on a",
        world.time,
        astray=lambda lease: "the database is older" if lease else "",
    )
    a.step()
    assert (a.leads, a.epoch) == (False, 0)
    assert (a.to_json()["unfit"], a.to_json()["astray"]) == ("the database is older", True)


@pytest.mark.parametrize("set_by_s", [-8 * 3600.0, 8 * 3600.0], ids=["back", "on"])
def test_a_clock_that_is_set_lets_two_lead_at_no_time(world: World, set_by_s: float) -> None:
    world.a.step()
    world.b.step()
    world.time.there += set_by_s
    for _ in range(12):
        world.time.passes(TTL_S / 3)
        world.b.step()
        if not world.a.is_over:
            world.a.step()
        assert [world.a.allows(L), world.b.allows(L)].count(True) <= 1 or world.a.is_over


def test_after_a_clock_was_set_back_a_dead_controller_is_still_replaced(world: World) -> None:
    world.a.step()
    world.time.there -= 8 * 3600.0
    world.b.step()
    world.time.passes(TTL_S + 0.1)
    world.b.step()
    assert world.b.leads


def test_a_released_lease_is_taken_at_once(world: World) -> None:
    world.a.step()
    world.b.step()
    world.a.release()
    assert not world.a.allows(L)
    world.b.step()
    assert world.b.leads
    world.a.release()  # twice is harmless
    assert world.b.leads
    world.b.step()
    assert world.b.leads


def test_a_controller_of_the_same_home_goes_on_at_once(world: World) -> None:
    world.a.step()
    again = Leadership(world.second, "a", "the next one on a", world.time)
    again.step()
    assert again.leads
    assert again.epoch == world.a.epoch + 1


def test_what_others_say_ends_a_term(world: World) -> None:
    world.a.step()
    world.a.lost()
    assert world.a.is_over
    assert not world.a.allows(L)


def test_the_databases_clock_goes_on_between_two_looks(world: World) -> None:
    world.a.step()
    assert world.a.database_now() == 1000.0
    world.time.here += 3.0
    assert world.a.database_now() == 1003.0
    world.time.there += 500.0
    world.a.step()
    assert world.a.database_now() == 1500.0


# --- the thread -------------------------------------------------------------------------------------------------


class Calls:
    """What a LeaseRenewer has called, and a database that may not respond."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.over, self.hangs = threading.Event(), threading.Event(), threading.Event()
        self.responds = threading.Event()
        self.reconnected = threading.Event()
        self.number: int | None = None
        self.terms = self.turned = 0
        monkeypatch.setattr(leadership, "RENEW_EVERY_S", 0.005)
        monkeypatch.setattr(leadership, "STANDBY_POLL_S", 0.005)
        monkeypatch.setattr(leadership, "RESPONSE_WITHIN_S", 0.05)
        renew = world.first.database.renew_lease

        def slow(epoch: int, *, ttl_s: float) -> ControllerLease | None:
            if self.hangs.is_set():
                self.responds.wait(60.0)
            return renew(epoch, ttl_s=ttl_s)

        def reconnect() -> None:
            self.reconnected.set()
            self.hangs.clear()  # the new connection is as good as new

        monkeypatch.setattr(world.first.database, "renew_lease", slow)
        monkeypatch.setattr(world.first.database, "reconnect_lease", reconnect)
        self.supervisor = LeaseRenewer(
            world.a,
            self.start,
            self.over.set,
            self.turn,
            lambda: "the tick has decided about service alpha for 61s",
        )

    def start(self) -> None:
        self.terms += 1
        self.started.set()

    def turn(self) -> int | None:
        self.turned += 1
        return self.number


@pytest.fixture
def calls(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls = Calls(world, monkeypatch)
    calls.supervisor.start()
    assert calls.started.wait(30.0)
    yield calls
    calls.responds.set()
    calls.supervisor.stop()


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        sleep(0.01)
    raise AssertionError("it did not come to be")


def test_a_query_without_a_response_is_given_up_and_its_response_dropped(world: World, calls: Calls) -> None:
    calls.hangs.set()
    assert calls.reconnected.wait(30.0)
    world.time.passes(1.0)
    eventually(lambda: world.a.left_s() == TTL_S)  # renewed over the new connection
    world.time.passes(1.0)
    eventually(lambda: world.a.left_s() == TTL_S)
    calls.responds.set()  # to the query of before
    eventually(lambda: world.first.database.lease().renewals > 10)
    assert world.a.left_s() == TTL_S
    assert not calls.over.is_set()
    assert calls.terms == 1


def test_a_term_that_another_has_taken_is_over(world: World, calls: Calls) -> None:
    world.time.there += TTL_S
    world.second.take_lease("b", "the controller on b", ttl_s=TTL_S, unrenewed=world.second.database.lease())
    assert calls.over.wait(30.0)
    assert not world.a.leads


def test_a_tick_that_waits_for_ever_ends_the_process_and_a_busy_controller_does_not(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(leadership.STUCK_AFTER_STEPS):
        calls.number, turned = number, calls.turned
        eventually(lambda turned=turned: calls.turned > turned + 1)  # type: ignore[misc]
    assert not calls.over.is_set()
    calls.number = 1_000_000
    assert calls.over.wait(30.0)
    assert "the tick has decided about service alpha for 61s; the lease could be renewed" in caplog.text


# --- names and keys ---------------------------------------------------------------------------------------------


def a_home(folder: Path) -> Home:
    home = Home.from_environment({"SKYSERVE_HOME": str(folder)})
    home.create()
    return home


def test_homes_are_told_apart(tmp_path: Path) -> None:
    one, other = a_home(tmp_path / "one"), a_home(tmp_path / "other")
    assert holder_of(one) == holder_of(a_home(tmp_path / "one"))
    assert holder_of(one) != holder_of(other)


def test_a_home_with_other_keys_is_refused(tmp_path: Path) -> None:
    one, other = a_home(tmp_path / "one"), a_home(tmp_path / "other")
    store = Store(Database("sqlite://"))
    fingerprints.check(store, one)  # an empty database has no keys yet
    assert not any(path.exists() for path in one.key_files())
    for home in (one, other):
        home.sealing_keys()[0]
        home.machine_secret()
    fingerprints.check_or_record(store, one)
    fingerprints.check_or_record(store, one)
    with pytest.raises(
        ForeignKeysError, match=r"other/sealing.key is not the key that the database was written with"
    ):
        fingerprints.check(store, other)
    (other.root / "sealing.key").write_bytes((one.root / "sealing.key").read_bytes())
    with pytest.raises(ForeignKeysError, match=r"other/machines.key is not the key"):
        fingerprints.check_or_record(store, other)
    (other.root / "machines.key").unlink()
    with pytest.raises(ForeignKeysError, match=r"other/machines.key is missing"):
        fingerprints.check(store, other)
    assert not (other.root / "machines.key").exists()
    assert (one.root / "sealing.key").read_text() not in str(store.database.fingerprints())


def test_a_controller_that_is_unfit_does_not_take_the_lease_until_it_fits(world: World) -> None:
    why = ["its keys are old"]
    world.b = Leadership(world.second, "b", "the controller on b", world.time, unfit=lambda: why[0])
    world.a.step()
    world.b.step()
    assert world.b.to_json()["unfit"] == ""  # nothing to decide while another controller leads
    world.a.release()
    for _ in range(3):
        world.b.step()
        world.time.passes(TTL_S)
    assert (world.b.leads, world.b.to_json()["unfit"], world.b.to_json()["astray"]) == (
        False,
        "its keys are old",
        False,
    )
    with pytest.raises(NotLeadingError, match="this controller must not lead: its keys are old"):
        world.b.refuse_unless_leading()
    why[0] = ""
    world.b.step()
    assert (world.b.leads, world.b.to_json()["unfit"]) == (True, "")
    world.b.refuse_unless_leading()
