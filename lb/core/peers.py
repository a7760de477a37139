"""What an agent knows of the agents of other regions: reports, distances, forwarded requests. Pure.

*Reports.* A peer reports its room a few times a second (`RegionReport`). What has been forwarded since counts on top: the
wait it adds, and the credit it uses up. Credit is `CREDIT_PER_ROOM` requests for each that the peer has room for, shared
between the regions that may forward to it, at least one: without it every agent would send to the same free replica
until the next report. A forward gives its credit back when it is over, and already with the first byte of its response if the
peer says there that it has room in its place. So no more requests are on their way to a peer or without a first byte there than ran
there when it made its last report and than that granted, and a forward that fails costs no credit.

*Staleness.* A peer is fresh until its next report is late by `LATE_S`. A stale one gets no new request; nothing else
changes, neither here nor for requests that are under way there.

*Prefixes.* The prompts forwarded to a peer are kept in a radix tree whose holders are regions: what a region was sent it
has probably cached. This needs no message (SkyWalker section 3.2). What it was sent by others it reports in digests (`lb.core.shared_caches`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import ceil, inf
from typing import NamedTuple

from lb.core.hop import NO_REPORT, ReportId
from lb.core.target_choice import choose, ready
from lb.core.targets import TargetTable
from policies.regions.base import LocalCost, PeerView
from policies.routing.base import Choice, RequestView, TargetView, Turns
from policies.routing.gorgo import DEFAULT_S_PER_BYTE
from policies.routing.prefix_policy import MIN_MATCH_BYTES
from policies.routing.radix_tree import NO_MATCH, RadixTree, beginning_of
from policies.routing.request_work import prompt_bytes

CREDIT_PER_ROOM = 1.5
LATE_S = 0.4  # more than a segment that is lost costs, less than a request that is sent into a broken link
MAX_TREE_BYTES = 2**24
FIRST_DEPARTURE_S = 0.1  # assumed of each request in a queue that nothing has left yet
SLOWEST_PER_S = 0.2
MOST_CLASSES = 4  # of replicas in one report


class ClassReport(NamedTuple):
    """What an agent reports of its replicas that have the same accelerator, as of all of them; `waiting` have no first byte."""

    available: int
    waiting: int
    wait_s: float
    s_per_byte: float
    decode_s: float


class RegionReport(NamedTuple):
    """What an agent reports of its region: `available` replicas take a request now, `room` requests in all, `queued` wait.

    A request without a cached prefix waits `wait_s`, then its prefill takes `s_per_byte` a byte; its response is later by
    `decode_s`. `engine` is the kind of its engines (see `lb.engines.kinds`), by which a stream is continued there. `silent` are the
    agents that have been silent to it for some seconds. `classes` are those of its replicas, where there are several.
    """

    available: int
    room: int
    queued: int
    wait_s: float
    s_per_byte: float
    decode_s: float
    draining: bool = False
    engine: str = ""
    silent: tuple[str, ...] = ()
    classes: tuple[ClassReport, ...] = ()


class _Peer:
    __slots__ = (
        "credit",
        "every_s",
        "received_at",
        "report",
        "report_id",
        "rtt_s",
        "running",
        "sent",
        "sent_s",
    )

    def __init__(self) -> None:
        self.report: RegionReport | None = None
        self.report_id = NO_REPORT
        self.running: set[Hashable] = (
            set()
        )  # forwarded requests that its last report knew of, and have no response
        self.received_at = self.every_s = self.rtt_s = 0.0
        self.credit = 0
        self.sent: dict[Hashable, float] = {}  # when each was forwarded that its last report did not know of
        self.sent_s: dict[Hashable, float] = {}  # seconds of prefill of each


class Peers:
    """The peers of one agent. `now` never runs backwards."""

    def __init__(self, regions: Iterable[str], max_tree_bytes: int = MAX_TREE_BYTES) -> None:
        self._peers = {region: _Peer() for region in sorted(regions)}
        self._tree = RadixTree(max_tree_bytes)
        self._turns = Turns()

    def retain(self, regions: Iterable[str]) -> None:
        """These are the peers from now on."""
        wanted = sorted(regions)
        for region in self._peers.keys() - set(wanted):
            self._tree.forget(region)
        self._peers = {region: self._peers.get(region) or _Peer() for region in wanted}

    def reported(
        self,
        region: str,
        report: RegionReport,
        made_at: float,
        rtt_s: float,
        every_s: float,
        now: float,
        report_id: ReportId = NO_REPORT,
    ) -> None:
        """A report has come that was made at `made_at` (on this agent's clock), the next one in `every_s`."""
        peer = self._peers[region]
        peer.report, peer.received_at, peer.rtt_s, peer.every_s = report, now, rtt_s, every_s
        peer.report_id = report_id
        peer.credit = max(1, ceil(CREDIT_PER_ROOM * report.room / max(1, len(self._peers))))
        # A request that was sent half a round trip before the report was made had arrived by then.
        known = [name for name, at in peer.sent.items() if at + rtt_s / 2 <= made_at]
        for name in known:
            self._settle(peer, name)
            peer.running.add(name)

    def views(
        self, request: RequestView, now: float, allowed: Callable[[str], bool] = lambda region: True
    ) -> list[PeerView]:
        """Return the peers that the request may be forwarded to: fresh, not draining, allowed."""
        prompt = request.prompt
        match = self._tree.match(request.scope, beginning_of(prompt)) if prompt else NO_MATCH
        size = prompt_bytes(request)
        found = []
        for region, peer in self._peers.items():
            report = peer.report
            if report is None or report.draining or not allowed(region):
                continue
            if now > peer.received_at + peer.every_s + LATE_S:
                continue
            matched = match.get(region, 0)
            if matched < MIN_MATCH_BYTES:
                matched = 0
            best = _best_class(report, size - matched)
            found.append(
                PeerView(
                    region,
                    peer.rtt_s,
                    report.available,
                    report.queued,
                    best.wait_s,
                    best.s_per_byte,
                    best.decode_s,
                    matched,
                    len(peer.sent),
                    sum(peer.sent_s.values()) / max(1, report.available),
                    peer.credit,
                    self._turns.last(region),
                    age_s=now - peer.received_at,
                )
            )
        return found

    def report(self, region: str) -> RegionReport | None:
        """Return the last report of a peer."""
        peer = self._peers.get(region)
        return None if peer is None else peer.report

    def forwarded(self, name: Hashable, request: RequestView, region: str, now: float) -> None:
        """The request is on its way to the agent of `region`; `name` is one that no other request has now."""
        peer = self._peers[region]
        size, matched = prompt_bytes(request), 0
        if request.prompt:
            prompt = beginning_of(request.prompt)
            matched = self._tree.match(request.scope, prompt).get(region, 0)
            self._tree.insert(request.scope, prompt, region)
        peer.sent[name] = now
        residual, report = size - matched, peer.report
        pace = 0.0 if report is None else _best_class(report, residual).s_per_byte
        peer.sent_s[name] = residual * pace
        self._turns.use(region)

    def cached(self, request: RequestView, region: str) -> None:
        """The peer reports that it has the prompt in a cache."""
        if region in self._peers and request.prompt:
            self._tree.insert(request.scope, request.prompt, region)

    def responded(self, name: Hashable, region: str, room_after: ReportId | None) -> bool:
        """The first byte of a forwarded request's response has come. Returns whether that gives credit back.

        The peer has room in its place, and had made the report `room_after` last when it said so; None: it has not.
        """
        peer = self._peers.get(region)
        if peer is None or peer.report is None:
            return False
        if name in peer.sent_s:
            peer.sent_s[name] = 0.0  # its prefill is over
        if room_after is None or room_after.boot != peer.report_id.boot:
            return False
        if name in peer.sent:
            self._settle(peer, name)
        elif name in peer.running:
            peer.running.discard(name)
            if room_after.seq < peer.report_id.seq:
                return False  # a report that came before has counted this room
            peer.credit += 1
        else:
            return False
        if not peer.report.available and room_after.seq >= peer.report_id.seq:
            peer.report = peer.report._replace(available=1, wait_s=0.0, classes=())
        return True

    def ended(self, name: Hashable, region: str) -> bool:
        """A forwarded request is over, however it ended. Returns whether that gives credit back."""
        peer = self._peers.get(region)
        if peer is None:
            return False
        peer.running.discard(name)
        counted = name in peer.sent
        self._settle(peer, name)
        return counted

    def refused(self, name: Hashable, region: str) -> None:
        """The peer had no room after all: nothing more is sent there before its next report."""
        peer = self._peers[region]
        self._settle(peer, name)
        peer.running.discard(name)
        peer.credit = 0

    def forget(self, region: str) -> None:
        """The agent of `region` has lost its replicas' caches or is gone."""
        self._tree.forget(region)
        self._peers[region] = _Peer()

    @staticmethod
    def _settle(peer: _Peer, name: Hashable) -> None:
        peer.sent.pop(name, None)
        peer.sent_s.pop(name, None)


def _best_class(report: RegionReport, residual_bytes: int) -> ClassReport:
    """Return the class of replicas that has room and the first byte of such a request soonest, or else all of them as one."""
    best = ClassReport(report.available, report.queued, report.wait_s, report.s_per_byte, report.decode_s)
    soonest_s = inf
    for one in report.classes:
        first_s = one.wait_s + residual_bytes * one.s_per_byte
        if one.available and first_s < soonest_s:
            best, soonest_s = one, first_s
    return best


_SAMPLE_BYTES = 4096
_SAMPLE = RequestView(
    "", "POST", "/v1/chat/completions", body_bytes=_SAMPLE_BYTES
)  # a prompt that no replica has


def local_cost(choice: Choice | None, request: RequestView, queued_s: float) -> LocalCost:
    """Return what the request costs here, from the routing policy's choice.

    `queued_s` is how long a new request waits in the queue as a whole.

    A policy that works in seconds (`gorgo`) explains its choice in them. For others the prefill is estimated at the default
    pace, and a running request delays by what one prompt token costs for each of its own (see `policies.routing.gorgo`).
    """
    size = prompt_bytes(request)
    if choice is None:
        prefill_s = size * DEFAULT_S_PER_BYTE
        return LocalCost(False, 0.0, queued_s, prefill_s, 0.0, s_per_byte=DEFAULT_S_PER_BYTE)
    row = next(row for row in choice.scored if row[0] == choice.target_id)
    terms: dict[str, float] = dict(zip(choice.terms, (float(value) for value in row[2:]), strict=True))
    if "prefill_s" in terms:
        return LocalCost(
            not choice.wait,
            terms.get("rtt_s", 0.0),
            terms.get("wait_s", 0.0) + terms.get("trouble_s", 0.0),
            terms["prefill_s"],
            terms.get("decode_s", 0.0),
            _longest_match(choice),
            terms["prefill_s"] / max(1, size - choice.matched_bytes),
        )
    prefill_s = (size - choice.matched_bytes) * DEFAULT_S_PER_BYTE
    return LocalCost(not choice.wait, 0.0, 0.0, prefill_s, 0.0, choice.matched_bytes, DEFAULT_S_PER_BYTE)


def _longest_match(choice: Choice) -> int:
    """Return how much of the prompt the candidate has cached that has most of it, as far as the choice says."""
    if "matched_bytes" not in choice.terms:
        return choice.matched_bytes
    at = 2 + choice.terms.index("matched_bytes")
    return max(int(row[at]) for row in choice.scored)


def region_report(table: TargetTable, queued: int, queued_s: float, now: float) -> RegionReport:
    """Return what this agent reports to its peers, with `queued` requests in its queue, of which a new one waits `queued_s`."""
    cost = local_cost(choose(table, _SAMPLE, now), _SAMPLE, queued_s)
    views = [view for view in table.views(now) if table.offered(view.id, now)]
    available = sum(ready(table, view.id, now) for view in views)
    return RegionReport(
        available=available,
        room=available,
        queued=queued,
        wait_s=cost.wait_s,
        s_per_byte=cost.prefill_s / _SAMPLE_BYTES,
        decode_s=cost.decode_s,
        classes=_class_reports(table, views, queued_s, now),
    )


def _class_reports(
    table: TargetTable, views: Sequence[TargetView], queued_s: float, now: float
) -> tuple[ClassReport, ...]:
    """Return what to report of each class of replicas, the largest first; nothing if there is only one."""
    classes: dict[str, list[TargetView]] = {}
    for view in views:
        classes.setdefault(view.accelerator, []).append(view)
    if len(classes) < 2:
        return ()
    epochs = {view.id: entry.epoch for view in views if (entry := table.entry(view.id)) is not None}
    found = []
    for those in sorted(classes.values(), key=len, reverse=True)[:MOST_CLASSES]:
        others = set(epochs.values()).difference(epochs[view.id] for view in those)
        cost = local_cost(choose(table, _SAMPLE, now, others), _SAMPLE, queued_s)
        found.append(
            ClassReport(
                sum(ready(table, view.id, now) for view in those),
                sum(view.waiting for view in those),
                cost.wait_s,
                cost.prefill_s / _SAMPLE_BYTES,
                cost.decode_s,
            )
        )
    return tuple(found)


class QueuePace:
    """How fast the queue drains, from the last departures."""

    __slots__ = ("_left_at",)

    def __init__(self) -> None:
        self._left_at: deque[float] = deque(maxlen=64)

    def left(self, now: float) -> None:
        """A request has left the queue for a replica."""
        self._left_at.append(now)

    def wait_s(self, queued: int, now: float) -> float:
        """Return how long a new request waits behind `queued` others."""
        if not queued:
            return 0.0
        if not self._left_at:
            return queued * FIRST_DEPARTURE_S
        rate = len(self._left_at) / max(0.05, now - self._left_at[0])
        return queued / max(rate, SLOWEST_PER_S)
