"""A port of another machine's loopback as a port of ours, through SSH (RFC 4254, section 7.2).

The listener stays for as long as the forward is open, also while the connection to the machine is down: a client that has the
forward says where it leads now (`lead`). A client that comes while it leads nowhere, or whose channel cannot be opened, is
hung up on.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from provisioners.port.commands import HostConnection, ShellError

if TYPE_CHECKING:
    import paramiko

_CHUNK = 65536


class PortForward:
    """Listens on a free port of 127.0.0.1, `port`. Thread-safe; a thread per connection, which there are few of."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target: tuple[HostConnection, int] | None = None
        threading.Thread(target=self._listen, name=f"forward-{self.port}", daemon=True).start()

    def lead(self, shell: HostConnection, port: int) -> None:
        """From now on connections go to that port of that machine. Those that are open stay what they are."""
        self._target = (shell, port)

    def nowhere(self) -> None:
        self._target = None

    def close(self) -> None:
        """No new connections; those that are open end with the shell that they go through."""
        self._target = None
        with suppress(OSError):  # a thread that waits in accept wakes up only from this
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        from paramiko import SSHException  # slow to import, and loaded where there is a connection

        target = self._target
        with client:
            if target is None:
                return
            shell, port = target
            try:
                channel = shell.dial(port)
            except ShellError:
                return
            with channel, suppress(OSError, EOFError, SSHException):
                _join(client, channel)


def _join(client: socket.socket, channel: paramiko.Channel) -> None:
    """Until both sides have said all they had to, or one of them is gone."""
    with selectors.PollSelector() as open_ends:
        for end in (client, channel):
            open_ends.register(end, selectors.EVENT_READ)
        while open_ends.get_map():
            for key, _ in open_ends.select():
                source = cast("socket.socket | paramiko.Channel", key.fileobj)
                sink = channel if source is client else client
                data = source.recv(_CHUNK)
                if data:
                    sink.sendall(data)
                    continue
                open_ends.unregister(source)
                if source is channel:
                    return  # HTTP: the server sends last
                channel.shutdown_write()
