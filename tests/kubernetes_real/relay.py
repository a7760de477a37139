"""A relay on loopback, through which a controller reaches the API server until its connections are cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep

_CHUNK = 64 * 1024


class Relay:
    """`port` of loopback leads to `target` of loopback. While it is cut, connections end at once.

    `slow_s` is how long what a client sends is on its way.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.is_cut = False
        self.slow_s = 0.0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            for one in self._open:
                _end(one)

    def restore(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self.cut()
        _end(self._listener)
        self._listener.close()

    # --- inside, on threads of our own

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as server:
            pair = {client, server}
            with self._lock:
                self._open |= pair
            back = threading.Thread(target=_copy, args=(server, client, _at_once), daemon=True)
            back.start()
            _copy(client, server, lambda: sleep(self.slow_s))
            back.join()
            with self._lock:
                self._open -= pair


def _at_once() -> None:
    """Nothing is slow on the way back."""


def _copy(source: socket.socket, sink: socket.socket, hold: Callable[[], None]) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            hold()
            sink.sendall(data)
    _end(source)
    _end(sink)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
