"""A step: requests come whether or not the server keeps up, and nothing is left of it afterwards."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from lb.config.options import Slo
from skyserve_cli.profile.load import Bounds, Flight, Played, play
from skyserve_cli.profile.measure import summed
from skyserve_cli.profile.prompts import Shape

SHAPE = Shape(10, 11)
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def flight(
    first: float | None = None, ended: float | None = None, tokens: int = 11, error: str | None = None
) -> Flight:
    return Flight(SHAPE, 100.0, first, ended, 10, tokens, error)


@pytest.mark.parametrize(
    ("one", "now", "late"),
    [
        (flight(), 100.5, None),
        (flight(), 101.1, True),
        (flight(first=100.5), 101.0, None),
        (flight(first=101.5), 101.6, True),
        (flight(first=100.5), 101.6, True),
        (flight(first=100.5, ended=101.4), 101.4, False),
        (flight(first=100.5, ended=101.6), 101.6, True),
        (flight(first=100.5, ended=100.6, error="HTTP 503"), 100.6, True),
    ],
    ids=[
        "no first byte yet",
        "the first byte is overdue",
        "tokens may still come in time",
        "the first byte came late",
        "tokens took longer than all of them may",
        "in time",
        "slow tokens",
        "failed",
    ],
)
def test_verdicts(one: Flight, now: float, late: bool | None) -> None:
    assert one.late(SLO, now) is late


def test_without_a_bound_on_tokens_the_first_byte_decides() -> None:
    assert flight(first=100.5).late(Slo(ttft_s=1.0), 500.0) is False


async def hang(_: Flight) -> None:
    await asyncio.Event().wait()


async def respond(one: Flight) -> None:
    one.first_at, one.tokens = one.sent_at, 1


def at_once(count: int) -> itertools.chain[tuple[float, Shape]]:
    """That many arrivals at once, and then none."""
    return itertools.chain(itertools.repeat((0.0, SHAPE), count), itertools.repeat((3600.0, SHAPE)))


async def played(send: object, count: int, **changes: float) -> Played:
    bounds = Bounds(**({"length_s": 60.0, "settle_s": 0.0, "most": 1000, "most_in_flight": 100} | changes))  # type: ignore[arg-type]
    return await play(send, at_once(count), bounds, Slo(ttft_s=0.01))  # type: ignore[arg-type]


async def test_a_server_that_never_answers_does_not_stop_the_arrivals_and_is_left_with_no_request() -> None:
    before = asyncio.all_tasks()
    found = await played(hang, 50)
    assert (found.sent, sum(found.late), found.stopped, found.most_in_flight) == (50, 50, False, 50)
    assert asyncio.all_tasks() == before


async def test_a_step_stops_when_too_many_are_in_flight() -> None:
    found = await played(hang, 500, settle_s=30.0)
    assert (found.sent, found.stopped) == (100, True)
    assert sum(found.late) == 100, "the first seconds count too: it stopped within them"


async def test_a_step_sends_no_more_than_it_may() -> None:
    found = await played(respond, 500, most=30)
    assert (found.sent, len(found.flights), sum(found.late)) == (30, 30, 0)


async def test_requests_of_the_first_seconds_are_not_counted() -> None:
    found = await played(respond, 20, settle_s=30.0)
    assert (found.sent, found.flights) == (20, ())


async def test_what_a_request_raises_ends_the_step_and_the_others() -> None:
    numbers = itertools.count()
    before = asyncio.all_tasks()

    async def send(_: Flight) -> None:
        if next(numbers) == 3:
            raise ValueError("wrong model")
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="wrong model"):
        await played(send, 50)
    assert asyncio.all_tasks() == before


async def test_a_cancelled_step_leaves_no_request_behind() -> None:
    before = asyncio.all_tasks()
    numbers, all_sent = itertools.count(1), asyncio.Event()

    async def send(_: Flight) -> None:
        if next(numbers) == 10:
            all_sent.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(play(send, at_once(10), Bounds(60.0, 0.0, 100, 100), Slo(tpot_s=1.0)))
    await all_sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


def test_a_step_is_summed_up_in_counts_and_quantiles() -> None:
    flights = (*(flight(100 + n / 100, 101 + n / 100) for n in range(1, 101)), flight(error="HTTP 503: full"))
    found = summed(2.5, 3, Played(flights, (False,) * 100 + (True,), 120, 40, False, 0.01))
    assert (found.load, found.replicas, found.requests, found.late, found.failed) == (2.5, 3, 101, 1, 1)
    assert found.error == "HTTP 503: full"
    assert found.ttft_ms == pytest.approx((510, 1000))
    assert found.tpot_ms == pytest.approx((100, 100))
