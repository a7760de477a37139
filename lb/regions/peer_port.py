"""The port for peers: accepts connections of agents of the service, and of no others.

A connection is of one of two kinds, by the protocol that its handshake has agreed on: beats, or requests that a peer
forwards. Who has no certificate by the service's authority, or one that has expired, or whose name is not in the table, is refused
and counted in `refused`.
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
from lb.core.beats import Beat, BeatError, UsedReport, decode, frames
from lb.http.upstream import keep_alive
from lb.regions.identity import BEATS, names_of

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 64  # at a time; more are refused before they cost anything
_BACKLOG = 256
_ACCEPT_AGAIN_S = 0.1

_log = logging.getLogger("lb.regions.peer_port")


class PeerPort:
    """Listens for peers. `peers` by the name in their certificates; `requests` makes the protocol of a forwarding connection."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        peers: Callable[[], Mapping[str, PeerAgent]],
        on_beat: Callable[[PeerAgent, Beat], None],
        requests: Callable[[PeerAgent], asyncio.Protocol],
        on_used: Callable[[PeerAgent, UsedReport], None] = lambda peer, report: None,
    ) -> None:
        self._on_used = on_used
        self._tls = tls
        self._peers = peers
        self._on_beat = on_beat
        self._requests = requests
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Transport] = set()
        self.refused: Counter[str] = Counter()  # connections, by reason

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port. An agent and its successor may listen on one port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.setblocking(False)
            keep_alive(listening)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening))
        found: int = listening.getsockname()[1]
        return found

    async def close(self) -> None:
        """Accept nothing more; beats end, forwarded requests go on."""
        tasks = [*self._handshakes, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        for transport in list(self._open):
            transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- accepting

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    arrived, _ = await loop.sock_accept(listening)
                except OSError as error:  # descriptors are short, say
                    _log.warning("cannot accept why=%r", str(error))
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                if len(self._handshakes) >= MAX_HANDSHAKES:
                    self.refused["too_many"] += 1
                    arrived.close()
                    continue
                task = loop.create_task(self._secure(arrived))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)

    async def _secure(self, arrived: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            arrived.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                lambda: _Arriving(self), arrived, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (TimeoutError, OSError) as error:
            self.refuse(_reason(error))
        except asyncio.CancelledError:
            arrived.close()
            raise

    def refuse(self, why: str) -> None:
        self.refused[why] += 1
        _log.info("refuse connection why=%s", why)

    def protocol_for(self, tls: ssl.SSLObject) -> asyncio.Protocol | None:
        """Return who takes a connection over whose handshake is done; None for an agent that is not of the table."""
        known = self._peers()
        peer = next((known[name] for name in names_of(tls) if name in known), None)
        if peer is None:
            return None
        return _BeatReceiver(self, peer) if tls.selected_alpn_protocol() == BEATS else self._requests(peer)

    # --- for beats

    def opened(self, transport: asyncio.Transport) -> None:
        self._open.add(transport)

    def closed(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)

    def frame(self, peer: PeerAgent, kind: int, data: bytes) -> None:
        """A frame has come. Raises BeatError."""
        found = decode(kind, data)
        if isinstance(found, Beat):
            self._on_beat(peer, found)
        elif found is not None:
            self._on_used(peer, found)

    def malformed(self, peer: PeerAgent, error: BeatError) -> None:
        self.refused["malformed_beat"] += 1
        _log.warning("close link peer=%s why=%r", peer.id, str(error))


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "expired" if "expired" in error.verify_message else "not_by_our_authority"
    if isinstance(error, ssl.SSLError) and error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no_certificate"
    return "handshake"


class _Arriving(asyncio.Protocol):
    """A connection whose handshake is done, until it is known whose it is."""

    def __init__(self, port: PeerPort) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        secure = cast("asyncio.Transport", transport)
        protocol = self._port.protocol_for(secure.get_extra_info("ssl_object"))
        if protocol is None:
            self._port.refuse("unknown_agent")
            secure.abort()
        else:
            secure.set_protocol(protocol)
            protocol.connection_made(secure)


class _BeatReceiver(asyncio.Protocol):
    """A connection on which a peer sends beats."""

    def __init__(self, port: PeerPort, peer: PeerAgent) -> None:
        self._port = port
        self._peer = peer
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._port.opened(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            whole, self._rest = frames(self._rest + data)
            for kind, frame in whole:
                self._port.frame(self._peer, kind, frame)
        except BeatError as error:
            self._port.malformed(self._peer, error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._port.closed(self._transport)
