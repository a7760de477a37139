"""The data plane of one agent: what all requests share. Composition and small services; decisions lie elsewhere."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from itertools import chain

from lb.config.options import Limits
from lb.core.api_keys import Admission, ApiKeyStore
from lb.core.byte_budget import SMALL_BYTES, SMALL_FACTOR, ByteBudget, parsed_bytes
from lb.core.demand_minutes import DemandMinutes, ready_targets
from lb.core.forwarding import Forwarding
from lb.core.queue import RequestQueue
from lb.core.retry import Tries, is_repeatable
from lb.core.scheduler import Scheduler
from lb.core.sliding_window import WindowCounter, WindowMean
from lb.core.target_state import TargetState
from lb.core.targets import Booking, Key, TargetTable
from lb.engines.kinds import EngineKind, kind_named
from lb.http.cors import CorsRules
from lb.http.messages import Reader, RequestHead
from lb.http.upstream import Pools
from lb.http.write_batch import WriteBatcher
from lb.observe.access_log import RequestRecord
from lb.observe.counters import TargetCounts
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from lb.proxy import model_list
from lb.proxy.ending import Endings
from lb.proxy.entrance import RequestAdmission
from lb.proxy.fast_path import FastPath
from lb.proxy.faults import Faults
from lb.proxy.ports import ClientPort, Rejection
from lb.proxy.rejections import NO_ROOM
from lb.proxy.request import ProxiedRequest
from lb.proxy.retries import Retries
from lb.stream.openai_request import for_model, is_dense

DEFAULT_BUFFERS_BYTES = 1024 * 1024 * 1024
# Queued requests launched in one turn of the loop, each of which takes a few tenths of a millisecond.
LET_IN_AT_ONCE = 8
_TROUBLE_EVERY_S = 10.0

_log = logging.getLogger("lb.proxy")


class Proxy:
    """Shared by all connections and requests. `changed` must be called after others have changed the table."""

    def __init__(
        self,
        table: TargetTable,
        pools: Pools,
        metrics: Metrics,
        clock: Callable[[], float],
        id_prefix: str,
        *,
        rng: random.Random,
        kind_of: Callable[[Key], EngineKind],
        finished: Callable[[RequestRecord], None] | None = None,
        begin_span: Callable[[str], str] | None = None,
        fast_path: FastPath | None = None,
        max_clients: int | None = None,
        unix_offset_s: float = 0.0,
        buffers_bytes: int = DEFAULT_BUFFERS_BYTES,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.fast_path = fast_path
        self.write_batcher = WriteBatcher(self.loop)
        self.table = table
        self.forwarding: Forwarding | None = None  # set by the agent, where there are peers
        self.pools = pools
        self.metrics = metrics
        self.clock = clock
        self.kind_of = kind_of
        self.faults = Faults(clock)
        self.buffers = ByteBudget(buffers_bytes)
        self.max_clients = max_clients  # None: no limit
        self.closing = False  # no connection is kept alive any longer
        self.draining = False  # serves on, but is not ready
        self.queueing = True  # may a request wait for a target?
        self.clients: set[ClientPort] = set()
        self.heads = Reader()
        self.queue: RequestQueue[ProxiedRequest] = RequestQueue(
            lambda ticket: self._guarded(ticket.item, lambda one: one.evicted(clock()))
        )
        self.scheduler: Scheduler[ProxiedRequest] = Scheduler(table, self.queue)
        self.waiting: dict[ProxiedRequest, None] = {}  # with an attempt that has no first byte yet
        self.waiting_until = float("inf")  # none of them has to be checked before
        self.relays: dict[ProxiedRequest, None] = {}  # with a response under way
        self.tunnels: dict[ProxiedRequest, None] = {}
        self.explanations = Explanations(running=self._running)
        self.arrivals = WindowCounter()
        self.rejections = WindowCounter()
        self.ongoing = WindowMean(clock())  # in flight or queued
        self.demand = DemandMinutes(clock(), unix_offset_s, lambda: ready_targets(table.table))
        # Set by the agent; the first moves requests off lost targets.
        self.on_changed: Callable[[], None] = lambda: None
        self.on_missing_model = self.on_credit = self.on_changed
        self._let_in_due = self._changed_due = False
        self._trouble_at = self._full_at = float("-inf")
        self._counts: dict[TargetState, TargetCounts] = {}  # until the table changes
        self.api_keys = ApiKeyStore(table.table.access, clock())
        self.retries = Retries(table, self.arrivals, rng)
        self.limits: Limits = table.table.limits
        self.gate = RequestAdmission(
            table, self.api_keys, metrics, self.explanations, id_prefix, begin_span, self.ready
        )
        self.endings = Endings(
            metrics,
            self.api_keys,
            self.explanations,
            self.counts_of,
            lambda: table.table.policy,
            finished,
            self.demand,
            lambda: table.table.slo,
        )

    @property
    def queued(self) -> int:
        """How many requests wait in the queue."""
        return len(self.queue)

    # --- for clients' connections

    @property
    def cors(self) -> CorsRules | None:
        return self.gate.cors

    def arrived(self) -> None:
        self.metrics.counts.requests += 1
        self.arrivals.add(self.clock())

    def is_trusted_proxy(self, peer: str) -> bool:
        return self.gate.is_trusted_proxy(peer)

    def is_full(self) -> bool:
        if self.max_clients is None or len(self.clients) <= self.max_clients:
            return False
        now = self.clock()
        if now - self._full_at >= _TROUBLE_EVERY_S:
            self._full_at = now
            _log.warning(
                "refusing connections limit=%d: raise the limit of open files (ulimit -n) or start more agents",
                self.max_clients,
            )
        return True

    def check(self, head: RequestHead) -> Rejection | Admission | bytes:
        verdict = self.gate.check(head, self.clock())
        if self.table.models.differ and isinstance(verdict, Admission):
            more_lines = b"" if self.cors is None else self.cors[head.origin]
            listed = model_list.response(head, self.table.models, more_lines)
            if listed is not None:
                self.abandoned(verdict)
                return listed
        return verdict

    def begin(
        self, client: ClientPort, head: RequestHead, body: bytes, admission: Admission
    ) -> ProxiedRequest | Rejection:
        now = self.clock()
        size = len(body)
        dense, model = False, for_model(head.path)
        if model and head.method == b"POST":
            if size <= SMALL_BYTES:
                size += SMALL_FACTOR * size
            else:
                parsed = parsed_bytes(body)
                dense = is_dense(body, parsed)
                size += 0 if dense else parsed
        if not self.buffers.take(size):
            return NO_ROOM
        arrival = self.gate.arrival(head, body, admission, client, dense, now)
        if isinstance(arrival, Rejection):
            self.buffers.give_back(size)
            return arrival
        limits = self.limits
        repeatable = model or is_repeatable(head.method, model, head.idempotent)
        hop = admission.hop
        wait_s, hold_s = limits.time_to_first_byte_s, limits.hold_s
        if hop is not None:
            wait_s, hold_s = min(wait_s, hop.left_s), min(hold_s, hop.left_s)
        tries = Tries(repeatable, wait_s, hold_s)
        request = ProxiedRequest(self, client, body, arrival, tries)
        request.buffered = size
        if hop is None:
            self.ongoing.step(now, 1)
            self.demand.arrived(now)
        return request

    def abandoned(self, admission: Admission) -> None:
        if not admission.settled:
            self.api_keys.settle(admission, 0, self.clock())

    def client_gone(self) -> None:
        self.metrics.counts.client_gone += 1

    def refused(self, refusal: Rejection) -> None:
        self.metrics.counts.responded(refusal.status)
        self.metrics.counts.errors[refusal.code] += 1

    def ready(self) -> bool:
        """Return True if a request that came now would find a healthy target."""
        now = self.clock()
        if self.closing or self.draining:
            return False
        if any(health.is_good for _, health, _ in self.table.rows(now)):
            return True
        return self.forwarding is not None and self.forwarding.has_available_peer(now)

    # --- for requests

    def kind_of_id(self, target_id: str) -> EngineKind:
        key = self.table.key(target_id)
        return EngineKind.UNKNOWN if key is None else self.kind_of(key)

    def kind_of_booking(self, booking: Booking) -> EngineKind:
        forwarding = self.forwarding
        if forwarding is not None and forwarding.owns(booking) and forwarding.engine(booking.key.id):
            return kind_named(forwarding.engine(booking.key.id))
        return self.kind_of(booking.key)

    def table_of(self, booking: Booking) -> TargetTable:
        forwarding = self.forwarding
        return forwarding.peer_table if forwarding is not None and forwarding.owns(booking) else self.table

    def may_wait(self, request: ProxiedRequest, now: float) -> bool:
        forwarding, hop = self.forwarding, request.arrival.hop
        if forwarding is None or hop is None:
            return True
        soon = forwarding.starts_soon(request.view, len(self.queue), now, request.tried)
        self.metrics.peers.of(hop.peer).refusals += not soon
        return soon

    def counts_of(self, booking: Booking) -> TargetCounts:
        counts = self._counts.get(booking.entry)
        if counts is None:
            counts = self._counts[booking.entry] = self.metrics.of(booking.target)
        return counts

    def release(self, booking: Booking, now: float, tokens: int | None = None) -> None:
        self.counts_of(booking).duration.observe(now - booking.since)
        if len(self.queue):
            self.let_in_soon()
        self.table_of(booking).release(booking, now, tokens)

    def local_trouble(self, why: str, now: float) -> None:
        self.metrics.counts.local_failures += 1
        if now - self._trouble_at >= _TROUBLE_EVERY_S:
            self._trouble_at = now
            _log.warning(
                "cannot open connections to targets why=%r clients=%d: raise the limit of open files (ulimit -n) or "
                "start more agents; targets are not blamed",
                why,
                len(self.clients),
            )

    def forget_body(self, request: ProxiedRequest) -> None:
        """Drop a body that is not needed any longer."""
        request.body = b""
        self.buffers.give_back(request.buffered)
        request.buffered = 0

    # --- the queue and the table

    def let_in_soon(self) -> None:
        """Once in this turn of the loop, however often it is called."""
        if not self._let_in_due:
            self._let_in_due = True
            self.loop.call_soon(self.let_in)

    def let_in(self) -> None:
        """Launch the queued requests that may go now; after some of them others of the loop have their turn first."""
        self._let_in_due = False
        try:
            now = self.clock()
            for count, (request, choice) in enumerate(self.scheduler.let_in(now), 1):
                try:
                    if self.forwarding is not None:
                        self.forwarding.pace.left(now)
                    request.admitted(choice, now)
                except Exception as error:  # noqa: BLE001 (the barrier)
                    request.crashed("queue", error)
                if count == LET_IN_AT_ONCE:
                    self.let_in_soon()
                    break
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.faults.report("queue", error)

    def changed_soon(self) -> None:
        if not self._changed_due:
            self._changed_due = True
            self.loop.call_soon(self.changed)

    def changed(self) -> None:
        """The table has changed: requests that wait in vain move, queued ones that can go now go."""
        self._changed_due = False
        self.on_changed()
        if len(self.queue):
            self.let_in_soon()

    def applied(self) -> None:
        """A new table is in force."""
        table = self.table.table
        self._counts.clear()
        self.limits = table.limits
        self.gate.apply()
        self.heads = Reader()  # which remembers what was accepted under other limits
        self.api_keys.apply(table.access, self.clock())
        self.retries.applied()
        peers = () if self.forwarding is None else self.forwarding.peer_table.table.targets
        self.pools.retain({target.url for target in (*table.targets, *peers)})
        for client in self.clients:
            client.identify()
        self.changed()

    # --- closing

    def retire(self, grace_s: float, fresh_s: float | None = None) -> None:
        """Keep no connection alive; present requests are served to their end.

        Idle connections may send a last request for `grace_s`, those that have sent none yet for `fresh_s` (the timeout of
        a head, if that is None).
        """
        self.closing = True
        fresh_s = self.limits.head_timeout_s if fresh_s is None else fresh_s
        for client in list(self.clients):
            client.close_soon(grace_s, fresh_s)

    def close(self, grace_s: float = 0.0) -> None:
        """As `retire`, and turn away the requests in the queue."""
        self.queueing = False
        for ticket in self.queue.clear():
            self._guarded(ticket.item, lambda one: one.expired(self.clock()))
        self.retire(grace_s, grace_s)

    def _guarded(self, request: ProxiedRequest, act: Callable[[ProxiedRequest], None]) -> None:
        try:
            act(request)
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed("queue", error)

    def _running(self) -> Iterator[Explanation]:
        queued = (ticket.item for ticket in self.queue.walk())
        return (request.arrival.explanation for request in chain(self.relays, self.waiting, queued))
