"""The client's end of a WebSocket over a connection of `http.client`, whichever way it leads to the controller.

Plain sockets, TLS, sessions of SSH and streams of Pods have little in common but `recv`, `sendall` and `fileno`, so frames come from a library
that does no I/O. One thread uses a connection, because TLS allows no more.
"""

from __future__ import annotations

import http.client
import os
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, cast

from wsproto.frame_protocol import FrameProtocol, Opcode, ParseFailed

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
        self._frames = FrameProtocol(client=True, extensions=[])
        self._parts: list[Any] = []  # of a message: all of them text, or none
        link.settimeout(SEND_TIMEOUT_S)

    def fileno(self) -> int:
        """Return what becomes readable when something comes, unless `has_more`."""
        return int(self._link.fileno())

    @property
    def has_more(self) -> bool:
        """Whether TLS has decrypted more than was read."""
        pending = getattr(self._link, "pending", None)
        return pending is not None and pending() > 0

    def send(self, message: bytes | str) -> None:
        self._link.sendall(bytes(self._frames.send_data(message)))

    def receive(self) -> Iterator[bytes | str]:
        """Read once, and yield the messages that are whole. Raises EOFError at the end, or at what is no WebSocket's."""
        data = self._link.recv(_CHUNK)
        self._frames.receive_bytes(data)
        try:
            for frame in self._frames.received_frames():
                if frame.opcode is Opcode.PING:
                    self._link.sendall(bytes(self._frames.pong(cast(bytes, frame.payload))))
                elif frame.opcode is Opcode.CLOSE:
                    raise EOFError
                elif frame.opcode is not Opcode.PONG:
                    self._parts.append(frame.payload)
                    if frame.message_finished:
                        whole, self._parts = self._parts, []
                        yield "".join(whole) if isinstance(whole[0], str) else b"".join(whole)
        except ParseFailed as error:
            raise EOFError from error
        if not data:
            raise EOFError

    def close(self) -> None:
        self._connection.close()
