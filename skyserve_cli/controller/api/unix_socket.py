"""The controller's socket: a file in the home, which only the owner of the home can reach.

A TCP port is anyone's once the controller has died: on a shared machine another user could take it, and get the token and
the secrets of a client that still has the old address. Addresses of Unix sockets are short (107 bytes on Linux) and paths of homes
need not be, so a long one is opened by way of the descriptor of its folder.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_BYTES = 100


@contextmanager
def _address(path: Path) -> Iterator[str]:
    if len(os.fsencode(path)) <= _LONGEST_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def bound(path: Path) -> socket.socket:
    """Return a socket to listen on, in place of the one that an earlier controller left. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            listener.bind(address)
        path.chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


def connected(path: Path, timeout_s: float | None) -> socket.socket:
    """Return a connection. Raises FileNotFoundError or ConnectionRefusedError if no controller listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _address(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
