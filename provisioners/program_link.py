"""The standard streams of a program as a connection: OpenSSH's ProxyCommand, and tunnels of clouds (SSM, IAP).

It is a real socket, so every SSH library takes it. The program ends with the connection: its input is closed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence

_END_S = 0.5
_TAIL_BYTES = 2000


class ProgramLink:
    """`socket` is our end; closing it ends the program. `said` are the last words of a program that has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        """OSError if there is no such program."""
        self.socket, theirs = socket.socketpair()
        try:
            stream = theirs.fileno()
            self._process = subprocess.Popen(
                list(command), stdin=stream, stdout=stream, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self._tail = b""
        self._reader = threading.Thread(target=self._read, name="program-link", daemon=True)
        self._reader.start()

    def said(self) -> str:
        """ "" while it runs."""
        self._reader.join(_END_S)  # its connection has ended, so it is about to
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines and not self._reader.is_alive() else ""

    def _read(self) -> None:
        """Until it has ended, and is reaped."""
        stream = self._process.stderr
        while stream is not None and (chunk := os.read(stream.fileno(), _TAIL_BYTES)):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
        if stream is not None:
            stream.close()
        self._process.wait()
