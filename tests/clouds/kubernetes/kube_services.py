"""The addresses of Services: a port of loopback for each, from which a connection goes to one of the Pods that are ready."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import Any

from tests.clouds.kubernetes.kube_deployments import is_ready, is_selected
from tests.clouds.kubernetes.kube_store import SERVICE_NET, Json, Refused, Store

_CHUNK = 64 * 1024


class Services:
    """Opens the ports of Services as they come, and closes them as they go. `look` does one round."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[tuple[str, int], socket.socket] = {}
        self._count = 0

    def address(self) -> str:
        """Return the address of the next Service."""
        self._count += 1
        return f"{SERVICE_NET}.{self._count // 250}.{self._count % 250 + 1}"

    def look(self) -> None:
        """One round, with the store's lock held."""
        wanted: dict[tuple[str, int], tuple[Json, int]] = {}
        for service in self._store.of("services"):
            address = service["spec"].get("clusterIP")
            if address in (None, "None"):
                continue
            for port in service["spec"]["ports"]:
                wanted[address, port["port"]] = service, port["targetPort"]
        for key in self._open.keys() - wanted.keys():
            _end(self._open.pop(key))
        for key in wanted.keys() - self._open.keys():
            service, target = wanted[key]
            listener = socket.create_server(key, backlog=256)
            self._open[key] = listener
            name = service["metadata"]["namespace"], service["metadata"]["name"]
            threading.Thread(target=self._accept, args=(listener, name, target), daemon=True).start()

    def close(self) -> None:
        for listener in self._open.values():
            _end(listener)

    # --- inside, on threads of our own

    def _accept(self, listener: socket.socket, name: tuple[str, str], target: int) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(client, name, target), daemon=True).start()

    def _carry(self, client: socket.socket, name: tuple[str, str], target: int) -> None:
        address = self._endpoint(*name)
        try:
            if address is None:
                raise OSError("no endpoint")
            server = socket.create_connection((address, target), timeout=10.0)
        except OSError:
            client.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # as a rejected connection
            client.close()
            return
        server.settimeout(None)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()
        client.close()
        server.close()

    def _endpoint(self, namespace: str, name: str) -> str | None:
        with self._store.lock:
            try:
                service = self._store.get("services", namespace, name)
            except Refused:
                return None
            selector: dict[str, Any] = service["spec"].get("selector") or {}
            found = [
                one["status"]["podIP"]
                for one in self._store.of("pods")
                if is_selected(one, selector) and is_ready(one) and one["status"].get("podIP")
            ]
        return random.choice(found) if found else None


def _end(listener: socket.socket) -> None:
    """Close it for the thread that waits there, too, or its port stays in use."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Until the source ends. An end is passed on."""
    try:
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    except OSError:
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
