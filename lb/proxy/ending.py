"""How a request finishes: one enum of outcomes, and the one place that reports, counts and charges."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from lb.config.options import Slo
from lb.core.api_keys import Admission, ApiKeyStore
from lb.core.demand_minutes import DemandMinutes, is_late
from lb.core.hop import RequestHop
from lb.core.residency import ANYWHERE, Zones
from lb.core.targets import Booking
from lb.http.messages import RequestHead
from lb.observe.access_log import RequestRecord
from lb.observe.counters import TargetCounts
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from lb.proxy.ports import Relay
from lb.stream.resume_state import ResumeState
from lb.stream.token_usage import Tokens, estimated_prompt, usage_of
from policies.routing.base import RequestView

_SERVER_ERRORS = 500


class Outcome(Enum):
    """How a request finished, as its client sees it."""

    WHOLE = "whole"  # it has the whole response of a target
    REFUSED = "refused"  # it has an error response of ours
    ERROR_EVENT = "error_event"  # its stream ended with an error event
    CUT = "cut"  # its response broke off after the first byte
    CLIENT_GONE = "client_gone"
    TUNNEL_CLOSED = "tunnel_closed"


class Arrival(NamedTuple):
    """A request as it arrived: everything about it that does not change."""

    at: float
    head: RequestHead
    request_id: bytes
    view: RequestView
    model: str
    admission: Admission
    explanation: Explanation
    policy: str | None = None  # requested by the client
    span: str = ""
    continues: bool = True  # the client has not forbidden to resume its stream
    resume_state: ResumeState | None = None
    cors: bytes | None = None  # header lines of any response to it; None if CORS is off
    set_cookie: bytes = b""  # a header line of a target's response, with its CRLF
    hop: RequestHop | None = None  # of a request that a peer has forwarded
    zones: Zones = ANYWHERE  # of its residency


class Ending:
    """What a request collects for its report."""

    __slots__ = ("bytes_out", "continued", "error", "first_at", "last_target", "queued_s")

    def __init__(self) -> None:
        self.bytes_out = 0
        self.continued = 0
        self.error = ""
        self.first_at: float | None = None
        self.last_target = ""
        self.queued_s = 0.0


class TokensSpent(NamedTuple):
    """Tokens of a request that is over. `reported` if the engine counted them; else they are estimates."""

    prompt: int
    out: int
    reported: bool


class Ended(Protocol):
    """A request that is over."""

    arrival: Arrival
    ending: Ending
    relay: Relay | None
    status: int

    @property
    def booking(self) -> Booking | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def executions(self) -> int: ...


class Endings:
    """Reports finished requests to all that record them: tenants, metrics, explanations, the access log, traces."""

    def __init__(
        self,
        metrics: Metrics,
        api_keys: ApiKeyStore,
        explanations: Explanations,
        counts_of: Callable[[Booking], TargetCounts],
        policy: Callable[[], str],
        record: Callable[[RequestRecord], None] | None,
        demand: DemandMinutes,
        slo: Callable[[], Slo],
    ) -> None:
        self._metrics = metrics
        self._api_keys = api_keys
        self._explanations = explanations
        self._counts_of = counts_of
        self._policy = policy
        self._record = record
        self._demand = demand
        self._slo = slo

    def spent(self, request: Ended, body: bytes | None) -> TokensSpent:
        """Return the tokens of a request, before its target is released. `body` is that of a response sent whole.

        An engine that does not count is estimated: four bytes of prompt are one token, and of the response what its
        relay has counted. A request that reached no engine costs nothing.
        """
        relay = request.relay
        tokens: Tokens | None = None
        if body is not None:
            tokens = usage_of(body)
        elif relay is not None:
            tokens = relay.tokens()
        if tokens is not None:
            return TokensSpent(tokens.prompt, tokens.out, True)
        if not request.executions and relay is None:
            return TokensSpent(0, 0, False)
        out = relay.generated() if relay is not None else 0
        return TokensSpent(estimated_prompt(request.arrival.view), out, False)

    def ended(self, request: Ended, outcome: Outcome, spent: TokensSpent, now: float) -> None:
        """Exactly once per request, at its end."""
        arrival, ending = request.arrival, request.ending
        self._api_keys.settle(arrival.admission, spent.prompt + spent.out, now)
        counts = self._metrics.counts
        if outcome is Outcome.CLIENT_GONE:
            counts.client_gone += 1
        elif outcome in (Outcome.CUT, Outcome.ERROR_EVENT):
            counts.cut += 1
        if request.status:
            counts.responded(request.status)
        if ending.error:
            counts.errors[ending.error] += 1
        counts.duration.observe(now - arrival.at)
        counts.bytes_out += ending.bytes_out
        if arrival.hop is not None:
            self._metrics.peers.of(arrival.hop.peer).sent_bytes += ending.bytes_out
        counts.tokens_in += spent.prompt
        counts.tokens_out += spent.out
        if arrival.hop is None:
            self._demand.ended(now, spent.prompt, spent.out, self._is_late(request, outcome, spent, now))
        if arrival.admission.tenant and arrival.hop is None:
            key = self._metrics.of_key(arrival.admission.tenant)
            key.requests += 1
            key.tokens_in += spent.prompt
            key.tokens_out += spent.out
            if outcome is Outcome.REFUSED:
                key.refusals[ending.error] += 1
        self._explanations.ended(arrival.explanation)
        if self._record is not None:
            self._record(self._record_of(request, spent, now))

    def _is_late(self, request: Ended, outcome: Outcome, spent: TokensSpent, now: float) -> bool:
        """Return whether the service failed the SLO by this request. What the client did wrong is no failure."""
        if outcome in (Outcome.CUT, Outcome.ERROR_EVENT) or request.status >= _SERVER_ERRORS:
            return True
        if outcome in (Outcome.REFUSED, Outcome.TUNNEL_CLOSED):
            return False
        return is_late(self._slo(), request.arrival.at, request.ending.first_at, now, spent.out)

    def settled(self, request: Ended, now: float) -> None:
        """Settle the account of a request that could not be ended as others, unless that has been done."""
        if not request.arrival.admission.settled:
            self._api_keys.settle(request.arrival.admission, 0, now)

    def charged_to_target(self, booking: Booking, spent: TokensSpent) -> None:
        """Count the tokens of a request for its last target."""
        target = self._counts_of(booking)
        target.tokens_in += spent.prompt
        target.tokens_out += spent.out

    def _record_of(self, request: Ended, spent: TokensSpent, now: float) -> RequestRecord:
        arrival, ending = request.arrival, request.ending
        view, first = arrival.view, ending.first_at
        return RequestRecord(
            id=arrival.request_id.decode("latin-1"),
            method=view.method,
            path=view.path,
            status=request.status,
            duration_s=now - arrival.at,
            tenant=arrival.admission.tenant,
            model=arrival.model,
            policy=arrival.policy or self._policy(),
            target_id=ending.last_target,
            attempts=request.attempts,
            continued=ending.continued,
            queued_s=ending.queued_s,
            ttft_s=None if first is None else first - arrival.at,
            bytes_out=ending.bytes_out,
            tokens_in=spent.prompt if spent.reported else None,
            tokens_out=spent.out if spent.reported else None,
            traceparent=arrival.head.traceparent.decode("latin-1"),
            span=arrival.span,
            error=ending.error,
        )
