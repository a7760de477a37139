"""One step against a server: requests at random instants with a given mean rate, whether or not earlier ones are done.

A closed loop would send less when the server is slow, and so hide the queueing. What a step may start is bounded: by
its length, and by `most_in_flight`, beyond which the server is plainly behind and the step stops. After a step, requests whose
verdict is known are cancelled, so that the next step finds an idle server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lb.config.options import Slo
from lb.core.demand_minutes import is_late
from skyserve_cli.profile.prompts import Shape

WAITED_S = 60.0  # at most, after a step, for verdicts
_CHECK_S = 0.05


@dataclass(slots=True)
class Flight:
    """A request on its way. Instants are those of the event loop; `error` is set if it failed."""

    shape: Shape
    sent_at: float
    first_at: float | None = None
    ended_at: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    def late(self, slo: Slo, now: float) -> bool | None:
        """Return whether it missed the SLO; None while that is not known."""
        if self.error is not None:
            return True
        if self.ended_at is not None:
            return is_late(slo, self.sent_at, self.first_at, self.ended_at, self.tokens)
        if self.first_at is None:
            return True if slo.ttft_s and now - self.sent_at > slo.ttft_s else None
        if slo.ttft_s and self.first_at - self.sent_at > slo.ttft_s:
            return True
        if not slo.tpot_s:
            return False
        return True if now - self.first_at > slo.tpot_s * max(1, self.shape.response - 1) else None


class Played(NamedTuple):
    """`flights` are the counted ones, with `late` of each. `behind_s`: by how much this machine sent a request too late, at most."""

    flights: tuple[Flight, ...]
    late: tuple[bool, ...]
    sent: int
    most_in_flight: int
    stopped: bool
    behind_s: float


class Bounds(NamedTuple):
    """`settle_s`: requests sent before are not counted. `most` requests, `most_in_flight` of them at a time."""

    length_s: float
    settle_s: float
    most: int
    most_in_flight: int


async def play(
    send: Callable[[Flight], Awaitable[None]],
    arrivals: Iterable[tuple[float, Shape]],
    bounds: Bounds,
    slo: Slo,
) -> Played:
    """Play a step: `arrivals` are (seconds after the one before, a prompt), without end.

    `send` fills in the flight. What it raises ends the step, with all requests cancelled, and is raised here.
    """
    loop = asyncio.get_running_loop()
    began = due = loop.time()
    flights: list[Flight] = []
    tasks: set[asyncio.Task[None]] = set()
    behind_s, peak, stopped = 0.0, 0, False
    try:
        for gap_s, shape in arrivals:
            due += gap_s
            if due - began >= bounds.length_s or len(flights) >= bounds.most:
                break
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks = _going(tasks)
            if len(tasks) >= bounds.most_in_flight:
                stopped = True
                break
            behind_s = max(behind_s, loop.time() - due)
            flight = Flight(shape, loop.time())
            flights.append(flight)
            tasks.add(asyncio.create_task(_sent(send, flight)))
            peak = max(peak, len(tasks))
        await _verdicts(flights, tasks, slo, loop)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    now = loop.time()
    # A step that stopped early shows what it shows from its beginning on.
    counted = [one for one in flights if stopped or one.sent_at - began >= bounds.settle_s]
    late = tuple(one.late(slo, now) is not False for one in counted)
    return Played(tuple(counted), late, len(flights), peak, stopped, behind_s)


async def _sent(send: Callable[[Flight], Awaitable[None]], flight: Flight) -> None:
    await send(flight)
    flight.ended_at = asyncio.get_running_loop().time()


def _going(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Return those that are not done. Raises what one of them raised."""
    for task in tasks:
        if task.done():
            task.result()
    return {task for task in tasks if not task.done()}


async def _verdicts(
    flights: list[Flight], tasks: set[asyncio.Task[None]], slo: Slo, loop: asyncio.AbstractEventLoop
) -> None:
    """Wait until the verdict of each is known, or for `WAITED_S`."""
    until = loop.time() + WAITED_S
    while tasks and loop.time() < until:
        if all(one.late(slo, loop.time()) is not None for one in flights):
            return
        await asyncio.wait(tasks, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        tasks -= {task for task in tasks if task.done() and task.result() is None}
