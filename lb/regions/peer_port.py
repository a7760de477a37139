"""The port for peers: accepts connections of agents of the service, and of no others.

A connection is of one of two kinds, by the protocol that its handshake has agreed on: beats, or requests that a peer
forwards. Who has no certificate by the service's authority, or whose name is not in the table, is refused and counted in `refused`.
So is a connection for requests with a certificate that has expired. On one for beats such a peer is heard, because it lives: but as one
without room, and what it reports of API keys and caches is ignored. It is counted as `expired`, too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

from lb.config.regions import PeerAgent
from lb.core.beats import Beat, BeatError, UsedReport, decode, frames, without_room
from lb.core.log_limit import LogLimit
from lb.http.tls_acceptor import MAX_HANDSHAKES, TlsAcceptor
from lb.http.upstream import keep_alive
from lb.regions.identity import BEATS, Validity, names_of, validity_of
from policies.routing.cache_digest import Digest

_BACKLOG = 256

_log = logging.getLogger("lb.regions.peer_port")


class PeerPort:
    """Listens for peers. `peers` by the name in their certificates; `requests` makes the protocol of a forwarding connection."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        peers: Callable[[], Mapping[str, PeerAgent]],
        on_beat: Callable[[PeerAgent, Beat], None],
        requests: Callable[[PeerAgent], asyncio.Protocol],
        unix_time_s: Callable[[], float],
        on_used: Callable[[PeerAgent, UsedReport], None] = lambda peer, report: None,
        max_handshakes: int = MAX_HANDSHAKES,
        on_digest: Callable[[PeerAgent, Digest], None] = lambda peer, digest: None,
    ) -> None:
        self._on_digest = on_digest
        self._unix_time_s = unix_time_s
        self._on_used = on_used
        self._loop = asyncio.get_running_loop()
        self._acceptor = TlsAcceptor(tls, lambda: _Arriving(self), lambda: max_handshakes, self.refuse)
        self._peers = peers
        self._on_beat = on_beat
        self._requests = requests
        self._accepting: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None
        self._logged = LogLimit()
        self._open: set[asyncio.Transport] = set()
        self.refused: Counter[str] = Counter()  # connections, by reason

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port. An agent and its successor may listen on one port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            keep_alive(listening)
            listening.bind((host, port))
            self._accepting = self._acceptor.listen(listening, _BACKLOG)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        found: int = listening.getsockname()[1]
        return found

    async def close(self) -> None:
        """Accept nothing more; beats end, forwarded requests go on."""
        accepting, listening = self._accepting, self._listening
        if accepting is not None and listening is not None:
            accepting.cancel()
            await asyncio.wait({accepting})
            listening.close()
        await self._acceptor.close()
        for transport in list(self._open):
            transport.abort()

    # --- accepting

    def refuse(self, why: str) -> None:
        """Count a connection that is closed, and log it unless such a line was logged just now."""
        self.refused[why] += 1
        left_out = self._logged.left_out(why, self._loop.time())
        if left_out is not None:
            _log.info("refuse connection why=%s left_out=%d", why, left_out)

    def protocol_for(self, tls: ssl.SSLObject) -> asyncio.Protocol | None:
        """Return who takes a connection over whose handshake is done; None if it is refused, which is counted."""
        known = self._peers()
        peer = next((known[name] for name in names_of(tls) if name in known), None)
        if peer is None:
            self.refuse("unknown_agent")
            return None
        validity = validity_of(tls)
        lapse = validity.lapse(self._unix_time_s())
        if lapse:
            self.refuse(lapse)
        if tls.selected_alpn_protocol() == BEATS:
            return _BeatReceiver(self, peer, validity)
        return None if lapse else self._requests(peer)

    # --- for beats

    def opened(self, transport: asyncio.Transport) -> None:
        self._open.add(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)

    def frame(self, peer: PeerAgent, kind: int, data: bytes, validity: Validity) -> None:
        """A frame has come, from a peer with a certificate of that validity. Raises BeatError."""
        found = decode(kind, data)
        is_valid = not validity.lapse(self._unix_time_s())
        if isinstance(found, Beat):
            beat = found if is_valid else found._replace(report=without_room(found.report))
            self._on_beat(peer, beat)
        elif isinstance(found, Digest) and is_valid:
            self._on_digest(peer, found)
        elif isinstance(found, UsedReport) and is_valid:
            self._on_used(peer, found)

    def malformed(self, peer: PeerAgent, error: BeatError) -> None:
        self.refused["malformed_beat"] += 1
        left_out = self._logged.left_out("malformed_beat", self._loop.time())
        if left_out is not None:
            _log.warning("close link peer=%s why=%r left_out=%d", peer.id, str(error), left_out)


class _Arriving(asyncio.Protocol):
    """A connection whose handshake is done, until it is known whose it is."""

    def __init__(self, port: PeerPort) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        secure = cast("asyncio.Transport", transport)
        protocol = self._port.protocol_for(secure.get_extra_info("ssl_object"))
        if protocol is None:
            secure.abort()
        else:
            secure.set_protocol(protocol)
            protocol.connection_made(secure)


class _BeatReceiver(asyncio.Protocol):
    """A connection on which a peer sends beats."""

    def __init__(self, port: PeerPort, peer: PeerAgent, validity: Validity) -> None:
        self._port = port
        self._peer = peer
        self._validity = validity
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._port.opened(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            whole, self._rest = frames(self._rest + data)
            for kind, frame in whole:
                self._port.frame(self._peer, kind, frame, self._validity)
        except BeatError as error:
            self._port.malformed(self._peer, error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._port.closed(self._transport)
