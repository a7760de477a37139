"""Which requests go to the agents of other regions, and what this agent reports to them. Pure.

Peers are kept as targets in a table of their own: attempts on them are booked, blamed and retried as those on
replicas are, and no routing policy ever sees them. A request is forwarded once at most: one that came from a peer stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.hop import NO_REPORT, ReportId, credit_line, read_credit
from lb.core.peers import ClassReport, Peers, QueuePace, RegionReport, local_cost, region_report
from lb.core.region_watch import SILENT_AFTER_S
from lb.core.residency import ANYWHERE, Zones, may_have
from lb.core.shared_caches import SharedCaches
from lb.core.target_choice import choose, takes_another
from lb.core.targets import Booking, Key, TargetTable
from policies.regions.base import PeerView, RegionChoice
from policies.regions.registry import make_region_policy
from policies.routing.base import Choice, RequestView
from policies.routing.cache_digest import Held
from policies.routing.request_work import prompt_bytes

FULL_SLACK_S = 0.25  # a peer keeps a forwarded request that it can start within its reported wait and this
_ANY = RequestView("", "GET", "/")
_FIRST_EPOCH = 2**40  # of peers, so that no request takes one for a replica that it has tried
_RESPONSE_SHARE = 0.1  # of the newest response in their usual length


class Forwarding:
    """The regions as one agent sees them. `now` never runs backwards."""

    def __init__(self, table: TargetTable, regions: Regions, now: float, cache_key: bytes = b"") -> None:
        """Share what caches hold with the agents that have the same `cache_key`."""
        self.regions = regions
        self.caches = SharedCaches(cache_key)
        self._table = table
        self.peer_table = TargetTable(_described(regions, table.table), now, first_epoch=_FIRST_EPOCH)
        self._peers = Peers(peer.id for peer in regions.peers)
        self._policy = make_region_policy(regions.policy)
        self.pace = QueuePace()
        self.forwarded_out: Counter[str] = Counter()  # requests, by peer
        self.forwarded_in: Counter[str] = Counter()
        self.returned_count = 0  # of ours
        self._reported_wait_s = 0.0
        self._response_bytes: dict[str, float] = {}  # of a forwarded request, by peer: a moving average
        self.report_ids: dict[str, ReportId] = {}  # of the last report to each peer
        self._share(now)

    def apply(self, regions: Regions, now: float) -> None:
        """Another table is in force."""
        if regions.policy != self.regions.policy:
            self._policy = make_region_policy(regions.policy)
        self.regions = regions
        self._peers.retain(peer.id for peer in regions.peers)
        self.peer_table.apply(_described(regions, self._table.table), now)
        self._share(now)

    # --- caches

    def _share(self, now: float) -> None:
        """Share what caches hold with the agents that may use it: those of this region, and peers if they are chosen by it."""
        regions = self.regions
        far = regions.peers if self._policy.knows_caches else ()
        self._sharing = {agent.id: agent.region for agent in (*far, *regions.siblings)}
        self.caches.retain(self._sharing, {target.id for target in self._table.table.targets}, now)

    def sent(self, view: RequestView, target_id: str, zones: Zones, now: float) -> None:
        """A request of those zones is on its way to a replica of the table."""
        self.caches.sent(view, target_id, zones, now)

    def meets(self, view: RequestView, now: float) -> None:
        """A request has come: learn which caches have its beginning by what other agents report."""
        for held, beginning in self.caches.news(view, now):
            self._learn(held, beginning, now)

    def _learn(self, held: Held, beginning: RequestView, now: float) -> None:
        key, region = self._table.key(held.target_id), self._sharing.get(held.source)
        if key is not None:
            self._table.cached(key, beginning, now)
        for peer in self.regions.peers:
            if peer.region == region:
                self._peers.cached(beginning, peer.id)

    # --- peers

    def peer(self, peer_id: str) -> PeerAgent | None:
        return next((one for one in self.regions.peers if one.id == peer_id), None)

    def receive_report(
        self,
        peer_id: str,
        report: RegionReport,
        rtt_s: float,
        every_s: float,
        now: float,
        report_id: ReportId = NO_REPORT,
    ) -> None:
        """Take a report of a peer into account, which took half a round trip."""
        if self.peer_table.key(peer_id) is not None:
            self._peers.reported(peer_id, report, now - rtt_s / 2, rtt_s, every_s, now, report_id)

    def restarted(self, peer_id: str) -> None:
        """The peer has been restarted; its replicas have their caches still, but its bookings are gone."""
        self._peers.forget(peer_id)

    def silent(self, peer_id: str, now: float) -> Key | None:
        """Nothing has come from the peer for SILENT_AFTER_S: streams that are silent as well go on elsewhere."""
        key = self.peer_table.key(peer_id)
        if key is not None:
            self.peer_table.eject(key, now, SILENT_AFTER_S)
        return key

    def report(self, queued: int, now: float) -> RegionReport:
        """Return what to report to peers."""
        made = region_report(self._table, queued, self.pace.wait_s(queued, now), now)
        self._reported_wait_s = made.wait_s
        return made

    def engine(self, peer_id: str) -> str:
        """Return the kind of the peer's engines, as it reports; empty if it does not know."""
        report = self._peers.report(peer_id)
        return "" if report is None else report.engine

    def classes(self, peer_id: str) -> tuple[ClassReport, ...]:
        """Return what the peer reports of each class of its replicas; empty if it has only one, or does not report them."""
        report = self._peers.report(peer_id)
        return () if report is None else report.classes

    def peer_engines(self) -> set[str]:
        """Return the kinds of the engines of all peers, as far as they have reported them."""
        return {self.engine(peer.id) for peer in self.regions.peers}

    def agrees(self, peer_id: str, silent: str) -> bool:
        """Return whether a peer reports that the agent `silent` is silent to it, too."""
        report = self._peers.report(peer_id)
        return report is not None and silent in report.silent

    # --- requests

    def engines(self, now: float, zones: Zones, exclude: Collection[int] = ()) -> set[str]:
        """Return the kinds of engines of the peers that could take a request of those zones."""
        return {self.engine(peer.region) for peer in self._views(_ANY, now, exclude, zones) if peer.available}

    def _views(self, view: RequestView, now: float, exclude: Collection[int], zones: Zones) -> list[PeerView]:
        healthy = self.peer_table.healthy(now, exclude)
        if zones:
            healthy &= {peer.id for peer in self.regions.peers if may_have(peer.zones, zones)}
        return self._peers.views(view, now, healthy.__contains__)

    def has_available_peer(self, now: float) -> bool:
        """Return whether a peer has reported lately that it has a replica with room."""
        return any(peer.available for peer in self._peers.views(_ANY, now))

    def elsewhere(
        self,
        view: RequestView,
        queued: int,
        left_s: float,
        now: float,
        exclude: Collection[int] = (),
        policy: str | None = None,
        zones: Zones = ANYWHERE,
        engines: Collection[str] | None = None,
    ) -> RegionChoice | None:
        """Return the choice between this region and its peers; None if no peer can be chosen.

        `exclude` and `policy` are those of the request (see `lb.core.target_choice`), `left_s` is the time until it must have its
        first byte, `zones` are of its residency. A stream that is continued needs one of the `engines`.
        """
        peers = self._views(view, now, exclude, zones)
        if engines is not None:
            peers = [peer for peer in peers if self.engine(peer.region) in engines]
        if not peers:
            return None
        choice = choose(self._table, view, now, exclude, policy)
        wait_s = self.pace.wait_s(queued, now)
        if choice is None and not self._table.has_candidate(now, exclude):
            wait_s = left_s  # nothing here can serve it, whatever it costs elsewhere
        elif self.regions.usd_per_second is not None:
            peers = self._with_money(peers, view.body_bytes, self.regions.usd_per_second)
        return self._policy.choose(prompt_bytes(view), local_cost(choice, view, wait_s), peers, left_s)

    def _with_money(
        self, peers: Sequence[PeerView], body_bytes: int, usd_per_second: float
    ) -> list[PeerView]:
        """Return the peers with what the request's traffic costs: its body, and a response as long as those before."""
        priced = {peer.id: peer for peer in self.regions.peers}
        found = []
        for view in peers:
            peer, back_bytes = priced[view.region], self._response_bytes.get(view.region, 0.0)
            usd = (body_bytes * peer.egress_usd_per_gb + back_bytes * peer.ingress_usd_per_gb) / 1e9
            found.append(view._replace(money_s=usd / usd_per_second))
        return found

    def starts_soon(self, view: RequestView, queued: int, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether a request of a peer may wait here: about as long as in the last report, if the policy cares."""
        if not self._policy.needs_room:
            return True
        choice = choose(self._table, view, now, exclude)
        if choice is None and not self._table.has_candidate(now, exclude):
            return False
        cost = local_cost(choice, view, self.pace.wait_s(queued, now))
        return cost.wait_s <= self._reported_wait_s + FULL_SLACK_S

    def book(self, view: RequestView, peer_id: str, now: float) -> Booking:
        """The request is on its way to the peer."""
        booking = self.peer_table.book(view, peer_id, now)
        self._peers.forwarded(booking, view, peer_id, now)
        self.forwarded_out[peer_id] += 1
        return booking

    def returned(self, booking: Booking) -> None:
        """The peer had no room for it."""
        self.returned_count += 1
        if self.peer_table.key(booking.key.id) is not None:
            self._peers.refused(booking, booking.key.id)

    def credit(self, peer_id: str, booking: Booking, now: float, over: bool) -> bytes:
        """Return the header line of a response to a peer that gives its credit back, if there is room in its place.

        `booking` is on the target here, which the request leaves at once if it is `over`.
        """
        last = self.report_ids.get(peer_id)
        if last is None or not takes_another(self._table, booking, now, over):
            return b""
        return credit_line(last)

    def responded(self, booking: Booking, credit: bytes) -> bool:
        """A peer has started to respond, with that value in the header for credit. Returns whether it gives credit back."""
        return self._peers.responded(booking, booking.key.id, read_credit(credit))

    def ended(self, booking: Booking, response_bytes: int) -> bool:
        """A booking is released, after a response of so many bytes (0: there was none). Returns whether that gives credit back."""
        if not self.owns(booking):
            return False
        peer_id = booking.key.id
        if response_bytes:
            before = self._response_bytes.get(peer_id, float(response_bytes))
            self._response_bytes[peer_id] = before + _RESPONSE_SHARE * (response_bytes - before)
        return self._peers.ended(booking, peer_id)

    def owns(self, booking: Booking) -> bool:
        """Return whether the booking is one on a peer."""
        return booking.epoch >= _FIRST_EPOCH


def explained(found: RegionChoice) -> Choice:
    """Return the choice of a region in the form in which choices are explained; "" is this region."""
    return Choice(found.region, found.because, terms=found.terms, scored=found.scored)


def _described(regions: Regions, table: Table) -> Table:
    targets = tuple(
        Target(peer.id, f"https://{urlsplit(peer.url).netloc}", region=peer.region, tls_name=peer.tls_name)
        for peer in regions.peers
    )
    return Table(table.service, "peers", targets, breaker=table.breaker)
