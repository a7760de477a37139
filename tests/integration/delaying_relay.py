"""A relay in front of a server, which a test can let delay each message to the server."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class DelayingRelay:
    """Listens on `port` of loopback."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._delay_s = 0.0
        self._changed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def delay(self, seconds: float) -> None:
        """Delay each message from now on; those that are held up go on."""
        self._delay_s = seconds
        self._changed.set()
        self._changed = threading.Event()

    def close(self) -> None:
        self._listener.close()
        self.delay(0.0)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                for source, target, delays in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pump, args=(source, target, delays), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, delays: bool) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                if delays and self._delay_s:
                    self._changed.wait(self._delay_s)
                target.sendall(content)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
