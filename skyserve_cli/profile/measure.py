"""The measurement as a whole: steps until the capacity is known, or until time or requests are used up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lb.config.options import Slo
from skyserve_cli.profile.capacity import Capacity, Step, capacity
from skyserve_cli.profile.load import Bounds, Played, play
from skyserve_cli.profile.prompts import Shape
from skyserve_cli.profile.ramp import is_climbing, next_load
from skyserve_cli.profile.server import Server

SETTLE_SHARE = (
    1 / 3
)  # of a step: its first requests meet a batch and a queue that are shorter than they will be
LEAST_OF_ONE = 6.0  # a step is at least as long as so many requests after one another, for the same reason
CLIMBING_SHARE = 0.5  # of that, while no load was too high: those steps only show where to look
LAGGED_S, LAGGED_OF_TTFT = (
    0.5,
    0.5,
)  # a request sent later than that: this machine is too slow to send so much


class Limits(NamedTuple):
    """Of the whole measurement, and of a step."""

    time_s: float
    requests: int
    step_s: float
    most_in_flight: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A step: its load per replica, its counts, and quantiles of what was seen, in ms. `replicas` None: they changed meanwhile."""

    load: float
    replicas: int | None
    requests: int
    late: int
    failed: int
    error: str | None
    most_in_flight: int
    ttft_ms: tuple[float, float] | None
    tpot_ms: tuple[float, float] | None
    behind_s: float


@dataclass(slots=True)
class Measurement:
    """The options of a measurement, and its results so far.

    `first` is the load to begin with; None: that of one request after another. `replicas` returns how many are ready, `progress`
    gets each load before its step and what came of it. `stopped` is why there was no further step: precise, time, requests,
    hopeless, machine or interrupted. `took_s` is the time since the beginning.
    """

    server: Server
    slo: Slo
    attainment: float
    shapes: Iterator[Shape]
    limits: Limits
    replicas: Callable[[], Awaitable[int]]
    rng: random.Random
    progress: Callable[[Measured | float], None]
    first: float | None = None
    steps: list[Measured] = field(default_factory=list)
    sent: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    took_s: float = 0.0
    stopped: str = ""

    @property
    def counted(self) -> list[Step]:
        return [Step(one.load, one.requests, one.late) for one in self.steps if one.replicas is not None]

    @property
    def found(self) -> Capacity | None:
        return capacity(self.counted, self.attainment)

    async def run(self) -> None:
        """Measure until `stopped`. Raises ServerError; what was measured before stays, also when the task is cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            alone = await self.server.first(next(self.shapes))
            alone_s = (alone.ended_at or alone.sent_at) - alone.sent_at
            length_s = max(self.limits.step_s, LEAST_OF_ONE * alone_s)
            first = self.first or 1.0 / max(alone_s, 1e-3)
            while not self.stopped:
                load = next_load(self.counted, self.attainment, first)
                share = CLIMBING_SHARE if is_climbing(self.counted, self.attainment) else 1.0
                if load is None:
                    self.stopped = "hopeless" if self.found is None else "precise"
                elif self.steps and loop.time() - began + share * length_s > self.limits.time_s:
                    self.stopped = "time"
                elif self.sent >= self.limits.requests:
                    self.stopped = "requests"
                else:
                    await self._step(load, share * length_s)
        except asyncio.CancelledError:
            self.stopped = "interrupted"
        finally:
            self.took_s = loop.time() - began

    async def _step(self, load: float, length_s: float) -> None:
        self.progress(load)
        ready = await self.replicas()
        arrivals = ((self.rng.expovariate(load * ready), shape) for shape in self.shapes)
        most = self.limits.requests - self.sent
        bounds = Bounds(length_s, SETTLE_SHARE * length_s, most, self.limits.most_in_flight * ready)
        played = await play(self.server.send, arrivals, bounds, self.slo)
        whole = [one for one in played.flights if one.error is None and one.ended_at is not None]
        self.sent += played.sent
        self.finished += len(whole)
        self.prompt_tokens += sum(one.prompt_tokens for one in whole)
        self.response_tokens += sum(one.tokens for one in whole)
        step = summed(load, ready if await self.replicas() == ready else None, played)
        self.steps.append(step)
        self.progress(step)
        if step.behind_s > max(LAGGED_S, LAGGED_OF_TTFT * self.slo.ttft_s):
            self.stopped = "machine"


def summed(load: float, replicas: int | None, played: Played) -> Measured:
    """Return the counts and quantiles of a step."""
    errors = [one.error for one in played.flights if one.error is not None]
    first = [1000.0 * (one.first_at - one.sent_at) for one in played.flights if one.first_at is not None]
    each = [
        1000.0 * (one.ended_at - one.first_at) / (one.tokens - 1)
        for one in played.flights
        if one.first_at is not None and one.ended_at is not None and one.tokens > 1
    ]
    return Measured(
        load=load,
        replicas=replicas,
        requests=len(played.flights),
        late=sum(played.late),
        failed=len(errors),
        error=errors[0] if errors else None,
        most_in_flight=played.most_in_flight,
        ttft_ms=_quantiles(first),
        tpot_ms=_quantiles(each),
        behind_s=played.behind_s,
    )


def _quantiles(values: list[float]) -> tuple[float, float] | None:
    """Return the median and the 99 % quantile."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
