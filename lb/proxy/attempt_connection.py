"""The connection of an attempt: its phase, how it is ended, and back-pressure. See `attempt`."""

from __future__ import annotations

from lb.core.targets import Booking
from lb.http.body_framing import BodyDecoder
from lb.http.messages import ResponseHead
from lb.http.upstream import Dialling, TargetConnection
from lb.proxy.ports import AttemptHost

# Plain numbers: a member of an Enum is looked up in its class each time it is compared.
DIALLING = 0
HEAD = 1  # waiting for the head of the response
FIRST = 2  # waiting for the first byte of a body that is relayed as it comes
WHOLE = 3  # reading a body that is sent in one piece
RELAY = 4
TUNNEL = 5
OVER = 6


class AttemptConnection:
    """`response` is the head of the response once there is one, `response_length` the length of its body if the head has it."""

    __slots__ = (
        "_buffer",
        "_dialling",
        "_interims",
        "_parts",
        "_request",
        "_services",
        "_size",
        "booking",
        "connection",
        "decoder",
        "phase",
        "response",
        "response_length",
        "since",
    )

    def __init__(self, request: AttemptHost, booking: Booking, now: float) -> None:
        self._request = request
        self._services = request.services
        self.booking = booking
        self.since = now
        self.connection: TargetConnection | None = None
        self.phase = DIALLING
        self.response: ResponseHead
        self.response_length: int | None = None
        self.decoder: BodyDecoder
        self._dialling: Dialling | None = None
        self._buffer = b""
        self._interims = 0

    # --- the end

    @property
    def sent(self) -> bool:
        """True if the target may have read some of the request."""
        return self.phase not in (DIALLING, OVER)

    def finish(self, gracefully: bool = False) -> None:
        """End the attempt, unless it is over. `gracefully` sends what was written first."""
        if self.phase == OVER:
            return
        if gracefully:
            self.close()
        else:
            self.drop()

    def crashed(self, error: Exception) -> None:
        self._request.crashed("target", error)

    def drop(self) -> None:
        """Close the connection at once: nothing waits for it any longer."""
        request = self._request
        request.halt()  # before either socket is closed: its number may be another's a moment later
        self.phase = OVER
        if self._dialling is not None:
            self._dialling.abandon()
            self._dialling = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        client = request.client
        if client.body_left:
            client.pause_reading(2)  # until another target takes it
        else:
            client.resume_reading(2)

    def give_back(self, reusable: bool) -> None:
        """The response has been read to its end."""
        connection, self.connection = self.connection, None
        self.phase = OVER
        if connection is None:
            return
        response = self.response
        if response.status == 204 and (self.response_length or response.chunked):
            reusable = False  # has it a body after all?
        if reusable and response.keep_alive and not self._request.client.body_left:
            connection.pool.give(connection, self._services.clock())
        else:
            connection.drop()

    def close(self) -> None:
        """Send what was written, and close."""
        connection, self.connection = self.connection, None
        self.phase = OVER
        if connection is not None:
            connection.sink = None
            connection.flush()
            connection.transport.close()

    # --- back-pressure

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()

    def target_full(self) -> None:
        self._request.client.pause_reading(2)

    def target_drained(self) -> None:
        self._request.client.resume_reading(2)
