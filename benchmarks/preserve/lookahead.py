"""The load look-ahead map of one engine: how many tokens its KV cache will hold in the coming seconds.

Source: PreServe (section 4.3.1). A request with P prompt tokens and D expected ones holds P + i tokens at
step i until step D. One that ends earlier gives back the rest; one that goes on longer is given a fifth more
of what it has written, as often as it takes.

Different here, because a load balancer sees no iterations:

- Steps are seconds. Each stay in the cache has a speed, the target's seconds per token when it began.
- The map is not an array per step that every request adds D numbers to, but three sums over all stays (a line
  through time) and the stays by the slot of a quarter second in which they end. A request costs constant
  time, and the future is only walked when it may matter.
- A stay begins when the request is sent and not when its prompt has been computed: it is on its way into this
  memory, and who comes next should know. At the first byte it begins again, exactly.
"""

from __future__ import annotations

from typing import NamedTuple

SLOT_S = 0.25
HORIZON_SLOTS = 12  # 3 s: PreServe's 100 iterations at 30 ms each
EXTENSION_SHARE = 0.2


class Expected(NamedTuple):
    """What a request will take: tokens of its prompt and of its response, and seconds per response token."""

    prompt_tokens: float
    response_tokens: float
    s_per_token: float


class LookAhead:
    """Reading never changes it. A writer calls `advance` first, any number of times."""

    __slots__ = ("_ending", "_ends_sum", "_level", "_slot", "_speed", "_stays")

    def __init__(self) -> None:
        self._stays: dict[str, _CacheEntry] = {}
        self._ending: dict[int, set[_CacheEntry]] = {}
        self._slot = 0
        # Of all stays: tokens held at time t are level + speed * t, tokens to come are ends_sum - speed * t.
        self._level = 0.0
        self._speed = 0.0
        self._ends_sum = 0.0

    def __len__(self) -> int:
        return len(self._stays)

    def enter(self, request_id: str, expected: Expected, now: float) -> None:
        """The request holds its prompt's tokens now and one more every `s_per_token`. Again: it starts from there."""
        self.leave(request_id)
        speed = 1.0 / expected.s_per_token
        stay = _CacheEntry(expected.prompt_tokens - speed * now, speed, now)
        self._stays[request_id] = stay
        self._level += stay.level
        self._speed += speed
        self._end_at(stay, now + expected.response_tokens * expected.s_per_token)

    def leave(self, request_id: str) -> None:
        """The request is over; an unknown one is fine."""
        stay = self._stays.pop(request_id, None)
        if stay is None:
            return
        self._unschedule(stay)
        self._level -= stay.level
        self._speed -= stay.speed
        if not self._stays:  # what rounding has left of the sums
            self._level = self._speed = self._ends_sum = 0.0

    def advance(self, now: float) -> None:
        """A response that should be complete by now is expected to go on for a fifth of what it has written."""
        slot = int(now // SLOT_S)
        if slot <= self._slot:
            return
        self._slot = slot
        for late in [stay for end, stays in self._ending.items() if end < slot for stay in stays]:
            self._unschedule(late)
            self._end_at(late, now + max(SLOT_S, EXTENSION_SHARE * (now - late.since)))

    def held_tokens(self, now: float) -> float:
        return max(0.0, self._level + self._speed * now)

    def remaining_tokens(self, now: float) -> float:
        """Tokens still to be written by all requests."""
        return max(0.0, self._ends_sum - self._speed * now)

    def peak_tokens(self, newcomer: Expected, now: float) -> float:
        """Return the most that will be held within the horizon, the newcomer included."""
        level, speed = self._level, self._speed
        grows = 1.0 / newcomer.s_per_token
        first = int(now // SLOT_S)
        last_of_newcomer = _slot_of(now + newcomer.response_tokens * newcomer.s_per_token)
        peak = self.held_tokens(now) + newcomer.prompt_tokens
        for slot in range(first, first + HORIZON_SLOTS):
            at = (slot + 1) * SLOT_S
            held = level + speed * at
            if slot <= last_of_newcomer:
                held += newcomer.prompt_tokens + grows * (at - now)
            if held > peak:
                peak = held
            for stay in self._ending.get(slot, ()):
                level -= stay.level
                speed -= stay.speed
        return peak

    def max_growth(self, s_per_token: float) -> float:
        """Return how much more than now, and than a newcomer's prompt, `peak_tokens` can be: as if no request ended."""
        return (self._speed + 1.0 / s_per_token) * (HORIZON_SLOTS + 1) * SLOT_S

    def _end_at(self, stay: _CacheEntry, end: float) -> None:
        stay.end = end
        self._ends_sum += stay.speed * end
        self._ending.setdefault(_slot_of(end), set()).add(stay)

    def _unschedule(self, stay: _CacheEntry) -> None:
        slot = _slot_of(stay.end)
        others = self._ending[slot]
        others.remove(stay)
        if not others:
            del self._ending[slot]
        self._ends_sum -= stay.speed * stay.end


class _CacheEntry:
    """One request in the cache: it holds level + speed * t tokens at time t, until `end`."""

    __slots__ = ("end", "level", "since", "speed")

    def __init__(self, level: float, speed: float, since: float) -> None:
        self.level = level
        self.speed = speed
        self.since = since
        self.end = since


def _slot_of(at: float) -> int:
    return int(at // SLOT_S)
