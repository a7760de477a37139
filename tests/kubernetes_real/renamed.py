"""A way to an older API server that calls PodDisruptionBudgets by their name of before 1.21: paths and bodies are renamed, nothing else."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import urllib3

from tests.kubernetes_real.cluster import ControlPlane

_NEW, _OLD = b"policy/v1", b"policy/v1beta1"
_HOP = ("connection", "content-length", "host", "transfer-encoding")


@contextmanager
def renamed(plane: ControlPlane) -> Iterator[int]:
    """Yield the port of loopback that speaks for the server, over TLS with its certificate."""
    pool = urllib3.PoolManager(ca_certs=str(plane.folder / "ca.crt"), maxsize=32, retries=False)
    handler = type("Handler", (_Handler,), {"url": plane.url, "pool": pool})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(plane.folder / "server.crt", plane.folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    url: str
    pool: urllib3.PoolManager

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""

    def _carry(self) -> None:
        path = self.path.encode()
        is_renamed = b"/apis/policy/v1/" in path
        if is_renamed:
            path = path.replace(_NEW, _OLD, 1)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        headers = {key: value for key, value in self.headers.items() if key.lower() not in _HOP}
        response = self.pool.request(
            self.command,
            self.url + path.decode(),
            body=body.replace(b'"policy/v1"', b'"policy/v1beta1"') if is_renamed else body,
            headers=headers,
            preload_content=False,
            timeout=urllib3.Timeout(connect=5.0, read=700.0),
        )
        self.send_response(response.status)
        for key, value in response.headers.items():
            if key.lower() not in _HOP:
                self.send_header(key, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True  # if one of both ends in the middle of it
        with suppress(OSError, urllib3.exceptions.HTTPError), response:
            for part in response.stream(amt=None, decode_content=False):
                sent = part.replace(b'"policy/v1beta1"', b'"policy/v1"') if is_renamed else part
                self.wfile.write(b"%x\r\n%b\r\n" % (len(sent), sent))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
            self.close_connection = False

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _carry
