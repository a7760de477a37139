"""May a failed request be tried again? Rules for one request, a budget for all of them. Pure.

*One request.* What counts is an attempt that *may have begun to run*: a generation that costs a GPU seconds is not
begun four times because its targets die. An attempt whose connection could not be made costs nothing and is not
counted. A target that has not failed the request always goes before one that has.

*All requests.* Retries are at most a share of the requests of late, plus a floor for the quiet hours (a retry budget,
as Finagle's and Envoy's have it): when everything fails, retries must not multiply the load. Whoever was on a target
that died goes elsewhere outside of it, once: a replica takes hundreds with it in one moment, and they are no new load.

SGLang's router bounds `max_worker_retries` on one worker and `max_total_retries` in all; both are here by these
names. It tries the same worker again before others; we go elsewhere first, because a spot instance that failed is
more likely gone than busy.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import NamedTuple

from lb.config.options import Retries
from lb.core.sliding_window import WindowCounter

BUDGET_WINDOW_S = 10.0


class Verdict(str, Enum):
    """What is to be done with a request whose attempt has failed before its first byte, and why."""

    ELSEWHERE = "elsewhere"  # on a target that has not failed it
    SAME_TARGET = "same target"  # nobody else is left, and this one may be tried again
    NOBODY_LEFT = "nobody left"  # it may be tried again, but there is no target: hold it
    TOO_OFTEN = "too often"  # it has been begun as often as it may
    TOO_SLOW = "too slow"  # it has cost two targets too much time already
    OVER_BUDGET = "over budget"  # too many are being tried again; said by the budget, never by the rules

    @property
    def goes_on(self) -> bool:
        return self in (Verdict.ELSEWHERE, Verdict.SAME_TARGET, Verdict.NOBODY_LEFT)


class RetryHistory(NamedTuple):
    """What has become of a request so far, the attempt that has just failed included.

    `begun` attempts may have begun to run, the longest for `longest_s` seconds. `on_target` were made on the target
    that has just failed; `reached` is false if no connection to it could be made, `died` true if the one there was ended.
    """

    begun: int
    on_target: int
    reached: bool
    longest_s: float
    died: bool = False


def may_retry(story: RetryHistory, rules: Retries, others: bool) -> Verdict:
    """The verdict of the rules; `others` tells whether there is a target that has not failed the request."""
    if story.begun > rules.max_total_retries:
        return Verdict.TOO_OFTEN
    if story.begun >= 2 and story.longest_s >= rules.slow_after_s:
        return Verdict.TOO_SLOW
    if others:
        return Verdict.ELSEWHERE
    if story.on_target <= rules.max_worker_retries:
        return Verdict.SAME_TARGET
    return Verdict.NOBODY_LEFT


def is_free(story: RetryHistory) -> bool:
    """Whether it is outside the budget: after a refused connection, for nobody has worked for that attempt, and the
    first time that a target dies."""
    return not story.reached or (story.died and story.begun <= 1)


def backoff_s(rules: Retries, retry: int, rng: random.Random) -> float:
    """Seconds to wait before retry number `retry` (from 1). The first is immediate."""
    if retry <= 1:
        return 0.0
    full_s = min(rules.max_backoff_s, rules.backoff_s * 2.0 ** min(retry - 2, 60))
    return full_s * (1.0 - rules.jitter * rng.random())


class RetryBudget:
    """One agent's. `requests` counts what arrives and belongs to the caller; `rules` may be replaced."""

    def __init__(self, rules: Retries, requests: WindowCounter) -> None:
        self.rules = rules
        self.refused = 0  # ever
        self._requests = requests
        self._retries = WindowCounter()

    def allow(self, now: float) -> bool:
        """Whether one more retry is within the budget; if so, it has been spent."""
        floor = self.rules.budget_floor_per_s * BUDGET_WINDOW_S
        limit = floor + self.rules.budget_ratio * self._requests.count(now, BUDGET_WINDOW_S)
        if self._retries.count(now, BUDGET_WINDOW_S) + 1 > limit:
            self.refused += 1
            return False
        self._retries.add(now)
        return True
