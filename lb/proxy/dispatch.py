"""What requests use to find a target: the table, the queue, pools, retries, and what is known of engines and peers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from lb.core.failures import BLAME, Failure
from lb.core.hop import RequestHop
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
from lb.engines.kinds import EngineKind, kind_named
from lb.http.messages import Reader
from lb.http.upstream import Pools
from lb.proxy.account import Account
from lb.proxy.fast_path import FastPath
from lb.proxy.home_finder import HomeFinder
from lb.proxy.registry import RequestRegistry, Waiting
from lb.stream.model_name import names_model

TROUBLE_EVERY_S: Final = 10.0  # at least, between two warnings of one kind

_log = logging.getLogger("lb.proxy")


class Engines(NamedTuple):
    """What is known of engines, and how to find out more. Each of the callables returns at once."""

    kind_of: Callable[[Key], EngineKind]
    wrong_model: Callable[[Key], None]  # a target has responded that it does not know a model
    missing_model: Callable[[], None]  # a request was for a model that no target serves


class Dispatch:
    """The way to targets, which all requests of one agent share."""

    def __init__(
        self,
        registry: RequestRegistry,
        pools: Pools,
        account: Account,
        engines: Engines,
        rng: random.Random,
        homes: HomeFinder,
        fast_path: FastPath | None = None,
    ) -> None:
        self.registry = registry
        self.table = registry.table
        self.forwarding = registry.forwarding
        self.pools = pools
        self.homes = homes
        self.runtime = registry.runtime
        self.fast_path = fast_path
        self.kind_of = engines.kind_of
        self.missing_model = engines.missing_model
        self.retries = Retries(self.table, account.arrivals, rng, engines.wrong_model)
        self.limits = self.table.table.limits
        self.heads = Reader()
        self._account = account
        self._trouble_at = float("-inf")

    # --- engines

    def kind_of_id(self, target_id: str) -> EngineKind:
        """Return the kind of engine of a target of the table, as far as it is known."""
        key = self.table.key(target_id)
        return EngineKind.UNKNOWN if key is None else self.kind_of(key)

    def kind_of_booking(self, booking: Booking) -> EngineKind:
        """Return the kind of engine that will have the request. A booking at a peer has that of the peer's replicas."""
        forwarding = self.forwarding
        if forwarding is not None and forwarding.owns(booking) and forwarding.engine(booking.key.id):
            return kind_named(forwarding.engine(booking.key.id))
        return self.kind_of(booking.key)

    # --- attempts

    def may_wait(self, request: Waiting, hop: RequestHop, now: float) -> bool:
        """Return whether a request that a peer has forwarded may wait here."""
        registry, forwarding = self.registry, self.forwarding
        if forwarding is None:
            return True
        soon = forwarding.starts_soon(request.view, len(registry.queue), now, request.tried)
        self._account.metrics.peers.of(hop.peer).refusals += not soon
        return soon

    def responded(self, booking: Booking, now: float, status: int) -> None:
        """The target has sent the first byte of a response that the client gets."""
        registry = self.registry
        if registry.table_of(booking).responded(booking, now, status):
            _log.info("readmit target=%s why=%r", booking.key.id, "it responded again")
            registry.changed_soon()
        elif len(registry.queue):
            registry.let_in_soon()  # a first byte shows that its engine had room

    def failed(self, booking: Booking, failure: Failure, why: str, now: float) -> None:
        """Blame the target of a failed attempt, as far as it is to blame."""
        counts = self._account.counts_of(booking)
        counts.failures[failure.value] += 1
        if failure is Failure.REFUSED:
            self.registry.table_of(booking).refused(booking, now)
        if self.registry.table_of(booking).failed(booking, BLAME[failure], now):
            counts.ejections += 1
            _log.warning("eject target=%s why=%r", booking.key.id, f"{failure.value}: {why}")
            self.registry.changed_soon()

    def release(self, booking: Booking, now: float, tokens: int | None = None) -> None:
        """Free the place of an attempt that is over; a queued request may find room now."""
        registry = self.registry
        self._account.counts_of(booking).duration.observe(now - booking.since)
        if len(registry.queue):
            registry.let_in_soon()
        registry.table_of(booking).release(booking, now, tokens)

    def local_trouble(self, why: str, now: float) -> None:
        """Count a connect that failed because this host ran out of something, and warn of it."""
        self._account.metrics.counts.local_failures += 1
        if now - self._trouble_at >= TROUBLE_EVERY_S:
            self._trouble_at = now
            _log.warning(
                "cannot open connections to targets why=%r clients=%d: raise the limit of open files (ulimit -n) or "
                "start more agents; targets are not blamed",
                why,
                len(self.runtime.clients),
            )

    # --- the table

    def applied(self) -> None:
        """Take up a new table, which is in force. The caller calls `registry.changed` afterwards."""
        table = self.table.table
        self.limits = table.limits
        self.heads = Reader()  # which remembers what was accepted under other limits
        self.retries.applied()
        peers = () if self.forwarding is None else self.forwarding.peer_table.table.targets
        self.pools.retain({target.url for target in (*table.targets, *peers)})


MOST_WRONG_MODELS = 8  # targets that may refuse one request because they do not know its model


class Retries:
    """The rules and the budget of retries, which all requests share."""

    def __init__(
        self,
        table: TargetTable,
        arrivals: WindowCounter,
        rng: random.Random,
        wrong_model: Callable[[Key], None],
    ) -> None:
        """`wrong_model` is called where a target responds that it does not know a model."""
        self._wrong_model = wrong_model
        self._table = table
        self._rng = rng
        self._budget = RetryBudget(table.table.retries, arrivals)

    @property
    def refused(self) -> int:
        """How many retries the budget has refused."""
        return self._budget.refused

    def applied(self) -> None:
        """Take up the rules of a new table, which is in force."""
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
        """Return True if a target's 404 means that it lacks the request's model, and another target may serve that.

        The engine has done nothing then, so any request may be sent again. What is known of the target's models is wrong or
        missing, so they are polled.
        """
        if booking is None or not names_model(body, model):
            return False
        self._wrong_model(booking.key)
        may_move = tries.replayable and tries.attempts <= MOST_WRONG_MODELS
        return may_move and self._table.models.served_elsewhere(model, tries.epochs)

    def delay_s(self, verdict: RetryVerdict, tries: Tries, epoch: int) -> float:
        """Return how long to wait before the attempt that a verdict allows, and let `tries` use the same target if it says so.

        `epoch` is that of the target that failed.
        """
        if verdict is RetryVerdict.SAME_TARGET and tries.attempts_on_rest:
            tries.epochs = ()  # the target where the stream broke may be as good as the last one by now
        elif verdict is RetryVerdict.SAME_TARGET:
            tries.forgive(epoch)
        retry = max(tries.executions, tries.attempts_on_rest)  # attempts that reached no target count, too
        return backoff_s(self._table.table.retries, retry, self._rng)
