"""Conversations drawn from a seed: tenants with a system prompt each, users who read, think and write again.

Every message of a conversation is sent with all that was said before it, so a turn shares its whole past with the
turn before, and the system prompt with every conversation of its tenant. What the defaults come from:

    system_tokens     200, the short end of what deployments have
    message_tokens    40 and 160 at the median and the ninetieth percentile: assumed
    answer_tokens     median 129 as in Azure's conversation trace of 2023; its tail is assumed
    think_s           56 s at the median, 285 s at the ninetieth percentile: between two turns of the same
                      conversation in Mooncake's synthetic trace (its recorded one: 123 and 474 s)
    turns             3 on the mean, geometric: assumed (Mooncake's recorded trace shows 1.5 where it is known,
                      which misses all turns outside of its hour)
    tenants           Zipf-distributed: assumed

Conversations start by a Poisson process of `sessions_per_s` for `length_s`; those that have started are finished.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.traffic.workloads import (
    ANSWER_BEGIN,
    Arrival,
    Call,
    Passage,
    Prose,
    Spread,
    exponential,
    geometric,
    join,
    message,
    spoken,
)

MESSAGE_TOKENS = Spread(40, 160, 3, 2000)
ANSWER_TOKENS = Spread(129, 400, 2, 2000)
THINK_S = Spread(56, 285, 1, 1800)


@dataclass(frozen=True, slots=True)
class Habits:
    """How people talk. Lengths are in tokens. A conversation ends before it is longer than `longest_tokens`."""

    tenants: int = 16
    popularity: float = 1.0  # the n-th tenant has n^-popularity times the conversations of the first
    system_tokens: int = 200
    turns_mean: float = 3.0
    message_tokens: Spread = MESSAGE_TOKENS
    response_tokens: Spread = ANSWER_TOKENS
    think_s: Spread = THINK_S
    longest_tokens: int = 8192


NOTHING_SAID = Passage(b"", ())


@dataclass(slots=True, eq=False)
class Session:
    """One conversation; its words are drawn from `rng`."""

    tenant: str
    user: str
    turns_left: int
    past: Passage
    rng: random.Random
    answer: Passage = NOTHING_SAID  # of the turn under way
    turn: int = 0

    def next_turn(self, habits: Habits) -> Call:
        prose = Prose(self.rng)
        said = prose.passage(round(habits.message_tokens.draw(self.rng)))
        self.answer = prose.passage(round(habits.response_tokens.draw(self.rng)))
        self.past = join((self.past, message("user", said)))
        self.turns_left -= 1
        call = Call(
            id=f"{self.user}.{self.turn}",
            prompt=join((self.past, ANSWER_BEGIN)),
            answer=spoken(self.answer),
            scope=self.tenant,
            session=self.user,
        )
        self.turn += 1
        return call

    def goes_on(self, habits: Habits) -> bool:
        """Return whether another turn follows the one that has ended."""
        if not self.turns_left:
            return False
        self.past = join((self.past, message("assistant", self.answer)))
        return len(self.past.tokens) <= habits.longest_tokens


class Chat:
    """One run of conversations: same arguments, same conversations."""

    name = "chat"

    def __init__(
        self, sessions_per_s: float, length_s: float, seed: int, habits: Habits | None = None
    ) -> None:
        self._rate = sessions_per_s
        self._length_s = length_s
        self._habits = habits = habits or Habits()
        # Texts and arrivals are drawn apart: more traffic changes no conversation before it.
        self._starts = random.Random(seed)
        self._seed = seed
        prose = Prose(random.Random(f"{seed}/tenants"))
        self._systems = [
            message("system", prose.passage(habits.system_tokens)) for _ in range(habits.tenants)
        ]
        weights = [(rank + 1) ** -habits.popularity for rank in range(habits.tenants)]
        self._shares = list(accumulate(weights))
        self._open: dict[str, Session] = {}

    def opening(self) -> Iterator[Arrival]:
        number, now = 0, 0.0
        while True:
            now += exponential(self._starts, 1 / self._rate)
            if now >= self._length_s:
                return
            rng = random.Random(f"{self._seed}/{number}")
            tenant = bisect_right(self._shares, rng.random() * self._shares[-1])
            turns = geometric(rng, self._habits.turns_mean)
            session = Session(f"tenant-{tenant}", f"user-{number}", turns, self._systems[tenant], rng)
            yield Arrival(now, self._turn(session))
            number += 1

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        session = self._open.pop(call.id)
        if not session.goes_on(self._habits):
            return ()
        return (Arrival(now + self._habits.think_s.draw(session.rng), self._turn(session)),)

    def _turn(self, session: Session) -> Call:
        call = session.next_turn(self._habits)
        self._open[call.id] = session
        return call
