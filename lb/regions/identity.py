"""How agents prove to each other who they are: TLS 1.3 with certificates on both sides.

The authority signs certificates of the agents of one service and nothing else, so a certificate by it is enough to be an agent of
the service; which one it is, is the name in it. Nothing here is trusted for its address.

*Times.* Beats are exchanged, and connections accepted, whatever the times in a certificate are: OpenSSL checks the rest, the times are
checked here (`Validity`). An agent whose certificate has expired is known to be alive, so no other one takes its region over, but it is
sent nothing that is worth protecting and none of its requests is taken (see `lb.regions.peer_port`). Connections that carry requests
are made to agents with a certificate that is valid, and OpenSSL checks that.
"""

from __future__ import annotations

import ssl
from binascii import a2b_base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

BEATS = "skyserve-beats/2"  # the protocol of a connection, agreed on in the handshake (ALPN)
REQUESTS = "http/1.1"
CACHE_KEY = "SKYSERVE CACHE KEY"
EXPIRED = "expired"
NOT_YET_VALID = "not_yet_valid"
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL


class Validity(NamedTuple):
    """From when and until when a certificate is valid, in UNIX time."""

    since: float
    until: float

    def lapse(self, now: float) -> str:
        """Return why it is not valid at that UNIX time, EXPIRED or NOT_YET_VALID; "" if it is."""
        if now > self.until:
            return EXPIRED
        return NOT_YET_VALID if now < self.since else ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Files in PEM: the authority's certificate; this agent's key and certificate, in one file. `unix_time_s` is a clock.

    A block CACHE_KEY in the second one has the key of digests of caches, which is the same for all agents of the service.
    """

    authority: Path
    own: Path
    unix_time_s: Callable[[], float]

    def server(self) -> ssl.SSLContext:
        """Return the context of the port for peers. Raises OSError, ssl.SSLError among them."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= _NO_CHECK_TIME
        context.set_alpn_protocols([BEATS, REQUESTS])
        return context

    def client(self, protocol: str) -> ssl.SSLContext:
        """Return the context for connections to peers. Raises OSError, ssl.SSLError among them."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)  # checks the name as well
        if protocol == BEATS:
            context.verify_flags |= _NO_CHECK_TIME
        context.set_alpn_protocols([protocol])
        return context

    def cache_key(self) -> bytes:
        """Return the key of digests (see `policies.routing.cache_digest`); empty if there is none. Raises OSError."""
        _, _, rest = self.own.read_text().partition(f"-----BEGIN {CACHE_KEY}-----")
        return a2b_base64(rest.partition("-")[0])

    def expires_at(self) -> float | None:
        """Return the UNIX time at which this agent's certificate expires; None if the authority has not signed it.

        Python parses certificates of the other side only, so this agent greets itself, in memory.
        """
        client_context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        client_context.check_hostname = False
        client_context.verify_flags |= _NO_CHECK_TIME
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.server().wrap_bio(to_server, to_client, server_side=True)
        client = client_context.wrap_bio(to_client, to_server)
        for side in (client, server, client):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return None
        return validity_of(client).until

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


def validity_of(tls: ssl.SSLObject) -> Validity:
    """Return when the certificate of the other side is valid. Its handshake is done, and required one."""
    certificate = cast("dict[str, str]", tls.getpeercert())
    return Validity(*(ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter")))
