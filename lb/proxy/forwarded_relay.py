"""What relays have in common that let the fast path (`lb.proxy.fast_path`) move their chunks while nothing is unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lb.http.tls_transport import TlsTransport
from lb.proxy.fast_path import Forwarding, ForwardingMode, StopReason
from lb.proxy.ports import RelayHost
from lb.stream.token_usage import OutputCounter

TAIL_BYTES: Final = 2048  # of a stream, in which its usage and its end mark are found
_MAX_FRUITLESS: Final = (
    8  # forwardings in a row through which nothing went; then the stream stays with Python
)


class ForwardedRelay:
    """A relay with at most one forwarding. While it has one, the event loop does not read the target's connection."""

    __slots__ = (
        "_counter",
        "_due",
        "_forwarding",
        "_fruitless",
        "_has_received",
        "_lent",
        "_limit_bytes",
        "_mode",
        "_request",
        "_write",
        "blocked",
        "chunks",
        "sent_bytes",
        "silent_s",
    )

    def __init__(self, request: RelayHost, mode: ForwardingMode, limit_bytes: int) -> None:
        """`limit_bytes`, as they came, are kept by a forwarding before it comes back."""
        self._request = request
        self._mode = mode
        self._limit_bytes = limit_bytes
        self._forwarding: Forwarding | None = None
        self._lent: tuple[TlsTransport, ...] = ()  # connections that the forwarding uses
        self._due = False  # is a forwarding about to be opened?
        self._fruitless = 0
        self._has_received = True
        self._counter = OutputCounter()
        self._write: Callable[[bytes], None] = request.client.transport.write
        self.blocked = False
        self.silent_s = 0.0
        self.chunks = 0
        self.sent_bytes = 0

    # --- what a relay provides

    def data(self, data: bytes) -> None:
        """Bytes of the target's connection."""
        raise NotImplementedError

    def _may_forward(self) -> bool:
        """Return whether the stream is at a place where the fast path can go on."""
        raise NotImplementedError

    def _take_from(self, forwarding: Forwarding) -> None:
        """Take the bytes that have gone through the forwarding."""
        raise NotImplementedError

    # --- the forwarding

    def _expect_forwarding(self) -> None:
        """Open a forwarding when what was written has gone: in the next turn of the loop."""
        if not self._due and self._request.fast_path is not None and self._fruitless < _MAX_FRUITLESS:
            self._due = True
            self._request.call_soon(self._open_due_forwarding)

    def _open_due_forwarding(self) -> None:
        self._due = False
        self._open_forwarding()

    def _open_forwarding(self) -> bool:
        """Return whether the stream has a forwarding from now on that it did not have before."""
        request = self._request
        fast_path, connection, client = request.fast_path, request.connection, request.client.transport
        if self._forwarding is not None or self.blocked or not self._may_forward():
            return False
        if fast_path is None or connection is None:
            return False
        source, sink = fast_path.end_of(connection.transport), fast_path.end_of(client)
        if source is None or sink is None or connection.transport.is_closing() or client.is_closing():
            return False
        if client.get_write_buffer_size() or request.client.body_left:
            return False  # what it holds must go first; the next chunk tries again
        connection.transport.pause_reading()
        self._forwarding = fast_path.forwarding(source, sink, self._limit_bytes, self, self._mode)
        self._lent = tuple(one for one in (connection.transport, client) if isinstance(one, TlsTransport))
        for one in self._lent:
            one.lend(self._take_over)
        return True

    def forwarding_stopped(self, reason: StopReason, data: bytes) -> None:
        """The forwarding has met something that it leaves to us."""
        try:
            self._take_back(reason, data)
        except Exception as error:  # noqa: BLE001 (an entrance into the proxy)
            self._request.crashed("forwarding_stopped", error)

    def _take_back(self, reason: StopReason, data: bytes, may_open: bool = True) -> None:
        if self._forwarding is None:  # halted in the meantime; what was read counts as never received
            return
        self._fruitless = 0 if self._absorb() else self._fruitless + 1
        self._close_forwarding()
        connection = self._request.connection
        if connection is None:
            return
        if reason is StopReason.FULL and may_open and self._open_forwarding():
            return
        connection.transport.resume_reading()
        if reason is StopReason.UNSENT:
            self._write(data)
        elif reason is StopReason.IRREGULAR:
            self.data(data)

    def _absorb(self) -> int:
        """Take over what has gone through the forwarding; how many chunks."""
        forwarding = self._forwarding
        if forwarding is None:
            return 0
        self._take_from(forwarding)
        chunks, sent_bytes, events, ids = forwarding.counts()
        self.chunks += chunks
        self.sent_bytes += sent_bytes
        self._counter.events += events
        self._counter.ids += ids
        self._has_received = forwarding.pulse() or self._has_received
        return chunks

    def _take_over(self) -> bool:
        """Have the event loop read the target's connection again, if a forwarding does. Returns whether that had just stopped by itself."""
        forwarding = self._forwarding
        if forwarding is None:
            return False
        stopped = forwarding.stop()
        if stopped is not None:
            self._take_back(StopReason(stopped[0]), stopped[1], may_open=False)
            return True
        self._absorb()
        self._close_forwarding()
        connection = self._request.connection
        if connection is not None and not self.blocked:
            connection.transport.resume_reading()
        return False

    def halt(self) -> None:
        """The target's connection is about to be closed, or taken away."""
        forwarding = self._forwarding
        if forwarding is None:
            return
        stopped = forwarding.stop()
        self._absorb()
        self._close_forwarding()
        if (
            stopped is not None
            and stopped[0] == StopReason.UNSENT
            and not self._request.client.transport.is_closing()
        ):
            self._write(stopped[1])

    def _close_forwarding(self) -> None:
        self._forwarding = None
        lent, self._lent = self._lent, ()
        for one in lent:
            one.returned()

    def pulse(self) -> bool:
        """Return whether something has come since the last call."""
        has_received, self._has_received = self._has_received, False
        return (self._forwarding is not None and self._forwarding.pulse()) or has_received

    def held_bytes(self) -> int:
        """Return about how many bytes of memory hold what has been sent."""
        return 0 if self._forwarding is None else self._forwarding.held_bytes()
