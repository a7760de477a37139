"""The pump: an optional helper in C that moves the plain chunks of running streams (`lb/_pump.c`).

Python decides, C moves: a stream whose chunks are whole events goes through a lane of the pump until something
is out of the ordinary; then the lane stops and says what it has read, and `lb.survival` goes on with that as if it had
read it itself. Where the helper was not built (no compiler at installation) everything works without it, at a few
microseconds more per chunk.
"""

from __future__ import annotations

import asyncio
import logging
from enum import IntEnum
from typing import Protocol

_log = logging.getLogger("lb.pump")


class News(IntEnum):
    """Why a lane has stopped. Its bytes are those that were read and have not been passed on."""

    DATA = 0  # something that is not plain
    UNSENT = 1  # the client does not take more; the bytes are plain, and counted as passed
    FULL = 2  # enough is kept: take it, and open another lane
    ENDED = 3  # the connection has ended


class Lane(Protocol):
    """One stream in the pump's hands."""

    def stop(self) -> None: ...
    def take(self) -> bytes: ...
    def pulse(self) -> bool: ...
    def counts(self) -> tuple[int, int]: ...


class LaneOwner(Protocol):
    def lane_stopped(self, news: News, data: bytes) -> None:
        """The lane is stopped already."""
        ...


class _Native(Protocol):
    def fileno(self) -> int: ...
    def lane(self, source: int, sink: int, limit_bytes: int, owner: LaneOwner, /) -> Lane: ...
    def run(self) -> list[tuple[LaneOwner, int, bytes]]: ...


class Pump:
    """The helper on an event loop. `lane` opens a lane between two sockets, given as file descriptors."""

    def __init__(self, native: _Native, loop: asyncio.AbstractEventLoop) -> None:
        self._native = native
        self._loop = loop
        self.lane = native.lane
        loop.add_reader(native.fileno(), self._run)

    def _run(self) -> None:
        for owner, kind, data in self._native.run():
            owner.lane_stopped(News(kind), data)

    def close(self) -> None:
        self._loop.remove_reader(self._native.fileno())


def open_pump(loop: asyncio.AbstractEventLoop) -> Pump | None:
    """The pump, or None if it was not built."""
    try:
        from lb._pump import Pump as Native
    except ImportError:
        _log.info("no pump: chunks are moved by Python")
        return None
    return Pump(Native(), loop)


def descriptor_of(transport: asyncio.Transport) -> int | None:
    """The plain socket of a transport; None under TLS, where bytes on the wire are not those of the stream."""
    if transport.get_extra_info("sslcontext") is not None:
        return None
    socket = transport.get_extra_info("socket")
    return None if socket is None else int(socket.fileno())
