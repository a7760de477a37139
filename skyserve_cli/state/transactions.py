"""Which transactions of this process are under way, and until when their results are of use.

Both are in memory, so that a controller can say what it waits for while its database does not respond.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

#: A transaction of this length is slow. Usual ones take milliseconds.
SLOW_S = 2.0


class Transactions:
    """Those of one database. Thread-safe. `now` returns seconds since some instant."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._running: dict[object, tuple[float, str]] = {}  # when each began, and the name of its thread
        self._slow_since: float | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count what happens in this context as one transaction of this thread."""
        key, began = object(), self._now()
        self._running[key] = began, threading.current_thread().name
        try:
            yield
        finally:
            del self._running[key]
            if self._now() - began < SLOW_S:
                self._slow_since = None
            elif self._slow_since is None:
                self._slow_since = began

    def longest_s(self, thread: str | None = None) -> float:
        """Return how long the oldest one has gone on, of all or of those of that thread; 0 if there is none."""
        began = [at for at, name in list(self._running.values()) if thread in (None, name)]
        return self._now() - min(began) if began else 0.0

    def slow_for_s(self) -> float:
        """Return for how long each transaction has been slow; 0 if the last one was not, and none is now."""
        since, longest_s = self._slow_since, self.longest_s()
        return max(longest_s if longest_s >= SLOW_S else 0.0, 0.0 if since is None else self._now() - since)


class DeadlinePassedError(Exception):
    """Who requested this waits no more; nothing was changed."""


class Deadline:
    """Until when the caller of a request waits. What was requested is either stored, or given up: never both.

    The thread that stores calls `begin_commit`, the one that responds to the caller `expire`; the first of them decides.
    """

    def __init__(self, after_s: float, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._until = now() + after_s
        self._lock = threading.Lock()
        self._is_committing = False
        self._is_over = False

    def left_s(self) -> float:
        return max(0.0, self._until - self._now())

    def expire(self) -> bool:
        """Give the request up. Returns False if it is too late for that, because a commit is under way."""
        with self._lock:
            self._is_over = self._is_over or not self._is_committing
            return self._is_over

    def insist(self) -> None:
        """Raise DeadlinePassedError if the request was given up, or should be."""
        if not self._is_committing and not self.left_s():
            self.expire()
        if self._is_over:
            raise DeadlinePassedError

    def begin_commit(self) -> None:
        """Raise DeadlinePassedError if the request was given up."""
        self.insist()
        with self._lock:
            if self._is_over:
                raise DeadlinePassedError
            self._is_committing = True


#: Of the request that is being served. Threads of `asyncio.to_thread` have it too.
_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def set_deadline(deadline: Deadline | None) -> None:
    _deadline.set(deadline)


def deadline() -> Deadline | None:
    return _deadline.get()
