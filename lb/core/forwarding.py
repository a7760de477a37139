"""Which requests go to the agents of other regions, and what this agent reports to them. Pure.

Peers are kept as targets in a table of their own: attempts on them are booked, blamed and retried as those on
replicas are, and no routing policy ever sees them. A request is forwarded once at most: one that came from a peer stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.peers import Peers, QueuePace, RegionReport, local_cost, region_report
from lb.core.targets import Booking, Health, Key, TargetTable
from policies.regions.base import RegionChoice
from policies.regions.registry import make_region_policy
from policies.routing.base import Choice, RequestView
from policies.routing.request_work import prompt_bytes

FULL_SLACK_S = 0.25  # a peer keeps a forwarded request that it can start within its reported wait and this
_ANY = RequestView("", "GET", "/")
_FIRST_LIFE = 2**40  # of peers, so that no request takes one for a replica that it has tried
SILENT_AFTER_S = 5.0


class Forwarding:
    """The regions as one agent sees them. `now` never runs backwards."""

    def __init__(self, table: TargetTable, regions: Regions, now: float) -> None:
        self.regions = regions
        self._table = table
        self.peer_table = TargetTable(_described(regions, table.table), now, first_life=_FIRST_LIFE)
        self._peers = Peers(peer.id for peer in regions.peers)
        self._policy = make_region_policy(regions.policy)
        self.pace = QueuePace()
        self.forwarded_out: Counter[str] = Counter()  # requests, by peer
        self.forwarded_in: Counter[str] = Counter()
        self.refused_in = 0  # requests of peers that were returned for want of room
        self.came_back = 0  # of ours
        self._reported_wait_s = 0.0

    def apply(self, regions: Regions, now: float) -> None:
        """Another table is in force."""
        if regions.policy != self.regions.policy:
            self._policy = make_region_policy(regions.policy)
        self.regions = regions
        self._peers.retain(peer.id for peer in regions.peers)
        self.peer_table.apply(_described(regions, self._table.table), now)

    # --- peers

    def peer(self, peer_id: str) -> PeerAgent | None:
        return next((one for one in self.regions.peers if one.id == peer_id), None)

    def heard(self, peer_id: str, report: RegionReport, rtt_s: float, every_s: float, now: float) -> None:
        """A report of a peer has come, after half a round trip."""
        if self.peer_table.key(peer_id) is not None:
            self._peers.reported(peer_id, report, now - rtt_s / 2, rtt_s, every_s, now)

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

    # --- requests

    def anybody(self, now: float) -> bool:
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
        allowed: Callable[[str], bool] = lambda peer_id: True,
    ) -> RegionChoice | None:
        """Return the choice between this region and its peers; None if no peer can be chosen.

        `exclude` and `policy` are those of the request (see `TargetTable.choose`), `left_s` is the time until it must have its
        first byte.
        """
        good = {target.id for target, health, _ in self.peer_table.rows(now) if health is Health.GOOD}
        peers = self._peers.views(view, now, lambda peer_id: peer_id in good and allowed(peer_id))
        if not peers:
            return None
        choice = self._table.choose(view, now, exclude, policy)
        wait_s = self.pace.wait_s(queued, now)
        if choice is None and not self._table.anybody(now, exclude):
            wait_s = left_s  # nothing here can serve it
        return self._policy.choose(prompt_bytes(view), local_cost(choice, view, wait_s), peers, left_s)

    def starts_soon(self, view: RequestView, queued: int, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether a request of a peer may wait here: about as long as the last report said, if the policy cares."""
        if not self._policy.needs_room:
            return True
        choice = self._table.choose(view, now, exclude)
        if choice is None and not self._table.anybody(now, exclude):
            return False
        cost = local_cost(choice, view, self.pace.wait_s(queued, now))
        return cost.wait_s <= self._reported_wait_s + FULL_SLACK_S

    def book(self, view: RequestView, peer_id: str, now: float) -> Booking:
        """The request is on its way to the peer."""
        self._peers.forwarded(view, peer_id, now)
        self.forwarded_out[peer_id] += 1
        return self.peer_table.book(view, peer_id, now)

    def returned(self, view: RequestView, peer_id: str) -> None:
        """The peer had no room for it."""
        self.came_back += 1
        if self.peer_table.key(peer_id) is not None:
            self._peers.refused(view, peer_id)

    def owns(self, booking: Booking) -> bool:
        """Return whether the booking is one on a peer."""
        return booking.epoch >= _FIRST_LIFE


def explained(found: RegionChoice) -> Choice:
    """Return the choice of a region in the form in which choices are explained; "" is this region."""
    return Choice(found.region, found.because, terms=found.terms, scored=found.scored)


def _described(regions: Regions, table: Table) -> Table:
    targets = tuple(
        Target(peer.id, f"https://{urlsplit(peer.url).netloc}", region=peer.region, tls_name=peer.tls_name)
        for peer in regions.peers
    )
    return Table(table.service, "peers", targets, breaker=table.breaker)
