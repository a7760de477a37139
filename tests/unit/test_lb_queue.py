"""The waiting room in virtual time: its order, its bounds, and that everybody leaves it once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lb.core.queue import RequestQueue, Ticket

ROOM = 1000


def room_of(tickets: str, weights: dict[str, float] | None = None) -> RequestQueue[str]:
    """One ticket per letter, in this order; the letter is its tenant."""
    queue: RequestQueue[str] = RequestQueue()
    for number, tenant in enumerate(tickets):
        queue.join(f"{tenant}{number}", float(number), 1e6, ROOM, tenant, (weights or {}).get(tenant, 1.0))
    return queue


def served(queue: RequestQueue[str], count: int = ROOM, may_go: str = "") -> list[str]:
    """Take out up to `count`, in the order of the room; only tenants in `may_go`, if there are any."""
    taken = []
    for ticket in queue.walk():
        if len(taken) == count:
            break
        if not may_go or ticket.tenant in may_go:
            assert queue.take(ticket)
            taken.append(ticket.item)
    return taken


def tenants(items: list[str]) -> str:
    return "".join(item[0] for item in items)


def items(tickets: list[Ticket[str]]) -> list[str]:
    return [ticket.item for ticket in tickets]


@pytest.mark.parametrize(
    ("joined", "weights", "order"),
    [
        pytest.param("aaaa", {}, "aaaa", id="one tenant: first come, first served"),
        pytest.param("aaaabb", {}, "ababaa", id="a newcomer does not wait for all of a long line"),
        pytest.param("abcabc", {}, "abcabc", id="in turn"),
        pytest.param("aaaaaabbb", {"a": 2.0}, "abaabaaba", id="twice the weight, two for each one"),
        pytest.param("aabbbbbb", {"b": 4.0}, "abbbbabb", id="four times the weight"),
        pytest.param("aaaab", {"a": 1000.0}, "abaaa", id="even the lightest gets its first turn"),
    ],
)
def test_the_order_between_tenants(joined: str, weights: dict[str, float], order: str) -> None:
    queue = room_of(joined, weights)
    taken = served(queue)
    assert tenants(taken) == order
    for tenant in set(joined):
        own = [item for item in taken if item[0] == tenant]
        assert own == sorted(own, key=lambda item: int(item[1:]))
    assert len(queue) == 0


def test_seniors_go_first_and_are_not_charged_again() -> None:
    queue = room_of("aaabb")
    for name in ("a-first", "a-second"):
        queue.join(name, 9.0, 1e6, ROOM, "a", has_priority=True)
    assert served(queue) == ["a-first", "a-second", "a0", "b3", "a1", "b4", "a2"]


def test_a_senior_of_another_tenant_goes_first_among_equals() -> None:
    queue = room_of("ab")
    queue.join("b-senior", 9.0, 1e6, ROOM, "b", has_priority=True)
    assert served(queue) == ["b-senior", "a0", "b1"]


def test_a_senior_that_cannot_go_keeps_nobody_waiting() -> None:
    queue = room_of("aa")
    queue.join("senior", 9.0, 1e6, ROOM, "a", has_priority=True)
    met = []
    for ticket in queue.walk():
        met.append(ticket.item)
        if ticket.item == "a0":
            queue.take(ticket)
    assert met == ["senior", "a0", "a1"]
    assert served(queue) == ["senior", "a1"]


def test_a_full_room_has_a_place_for_a_senior_and_does_not_push_it_out() -> None:
    evicted: list[str] = []
    queue: RequestQueue[str] = RequestQueue(lambda ticket: evicted.append(ticket.item))
    for name in ("a0", "a1"):
        queue.join(name, 0.0, 9.0, 2, "a")
    assert queue.join("senior", 0.0, 9.0, 2, "a", has_priority=True) is not None
    assert len(queue) == 3
    assert queue.join("b0", 0.0, 9.0, 2, "b") is None, "while it is more than full nobody new comes in"
    assert queue.join("senior too", 0.0, 9.0, 2, "a", has_priority=True) is not None
    assert queue.join("one too many", 0.0, 9.0, 2, "a", has_priority=True) is None
    only: RequestQueue[str] = RequestQueue(lambda ticket: evicted.append(ticket.item))
    only.join("senior", 0.0, 9.0, 1, "a", has_priority=True)
    assert only.join("b0", 0.0, 9.0, 1, "b") is None
    assert evicted == []


def test_being_away_earns_nothing() -> None:
    queue = room_of("aaaaaaaab")
    assert tenants(served(queue, 6)) == "abaaaa"
    for number in range(4):
        queue.join(f"b{number}", 9.0, 1e6, ROOM, "b")
    assert tenants(served(queue)) == "bababab"


def test_having_had_more_is_not_forgotten_by_leaving_for_a_moment() -> None:
    queue = room_of("aab", {"b": 1.0})
    assert tenants(served(queue, 2)) == "ab"
    queue.join("b9", 3.0, 1e6, ROOM, "b")
    queue.join("b10", 3.0, 1e6, ROOM, "b")
    assert tenants(served(queue)) == "abb"


def test_whoever_cannot_go_keeps_nobody_waiting_and_loses_nothing() -> None:
    queue = room_of("abababcc")
    assert tenants(served(queue, may_go="bc")) == "bcbcb"
    assert tenants(served(queue)) == "aaa"
    queue = room_of("aaa")
    first = next(queue.walk())
    assert [ticket.item for ticket in queue.walk() if ticket is not first and queue.take(ticket)] == [
        "a1",
        "a2",
    ]
    assert served(queue) == ["a0"]


def test_the_room_may_change_while_it_is_walked() -> None:
    queue = room_of("aaabbb")
    met = []
    for ticket in queue.walk():
        met.append(ticket.item)
        if ticket.item == "a0":
            queue.expire(float("-inf"))
            for other in list(queue.walk()):
                if other.item in ("a1", "b3"):
                    queue.leave(other)
            queue.join("a9", 9.0, 1e6, ROOM, "a")
        queue.take(ticket)
    assert met == ["a0", "b4", "a2", "b5", "a9"]


@pytest.mark.parametrize(
    ("hold_s", "limit"),
    [(10.0, 1), (10.0, 0), (0.0, 9), (-1.0, 9)],
    ids=["full", "no room", "no time", "late"],
)
def test_no_ticket_without_room_or_time(hold_s: float, limit: int) -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.join("first", 0.0, 10.0, limit=9)
    assert queue.join("second", 0.0, hold_s, limit) is None
    if limit != 1:
        assert queue.join("senior", 0.0, hold_s, limit, has_priority=True) is None, "nor for a senior"
    assert len(queue) == 1


@pytest.mark.parametrize(
    ("inside", "comes", "weights", "out"),
    [
        pytest.param("aaaa", "a", {}, None, id="nobody pushes out his own"),
        pytest.param("aaaa", "b", {}, "a3", id="the youngest of who has most"),
        pytest.param("aaab", "b", {}, "a2", id="until the places are shared"),
        pytest.param("aabb", "a", {}, None, id="shared: refused"),
        pytest.param("aabb", "c", {}, "a1", id="a third"),
        pytest.param("abcd", "e", {}, None, id="no more tenants than places"),
        pytest.param("aaab", "b", {"a": 3.0}, None, id="three places for three times the weight"),
        pytest.param("aabb", "c", {"c": 0.4}, None, id="too light for a place"),
    ],
)
def test_who_makes_room_in_a_full_one(
    inside: str, comes: str, weights: dict[str, float], out: str | None
) -> None:
    evicted: list[str] = []
    queue: RequestQueue[str] = RequestQueue(lambda ticket: evicted.append(ticket.item))
    for number, tenant in enumerate(inside):
        queue.join(f"{tenant}{number}", 0.0, 9.0, 4, tenant, weights.get(tenant, 1.0))
    ticket = queue.join(f"{comes}new", 1.0, 9.0, 4, comes, weights.get(comes, 1.0))
    assert evicted == ([out] if out else [])
    assert (ticket is not None) == (out is not None)
    assert len(queue) == 4


@pytest.mark.parametrize(
    ("inside", "comes", "out"),
    [
        pytest.param("a1 a1 a1 a1", "a2", "a1-3", id="the youngest of the model that has most"),
        pytest.param("a1 a1 a1 a2", "a2", "a1-2", id="until the places are shared"),
        pytest.param("a1 a1 a2 a2", "a1", None, id="shared: refused"),
        pytest.param("a1 a1 a1 a1", "a1", None, id="nobody pushes out requests for the same model"),
        pytest.param("a1 a1 b2 b2", "a3", "a1-1", id="within the places of its tenant"),
        pytest.param("a1 b2 b2 b2", "a3", "b2-3", id="a tenant with more than its share comes first"),
    ],
)
def test_which_model_makes_room_in_a_full_one(inside: str, comes: str, out: str | None) -> None:
    """Each word is a tenant and a model."""
    evicted: list[str] = []
    queue: RequestQueue[str] = RequestQueue(lambda ticket: evicted.append(ticket.item))
    for number, (tenant, model) in enumerate(inside.split()):
        queue.join(f"{tenant}{model}-{number}", 0.0, 9.0, 4, tenant, group=model)
    ticket = queue.join("new", 1.0, 9.0, 4, comes[0], group=comes[1])
    assert evicted == ([out] if out else [])
    assert (ticket is not None) == (out is not None)
    assert len(queue) == 4


def test_without_anybody_to_tell_nobody_is_pushed_out() -> None:
    queue = room_of("aaaa")
    assert queue.join("b", 0.0, 9.0, 4, "b") is None


def test_tickets_expire_at_their_own_deadline() -> None:
    queue: RequestQueue[str] = RequestQueue()
    queue.join("long", 0.0, 9.0, limit=9)
    queue.join("short", 1.0, 2.0, limit=9)
    assert queue.next_deadline() == 3.0
    assert queue.expire(2.9) == []
    assert items(queue.expire(3.0)) == ["short"]
    assert queue.next_deadline() == 9.0
    assert items(queue.expire(float("inf"))) == ["long"]
    assert queue.next_deadline() is None


def test_clearing_takes_everybody_oldest_first() -> None:
    queue = room_of("abac")
    assert items(queue.clear()) == ["a0", "b1", "a2", "c3"]
    assert (len(queue), queue.next_deadline()) == (0, None)


def test_memory_is_bounded_by_who_is_inside() -> None:
    queue: RequestQueue[int] = RequestQueue()
    queue.join(-1, 0.0, 1e9, ROOM)
    for number in range(20_000):
        ticket = queue.join(number, 0.0, 1e6, ROOM, f"tenant {number % 7}")
        assert ticket is not None
        assert queue.leave(ticket)
    assert len(queue._timers) < 200
    assert len(queue._lines) <= 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=60),
    st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abc"}),
)
def test_no_backlogged_tenant_falls_behind_its_share(joined: list[str], weights: dict[str, float]) -> None:
    """The bound of start-time fair queueing: while two are backlogged, what they got for their weight differs by at
    most one request of each."""
    queue = room_of("".join(joined), weights)
    got = dict.fromkeys(weights, 0)
    while len(queue):
        backlogged = {ticket.tenant for ticket in queue.walk()}
        for one in backlogged:
            for other in backlogged:
                ahead = got[one] / weights[one] - got[other] / weights[other]
                assert ahead <= 1 / weights[one] + 1 / weights[other] + 1e-9
        (item,) = served(queue, 1)
        got[item[0]] += 1


class Room(RuleBasedStateMachine):
    """Whatever happens, a ticket leaves once, in the order of its line, and the counts agree."""

    names = st.sampled_from("abc")

    @initialize(pushes=st.booleans())
    def start(self, pushes: bool) -> None:
        self.now = 0.0
        self.number = 0
        self.inside: list[Ticket[int]] = []
        self.queue: RequestQueue[int] = RequestQueue(self.evicted if pushes else None)

    def evicted(self, ticket: Ticket[int]) -> None:
        self.inside.remove(ticket)

    @rule(
        tenant=names,
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        hold_s=st.floats(0.1, 9.0),
        limit=st.integers(3, 6),
        has_priority=st.booleans(),
    )
    def join(self, tenant: str, weight: float, hold_s: float, limit: int, has_priority: bool) -> None:
        self.number += 1
        ticket = self.queue.join(self.number, self.now, hold_s, limit, tenant, weight, has_priority)
        if ticket is not None:
            self.inside.append(ticket)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        expired = self.queue.expire(self.now)
        assert expired == [ticket for ticket in self.inside if ticket.deadline <= self.now]
        self.inside = [ticket for ticket in self.inside if ticket not in expired]

    @rule(tenants=st.sets(names), count=st.integers(0, 4))
    def let_in(self, tenants: set[str], count: int) -> None:
        walk = list(self.queue.walk())
        assert sorted(ticket.number for ticket in walk) == [ticket.number for ticket in self.inside]
        for ticket in self.queue.walk():
            if ticket.tenant in tenants and count:
                count -= 1
                own = [other for other in self.inside if other.tenant == ticket.tenant]
                assert ticket is min(own, key=lambda other: not other.has_priority)
                assert self.queue.take(ticket)
                assert not self.queue.take(ticket)
                self.inside.remove(ticket)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        # A position, as Hypothesis makes weak references to what it draws, which compiled classes do not survive.
        ticket = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        assert self.queue.leave(ticket)
        assert not self.queue.leave(ticket)

    @invariant()
    def agrees(self) -> None:
        assert len(self.inside) <= 2 * 6
        assert len(self.queue) == len(self.inside)
        assert self.queue.next_deadline() == min((ticket.deadline for ticket in self.inside), default=None)


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
