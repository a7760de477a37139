"""What a client's connection sends, when it closes, and what it waits for. See `downstream`."""

from __future__ import annotations

import asyncio
from enum import IntFlag

from lb.core.api_keys import Admission
from lb.http import error_responses
from lb.http.messages import Hop, RequestHead
from lb.proxy.ports import ClientRequest, Entrance, Rejection
from lb.proxy.upload import Upload

_LINGER_S = 2.0
_NO_HEAD = -1  # the length of a request that has not come yet

# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
IDLE = 0  # between two requests
HEAD = 1  # a head has started
BODY = 2  # collecting a body
RESPONSE = 3  # a response is in progress
TUNNEL = 4
OVER = 5


class Pause(IntFlag):
    """Why reading from a client has stopped."""

    TARGET = 2  # it is slow to take a body
    CLIENT = 4  # it does not take what it is sent


PAUSE_TARGET = int(Pause.TARGET)
PAUSE_CLIENT = int(Pause.CLIENT)


class ClientOutput(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_admission",
        "_ahead",
        "_deadline",
        "_full",
        "_leaving",
        "_paused_by",
        "_phase",
        "_timer",
        "_timer_at",
        "body_left",
        "closing",
        "head",
        "hop",
        "length",
        "proxy",
        "request",
        "transport",
        "unsent",
        "upload",
    )

    def __init__(self, proxy: Entrance) -> None:
        self.proxy = proxy
        self.transport: asyncio.Transport
        self.hop: Hop
        self._deadline: float
        self._timer_at: float
        self._timer: asyncio.TimerHandle
        self.request: ClientRequest | None = None
        self.closing = False  # after the response under way, which is marked as the last
        self.head: RequestHead | None = None
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

    def identify(self) -> None:
        transport = self.transport
        name = transport.get_extra_info("peername")
        peer = str(name[0]) if name else "unknown"
        scheme = b"https" if transport.get_extra_info("sslcontext") is not None else b"http"
        shown = peer.encode()
        self.hop = Hop(b"[%b]" % shown if ":" in peer else shown, scheme, self.proxy.is_trusted_proxy(peer))

    def next(self) -> None:
        """The response is over: on to the next request, or to the end."""
        raise NotImplementedError

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
        self.proxy.faults.report("client", error)
        self._drop_upload()
        if self._phase in (IDLE, OVER) or self.transport.is_closing():
            self.transport.abort()
            return
        try:
            self._refuse(Rejection(500, "internal_error", "The load balancer failed on this request."))
        except Exception as second:  # noqa: BLE001 (the barrier)
            self.proxy.faults.report("client", second)
            self.transport.abort()

    def _drop_upload(self) -> None:
        upload, self.upload = self.upload, None
        if upload is not None:
            upload.release()
        admission, self._admission = self._admission, None
        if admission is not None:
            self.proxy.abandoned(admission)

    # --- responses out

    def send_soon(self, response: bytes) -> None:
        self.unsent = response
        self.proxy.write_batcher.add(self)

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
            self._deadline = min(self._deadline, self.proxy.clock() + grace_s)
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
                    self._deadline = self.proxy.clock() + self.proxy.limits.idle_timeout_s
                self.transport.resume_reading()

    def _too_large(self) -> Rejection:
        limit = self.proxy.limits.max_body_bytes
        return Rejection(
            413, "body_too_large", f"The body exceeds {limit} bytes (load_balancer.max_body_mb)."
        )

    def _respond_without_request(self, refusal: Rejection | bytes) -> None:
        """Respond without a request, and go on with the connection. `refusal` may be a whole response."""
        head = self.head
        if head is not None and head.http_1_0:
            self.closing = True
        close = self.closing = self.closing or self.body_left or self.proxy.closing
        if isinstance(refusal, Rejection):
            self.proxy.refused(refusal)
            refusal = self._error(refusal, head, close=close)
        elif close:
            refusal = error_responses.closing(refusal)
        self.transport.write(refusal)
        self.next()

    def _refuse(self, refusal: Rejection) -> None:
        """Respond here and now, and read no more of this connection."""
        self.proxy.refused(refusal)
        self.transport.write(self._error(refusal, self.head, close=True))
        self._linger()

    def _error(self, refusal: Rejection, head: RequestHead | None, *, close: bool) -> bytes:
        retry_after_s = refusal.retry_after_s
        cors = self.proxy.cors
        return error_responses.raw_error(
            refusal.status,
            refusal.code,
            refusal.message,
            request_id=head.request_id if head is not None else b"",
            retry_after_s=None if retry_after_s is None else max(1, round(retry_after_s + 0.5)),
            close=close,
            head_only=head is not None and head.method == b"HEAD",
            more_lines=b"" if cors is None else cors[head.origin if head is not None else None],
        )

    def _linger(self) -> None:
        """Let the client read our response although it is still sending.

        Closing with unread bytes resets the connection, and a reset may overtake the response.
        """
        self._phase = OVER
        self._ahead = b""
        self.flush()
        self.resume_reading(PAUSE_TARGET | PAUSE_CLIENT)  # and drop it
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self._deadline = self.proxy.clock() + _LINGER_S
        self._advance_timer()

    def _close(self) -> None:
        """Close when the client has taken what was written to it, for which it has the idle timeout."""
        self._phase = OVER
        self._ahead = b""
        self._deadline = self.proxy.clock() + self.proxy.limits.idle_timeout_s
        self._advance_timer()
        self.flush()
        self.transport.close()

    # --- time

    def _start_timer(self) -> None:
        # Remembered, because uvloop's handle of a timer that is due at once does not know when.
        self._timer_at = self._deadline
        self._timer = self.proxy.loop.call_at(self._deadline, self._on_timer)

    def _advance_timer(self) -> None:
        """Set the timer to the deadline in force, unless it goes off before."""
        if self._timer_at > self._deadline:
            self._timer.cancel()
            self._start_timer()

    def _on_timer(self) -> None:
        """Check the deadline in force, and go on waiting."""
        raise NotImplementedError
