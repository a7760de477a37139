"""The standard streams of a program as a connection: OpenSSH's ProxyCommand, and tunnels of clouds (SSM, IAP).

It is a real socket, so every SSH library accepts it. Closing it closes the program's input and sends SIGHUP to the program
and its children, as OpenSSH does: a program that ignores the end of its input would otherwise keep running.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

_END_S = 0.5
_TAIL_BYTES = 2000


class ProxyCommand:
    """`socket` is our end; closing it ends the program. `said` are the last words of a program that has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        """OSError if there is no such program."""
        ours, theirs = socket.socketpair()
        try:
            stream = theirs.fileno()
            self._process = subprocess.Popen(
                list(command), stdin=stream, stdout=stream, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.socket: socket.socket = _Socket(ours, self._hang_up)
        self._tail = b""
        self._reader = threading.Thread(target=self._read, name="program-link", daemon=True)
        self._reader.start()

    def said(self) -> str:
        """ "" while it runs."""
        self._reader.join(_END_S)  # its connection has ended, so it is about to
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines and not self._reader.is_alive() else ""

    def _hang_up(self) -> None:
        # OpenSSH sends SIGHUP here, but processes started by nohup pass on to their children that they ignore it.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def _read(self) -> None:
        """Until it has ended, and is reaped."""
        stream = self._process.stderr
        while stream is not None and (chunk := os.read(stream.fileno(), _TAIL_BYTES)):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        if stream is not None:
            stream.close()
        self._process.wait()


class _Socket(socket.socket):
    """`link`, which it takes over, with something to do after the first `close`."""

    def __init__(self, link: socket.socket, closed: Callable[[], None]) -> None:
        super().__init__(link.family, link.type, link.proto, link.detach())
        self._closed_once = False
        self._on_close = closed

    def close(self) -> None:
        super().close()
        if not self._closed_once:
            self._closed_once = True
            self._on_close()
