"""The fast path: an optional helper in C that moves the chunks of running streams (`lb/proxy/_fast_path.c`).

Python decides, C moves: a stream whose chunks are regular goes through a forwarding of the fast path until something
is out of the ordinary. Then the forwarding stops and returns what it has read, and the relay goes on with that as if it
had read it itself. Where the helper was not built (no compiler at installation) everything works without it, at a few
microseconds more per chunk.
"""

from __future__ import annotations

import asyncio
import logging
from enum import IntEnum
from typing import Protocol

_log = logging.getLogger("lb.proxy.fast_path")


class StopReason(IntEnum):
    """Why a forwarding has stopped. Its bytes are those that were read and have not been passed on."""

    IRREGULAR = 0  # what only Python can handle
    UNSENT = 1  # the client does not take more; the bytes are as it must get them, and counted as passed
    FULL = 2  # enough is kept: take it, and open another forwarding
    ENDED = 3  # the connection is closed


class ForwardingMode(IntEnum):
    """What a forwarding passes: whole chunks, and what else it requires of them or changes."""

    CHUNKS = 0  # with any content; only their last bytes are kept
    EVENTS = 1  # of whole events that neither end nor give up the stream
    WITHOUT_IDS = 2  # the same, less the token ids
    WITHOUT_USAGE = 3  # the same, less the usage


class Forwarding(Protocol):
    """One stream in the fast path's hands."""

    def stop(self) -> None: ...
    def take(self) -> bytes:
        """Return what has come since the last call, as it came, with its framing."""
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
    def fileno(self) -> int: ...
    def forwarding(
        self, source: int, sink: int, limit_bytes: int, owner: ForwardingOwner, mode: int, /
    ) -> Forwarding: ...
    def run(self) -> list[tuple[ForwardingOwner, int, bytes]]: ...


class FastPath:
    """The helper on an event loop. `forwarding` opens a forwarding between two sockets, given as file descriptors."""

    def __init__(self, native: _Native, loop: asyncio.AbstractEventLoop) -> None:
        self._native = native
        self._loop = loop
        self.forwarding = native.forwarding
        loop.add_reader(native.fileno(), self._run)

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


def open_fast_path(loop: asyncio.AbstractEventLoop) -> FastPath | None:
    """Return the fast path, or None if it was not built."""
    try:
        from lb.proxy._fast_path import FastPath as Native
    except ImportError:
        _log.info("no fast path: chunks are moved by Python")
        return None
    return FastPath(Native(), loop)


def descriptor_of(transport: asyncio.Transport) -> int | None:
    """Return the plain socket of a transport; None under TLS, where bytes on the wire are not those of the stream."""
    if transport.get_extra_info("sslcontext") is not None:
        return None
    socket = transport.get_extra_info("socket")
    return None if socket is None else int(socket.fileno())
