"""The fast path: an optional helper in C that moves the chunks of running streams (`lb/proxy/_fast_path.c`).

Python decides, C moves: a stream whose chunks are regular goes through a forwarding of the fast path until something
is out of the ordinary. Then the forwarding stops and returns what it has read, and the relay goes on with that as if it
had read it itself. Where the helper was not built (no compiler at installation) everything works without it, at a few
microseconds more per chunk.

Chunks of TLS connections pass as well: the helper calls the OpenSSL of Python's module `ssl`, on its connections. It does
so only with versions of Python whose connections it knows, and after it has recognised one (`learn_tls`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from enum import IntEnum
from typing import Protocol

from lb.http.tls_transport import TlsTransport
from lb.stream.kept_events import KeptEvents, PlainEvents

_log = logging.getLogger("lb.proxy.fast_path")


class StopReason(IntEnum):
    """Why a forwarding has stopped. Its bytes are those that were read and have not been passed on."""

    IRREGULAR = 0  # what only Python can handle
    UNSENT = 1  # the client does not take more; the bytes are as it must get them, and counted as passed
    FULL = 2  # enough is kept: take it, and open another forwarding
    ENDED = 3  # the connection is closed, or TLS wants more than to be read
    CLIENT = 4  # the client has sent something, or has left; of TLS only


class ForwardingMode(IntEnum):
    """What a forwarding passes: whole chunks, and what else it requires of them or changes."""

    CHUNKS = 0  # with any content; only their last bytes are kept
    EVENTS = 1  # of whole events that neither end nor give up the stream
    WITHOUT_IDS = 2  # the same, less the token ids
    WITHOUT_USAGE = 3  # the same, less the usage


class Forwarding(Protocol):
    """One stream in the fast path's hands."""

    def stop(self) -> tuple[int, bytes] | None:
        """Let nothing more pass. Returns why, and with which bytes, it had stopped by itself before, where no owner was called yet."""
        ...

    def take(self) -> bytes:
        """Return what has come since the last call, as it came, with its framing. Of the mode CHUNKS: the last of it."""
        ...

    def take_packed(self) -> KeptEvents | None:
        """Return the same without unpacking it, None if nothing has come. Of the mode CHUNKS nothing is packed."""
        ...

    def held_bytes(self) -> int:
        """Return how many bytes of memory hold what can be taken."""
        ...

    def pulse(self) -> bool: ...
    def counts(self) -> tuple[int, int, int, int]:
        """Since the last call: chunks, bytes sent, events that carry text, token ids."""
        ...


class ForwardingOwner(Protocol):
    def forwarding_stopped(self, reason: StopReason, data: bytes) -> None:
        """The forwarding is stopped already. Must not raise: the streams of other owners wait for the same call.

        All that is unsent is reported before anything else. An owner that has given its forwarding up is called nevertheless.
        """
        ...


class _Native(Protocol):
    def close(self) -> None: ...
    def fileno(self) -> int: ...
    def forwarding(
        self, source: object, sink: object, limit_bytes: int, owner: ForwardingOwner, mode: int, /
    ) -> Forwarding: ...
    def run(self) -> list[tuple[ForwardingOwner, int, bytes]]: ...


class FastPath:
    """The helper on an event loop. `forwarding` opens a forwarding between two sides, given as `end_of` returns them.

    `kept_events` makes what a stream is kept in that has forwardings.
    """

    def __init__(
        self,
        native: _Native,
        loop: asyncio.AbstractEventLoop,
        kept_events: Callable[[], KeptEvents] = PlainEvents,
        *,
        without_tls: str = "not looked for",
    ) -> None:
        """`without_tls` is why connections of TLS are left to Python, empty if they are not."""
        self.kept_events = kept_events
        self._native = native
        self._loop = loop
        self.without_tls = without_tls
        self.forwarding = native.forwarding
        loop.add_reader(native.fileno(), self._run)

    def end_of(self, transport: asyncio.Transport) -> object | None:
        """Return the side of a forwarding that a connection is; None if it cannot be one now.

        A descriptor, or with TLS what `ssl` calls its connection.
        """
        if isinstance(transport, TlsTransport):
            tls = None if self.without_tls else transport.end()
            return None if tls is None else _connection_of(tls)
        if transport.get_extra_info("sslcontext") is not None:
            return None  # the bytes at the socket are not those of the stream
        plain = transport.get_extra_info("socket")
        return None if plain is None else int(plain.fileno())

    def _run(self) -> None:
        stopped = self._native.run()
        # Unsent bytes count as passed. What an owner does about the other reasons may end other forwardings of the list or
        # continue their streams from elsewhere, so by then each client has been sent all that counts.
        for owner, reason, data in stopped:
            if reason == StopReason.UNSENT:
                owner.forwarding_stopped(StopReason.UNSENT, data)
        for owner, reason, data in stopped:
            if reason != StopReason.UNSENT:
                owner.forwarding_stopped(StopReason(reason), data)

    def close(self) -> None:
        self._loop.remove_reader(self._native.fileno())
        self._native.close()


def open_fast_path(loop: asyncio.AbstractEventLoop, threads: int) -> FastPath | None:
    """Return the fast path, or None if it was not built. Chunks are moved by this many threads, 0: by the event loop."""
    try:
        from lb.proxy._fast_path import FastPath as Native
        from lb.proxy._fast_path import PackedEvents, learn_tls
    except ImportError:
        _log.info("no fast path: chunks are moved by Python")
        return None
    return FastPath(Native(threads), loop, PackedEvents, without_tls=_learn_tls(learn_tls))


def _learn_tls(learn_tls: Callable[[str, object, ssl.SSLSocket, int], str]) -> str:
    """Show the helper a connection of TLS; return why it cannot move the chunks of such, or ""."""
    import _ssl

    module_file = getattr(_ssl, "__file__", None)
    if module_file is None:
        return "OpenSSL is a part of this Python"
    ours, peers = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(peers), closing(context.wrap_socket(ours, do_handshake_on_connect=False)) as sample:
        return learn_tls(module_file, _connection_of(sample), sample, sample.fileno())


def _connection_of(tls: ssl.SSLSocket) -> object:
    return tls._sslobj  # type: ignore[attr-defined]  # `ssl` has no name for it
