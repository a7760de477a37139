"""How agents prove to each other who they are: TLS 1.3 with certificates on both sides.

The authority signs certificates of the agents of one service and nothing else, so a certificate by it is enough to be an agent of
the service; which one it is, is the name in it. Nothing here is trusted for its address.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import cast

BEATS = "skyserve-beats/2"  # the protocol of a connection, agreed on in the handshake (ALPN)
REQUESTS = "http/1.1"


@dataclass(frozen=True, slots=True)
class Identity:
    """Files in PEM: the authority's certificate; this agent's key and certificate, in one file."""

    authority: Path
    own: Path

    def server(self) -> ssl.SSLContext:
        """Return the context of the port for peers. Raises OSError, ssl.SSLError among them."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([BEATS, REQUESTS])
        return context

    def client(self, protocol: str) -> ssl.SSLContext:
        """Return the context for connections to peers. Raises OSError, ssl.SSLError among them."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)  # checks the name as well
        context.set_alpn_protocols([protocol])
        return context

    def _context(self, kind: int) -> ssl.SSLContext:
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.own)
        return context


def names_of(tls: ssl.SSLObject) -> frozenset[str]:
    """Return the names in the certificate of the other side."""
    certificate = tls.getpeercert() or {}
    found = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
    return frozenset(value for kind, value in found if kind == "DNS")
