"""Whether a failed request is tried again, and when: the rules, the budget and the models of one agent, in one place."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from lb.core.retry import (
    RetryBudget,
    RetryHistory,
    RetryVerdict,
    Tries,
    backoff_s,
    is_free,
    may_retry,
)
from lb.core.sliding_window import WindowCounter
from lb.core.targets import Booking, Key, TargetTable
from lb.stream.model_name import names_model

MOST_WRONG_MODELS = 8  # targets that may refuse one request because they do not know its model


class Retries:
    """Shared by all requests."""

    def __init__(
        self,
        table: TargetTable,
        arrivals: WindowCounter,
        rng: random.Random,
        wrong_model: Callable[[Key], None],
    ) -> None:
        """Call `wrong_model` where a target responds that it does not know a model."""
        self._wrong_model = wrong_model
        self._table = table
        self._rng = rng
        self._budget = RetryBudget(table.table.retries, arrivals)

    @property
    def refused(self) -> int:
        """How many retries the budget has refused."""
        return self._budget.refused

    def applied(self) -> None:
        """A new table is in force."""
        self._budget.rules = self._table.table.retries

    def verdict(
        self, history: RetryHistory, tried: Collection[int], replayable: bool, now: float
    ) -> RetryVerdict:
        """Return whether and where a failed request may be tried again, by the rules and the budget.

        `tried` are the epochs of targets that have had it, `replayable` whether its body is still there.
        """
        verdict = may_retry(history, self._table.table.retries, self._table.has_candidate(now, tried))
        if verdict.goes_on and not replayable:
            return RetryVerdict.NOT_REPEATABLE
        if verdict.goes_on and not is_free(history) and not self._budget.allow(now):
            return RetryVerdict.OVER_BUDGET
        return verdict

    def serves_other_models(self, booking: Booking | None, model: str, tries: Tries, body: bytes) -> bool:
        """Return True if the 404 of a request's target means its model, and another target may serve that.

        The engine has done nothing then, so any request may be sent again. Which models the target serves is
        not known rightly, or not yet: it is polled.
        """
        if booking is None or not names_model(body, model):
            return False
        self._wrong_model(booking.key)
        may_move = tries.replayable and tries.attempts <= MOST_WRONG_MODELS
        return may_move and self._table.models.served_elsewhere(model, tries.epochs)

    def delay_s(self, verdict: RetryVerdict, tries: Tries, epoch: int) -> float:
        """Return how long to wait before the attempt that a verdict allows. `epoch` is the target's that failed."""
        if verdict is RetryVerdict.SAME_TARGET and tries.attempts_on_rest:
            tries.epochs = ()  # the one where the stream broke may be as good as the last one by now
        elif verdict is RetryVerdict.SAME_TARGET:
            tries.forgive(epoch)
        retry = max(tries.executions, tries.attempts_on_rest)  # those that did not reach a target, too
        return backoff_s(self._table.table.retries, retry, self._rng)
