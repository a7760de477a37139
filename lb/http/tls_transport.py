"""TLS on a socket of the event loop: asyncio's transport, with OpenSSL itself at the socket.

The transports of asyncio and uvloop keep the ciphertext of a connection in buffers between OpenSSL and a transport of their own.
Here OpenSSL reads and writes the socket (`ssl.SSLSocket`), so a chunk costs less, a connection that waits has no buffers,
and the helper in C can move the records of a connection (`lb.proxy.fast_path`): all state is OpenSSL's.

Two rules keep the bytes exact:

- OpenSSL must be given what it has not taken again, unchanged. What is written is cut into records of `RECORD_BYTES` at most, and
  one that was not taken stays as it is, the first in `_unsent`.
- OpenSSL reads one record at a time, so what is left to read makes the socket readable. Only a forwarding of the helper may leave
  something in OpenSSL; `resume_reading` therefore reads without waiting for the socket.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from socket import IPPROTO_TCP, SO_ERROR, SOCK_STREAM, SOL_SOCKET, TCP_INFO, TCP_NODELAY, socket
from typing import Any, cast

RECORD_BYTES = 16 * 1024  # the most that a record holds
SHUTDOWN_S = 30.0  # for what is unsent, and for the peer to close its side
_READ_BYTES = 64 * 1024
_MOST_RECORDS = 16  # of one turn of the loop
_HIGH_WATER = 64 * 1024
_NONE = asyncio.Protocol()
_TCP_CLOSE = 7  # a state of Linux' struct tcp_info: not that of a connection whose peer has sent its end


class _Skipped(Enum):
    """What was read and dropped: a part of what has come, all of it, or all and the peer's side has ended."""

    SOME = 0
    ALL = 1
    END = 2


class TlsTransport(asyncio.Transport):
    """A connection of TLS: `handshake`, then `begin`. There is no half-open connection: the peer's end closes both directions."""

    __slots__ = (
        "_closing",
        "_context",
        "_descriptor",
        "_drain_due",
        "_handshake",
        "_high_water",
        "_is_full",
        "_loop",
        "_lost",
        "_low_water",
        "_paused",
        "_protocol",
        "_shut_down",
        "_socket",
        "_take_back",
        "_timer",
        "_unsent",
        "_unsent_bytes",
        "_watches_reads",
        "_watches_writes",
        "_write_wants_read",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connected: socket,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        """Take over a connected socket that does not block. Raises OSError, ssl.SSLError among them."""
        super().__init__()
        self._loop = loop
        context.options &= (
            ~ssl.OP_IGNORE_UNEXPECTED_EOF
        )  # which Python 3.11.2 sets: half of a response would look whole
        self._context = context
        self._protocol: asyncio.Protocol
        self._socket = context.wrap_socket(
            connected,
            server_side=server_side,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=False,
        )
        self._descriptor = self._socket.fileno()
        self._handshake: asyncio.Future[None] | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high_water = _HIGH_WATER
        self._low_water = _HIGH_WATER // 4
        self._is_full = False  # `pause_writing` of the protocol has been called
        self._paused = False
        self._take_back: Callable[[], object] | None = None  # while it is lent
        self._drain_due = False  # is `_drain` about to be called?
        self._watches_reads = self._watches_writes = False
        self._write_wants_read = False
        self._closing = False
        self._shut_down = False  # has our close_notify been sent?
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None

    # --- the handshake

    async def handshake(self, timeout_s: float) -> None:
        """Complete the handshake. Raises OSError, ssl.SSLError among them; then, and if it is cancelled, the socket is closed."""
        done = self._handshake = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._handshake_too_long, timeout_s)
        try:
            self._advance_handshake()
            await done
        except BaseException:
            self.discard()
            raise
        finally:
            timer.cancel()
            self._handshake = None

    def _advance_handshake(self) -> None:
        done = self._handshake
        if done is None or done.done():
            return
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self._watch_writes(False)
            self._watch_reads(True)
        except ssl.SSLWantWriteError:
            self._watch_writes(True)
        except (OSError, ValueError) as error:
            if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) or _is_unexpected_end(error):
                error = ConnectionResetError("the peer closed the connection during the handshake")
            done.set_exception(error)
        else:
            done.set_result(None)

    def _handshake_too_long(self, timeout_s: float) -> None:
        if self._handshake is not None and not self._handshake.done():
            why = f"the TLS handshake has taken longer than {timeout_s:g} s"
            self._handshake.set_exception(ConnectionAbortedError(why))

    def discard(self) -> None:
        """Close the socket of a connection that has no protocol yet."""
        self._lost = self._closing = True
        self._watch_reads(False)
        self._watch_writes(False)
        self._socket.close()

    def begin(self, protocol: asyncio.Protocol) -> None:
        """Hand the connection to its protocol once the handshake is complete."""
        self._protocol = protocol
        self._watch_writes(False)
        protocol.connection_made(self)
        if not self._paused and not self._lost:
            self._watch_reads(True)

    # --- reading

    def pause_reading(self) -> None:
        if not self._closing:
            self._paused = True
            self._watch_reads(self._write_wants_read)

    def resume_reading(self) -> None:
        if self._closing or not self._paused:
            return
        self._paused = False
        if self._take_back is None:
            self._read_on()

    def _read_on(self) -> None:
        self._watch_reads(True)
        if not self._drain_due:
            self._drain_due = True
            self._loop.call_soon(self._drain)

    def is_reading(self) -> bool:
        return not self._paused and not self._closing

    def _drain(self) -> None:
        """Read what a forwarding has left in OpenSSL, the end of the connection included."""
        self._drain_due = False
        if not self._paused and not self._closing:
            self._read(empties=True)

    def _readable(self) -> None:
        if self._handshake is not None:
            self._advance_handshake()
            return
        if self._write_wants_read:
            self._write_wants_read = False
            self._flush()
            self._watch_reads(self._write_wants_read or self._closing or not self._paused)
        if self._lost:
            return
        if self._closing:
            if self._skip() is _Skipped.END and self._shut_down:
                self._lose(None)
        elif not self._paused:
            self._read()

    def _read(self, *, empties: bool = False) -> None:
        """Read a record, or as many as come one after the other; `empties`: all that there are, up to a limit."""
        parts: list[bytes] = []
        ended = False
        error: OSError | None = None
        try:
            while len(parts) < _MOST_RECORDS:
                data = self._socket.read(_READ_BYTES)
                if not data:
                    ended = True
                    break
                parts.append(data)
                if len(data) < RECORD_BYTES and not empties:
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self._watch_writes(True)  # and then reads again
        except OSError as failure:
            error = failure
        if parts:
            self._protocol.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if error is not None:
            self._lose(self._cause_of(error))
        elif ended:
            self._peer_ended()
        elif empties and len(parts) == _MOST_RECORDS and not self._paused and not self._closing:
            self.pause_reading()
            self.resume_reading()  # and reads on in the next turn

    def _cause_of(self, error: OSError) -> OSError | None:
        """Return the error of a connection that cannot be read; None if the peer has just closed it.

        An end without close_notify is one, as it is without TLS: where it matters the framing of HTTP shows it. Some versions of
        `ssl` report a reset as such an end, without a reason; then the kernel knows.
        """
        if _is_unexpected_end(error):
            return None
        if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return error
        try:
            is_reset = self._socket.getsockopt(IPPROTO_TCP, TCP_INFO, 1)[0] == _TCP_CLOSE
        except OSError:  # no TCP
            is_reset = False
        return ConnectionResetError(errno.ECONNRESET, "connection reset by peer") if is_reset else None

    def _peer_ended(self) -> None:
        """The peer has sent its close_notify."""
        if not self._closing:
            self._protocol.eof_received()
        if not self._lost:
            self.close()

    def _skip(self) -> _Skipped:
        """Read what has come, and drop it."""
        try:
            for _ in range(_MOST_RECORDS):
                if not self._socket.read(_READ_BYTES):
                    return _Skipped.END
        except ssl.SSLWantReadError:
            return _Skipped.ALL
        except ssl.SSLWantWriteError:
            self._watch_writes(True)
        except OSError:  # the end of the connection among them
            self._lose(None)
        return _Skipped.SOME

    # --- writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not data:
            return
        if self._take_back is not None:
            self._have_back()
        if not isinstance(data, bytes):
            data = bytes(data)
        if len(data) <= RECORD_BYTES:
            self._unsent.append(data)
        else:
            self._unsent.extend(data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
        self._unsent_bytes += len(data)
        if not self._watches_writes and not self._write_wants_read:
            self._flush()
        if self._unsent_bytes > self._high_water and not self._is_full and not self._closing:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _writable(self) -> None:
        if self._handshake is not None:
            self._advance_handshake()
            return
        self._watch_writes(False)
        if self._unsent:
            self._flush()
        if self._lost:
            return
        if self._closing:
            if not self._unsent:
                self._say_goodbye()
            return
        if self._is_full and self._unsent_bytes <= self._low_water:
            self._is_full = False
            self._protocol.resume_writing()
        if not self._paused and not self._closing:
            self._read()  # it may have been reading that waited

    def _flush(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                data = unsent[0]
                taken = self._socket.write(data)
                self._unsent_bytes -= taken
                if taken == len(data):
                    unsent.popleft()
                else:
                    unsent[0] = data[taken:]
        except ssl.SSLWantWriteError:
            self._watch_writes(True)
        except ssl.SSLWantReadError:  # another handshake (TLS 1.2)
            self._write_wants_read = True
            self._watch_reads(True)
        except OSError as error:
            self._lose(error)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = _HIGH_WATER if low is None else 4 * low
        self._high_water = high
        self._low_water = high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_water, self._high_water

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def can_write_eof(self) -> bool:
        return False

    # --- the end

    def close(self) -> None:
        """Close when what was written is sent, and the peer has closed its side: bytes that are unread would reset the connection."""
        if self._closing:
            return
        self._have_back()
        self._closing = True
        self._timer = self._loop.call_later(SHUTDOWN_S, self._lose, TimeoutError("TLS shutdown timed out"))
        self._watch_reads(True)
        if not self._unsent:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Send close_notify, after all else is sent."""
        if self._shut_down or self._lost:
            return
        if self._skip() is _Skipped.SOME:  # OpenSSL takes what is unread then for an error
            if not self._watches_writes:
                self._loop.call_soon(self._say_goodbye)
            return
        try:
            self._socket.unwrap()
        except ssl.SSLWantReadError:
            self._shut_down = True  # sent, and the peer's has not come
        except ssl.SSLWantWriteError:
            self._watch_writes(True)
        except (OSError, ValueError):
            self._lose(None)
        else:
            self._lose(None)

    def abort(self) -> None:
        self._lose(None)

    def is_closing(self) -> bool:
        return self._closing

    def _lose(self, error: Exception | None) -> None:
        """Stop. `connection_lost` of the protocol is called in the next turn of the loop, and the descriptor is its own until then."""
        if self._lost:
            return
        self._have_back()
        self._lost = self._closing = True
        self._watch_reads(False)
        self._watch_writes(False)
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self._loop.call_soon(self._report_lost, error)

    def _report_lost(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()
            self._protocol = _NONE  # which has a reference to this transport

    # --- the rest of a transport

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast("asyncio.Protocol", protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        tls = self._socket
        try:
            if name in ("socket", "ssl_object"):
                return tls
            if name == "sslcontext":
                return self._context
            if name == "peercert":
                return tls.getpeercert()
            if name == "cipher":
                return tls.cipher()
            if name == "peername":
                return tls.getpeername()
            if name == "sockname":
                return tls.getsockname()
        except (OSError, ValueError):  # it is closed
            pass
        return default

    # --- while another thread reads and writes the connection

    def end(self) -> ssl.SSLSocket | None:
        """Return the connection, to be lent; None if what OpenSSL holds has to be read or written first."""
        is_busy = (
            self._drain_due or self._closing or self._unsent or self._watches_writes or self._write_wants_read
        )
        return None if is_busy else self._socket

    def lend(self, take_back: Callable[[], object]) -> None:
        """Leave the connection to a mover until `returned`. Should the transport need it itself it calls `take_back` before."""
        self._take_back = take_back
        self._watch_reads(False)

    def returned(self) -> None:
        self._take_back = None
        if not self._closing and not self._paused:
            self._read_on()

    def _have_back(self) -> None:
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            take_back()

    def _watch_reads(self, watch: bool) -> None:
        if watch != self._watches_reads:
            self._watches_reads = watch
            if watch:
                self._loop.add_reader(self._descriptor, self._readable)
            else:
                self._loop.remove_reader(self._descriptor)

    def _watch_writes(self, watch: bool) -> None:
        if watch != self._watches_writes:
            self._watches_writes = watch
            if watch:
                self._loop.add_writer(self._descriptor, self._writable)
            else:
                self._loop.remove_writer(self._descriptor)


def _is_unexpected_end(error: Exception) -> bool:
    """Return whether the connection has ended without close_notify; not every version of `ssl` has SSLEOFError for it."""
    return isinstance(error, ssl.SSLError) and error.reason == "UNEXPECTED_EOF_WHILE_READING"


async def tls_to(
    host: str, port: int, context: ssl.SSLContext, name: str, handshake_s: float
) -> TlsTransport:
    """Return a connection to a server of that name, ready to begin. Raises OSError, ssl.SSLError among them."""
    connected = await _connected_to(host, port)
    try:
        transport = TlsTransport(asyncio.get_running_loop(), connected, context, server_hostname=name)
    except BaseException:
        connected.close()
        raise
    await transport.handshake(handshake_s)
    return transport


async def _connected_to(host: str, port: int) -> socket:
    """Return a socket that is connected to the first of the host's addresses that accepts. Raises the first OSError of them."""
    loop = asyncio.get_running_loop()
    first: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=SOCK_STREAM):
        sock: socket | None = None
        try:
            sock = socket(family, kind, protocol)
            sock.setblocking(False)
            sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            await _complete(loop, sock, sock.connect_ex(address))
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):
                raise
            first = first or error
        else:
            return sock
    raise first or OSError(f"{host} has no address")


async def _complete(loop: asyncio.AbstractEventLoop, sock: socket, error: int) -> None:
    """Wait for a connect that has returned this error, 0 for none. Raises OSError.

    `sock_connect` of uvloop resolves the address once more, in a thread.
    """
    if error == errno.EINPROGRESS:
        writable = asyncio.Event()
        loop.add_writer(sock.fileno(), writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(sock.fileno())
        error = sock.getsockopt(SOL_SOCKET, SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
