"""The waiting room and the sliding window, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.queue import HoldQueue
from lb.window import MAX_WINDOW_S, WindowCounter, WindowMean


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


def test_the_mean_is_over_time_not_over_changes() -> None:
    mean = WindowMean(100.0)
    assert mean.mean(100.0, 60.0) == 0.0
    mean.step(100.0, 4)
    assert mean.mean(100.0, 60.0) == 4.0, "at the first instant: what is"
    mean.step(110.0, -4)
    assert mean.mean(110.0, 60.0) == 4.0, "no longer than it has lived"
    assert mean.mean(120.0, 60.0) == 2.0
    assert mean.mean(160.0, 60.0) == pytest.approx(40.0 / 60.0)
    assert mean.mean(165.0, 60.0) == pytest.approx(20.0 / 60.0), "the window has left half of it behind"
    assert mean.mean(171.0, 60.0) == pytest.approx(0.0)


def test_what_is_shorter_than_a_look_is_seen() -> None:
    mean = WindowMean(0.0)
    for second in range(60):
        mean.step(second + 0.25, 1)
        mean.step(second + 0.5, -1)
    assert mean.mean(60.0, 60.0) == pytest.approx(0.25)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(-1, 2)), max_size=60), st.integers(1, 600))
def test_the_mean_agrees_with_its_definition(steps: list[tuple[float, int]], window_s: int) -> None:
    """To what changes within the second in which the window begins."""
    mean = WindowMean(0.0)
    now, level, history, swings = 0.0, 0, [(0.0, 0)], [0.0]
    for gap, by in steps:
        now += gap
        by = max(by, -level)
        mean.step(now, by)
        level += by
        history.append((now, level))
        swings.append(now)
    now += 1.0
    start = max(0.0, now - window_s)
    ends = [at for at, _ in history[1:]] + [now]
    area = sum(
        number * max(0.0, end - max(at, start)) for (at, number), end in zip(history, ends, strict=True)
    )
    near = [number for at, number in history if start - 1.0 <= at <= start + 1.0]
    before = [number for at, number in history if at <= start]
    slack = max([*near, before[-1]]) - min([*near, before[-1]]) + 1e-6
    assert abs(mean.mean(now, window_s) * (now - start) - area) <= slack


def test_the_mean_is_bounded_in_memory() -> None:
    mean = WindowMean(0.0)
    for tick in range(20_000):
        mean.step(tick / 4.0, 1)
    assert len(mean._marks) <= 2 * MAX_WINDOW_S + 3
