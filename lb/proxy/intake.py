"""What the connections of clients use: who is let in, how a request begins, and how the agent stops serving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from lb.core.adapters import read_operation
from lb.core.api_keys import Admission
from lb.core.byte_budget import SMALL_BYTES, SMALL_FACTOR, parsed_bytes
from lb.core.log_limit import LogLimit
from lb.core.retry import Tries, is_repeatable
from lb.http.api_paths import ADAPTERS, for_model
from lb.http.cors import CorsRules
from lb.http.key_carriers import lines_of
from lb.http.messages import Reader, RequestHead
from lb.http.tls_acceptor import MAX_HANDSHAKES, NO_DESCRIPTOR, TOO_MANY
from lb.proxy import model_list
from lb.proxy.account import Account
from lb.proxy.dispatch import TROUBLE_EVERY_S, Dispatch
from lb.proxy.entrance import RequestAdmission
from lb.proxy.ports import ClientPort
from lb.proxy.rejections import NO_ROOM, Rejection
from lb.proxy.request import ProxiedRequest
from lb.stream.openai_request import is_dense

_SHORT_OF_DESCRIPTORS: Final = ("too_many_clients", TOO_MANY, NO_DESCRIPTOR)

_log = logging.getLogger("lb.proxy")


class Intake:
    """Shared by the connections of all clients of one agent. It is their `lb.proxy.downstream.Entrance`."""

    def __init__(
        self,
        dispatch: Dispatch,
        account: Account,
        id_prefix: str,
        begin_span: Callable[[str], str] | None = None,
        max_clients: int | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        """`begin_span` returns the trace header of a new span; `max_clients` None is no limit.

        On each port with TLS `max_handshakes` connections may be in their handshake.
        """
        self.runtime = dispatch.runtime
        self.limits = dispatch.limits
        self.heads = Reader()
        self.gate = RequestAdmission(
            dispatch.table,
            account.api_keys,
            account.costs,
            account.metrics,
            account.explanations,
            id_prefix,
            begin_span,
            self.ready,
        )
        self._dispatch = dispatch
        self._account = account
        self._max_clients = max_clients
        self.max_handshakes = max_handshakes
        self._handshakes_failed = 0
        self._logged = LogLimit(TROUBLE_EVERY_S)

    # --- for clients' connections

    @property
    def cors(self) -> CorsRules | None:
        """Which web pages may call; None if CORS is off."""
        return self.gate.cors

    def arrived(self) -> None:
        """The head of a request is here."""
        account = self._account
        account.metrics.counts.requests += 1
        account.arrivals.add(self.runtime.clock())

    def is_trusted_proxy(self, peer: str) -> bool:
        """Return True if this address is one of a proxy whose word on its own clients is taken."""
        return self.gate.is_trusted_proxy(peer)

    def is_full(self) -> bool:
        """Return True if there are more clients than descriptors allow."""
        if self._max_clients is None or len(self.runtime.clients) <= self._max_clients:
            return False
        self._log_refused("too_many_clients")
        return True

    def handshake_places(self) -> int:
        """Return how many handshakes of TLS the data port may have now.

        Clients that have been refused and are not closed yet have the descriptors of some.
        """
        surplus = 0 if self._max_clients is None else len(self.runtime.clients) - self._max_clients
        return self.max_handshakes - max(0, surplus)

    def handshake_failed(self, why: str) -> None:
        """A connection was closed before its handshake was complete."""
        self._handshakes_failed += 1
        self._log_refused(why)

    def _log_refused(self, why: str) -> None:
        left_out = self._logged.left_out(why, self.runtime.clock())
        if left_out is None:
            return
        if why in _SHORT_OF_DESCRIPTORS:
            _log.warning(
                "refuse connections why=%s max_clients=%s max_handshakes=%d left_out=%d: raise the limit of open files "
                "(ulimit -n) or start more agents",
                why,
                self._max_clients,
                self.max_handshakes,
                left_out,
            )
        else:
            _log.info("refuse connections why=%s left_out=%d", why, left_out)

    def check(self, head: RequestHead) -> Rejection | Admission | bytes:
        """Decide on the head alone whether a request is let in. Bytes are a complete response to it."""
        verdict, models = self.gate.check(head, self.runtime.clock()), self._dispatch.table.models
        if models.differ and isinstance(verdict, Admission):
            more_lines = b"" if self.cors is None else self.cors[head.origin]
            listed = model_list.response(head, models, more_lines)
            if listed is not None:
                self.abandoned(verdict)
                return listed
        return verdict

    def begin(
        self,
        client: ClientPort,
        head: RequestHead,
        body: bytes,
        admission: Admission,
        structure: int | None = None,
    ) -> ProxiedRequest | Rejection:
        """A request is here with its body, or with as much of it as is kept. The caller places it.

        `structure` is what the objects of the body would take, if that has been counted.
        """
        runtime, account = self.runtime, self._account
        now = runtime.clock()
        size = len(body)
        dense, model = False, for_model(head.path)
        if model and head.method == b"POST":
            if size <= SMALL_BYTES:
                size += SMALL_FACTOR * size
            else:
                parsed = parsed_bytes(body) if structure is None else size + structure
                dense = is_dense(body, parsed)
                size += 0 if dense else parsed
        tenant = admission.tenant
        if size and not runtime.buffers.take(size, tenant, admission.weight):
            if tenant and admission.hop is None:
                account.metrics.of_key(tenant).refusals[NO_ROOM.code] += 1
            return NO_ROOM
        arrival = self.gate.arrival(head, body, admission, client, dense, now)
        if isinstance(arrival, Rejection):
            if size:
                runtime.buffers.give_back(size, tenant)
            return arrival
        if head.path in ADAPTERS and head.method == b"POST" and not client.body_left:
            # What is left of its keys is for engines.
            lines = lines_of(arrival.head.credentials)
            arrival.adapter = read_operation(head.path, body, lines)
        limits = self.limits
        repeatable = model or is_repeatable(head.method, model, head.idempotent)
        hop = admission.hop
        wait_s, hold_s = limits.time_to_first_byte_s, limits.hold_s
        if hop is not None:
            wait_s, hold_s = min(wait_s, hop.left_s), min(hold_s, hop.left_s)
        tries = Tries(repeatable, wait_s, hold_s)
        request = ProxiedRequest(self._dispatch, account, client, arrival, tries, body, size)
        if hop is None:
            account.began(now)
        return request

    def abandoned(self, admission: Admission) -> None:
        """Settle a request that was let in and did not begin, for example because its body never came."""
        self._account.abandoned(admission, self.runtime.clock())

    def client_gone(self) -> None:
        """Count a client that left before its request was whole."""
        self._account.metrics.counts.client_gone += 1

    def refused(self, refusal: Rejection, tenant: str = "") -> None:
        """Count a response to what never became a request, for a key if one let it in."""
        metrics = self._account.metrics
        metrics.counts.responded(refusal.status)
        metrics.counts.errors[refusal.code] += 1
        if tenant:
            metrics.of_key(tenant).refusals[refusal.code] += 1

    # --- for the agent

    def ready(self) -> bool:
        """Return True if a request that came now would find a healthy target."""
        runtime, dispatch = self.runtime, self._dispatch
        now = runtime.clock()
        if runtime.closing or runtime.draining:
            return False
        if any(health.is_good for _, health, _ in dispatch.table.rows(now)):
            return True
        return dispatch.forwarding is not None and dispatch.forwarding.has_available_peer(now)

    def gauges(self) -> dict[str, float]:
        """Return what the agent has of connections and buffers, and its faults, by name as in `AGENT_HELP` of `lb.observe.families`."""
        runtime = self.runtime
        gauges: dict[str, float] = {
            "client_connections": len(runtime.clients),
            "buffered_bytes": runtime.buffers.taken,
            "stream_bytes": self._dispatch.registry.stream_bytes(),
            "buffer_limit_bytes": runtime.buffers.limit,
            "evicted_bodies": runtime.buffers.evicted,
            "internal_errors": runtime.faults.total,
            "retries_refused": self._dispatch.retries.refused,
            "handshakes_failed": self._handshakes_failed,
        }
        if self._max_clients is not None:
            gauges["max_client_connections"] = self._max_clients
        return gauges

    def applied(self) -> None:
        """Act on a new table, in all parts of the data plane."""
        runtime, dispatch = self.runtime, self._dispatch
        self._account.applied(runtime.clock())
        dispatch.applied()
        self.limits = dispatch.limits
        self.gate.apply()
        self.heads = Reader()  # which remembers what was accepted under other limits
        for client in runtime.clients:
            client.identify()
        dispatch.registry.changed()

    # --- closing

    def retire(self, grace_s: float, fresh_s: float | None = None) -> None:
        """Keep no connection alive; present requests are served to their end.

        Idle connections may send a last request for `grace_s`, those that have sent none yet for `fresh_s` (the timeout of
        a head, if that is None).
        """
        self.runtime.close()
        fresh_s = self.limits.head_timeout_s if fresh_s is None else fresh_s
        for client in list(self.runtime.clients):
            client.close_soon(grace_s, fresh_s)

    def close(self, grace_s: float = 0.0) -> None:
        """As `retire`, and turn away the requests in the queue."""
        self._dispatch.registry.stop_queueing()
        self.retire(grace_s, grace_s)
