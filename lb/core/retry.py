"""May a failed request be tried again? Rules for one request, a budget for all of them. Pure.

*One request.* What counts is an attempt that *may have started to run*: a generation that costs a GPU seconds is not
started four times because its targets die. An attempt whose connection could not be made costs nothing and is not
counted. A target that has not failed the request always goes before one that has.

*All requests.* Retries are at most a share of recent requests, plus a minimum for quiet hours (a retry budget,
as Finagle's and Envoy's have it): when everything fails, retries must not multiply the load. A request that was on a target
that died goes elsewhere outside of it, once: a replica takes hundreds with it in one moment, and they are no new load.

SGLang's router bounds `max_worker_retries` on one worker and `max_total_retries` in all; both are here by these
names. It tries the same worker again before others; we go elsewhere first, because a spot instance that failed is
more likely gone than busy.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Final, NamedTuple

from lb.config.options import Retries
from lb.core.sliding_window import WindowCounter
from policies.backoff import delay_s

BUDGET_WINDOW_S: Final = 10.0
MAX_DEATHS: Final = 2  # targets that may die on one request before its first byte
# The same for the rest of a stream: its request has run well once, so a cut connection is more likely than a fatal request.
MAX_DEATHS_OF_A_REST: Final = 3
# Attempts on the rest of a stream, on targets that have failed it, too: its client waits, and what cut it may be over by now.
MAX_ATTEMPTS_ON_A_REST: Final = 6

_SAFE_METHODS: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class RetryVerdict(str, Enum):
    """The verdict on a request whose attempt has failed before its first byte, and why."""

    ELSEWHERE = "elsewhere"  # on a target that has not failed it
    SAME_TARGET = "same target"  # no other is left, and this one may be tried again
    NO_TARGET_LEFT = "no target left"  # it may be tried again, but there is no target: hold it
    TOO_OFTEN = "too often"  # it has been started as often as it may
    TOO_SLOW = "too slow"  # it has cost two targets too much time already
    KILLS_TARGETS = "kills targets"  # two targets died on it: a third is not given to it
    NOT_REPEATABLE = "not repeatable"  # it was sent, and doing it twice may do harm
    OVER_BUDGET = "over budget"  # too many are being tried again; decided by the budget, never by the rules

    @property
    def goes_on(self) -> bool:
        return self in (RetryVerdict.ELSEWHERE, RetryVerdict.SAME_TARGET, RetryVerdict.NO_TARGET_LEFT)


class RetryHistory(NamedTuple):
    """What has become of a request so far, the attempt that has just failed included.

    `started` attempts may have started to run, the longest for `longest_s` seconds. `on_target` were made on the target
    that has just failed; `reached` is false if no connection to it could be made, `died` true if the one there was ended.
    `deaths` targets died on it in a row. `repeatable` requests may run twice (see `is_repeatable`). `attempts_on_rest` were made on
    the rest of a stream; 0 if the client has nothing of the response.
    """

    started: int
    on_target: int
    reached: bool
    longest_s: float
    died: bool = False
    deaths: int = 0
    repeatable: bool = True
    attempts_on_rest: int = 0


def may_retry(history: RetryHistory, rules: Retries, others: bool) -> RetryVerdict:
    """Return the verdict of the rules; `others`: whether there is a target that has not failed the request."""
    if history.reached and not history.repeatable:
        return RetryVerdict.NOT_REPEATABLE
    if history.deaths >= (MAX_DEATHS_OF_A_REST if history.attempts_on_rest else MAX_DEATHS):
        return RetryVerdict.KILLS_TARGETS
    if history.started > rules.max_total_retries:
        return RetryVerdict.TOO_OFTEN
    if history.started >= 2 and history.longest_s >= rules.slow_after_s:
        return RetryVerdict.TOO_SLOW
    if others:
        return RetryVerdict.ELSEWHERE
    if history.on_target <= rules.max_worker_retries or 0 < history.attempts_on_rest < MAX_ATTEMPTS_ON_A_REST:
        return RetryVerdict.SAME_TARGET
    return RetryVerdict.NO_TARGET_LEFT


def is_repeatable(method: bytes, for_model: bool, idempotency_key: bool) -> bool:
    """Return True if a request may be sent again after a target has read it and has not responded.

    Reading twice is harmless, a generation that no client saw costs GPU time at most, and with an `Idempotency-Key` the server
    promises to do it once. Anything else (uploads, deletions, a user's own application) might happen twice.
    """
    return for_model or idempotency_key or method in _SAFE_METHODS


def is_free(history: RetryHistory) -> bool:
    """Return whether it is outside the budget.

    After a refused connection, since no engine has worked for that attempt, and the first time that a target fails.
    """
    return not history.reached or (history.died and history.started <= 1)


def backoff_s(rules: Retries, retry: int, rng: random.Random) -> float:
    """Return seconds to wait before retry number `retry` (from 1). The first is immediate."""
    if retry <= 1:
        return 0.0
    full_s = delay_s(retry - 1, rules.backoff_s, rules.max_backoff_s)
    return full_s * (1.0 - rules.jitter * rng.random())


class Tries:
    """What has become of one request so far: where it has been, how often it may have run, how long it may still wait.

    `epochs` are of the targets of its attempts, one for each (see `lb.core.target_state`); those in it have failed the request.
    `executions` are attempts that may have started to run. `replayable` is false once part of a body that is not kept has been
    sent.
    """

    __slots__ = (
        "attempts",
        "attempts_before_rest",
        "deaths",
        "epochs",
        "executions",
        "failed",
        "longest_s",
        "queue_left_s",
        "repeatable",
        "replayable",
        "stale",
        "wait_left_s",
        "was_queued",
    )

    def __init__(self, repeatable: bool, wait_left_s: float, queue_left_s: float) -> None:
        self.repeatable = repeatable
        self.wait_left_s = wait_left_s  # to the first byte, over all attempts
        self.queue_left_s = queue_left_s
        self.epochs: tuple[int, ...] = ()
        self.attempts = 0
        self.executions = 0
        self.deaths = 0
        self.longest_s = 0.0  # of the attempts that failed
        self.failed = False
        self.attempts_before_rest: int | None = None
        self.stale = False  # a reused connection was stale
        self.was_queued = False
        self.replayable = True

    def begin(self, epoch: int) -> None:
        """Count the start of an attempt on a target."""
        self.epochs += (epoch,)
        self.attempts += 1

    def forgive(self, epoch: int) -> None:
        """Let the target be chosen again as if no attempt on it had been made."""
        self.epochs = tuple(other for other in self.epochs if other != epoch)

    @property
    def attempts_on_rest(self) -> int:
        """How many attempts were made since the stream broke; 0 if there is none."""
        return 0 if self.attempts_before_rest is None else self.attempts - self.attempts_before_rest

    def may_move(self) -> bool:
        """Return True if an attempt that has been sent may be given up for another."""
        return self.replayable and self.repeatable

    def after(self, *, reached: bool, died: bool, ran_s: float, epoch: int) -> RetryHistory:
        """Return what the rules of a retry need to know after an attempt of `ran_s` seconds has failed."""
        self.failed = True
        self.longest_s = max(self.longest_s, ran_s)
        if died:
            self.deaths += 1
        on_target = self.epochs.count(epoch)
        return RetryHistory(
            self.executions,
            on_target,
            reached,
            self.longest_s,
            died,
            self.deaths,
            self.repeatable,
            self.attempts_on_rest,
        )

    def resume(self, wait_left_s: float, queue_left_s: float) -> None:
        """A stream that broke goes on: what its request went through before its first byte no longer counts."""
        self.attempts_before_rest = self.attempts
        self.executions = self.deaths = 0
        self.longest_s = 0.0
        self.wait_left_s, self.queue_left_s = wait_left_s, queue_left_s


class RetryBudget:
    """One agent's. `requests` counts what arrives and belongs to the caller; `rules` may be replaced."""

    def __init__(self, rules: Retries, requests: WindowCounter) -> None:
        self.rules = rules
        self.refused = 0  # ever
        self._requests = requests
        self._retries = WindowCounter()

    def allow(self, now: float) -> bool:
        """Return whether one more retry is within the budget; if so, it has been spent."""
        floor = self.rules.budget_floor_per_s * BUDGET_WINDOW_S
        limit = floor + self.rules.budget_ratio * self._requests.count(now, BUDGET_WINDOW_S)
        if self._retries.count(now, BUDGET_WINDOW_S) + 1 > limit:
            self.refused += 1
            return False
        self._retries.add(now)
        return True
