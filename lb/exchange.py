"""The life of a request: be placed, be sent to targets until one answers, be relayed to its end.

Before the first byte a request is ours: whatever happens to a target, it goes to another, never to one that has
failed it. It is called back at once when the table says its target is lost, or when the target falls silent
(`lb.health`) and a better one exists. With no target that may take it, it is held, and counted as demand. After the first
byte it belongs to the target that began to answer; if that one dies, a stream of a model is continued on another
(`lb.relay`, `lb.continuation`), anything else is cut so that the client sees an error and not a short success.

An answer *begins* with the first byte of its body, not with its head: engines send the head at once and think
afterwards. An answer that is small, or JSON and not a stream, is read whole before any of it is sent, so a unary
answer is never cut.

No tasks and no futures: an exchange is called by its two connections, by the patrol of `lb.proxy` and by the
queue, and each call leaves it in a state of its own.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING

from lb import answers
from lb.budget import Story
from lb.continuation import NotContinuable
from lb.framing import ChunkWalker, CloseWalker, FramingError, LengthWalker, Walker, chunk
from lb.heads import (
    END,
    AnswerHead,
    HeadError,
    RequestHead,
    answer_bytes,
    opens_websocket,
    request_bytes,
)
from lb.prompt import Ask, for_model
from lb.relay import PlainRelay, Relay
from lb.survival import BY_ENGINE, EventRelay, Keeper, survives
from lb.targets import Blame, Booking, Standing
from lb.upstream import Dialling, TargetConnection
from policies.routing.base import Choice, RequestView

if TYPE_CHECKING:
    from lb.client import ClientConnection
    from lb.explain import Explanation
    from lb.proxy import Proxy
    from lb.queue import Ticket

WHOLE_UP_TO_BYTES = 256 * 1024
RETRY_STATUSES = frozenset({502, 503, 504})
RETRY_AFTER_S = 5
# A reused connection that ends without a byte so soon had gone stale: the target may be well.
STALE_WITHIN_S = 1.0
_JOIN_BELOW_BYTES = 64 * 1024
_MAX_INTERIM_ANSWERS = 16

_log = logging.getLogger("lb.exchange")


class Failure(str, Enum):
    """How an attempt failed, by what follows from it."""

    UNREACHABLE = "unreachable"  # no connection: the request has run nowhere
    STALE = "stale"  # a reused connection ended before the first byte
    DIED = "died"  # a connection of our own ended before the answer had begun (or, if whole, ended)
    MALFORMED = "malformed"  # what it sends is not HTTP
    IDLE = "idle"  # no byte for too long in the midst of an answer
    STALLED = "stalled"  # a stream without an event for too long
    UNFIT = "unfit"  # it does not continue what another has begun
    GAVE_UP = "gave_up"  # the engine says in the midst of a stream that it stops
    SHORT = "short"  # a stream that ends in good order before its answer does
    EMPTY = "empty"  # 200, and nothing, where a model has to say something
    REFUSED = "refused"  # it says 502, 503 or 504
    SILENT = "silent"  # no answer within the time to first byte


_BLAME = {
    Failure.UNREACHABLE: Blame.EJECT,
    Failure.STALE: Blame.NONE,
    Failure.DIED: Blame.DIED,
    Failure.MALFORMED: Blame.TROUBLE,  # a strange request may have provoked it
    Failure.IDLE: Blame.TROUBLE,
    Failure.STALLED: Blame.TROUBLE,
    Failure.UNFIT: Blame.NONE,
    Failure.GAVE_UP: Blame.TROUBLE,
    Failure.SHORT: Blame.TROUBLE,
    Failure.EMPTY: Blame.TROUBLE,
    Failure.REFUSED: Blame.TROUBLE,
    Failure.SILENT: Blame.EJECT,
}


# Of the present attempt. Plain numbers: a member of an Enum is looked up in its class each time it is compared.
_NONE = 0  # no attempt is under way: held, or between two
_DIALLING = 1
_HEAD = 2  # waiting for the head of the answer
_FIRST = 3  # waiting for the first byte of a body that is relayed as it comes
_WHOLE = 4  # reading a body that is sent in one piece
_RELAY = 5
_TUNNEL = 6
_OVER = 7


class Exchange:
    """One request on its way. `tried` are the lives (see `lb.targets`) that have had it."""

    __slots__ = (
        "_buffer",
        "_dialling",
        "_interims",
        "_parts",
        "_phase",
        "_reply",
        "_size",
        "_stale",
        "_walker",
        "arrived_at",
        "ask",
        "attempts",
        "body",
        "booking",
        "bytes_out",
        "client",
        "connection",
        "continued",
        "continues",
        "error",
        "executions",
        "failed",
        "first_at",
        "head",
        "held_since",
        "hold_left_s",
        "keeper",
        "last_target",
        "longest_s",
        "policy",
        "proxy",
        "queued_s",
        "refusal",
        "relay",
        "replayable",
        "reply_length",
        "request_id",
        "sent_at",
        "span",
        "status",
        "story",
        "tenant",
        "ticket",
        "tried",
        "view",
        "wait_left_s",
        "weight",
    )

    def __init__(
        self,
        proxy: Proxy,
        client: ClientConnection,
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        view: RequestView,
        ask: Ask,
        story: Explanation,
        now: float,
    ) -> None:
        limits = proxy.limits
        self.proxy = proxy
        self.client = client
        self.head = head
        self.body = body
        self.view = view
        self.ask = ask
        self.story = story
        self.request_id = request_id
        self.arrived_at = now
        self.wait_left_s = limits.time_to_first_byte_s
        self.hold_left_s = limits.hold_s
        self.tenant = ""
        self.weight = 1.0
        self.policy: str | None = None
        self.tried: dict[int, int] = {}  # lives, and how many attempts each has had
        self.longest_s = 0.0  # of the attempts that failed
        self.attempts = 0
        self.executions = 0  # attempts that may have begun to run
        self.continued = 0
        self.failed = False
        self.replayable = True
        self.continues = True  # if it breaks, as far as the client is concerned
        self.last_target = ""
        self.span = ""
        self.error = ""
        self.bytes_out = 0
        self.status = 0  # what the client was sent
        self.sent_at = now
        self.first_at: float | None = None
        self.queued_s = 0.0
        self.held_since = 0.0
        self.ticket: Ticket[Exchange] | None = None
        self.booking: Booking | None = None
        self.connection: TargetConnection | None = None
        self.relay: Relay | None = None
        self.keeper: Keeper | None = None  # of a stream that could be continued
        self.reply_length: int | None = None
        self.refusal: tuple[AnswerHead, bytes] | None = None  # the last 502, 503 or 504 of a target
        self._phase = _NONE
        self._dialling: Dialling | None = None
        self._stale = False  # has a reused connection been stale?
        self._buffer = b""
        self._interims = 0

    # --- being placed

    def place(self) -> None:
        """Go to a target, or wait for one."""
        proxy = self.proxy
        now = proxy.clock()
        choice = proxy.dispatcher.place(self, now)
        if choice is not None:
            self.launch(choice, now)
        elif self.refusal is not None and not proxy.table.anybody(now, self.tried):
            self._send_refusal()
        else:
            self._hold(now)

    def launch(self, choice: Choice, now: float) -> None:
        """An attempt on the chosen target."""
        self.story.note(now, "chose", choice.target_id, choice.because, choice)
        self._attempt(choice.target_id, now, fresh=False)
        counts = self.proxy.metrics.counts
        if self.view.prompt is not None:
            counts.prompt_bytes += len(self.view.prompt)
            counts.matched_bytes += choice.matched_bytes

    def _attempt(self, target_id: str, now: float, fresh: bool) -> None:
        proxy = self.proxy
        self.booking = booking = proxy.table.book(self.view, target_id, now)
        self.tried[booking.life] = self.tried.get(booking.life, 0) + 1
        self.attempts += 1
        self.last_target = target_id
        if self.attempts > 1:
            proxy.metrics.counts.retries += 1
        proxy.counts_of(booking).attempts += 1
        self.sent_at = now
        proxy.waiting[self] = None
        pool = proxy.pools.of(booking.target)
        connection = None if fresh or self.head.websocket else pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self._phase = _DIALLING
            self._dialling = Dialling(
                pool, proxy.limits.connect_timeout_s, proxy.clock, self._dialled, self._not_dialled
            )

    def _hold(self, now: float) -> None:
        proxy = self.proxy
        if proxy.closing:
            self._turn_away()
            return
        ticket = proxy.dispatcher.hold(self, now)
        if ticket is None:
            self._turn_away(full=len(proxy.queue) >= proxy.limits.max_held > 0)
            return
        self.ticket = ticket
        self.held_since = now
        proxy.metrics.counts.held_total += 1
        self.story.note(now, "held", why="no target can take it")

    def admitted(self, choice: Choice, now: float) -> None:
        """The queue has let it go."""
        self._left_queue(now)
        self.launch(choice, now)

    def expired(self, now: float) -> None:
        """It has waited for too long."""
        self._left_queue(now)
        self._turn_away()

    def pushed_out(self, now: float) -> None:
        """The room is full, and another tenant has a better right to the place."""
        self._left_queue(now)
        self._turn_away(full=True)

    def _left_queue(self, now: float) -> None:
        waited = now - self.held_since
        self.ticket = None
        self.queued_s += waited
        self.hold_left_s = max(0.0, self.hold_left_s - waited)
        self.proxy.metrics.counts.queue_wait.observe(waited)

    # --- the attempt

    def _dialled(self, connection: TargetConnection) -> None:
        self._dialling = None
        self._send(connection)

    def _not_dialled(self, error: Exception) -> None:
        self._dialling = None
        self._attempt_failed(Failure.UNREACHABLE, type(error).__name__)

    def _send(self, connection: TargetConnection) -> None:
        head, body, client = self.head, self.body, self.client
        path = head.target
        pool = connection.pool
        if self.keeper is not None:
            booking = self.booking
            assert booking is not None  # noqa: S101 (for the type checker)
            try:
                other_path, body = self.keeper.outgoing(self.proxy.kind_of(booking.key))
            except NotContinuable as error:
                pool.give(connection, self.proxy.clock())
                self._cannot_go_on(error)
                return
            path = path if other_path is None else other_path
        self.connection = connection
        connection.sink = self
        self._phase = _HEAD
        self._buffer = b""
        self._interims = 0
        if client.body_left:
            if head.chunked:
                framing, body = b"Transfer-Encoding: chunked\r\n", chunk(body) if body else b""
            else:
                framing = b"Content-Length: %d\r\n" % client.length
        elif body or head.method in _WITH_BODY:
            framing = b"Content-Length: %d\r\n" % len(body)
        else:
            framing = b""
        host = pool.name if head.host else pool.address
        sent = request_bytes(head, client.hop, self.request_id, path, pool.base_path, host, framing)
        transport = connection.transport
        if len(body) < _JOIN_BELOW_BYTES:
            transport.write(sent + body)
        else:
            transport.writelines((sent, body))
        if client.body_left:
            client.resume_reading(2)  # and more comes through `more_body`

    def _cannot_go_on(self, error: NotContinuable) -> None:
        """This target cannot continue the stream; perhaps another can."""
        relay = self.relay
        assert isinstance(relay, EventRelay)  # noqa: S101 (for the type checker)
        now = self.proxy.clock()
        self._drop_attempt()
        if self.proxy.table.anybody(now, self.tried) and error.reason in BY_ENGINE:
            self.place()
        else:
            relay.refuse(error)

    def more_body(self, part: bytes, last: bool) -> None:
        """The rest of a body that is passed on as it comes."""
        connection = self.connection
        if connection is None:  # between two attempts; there is no more of this, as reading has stopped
            self.body += part
            return
        self.replayable = False  # from now on part of it is gone
        if self.head.chunked:
            part = (chunk(part) if part else b"") + (b"0\r\n\r\n" if last else b"")
        if part:
            connection.transport.write(part)

    def bad_body(self, code: str) -> None:
        """The rest of the body cannot be passed on."""
        status = 413 if code == "body_too_large" else 400
        if self.first_at is None:
            self._drop_attempt()
            self._answer(status, code, "The body of the request cannot be passed on.")
        else:
            self._cut("bad_body")

    # --- the answer

    def target_data(self, data: bytes) -> None:
        phase = self._phase
        if phase == _RELAY:
            assert self.relay is not None  # noqa: S101 (for the type checker)
            self.relay.data(data)
        elif phase == _HEAD:
            self._take_head(self._buffer + data if self._buffer else data)
        elif phase == _WHOLE:
            self._take_whole(data)
        elif phase == _FIRST:
            self._start_relay(data)
        elif phase == _TUNNEL:
            self.client.transport.write(data)

    def _take_head(self, data: bytes) -> None:
        proxy = self.proxy
        end = data.find(END)
        if end < 0 or end > proxy.limits.max_head_bytes:
            if len(data) > proxy.limits.max_head_bytes:
                self._attempt_failed(Failure.MALFORMED, "the head of the answer is too long")
            else:
                self._buffer = data
            return
        try:
            answer, length = proxy.heads.answer(data[: end + 4], proxy.limits.max_headers)
        except HeadError as error:
            self._attempt_failed(Failure.MALFORMED, str(error))
            return
        rest = data[end + 4 :]
        status = answer.status
        if status < 200:
            self._take_interim(answer, rest)
            return
        self._reply, self.reply_length = answer, length
        # The client has the beginning of a stream already?
        if self.relay is not None and (length == 0 or not survives(answer)):
            self._attempt_failed(Failure.UNFIT, f"HTTP status {status} instead of the rest of a stream")
            return
        no_body = self.head.method == b"HEAD" or status in (204, 304)
        if no_body:
            self._finish_whole(b"", rest)
            return
        if length is not None:
            if self.relay is None and length <= WHOLE_UP_TO_BYTES:
                if len(rest) >= length:
                    self._finish_whole(rest[:length], rest[length:])
                    return
                self._read_whole(LengthWalker(length), rest)
                return
            self._walker: Walker = LengthWalker(length)
        elif answer.chunked:
            if status in RETRY_STATUSES or answer.content_type.startswith(b"application/json"):
                self._read_whole(None, rest)
                return
            self._walker = ChunkWalker()
        else:
            if status in RETRY_STATUSES:
                self._read_whole(CloseWalker(), rest)
                return
            self._walker = CloseWalker()
        self._phase = _FIRST
        if rest:
            self._start_relay(rest)

    def _take_interim(self, answer: AnswerHead, rest: bytes) -> None:
        """100 Continue and its like are for us; 101 opens a tunnel if one was asked for."""
        if answer.status == 101:
            if self.head.websocket and opens_websocket(self.head, answer):
                self._open_tunnel(answer, rest)
            elif self.head.websocket:
                self._drop_attempt()
                self._answer(502, "websocket_refused", "The target has not opened the WebSocket.")
            else:
                self._attempt_failed(Failure.MALFORMED, "it switches protocols unasked")
            return
        self._interims += 1
        if self._interims > _MAX_INTERIM_ANSWERS:
            self._attempt_failed(Failure.MALFORMED, "too many interim answers")
            return
        self._buffer = b""
        if rest:
            self._take_head(rest)

    def _read_whole(self, walker: Walker | None, rest: bytes) -> None:
        """Collect the body; without a walker it is chunked."""
        self._phase = _WHOLE
        self._parts: list[bytes] = []
        self._size = 0
        self._walker = ChunkWalker(self._parts) if walker is None else walker
        if rest:
            self._take_whole(rest)

    def _take_whole(self, data: bytes) -> None:
        try:
            end = self._walker.feed(data)
        except FramingError as error:
            self._attempt_failed(Failure.MALFORMED, str(error))
            return
        if not isinstance(self._walker, ChunkWalker):
            self._parts.append(data if end < 0 else data[:end])
        self._size += len(data)
        if end >= 0:
            self._finish_whole(b"".join(self._parts), data[end:])
        elif self._size > WHOLE_UP_TO_BYTES:
            self._relay_collected()

    def _relay_collected(self) -> None:
        """Too long to be kept until it is whole."""
        collected = b"".join(self._parts)
        walker = self._walker
        if isinstance(walker, ChunkWalker):
            walker.payloads = None
        self._begin_relay()
        assert self.relay is not None  # noqa: S101 (for the type checker)
        self.relay.collected(collected)

    def _finish_whole(self, body: bytes, rest: bytes) -> None:
        """The whole answer is here; `rest` is what came behind it, and should not have."""
        answer = self._reply
        connection = self.connection
        assert connection is not None  # noqa: S101 (for the type checker)
        if answer.status in RETRY_STATUSES:
            self._give_back(reusable=not rest)
            self._refused(answer, body)
            return
        if not body and self._must_speak(answer):
            self._attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        now = self._first_byte()
        self._give_back(reusable=not rest)
        self._send_whole(answer, body, now)

    def _must_speak(self, answer: AnswerHead) -> bool:
        """Whether an answer like this one has to have a body: a model that says nothing has not answered."""
        head = self.head
        return answer.status == 200 and head.method == b"POST" and for_model(head.path)

    def _refused(self, answer: AnswerHead, body: bytes) -> None:
        """A 502, 503 or 504, whole: kept, in case nobody has a better answer."""
        self.refusal = answer, body
        self.proxy.waiting.pop(self, None)
        self.executions += 1
        self._judge(Failure.REFUSED, f"HTTP status {answer.status}", self.proxy.clock())

    def _send_whole(self, answer: AnswerHead, body: bytes, now: float) -> None:
        if answer.status == 204:
            framing = b""
        elif answer.status == 304 or self.head.method == b"HEAD":
            length = self.reply_length
            framing = b"Content-Length: %d\r\n" % length if length is not None else b""
        else:
            framing = b"Content-Length: %d\r\n" % len(body)
        head = answer_bytes(answer, self.request_id, framing + self.connection_line())
        transport = self.client.transport
        if len(body) < _JOIN_BELOW_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        self.status = answer.status
        self.bytes_out = len(body)
        self._settle(now, body)

    def connection_line(self) -> bytes:
        client = self.client
        if client.closing or client.body_left or self.proxy.closing:
            client.closing = True  # also if the rest of the body comes before the answer ends
            return b"Connection: close\r\n"
        return b"Connection: keep-alive\r\n" if self.head.http_1_0 else b""

    def _first_byte(self) -> float:
        """The target has answered."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        now = proxy.clock()
        proxy.waiting.pop(self, None)
        self.executions += 1
        proxy.counts_of(booking).ttfb.observe(now - self.arrived_at)
        self.story.note(now, "answered", booking.key.id)
        if proxy.table.answered(booking, now):
            _log.info("readmit target=%s why=%r", booking.key.id, "it answered again")
            proxy.changed_soon()
        elif len(proxy.queue):
            proxy.let_in_soon()  # a first byte shows that its engine had room
        return now

    # --- relaying

    def _start_relay(self, data: bytes) -> None:
        if data.startswith(b"0\r\n") and self._reply.chunked and self._must_speak(self._reply):
            self._attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
            return
        self._begin_relay()
        assert self.relay is not None  # noqa: S101 (for the type checker)
        self.relay.data(data)

    def _begin_relay(self) -> None:
        now = self._first_byte()
        if self.first_at is None:
            self.first_at = now
            self.proxy.metrics.counts.ttft.observe(now - self.arrived_at)
        self._phase = _RELAY
        if self.relay is None:
            self.refusal = None
            if self.keeper is not None and self.reply_length is None and survives(self._reply):
                self.relay = EventRelay(self, self.keeper, self._reply, self._walker)
            else:
                self.keeper = None
                self.relay = PlainRelay(self, self._reply, self._walker)
        elif isinstance(self.relay, EventRelay):
            self.relay.next_leg(self._walker)
            if self.relay.blocked and self.connection is not None:
                self.connection.transport.pause_reading()  # for a client that is still not reading
            self.proxy.metrics.counts.continued += 1
            self.continued += 1
        self.proxy.relays[self] = None

    def halt(self) -> None:
        """One of the two connections is about to be closed."""
        if self.relay is not None:
            self.relay.halt()

    def relayed(self, rest: bool, reusable: bool = True) -> None:
        """The relay has passed the whole answer; `rest` if the connection had more to say than that."""
        self.proxy.relays.pop(self, None)
        now = self.proxy.clock()
        relay, booking = self.relay, self.booking
        if relay is not None and booking is not None and relay.chunks > 1 and self.first_at is not None:
            spacing_s = (now - self.first_at) / (relay.chunks - 1)
            self.proxy.counts_of(booking).inter_token.observe(spacing_s)
        self._give_back(reusable=reusable and not rest)
        self._settle(now, None)

    def broke(self, failure: Failure, why: str) -> None:
        """The answer broke off after its first byte."""
        proxy, booking, relay = self.proxy, self.booking, self.relay
        assert booking is not None  # noqa: S101 (for the type checker)
        assert relay is not None  # noqa: S101 (for the type checker)
        proxy.relays.pop(self, None)
        now = proxy.clock()
        self._drop_connection()
        self.failed = True
        self.tried = {booking.life: 1}
        self.story.note(now, "cut", booking.key.id, why)
        self._blame(booking, failure, why, now)
        proxy.release(self, booking, now)
        if failure is Failure.STALLED:
            proxy.metrics.counts.stalled += 1
        self._continue(relay, why)

    def broke_framing(self, why: str) -> None:
        """What comes is no body of HTTP any longer."""
        self.broke(Failure.MALFORMED, why)

    def broke_giving_up(self) -> None:
        self.broke(Failure.GAVE_UP, "the engine has given the request up")

    def broke_short(self) -> None:
        self.broke(Failure.SHORT, "the stream ended before its answer")

    def ended_early(self) -> None:
        """The target was lost, but nothing was missing that could not be said without it."""
        self._settle(self.proxy.clock(), None)

    def ended_in_error(self, code: str) -> None:
        """The client has been told in the stream itself."""
        self.proxy.metrics.counts.cut += 1
        self.error = code
        if self.booking is not None:
            self._drop_attempt()
        self._settle(self.proxy.clock(), None)

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible; False if it is not."""
        relay, booking = self.relay, self.booking
        if self._phase != _RELAY or relay is None or booking is None or not relay.may_continue():
            return False
        now = self.proxy.clock()
        self.proxy.relays.pop(self, None)
        self._drop_connection()
        self.tried = {booking.life: 1}
        self.story.note(now, "handed_over", booking.key.id)
        self.proxy.release(self, booking, now)
        self.proxy.metrics.counts.handed_over += 1
        self._continue(relay, "its target is being drained")
        return True

    def _continue(self, relay: Relay, why: str) -> None:
        """Go on with a stream on another target, or end it as an error."""
        self._phase = _NONE
        self.booking = None
        if relay.resume(why):
            self.executions = 0
            self.wait_left_s = self.proxy.limits.time_to_first_byte_s
            self.hold_left_s = self.proxy.limits.hold_s
            self.place()

    def cut(self, why: str) -> None:
        """Nothing more can be sent: what was sent stays sent, and the client sees an error."""
        self._cut(why)

    def _cut(self, why: str) -> None:
        self.proxy.metrics.counts.cut += 1
        self.error = why
        if self.booking is not None:
            self._drop_attempt()
        self._phase = _OVER
        self.proxy.finished(self, self.proxy.clock(), None)
        # HTTP/1.0 ends a body by closing: only a reset tells failure from success.
        self.client.hang_up(abort=self.head.http_1_0)

    # --- tunnels

    def _open_tunnel(self, answer: AnswerHead, rest: bytes) -> None:
        self.first_at = self._first_byte()
        self._phase = _TUNNEL
        head = answer_bytes(answer, self.request_id, b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        ahead = self.client.tunnel()
        self.client.transport.write(head + rest)
        self.status = 101
        if ahead and self.connection is not None:
            self.connection.transport.write(ahead)

    def client_data(self, data: bytes) -> None:
        """Through the tunnel."""
        if self.connection is not None:
            self.connection.transport.write(data)

    # --- failing

    def target_lost(self, error: Exception | None) -> None:
        """The connection has ended; whether that is an end or a failure depends on where we are."""
        self.halt()
        phase, connection = self._phase, self.connection
        self.connection = None
        if phase == _TUNNEL:
            self._end_tunnel()
            self.client.hang_up()
        elif phase == _RELAY:
            assert self.relay is not None  # noqa: S101 (for the type checker)
            if error is not None or not self.relay.ended():
                self.broke(Failure.DIED, type(error).__name__ if error else "the connection ended")
        elif phase == _WHOLE and isinstance(self._walker, CloseWalker) and error is None:
            self._finish_closed()
        elif phase in (_HEAD, _FIRST, _WHOLE):
            if phase == _FIRST and isinstance(self._walker, CloseWalker) and error is None:
                self._finish_closed()  # an empty body
                return
            young = self.proxy.clock() - self.sent_at < STALE_WITHIN_S
            silent = phase == _HEAD and not self._buffer and not self._interims
            stale = silent and connection is not None and connection.used
            failure = Failure.STALE if stale and young else Failure.DIED
            self._attempt_failed(failure, type(error).__name__ if error else "the connection ended")

    def _finish_closed(self) -> None:
        """A body that ended with its connection, read whole."""
        body = b"".join(self._parts) if self._phase == _WHOLE else b""
        if self._reply.status in RETRY_STATUSES:
            self._refused(self._reply, body)
        elif not body and self._must_speak(self._reply):
            self._attempt_failed(Failure.EMPTY, "HTTP status 200 without a body")
        else:
            self._send_whole(self._reply, body, self._first_byte())

    def _attempt_failed(self, failure: Failure, why: str) -> None:
        """Before the first byte."""
        now = self.proxy.clock()
        self._drop_connection()
        self.proxy.waiting.pop(self, None)
        if failure is not Failure.UNREACHABLE:
            self.executions += 1
        self._judge(failure, why, now)

    def _judge(self, failure: Failure, why: str, now: float) -> None:
        """Blame whom it concerns, and try again if that is allowed."""
        proxy, booking = self.proxy, self.booking
        assert booking is not None  # noqa: S101 (for the type checker)
        self.failed = True
        self._phase = _NONE
        self.booking = None
        ran_s = now - self.sent_at
        self.wait_left_s -= ran_s
        self.story.note(now, "failed", booking.key.id, why)
        self._blame(booking, failure, why, now)
        proxy.release(self, booking, now)
        if failure is Failure.STALE and not self._stale and self.replayable:
            # Once, on a connection of its own; if the target is dead, that shows at once. Not once for each target: it
            # cannot be known that a request which was sent has not begun to run.
            self._stale = True
            self.executions -= 1
            if proxy.table.standing(booking.key, now) is not Standing.CLOSED:
                self.story.note(now, "chose", booking.key.id, "again, on a new connection")
                self._attempt(booking.key.id, now, fresh=True)
                return
        self.longest_s = max(self.longest_s, ran_s)
        tried = self.tried.get(booking.life, 0)
        told = Story(self.executions, tried, failure is not Failure.UNREACHABLE, self.longest_s)
        delay = proxy.retry_after(self, told, booking.life, now)
        if failure is Failure.MALFORMED and not proxy.table.anybody(now, self.tried):
            delay = None  # whoever comes later would be like this one
        if delay is None:
            self._give_up()
        elif delay > 0:
            proxy.later(delay, self)
        else:
            self.place()

    def _blame(self, booking: Booking, failure: Failure, why: str, now: float) -> None:
        proxy = self.proxy
        counts = proxy.counts_of(booking)
        counts.failures[failure.value] += 1
        if proxy.table.failed(booking, _BLAME[failure], now):
            counts.ejections += 1
            _log.warning("eject target=%s why=%r", booking.key.id, f"{failure.value}: {why}")
            proxy.changed_soon()

    def retry(self) -> None:
        """The pause before another attempt is over."""
        if self._phase == _NONE and self.ticket is None:
            self.place()

    def call_back(self, why: str) -> None:
        """Its attempt waits in vain: on to another target."""
        booking = self.booking
        if booking is None or not self.replayable:
            return
        now = self.proxy.clock()
        self.proxy.metrics.counts.moves += 1
        self.story.note(now, "moved", booking.key.id, why)
        self.wait_left_s -= now - self.sent_at
        self._drop_attempt()
        self.place()

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up. Whom the last attempt waited for is to blame only if it had its share and
        stayed silent."""
        proxy, booking = self.proxy, self.booking
        if booking is None:
            return
        self.story.note(now, "timed_out", booking.key.id)
        silent = proxy.table.silent_since(booking) <= booking.since
        if silent and now - booking.since >= proxy.limits.time_to_first_byte_s / 2:
            self._blame(booking, Failure.SILENT, "for the whole time to first byte", now)
        self._drop_attempt()
        self._answer(504, "time_to_first_byte", "No target answered in time.")

    def client_lost(self) -> None:
        """The client has left: whatever is under way ends, and with it the engine's work."""
        now = self.proxy.clock()
        phase = self._phase
        if phase == _TUNNEL:
            self._end_tunnel()
            return
        if phase == _OVER:
            return
        self.error = "client_gone"
        self.proxy.metrics.counts.client_gone += 1
        self.story.note(now, "client_gone", self.booking.key.id if self.booking else "")
        if self.ticket is not None:
            self.proxy.queue.leave(self.ticket)
            self._left_queue(now)
        if self.booking is not None:
            self._drop_attempt()
        self._phase = _OVER
        self.proxy.finished(self, now, None)

    def _end_tunnel(self) -> None:
        now = self.proxy.clock()
        self._phase = _OVER
        if self.connection is not None:
            self.connection.sink = None
            self.connection.transport.close()
            self.connection = None
        if self.booking is not None:
            self.proxy.release(self, self.booking, now)
            self.booking = None
        self.proxy.finished(self, now, None)

    # --- answering ourselves

    def _turn_away(self, full: bool = False) -> None:
        proxy = self.proxy
        if self.refusal is not None:
            self._send_refusal()
        elif self.failed:
            self._give_up()
        else:
            proxy.rejections.add(proxy.clock())
            proxy.metrics.counts.rejected += 1
            if full:
                self._answer(429, "queue_full", "Too many requests are waiting for a replica.")
            elif proxy.table.anybody(proxy.clock()):
                self._answer(503, "queue_timeout", "No replica had room for the request in time.")
            else:
                self._answer(503, "no_target_ready", "No replica is ready to take the request.")

    def _give_up(self) -> None:
        if self.refusal is not None:
            self._send_refusal()
        else:
            self._answer(502, "no_target_answered", "No replica could answer the request.")

    def _send_refusal(self) -> None:
        assert self.refusal is not None  # noqa: S101 (for the type checker)
        self._send_whole(*self.refusal, self.proxy.clock())

    def _answer(self, status: int, code: str, message: str) -> None:
        now = self.proxy.clock()
        self.story.note(now, "answered_here", why=code)
        self.error = code
        if self.relay is not None:  # part of an answer has been sent already
            self.relay.fail(code, message)
            return
        self.status = status
        client = self.client
        if self.head.http_1_0:
            client.closing = True
        client.transport.write(
            answers.raw_error(
                status,
                code,
                message,
                request_id=self.request_id,
                retry_after_s=RETRY_AFTER_S if status in RETRY_STATUSES or status == 429 else None,
                close=client.closing or client.body_left or self.proxy.closing,
                head_only=self.head.method == b"HEAD",
            )
        )
        self._settle(now, None)

    # --- ending

    def _settle(self, now: float, body: bytes | None) -> None:
        """The client has all it will get."""
        self._phase = _OVER
        tokens = self.proxy.account(self, body)
        booking, self.booking = self.booking, None
        if booking is not None:
            self.proxy.release(self, booking, now, tokens)
        self.proxy.finished(self, now, tokens)
        self.client.next()

    def _drop_attempt(self) -> None:
        booking, self.booking = self.booking, None
        self._drop_connection()
        self.proxy.waiting.pop(self, None)
        self.proxy.relays.pop(self, None)
        self._phase = _NONE
        if booking is not None:
            self.proxy.release(self, booking, self.proxy.clock())

    def _drop_connection(self) -> None:
        self.halt()  # before either socket is closed: its number may be another's a moment later
        if self._dialling is not None:
            self._dialling.abandon()
            self._dialling = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        if self.client.body_left:
            self.client.pause_reading(2)  # until another target takes it
        else:
            self.client.resume_reading(2)

    def _give_back(self, reusable: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        answer = self._reply
        if answer.status == 204 and (self.reply_length or answer.chunked):
            reusable = False  # has it a body after all?
        if reusable and answer.keep_alive and not self.client.body_left:
            connection.pool.give(connection, self.proxy.clock())
        else:
            connection.drop()

    # --- back-pressure

    def client_full(self) -> None:
        if self.connection is not None:
            self.connection.transport.pause_reading()
        if self.relay is not None:
            self.relay.blocked = True

    def client_drained(self) -> None:
        if self.relay is not None:
            self.relay.blocked = False
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()

    def target_full(self) -> None:
        self.client.pause_reading(2)

    def target_drained(self) -> None:
        self.client.resume_reading(2)


_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})
