"""What a request's end uses: the one place that reports, counts and charges, and the demand that comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from lb.cache_events.finished import Over
from lb.config.options import Slo
from lb.core.adapters import Operation
from lb.core.api_keys import Admission, ApiKeyStore
from lb.core.demand_minutes import DemandMinutes, is_late, ready_targets
from lb.core.model_costs import ModelCost, ModelCosts
from lb.core.sliding_window import WindowCounter, WindowMean
from lb.core.target_state import TargetState
from lb.core.targets import Booking, TargetTable
from lb.http.api_paths import Work, work_of
from lb.observe.access_log import RequestRecord
from lb.observe.counters import TargetCounts
from lb.observe.explain import Explanations
from lb.observe.key_usage import KeyUsage
from lb.observe.metrics import Metrics
from lb.proxy.ending import NOTHING_SPENT, Arrival, ChargeReason, Ending, Outcome, TokensSpent
from lb.stream.token_usage import Tokens, usage_of

SHED: Final = "deadline"  # the code of a refusal because of a deadline
_QUEUE_FULL: Final = "queue_full"
_CLIENT_ERRORS, _SERVER_ERRORS = 400, 500
_REFUSED: Final = TokensSpent(0, 0, ChargeReason.REFUSED)
_NOT_SENT: Final = TokensSpent(0, 0, ChargeReason.NOT_SENT)


class EndedRelay(Protocol):
    """A relay, as its account needs it."""

    def tokens(self) -> Tokens | None:
        """Return how long prompt and response were, if the response has it."""
        ...

    def generated(self) -> int:
        """Return how many tokens the client has been sent, counted or estimated."""
        ...


class Ended(Protocol):
    """A request that is over."""

    @property
    def arrival(self) -> Arrival: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def relay(self) -> EndedRelay | None: ...
    @property
    def status(self) -> int:
        """What the client was sent."""
        ...

    @property
    def attempts(self) -> int: ...


class FollowedCaches(Protocol):
    """What learns from requests that have their whole response (`lb.cache_events.follower`)."""

    def ended(self, request: Over, booking: Booking, prompt_tokens: int, body: bytes | None) -> None: ...


class Account:
    """Reports finished requests to all that record them: tenants, metrics, explanations, the access log, traces."""

    def __init__(
        self,
        table: TargetTable,
        metrics: Metrics,
        explanations: Explanations,
        api_keys: ApiKeyStore,
        now: float,
        record: Callable[[RequestRecord], None] | None = None,
        unix_offset_s: float = 0.0,
    ) -> None:
        """`record` gets each finished request; `unix_offset_s` is what to add to `now` for Unix time."""
        self.metrics = metrics
        self.explanations = explanations
        self.api_keys = api_keys
        self.usage = KeyUsage()
        self.arrivals = WindowCounter()
        self.rejections = WindowCounter()
        self.ongoing = WindowMean(now)  # requests in flight or queued
        self.demand = DemandMinutes(now, unix_offset_s, lambda: ready_targets(table.table))
        self.costs = ModelCosts()
        self.caches: FollowedCaches | None = None  # where engines report what they have cached
        self._table = table
        self._record = record
        self.on_adapter: Callable[[Operation, str], None] | None = None  # a target has accepted it
        self._counts: dict[TargetState, TargetCounts] = {}  # until the table changes

    def counts_of(self, booking: Booking) -> TargetCounts:
        """Return the counters of the booking's target."""
        counts = self._counts.get(booking.entry)
        if counts is None:
            counts = self._counts[booking.entry] = self.metrics.of(booking.target)
        return counts

    def applied(self, now: float) -> None:
        """A new table is in force."""
        self._counts.clear()
        self.api_keys.apply(self._table.table.access, now)

    # --- a request begins

    def began(self, now: float) -> None:
        """A request of a client has been let in. It is counted until `left`."""
        self.ongoing.step(now, 1)
        self.demand.arrived(now)

    def abandoned(self, admission: Admission, now: float) -> None:
        """Settle a request that was let in and did not end as others do, unless that has been done."""
        if not admission.settled:
            self.api_keys.settle(admission, 0, 0, now)

    def turned_away(self, now: float) -> None:
        """No target had room for a request in time."""
        self.rejections.add(now)
        self.metrics.counts.rejected += 1

    # --- a request ends

    def left(self, arrival: Arrival, now: float) -> None:
        """A request is over, however it has ended. Those of peers were counted where they entered."""
        if arrival.hop is None:
            self.ongoing.step(now, -1)

    def spent(self, request: Ended, body: bytes | None, now: float) -> TokensSpent:
        """Return the tokens of a request, before its target is released. `body` is that of a response sent whole.

        What the engine reports counts. Where it does not, because it never does or because the client left before it did, the
        prompt is estimated and the response counted as far as it was passed on, or estimated by the time that the engine had.
        A request that no engine has served costs nothing.
        """
        arrival, relay, status = request.arrival, request.relay, request.status
        if status >= _CLIENT_ERRORS:
            return _REFUSED
        tokens = usage_of(body) if body is not None else relay.tokens() if relay is not None else None
        cost = self.costs.of(arrival.model)
        sent_at = request.ending.sent_at
        sent_s = None if sent_at is None else now - sent_at
        if tokens is not None:
            self._learn(request, self.costs.served(arrival.model), tokens, now)
            return TokensSpent(tokens.prompt, tokens.out, ChargeReason.REPORTED)
        work = work_of(arrival.head.path) if arrival.head.method == b"POST" else None
        if work is None or work is Work.NONE:
            return NOTHING_SPENT
        if relay is not None or body is not None:
            reason, out = ChargeReason.COUNTED, 0
            if relay is not None:
                out = relay.generated()
                if sent_s is not None and not arrival.streams and work is Work.GENERATES:
                    out = max(out, self._estimated_out(arrival, cost, sent_s))  # its events do not show it
            elif body is not None and work is Work.GENERATES:
                out = cost.prompt_tokens(len(body))
        elif sent_s is not None:
            reason, out = ChargeReason.ESTIMATED, self._estimated_out(arrival, cost, sent_s)
        else:
            return _NOT_SENT
        return TokensSpent(self._prompt_tokens(arrival, cost), out, reason)

    def _prompt_tokens(self, arrival: Arrival, cost: ModelCost) -> int:
        """Return about how many tokens a prompt has whose engine did not count."""
        if arrival.admission.prompt_tokens:
            return arrival.admission.prompt_tokens
        view = arrival.view
        return cost.prompt_tokens(len(view.prompt) if view.prompt is not None else view.body_bytes)

    def _estimated_out(self, arrival: Arrival, cost: ModelCost, sent_s: float) -> int:
        """Return about how many tokens an engine has made of a response of which nothing came."""
        if arrival.streams:
            return 0  # a stream shows each token at once
        admission, generated = arrival.admission, cost.generated(sent_s)
        if generated is None:
            return max(0, admission.reserved - admission.prompt_tokens)
        most = admission.most_out
        return generated if most is None else min(most, generated)

    def _learn(self, request: Ended, cost: ModelCost, tokens: Tokens, now: float) -> None:
        """Learn from a request whose engine has counted what one of its model costs."""
        arrival, ending = request.arrival, request.ending
        sent_at, first_at = ending.sent_at, ending.first_at
        if arrival.admission.text_bytes:
            cost.read(arrival.admission.text_bytes, tokens.prompt)
        if sent_at is not None and not ending.continued:
            is_stream = arrival.streams and first_at is not None
            cost.wrote(now - sent_at, first_at - sent_at if is_stream and first_at else None, tokens.out)

    def charged_to_target(self, booking: Booking, spent: TokensSpent) -> None:
        """Count the tokens of a request for its last target."""
        target = self.counts_of(booking)
        target.tokens_in += spent.prompt
        target.tokens_out += spent.out

    def ended(self, request: Ended, outcome: Outcome, spent: TokensSpent, now: float) -> None:
        """Report a request that is over. Called exactly once per request, at its end."""
        arrival, ending, status = request.arrival, request.ending, request.status
        whole = outcome is Outcome.WHOLE and spent.out > 0
        generated = spent.out // arrival.choices if whole else None
        self.api_keys.settle(arrival.admission, spent.prompt, spent.out, now, generated)
        counts = self.metrics.counts
        if outcome is Outcome.CLIENT_GONE:
            counts.client_gone += 1
        elif outcome in (Outcome.CUT, Outcome.ERROR_EVENT):
            counts.cut += 1
        if status:
            counts.responded(status)
        if ending.error:
            counts.errors[ending.error] += 1
        counts.duration.observe(now - arrival.at)
        counts.bytes_out += ending.bytes_out
        if arrival.hop is not None:
            self.metrics.peers.of(arrival.hop.peer).sent_bytes += ending.bytes_out
        counts.tokens_in += spent.prompt
        counts.tokens_out += spent.out
        if arrival.hop is None:
            late = self._is_late(self._table.table.slo, arrival, ending, status, outcome, spent, now)
            if arrival.view.due_at or arrival.view.tpot_s:
                self._count_deadline(arrival, ending, status, outcome, spent, now)
            self.demand.ended(now, spent.prompt, spent.out, late)
            tenant, served = arrival.admission.tenant, spent.reported or 200 <= status < 400
            self.usage.add(tenant, arrival.model, served, spent.prompt, spent.out)
            if tenant and outcome is Outcome.REFUSED:
                self.metrics.of_key(tenant).refusals[ending.error] += 1
        if arrival.adapter is not None and 200 <= status < 300 and self.on_adapter is not None:
            self.on_adapter(arrival.adapter, ending.last_target)
        self.explanations.ended(arrival.explanation)
        if self._record is not None:
            self._record(self._record_of(request, spent, now))

    def _is_late(
        self,
        slo: Slo,
        arrival: Arrival,
        ending: Ending,
        status: int,
        outcome: Outcome,
        spent: TokensSpent,
        now: float,
    ) -> bool:
        """Return whether the service failed the SLO by this request. What the client did wrong is no failure."""
        if outcome in (Outcome.CUT, Outcome.ERROR_EVENT) or status >= _SERVER_ERRORS:
            return True
        if outcome in (Outcome.REFUSED, Outcome.TUNNEL_CLOSED):
            return False
        return is_late(slo, arrival.at, ending.first_at, now, spent.out)

    def _count_deadline(
        self, arrival: Arrival, ending: Ending, status: int, outcome: Outcome, spent: TokensSpent, now: float
    ) -> None:
        """Count a request that had a deadline by what became of it. One that was refused for its client's fault has none."""
        deadlines, slo = self.metrics.counts.deadlines, Slo(arrival.view.ttft_s, arrival.view.tpot_s)
        if ending.error == SHED:
            deadlines["shed"] += 1
        elif ending.error == _QUEUE_FULL or self._is_late(slo, arrival, ending, status, outcome, spent, now):
            deadlines["late"] += 1
        elif outcome is not Outcome.REFUSED:
            deadlines["kept"] += 1

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
            policy=arrival.policy or self._table.table.policy,
            target_id=ending.last_target,
            attempts=request.attempts,
            continued=ending.continued,
            inexact=ending.inexact,
            queued_s=ending.queued_s,
            ttft_s=None if first is None else first - arrival.at,
            bytes_out=ending.bytes_out,
            tokens_in=spent.prompt if spent.reported else None,
            tokens_out=spent.out if spent.reported else None,
            reserved=arrival.admission.reserved,
            charged=arrival.admission.charged,
            charge=spent.reason.value if arrival.admission.tenant else "",
            traceparent=arrival.head.traceparent.decode("latin-1"),
            span=arrival.span,
            error=ending.error,
        )
