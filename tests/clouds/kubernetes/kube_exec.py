"""`exec` in the containers of the fake cluster: the WebSocket of Kubernetes (v4.channel.k8s.io), and a process in the container's
mount namespace."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import IO, BinaryIO

_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PROTOCOL = "v4.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _ERROR = range(4)
_BINARY, _CLOSE = 2, 8


def accepted(key: str) -> dict[str, str]:
    """Return the headers of the response 101."""
    digest = hashlib.sha1(f"{key}{_MAGIC}".encode()).digest()  # noqa: S324 - as RFC 6455 has it
    return {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
        "Sec-WebSocket-Protocol": PROTOCOL,
    }


def carry(
    reader: BinaryIO, writer: BinaryIO, pid: int, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Run the command where the process `pid` of a container is, until it ends or the caller has gone."""
    process = subprocess.Popen(
        ["nsenter", "--mount", "-t", str(pid), *command],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    lock = Lock()

    def send(channel: int, data: bytes) -> None:
        with lock, suppress(OSError, ValueError):
            writer.write(_frame(_BINARY, bytes([channel]) + data))
            writer.flush()

    def pump(channel: int, source: IO[bytes] | None) -> None:
        assert source is not None
        while data := os.read(source.fileno(), 32 * 1024):
            send(channel, data)

    pumps = [
        Thread(target=pump, args=pair, daemon=True)
        for pair in ((_STDOUT, process.stdout), (_STDERR, process.stderr))
    ]
    for one in pumps:
        one.start()

    def feed() -> None:
        with suppress(OSError, ValueError):
            while (frame := _read(reader)) is not None:
                if frame[:1] == bytes([_STDIN]):
                    process.stdin.write(frame[1:])
                    process.stdin.flush()
        with suppress(OSError):
            process.stdin.close()

    feeder = Thread(target=feed, daemon=True)
    feeder.start()
    for one in pumps:
        one.join()
    code = process.wait()
    status = b'{"metadata":{},"status":"Success"}' if code == 0 else b'{"metadata":{},"status":"Failure"}'
    send(_ERROR, status)
    with suppress(OSError, ValueError):
        writer.write(_frame(_CLOSE, struct.pack(">H", 1000)))
        writer.flush()


def _frame(kind: int, data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        return bytes([0x80 | kind, size]) + data
    if size < 1 << 16:
        return bytes([0x80 | kind, 126]) + struct.pack(">H", size) + data
    return bytes([0x80 | kind, 127]) + struct.pack(">Q", size) + data


def _read(reader: BinaryIO) -> bytes | None:
    """Return the next message of the client, which masks it; None at the end."""
    head = reader.read(2)
    if len(head) < 2 or head[0] & 0x0F == _CLOSE:
        return None
    size = head[1] & 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", reader.read(2))
    elif size == 127:
        (size,) = struct.unpack(">Q", reader.read(8))
    mask = reader.read(4)
    data = reader.read(size)
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
