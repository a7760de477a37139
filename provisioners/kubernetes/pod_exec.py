"""A command in a Pod, whose standard streams are a socket here: what `kubectl exec -i` does, by the official client."""

from __future__ import annotations

import functools
import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import websocket
from kubernetes import client as kube_client
from kubernetes.stream import stream, ws_client

from provisioners.kubernetes.errors import error_of, unreachable
from provisioners.port.errors import ProvisionError

_CHUNK = 32 * 1024
_HANDSHAKE = re.compile(r"Handshake status (\d{3})")
_PARTS = " -+-+- "  # between status, headers and body in the client's text
# The client keeps all that a command prints, unless it is called so.
_open = functools.partial(stream.func, functools.partial(ws_client.websocket_call, capture_all=False), None)


class PodChannel:
    """The command's input and output, as a socket has them. `closed` is true once the command has ended or the connection broke."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._near, self._far = socket.socketpair()
        self._errors = b""
        self.closed = False
        for pump in (self._outward, self._inward):
            threading.Thread(target=pump, name="pod exec", daemon=True).start()

    def recv(self, size: int) -> bytes:
        return self._near.recv(size)

    def sendall(self, data: bytes) -> None:
        self._near.sendall(data)

    def makefile(self, mode: str, *_: Any) -> BinaryIO:
        return self._near.makefile("rb")

    def settimeout(self, timeout_s: float) -> None:
        self._near.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._near.fileno()

    def printed_errors(self) -> bytes:
        """Return what the command has written to its standard error."""
        return self._errors

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)
        self._near.close()

    # --- inside, on threads of our own

    def _outward(self) -> None:
        try:
            while self._client.is_open():
                self._client.update(timeout=None)
                self._errors = (self._errors + self._client.read_channel(ws_client.STDERR_CHANNEL))[-4096:]
                while data := self._client.read_channel(ws_client.STDOUT_CHANNEL):
                    self._far.sendall(data)
        except (OSError, websocket.WebSocketException):
            pass
        self.closed = True
        with suppress(OSError, websocket.WebSocketException):
            self._client.close()
        with suppress(OSError):
            self._far.shutdown(socket.SHUT_WR)

    def _inward(self) -> None:
        with suppress(OSError, websocket.WebSocketException):
            while data := self._far.recv(_CHUNK):
                self._client.write_channel(ws_client.STDIN_CHANNEL, data)
        # Its end wakes the other thread, which closes the connection: it may not be closed under a call. The method is that of plain
        # sockets, because that of TLS would change what the other thread reads from.
        with suppress(OSError, websocket.WebSocketException):
            self._client.sock.send_close()
        with suppress(OSError):
            socket.socket.shutdown(self._client.sock.sock, socket.SHUT_RDWR)


def start_in_pod(
    client: Any, namespace: str, pod: str, container: str, command: Sequence[str], timeout_s: float
) -> PodChannel:
    """Start a command in a container; `client` is an `ApiClient` that no other thread uses. Raises ProvisionError."""
    websocket.setdefaulttimeout(timeout_s)  # of the handshake, for which the client takes none
    try:
        opened = _open(
            kube_client.CoreV1Api(client).connect_get_namespaced_pod_exec,
            pod,
            namespace,
            container=container,
            command=list(command),
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            binary=True,
            _preload_content=False,
        )
    except kube_client.ApiException as error:
        raise _refused(pod, str(error.reason or error)) from error
    finally:
        websocket.setdefaulttimeout(None)
    opened.sock.settimeout(None)
    return PodChannel(opened)


def _refused(pod: str, text: str) -> ProvisionError:
    """Return our error for a handshake that failed; the client has nothing but its text."""
    status = _HANDSHAKE.search(text)
    if status is None:
        return unreachable(pod, ConnectionError(text))
    body = text.rpartition(_PARTS)[2]
    if body.startswith("b'"):  # as earlier versions of the client show it
        body = body[2:-1].encode().decode("unicode_escape")
    return error_of(int(status[1]), body)
