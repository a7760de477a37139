"""Certificates and links between agents, for tests: real TLS over loopback."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_der_x509_certificate

from lb.config.regions import PeerAgent
from lb.core.beats import Beat, encode
from lb.core.link_state import LinkState
from lb.core.peers import RegionReport
from lb.regions.beat_sender import BeatSender
from lb.regions.identity import BEATS, Identity
from lb.regions.peer_port import PeerPort
from provisioners.remote.certificates import Authority

SECRET = bytes(range(32))


def identity(
    folder: Path, name: str, *, service: str = "chat", authority: str = "chat", age_days: float = 0
) -> Identity:
    """The files of an agent of `service`, as an agent of `authority` trusts them, made `age_days` ago."""
    folder.mkdir(parents=True, exist_ok=True)
    trusted = Authority(SECRET, "owner", authority).certificate
    pem = load_der_x509_certificate(trusted).public_bytes(Encoding.PEM)
    (folder / "ca.pem").write_bytes(pem)
    own = Authority(SECRET, "owner", service).of_agent(name, datetime.now(UTC) - timedelta(days=age_days))
    (folder / f"{name}.pem").write_bytes(own)
    return Identity(folder / "ca.pem", folder / f"{name}.pem", time.time)


class Node:
    """One end of links: a port, and a sender to each peer it is given."""

    def __init__(self, name: str, known: Identity, report: RegionReport) -> None:
        self.name = name
        self.report = report
        self.peers: dict[str, PeerAgent] = {}
        self.states: dict[str, LinkState] = {}
        self.received: list[tuple[str, Beat]] = []
        self._identity = known
        self.port = PeerPort(
            known.server(), lambda: self.peers, self._hears, self.requests, known.unix_time_s
        )
        self.number = 0
        self.forwarded: list[bytes] = []
        self.senders: list[BeatSender] = []
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self.number = await self.port.open("127.0.0.1", 0)

    def link(self, other: str, port: int) -> BeatSender:
        loop = asyncio.get_running_loop()
        peer = PeerAgent(other, f"cloud/{other}", f"https://127.0.0.1:{port}", other)
        self.peers[other] = peer
        state = self.states[other] = LinkState(hash(self.name) % 2**40 + 1)

        sender = BeatSender(peer, self._identity.client(BEATS), state, loop.time, self._beat)
        sender.start()
        self.senders.append(sender)
        if self._beating is None:
            self._beating = loop.create_task(self._beats())
        return sender

    def _beat(self, sender: BeatSender) -> None:
        now = asyncio.get_running_loop().time()
        sender.send(encode(sender.state.next_beat(self.report, 0.25, 0, now)), now)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for sender in self.senders:
                if sender.is_open:
                    self._beat(sender)

    def requests(self, peer: PeerAgent) -> asyncio.Protocol:
        node = self

        class Keeps(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport

            def data_received(self, data: bytes) -> None:
                node.forwarded.append(data)

        return Keeps()

    def _hears(self, peer: PeerAgent, beat: Beat) -> None:
        self.states[peer.id].receive(beat, asyncio.get_running_loop().time())
        self.received.append((peer.id, beat))

    async def close(self) -> None:
        await self.port.close()
        if self._beating is not None:
            self._beating.cancel()
        for sender in self.senders:
            sender.close()
            await sender.closed()
