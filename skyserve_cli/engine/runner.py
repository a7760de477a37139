"""The engine model on a real clock: the only place that waits.

Virtual time is the clock since the start, times `speed`. The runner begins an iteration at the exact end of
the one before, sleeps until it is due and hands out its tokens. Sleeps shorter than a millisecond are not slept but
saved up (the virtual end runs ahead by that much at most), so a high speed costs model time, not timers. Without
work it waits for a submission and nothing else: an idle engine uses no CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyserve_cli.engine.errors import EngineDown
from skyserve_cli.engine.metrics import Telemetry
from skyserve_cli.engine.model import EngineModel, FinishReason, Request, RequestRefused, TokenOutput

_SHORTEST_SLEEP_S = 0.001
# A machine that cannot keep up (or a stopped process) slips in time instead of bursting to catch up.
_LONGEST_LAG_S = 0.1


class Mailbox:
    """Where the tokens of one call arrive. `take` returns all that have come since the last time."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)
        self._outputs: list[TokenOutput] = []
        self._arrived = asyncio.Event()
        self._failure: EngineDown | None = None

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, failure: EngineDown) -> None:
        self._failure = failure
        self._arrived.set()

    async def take(self) -> list[TokenOutput]:
        """At least one token. Raises EngineDown if no more will come."""
        await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        if self._failure is None:
            self._arrived.clear()
        elif not outputs:
            raise self._failure
        return outputs


@dataclass(slots=True)
class _Delivery:
    mailbox: Mailbox
    submitted_at: float
    last_token_at: float | None = None


class EngineRunner:
    """Drives one model. All methods belong to the event loop that `start` was called on."""

    def __init__(
        self, model: EngineModel, telemetry: Telemetry, speed: float, clock_s: Callable[[], float]
    ) -> None:
        """`clock_s` is monotonic and never cached: uvloop's own stands still while a callback runs."""
        if speed <= 0:
            raise ValueError(f"speed must be above 0 (got {speed:g})")
        self._model = model
        self._telemetry = telemetry
        self._speed = speed
        self._clock_s = clock_s
        self._deliveries: dict[str, _Delivery] = {}
        self._cursor = 0.0  # virtual end of the last iteration
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineDown | None = None
        self.on_iteration: Callable[[], None] | None = None  # called after each

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._origin = self._yielded_at = self._clock_s()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def alive(self) -> bool:
        return self._failure is None

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        """Submit the requests of one call together. Raises RequestRefused, and EngineDown if the loop died."""
        if self._failure is not None:
            raise self._failure
        mailbox = Mailbox([request.id for request in requests])
        now = self._clock_s()
        for position, request in enumerate(requests):
            try:
                self._model.submit(request, (now - self._origin) * self._speed)
            except RequestRefused:
                for accepted in requests[:position]:
                    self._forget(accepted.id, FinishReason.ABORT)
                raise
            self._deliveries[request.id] = _Delivery(mailbox, now)
        self._work.set()
        return mailbox

    def finish_early(self, request_id: str) -> None:
        """The client has what it wants of this request: free its blocks now."""
        self._forget(request_id, FinishReason.STOP)

    def close(self, mailbox: Mailbox) -> None:
        """The reader of this mailbox is gone: abort the rest of its requests."""
        for request_id in mailbox.ids:
            self._forget(request_id, FinishReason.ABORT)

    def _forget(self, request_id: str, reason: FinishReason) -> None:
        self._model.abort(request_id, reason)
        self._deliveries.pop(request_id, None)

    async def _run(self) -> None:
        model = self._model
        while True:
            begins_at = model.wakes_at(self._cursor)
            if begins_at is None:
                self._work.clear()
                await self._work.wait()
                continue
            await self._until(begins_at)
            self._cursor = begins_at + model.begin(begins_at)
            await self._until(self._cursor)
            outputs = model.finish()
            if self.on_iteration is not None:
                self.on_iteration()
            self._deliver(outputs)

    async def _until(self, moment: float) -> None:
        """Wait for a virtual moment, if it is worth a timer; let others run in any case."""
        now = self._clock_s()
        due = self._origin + moment / self._speed
        if due - now >= _SHORTEST_SLEEP_S:
            await asyncio.sleep(due - now)
            self._yielded_at = self._clock_s()
            return
        self._origin += max(0.0, now - due - _LONGEST_LAG_S)
        if now - self._yielded_at >= _SHORTEST_SLEEP_S:
            await asyncio.sleep(0)
            self._yielded_at = self._clock_s()

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        now = self._clock_s()
        for output in outputs:
            delivery = self._deliveries.get(output.request_id)
            if delivery is None:
                continue
            if delivery.last_token_at is None:
                self._telemetry.first_token.observe(now - delivery.submitted_at)
            else:
                self._telemetry.token_gap.observe(now - delivery.last_token_at)
            delivery.last_token_at = now
            if output.finish is not None:
                self._telemetry.whole_request.observe(now - delivery.submitted_at)
                del self._deliveries[output.request_id]
            delivery.mailbox.put(output)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The loop is over: by `stop`, or by a defect, which every caller must see."""
        error = None if task.cancelled() else task.exception()
        self._failure = EngineDown(
            "the engine has stopped" if error is None else f"the engine died: {error!r}"
        )
        for delivery in self._deliveries.values():
            delivery.mailbox.fail(self._failure)
        if error is not None:
            self._loop.call_exception_handler(
                {"message": "the engine loop died", "exception": error, "task": task}
            )
