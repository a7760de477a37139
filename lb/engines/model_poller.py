"""Polls `GET /v1/models` of each target, so that requests are routed by the model they name.

A target is polled at once when it joins, when it is readmitted after an ejection and (at most once a second) when it
responds that it does not know a model. In calm times it is polled about every POLL_EVERY_S, each target at times of its own.

A response that is no list of models means that the target lists none, and is treated as if there were no lists. A target
that does not respond, or responds that it is not able to now, changes nothing: what was known of it stays.

Targets wait in a heap for their next poll, so that the work grows with the number of polls; all targets are gone through
only when one of them has joined, left or been readmitted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lb.config.schema import Target
from lb.core.models import read_models
from lb.core.target_state import Key
from lb.core.targets import TargetTable
from lb.engines.kinds import Fetched
from policies.backoff import delay_s

PATH = "/v1/models"
POLL_EVERY_S = 30.0
POLL_UNLISTED_EVERY_S = 120.0  # a target that lists no models
POLLS_PER_S = 20.0  # in calm times: where targets are many, each is polled less often
RETRY_S = 0.25  # a target that has not responded; doubling up to POLL_EVERY_S
AGAIN_AFTER_S = 1.0  # a target that is requested
ALL_AGAIN_AFTER_S = 5.0  # all targets, after a request for a model that none of them lists
TIMEOUT_S = 5.0
MOST_AT_ONCE = 64
CHECK_EVERY_S = 0.2
_JITTER = 0.2
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over an interval, however many there are

Fetch = Callable[[Target, str, float], Awaitable[Fetched]]
"""GET a path of a target within the given seconds. Raises OSError or asyncio.TimeoutError; bounds the body."""

_log = logging.getLogger("lb.engines.model_poller")


@dataclass(slots=True, eq=False)
class _PolledModels:
    """Results of the polls of one target."""

    key: Key
    target: Target
    place: float  # 0 to 1: where in the jitter its polls are
    epoch: int
    due_at: float
    polled_at: float = -math.inf
    failed: int = 0  # polls in a row without a response
    poll: asyncio.Task[None] | None = None


class ModelPoller:
    """Goes over the targets; every poll is a task of its own, one per target at a time.

    `changed` is called when a queued request may find a target that it could not find before.
    """

    def __init__(
        self, table: TargetTable, fetch: Fetch, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._table = table
        self._fetch = fetch
        self._clock = clock
        self._changed = changed
        self._watches: dict[Key, _PolledModels] = {}
        self._due: list[
            tuple[float, float, _PolledModels]
        ] = []  # a heap; void are rows with another `due_at`
        self._reviewed = -1  # the state of the directory
        self._seen = 0
        self._all_again_at = -math.inf
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def close(self) -> None:
        """Stop the polls that are under way."""
        polls = [watch.poll for watch in self._watches.values() if watch.poll is not None]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    def wrong_model(self, key: Key) -> None:
        """A target has responded that it does not know a model: poll it at once, but at most once a second."""
        watch = self._watches.get(key)
        if watch is not None:
            self._put(watch, min(watch.due_at, watch.polled_at + AGAIN_AFTER_S))
            self.poll_due()

    def missing_model(self) -> None:
        """No target lists the model of a request: one of them may do so by now."""
        now = self._clock()
        if now < self._all_again_at:  # clients may request it all the time
            return
        self._all_again_at = now + AGAIN_AFTER_S
        for watch in self._watches.values():
            self._put(watch, min(watch.due_at, watch.polled_at + ALL_AGAIN_AFTER_S))

    def poll_due(self) -> None:
        """Start the polls that are due. Called every CHECK_EVERY_S, and when another table is in force."""
        now = self._clock()
        if self._reviewed != self._table.models.changes:
            self._reviewed = self._table.models.changes
            self._review(now)
        while self._due and self._due[0][0] <= now:
            due_at, _, watch = heappop(self._due)
            if watch.due_at == due_at and watch.poll is None:
                self._start(watch, now)

    # --- inside

    def _review(self, now: float) -> None:
        """Go through all targets."""
        before = self._watches
        self._watches = {}
        for key, target, epoch in self._table.models.targets():
            watch = before.pop(key, None) or self._new_watch(key, target, epoch, now)
            self._watches[key] = watch
            watch.target = target
            if watch.epoch != epoch:  # it has been readmitted
                watch.epoch, watch.due_at = epoch, now
        self._due = [(watch.due_at, watch.place, watch) for watch in self._watches.values()]
        heapify(self._due)
        for watch in before.values():
            if watch.poll is not None:
                watch.poll.cancel()

    def _new_watch(self, key: Key, target: Target, epoch: int, now: float) -> _PolledModels:
        self._seen += 1
        return _PolledModels(key, target, self._seen * _GOLDEN % 1.0, epoch, now)

    def _put(self, watch: _PolledModels, due_at: float) -> None:
        if due_at != watch.due_at:
            watch.due_at = due_at
            heappush(self._due, (due_at, watch.place, watch))

    def _start(self, watch: _PolledModels, now: float) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            watch.poll = None
            if self._watches.get(watch.key) is watch:
                heappush(self._due, (watch.due_at, watch.place, watch))
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("poll of the models of target=%s failed", watch.key.id, exc_info=error)

        watch.polled_at, watch.due_at = now, math.inf
        watch.poll = asyncio.get_running_loop().create_task(self._poll(watch))
        watch.poll.add_done_callback(ended)

    async def _poll(self, watch: _PolledModels) -> None:
        async with self._at_once:
            fetched = await self._get(watch.target)
        now = self._clock()
        if fetched is None:
            watch.failed += 1
            watch.due_at = min(watch.due_at, now + delay_s(watch.failed, RETRY_S, POLL_EVERY_S))
            return
        watch.failed = 0
        models = read_models(fetched.body) if fetched.status == 200 else None
        every_s = max(
            POLL_UNLISTED_EVERY_S if models is None else POLL_EVERY_S, len(self._watches) / POLLS_PER_S
        )
        watch.due_at = min(watch.due_at, now + every_s * (1.0 + _JITTER * (2.0 * watch.place - 1.0)))
        if self._table.listed(watch.key, models):
            _log.info(
                "models target=%s names=%s", watch.key.id, sorted(models.names) if models is not None else ()
            )
            self._changed()

    async def _get(self, target: Target) -> Fetched | None:
        """Return None if the target listed nothing."""
        try:
            fetched = await self._fetch(target, PATH, TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041  (two classes in Python 3.10)
            return None
        busy = fetched.status == 429 or (fetched.status >= 500 and fetched.status != 501)
        return None if busy else fetched
