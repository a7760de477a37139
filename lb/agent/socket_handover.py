"""From one agent to its successor on the same host, without a refused connection.

The running agent offers its listening sockets on a Unix socket; a successor that is started with the same
`--handover-socket` takes them, serves, and confirms it. Only then does the predecessor stop accepting and hang up; it ends when
its requests are over. The listening sockets are never closed in between, so what waits in their queues is not lost,
as it would be with two sockets on one port. A successor that fails before it serves leaves everything as it was.

Only processes of the same user are served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

GREETING = b"skyserve-lb 1\n"
SERVING = b"serving\n"
TIMEOUT_S = 5.0

_log = logging.getLogger("lb.agent.socket_handover")


class Taken:
    """What a predecessor has given: the listening sockets, in the order in which it offers them."""

    def __init__(self, sockets: list[socket.socket], line: socket.socket) -> None:
        self.sockets = sockets
        self._line = line

    async def serving(self) -> None:
        """The predecessor may go. Returns once it has been notified, and takes no table any longer."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        try:
            await loop.sock_sendall(self._line, SERVING)
            await asyncio.wait_for(loop.sock_recv(self._line, 1), TIMEOUT_S)
        except (asyncio.TimeoutError, OSError) as error:  # noqa: UP041 (not the same in 3.10)
            _log.warning("cannot reach the predecessor why=%r", str(error))
        finally:
            self._line.close()


def take(path: Path) -> Taken | None:
    """Ask a predecessor for its sockets; None if there is none. Raises OSError if it does not follow the protocol."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(TIMEOUT_S)
    try:
        line.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    try:
        greeting, descriptors, _, _ = socket.recv_fds(line, len(GREETING), 8)
        sockets = [socket.socket(fileno=one) for one in descriptors]
        if greeting != GREETING or not sockets:
            raise OSError(f"the process that listens on {path} is not a load balancer agent")
    except BaseException:
        line.close()
        raise
    return Taken(sockets, line)


class SocketOffer:
    """Offers the listening sockets to a successor; `taken` is called once one serves."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        sockets: Callable[[], list[socket.socket]],
        taken: Callable[[], None],
    ) -> None:
        """Raise OSError if there can be no socket at `path`."""
        self._loop = loop
        self._path = path
        self._sockets = sockets
        self._taken = taken
        self.gone = False  # is there a successor that serves?
        self._lines: set[socket.socket] = set()
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(scratch))
        scratch.chmod(0o600)
        self._listener.listen(4)
        self._listener.setblocking(False)
        scratch.replace(path)  # a predecessor's is replaced in one step
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """No offer any longer. The path stays if it is a successor's."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for line in list(self._lines):
            self._hang_up(line)
        if not self.gone:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:
            return
        line.setblocking(False)
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user not in (os.getuid(), 0):
            _log.warning("refuse a handover to user=%s", user)
            line.close()
            return
        try:
            socket.send_fds(line, [GREETING], [one.fileno() for one in self._sockets()])
        except OSError:
            line.close()
            return
        self._lines.add(line)
        self._loop.add_reader(line.fileno(), self._on_successor_ready, line)

    def _on_successor_ready(self, line: socket.socket) -> None:
        try:
            received = line.recv(len(SERVING))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if received == SERVING and not self.gone:
            self.gone = True
            _log.info("a successor serves: finish requests under way")
            self._taken()
        self._hang_up(line)

    def _hang_up(self, line: socket.socket) -> None:
        self._lines.discard(line)
        self._loop.remove_reader(line.fileno())
        line.close()
