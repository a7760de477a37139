"""How often a cloud lets itself be called, how long its responses take, and how many it is asked for at once: the same for
every make-believe cloud. Nothing is limited, and no one waits, unless a test sets a limit."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Limits:
    """`rates` are token buckets (burst, per second) by groups of calls, of each scope (a region, say) its own. `answer_s`:
    real seconds, drawn again for each call."""

    now: Callable[[], float]
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    answer_s: tuple[float, float] = (0.0, 0.0)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    under_way: int = 0
    most_under_way: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by group
    refused: Counter[str] = field(default_factory=Counter)
    _buckets: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def call(self, group: str, scope: str = "") -> Iterator[bool]:
        """Around the response to a call: whether the call is served, or refused for the number of calls."""
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.calls[group] += 1
            is_let_in = self._take(group, scope)
            self.refused[group] += not is_let_in
            wait_s = self.rng.uniform(*self.answer_s)
        try:
            if wait_s:
                time.sleep(wait_s)
            yield is_let_in
        finally:
            with self._lock:
                self.under_way -= 1

    def _take(self, group: str, scope: str) -> bool:
        if group not in self.rates:
            return True
        burst, per_s = self.rates[group]
        left, told_at = self._buckets.get((group, scope), (burst, self.now()))
        left = min(burst, left + (self.now() - told_at) * per_s)
        self._buckets[group, scope] = (left - 1 if left >= 1 else left, self.now())
        return left >= 1
