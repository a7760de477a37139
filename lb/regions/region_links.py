"""The links of one agent to the agents of other regions: who is a peer, beats out and in, requests out and in.

With the other agents of its own region, its siblings, it shares what caches hold and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from lb.config.regions import PeerAgent, Regions
from lb.core.beats import Beat, UsedReport, encode, encode_digest, encode_report, encode_used, without_room
from lb.core.forwarding import Forwarding
from lb.core.hop import ReportId
from lb.core.link_state import LinkState
from lb.core.log_limit import LogLimit
from lb.core.peers import RegionReport
from lb.core.region_watch import Link, RegionWatch
from lb.core.shared_quota import SharedQuota
from lb.engines.http_get import HttpGetter
from lb.observe.explain import Explanation
from lb.proxy.account import Account
from lb.proxy.dispatch import Dispatch
from lb.proxy.downstream import ClientConnection
from lb.proxy.intake import Intake
from lb.proxy.peer_entrance import EXPLAIN, PeerEntrance
from lb.regions.beat_sender import BeatSender
from lb.regions.identity import BEATS, EXPIRED, REQUESTS, Identity
from lb.regions.peer_port import PeerPort
from policies.routing.cache_digest import Digest

CHANGED_S = 0.25  # between two that report something else than the one before it, but nothing of importance
LOGGED_AWAY_S = 1.0
EVERY_S = 0.5  # between two beats in any case
_EARLY_S = 0.05  # by which a tick may be early

_log = logging.getLogger("lb.regions")


class RegionLinks:
    """Needs a running event loop. `boot` distinguishes this process of the agent from others; raises OSError for files it cannot read."""

    def __init__(
        self,
        intake: Intake,
        dispatch: Dispatch,
        account: Account,
        forwarding: Forwarding,
        quota: SharedQuota,
        identity: Identity,
        boot: int,
        engine: Callable[[], str] = str,
        on_takeover: Callable[[], object] = lambda: None,
    ) -> None:
        """Report `engine` to peers; call `on_takeover` when `takeovers` serves other regions than before.

        `forwarding` is that of the dispatch, `quota` that of the API keys.
        """
        self._engine = engine
        self._on_takeover = on_takeover
        self._watch = RegionWatch(dispatch.runtime.clock())
        self.takeovers = self._watch.takeovers
        self._unix_time_s = identity.unix_time_s
        self._certificate = OwnCertificate(identity)
        self._intake = intake
        self._registry = dispatch.registry
        self._runtime = dispatch.runtime
        self._account = account
        self._forwarding = forwarding
        self._pools = dispatch.pools
        self._table = dispatch.table
        self._beats_tls = identity.client(BEATS)
        self._requests_tls = identity.client(REQUESTS)
        self._boot = boot
        self._clock = dispatch.runtime.clock
        self._by_name: dict[str, PeerAgent] = {}
        self._senders: dict[str, BeatSender] = {}
        self._links: dict[str, Link] = {}
        self._lapsed: frozenset[str] = frozenset()  # peers of which this agent only learns that they live
        self._report: RegionReport | None = None  # the newest one
        self._frame = b""  # of it
        self._state: tuple[object, ...] | None = None  # of the targets when it was made; None: busy
        self._sent: RegionReport | None = None  # to all peers
        self._sent_at = float("-inf")
        self._logged: frozenset[str] = frozenset()  # as was logged
        self._getter = HttpGetter(dispatch.pools, dispatch.runtime.clock)
        self._quota = quota
        self.port = PeerPort(
            identity.server(),
            lambda: self._by_name,
            self._on_beat,
            self._requests,
            identity.unix_time_s,
            self._used_elsewhere,
            intake.max_handshakes,
            self._on_digest,
        )

    def apply(self, regions: Regions | None) -> None:
        """Another table is in force. Without `regions` all peers are gone."""
        now, forwarding = self._clock(), self._forwarding
        if regions is None:
            if not forwarding.regions.agent:  # it has never had a region
                return
            regions = Regions(forwarding.regions.agent, forwarding.regions.here)
        forwarding.apply(regions, now)
        urls = frozenset(target.url for target in forwarding.peer_table.table.targets)
        self._pools.use_peers(urls, self._requests_tls)
        wanted = {peer.id: peer for peer in (*regions.peers, *regions.siblings)}
        self._by_name = {peer.tls_name: peer for peer in wanted.values()}
        for peer_id, sender in list(self._senders.items()):
            if wanted.get(peer_id) != sender.peer:
                sender.close()
                del self._senders[peer_id]
        for peer_id, peer in wanted.items():
            if peer_id not in self._senders:
                state = LinkState(self._boot, now)
                sender = BeatSender(peer, self._beats_tls, state, self._clock, self._connected)
                self._senders[peer_id] = sender
                sender.start()
        self._links = {peer.id: Link(peer.region, self._senders[peer.id].state) for peer in regions.peers}
        self._watch.renew(self._links, now)
        self._share_quota(now)

    def tick(self) -> None:
        """Send beats, and watch for peers that are silent. Called ten times a second, which is as often as beats may be sent."""
        forwarding, now = self._forwarding, self._clock()
        self._attend(now)
        if not self._senders:
            return
        self._certificate.look(now)
        before = self._watch.silent
        if self._watch.look(self._links, forwarding.agrees, now):
            self._log_takeovers()
            self._on_takeover()
        for peer_id in self._watch.silent:
            if self._senders[peer_id].state.beats_received:
                forwarding.silent(peer_id, now)
        lapsed = frozenset(peer_id for peer_id, one in self._senders.items() if self._has_lapsed(one))
        if self._watch.silent or before or lapsed != self._lapsed:
            self._lapsed = lapsed
            self._share_quota(now)
        since_s = now - self._sent_at + _EARLY_S
        report, last = self._reported(now, fresh=since_s >= EVERY_S), self._sent
        if (
            last is None
            or since_s >= (EVERY_S if report == last else CHANGED_S)
            or self._quota.has_unsent
            or _is_urgent(report, last)
        ):
            self._send(now)

    async def close(self) -> None:
        """Accept nothing more and send no more beats. Forwarded requests go on."""
        await self.port.close()
        for sender in self._senders.values():
            sender.close()
        for sender in self._senders.values():
            await sender.closed()

    async def explained(self, explanation: Explanation) -> list[dict[str, Any]]:
        """Return what has become of a request at each of the peers that it was forwarded to."""
        return await peer_explanations(explanation, self._forwarding, self._getter)

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the regions, for the admin port."""
        forwarding, now = self._forwarding, self._clock()
        if not forwarding.regions.agent:
            return {"here": None, "peers": []}
        return {
            "agent": forwarding.regions.agent,
            "here": forwarding.regions.here,
            "policy": forwarding.regions.policy,
            "epoch": forwarding.regions.epoch,
            "owned": list(forwarding.regions.owned),
            "taken_over": sorted(self._taken_over()),
            "certificate": self._certificate.state,
            "certificate_left_s": self._certificate.left_s,
            "away_s": round(self._watch.away_s, 3),
            "refused_connections": dict(self.port.refused),
            "refused_requests": self._account.metrics.peers.refusals,
            "came_back": forwarding.returned_count,
            "peers": [
                self._row(self._senders[peer_id], forwarding.forwarded_out, forwarding.forwarded_in, now)
                for peer_id in self._links
            ],
            "digests": forwarding.caches.to_json(now),
        }

    def _row(
        self, sender: BeatSender, out: Mapping[str, int], into: Mapping[str, int], now: float
    ) -> dict[str, Any]:
        state, peer = sender.state, sender.peer
        rtt_s, sent_bytes = state.rtt_s, self._account.metrics.peers.of(peer.id).sent_bytes
        return {
            "id": peer.id,
            "region": peer.region,
            "rtt_ms": None if rtt_s is None else round(1000 * rtt_s, 3),
            "deviation_ms": round(1000 * state.deviation_s, 3),
            "silent_s": round(state.silent_s(now), 3) if state.beats_received else None,
            "dead": self.takeovers.is_dead(peer.id),
            "engine": self._forwarding.engine(peer.id),
            "classes": [one._asdict() for one in self._forwarding.classes(peer.id)],
            "connections": sender.connections,
            "reports": state.beats_received,
            "trouble": sender.trouble,
            "certificate": self._lapse(sender),
            "forwarded_out": out.get(peer.id, 0),
            "forwarded_in": into.get(peer.id, 0),
            "sent_bytes": sent_bytes,
            "egress_usd": sent_bytes * peer.egress_usd_per_gb / 1e9,
        }

    # --- liveness

    def _attend(self, now: float) -> None:
        away_s = self._watch.attend(self._links, now)
        if away_s >= LOGGED_AWAY_S:
            _log.warning(
                "was away for_s=%.1f why=%r", away_s, "stopped, or without CPU: peers are not silent"
            )

    def _taken_over(self) -> frozenset[str]:
        """Return the regions whose targets are served here in place of their agents."""
        return self.takeovers.regions & {one.owner for one in self._table.table.standby}

    def _log_takeovers(self) -> None:
        taken = self._taken_over()
        for region in taken - self._logged:
            _log.warning("take over region=%s why=%r", region, "its agents are silent")
        for region in self._logged - taken:
            _log.info("hand back region=%s why=%r", region, "an agent of it has been back for long enough")
        self._logged = taken

    # --- beats

    def _reported(self, now: float, fresh: bool) -> RegionReport:
        """Return the report of this moment; if it need not be `fresh`, that of an idle agent may be half a second old."""
        runtime, table, report = self._runtime, self._table, self._report
        draining, queued = runtime.closing or runtime.draining, self._registry.queued
        state = (table.version(now), table.health_changes, self._watch.silent, draining)
        is_busy = table.in_flight or queued
        if report is not None and not fresh and not is_busy and state == self._state:
            return report
        made = self._forwarding.report(queued, now)
        made = made._replace(engine=self._engine(), silent=self._watch.silent, draining=draining)
        if made != report:
            self._report, self._frame = made, encode_report(made)
        self._state = None if is_busy else state
        return made

    def _send(self, now: float) -> None:
        """Send the newest report to all peers."""
        self._sent, self._sent_at = self._report, now
        for sender in self._senders.values():
            if sender.is_open:
                self._beat(sender, now)

    def _connected(self, sender: BeatSender) -> None:
        now = self._clock()
        self._forwarding.caches.connected(sender.peer.id)
        self._reported(now, fresh=True)
        self._beat(sender, now)

    def _beat(self, sender: BeatSender, now: float) -> None:
        """Send the newest report to a peer, after what API keys have used since the last one."""
        forwarding, report, peer_id = self._forwarding, self._report, sender.peer.id
        if report is None:
            return
        beat = sender.state.next_beat(report, EVERY_S, forwarding.regions.epoch, now)
        forwarding.report_ids[peer_id] = ReportId(beat.boot, beat.seq)
        if self._has_lapsed(sender):
            sender.send(encode(beat, encode_report(without_room(report))), now)
            return
        used = self._quota.unsent(peer_id, sender.connections, beat.seq) if peer_id in self._links else None
        news = encode_used(self._boot, used) if used else b""
        digest = forwarding.caches.unsent(peer_id, sender.peer.zones, now)
        if digest is not None:
            frames = encode_digest(digest)
            forwarding.caches.sent_bytes[peer_id] += len(frames)
            news += frames
        sender.send(news + encode(beat, self._frame), now)

    def _has_lapsed(self, sender: BeatSender) -> bool:
        """Return whether the certificate of the peer, or of this agent, is not valid: they only learn of each other that they live."""
        return bool(self._lapse(sender)) or self._certificate.state == EXPIRED

    def _lapse(self, sender: BeatSender) -> str:
        return "" if sender.validity is None else sender.validity.lapse(self._unix_time_s())

    def _on_beat(self, peer: PeerAgent, beat: Beat) -> None:
        now, forwarding = self._clock(), self._forwarding
        self._attend(now)
        sender = self._senders.get(peer.id)
        if sender is None:
            return
        state = sender.state
        if state.is_restart(beat) and peer.id in self._links:
            forwarding.restarted(peer.id)
        if state.receive(beat, now) and state.rtt_s is not None:
            report_id = ReportId(beat.boot, beat.seq)
            forwarding.receive_report(peer.id, beat.report, state.rtt_s, beat.every_s, now, report_id)
            if self._registry.queued:
                self._registry.reconsider()
        if state.boot == beat.echo_boot:
            self._quota.acknowledged(peer.id, beat.echo)

    def _on_digest(self, peer: PeerAgent, digest: Digest) -> None:
        self._forwarding.caches.reported(peer.id, digest, self._clock())

    # --- limits of API keys

    def _share_quota(self, now: float) -> None:
        """Set the agents with which the limits of API keys are shared."""
        silent = set(self._watch.silent)
        reachable = self._links.keys() - silent - self._lapsed
        # With one peer, a dead agent and a broken link look the same; without any, this agent may be the one that is cut off.
        confirmed = len(self._links) > 1 and bool(reachable)
        dead = {peer for peer in silent if confirmed and self.takeovers.is_dead(peer)}
        self._account.api_keys.fill(now)
        self._quota.peers(reachable, dead, self._links.keys())

    def _used_elsewhere(self, peer: PeerAgent, report: UsedReport) -> None:
        self._account.api_keys.charge(self._quota.receive(peer.id, report.boot, report.used), self._clock())

    # --- requests

    def _requests(self, peer: PeerAgent) -> asyncio.Protocol:
        return ClientConnection(PeerEntrance(self._intake, self._account, self._forwarding, peer.id))


def _is_urgent(report: RegionReport, last: RegionReport) -> bool:
    """Return whether peers should know of the report at once: they choose, or take over, by what has changed."""
    return (
        report.available != last.available
        or (report.queued > 0) != (last.queued > 0)
        or report.draining != last.draining
        or report.silent != last.silent
    )


TIMEOUT_S = 2.0


async def peer_explanations(
    explanation: Explanation, forwarding: Forwarding, getter: HttpGetter
) -> list[dict[str, Any]]:
    """Ask each of the peers. `steps` is None where one has no account of it, or cannot be asked (`trouble`)."""
    targets = {target.id: target for target in forwarding.peer_table.table.targets}
    path = EXPLAIN.decode() + quote(explanation.request_id, safe="")
    found = []
    for peer_id in explanation.targets_of("forwards"):
        row: dict[str, Any] = {"peer": peer_id, "steps": None}
        try:
            fetched = await getter.fetch(targets[peer_id], path, TIMEOUT_S)
            row |= json.loads(fetched.body) if fetched.status == 200 else {}
        except (KeyError, ValueError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (not the same in 3.10)
            row["trouble"] = str(error) or type(error).__name__
        found.append(row)
    return found


# This agent's certificate: whether it is valid, and a line in the log before it expires.
#
# The controller replaces certificates every 10 days, and each is valid for 30. One that expires in less than WARN_BEFORE_S has not been
# replaced for 10 days at least: the controller does not run, or does not reach this agent.

WARN_BEFORE_S = 10 * 86400.0
WARN_EVERY_S = 86400.0
EXPIRING = "expiring"


class OwnCertificate:
    """Raises OSError for files that cannot be read."""

    def __init__(self, identity: Identity) -> None:
        self._unix_time_s = identity.unix_time_s
        self._expires_at = identity.expires_at()
        self._logged = LogLimit(WARN_EVERY_S)

    @property
    def left_s(self) -> float | None:
        """Return in how many seconds it expires, negative once it has; None if it is not known."""
        return None if self._expires_at is None else self._expires_at - self._unix_time_s()

    @property
    def state(self) -> str:
        """Return EXPIRED, EXPIRING within WARN_BEFORE_S, or "" for one that is valid for longer."""
        left_s = self.left_s
        if left_s is None or left_s > WARN_BEFORE_S:
            return ""
        return EXPIRED if left_s < 0 else EXPIRING

    def look(self, now: float) -> None:
        """Log once a day if it expires soon, or has expired."""
        state = self.state
        if state and self._logged.left_out(state, now) is not None:
            _log.warning(
                "certificate for peers state=%s days_left=%.1f why=%r",
                state,
                (self.left_s or 0.0) / 86400,
                "the controller replaces it every 10 days, if it runs and reaches this agent",
            )
