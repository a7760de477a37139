"""The data plane of one agent: what all exchanges share, and the patrol that watches the time for them.

Exchanges set no timers of their own: a patrol every tenth of a second looks at those without a first byte, at the held,
and, less often, at the running answers. A thousand waiting requests cost it a millisecond or two a second, and a
request that goes well costs no timer at all.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from lb.config.options import Continue, Limits
from lb.core.api_keys import ANONYMOUS, ApiKeyStore, Limited, Unauthorized
from lb.core.failures import Failure
from lb.core.queue import RequestQueue
from lb.core.retry import RetryBudget, RetryHistory, Verdict, backoff_s, is_free, may_retry
from lb.core.scheduler import Scheduler
from lb.core.sliding_window import WindowCounter, WindowMean
from lb.core.target_state import TargetState
from lb.core.targets import Booking, Health, Key, Outlook, TargetTable
from lb.engines.kinds import EngineKind
from lb.http import error_responses
from lb.http.messages import Reader, RequestHead
from lb.http.upstream import Pools
from lb.http.write_batch import WriteBatcher
from lb.observe.access_log import RequestRecord
from lb.observe.counters import TargetCounts
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from lb.proxy.downstream import ClientConnection
from lb.proxy.fast_path import FastPath
from lb.proxy.request import ProxiedRequest
from lb.proxy.resumable_relay import ResumeState
from lb.stream import openai_request
from lb.stream.openai_request import NOT_PARSED, ParsedRequest
from lb.stream.token_usage import Tokens, usage_of
from policies.routing.base import RequestView
from policies.routing.registry import POLICIES

PATROL_S = 0.1
LONGEST_ROUND_S = 1.0  # between two looks at the running answers

_log = logging.getLogger("lb.proxy.context")


class RequestOverrides(NamedTuple):
    """What a client may ask of the load balancer: the X-SkyServe-* headers, each of which ends here."""

    policy: str | None = None
    session: str = ""
    continues: bool = True


_NO_WISHES = RequestOverrides()


class Proxy:
    """Shared by all connections and exchanges. `changed` must be called after the table has been changed by others."""

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
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.fast_path = fast_path
        self.outbox = WriteBatcher(self.loop)
        self.table = table
        self.pools = pools
        self.metrics = metrics
        self.clock = clock
        self.kind_of = kind_of
        self.closing = False  # no connection is kept alive any longer
        self.holding = True  # may a request wait for a target?
        self.clients: set[ClientConnection] = set()
        self.heads = Reader()
        self.queue: RequestQueue[ProxiedRequest] = RequestQueue(
            lambda ticket: ticket.item.pushed_out(clock())
        )
        self.dispatcher: Scheduler[ProxiedRequest] = Scheduler(table, self.queue)
        self.waiting: dict[ProxiedRequest, None] = {}  # with an attempt that has no first byte yet
        self.relays: dict[ProxiedRequest, None] = {}  # with an answer under way
        self.explanations = Explanations(running=self._stories)
        self.arrivals = WindowCounter()
        self.rejections = WindowCounter()
        self.ongoing = WindowMean(clock())  # in flight or held
        self._id_prefix = id_prefix
        self._number = 0
        self._rng = rng
        self._finished = finished
        self._begin_span = begin_span
        self._let_in_due = False
        self._changed_due = False
        self._round_at = clock()
        self._counts: dict[TargetState, TargetCounts] = {}  # until the table changes
        self.keyring = ApiKeyStore(table.table.access, clock())
        self.budget = RetryBudget(table.table.retries, self.arrivals)
        self.limits: Limits = table.table.limits

    @property
    def held(self) -> int:
        return len(self.queue)

    # --- arriving

    def arrived(self) -> None:
        """The head of a request is here."""
        self.metrics.counts.requests += 1
        self.arrivals.add(self.clock())

    def begin(self, client: ClientConnection, head: RequestHead, body: bytes) -> None:
        """A request is here, with its body, or as much of it as is kept."""
        now = self.clock()
        counts = self.metrics.counts
        target = head.target
        if target.startswith(b"/-/") or target == b"/-" or target.startswith(b"/-?"):
            self._refuse(client, head, 404, "not_found", "Paths under /-/ are not served on this port.")
            return
        tenant, weight = ANONYMOUS, 1.0
        if self.keyring.guards:
            verdict = self.keyring.admit(head.authorization, now)
            if isinstance(verdict, Unauthorized):
                counts.unauthorized += 1
                text = "The API key is not known." if verdict.given else "An API key is needed."
                self._refuse(client, head, 401, "invalid_api_key", text)
                return
            if isinstance(verdict, Limited):
                counts.limited += 1
                text = f"The key {verdict.tenant!r} is limited to {verdict.per_minute:g} {verdict.what} per minute."
                self._refuse(client, head, 429, "rate_limit_exceeded", text, verdict.retry_after_s)
                return
            tenant, weight = verdict
            head = head.without(b"authorization")  # the key was for us
        wishes = _NO_WISHES if head.ours is None else self._wishes(client, head)
        if wishes is None:
            return
        exchange = self._exchange(client, head, body, tenant, wishes, now)
        exchange.tenant, exchange.weight, exchange.policy = tenant, weight, wishes.policy
        client.exchange = exchange
        if client.body_left:
            client.pause_reading(2)  # until somebody takes it
        self.ongoing.step(now, 1)
        if self._begin_span is not None:
            exchange.span = self._begin_span(head.traceparent.decode("latin-1"))
            exchange.head = head.without(b"traceparent")  # targets are told of our span instead
        exchange.place()

    def _exchange(
        self,
        client: ClientConnection,
        head: RequestHead,
        body: bytes,
        tenant: str,
        wishes: RequestOverrides,
        now: float,
    ) -> ProxiedRequest:
        path = head.path
        ask: ParsedRequest = NOT_PARSED
        words: bytes | None = None
        scope = session = ""
        if body and head.method == b"POST" and openai_request.for_model(path):
            prompts = self.table.needs_prompt or wishes.policy is not None
            if prompts or (b'"stream"' in body and not client.body_left):
                ask = openai_request.read(body)
            if prompts:
                words = openai_request.prompt_of(ask.json, body)
                scope = f"{tenant}\x00{ask.model}"
            session = wishes.session or head.session.decode("latin-1") or ask.user
        elif wishes.session or head.session:
            session = wishes.session or head.session.decode("latin-1")
        self._number += 1
        own_id = f"{self._id_prefix}-{self._number}"  # a client's may occur twice at once
        if head.request_id:
            request_id, shown_id = head.request_id, head.request_id.decode("ascii")
        else:
            request_id, shown_id = own_id.encode(), own_id
        method, plain = head.method_text, head.path_text
        view = RequestView(own_id, method, plain, len(body), words, scope, session, ask.max_tokens)
        story = self.explanations.begin(shown_id, method, plain, now)
        exchange = ProxiedRequest(self, client, head, body, request_id, view, ask, story, now)
        exchange.continues = wishes.continues and not client.body_left
        continuation = self.table.table.continuation
        wanted = exchange.continues and continuation.mode is not Continue.OFF
        if ask.stream and wanted and path in (openai_request.CHAT, openai_request.COMPLETIONS):
            exchange.keeper = ResumeState(path, ask, body, continuation)
        return exchange

    def _wishes(self, client: ClientConnection, head: RequestHead) -> RequestOverrides | None:
        """Read the X-SkyServe-* headers; None if they were refused."""
        ours = head.ours or {}
        policy = ours.get(b"policy")
        if not self.table.table.access.overrides:
            policy = None
        if policy is not None and policy.decode("latin-1") not in POLICIES:
            self._refuse(client, head, 400, "unknown_policy", "X-SkyServe-Policy names no routing policy.")
            return None
        return RequestOverrides(
            policy.decode("latin-1") if policy is not None else None,
            ours.get(b"session", b"")[: openai_request.MAX_SESSION_BYTES].decode("latin-1"),
            ours.get(b"continue", b"").lower() != b"off",
        )

    def _refuse(
        self,
        client: ClientConnection,
        head: RequestHead,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        self.refused(status)
        client.transport.write(
            error_responses.raw_error(
                status,
                code,
                message,
                request_id=head.request_id,
                retry_after_s=None if retry_after_s is None else max(1, round(retry_after_s + 0.5)),
                close=client.closing or client.body_left,
                head_only=head.method == b"HEAD",
            )
        )
        client.next()

    def refused(self, status: int) -> None:
        """Count an answer to a request that never became an exchange."""
        self.metrics.counts.responses[status // 100] += 1

    # --- what exchanges ask for

    def kind_of_id(self, target_id: str) -> EngineKind:
        """What kind of engine a target of the table is, as far as it is known."""
        key = self.table.key(target_id)
        return EngineKind.UNKNOWN if key is None else self.kind_of(key)

    def counts_of(self, booking: Booking) -> TargetCounts:
        counts = self._counts.get(booking.entry)
        if counts is None:
            counts = self._counts[booking.entry] = self.metrics.of(booking.target)
        return counts

    def release(
        self, exchange: ProxiedRequest, booking: Booking, now: float, tokens: Tokens | None = None
    ) -> None:
        """The attempt is over; whoever is held may find room now."""
        self.table.release(booking, now, tokens.out if tokens is not None else None)
        self.counts_of(booking).duration.observe(now - booking.since)
        if len(self.queue):
            self.let_in_soon()

    def retry_after(
        self, exchange: ProxiedRequest, story: RetryHistory, life: int, now: float
    ) -> float | None:
        """How long to wait before another attempt; None if there must be none. `life` is the target's that failed."""
        rules = self.table.table.retries
        verdict = may_retry(story, rules, self.table.anybody(now, exchange.tried))
        if not verdict.goes_on or not exchange.replayable:
            exchange.story.note(now, "no_retry", why=verdict.value)
            return None
        if not is_free(story) and not self.budget.allow(now):
            exchange.story.note(now, "no_retry", why=Verdict.OVER_BUDGET.value)
            return None
        if verdict is Verdict.SAME_TARGET:
            exchange.tried.pop(life, None)
        return backoff_s(rules, exchange.executions, self._rng)

    def later(self, delay_s: float, exchange: ProxiedRequest) -> None:
        self.loop.call_later(delay_s, exchange.retry)

    def account(self, exchange: ProxiedRequest, body: bytes | None) -> Tokens | None:
        """The tokens of a finished answer, charged to whom they belong."""
        tokens = usage_of(body) if body else exchange.relay.tokens() if exchange.relay is not None else None
        if tokens is None:
            if exchange.tenant:
                self.keyring.charge(exchange.tenant, _estimate(exchange), self.clock())
            return None
        counts = self.metrics.counts
        counts.tokens_in += tokens.prompt
        counts.tokens_out += tokens.out
        if exchange.booking is not None:
            target = self.counts_of(exchange.booking)
            target.tokens_in += tokens.prompt
            target.tokens_out += tokens.out
        if exchange.tenant:
            self.keyring.charge(exchange.tenant, tokens.prompt + tokens.out, self.clock())
        return tokens

    def finished(self, exchange: ProxiedRequest, now: float, tokens: Tokens | None) -> None:
        """The client has got all it will get."""
        self.ongoing.step(now, -1)
        self.explanations.ended(exchange.story)
        counts = self.metrics.counts
        if exchange.status:
            counts.responses[exchange.status // 100] += 1
        if exchange.relay is not None:
            exchange.bytes_out = exchange.relay.sent_bytes
        counts.bytes_out += exchange.bytes_out
        if self._finished is not None:
            self._finished(self._facts(exchange, now, tokens))
        # The two hold each other, and a journal can be megabytes: cycles wait for long until they are collected.
        exchange.relay = None

    def _facts(self, exchange: ProxiedRequest, now: float, tokens: Tokens | None) -> RequestRecord:
        view = exchange.view
        first = exchange.first_at
        return RequestRecord(
            id=exchange.request_id.decode("latin-1"),
            method=view.method,
            path=view.path,
            status=exchange.status,
            duration_s=now - exchange.arrived_at,
            tenant=exchange.tenant,
            model=exchange.ask.model,
            policy=exchange.policy or self.table.table.policy,
            target_id=exchange.last_target,
            attempts=exchange.attempts,
            continued=exchange.continued,
            queued_s=exchange.queued_s,
            ttft_s=None if first is None else first - exchange.arrived_at,
            bytes_out=exchange.bytes_out,
            tokens_in=tokens.prompt if tokens is not None else None,
            tokens_out=tokens.out if tokens is not None else None,
            traceparent=exchange.head.traceparent.decode("latin-1"),
            span=exchange.span,
            error=exchange.error,
        )

    def _stories(self) -> Iterator[Explanation]:
        held = (ticket.item for ticket in self.queue.walk())
        return (exchange.story for exchange in chain(self.relays, self.waiting, held))

    # --- the queue and the table

    def let_in_soon(self) -> None:
        """Once in this turn of the loop, however often it is asked for."""
        if not self._let_in_due:
            self._let_in_due = True
            self.loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        self._let_in_due = False
        now = self.clock()
        for exchange, choice in self.dispatcher.let_in(now):
            exchange.admitted(choice, now)

    def changed_soon(self) -> None:
        if not self._changed_due:
            self._changed_due = True
            self.loop.call_soon(self.changed)

    def changed(self) -> None:
        """The table has changed: call back attempts that wait in vain, let in whom a target can take now."""
        self._changed_due = False
        now = self.clock()
        retries = self.table.table.retries
        for exchange in list(self.waiting):
            booking = exchange.booking
            if booking is None:
                continue
            outlook = self.table.outlook(booking, now)
            if outlook is Outlook.LOST:
                exchange.call_back("its target is gone")
            elif outlook is Outlook.DOUBTFUL:
                standing, _ = self.table.candidates(now, exchange.tried)
                # A server that does one request at a time looks frozen while it works on this very one: without
                # a bound, the request would be begun again and again and keep all of them busy.
                if standing is Health.GOOD and exchange.executions < retries.max_total_retries:
                    exchange.executions += 1
                    exchange.call_back("its target is in doubt and another is well")
        if len(self.queue):
            self.let_in_soon()

    def applied(self) -> None:
        """A new table is in force."""
        table = self.table.table
        self._counts.clear()
        self.limits = table.limits
        self.heads = Reader()  # which remembers what was accepted under other limits
        self.keyring.apply(table.access, self.clock())
        self.budget.rules = table.retries
        self.pools.retain({target.url for target in table.targets})
        self.changed()

    # --- time

    async def patrol(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PATROL_S)
            self.look()

    def look(self) -> None:
        """Everything that is due by the clock."""
        now = self.clock()
        for exchange in list(self.waiting):
            booking = exchange.booking
            if booking is not None and now - booking.since >= exchange.wait_left_s:
                exchange.out_of_time(now)
        for ticket in self.queue.expire(now):
            ticket.item.expired(now)
        if len(self.queue):
            self._let_in()  # an ejection may have run out
        due = self.table.handovers(now, self.table.table.continuation.handover_s)
        if due:
            owners = {exchange.booking: exchange for exchange in self.relays}
            for booking in due:
                if booking in owners:
                    owners[booking].hand_over()
        limits = self.limits
        # A stream that flows must be seen to flow before its target falls under suspicion.
        least = min(limits.idle_timeout_s, limits.stall_timeout_s, 1.5 * limits.suspect_after_s)
        elapsed = now - self._round_at
        if elapsed >= min(LONGEST_ROUND_S, least / 3):
            self._round_at = now
            self._look_at_relays(now, elapsed)
            self.pools.expire(now)

    def _look_at_relays(self, now: float, elapsed: float) -> None:
        limits = self.limits
        for exchange in list(self.relays):
            relay, booking = exchange.relay, exchange.booking
            if relay is None or booking is None:
                continue
            if relay.pulse():
                relay.silent_s = 0.0
                self.table.heard(booking.key, now)
                continue
            relay.silent_s += elapsed
            if relay.blocked:
                if relay.silent_s > limits.idle_timeout_s:
                    exchange.client.transport.abort()  # it has stopped reading
            elif relay.silent_s > limits.idle_timeout_s:
                exchange.broke(Failure.IDLE, "no byte within the idle timeout")
            elif relay.silent_s > limits.stall_timeout_s and relay.may_continue():
                exchange.broke(Failure.STALLED, "no event within the stall timeout")
            elif (
                relay.silent_s > limits.suspect_after_s
                and self.table.missing(booking, now)
                and relay.may_continue(now_or_later=True)
            ):
                exchange.broke(Failure.SILENT, "no byte, and no sign of life from its target")

    def retire(self, lame_s: float) -> None:
        """Keep no connection alive; what is here already is served to its end. Idle connections may send a last request
        for `lame_s`."""
        self.closing = True
        for client in list(self.clients):
            client.close_soon(lame_s)

    def close(self) -> None:
        """As `retire`, but nobody waits for a target any longer: who does is turned away."""
        self.holding = False
        for ticket in self.queue.clear():
            ticket.item.expired(self.clock())
        self.retire(0.0)


def _estimate(exchange: ProxiedRequest) -> int:
    """Tokens of a request whose engine has not told them: four bytes of its body are one, and so is a chunk of a stream."""
    return len(exchange.body) // 4 + (exchange.relay.chunks if exchange.relay is not None else 0)
