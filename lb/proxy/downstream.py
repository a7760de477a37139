"""Connections from clients: requests in, one at a time, and the bytes of responses out.

Bounded in everything a client can make long: heads (`max_head_bytes`, `max_headers`, `head_timeout_s`), bodies
(`max_body_bytes` where they are parsed, `idle_timeout_s` between two parts, `min_upload_bytes_per_s`, one budget for what
all of them keep), idleness (`keepalive_s`), and what it sends ahead of its response (the connection is closed). Whether a
request is let in is decided on its head, before its body is requested or kept. Bodies up to `buffer_bytes` are collected, so
that they can be sent again; of longer ones only the first part is, and the rest is passed on as the target takes it.

Every callback is an entrance of the fault barrier (`lb.proxy.faults`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntFlag
from typing import Final, Protocol, cast

from lb.config.options import Limits
from lb.core.api_keys import Admission
from lb.http import error_responses
from lb.http.api_paths import for_model
from lb.http.body_framing import FramingError
from lb.http.cors import CorsRules
from lb.http.http2 import PREFACE, SETTINGS, first_request, http_1_1_required
from lb.http.messages import END, HeadError, Hop, Reader, RequestHead
from lb.proxy.ports import ClientPort
from lb.proxy.rejections import (
    BODY_TIMEOUT,
    HEAD_TIMEOUT,
    HTTP_2,
    NO_ROOM,
    TOO_MANY_CONNECTIONS,
    Rejection,
    too_slow,
)
from lb.proxy.runtime import Runtime
from lb.proxy.upload import TinyChunksError, Upload, refusal_of

WRITE_HIGH_WATER: Final = 64 * 1024
_NEVER: Final = float("inf")
MAX_AHEAD_BYTES: Final = 256 * 1024  # what a client may send before its response is over
_LINGER_S: Final = 2.0
_LONG_BYTES: Final = 1024 * 1024  # of a body: to copy, to parse and to send it get a turn of the loop each
_REFUSED_S: Final = 1.0
_NO_HEAD: Final = -1  # the length of a request that has not come yet

# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
IDLE: Final = 0  # between two requests
HEAD: Final = 1  # a head has started
BODY: Final = 2  # collecting a body
RESPONSE: Final = 3  # a response is in progress
TUNNEL: Final = 4
OVER: Final = 5


class Pause(IntFlag):
    """Why reading from a client has stopped."""

    TARGET = 2  # it is slow to take a body
    CLIENT = 4  # it does not take what it is sent
    TURN = 8  # its body is taken up in the next turn of the loop


PAUSE_TARGET: Final = int(Pause.TARGET)
PAUSE_CLIENT: Final = int(Pause.CLIENT)
PAUSE_TURN: Final = int(Pause.TURN)


class ClientRequest(Protocol):
    """A request, as its client's connection uses it."""

    def place(self) -> None:
        """Go to a target, or wait for one."""
        ...

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run the callback in the next turn of the loop, unless the request is over by then."""
        ...

    def client_data(self, data: bytes) -> None:
        """Bytes for the tunnel."""
        ...

    def client_lost(self) -> None: ...
    def client_full(self) -> None: ...
    def client_drained(self) -> None: ...
    def halt(self) -> None: ...
    def more_body(self, part: bytes, last: bool) -> None: ...
    def bad_body(self, status: int, code: str, message: str) -> None: ...
    def crashed(self, entrance: str, error: Exception) -> None: ...


class Entrance(Protocol):
    """The intake, as clients' connections use it."""

    @property
    def runtime(self) -> Runtime: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def heads(self) -> Reader: ...
    @property
    def cors(self) -> CorsRules | None:
        """Which web pages may call; None if CORS is off."""
        ...

    def arrived(self) -> None:
        """The head of a request is here."""
        ...

    def is_trusted_proxy(self, peer: str) -> bool:
        """Return True if this address is one of a proxy whose word on its own clients is taken."""
        ...

    def is_full(self) -> bool:
        """Return True if there are more clients than descriptors allow."""
        ...

    def check(self, head: RequestHead) -> Rejection | Admission | bytes:
        """Decide on the head alone whether a request is let in. Bytes are a complete response to it."""
        ...

    def begin(
        self,
        client: ClientPort,
        head: RequestHead,
        body: bytes,
        admission: Admission,
        structure: int | None = None,
    ) -> ClientRequest | Rejection:
        """A request is here with its body, or with as much of it as is kept. The caller places it.

        `structure` is what the objects of the body would take, if that has been counted.
        """
        ...

    def abandoned(self, admission: Admission) -> None:
        """Settle a request that was let in and did not begin, for example because its body never came."""
        ...

    def client_gone(self) -> None:
        """Count a client that left before its request was whole."""
        ...

    def refused(self, refusal: Rejection, tenant: str = "") -> None:
        """Count a response to what never became a request, for a key if one let it in."""
        ...


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_admission",
        "_ahead",
        "_deadline",
        "_full",
        "_intake",
        "_last",
        "_leaving",
        "_paused_by",
        "_phase",
        "_runtime",
        "_timer",
        "_timer_at",
        "body_left",
        "closing",
        "head",
        "hop",
        "length",
        "request",
        "transport",
        "unsent",
        "upload",
    )

    def __init__(self, intake: Entrance) -> None:
        self._intake = intake
        self._runtime = intake.runtime
        self.transport: asyncio.Transport
        self.hop: Hop
        self._deadline: float
        self._timer_at: float
        self._timer: asyncio.TimerHandle
        self.request: ClientRequest | None = None
        self.closing = False  # after the response under way, which is marked as the last
        self.head: RequestHead | None = None
        self._last: RequestHead | None = None  # before this one, if it may come again
        self.length = _NO_HEAD
        self.upload: Upload | None = None
        self.unsent = b""  # of a response, for `lb.http.write_batch`
        self.body_left = False  # the request has started before its body was over
        self._admission: Admission | None = None  # of a request that has not started
        self._ahead = b""
        self._leaving = 0.0  # seconds to wait for the last request; 0: it may send any number
        self._full = False  # it does not take writes
        self._phase = IDLE
        self._paused_by = 0

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self.identify()
        self._deadline = self._runtime.clock() + self._intake.limits.head_timeout_s
        self._start_timer()
        self._runtime.clients.add(self)
        if self._intake.is_full():
            # Closed at once, and with TLS soon, whether or not the client answers: its descriptor is needed.
            self._intake.refused(TOO_MANY_CONNECTIONS)
            self.transport.write(self._error(TOO_MANY_CONNECTIONS, None, close=True))
            self._close(_REFUSED_S)

    def data_received(self, data: bytes) -> None:
        try:
            if self.unsent:
                self.flush()  # what comes now may be responded to at once
            phase = self._phase
            if phase == RESPONSE:
                self._take_ahead(data)
            elif phase == BODY:
                self._take_body(data)
            elif phase == TUNNEL:
                if self.request is not None:
                    self.request.client_data(data)
            elif phase != OVER:
                self._take_head(self._ahead + data if self._ahead else data)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def eof_received(self) -> bool:
        # Half a close is a close: a client that shuts down its writing side before the response has mostly left, and cannot
        # be distinguished from one that has.
        try:
            if self.request is not None:
                self.request.halt()
            self.flush()
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._runtime.clients.discard(self)
        if self._phase == BODY:
            self._intake.client_gone()
        self._phase = OVER
        self._drop_upload()
        request, self.request = self.request, None
        if request is not None:
            try:
                request.client_lost()
            except Exception as fault:  # noqa: BLE001 (the barrier)
                request.crashed("client", fault)

    def resume_writing(self) -> None:
        self._full = False
        try:
            self.resume_reading(PAUSE_CLIENT)
            if self.request is not None:
                self.request.client_drained()
            elif self._phase == RESPONSE:
                self._runtime.loop.call_soon(self._next_head)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def identify(self) -> None:
        transport = self.transport
        name = transport.get_extra_info("peername")
        peer = str(name[0]) if name else "unknown"
        scheme = b"https" if transport.get_extra_info("sslcontext") is not None else b"http"
        shown = peer.encode()
        self.hop = Hop(b"[%b]" % shown if ":" in peer else shown, scheme, self._intake.is_trusted_proxy(peer))
        self._last = None  # which was accepted under other limits

    # --- requests in

    def _take_head(self, data: bytes) -> None:
        limits = self._intake.limits
        if self._phase == IDLE:
            data = data.lstrip(b"\r\n")  # RFC 9112 §2.2: some clients end a body with a line too many
            if not data:
                return
            self._phase = HEAD
            self._deadline = self._runtime.clock() + limits.head_timeout_s
        last = self._last
        end = -1 if last is None else last.end_in(data)
        if last is not None and 0 <= end <= limits.max_head_bytes:
            head, length = last, last.length_in(data, end) if last.after else last.length
        else:
            end = data.find(END, max(0, len(self._ahead) - 3)) + 4
            if end < 4 or end > limits.max_head_bytes + 4:
                self._wait_for_head(data)
                return
            try:
                head, length = self._intake.heads.request(data[:end], limits.max_headers)
            except HeadError as error:
                self._ahead = b""
                if data.startswith(PREFACE):
                    self._refuse_http_2(data)
                else:
                    self._refuse(Rejection(error.status, error.code, str(error)))
                return
            self._last = head if head.before else None
        self._ahead = b""
        self.closing = not head.keep_alive or self._leaving > 0.0
        self.head, self.length = head, length
        self._take_request(head, length, data[end:])

    def _wait_for_head(self, data: bytes) -> None:
        limit = self._intake.limits.max_head_bytes
        if data.startswith(PREFACE):
            self._refuse_http_2(data)
        elif not data[:1].isalpha() or b"\n\n" in data:  # a handshake of TLS, say, or bare line feeds
            self._refuse(Rejection(400, "malformed_request", "The head of the request is malformed."))
        elif len(data) > limit:
            self._refuse(Rejection(431, "head_too_large", f"The head of the request exceeds {limit} bytes."))
        else:
            self._ahead = data
            self._advance_timer()

    def _take_request(self, head: RequestHead, length: int, rest: bytes) -> None:
        """The head is here, and `rest` behind it."""
        limits = self._intake.limits
        whole = length <= len(rest) and not head.chunked
        verdict = self._intake.check(head)
        if not isinstance(verdict, bytes):  # a health check or a preflight is no demand for a target
            self._intake.arrived()
        if not isinstance(verdict, Admission):
            self._phase = RESPONSE
            self._ahead = rest[length:] if whole else b""
            self.body_left = not whole
            self._respond_without_request(verdict)
            return
        if length > limits.max_body_bytes and for_model(head.path):
            self._admission = verdict
            self._refuse_body(self._too_large())
            return
        if whole and length <= limits.buffer_bytes:
            self._ahead = rest[length:]
            self._begin(
                head, rest[:length] if self._ahead else rest, verdict
            )  # as nearly always: all of it is here
            return
        if head.expects and not rest:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._phase = BODY
        self._admission = verdict
        holding = self._runtime.buffers.open(self._out_of_room, verdict.tenant, verdict.weight)
        self.upload = Upload(length, head.chunked, holding, self._runtime.clock(), for_model(head.path))
        self._runtime.uploading.add(self)
        self._take_body(rest)

    def _take_body(self, data: bytes) -> None:
        """More of the body, while it is collected."""
        upload, head = self.upload, self.head
        assert upload is not None and head is not None  # noqa: S101, PT018 (for the type checker)
        limits = self._intake.limits
        refusal: Rejection | None = None
        try:
            part, end = upload.feed(data)
        except (FramingError, TinyChunksError) as error:
            refusal = refusal_of(error)
        else:
            if upload.size > limits.max_body_bytes and for_model(head.path):
                refusal = self._too_large()
            elif not upload.keep(part):
                refusal = NO_ROOM
        if refusal is not None:
            self._refuse_body(refusal)
            return
        self._deadline = self._runtime.clock() + limits.idle_timeout_s
        if end >= 0:
            self._ahead = data[end:]
        elif upload.size > limits.buffer_bytes:
            self.body_left = True
        else:
            return
        body = upload.take()
        if len(body) > _LONG_BYTES:
            self.pause_reading(PAUSE_TURN)
            self._runtime.loop.call_soon(self._begin_long, upload, body)
        else:
            self._begin_upload(upload, body)

    def _begin_long(self, upload: Upload, body: bytes) -> None:
        """Begin the request of a long body, unless the connection or its room was lost meanwhile."""
        if self.upload is not upload or self._phase != BODY:
            return
        try:
            self._begin_upload(upload, body)
            self.resume_reading(PAUSE_TURN)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def _begin_upload(self, upload: Upload, body: bytes) -> None:
        head, admission = self.head, self._admission
        assert head is not None and admission is not None  # noqa: S101, PT018 (for the type checker)
        upload.release()  # the request reserves what it keeps
        if not self.body_left:
            self._upload_over()
        self._begin(head, body, admission, upload.structure)

    def _begin(
        self, head: RequestHead, body: bytes, admission: Admission, structure: int | None = None
    ) -> None:
        self._phase = RESPONSE
        self._admission = admission
        request = self._intake.begin(self, head, body, admission, structure)
        if isinstance(request, Rejection):
            self._drop_upload()
            self._respond_without_request(request)
            return
        self._admission = None  # from here on the request settles it
        self.request = request
        if self.body_left:
            self.pause_reading(PAUSE_TARGET)  # until a target takes it
            self._advance_timer()  # from here on the client owes the rest of it
        if len(body) > _LONG_BYTES:
            request.call_soon(request.place)
        else:
            request.place()

    def _take_ahead(self, data: bytes) -> None:
        """Something comes while a response is in progress: the rest of a long body, or the next request."""
        if self.body_left:
            self._pass_body(data)
            return
        self._ahead += data
        if len(self._ahead) > MAX_AHEAD_BYTES:
            # Not read on, its end would not be noticed, and the engine would work for a client that may have left.
            self.transport.abort()

    def _pass_body(self, data: bytes) -> None:
        """The rest of a body that is too long to be kept."""
        request, upload, head = self.request, self.upload, self.head
        assert upload is not None and head is not None  # noqa: S101, PT018 (for the type checker)
        try:
            part, end = upload.feed(data)
        except (FramingError, TinyChunksError) as error:
            self._abort_body(refusal_of(error))
            return
        self._deadline = self._runtime.clock() + self._intake.limits.idle_timeout_s
        if upload.size > self._intake.limits.max_body_bytes and for_model(head.path):
            self._abort_body(self._too_large())
            return
        if end >= 0:
            self.body_left = False
            self._upload_over()
            self._ahead = data[end:]
        if request is not None:
            request.more_body(part, last=end >= 0)

    def _abort_body(self, refusal: Rejection) -> None:
        self.closing = True
        if self.request is not None:
            self.request.bad_body(refusal.status, refusal.code, refusal.message)
        else:
            self.transport.close()

    # --- from one request to the next

    def next(self) -> None:
        """The response is over: on to the next request, or to the end."""
        self.request = None
        if self.body_left:  # an unread rest would be taken for the next request
            self._linger()
        elif self.closing:
            self._close()
        else:
            self.head = None
            self._deadline = self._runtime.clock() + self._intake.limits.keepalive_s
            if self._leaving or self._runtime.closing:
                # This response was not marked as the last: the next request may be on its way.
                self._deadline = min(self._deadline, self._runtime.clock() + self._leaving)
            self._advance_timer()
            if self._full:
                self.pause_reading(PAUSE_CLIENT)  # responses that the client does not read must not pile up
            if self._ahead:
                # In a turn of its own: a thousand requests in one packet must not be a thousand frames on the stack.
                self._phase = RESPONSE
                self._runtime.loop.call_soon(self._next_head)
            else:
                self._phase = IDLE
                if self._paused_by:
                    self.resume_reading(PAUSE_TARGET)

    def _next_head(self) -> None:
        """Go on with what was sent ahead, unless the client does not even take what it has been sent."""
        if self._phase != RESPONSE or self.request is not None or self._full:
            return
        try:
            if self.closing:
                self._close()
                return
            self._phase = IDLE
            ahead, self._ahead = self._ahead, b""
            if self._paused_by:
                self.resume_reading(PAUSE_TARGET)
            self._take_head(ahead)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    # --- what goes wrong, and what waits

    def pause_writing(self) -> None:
        self._full = True
        request = self.request
        try:
            if request is not None:
                request.client_full()
            else:
                self.pause_reading(PAUSE_CLIENT)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def _crashed(self, error: Exception) -> None:
        request = self.request
        if request is not None:
            request.crashed("client", error)
            return
        self._runtime.faults.report("client", error)
        self._drop_upload()
        if self._phase in (IDLE, OVER) or self.transport.is_closing():
            self.transport.abort()
            return
        try:
            self._refuse(Rejection(500, "internal_error", "The load balancer failed on this request."))
        except Exception as second:  # noqa: BLE001 (the barrier)
            self._runtime.faults.report("client", second)
            self.transport.abort()

    def _drop_upload(self) -> None:
        upload = self.upload
        if upload is not None:
            self._upload_over()
            upload.release()
        admission, self._admission = self._admission, None
        if admission is not None:
            self._intake.abandoned(admission)

    def _upload_over(self) -> None:
        """All of the body is here, or no more of it is taken."""
        self.upload = None
        self._runtime.uploading.discard(self)

    # --- responses out

    def send_soon(self, response: bytes) -> None:
        self.unsent = response
        self._runtime.write_batcher.add(self)

    def flush(self) -> None:
        unsent, self.unsent = self.unsent, b""
        if unsent and not self.transport.is_closing():
            self.transport.write(unsent)

    def tunnel(self) -> bytes:
        self._phase = TUNNEL
        ahead, self._ahead = self._ahead, b""
        return ahead

    def hang_up(self, *, abort: bool = False) -> None:
        self.request = None
        if abort:
            self._phase = OVER
            self.transport.abort()
        else:
            self._close()

    def close_soon(self, grace_s: float, fresh_s: float | None = None) -> None:
        """Close after the next response, which is marked as the last, or when the connection has been idle.

        Idle: no request for `grace_s`, or for `fresh_s` on a connection that has had none yet. A request may be on its way, and would be lost if we closed now.
        """
        if fresh_s is not None and self.length == _NO_HEAD:
            grace_s = fresh_s
        self._leaving = grace_s
        if self._phase != IDLE:
            return
        if grace_s <= 0:
            self._close()
        else:
            self._deadline = min(self._deadline, self._runtime.clock() + grace_s)
            self._advance_timer()

    def pause_reading(self, who: int) -> None:
        """`who` is a `Pause`."""
        if not self._paused_by and not self.transport.is_closing():
            self.transport.pause_reading()
        self._paused_by |= who

    def resume_reading(self, who: int) -> None:
        if self._paused_by & who:
            self._paused_by &= ~who
            if not self._paused_by and not self.transport.is_closing():
                if self.body_left:  # it could not send while we did not read
                    now = self._runtime.clock()
                    self._deadline = now + self._intake.limits.idle_timeout_s
                    if self.upload is not None:
                        self.upload.restart_window(now)
                self.transport.resume_reading()

    def _too_large(self) -> Rejection:
        limit = self._intake.limits.max_body_bytes
        return Rejection(
            413, "body_too_large", f"The body exceeds {limit} bytes (load_balancer.max_body_mb)."
        )

    def _respond_without_request(self, refusal: Rejection | bytes) -> None:
        """Respond without a request, and go on with the connection. `refusal` may be a whole response."""
        head = self.head
        if head is not None and head.http_1_0:
            self.closing = True
        close = self.closing = self.closing or self.body_left or self._runtime.closing
        if isinstance(refusal, Rejection):
            self._intake.refused(refusal)
            refusal = self._error(refusal, head, close=close)
        elif close:
            refusal = error_responses.closing(refusal)
        self.transport.write(refusal)
        self.next()

    def _refuse_body(self, refusal: Rejection) -> None:
        """Refuse a request that was let in, and whose body is not all here."""
        tenant = self._admission.tenant if self._admission is not None else ""
        self._drop_upload()
        self._refuse(refusal, tenant)

    def _out_of_room(self) -> None:
        """Another tenant has got the memory of the body that is being collected."""
        try:
            self._refuse_body(NO_ROOM)
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def _refuse(self, refusal: Rejection, tenant: str = "") -> None:
        """Respond here and now, and read no more of this connection."""
        self._intake.refused(refusal, tenant)
        self.transport.write(self._error(refusal, self.head, close=True))
        self._linger()

    def _refuse_http_2(self, data: bytes) -> None:
        """Respond to the first request of a connection that is all HTTP/2, once it is here."""
        if not self.closing:
            self.closing = True
            self.transport.write(SETTINGS)
        request = first_request(data)
        if request is None and len(data) <= self._intake.limits.max_head_bytes:
            self._ahead = data
            self._advance_timer()
            return
        self._intake.refused(HTTP_2)
        self.transport.write(http_1_1_required(request, HTTP_2.message))
        self._linger()

    def _error(self, refusal: Rejection, head: RequestHead | None, *, close: bool) -> bytes:
        retry_after_s = refusal.retry_after_s
        cors = self._intake.cors
        return error_responses.raw_error(
            refusal.status,
            refusal.code,
            refusal.message,
            request_id=head.request_id if head is not None else b"",
            retry_after_s=None if retry_after_s is None else max(1, round(retry_after_s + 0.5)),
            close=close,
            head_only=head is not None and head.method == b"HEAD",
            more_lines=refusal.more_lines
            + (b"" if cors is None else cors[head.origin if head is not None else None]),
            path=head.path if head is not None else b"",
        )

    def _linger(self) -> None:
        """Let the client read our response although it is still sending.

        Closing with unread bytes resets the connection, and a reset may overtake the response.
        """
        self._phase = OVER
        self._ahead = b""
        self.flush()
        self.resume_reading(PAUSE_TARGET | PAUSE_CLIENT | PAUSE_TURN)  # and drop it
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self._deadline = self._runtime.clock() + _LINGER_S
        self._advance_timer()

    def _close(self, timeout_s: float | None = None) -> None:
        """Close when the client has taken what was written to it, for which it has the idle timeout, or `timeout_s`."""
        if timeout_s is None:
            timeout_s = self._intake.limits.idle_timeout_s
        self._phase = OVER
        self._ahead = b""
        self._deadline = self._runtime.clock() + timeout_s
        self._advance_timer()
        self.flush()
        self.transport.close()

    # --- time

    def _start_timer(self) -> None:
        # Remembered, because uvloop's handle of a timer that is due at once does not know when.
        self._timer_at = self._deadline
        self._timer = self._runtime.loop.call_at(self._deadline, self._on_timer)

    def _advance_timer(self) -> None:
        """Set the timer to the deadline in force, unless it goes off before."""
        if self._timer_at > self._deadline:
            self._timer.cancel()
            self._start_timer()

    def _on_timer(self) -> None:
        """One timer per connection, not one per request: it checks the deadline in force, and goes on waiting.

        There is none while the client owes nothing, or 10,000 waiting requests would be 1,000 timers a second.
        """
        self._timer_at = _NEVER
        try:
            self._check_time(self._runtime.clock())
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def check_upload(self, now: float) -> None:
        """Refuse the body that is arriving, if it is too slow."""
        upload, least = self.upload, self._intake.limits.min_upload_bytes_per_s
        if upload is None or self._phase == OVER or self._paused_by or not upload.is_slow(now, least):
            return
        try:
            if self.request is not None:
                self._abort_body(too_slow(least))
            else:
                self._refuse_body(too_slow(least))
        except Exception as error:  # noqa: BLE001 (the barrier)
            self._crashed(error)

    def _check_time(self, now: float) -> None:
        if self.request is not None:  # which has a clock of its own, but for what its client owes it
            if not self.body_left:
                return
            if not self._paused_by and now >= self._deadline:
                self._abort_body(BODY_TIMEOUT)
                return
            wait_s = max(1.0, self._intake.limits.head_timeout_s)
            wait_s = min(wait_s, max(0.05, self._deadline - now)) if not self._paused_by else 1.0
            self._timer_at = now + wait_s
            self._timer = self._runtime.loop.call_at(self._timer_at, self._on_timer)
            return
        phase = self._phase
        if now >= self._deadline:
            if phase == HEAD:
                self._refuse(HEAD_TIMEOUT)
            elif phase == BODY:
                self._refuse_body(BODY_TIMEOUT)
            elif phase == IDLE:
                self._close()
            else:
                self.transport.abort()
                return
        self._advance_timer()
