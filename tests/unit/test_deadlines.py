"""Requests with deadlines: their rank, their turn among keys, their target, and what becomes of those that are late."""

from __future__ import annotations

from itertools import islice

import pytest

from lb.config.options import Pushing, PushMode, Slo
from lb.config.schema import Table, Target
from lb.core.hop import RequestHop
from lb.core.queue import LEAD, RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.targets import TargetTable
from lb.http.deadline_headers import read_deadline
from lb.proxy.sweep import Sweep
from policies.regions.base import LocalCost, PeerView
from policies.regions.one_cost import OneCost
from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.deadlines import (
    LATE,
    RETURNING,
    URGENT,
    USUAL,
    Fate,
    Late,
    fate_of,
    keeps,
    rank_of,
)
from policies.routing.gorgo import PUSH_AHEAD_S, Gorgo, Headroom
from policies.routing.response_length import Constant
from tests.kit.lb_parts import GET
from tests.unit.test_lb_intake import HOP, Door, admitted, chat, whole
from tests.unit.test_lb_scheduler import Request

QUEUE, SHED = Late.QUEUE, Late.SHED


@pytest.mark.parametrize(
    ("due_at", "now", "expected_late", "returning", "rank"),
    [
        (0.0, 5.0, False, False, USUAL),
        (0.0, 5.0, True, False, USUAL),
        (0.0, 5.0, False, True, RETURNING),
        (6.0, 5.0, False, False, URGENT),
        (6.0, 5.0, True, False, LATE),
        (5.0, 5.0, False, False, LATE),
        (4.0, 5.0, False, False, LATE),
        (4.0, 5.0, True, True, RETURNING),
        (6.0, 5.0, False, True, RETURNING),
    ],
)
def test_the_rank(due_at: float, now: float, expected_late: bool, returning: bool, rank: int) -> None:
    assert rank_of(due_at, now, expected_late, returning) == rank


@pytest.mark.parametrize(
    ("rank", "late", "started", "fate"),
    [
        (RETURNING, QUEUE, False, Fate.FIRST),
        (RETURNING, SHED, True, Fate.FIRST),
        (URGENT, QUEUE, False, Fate.FIRST),
        (URGENT, SHED, False, Fate.FIRST),
        (USUAL, QUEUE, False, Fate.IN_TURN),
        (USUAL, SHED, False, Fate.IN_TURN),
        (LATE, QUEUE, False, Fate.LAST),
        (LATE, QUEUE, True, Fate.LAST),
        (LATE, SHED, False, Fate.REFUSED),
        (LATE, SHED, True, Fate.LAST),  # an engine may have worked on it
    ],
)
def test_what_becomes_of_it(rank: int, late: Late, started: bool, fate: Fate) -> None:
    assert fate_of(rank, late, started) is fate


@pytest.mark.parametrize(
    ("first_s", "token_s", "left_s", "tpot_s", "kept"),
    [
        (1.0, 0.0, 1.0, 0.0, True),
        (1.1, 0.0, 1.0, 0.0, False),
        (0.5, 0.2, 1.0, 0.0, True),  # any pace does
        (0.5, 0.2, 1.0, 0.1, False),
        (0.5, 0.1, 1.0, 0.1, True),
        (0.5, 0.0, 1.0, 0.1, True),  # the pace is not known
    ],
)
def test_whether_a_target_keeps_it(
    first_s: float, token_s: float, left_s: float, tpot_s: float, kept: bool
) -> None:
    assert keeps(first_s, token_s, left_s, tpot_s) is kept


@pytest.mark.parametrize(
    ("ttft", "tpot", "seconds"),
    [
        (b"1500", b"", (1.5, 0.0)),
        (b"", b"40.5", (0.0, 0.0405)),
        (b"86400000", b"1", (86_400.0, 0.001)),
        (b"0", b"", None),
        (b"-1", b"", None),
        (b"1e3", b"", None),
        (b"nan", b"", None),
        (b"1s", b"", None),
        (b"86400001", b"", None),
        (b"100", b"soon", None),
    ],
)
def test_the_headers(ttft: bytes, tpot: bytes, seconds: tuple[float, float] | None) -> None:
    assert read_deadline(ttft, tpot) == seconds


# --- the queue


def join(
    queue: RequestQueue[str],
    name: str,
    tenant: str = "",
    due_at: float = 0.0,
    weight: float = 1.0,
    limit: int = 10_000,
) -> bool:
    return queue.join(name, 0.0, 1e6, limit, tenant, weight, due_at=due_at) is not None


def test_within_a_key_the_earliest_deadline_goes_first_and_a_late_one_last() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for name, due_at in (("usual", 0.0), ("third", 9.0), ("first", 2.0), ("late", 3.0), ("second", 4.0)):
        join(queue, name, "a", due_at)
    queue.is_late(next(ticket for ticket in queue.walk() if ticket.item == "late"))
    taken = []
    for ticket in queue.walk():
        queue.take(ticket)
        taken.append(ticket.item)
    assert taken == ["first", "second", "third", "usual", "late"]


def test_deadlines_bring_a_key_its_share_sooner_and_no_more_of_it() -> None:
    """Key a has deadlines only, key b none, c a third: in any stretch each has its weight's share, but for LEAD."""
    queue: RequestQueue[str] = RequestQueue()
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    for number in range(400):
        join(queue, f"a{number}", "a", 1.0 + number)
        join(queue, f"b{number}", "b")
        join(queue, f"c{number}", "c", 0.0 if number % 3 else 1.0 + number, weight=2.0)
    counts = dict.fromkeys(weights, 0)
    for taken in range(1, 601):
        ticket = next(queue.walk())
        queue.take(ticket)
        counts[ticket.tenant] += 1
        shares = [counts[key] / weights[key] for key in weights]
        assert max(shares) - min(shares) <= LEAD + 1.0, (taken, counts)
    # The lead is no rate: of 600 turns a, b and c have 150, 150 and 300 of right.
    assert counts["a"] <= 150 + LEAD
    assert counts["b"] >= 150 - LEAD


def test_an_urgent_request_goes_before_those_of_other_keys_as_far_as_its_key_has_a_lead() -> None:
    queue: RequestQueue[str] = RequestQueue()
    for number in range(20):
        join(queue, f"b{number}", "b")
    for number in range(20):
        join(queue, f"a{number}", "a", 1.0 + number)
    order = []
    for ticket in islice(queue.walk(), 12):
        queue.take(ticket)
        order.append(ticket.tenant)
    assert "".join(order) == "a" * int(LEAD) + "baba", "its first ones at once, then in turn"


def test_a_full_queue_makes_room_for_a_deadline_and_not_for_a_key() -> None:
    evicted: list[str] = []
    queue: RequestQueue[str] = RequestQueue(lambda ticket: evicted.append(ticket.item))
    for name in ("a1", "a2", "b1", "b2"):
        assert join(queue, name, name[0], limit=4)
    assert not join(queue, "a3", "a", limit=4)
    assert join(queue, "a-due", "a", 5.0, limit=4)
    assert evicted == ["a2"], "the last one of its own key"
    assert join(queue, "a-due-2", "a", 6.0, limit=4)
    assert not join(queue, "a-due-3", "a", 7.0, limit=4), "all of the key's share is urgent"
    assert evicted == ["a2", "a1"]


# --- the policy

SLOW_S = 2000 * 4 * 0.0938e-3 / 4  # of prefill: 2,000 tokens at the rate that is assumed at first


def view(name: str, due_at: float = 0.0, tpot_s: float = 0.0, prompt: bytes = b"x" * 8000) -> RequestView:
    return RequestView(
        name, "POST", "/", prompt=prompt, scope="m", due_at=due_at, ttft_s=due_at, tpot_s=tpot_s
    )


def chosen(policy: Gorgo, request: RequestView, targets: list[TargetView], now: float = 0.0) -> Choice:
    choice = policy.choose(request, targets, now)
    assert choice is not None
    return choice


def test_the_cheapest_target_that_keeps_the_deadline_is_chosen() -> None:
    policy = Gorgo(Constant(100))
    near, far = TargetView("near", in_flight=40, rtt_s=0.0), TargetView("far", rtt_s=0.5)
    targets = [near, far]
    choice = chosen(policy, view("1"), targets)
    assert (choice.target_id, choice.late, choice.first_s) == ("far", False, 0.0)
    relaxed = chosen(policy, view("2", 5.0), targets)
    assert (relaxed.target_id, relaxed.late) == ("far", False)
    tight = chosen(policy, view("3", 0.4), targets)
    assert (tight.target_id, tight.because) == ("near", "the best that keeps its deadline")
    assert tight.first_s == pytest.approx(SLOW_S)
    hopeless = chosen(policy, view("4", 0.1), targets)
    assert (hopeless.target_id, hopeless.late) == ("far", True)


def test_only_work_that_is_sure_makes_a_request_late() -> None:
    """It would have to wait for others here, which is an estimate: then it goes where that is shortest."""
    policy = Gorgo(Constant(100))
    target = TargetView("a")
    for number in range(5):
        policy.record(view(f"other {number}", prompt=bytes([number]) * 8000), "a", 0.0)
    choice = chosen(policy, view("1", 0.5), [target], 0.0)
    assert choice.first_s > 0.5
    assert not choice.late


def test_a_pace_that_is_too_slow_sends_a_request_elsewhere() -> None:
    policy = Gorgo(Constant(100))
    a, b = TargetView("a", in_flight=1), TargetView("b", in_flight=1, rtt_s=0.05)
    for name, pace_s in (("a", 0.2), ("b", 0.04)):
        sent = view(f"to {name}")
        policy.record(sent, name, 0.0)
        policy.responded(sent, name, 0.2)
        policy.ended(sent, name, 0.2 + 99 * pace_s, 100)
    for tpot_s, expected in ((0.0, "a"), (0.5, "a"), (0.1, "b")):
        choice = chosen(policy, view("1", 1030.0, tpot_s), [a, b], 1000.0)
        assert (choice.target_id, choice.late) == (expected, False), tpot_s
    choice = chosen(policy, view("1", 1030.0, 0.01), [a, b], 1000.0)
    assert choice.late
    a.in_flight = 0  # what it does alone is not known
    choice = chosen(policy, view("1", 1030.0, 0.01), [a, b], 1000.0)
    assert (choice.target_id, choice.late) == ("a", False)


def test_room_is_kept_while_deadlines_come() -> None:
    room = Headroom()
    assert not room.is_kept(0.0)
    room.seen(2.0, 0.0)
    assert room.is_kept(59.0)
    assert room.ahead_s == pytest.approx(0.6)
    room.seen(9.0, 1.0)
    assert room.ahead_s == pytest.approx(0.6), "the shortest counts"
    room.seen(100.0, 61.0)
    assert room.ahead_s == PUSH_AHEAD_S
    room.seen(0.001, 62.0)
    assert room.ahead_s == 0.15
    assert not room.is_kept(122.0)


# --- the scheduler


class Desk:
    """One target for one request at a time, or more, and its queue."""

    def __init__(self, late: Late, policy: str = "least_load", mode: PushMode = PushMode.FIXED_CAP) -> None:
        table = Table(
            "s", "1", (Target("a", "http://a:1"),), policy, pushing=Pushing(mode, 1), slo=Slo(late=late)
        )
        self.table = TargetTable(table, 0.0)
        self.queue: RequestQueue[Request] = RequestQueue()
        self.scheduler: Scheduler[Request] = Scheduler(self.table, self.queue)

    def come(self, name: str, due_at: float = 0.0, started: bool = False) -> Request:
        request = Request(view(name, due_at), started=started)
        choice = self.scheduler.place(request, 0.0)
        if choice is None:
            assert self.scheduler.enqueue(request, 0.0) is not None
        else:
            request.booking = self.table.book(request.view, choice.target_id, 0.0)
        return request

    def served(self, request: Request, now: float) -> list[str]:
        assert request.booking is not None
        self.table.release(request.booking, now)
        found = []
        for one, choice in self.scheduler.let_in(now):
            one.booking = self.table.book(one.view, choice.target_id, now)
            found.append(one.view.id)
        return found


@pytest.mark.parametrize("late", [QUEUE, SHED])
def test_one_whose_deadline_is_over_goes_last_or_is_shed(late: Late) -> None:
    desk = Desk(late)
    first = desk.come("first")
    due, usual, started = desk.come("due", 5.0), desk.come("usual"), desk.come("started", 6.0, started=True)
    assert desk.served(first, 10.0) == ["usual"]
    shed = desk.scheduler.take_shed()
    assert [ticket.item for ticket in shed] == ([due] if late is SHED else [])
    for ticket in shed:
        desk.queue.leave(ticket)
    assert desk.served(usual, 11.0) == (["started"] if late is SHED else ["due"])
    assert desk.scheduler.take_shed() == []
    assert started.booking is None or late is SHED


def test_one_that_is_due_overtakes_those_of_its_key() -> None:
    desk = Desk(QUEUE)
    first = desk.come("first")
    desk.come("usual")
    desk.come("due", 5.0)
    assert desk.served(first, 1.0) == ["due"]


def test_gorgo_expects_that_it_is_late_before_it_is_sent() -> None:
    desk = Desk(SHED, "gorgo", PushMode.WORK)
    hopeless, easy = Request(view("1", 0.1)), Request(view("2", 1.0))
    assert desk.scheduler.expected_late_s(hopeless, 0.0) == pytest.approx(SLOW_S - 0.1)
    assert desk.scheduler.expected_late_s(easy, 0.0) is None


# --- a client's request


def due_post(*lines: str) -> bytes:
    return chat().replace(b"\r\n\r\n", "".join(f"\r\n{line}" for line in lines).encode() + b"\r\n\r\n", 1)


@pytest.mark.parametrize("line", ["X-SLO-TTFT-MS: soon", "x-slo-tpot-ms: 0", "X-Slo-Ttft-Ms: -5"])
def test_a_deadline_that_makes_no_sense_is_a_400(line: str) -> None:
    door = Door("a")
    _, wire = door.send(due_post(line))
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_deadline"' in wire.sent
    assert door.plane.table.in_flight == 0


def test_the_deadline_of_a_request_is_its_own_or_else_that_of_the_service() -> None:
    door = Door("a", slo=Slo(2.0, 0.5, deadlines=True))
    now = door.plane.runtime.clock()

    def deadline(data: bytes, hop: RequestHop | None = None) -> tuple[float, float, float]:
        view = admitted(door, data, hop).arrival.view
        return view.due_at, view.ttft_s, view.tpot_s

    assert deadline(chat()) == (now + 2.0, 2.0, 0.5)
    assert deadline(due_post("X-SLO-TTFT-MS: 800")) == (now + 0.8, 0.8, 0.0)
    assert deadline(due_post("X-SLO-TPOT-MS: 40", "X-SLO-TTFT-MS: 800")) == (now + 0.8, 0.8, 0.04)
    assert deadline(due_post("X-SLO-TPOT-MS: 40")) == (0.0, 0.0, 0.04)
    assert deadline(GET) == (0.0, 0.0, 0.0), "it generates nothing"
    assert deadline(due_post("X-SLO-TTFT-MS: 800"), HOP) == (now + 0.8 - HOP.age_s, 0.8, 0.0)
    door = Door("a", slo=Slo(2.0, 0.5))
    assert deadline(chat()) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("late", [QUEUE, SHED])
def test_a_client_is_refused_or_served_late_and_the_metric_says_which(late: Late) -> None:
    table = Table("service", "1", (Target("a", "http://a.test:80"),), "gorgo", slo=Slo(late=late))
    door = Door("a", table=table)
    hopeless = due_post("X-SLO-TTFT-MS: 0.001")
    for count, data in enumerate((hopeless, due_post("X-SLO-TTFT-MS: 60000"), chat())):
        connection, wire = door.send(data)
        if count == 0 and late is SHED:
            head, _, body = wire.sent.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            assert b"Retry-After: " in head
            assert b'"deadline"' in body
            continue
        assert connection.request is not None
        door.plane.loop.sleep(0.01)
        door.plane.answer("a", whole(b"{}"))
        door.plane.loop.settle()
        assert wire.sent.startswith(b"HTTP/1.1 200 ")
        assert b"X-SLO-TTFT-MS" not in wire.sent
    expected = {"kept": 1, "shed" if late is SHED else "late": 1}
    assert door.plane.counts.deadlines == expected
    door.plane.check()


def test_a_queued_request_is_refused_once_its_deadline_is_over() -> None:
    door = Door("a", slo=Slo(late=SHED), pushing=Pushing(PushMode.FIXED_CAP, 1))
    door.send(chat())
    _, due = door.send(due_post("X-SLO-TTFT-MS: 500"))
    _, usual = door.send(chat())
    door.plane.loop.sleep(0.6)
    Sweep(door.plane.dispatch).check()
    assert due.sent.startswith(b"HTTP/1.1 429 ")
    assert usual.sent == b""
    assert door.plane.counts.deadlines == {"shed": 1}


# --- regions


def test_a_request_leaves_its_region_for_the_one_that_keeps_its_deadline() -> None:
    here = LocalCost(True, 0.0, 1.0, 0.1, 0.0)
    peer = PeerView("b", 0.1, 1, 0, 0.9, 0.0, 0.0, credit=9)
    assert OneCost().choose(1000, here, [peer], 30.0).region == "", "100 ms are within the margin"
    assert OneCost().choose(1000, here, [peer], 1.05).region == "b"
    assert OneCost().choose(1000, here, [peer], 0.9).region == "", "late there, too"
