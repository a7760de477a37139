"""Who goes first of those who wait for one target, and that a ticket is in one lane at most."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest

from lb.core.lanes import Lanes
from lb.core.queue import RequestQueue, Ticket


class Waits(NamedTuple):
    name: str
    joined_at: float = 0.0
    put_off_s: float = 0.0
    hold_s: float = 1000.0
    tenant: str = ""
    has_priority: bool = False
    weight: float = 1.0


def lanes(*waiting: Waits) -> tuple[RequestQueue[str], Lanes[str]]:
    queue: RequestQueue[str] = RequestQueue()
    made: Lanes[str] = Lanes()
    queue.on_drop = made.leave
    for one in waiting:
        ticket = queue.join(
            one.name, one.joined_at, one.hold_s, 100, one.tenant, one.weight, one.has_priority
        )
        assert ticket is not None
        made.join(ticket, "a", one.put_off_s)
    return queue, made


def order(queue: RequestQueue[str], made: Lanes[str]) -> list[str]:
    gone = []
    while (ticket := made.first("a", queue.tag)) is not None:
        assert queue.take(ticket)
        gone.append(ticket.item)
    return gone


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        pytest.param([Waits("1"), Waits("2")], "12", id="first come, first served"),
        pytest.param(
            [Waits("miss", put_off_s=1.0), Waits("hit")], "hit miss", id="what is put off goes later"
        ),
        pytest.param(
            [Waits("miss", put_off_s=20.0), Waits("hit", joined_at=19.0)],
            "hit miss",
            id="than one that comes within that time",
        ),
        pytest.param(
            [Waits("miss", put_off_s=20.0), Waits("hit", joined_at=21.0)],
            "miss hit",
            id="and not than others",
        ),
        pytest.param(
            [Waits("miss", put_off_s=30.0, hold_s=8.0), Waits("hit", joined_at=5.0)],
            "miss hit",
            id="for no more than half of its time",
        ),
        pytest.param(
            [Waits("miss", put_off_s=30.0, hold_s=20.0), Waits("hit", put_off_s=15.0, hold_s=20.0)],
            "hit miss",
            id="and among those with little time in the same order",
        ),
        pytest.param(
            [Waits("miss", put_off_s=30.0, hold_s=20.0), Waits("hit", 6.0, put_off_s=15.0, hold_s=20.0)],
            "miss hit",
            id="in proportion",
        ),
        pytest.param(
            [Waits("hit"), Waits("lost", joined_at=1.0, put_off_s=5.0, has_priority=True)],
            "lost hit",
            id="what has lost its target goes first",
        ),
        pytest.param(
            [Waits("x1", tenant="x"), Waits("x2", tenant="x"), Waits("y1", tenant="y", put_off_s=1.0)],
            "x1 y1 x2",
            id="tenants take turns, whatever they ask for",
        ),
        pytest.param(
            [
                *(Waits(f"x{n}", tenant="x", weight=2.0) for n in (1, 2, 3)),
                *(Waits(f"y{n}", tenant="y") for n in (1, 2)),
            ],
            "x1 y1 x2 x3 y2",
            id="by weight",
        ),
    ],
)
def test_who_goes_first(waiting: list[Waits], expected: str) -> None:
    assert "".join(order(*lanes(*waiting))) == expected.replace(" ", "")


def test_a_ticket_waits_in_one_lane_and_leaves_it_with_the_queue() -> None:
    queue, made = lanes(Waits("1"), Waits("2", put_off_s=1.0))
    first, last = made.first("a", queue.tag), made.last("a")
    assert first is not None
    made.join(first, "b", 0.0)
    assert (set(made.targets()), first.lane, len(made)) == ({"a", "b"}, "b", 2)
    assert made.all("a") == [last]
    queue.leave(first)
    assert (set(made.targets()), first.lane) == ({"a"}, None)
    made.leave(first)  # a second time is fine
    queue.expire(5000.0)
    assert not made.targets()
    assert len(made) == 0
    assert made.longest() is None


def test_the_longest_lane_has_the_most_tickets() -> None:
    _, made = lanes(Waits("1"), Waits("2"))
    other: RequestQueue[str] = RequestQueue()
    ticket = other.join("3", 0.0, 10.0, 100)
    assert isinstance(ticket, Ticket)
    made.join(ticket, "b", 9.0)
    assert made.longest() == "a"


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_lane_is_known_after_any_moves(seed: int) -> None:
    rng = Random(seed)
    queue: RequestQueue[int] = RequestQueue()
    made: Lanes[int] = Lanes()
    queue.on_drop = made.leave
    waiting: list[Ticket[int]] = []
    for number in range(2000):
        if len(waiting) < 5 or rng.random() < 0.45:
            ticket = queue.join(number, 0.0, 1000.0, 10_000)
            assert ticket is not None
            waiting.append(ticket)
            made.join(ticket, rng.choice("abcdefgh"), 0.0)
        elif rng.random() < 0.5:
            made.join(rng.choice(waiting), rng.choice("abcdefgh"), 0.0)
        else:
            queue.leave(waiting.pop(rng.randrange(len(waiting))))
        longest = made.longest()
        assert longest is not None
        assert len(made.all(longest)) == max(len(made.all(name)) for name in made.targets())
