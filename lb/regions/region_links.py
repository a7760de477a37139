"""The links of one agent to the agents of other regions: who is a peer, beats out and in, requests out and in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from lb.config.regions import PeerAgent, Regions
from lb.core.beats import Beat
from lb.core.forwarding import SILENT_AFTER_S, Forwarding
from lb.core.link_state import LinkState
from lb.core.peers import RegionReport
from lb.core.targets import TargetTable
from lb.http.upstream import Pools
from lb.proxy.context import Proxy
from lb.proxy.downstream import ClientConnection
from lb.proxy.peer_entrance import PeerEntrance
from lb.proxy.sweep import reconsider
from lb.regions.beat_sender import EVERY_S, BeatSender
from lb.regions.identity import BEATS, REQUESTS, Identity
from lb.regions.peer_port import PeerPort

_WATCH_S = 0.1

_log = logging.getLogger("lb.regions")


class RegionLinks:
    """Needs a running event loop. `boot` distinguishes this life of the agent from others; raises OSError for files it cannot read."""

    def __init__(
        self,
        proxy: Proxy,
        pools: Pools,
        table: TargetTable,
        identity: Identity,
        boot: int,
        clock: Callable[[], float],
    ) -> None:
        self._proxy = proxy
        self._pools = pools
        self._table = table
        self._beats_tls = identity.client(BEATS)
        self._requests_tls = identity.client(REQUESTS)
        self._boot = boot
        self._clock = clock
        self._by_name: dict[str, PeerAgent] = {}
        self._senders: dict[str, BeatSender] = {}
        self._reported: RegionReport | None = None
        self._reported_at = float("-inf")
        self._announced = (0, False)
        self.port = PeerPort(identity.server(), lambda: self._by_name, self._heard, self._requests)

    def apply(self, regions: Regions | None) -> None:
        """Another table is in force. Without `regions` all peers are gone."""
        now, forwarding = self._clock(), self._proxy.forwarding
        if regions is None:
            if forwarding is None:
                return
            regions = Regions(forwarding.regions.agent, forwarding.regions.here)
        if forwarding is None:
            forwarding = self._proxy.forwarding = Forwarding(self._table, regions, now)
        else:
            forwarding.apply(regions, now)
        urls = frozenset(target.url for target in forwarding.peer_table.table.targets)
        self._pools.use_peers(urls, self._requests_tls)
        self._by_name = {peer.tls_name: peer for peer in regions.peers}
        wanted = {peer.id: peer for peer in regions.peers}
        for peer_id, sender in list(self._senders.items()):
            if wanted.get(peer_id) != sender.peer:
                sender.close()
                del self._senders[peer_id]
        for peer_id, peer in wanted.items():
            if peer_id not in self._senders:
                sender = BeatSender(peer, self._beats_tls, LinkState(self._boot), self._beat, self._clock)
                self._senders[peer_id] = sender
                sender.start()

    async def run(self) -> None:
        """Watch for what peers should know at once, and for peers that are silent, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_S)
            forwarding, now = self._proxy.forwarding, self._clock()
            if forwarding is None or not self._senders:
                continue
            report = self._report(now)
            announced = (report.available, report.queued > 0)
            if announced != self._announced:
                self._announced = announced
                for sender in self._senders.values():
                    sender.stir()
            for peer_id, sender in self._senders.items():
                if sender.state.beats_heard and sender.state.silent_s(now) > SILENT_AFTER_S:
                    forwarding.silent(peer_id, now)

    async def close(self) -> None:
        """Accept nothing more and send no more beats. Forwarded requests go on."""
        await self.port.close()
        for sender in self._senders.values():
            sender.close()
        for sender in self._senders.values():
            await sender.closed()

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the regions, for the admin port."""
        forwarding, now = self._proxy.forwarding, self._clock()
        if forwarding is None:
            return {"here": None, "peers": []}
        return {
            "agent": forwarding.regions.agent,
            "here": forwarding.regions.here,
            "policy": forwarding.regions.policy,
            "epoch": forwarding.regions.epoch,
            "owned": list(forwarding.regions.owned),
            "refused_connections": dict(self.port.refused),
            "refused_requests": forwarding.refused_in,
            "came_back": forwarding.came_back,
            "peers": [
                self._row(sender, forwarding.forwarded_out, forwarding.forwarded_in, now)
                for sender in self._senders.values()
            ],
        }

    def _row(
        self, sender: BeatSender, out: Mapping[str, int], into: Mapping[str, int], now: float
    ) -> dict[str, Any]:
        state, peer = sender.state, sender.peer
        rtt_s = state.rtt_s
        return {
            "id": peer.id,
            "region": peer.region,
            "rtt_ms": None if rtt_s is None else round(1000 * rtt_s, 3),
            "deviation_ms": round(1000 * state.deviation_s, 3),
            "silent_s": round(state.silent_s(now), 3) if state.beats_heard else None,
            "connections": sender.connections,
            "trouble": sender.trouble,
            "forwarded_out": out.get(peer.id, 0),
            "forwarded_in": into.get(peer.id, 0),
        }

    # --- beats

    def _report(self, now: float) -> RegionReport:
        """Return the report of this moment, made at most ten times a second however many peers there are."""
        forwarding, report = self._proxy.forwarding, self._reported
        if report is None or now - self._reported_at >= _WATCH_S / 2:
            assert forwarding is not None  # noqa: S101 (there are peers)
            report = forwarding.report(self._proxy.held, now)
            self._reported_at = now
            if self._proxy.closing or self._proxy.draining:
                report = report._replace(draining=True)
            self._reported = report
        return report

    def _beat(self, state: LinkState) -> Beat:
        now, forwarding = self._clock(), self._proxy.forwarding
        epoch = 0 if forwarding is None else forwarding.regions.epoch
        return state.next_beat(self._report(now), EVERY_S, epoch, now)

    def _heard(self, peer: PeerAgent, beat: Beat) -> None:
        now, forwarding = self._clock(), self._proxy.forwarding
        sender = self._senders.get(peer.id)
        if forwarding is None or sender is None:
            return
        state = sender.state
        if state.is_other_life(beat):
            forwarding.restarted(peer.id)
        if state.heard(beat, now) and state.rtt_s is not None:
            forwarding.heard(peer.id, beat.report, state.rtt_s, beat.every_s, now)
            if self._proxy.held:
                reconsider(self._proxy)

    # --- requests

    def _requests(self, peer: PeerAgent) -> asyncio.Protocol:
        return ClientConnection(PeerEntrance(self._proxy, peer.id))
