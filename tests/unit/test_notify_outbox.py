"""Notifications reach their destinations at least once, whatever fails in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from skyserve_cli.config_notify import Destination
from skyserve_cli.controller.notify.courier import LONGEST_RETRY_S, LOOK_EVERY_S, Courier
from skyserve_cli.controller.notify.watch import SERVICES_EVERY, NotificationWatch
from skyserve_cli.state.database import Database
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.outbox import MOST_WAITING, Alarm, Outbox
from tests.unit.databases import KINDS, empty_database

GOOD = {"store": {"ok": True, "since": 0.0, "why": ""}}


@pytest.fixture(params=KINDS)
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outbox]:
    database = Database(empty_database(request.param, tmp_path))
    yield Outbox(database)
    database.close()


def message(number: int) -> dict[str, Any]:
    return {"id": str(number), "text": f"text {number}"}


def put(outbox: Outbox, *numbers: int, to: str = "ops") -> int:
    return outbox.put_notifications({}, [(to, message(n)) for n in numbers], now=1.0)


class Receiver:
    """A destination that can be away, reject messages, and after which the process can be killed."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.got: list[str] = []
        self.away = False
        self.rejects: set[str] = set()
        self.dies_after_receipt = False

    def courier(self) -> Courier:
        """Also what a controller has that was killed and started again."""
        return Courier("ops", self.outbox, self._deliver, random.Random(1))

    def _deliver(self, sent: Mapping[str, Any]) -> str:
        if self.away or sent["id"] in self.rejects:
            return "the response has status 503"
        self.got.append(sent["id"])
        if self.dies_after_receipt:
            raise KeyboardInterrupt
        return ""


def test_alarms_and_messages_are_stored_together(outbox: Outbox) -> None:
    alarms = {
        ("chat", "short"): Alarm(1.0, 2.5, announced=True),
        ("", "store"): Alarm(None, 3.0, announced=False),
    }
    outbox.put_notifications(alarms, [("ops", message(1))], now=4.0)
    assert outbox.alarms() == alarms
    assert outbox.waiting_notifications() == {"ops": 1}
    outbox.put_notifications({}, [], now=5.0)
    assert outbox.alarms() == {}
    assert outbox.waiting_notifications() == {"ops": 1}


def test_messages_arrive_in_order_and_leave_the_outbox(outbox: Outbox) -> None:
    put(outbox, 1, 2, 3)
    receiver = Receiver(outbox)
    courier = receiver.courier()
    assert [courier.step() for _ in range(4)] == [0.0, 0.0, 0.0, LOOK_EVERY_S]
    assert receiver.got == ["1", "2", "3"]
    assert outbox.waiting_notifications() == {}


def test_a_receiver_that_is_away_is_asked_less_and_less_often_and_loses_nothing(outbox: Outbox) -> None:
    put(outbox, 1, 2)
    receiver = Receiver(outbox)
    courier = receiver.courier()
    receiver.away = True
    pauses = [courier.step() for _ in range(14)]
    for number, pause in enumerate(pauses):
        assert 0.5 * min(LONGEST_RETRY_S, 2.0**number) <= pause <= min(LONGEST_RETRY_S, 2.0**number)
    assert courier.trouble == "the response has status 503"
    receiver.away = False
    while courier.step() == 0.0:
        pass
    assert sorted(receiver.got) == ["1", "2"]
    assert courier.trouble == ""


def test_one_that_is_rejected_does_not_hold_up_the_others(outbox: Outbox) -> None:
    put(outbox, 1, 2, 3)
    receiver = Receiver(outbox)
    receiver.rejects = {"1"}
    courier = receiver.courier()
    for _ in range(5):
        courier.step()
    assert receiver.got == ["2", "3"]
    receiver.rejects = set()
    courier.step()
    assert receiver.got == ["2", "3", "1"]


def test_a_process_that_is_killed_after_receipt_sends_again_and_loses_nothing(outbox: Outbox) -> None:
    put(outbox, 1, 2)
    receiver = Receiver(outbox)
    receiver.dies_after_receipt = True
    with pytest.raises(KeyboardInterrupt):
        receiver.courier().step()
    receiver.dies_after_receipt = False
    courier = receiver.courier()
    while courier.step() == 0.0:
        pass
    assert receiver.got == ["1", "1", "2"]


def test_the_outbox_is_bounded_by_destination(outbox: Outbox) -> None:
    assert put(outbox, *range(MOST_WAITING)) == 0
    assert put(outbox, 1, to="other") == 0
    assert put(outbox, MOST_WAITING, MOST_WAITING + 1) == 2
    assert outbox.waiting_notifications() == {"ops": MOST_WAITING, "other": 1}
    first = outbox.next_notification("ops")
    assert first is not None
    assert first.message == message(2)


def test_notifications_of_a_removed_destination_are_dropped(outbox: Outbox) -> None:
    put(outbox, 1)
    put(outbox, 2, to="old")
    assert outbox.forget_destinations(["ops"]) == 1
    assert outbox.waiting_notifications() == {"ops": 1}


def test_what_was_received_is_not_sent_again_by_a_process_whose_store_was_away(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(outbox, 1)
    receiver = Receiver(outbox)
    courier = receiver.courier()
    with monkeypatch.context() as broken:
        broken.setattr(outbox, "notification_received", _away)
        assert courier.step() > 0.0
    courier.step()
    assert receiver.got == ["1"]
    assert outbox.waiting_notifications() == {}


def _away(*args: object, **options: object) -> Any:
    raise OperationalError("", None, Exception("disk full"))


# --- the watch ----------------------------------------------------------------------------------------------


class World:
    """A watch whose threads do not run, and whose couriers are stepped by hand."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.at = 1000.0
        self.health: Mapping[str, Any] = GOOD
        self.views: list[dict[str, Any]] = []
        self.ids = iter(range(1000))
        self.watch = self.fresh()

    def now(self) -> float:
        return self.at

    def fresh(self) -> NotificationWatch:
        to = [Destination(name="ops", command="x"), Destination(name="few", command="x", services=("code",))]
        return NotificationWatch(
            to, self.outbox, self, lambda: self.health, lambda: self.views, lambda: str(next(self.ids))
        )

    def look(self) -> None:
        """Until services have been read."""
        for _ in range(SERVICES_EVERY):
            self.watch.step()

    def waiting(self) -> dict[str, int]:
        return self.outbox.waiting_notifications()


def given_up(name: str) -> dict[str, Any]:
    return {
        "name": name, "status": "READY", "ready": 1, "wanted": 1, "target": 1, "version": 2, "serving_version": 1,
        "failed_versions": [2], "notes": "", "replicas": [], "load_balancers": [], "last_failure": None,
    }  # fmt: skip


def test_what_begins_is_stored_once_for_each_destination_that_wants_it(outbox: Outbox) -> None:
    world = World(outbox)
    world.views = [given_up("chat"), given_up("code")]
    world.look()
    assert world.waiting() == {"ops": 2, "few": 1}
    world.watch = world.fresh()  # killed and started again
    world.look()
    assert world.waiting() == {"ops": 2, "few": 1}
    world.views = []
    world.look()
    assert world.waiting() == {"ops": 4, "few": 2}


def test_a_crash_loop_is_notified_of_once_and_its_end(outbox: Outbox, tmp_path: Path) -> None:
    log = tmp_path / "chat.4.0.0.log"
    log.write_bytes(b"x" * 9000 + b"\n" + b"".join(b"\x1b[31mline %d\x07\x1b[0m\r\n" % n for n in range(9)))
    world, got = World(outbox), list[str]()
    calm = {**given_up("chat"), "failed_versions": []}
    gone = {
        "id": 4,
        "version": 2,
        "kept_log": str(log),
        "end_reason": "RUN_EXITED",
        "ended_at": 1.0,
        "lease": None,
    }
    for lives in (1, 2, 3):
        trial = {
            "version": 2,
            "short_lives": lives,
            "message": f"version 2 crashes: {lives} lives",
            "next_launch_at": None,
        }
        world.views = [{**calm, "trial": trial, "replicas": [gone]}]
        world.look()
    log.unlink()
    world.look()
    world.views = [{**calm, "trial": None}]
    world.look()
    while (waiting := outbox.next_notification("ops")) is not None:
        got.append(waiting.message["text"])
        outbox.notification_received(waiting.seq)
    assert got == [
        "chat: version 2 crashes: 2 lives\nline 4\nline 5\nline 6\nline 7\nline 8",
        "chat: crashes is over",
    ]


def test_what_cannot_be_stored_is_decided_again(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(outbox)
    world.views = [given_up("chat")]
    with monkeypatch.context() as broken:
        broken.setattr(outbox, "put_notifications", _away)
        with pytest.raises(OperationalError):
            world.watch.step()
    world.look()
    assert world.waiting() == {"ops": 1}


def _lost(*args: object, **options: object) -> Any:
    raise LeaseLostError


@pytest.mark.parametrize("refuses", [_away, _lost], ids=["away", "not as it was"])
def test_a_store_that_is_away_is_notified_of_without_it(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, refuses: Callable[..., Any]
) -> None:
    world, got = World(outbox), list[Mapping[str, Any]]()
    world.look()
    world.health = {"store": {"ok": False, "since": 1000.0, "why": "disk full"}}
    with monkeypatch.context() as broken:
        broken.setattr(outbox, "put_notifications", refuses)
        for _ in range(4):
            world.at += 1.0
            with suppress(OperationalError, LeaseLostError):  # the thread logs it
                world.watch.step()
        for courier in world.watch.couriers.values():
            courier._deliver = lambda sent: got.append(sent) or ""  # type: ignore[func-returns-value]
            courier.step()
    assert [sent["kind"] for sent in got] == ["store", "store"]  # one for each destination
    world.health = GOOD
    world.watch.step()
    assert world.waiting() == {"ops": 1, "few": 1}  # that it is over


def test_how_many_wait_and_why_is_shown(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(outbox)
    world.views = [given_up("chat")]
    world.look()
    courier = world.watch.couriers["ops"]
    courier._deliver = lambda sent: "exit code 3"
    courier.step()
    assert world.watch.view() == {
        "ops": {"waiting": 1, "trouble": "exit code 3"},
        "few": {"waiting": 0, "trouble": ""},
    }
    monkeypatch.setattr(outbox, "waiting_notifications", _away)
    assert world.watch.view()["ops"] == {"waiting": None, "trouble": "exit code 3"}
