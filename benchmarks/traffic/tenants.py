"""Tenants whose responses differ in length: what a guess of the length is worth shows where one is 100 times as long as another.

An open loop; who asks is drawn for each request. Lengths are assumed: between those of the question sets, tool calls, chats and
reports that PreServe (figure 2c) and ServeGen show, with the long tails of both. Prompts have nothing in common beyond a tenant's
own instructions.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from benchmarks.traffic.workloads import (
    ANSWER_BEGIN,
    Arrival,
    Call,
    Prose,
    Spread,
    exponential,
    join,
    message,
    spoken,
)


class Tenant(NamedTuple):
    """`share` of the requests are this tenant's. Lengths in tokens."""

    name: str
    share: float
    prompt_tokens: Spread
    response_tokens: Spread


TENANTS = (
    Tenant("labels", 0.30, Spread(120, 400, 8, 2000), Spread(8, 20, 1, 64)),
    Tenant("tools", 0.25, Spread(300, 700, 8, 3000), Spread(50, 110, 8, 400)),
    Tenant("chat", 0.25, Spread(80, 500, 8, 3000), Spread(180, 520, 4, 1500)),
    Tenant("code", 0.12, Spread(400, 1500, 8, 4000), Spread(420, 900, 16, 2500)),
    Tenant("reports", 0.08, Spread(900, 3000, 8, 6000), Spread(1200, 2000, 200, 4000)),
)


class Tenants:
    """Requests by a Poisson process of `per_s` for `length_s`. Same arguments, same requests; more of them per second are the same
    requests sooner, and more."""

    name = "tenants"

    def __init__(self, per_s: float, length_s: float, seed: int, tenants: Sequence[Tenant] = TENANTS) -> None:
        self._rate = per_s
        self._length_s = length_s
        self._seed = seed
        self._tenants = tenants
        self._shares = list(accumulate(one.share for one in tenants))

    def opening(self) -> Iterator[Arrival]:
        arrivals = random.Random(self._seed)
        number, now = 0, 0.0
        while True:
            now += exponential(arrivals, 1 / self._rate)
            if now >= self._length_s:
                return
            yield Arrival(now, self._request(number))
            number += 1

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        return ()

    def _request(self, number: int) -> Call:
        rng = random.Random(f"{self._seed}/{number}")
        tenant = self._tenants[bisect_right(self._shares, rng.random() * self._shares[-1])]
        prose = Prose(rng)
        question = prose.passage(round(tenant.prompt_tokens.draw(rng)))
        answer = prose.passage(round(tenant.response_tokens.draw(rng)))
        return Call(
            id=f"{tenant.name}-{number}",
            prompt=join((message("user", question), ANSWER_BEGIN)),
            answer=spoken(answer),
            scope=tenant.name,
        )
