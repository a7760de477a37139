"""The waiting room and the sliding window, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.queue import HoldQueue
from lb.window import MAX_WINDOW_S, WindowCounter


def items(tickets: list) -> list[str]:
    return [ticket.item for ticket in tickets]


def test_first_come_first_admitted_and_only_who_may() -> None:
    queue: HoldQueue[str] = HoldQueue()
    for name in ("b", "a", "c"):
        queue.join(name, 0.0, 10.0, limit=9)
    assert items(queue.admit(lambda name: name != "a")) == ["b", "c"]
    assert items(queue.admit(lambda name: True)) == ["a"]
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("hold_s", "limit"), [(10.0, 1), (10.0, 0), (0.0, 9)], ids=["full", "no room", "no time"]
)
def test_no_ticket_without_room_or_time(hold_s: float, limit: int) -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.join("first", 0.0, 10.0, limit=9)
    assert queue.join("second", 0.0, hold_s, limit) is None
    assert len(queue) == 1


def test_tickets_expire_at_their_own_deadline() -> None:
    queue: HoldQueue[str] = HoldQueue()
    queue.join("long", 0.0, 9.0, limit=9)
    queue.join("short", 1.0, 2.0, limit=9)
    assert queue.next_deadline() == 3.0
    assert queue.expire(2.9) == []
    assert items(queue.expire(3.0)) == ["short"]
    assert queue.next_deadline() == 9.0


@given(st.lists(st.sampled_from(["join", "admit", "expire", "leave"]), max_size=60))
def test_a_ticket_leaves_exactly_once(steps: list[str]) -> None:
    queue: HoldQueue[int] = HoldQueue()
    inside, left, now = [], [], 0.0
    for number, step in enumerate(steps):
        now += 1.0
        if step == "join":
            ticket = queue.join(number, now, 5.0, limit=4)
            assert (ticket is None) == (len(inside) == 4)
            if ticket is not None:
                inside.append(ticket)
            continue
        if step == "admit":
            out = queue.admit(lambda item: item % 2 == 0)
        elif step == "expire":
            out = queue.expire(now)
            assert all(ticket.deadline <= now for ticket in out)
        else:
            out = inside[:1]
            assert all(queue.leave(ticket) for ticket in out)
        assert out == [ticket for ticket in inside if ticket in out]  # in the order of joining
        inside = [ticket for ticket in inside if ticket not in out]
        left += out
        assert not any(queue.leave(ticket) for ticket in left)
        assert len(queue) == len(inside)
    assert len(set(map(id, left))) == len(left)


@given(st.lists(st.floats(0.0, 30.0), max_size=60), st.integers(1, 600))
def test_the_window_counts_to_within_a_second(gaps: list[float], window_s: int) -> None:
    counter = WindowCounter()
    now, seen = 0.0, []
    for gap in gaps:
        now += gap
        counter.add(now)
        seen.append(now)
    inner = sum(1 for at in seen if at > now - window_s + 1)
    outer = sum(1 for at in seen if at > now - window_s - 1)
    assert inner <= counter.count(now, window_s) <= outer


def test_the_window_is_bounded_in_memory() -> None:
    counter = WindowCounter()
    for second in range(5000):
        counter.add(float(second))
    assert len(counter._buckets) <= MAX_WINDOW_S + 1
    assert counter.count(4999.0, 1e9) == MAX_WINDOW_S
