"""The other side of a TLS connection in tests: it decides byte by byte what goes over the wire, and when."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

from tests.integration.lb_harness import self_signed

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def contexts(folder: Path, version: ssl.TLSVersion) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return a server's context and that of a client which trusts it, of one version of TLS."""
    certfile, keyfile = self_signed(folder)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certfile, keyfile)
    client = ssl.create_default_context(cafile=str(certfile))
    for one in (server, client):
        one.minimum_version = one.maximum_version = version
    return server, client


class Peer:
    """One end of a connection, with OpenSSL's bytes in memory."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if server_side else "127.0.0.1"
        self.tls = context.wrap_bio(self._in, self._out, server_side=server_side, server_hostname=name)
        self._unsent = bytearray()

    def shake_hands(self, other: ssl.SSLSocket) -> None:
        """Complete the handshake with a connection of this thread."""
        done: set[Any] = set()
        while len(done) < 2:
            for one in (other, self.tls):
                try:
                    one.do_handshake()
                    done.add(one)
                except ssl.SSLWantReadError:
                    pass
            self.push()
            self.pull()

    def seal(self, data: bytes) -> None:
        """Encrypt; `push` sends it."""
        self.tls.write(data)

    def push(self, most: int = 1 << 30) -> bool:
        """Send some of what is encrypted; return whether all of it is sent."""
        self._unsent += self._out.read()
        try:
            sent = self.socket.send(self._unsent[:most])
        except BlockingIOError:
            sent = 0
        del self._unsent[:sent]
        return not self._unsent

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def send(self, data: bytes) -> None:
        self.seal(data)
        assert self.push()

    def pull(self, most: int = 1 << 20) -> None:
        with contextlib.suppress(BlockingIOError):
            self._in.write(self.socket.recv(most))

    def got(self, most: int = 1 << 20) -> bytes:
        """Return what has come."""
        self.pull(most)
        data = b""
        try:
            while more := self.tls.read(1 << 16):
                data += more
        except ssl.SSLWantReadError:
            pass
        return data

    def end(self) -> None:
        """Encrypt a close_notify."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()

    def update_keys(self, *, both: bool = True) -> None:
        """Encrypt a KeyUpdate, which TLS 1.3 has; `both`: it asks for one in return."""
        import _ssl

        openssl = ctypes.CDLL(_ssl.__file__)
        connection = ctypes.c_void_p.from_address(id(self.tls._sslobj) + 3 * ctypes.sizeof(ctypes.c_void_p))  # type: ignore[attr-defined]
        assert openssl.SSL_key_update(connection, int(both)) == 1
        openssl.SSL_do_handshake(connection)

    def reset(self) -> None:
        """Close, so that the other side gets a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
