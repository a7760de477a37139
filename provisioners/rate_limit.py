"""How often a cloud is called: a token bucket for each group of calls that it counts by itself.

Clouds reject callers that call too often, and count the refused calls too, so that a storm feeds itself. We wait for our turn
instead, in the order of coming. Others use the account as well, and limits can be lower than published: a call that is
refused anyway empties our bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock


@dataclass(frozen=True, slots=True)
class Rate:
    """Bounds a burst of calls, and their rate per second in the long run."""

    burst: float
    per_s: float


@dataclass(slots=True)
class TokenBucket:
    """The remaining calls of a rate. Not thread-safe."""

    rate: Rate
    tokens: float = field(init=False)
    told_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = self.rate.burst

    def take(self, now: float) -> float:
        """Take a token; returns in how many seconds it is there. Those who come later wait longer."""
        elapsed = 0.0 if self.told_at is None else max(0.0, now - self.told_at)
        self.tokens = min(self.rate.burst, self.tokens + elapsed * self.rate.per_s) - 1.0
        self.told_at = now
        return max(0.0, -self.tokens / self.rate.per_s)

    def drain(self) -> None:
        """The other side has counted more calls than we have: start from nothing."""
        self.tokens = min(self.tokens, 0.0)


class RateLimiter:
    """The buckets of one account. Thread-safe."""

    def __init__(self, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._now = now
        self._sleep = sleep
        self._buckets: dict[Hashable, TokenBucket] = {}
        self._lock = Lock()

    def take_turn(self, group: Hashable, rate: Rate) -> None:
        """Wait until the next call of the group may be made."""
        with self._lock:
            wait_s = self._buckets.setdefault(group, TokenBucket(rate)).take(self._now())
        if wait_s > 0:
            self._sleep(wait_s)

    def drain(self, group: Hashable) -> None:
        """A call of the group was refused for its number."""
        with self._lock:
            bucket = self._buckets.get(group)
            if bucket is not None:
                bucket.drain()
