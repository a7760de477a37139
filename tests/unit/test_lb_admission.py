"""The cap of one target, moved by looks at its engine and by its own requests."""

from __future__ import annotations

import pytest

from lb.config.options import Pushing, PushMode
from lb.core.admission import MAX_ALLOWANCE, NO_CAP, TRANSIT_S, EngineLoad, Gate


class Request:
    def __init__(self, since: float) -> None:
        self.since = since
        self.responded = False


class Target:
    """A gate, and the count of requests that its owner keeps."""

    def __init__(self, mode: PushMode = PushMode.SELECTIVE, cap: int = 32) -> None:
        self.gate = Gate(Pushing(mode, cap))
        self.requests: list[Request] = []

    @property
    def room(self) -> int:
        return self.gate.cap - len(self.requests)

    def send(self, now: float) -> Request:
        request = Request(now)
        self.requests.append(request)
        if self.gate.reports:
            self.gate.sent(request, len(self.requests))
        return request

    def fill(self, now: float) -> int:
        """Send for as long as the gate is open; how many that were."""
        sent = 0
        while self.room > 0:
            self.send(now)
            sent += 1
        return sent

    def answer(self, request: Request) -> None:
        request.responded = True
        self.gate.responded(request, len(self.requests))

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.gate.ended(request)

    def look(
        self, polled_at: float, running: int | None, pending: int | None, most: int | None = None
    ) -> None:
        self.gate.loaded(EngineLoad(running, pending, None, most), polled_at, len(self.requests))

    def see_all(self, polled_at: float) -> None:
        """A look that finds all of ours running."""
        self.look(polled_at, len(self.requests), 0)


@pytest.mark.parametrize(
    ("ours", "running", "pending", "most", "room"),
    [
        pytest.param(0, 0, 0, None, 4, id="idle: a handful, not ten"),
        pytest.param(5, 5, 0, None, 4, id="busy, nothing pending: a handful more"),
        pytest.param(5, 3, 2, None, -1, id="two pending: two must end first"),
        pytest.param(5, 5, 1, None, 0, id="one pending, somebody else's: one must end first"),
        pytest.param(1, 40, 7, None, 0, id="others' requests pending"),
        pytest.param(0, 40, 7, None, 1, id="with nothing of ours it is worth one"),
        pytest.param(4, 4, 0, 4, 0, id="all slots taken"),
        pytest.param(4, 4, 0, 6, 2, id="two slots left"),
        pytest.param(4, 4, 0, 99, 4, id="many slots left, but trust is earned"),
        pytest.param(0, 8, 0, 8, 1, id="all slots taken by others: worth one all the same"),
        pytest.param(3, 3, None, 5, 2, id="slots but no queue told"),
        pytest.param(8, 8, None, 8, 0, id="slots but no queue told, all taken"),
        pytest.param(5, 5, None, None, NO_CAP - 5, id="no queue told and no slots: blind"),
        pytest.param(5, None, None, None, NO_CAP - 5, id="tells nothing of use: blind"),
        pytest.param(5, None, 0, None, 4, id="only the queue told"),
    ],
)
def test_the_room_after_a_first_look(
    ours: int, running: int | None, pending: int | None, most: int | None, room: int
) -> None:
    target = Target()
    for _ in range(ours):
        target.send(0.0)
    target.look(1.0, running, pending, most)
    assert target.room == room


@pytest.mark.parametrize(
    ("mode", "cap"),
    [
        pytest.param(PushMode.BLIND, NO_CAP, id="blind"),
        pytest.param(PushMode.FIXED_CAP, 7, id="fixed cap"),
        pytest.param(PushMode.SELECTIVE, NO_CAP, id="selective, never told"),
    ],
)
def test_without_looks_the_mode_decides(mode: PushMode, cap: int) -> None:
    assert Target(mode, 7).gate.cap == cap


@pytest.mark.parametrize("mode", [PushMode.BLIND, PushMode.FIXED_CAP])
def test_looks_do_not_move_the_cap_of_other_modes(mode: PushMode) -> None:
    target = Target(mode, 7)
    before = target.gate.cap
    for _ in range(3):
        target.send(0.0)
    target.look(0.5, 1, 9)
    target.gate.load_too_old(target.requests, 3)
    target.gate.blind()
    assert target.gate.cap == before


def test_one_look_lets_in_what_the_allowance_says_and_no_more() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    assert target.fill(0.01) == 4
    target.see_all(0.1)
    assert target.fill(0.11) == 8
    target.see_all(0.2)
    assert target.fill(0.21) == 16


def test_an_answer_late_in_coming_does_not_prove_what_was_sent_after_the_question() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    target.fill(0.15)
    target.look(0.1, 0, 0)  # asked before they were sent
    assert target.room == 0


def test_what_the_engine_does_not_count_yet_is_on_its_way() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    target.fill(0.01)
    target.look(0.1, 0, 0)  # in front of the scheduler, which has not seen them
    assert target.room == 0
    target.look(0.2, 1, 0)  # now it has seen one: trusted with eight, of which three are unproven
    assert target.room == 5


def test_nothing_is_on_its_way_for_ever() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    target.fill(0.0)
    target.look(TRANSIT_S - 0.1, 0, 0)
    assert target.room == 0
    target.look(TRANSIT_S, 0, 0)
    assert (target.room, target.gate.allowance) == (4, 4)  # room, but nothing has been proven


def test_a_first_byte_makes_room_between_looks() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    target.fill(0.0)
    for request in list(target.requests):  # each proves that the engine took it at once
        assert target.room == 0
        target.answer(request)
        assert target.room == 1
        target.send(0.01)


def test_a_request_that_ends_makes_room_at_once() -> None:
    target = Target()
    for _ in range(6):
        target.send(0.0)
    target.look(1.0, 4, 2)
    room = []
    for request in target.requests[:4]:
        target.answer(request)
        target.end(request)
        room.append(target.room)
    assert room == [0, 1, 2, 3]  # two that were pending take the first two places


def test_a_request_that_is_given_up_makes_the_room_it_took() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    target.fill(0.01)
    target.end(target.requests[0])
    assert target.room == 1


def test_slots_bound_what_first_bytes_may_earn() -> None:
    target = Target()
    target.look(0.0, 2, 0, 4)  # of others
    sent = 0
    while target.room > 0:
        target.answer(target.send(0.01))
        sent += 1
    assert sent == 2


@pytest.mark.parametrize(
    ("looks", "allowances"),
    [
        pytest.param("....", [4, 4, 4, 4], id="nobody needs more"),
        pytest.param("hhhh", [8, 16, 32, 64], id="needed and proven: doubles"),
        pytest.param("hhp", [8, 16, 8], id="pending: halves"),
        pytest.param("hppppp", [8, 4, 2, 1, 1, 1], id="pending for long: down to one"),
        pytest.param("hppp.hh", [8, 4, 2, 1, 1, 2, 4], id="earned anew"),
        pytest.param("hh..", [8, 16, 16, 16], id="not used: kept"),
        pytest.param("hhhhhh", [8, 16, 32, 64, MAX_ALLOWANCE, 64], id="bounded"),
    ],
)
def test_the_allowance_follows_what_looks_find(looks: str, allowances: list[int]) -> None:
    """h: the cap was hit before the look, and the engine carries all. p: it has one pending. '.': neither."""
    target = Target()
    target.look(0.0, 0, 0)
    seen = []
    for number, look in enumerate(looks, start=1):
        if look == "h":
            target.fill(number - 0.5)
        target.look(float(number), len(target.requests), int(look == "p"))
        seen.append(target.gate.allowance)
    assert seen == allowances


def test_while_something_is_pending_nothing_goes_however_large_the_allowance_was() -> None:
    target = Target()
    target.look(0.0, 0, 0)
    for number in range(1, 4):
        target.fill(number - 0.5)
        target.see_all(float(number))
    target.look(6.0, len(target.requests) - 1, 1)
    assert target.gate.allowance == 16
    assert target.room == 0


def test_where_looks_stop_first_bytes_are_the_only_proof() -> None:
    target = Target()
    for _ in range(6):
        target.send(0.0)
    target.look(1.0, 6, 9)
    waiting = list(target.requests)
    target.gate.load_too_old(waiting, len(target.requests))
    assert target.gate.allowance == 2
    room = []
    for request in waiting:
        target.answer(request)
        room.append(target.room)
    assert room == [-3, -2, -1, 0, 1, 2]  # two unproven are allowed


def test_an_engine_that_stops_telling_is_pushed_blindly() -> None:
    target = Target()
    target.look(0.0, 5, 5)
    target.gate.blind()
    assert target.gate.cap == NO_CAP
    assert not target.gate.reports
