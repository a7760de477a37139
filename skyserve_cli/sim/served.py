"""Which requests of a simulated market a fleet serves within the SLO, by the queue model of `slo_queue`, tick by tick.

The requests are drawn around the recorded rate, as for `--autoscaler`. The first part of the recording may be history: a service
with an SLO knows it when the market begins. Its minutes are reported as a load balancer would report them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lb.config.demand import Demand
from skyserve_cli.engine.profiles import Profile
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.latency import Latencies, Tokens
from skyserve_cli.sim.market import EPOCH_S
from skyserve_cli.sim.slo_queue import SloQueue, drawn
from skyserve_cli.sim.token_steps import RUNNING, token_steps
from skyserve_cli.state.values import DemandRow

MINUTE_S = 60.0
REPORTED_MIN = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a market run: `known_s` of the recording are over when it begins; a replica carries `capacity_qps` within its SLO.

    `response_weight` None: all requests weigh the same. With an `engine` it is computed how long they take, and which of them take
    longer than `timeout_s`: clients give these up.
    """

    arrivals: Arrivals
    capacity_qps: float
    known_s: float = 0.0
    response_weight: float | None = None
    engine: Profile | None = None
    timeout_s: float = math.inf


@dataclass(slots=True)
class _Minute:
    requests: int = 0
    met: float = 0.0
    prompt: float = 0.0
    response: float = 0.0
    work: float = 0.0
    ready: int = 0

    @property
    def size(self) -> float:
        """The work of a request."""
        return self.work / self.requests if self.work else 1.0

    def add(self, count: int, tokens: tuple[float, float, float]) -> None:
        prompt, response, size = tokens
        self.requests += count
        self.prompt += prompt * count
        self.response += response * count
        self.work += size * count


@dataclass(slots=True)
class ServedRequests:
    """The requests of one run. `counts` are those of each tick, `tokens` of one of them its prompt, response and work."""

    counts: Sequence[int]
    tokens: Sequence[tuple[float, float, float]]
    known: Sequence[DemandRow]
    tick_s: float
    queue: SloQueue
    asked: int = 0
    met: float = 0.0
    latencies: Latencies | None = None
    _minutes: dict[int, _Minute] = field(default_factory=dict)

    @classmethod
    def draw(cls, traffic: Traffic, length_s: float, tick_s: float, seed: int) -> ServedRequests:
        """Return the requests of `length_s` seconds in ticks of `tick_s`, at most a minute."""
        known_ticks = round(traffic.known_s / tick_s)
        whole = drawn(traffic.arrivals, known_ticks * tick_s + length_s, seed, tick_s)
        tokens = _tokens(traffic, len(whole), tick_s)
        minutes: dict[int, _Minute] = {}
        for index, count in enumerate(whole[:known_ticks]):
            number = _minute_of((index - known_ticks) * tick_s)
            minutes.setdefault(number, _Minute()).add(count, tokens[index])
        minutes.pop(_minute_of(0.0), None)  # it is not over
        known = [
            DemandRow(number, float(one.requests), round(one.prompt), round(one.response), 0.0, 0.0)
            for number, one in minutes.items()
        ]
        engine, qps = traffic.engine, traffic.capacity_qps
        latencies = None if engine is None else Latencies(engine, qps, traffic.timeout_s)
        queue = SloQueue(qps)
        return cls(whole[known_ticks:], tokens[known_ticks:], known, tick_s, queue, latencies=latencies)

    @property
    def attainment(self) -> float | None:
        """The share of the requests in time; None without any."""
        return self.met / self.asked if self.asked else None

    @property
    def failed(self) -> float | None:
        """The share of the requests that clients gave up; None where they do not."""
        known = self.latencies
        return None if known is None or known.timeout_s == math.inf else known.failed / max(1, self.asked)

    def serve(self, begin: int, end: int, ready: int, *, counted: bool) -> None:
        """Let the ticks from `begin` to before `end` go by with `ready` replicas.

        Where they are not `judged`, nothing can be ready yet: their requests count as in time, and for nothing.
        """
        for tick in range(begin, min(end, len(self.counts))):
            count = self.counts[tick]
            tokens = self.tokens[tick]
            work = count * tokens[2]
            in_time = self.queue.step(work, ready, self.tick_s) if counted else work
            met = count * in_time / work if work else float(count)
            number = _minute_of(tick * self.tick_s)
            minute = self._minutes.setdefault(number, _Minute(ready=ready))
            minute.add(count, tokens)
            minute.met += met
            if counted:
                self.asked += count
                self.met += met
                if self.latencies is not None:
                    at_s = tick * self.tick_s
                    self.latencies.step(at_s, self.tick_s, ready, count, work, Tokens(*tokens[:2]))
                    if self.latencies.timeout_s < math.inf:
                        self.queue.waiting = min(self.queue.waiting, self.latencies.waiting)
        for old in [
            number for number in self._minutes if number < _minute_of(end * self.tick_s) - REPORTED_MIN
        ]:
            del self._minutes[old]

    def came(self, start_s: float, end_s: float) -> int:
        """Return how many requests came from `start_s` to `end_s` after the market began."""
        first, last = round(max(0.0, start_s) / self.tick_s), round(end_s / self.tick_s)
        return sum(self.counts[first:last])

    def ongoing(self, now_s: float) -> tuple[int, float]:
        """Return how many requests wait, and how many waited or were worked on, on the mean of the last minute that is over."""
        last = self._minutes.get(_minute_of(now_s) - 1, _Minute())
        waiting = round(self.queue.waiting / last.size)
        return waiting, waiting + RUNNING * last.work / (MINUTE_S * self.queue.capacity_qps)

    def demand(self, now_s: float) -> Demand:
        """Return the last minutes that are over, `now_s` after the market began."""
        over = [
            (number, self._minutes[number]) for number in sorted(self._minutes) if number < _minute_of(now_s)
        ]
        return Demand(
            EPOCH_S + now_s,
            over[0][0] if over else _minute_of(now_s),
            tuple(minute.requests for _, minute in over),
            tuple(round(minute.prompt) for _, minute in over),
            tuple(round(minute.response) for _, minute in over),
            tuple(max(0, round(minute.requests - minute.met)) for _, minute in over),
            tuple(minute.ready for _, minute in over),
        )


def _tokens(traffic: Traffic, ticks: int, tick_s: float) -> list[tuple[float, float, float]]:
    """Return of a request in each tick: tokens of its prompt and response, and its work."""
    weight = traffic.response_weight
    known = (
        None
        if weight is None
        else token_steps(traffic.arrivals, ticks * tick_s, traffic.known_s, weight, tick_s)
    )
    if known is None:
        return [(0.0, 0.0, 1.0)] * ticks
    return list(zip(*(column[:ticks].tolist() for column in known[:3]), strict=True))


def next_minute_s(now_s: float) -> float:
    """Return when the minute in which `now_s` lies is over, in seconds after the market began."""
    return (_minute_of(now_s) + 1) * MINUTE_S - EPOCH_S


def _minute_of(at_s: float) -> int:
    return math.floor((EPOCH_S + at_s) / MINUTE_S)
