"""The client's end of a WebSocket (RFC 6455) over a connection of `http.client`, whichever way it leads to the controller.

Plain sockets, TLS, sessions of SSH and streams of Pods have little in common but `recv`, `sendall` and `fileno`. One thread uses a
connection, because TLS allows no more.
"""

from __future__ import annotations

import http.client
import os
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

TEXT, BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_CHUNK = 65_536
SEND_TIMEOUT_S = 60.0


def upgrade_headers() -> dict[str, str]:
    key = b64encode(os.urandom(16)).decode()
    return {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
    }


class WebSocket:
    """`link` is what the connection was upgraded on. Raises OSError when it breaks."""

    def __init__(self, connection: http.client.HTTPConnection, link: Any) -> None:
        self._connection = connection
        self._link = link
        self._received = bytearray()
        self._message = bytearray()
        link.settimeout(SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Return what becomes readable when something comes, unless `has_more`."""
        return int(self._link.fileno())

    @property
    def has_more(self) -> bool:
        """Whether TLS has decrypted more than was read."""
        pending = getattr(self._link, "pending", None)
        return pending is not None and pending() > 0

    def send(self, kind: int, payload: bytes) -> None:
        """Send a message. Clients mask what they send."""
        size = len(payload)
        head = bytes([0x80 | kind])
        if size < 126:
            head += bytes([0x80 | size])
        else:
            head += bytes([0x80 | 126]) + size.to_bytes(2, "big")
        mask = os.urandom(4)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        self._link.sendall(head + mask + (int.from_bytes(payload, "big") ^ key).to_bytes(size, "big"))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Read once, and yield the messages that are whole. Raises EOFError at the end."""
        data = self._link.recv(_CHUNK)
        self._received += data
        while (frame := self._frame()) is not None:
            is_last, kind, payload = frame
            if kind == _PING:
                self.send(_PONG, payload)
            elif kind == _CLOSE:
                raise EOFError
            elif kind != _PONG:
                self._kind = kind or self._kind
                self._message += payload
                if is_last:
                    message, self._message = bytes(self._message), bytearray()
                    yield self._kind, message
        if not data:
            raise EOFError

    def close(self) -> None:
        self._connection.close()

    def _frame(self) -> tuple[bool, int, bytes] | None:
        """Return the next frame, if it is there; those of servers are not masked."""
        buffer = self._received
        if len(buffer) < 2:
            return None
        size, start = buffer[1] & 0x7F, 2
        if size > 125:
            start += 2 if size == 126 else 8
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return None
        payload = bytes(buffer[start : start + size])
        first = buffer[0]
        del buffer[: start + size]
        return bool(first & 0x80), first & 0x0F, payload

    _kind = BINARY
