"""The life of a request: arrive, be read, be sent to targets until one answers, be relayed.

Before the first byte a request is ours: whatever happens to a target, it goes to another, never to one that
has failed it. It is called back at once when the table says its target is lost, or when the target falls
silent (`lb.health`) and a better one exists. With no target left to try it is held, and counted as demand.
After the first byte it belongs to the target that began to answer.

Limits (`lb.wire.Limits`) bound everything: the body, the attempts, the time to the first byte over all of them,
the time and number of the held, the silence within an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from lb import answers, websocket
from lb.explain import Explanation, Explanations
from lb.headers import sane_request_id, to_target
from lb.intake import RefusedError, begins_websocket, origin_form, read_body
from lb.metrics import Metrics
from lb.queue import HoldQueue
from lb.relay import send_stream, send_whole
from lb.targets import Blame, Booking, Key, Outlook, Standing, TargetTable
from lb.upstream import RETRY_STATUSES, Answer, Failure, Upstream, UpstreamError, close_websocket
from lb.window import WindowCounter, WindowMean
from lb.wire import Limits, Target
from policies.routing.base import RequestView

RETRY_AFTER_S = 5

_log = logging.getLogger("lb.proxy")
_BLAME = {
    Failure.UNREACHABLE: Blame.EJECT,
    Failure.DIED: Blame.EJECT,
    Failure.STALE: Blame.NONE,
    Failure.IDLE: Blame.TROUBLE,
    Failure.MALFORMED: Blame.NONE,
}
_Opened = Answer | aiohttp.ClientWebSocketResponse


class _Moved(Exception):
    """A waiting attempt was called back."""


class _OutOfTime(Exception):
    """The request's time to first byte is used up."""


@dataclass(slots=True)
class _Exchange:
    """One request on its way. `tried` are the lives (see `lb.targets`) that have had it."""

    view: RequestView
    raw_path: str
    headers: CIMultiDict[str]
    body: bytes
    limits: Limits
    story: Explanation
    arrived_at: float
    wait_left_s: float
    hold_left_s: float
    websocket: bool
    tried: set[int] = field(default_factory=set)
    attempts: int = 0
    executions: int = 0  # attempts that may have begun to run
    stale: Key | None = None  # failed only because a reused connection was stale
    refusal: Answer | None = None  # the last 502, 503 or 504 of a target
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    """An attempt without its first byte; setting `moved` calls it back."""

    booking: Booking
    exchange: _Exchange
    moved: asyncio.Future[str]


@dataclass(slots=True, eq=False)
class _Held:
    """A request without a target; `admitted` tells whether one has come."""

    exchange: _Exchange
    admitted: asyncio.Future[bool]

    def settle(self, admitted: bool) -> None:
        if not self.admitted.done():  # its client may have left in this very turn of the loop
            self.admitted.set_result(admitted)


class Proxy:
    """The data plane of one agent. `handle` is an aiohttp handler; `changed` must be called after the table
    has been changed by others."""

    def __init__(
        self,
        table: TargetTable,
        upstream: Upstream,
        metrics: Metrics,
        clock: Callable[[], float],
        id_prefix: str,
    ) -> None:
        self._table = table
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._id_prefix = id_prefix
        self._request_number = 0
        self._waiting: set[_Waiting] = set()  # attempts without their first byte
        self._queue: HoldQueue[_Held] = HoldQueue()
        self._closed = False
        self.explanations = Explanations()
        self.arrivals = WindowCounter()
        self.rejections = WindowCounter()
        self.ongoing = WindowMean(clock())  # in flight or held

    @property
    def held(self) -> int:
        return len(self._queue)

    def close(self) -> None:
        """Hold nobody any longer: who waits for a target is turned away."""
        self._closed = True
        for ticket in self._queue.admit(lambda _: True):
            ticket.item.settle(False)

    def changed(self) -> None:
        """The table has changed: call back attempts that wait in vain, let in whom a target can take now."""
        now = self._clock()
        for waiting in self._waiting:
            if waiting.moved.done():
                continue
            outlook = self._table.outlook(waiting.booking, now)
            if outlook is Outlook.LOST:
                waiting.moved.set_result("its target is gone")
            elif outlook is Outlook.DOUBTFUL:
                exchange = waiting.exchange
                standing, _ = self._table.candidates(now, exchange.tried)
                # A server that does one request at a time looks frozen while it works on this very one: without
                # a bound, the request would be begun again and again and keep all of them busy.
                if standing is Standing.GOOD and exchange.executions + 1 < exchange.limits.max_attempts:
                    exchange.executions += 1
                    waiting.moved.set_result("its target is in doubt and another is well")
        for ticket in self._queue.admit(
            lambda held: bool(self._table.candidates(now, held.exchange.tried)[1])
        ):
            ticket.item.settle(True)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request of the data port."""
        raw_path = origin_form(request)
        if raw_path is None:
            return answers.error(400, "bad_request_target", "The request target must be a path.")
        if raw_path.startswith("/-/") or raw_path.split("?", 1)[0] == "/-":
            return answers.error(404, "not_found", "Paths under /-/ are not served on this port.")
        now = self._clock()
        self.arrivals.add(now)
        self._metrics.request()
        try:
            exchange = await self._accept(request, raw_path, now)
            self.ongoing.step(self._clock(), 1)
            try:
                response = await self._serve(request, exchange)
            finally:
                self.ongoing.step(self._clock(), -1)
        except RefusedError as refused:
            response = refused.response
            if request.transport is None:  # it left in the midst of its body, and hears nothing
                self._metrics.client_gone()
                return response
        except asyncio.CancelledError:
            if request.transport is None:
                self._metrics.client_gone()
            raise
        self._metrics.response(response.status)
        return response

    # --- arriving

    async def _accept(self, request: web.BaseRequest, raw_path: str, now: float) -> _Exchange:
        limits = self._table.table.limits
        request_id = sane_request_id(request.headers.get("X-Request-Id")) or self._next_id()
        shakes_hands = begins_websocket(request, request_id)
        body = await read_body(request, limits, request_id)
        headers = to_target(
            request.headers,
            peer=request.remote,
            scheme=request.scheme,
            host=request.headers.get("Host", ""),
            request_id=request_id,
        )
        prompt = body if self._table.needs_prompt else None
        return _Exchange(
            view=RequestView(request_id, request.method, request.path, len(body), prompt),
            raw_path=raw_path,
            headers=headers,
            body=body,
            limits=limits,
            story=self.explanations.begin(request_id, request.method, request.path, now),
            arrived_at=now,
            wait_left_s=limits.time_to_first_byte_s,
            hold_left_s=limits.hold_s,
            websocket=shakes_hands,
        )

    def _next_id(self) -> str:
        self._request_number += 1
        return f"{self._id_prefix}-{self._request_number}"

    # --- attempts

    async def _serve(self, request: web.BaseRequest, exchange: _Exchange) -> web.StreamResponse:
        while True:
            pick = self._pick(exchange)
            if pick is None:
                if exchange.refusal is not None:
                    return send_whole(exchange.refusal, exchange.view.id)
                if await self._hold(exchange):
                    continue
                return self._turn_away(exchange)
            target_id, fresh = pick
            with self._table.book(exchange.view, target_id, self._clock()) as booking:
                try:
                    opened = await self._attempt(booking, exchange, fresh)
                except _Moved as moved:
                    self._metrics.moved()
                    self._note(exchange, "moved", booking, str(moved))
                    continue
                except _OutOfTime:
                    self._blame_silence(exchange, booking)
                    return self._answer(exchange, 504, "time_to_first_byte", "No target answered in time.")
                except UpstreamError as error:
                    self._judge(exchange, booking, error)
                    if error.failure is Failure.MALFORMED:
                        return self._answer(exchange, 400, "malformed_request", str(error))
                    if exchange.executions >= exchange.limits.max_attempts:
                        return self._give_up(exchange)
                    continue
                except aiohttp.WSServerHandshakeError as error:
                    text = f"The target refused the WebSocket with HTTP status {error.status}."
                    status = error.status if error.status >= 300 else 502  # below is success, here is none
                    return self._answer(exchange, status, "websocket_refused", text)
                self._first_byte(exchange, booking)
                if isinstance(opened, Answer) and opened.status in RETRY_STATUSES and opened.whole:
                    self._table.failed(booking, Blame.TROUBLE, self._clock())
                    self._metrics.failed(booking.target)
                    self._note(exchange, "refused", booking, f"HTTP status {opened.status}")
                    exchange.refusal = opened
                    if exchange.executions < exchange.limits.max_attempts:
                        continue
                    return send_whole(opened, exchange.view.id)
                return await self._relay(request, exchange, booking, opened)

    def _pick(self, exchange: _Exchange) -> tuple[str, bool] | None:
        """Where to try next, and whether on a connection of its own; None if nobody is left."""
        now = self._clock()
        choice = self._table.choose(exchange.view, now, exchange.tried)
        if choice is not None:
            exchange.story.note(now, "chose", choice.target_id, choice.because, choice)
            return choice.target_id, exchange.stale is not None  # where one had gone stale, others may have
        stale, exchange.stale = exchange.stale, None
        if stale is not None and self._table.standing(stale, now) is not Standing.CLOSED:
            exchange.story.note(now, "chose", stale.id, "the only one; again, on a new connection")
            return stale.id, True
        return None

    async def _attempt(self, booking: Booking, exchange: _Exchange, fresh: bool) -> _Opened:
        """The first byte of the target's answer. Raises UpstreamError, _Moved or _OutOfTime."""
        self._metrics.attempt(booking.target, first=exchange.attempts == 0)
        exchange.attempts += 1
        exchange.tried.add(booking.life)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(booking, exchange, loop.create_future())
        opening = loop.create_task(self._open(booking.target, exchange, fresh))
        self._waiting.add(waiting)
        try:
            await asyncio.wait(
                (opening, waiting.moved), timeout=exchange.wait_left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if opening.done():
                return opening.result()
        except BaseException:
            _abandon(opening)
            raise
        finally:
            self._waiting.discard(waiting)
            exchange.wait_left_s = max(0.0, exchange.wait_left_s - (self._clock() - booking.since))
        _abandon(opening)
        if waiting.moved.done():
            raise _Moved(waiting.moved.result())
        raise _OutOfTime

    def _open(self, target: Target, exchange: _Exchange, fresh: bool) -> Coroutine[Any, Any, _Opened]:
        if exchange.websocket:
            return self._upstream.open_websocket(
                target, exchange.raw_path, exchange.headers, max_bytes=exchange.limits.max_body_bytes
            )
        return self._upstream.open(
            target,
            exchange.view.method,
            exchange.raw_path,
            exchange.headers,
            exchange.body,
            connect_timeout_s=exchange.limits.connect_timeout_s,
            fresh=fresh,
        )

    def _first_byte(self, exchange: _Exchange, booking: Booking) -> None:
        now = self._clock()
        exchange.executions += 1
        self._metrics.first_byte(booking.target, now - exchange.arrived_at)
        self._note(exchange, "answered", booking)
        if self._table.answered(booking, now):
            _log.info("readmit target=%s why=%r", booking.key.id, "it answered again")
            self.changed()

    def _judge(self, exchange: _Exchange, booking: Booking, error: UpstreamError) -> None:
        exchange.failed = True
        if error.failure is not Failure.UNREACHABLE:
            exchange.executions += 1
        if error.failure is Failure.STALE:
            exchange.stale = booking.key
        self._note(exchange, "failed", booking, error.failure.value)
        self._fail(booking, _BLAME[error.failure], str(error))

    def _blame_silence(self, exchange: _Exchange, booking: Booking) -> None:
        """Time is up. Whom the last attempt waited for is to blame only if it had its share and stayed silent."""
        self._note(exchange, "timed_out", booking)
        waited_s = self._clock() - booking.since
        silent = self._table.silent_since(booking) <= booking.since
        if silent and waited_s >= exchange.limits.time_to_first_byte_s / 2:
            self._fail(booking, Blame.EJECT, "silent for the whole time to first byte")

    def _fail(self, booking: Booking, blame: Blame, why: str) -> None:
        self._metrics.failed(booking.target)
        if self._table.failed(booking, blame, self._clock()):
            self._metrics.ejected(booking.target)
            _log.warning("eject target=%s why=%r", booking.key.id, why)
            self.changed()

    # --- waiting for a target

    async def _hold(self, exchange: _Exchange) -> bool:
        """Wait in the queue; False if there is no room, no time, or nobody came."""
        now = self._clock()
        if self._closed:
            return False
        held = _Held(exchange, asyncio.get_running_loop().create_future())
        ticket = self._queue.join(held, now, exchange.hold_left_s, exchange.limits.max_held)
        if ticket is None:
            return False
        exchange.story.note(now, "held", why="no target can take it")
        timer = asyncio.get_running_loop().call_at(ticket.deadline, self._expire, ticket.deadline)
        try:
            return await held.admitted
        finally:
            timer.cancel()
            self._queue.leave(ticket)
            exchange.hold_left_s = max(0.0, exchange.hold_left_s - (self._clock() - now))

    def _expire(self, now: float) -> None:
        for ticket in self._queue.expire(now):
            ticket.item.settle(False)

    # --- answering

    async def _relay(
        self, request: web.BaseRequest, exchange: _Exchange, booking: Booking, opened: _Opened
    ) -> web.StreamResponse:
        if not isinstance(opened, Answer):
            return await websocket.pump(request, opened, exchange.limits.max_body_bytes)
        if opened.whole:
            return send_whole(opened, exchange.view.id)
        sent = await send_stream(
            request,
            opened,
            exchange.view.id,
            idle_timeout_s=exchange.limits.idle_timeout_s,
            heard=lambda: self._table.heard(booking.key, self._clock()),
        )
        if sent.broken is not None:
            self._metrics.cut()
            self._note(exchange, "cut", booking, sent.broken.failure.value)
            self._fail(booking, _BLAME[sent.broken.failure], str(sent.broken))
        elif sent.client_gone:
            self._metrics.client_gone()
            self._note(exchange, "client_gone", booking)
        return sent.response

    def _turn_away(self, exchange: _Exchange) -> web.Response:
        if exchange.failed:
            return self._give_up(exchange)
        self.rejections.add(self._clock())
        self._metrics.rejected()
        return self._answer(exchange, 503, "no_target_ready", "No replica is ready to take the request.")

    def _give_up(self, exchange: _Exchange) -> web.Response:
        return self._answer(exchange, 502, "no_target_answered", "No replica could answer the request.")

    def _answer(self, exchange: _Exchange, status: int, code: str, message: str) -> web.Response:
        exchange.story.note(self._clock(), "answered_here", why=code)
        retry_after_s = RETRY_AFTER_S if status in RETRY_STATUSES else None
        return answers.error(status, code, message, request_id=exchange.view.id, retry_after_s=retry_after_s)

    def _note(self, exchange: _Exchange, event: str, booking: Booking, why: str = "") -> None:
        exchange.story.note(self._clock(), event, booking.key.id, why)
        _log.debug("%s request=%s target=%s why=%r", event, exchange.view.id, booking.key.id, why)


def _abandon(opening: asyncio.Task[_Opened]) -> None:
    """Nobody waits for it any more: close its connection, also if it has just succeeded."""
    opening.cancel()
    opening.add_done_callback(_discard)


def _discard(opening: asyncio.Task[_Opened]) -> None:
    if opening.cancelled() or opening.exception() is not None:
        return
    opened = opening.result()
    if isinstance(opened, Answer):
        opened.close()
    else:
        close_websocket(opened)
