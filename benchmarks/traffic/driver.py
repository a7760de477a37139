"""Clients, one balancer and its engines as a list of things to happen, in virtual time.

Simulated is what lies between: half a round trip to the engine, half a round trip back, the prober's period.
What decides is the production code: `lb.core.targets.TargetTable` with the routing policy of its table, `lb.core.scheduler`
over `lb.core.queue`, and admission by `EngineLoad` as probes bring it. Engines keep their own time by iterations of
continuous batching. Two things that happen at the same instant do so in the order in which they were announced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from benchmarks.table_audit import audit
from benchmarks.traffic.measure import Metrics, Served, measure
from benchmarks.traffic.reported_caches import ReportedCaches
from benchmarks.traffic.virtual_time import Engine, Events
from benchmarks.traffic.workloads import Arrival, Call, Workload
from lb.config.options import CacheEvents, Limits, Pushing, Slo
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.targets import Booking, Key, TargetTable
from policies.routing.base import RequestView, RoutingPolicy
from policies.routing.deadlines import Late
from policies.routing.registry import make_policy
from skyserve_cli.engine.cache_events import batch
from skyserve_cli.engine.kv import BLOCK_TOKENS, block_keys
from skyserve_cli.engine.profiles import L4_8B, Profile

_DAY_S = 86_400.0
IDLE_PROBE_S = 5.0  # as in `lb.engines.load_poller`, which is not pure


@dataclass(frozen=True, slots=True)
class Setting:
    """The engines and the rules. Clients wait without limit unless `limits` say otherwise."""

    policy: str = "least_load"
    profiles: tuple[Profile, ...] = (L4_8B,) * 8
    pushing: Pushing = field(default_factory=Pushing)
    limits: Limits = field(default_factory=lambda: Limits(hold_s=_DAY_S, max_held=1_000_000))
    rtt_s: float = 0.0005  # balancer to engine and back
    make_policy: Callable[[str], RoutingPolicy] = make_policy  # by its name
    late: Late = Late.QUEUE  # what becomes of calls whose deadline cannot be kept
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 of those that are not there
    cache_events: bool = False  # engines report what they have cached


@runtime_checkable
class SeesCaches(Protocol):
    """A policy that no load balancer can have."""

    def sees(self, look: Callable[[RequestView], dict[str, int]]) -> None:
        """From now on it knows how many bytes of a prompt each engine has in its cache, by its id, if any."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: every call that was served, in the order in which they ended."""

    served: tuple[Served, ...]
    refused: int
    preemptions: int
    engines: int

    def metrics(self) -> Metrics:
        return measure(self.served, self.engines, self.refused, self.preemptions)

    @property
    def digest(self) -> str:
        """Equal only if the same calls went to the same engines at the same instants."""
        digest = blake2b(digest_size=16)
        for one in self.served:
            digest.update(repr(tuple(one)).encode())
        return digest.hexdigest()


class UnbalancedBookings(AssertionError):
    """A run has ended and the balancer still thinks that something is under way."""


def run(workload: Workload, setting: Setting) -> Outcome:
    """Play `workload` to its end. Raises UnbalancedBookings if the balancer's accounts are not back at zero."""
    return World(workload, setting).play()


class Flight:
    """A call in the balancer's hands; to the dispatcher it is a waiter."""

    __slots__ = (
        "arrived_at",
        "booking",
        "cached_tokens",
        "call",
        "first_at",
        "has_priority",
        "matched_bytes",
        "pin",
        "policy",
        "pushed_at",
        "queue_left_s",
        "started",
        "tenant",
        "tried",
        "view",
        "weight",
    )  # fmt: skip

    def __init__(self, call: Call, view: RequestView, now: float, hold_s: float, weight: float) -> None:
        self.call = call
        self.view = view
        self.arrived_at = now
        self.tried: tuple[int, ...] = ()
        self.has_priority = False  # engines do not die here
        self.queue_left_s = hold_s
        self.tenant = call.tenant
        self.weight = weight
        self.started = False
        self.policy: str | None = None
        self.pin = ""
        self.booking: Booking | None = None
        self.pushed_at = self.first_at = now
        self.cached_tokens = self.matched_bytes = 0


class ServingEngine(Engine[Flight]):
    """One engine, its name at the balancer, and when it was last polled."""

    def __init__(self, index: int, profile: Profile, key: Key, world: World) -> None:
        super().__init__(profile, world.events, world.first_token, partial(world.last_token, self))
        self.index = index
        self.key = key
        self.polled_at = 0.0
        self._world = world

    def iterated(self, now: float) -> None:
        changes = self.cache.take_changes()
        if changes:
            self._world.published(self, batch(changes, now), now)


class World:
    def __init__(self, workload: Workload, setting: Setting) -> None:
        self._workload = workload
        self._setting = setting
        self._way_s = setting.rtt_s / 2
        self.events = Events()
        self._table = TargetTable(_table(setting), 0.0, setting.make_policy)
        self._engines = [
            ServingEngine(index, profile, key, self)
            for index, (profile, (key, _, _)) in enumerate(
                zip(setting.profiles, self._table.probe_list(), strict=True)
            )
        ]
        self._by_id = {engine.key.id: engine for engine in self._engines}
        self._reported: ReportedCaches | None = None
        caches = self._table.policies.caches
        if caches is not None:
            self._reported = ReportedCaches(
                caches, self._by_id, self._table.table.cache_events.tokenize_per_s
            )
            for engine in self._engines:
                engine.cache.follow()
        if isinstance(self._table.policies.own, SeesCaches):
            self._table.policies.own.sees(self._cached)
        self._calls: dict[str, Call] = {}  # under way, by id
        self._queue: RequestQueue[Flight] = RequestQueue()
        self._dispatcher: Scheduler[Flight] = Scheduler(self._table, self._queue)
        self._opening: Iterator[Arrival] = iter(workload.opening())
        self._open = 0  # calls that have been announced and have not ended
        self._served: list[Served] = []
        self._refused = 0
        self._sheds = setting.late is Late.SHED
        self._alarmed = False  # for the next deadline in the queue

    def play(self) -> Outcome:
        self._announce_next()
        if self._setting.pushing.is_polled:  # other modes do not use loads
            for engine in self._engines:
                self._table.loaded(engine.key, engine.load(), 0.0, 0.0)
                # Not all at once: the prober spreads its questions over the interval.
                place = (engine.index + 1) / len(self._engines)
                self.events.at(self._setting.pushing.probe_s * place, self._probe, engine)
        self.events.play()
        problems = audit(self._table)
        if problems or self._table.in_flight or len(self._queue):
            raise UnbalancedBookings("; ".join(problems) or "calls are still in flight or held")
        return Outcome(
            served=tuple(self._served),
            refused=self._refused,
            preemptions=sum(engine.preemptions for engine in self._engines),
            engines=len(self._engines),
        )

    # --- clients

    def _announce_next(self) -> None:
        coming = next(self._opening, None)
        if coming is not None:
            self._open += 1
            self.events.at(coming.at_s, self._arrives_by_itself, coming.call)

    def _arrives_by_itself(self, call: Call, now: float) -> None:
        self._announce_next()
        self._arrives(call, now)

    def _arrives(self, call: Call, now: float) -> None:
        view = RequestView(
            id=call.id,
            method="POST",
            path="/v1/chat/completions",
            body_bytes=len(call.prompt.text),
            prompt=call.prompt.text if self._table.policies.needs_prompt else None,
            scope=call.scope,
            session=call.session,
            due_at=now + call.ttft_s if call.ttft_s else 0.0,
            ttft_s=call.ttft_s,
        )
        self._calls[call.id] = call
        weight = self._setting.weights.get(call.tenant, 1.0)
        flight = Flight(call, view, now, self._setting.limits.hold_s, weight)
        if call.ttft_s and self._sheds and self._dispatcher.expected_late_s(flight, now) is not None:
            self._refuse(flight, now)
            return
        choice = self._dispatcher.place(flight, now)
        if choice is not None:
            self._push(flight, choice.target_id, choice.matched_bytes, now)
            return
        if self._dispatcher.enqueue(flight, now) is None:
            self._refuse(flight, now)
        else:
            self._watch_deadlines()

    def _watch_deadlines(self) -> None:
        deadline = self._queue.next_deadline()
        if deadline is not None and not self._alarmed:
            self._alarmed = True
            self.events.at(deadline, self._expire, None)

    def _expire(self, _: None, now: float) -> None:
        self._alarmed = False
        for ticket in self._queue.expire(now):
            self._refuse(ticket.item, now)
        self._watch_deadlines()

    def _refuse(self, flight: Flight, now: float) -> None:
        self._refused += 1
        self._over(flight.call, now)

    def _over(self, call: Call, now: float) -> None:
        self._open -= 1
        del self._calls[call.id]
        for later in self._workload.ended(call, now):
            self._open += 1
            self.events.at(later.at_s, self._arrives, later.call)

    # --- the balancer

    def _push(self, flight: Flight, target_id: str, matched_bytes: int, now: float) -> None:
        flight.booking = self._table.book(flight.view, target_id, now)
        flight.pushed_at = now
        flight.matched_bytes = matched_bytes
        self.events.at(now + self._way_s, self._reaches, (self._by_id[target_id], flight))

    def _let_in(self, now: float) -> None:
        if len(self._queue):
            for flight, choice in self._dispatcher.let_in(now):
                self._push(flight, choice.target_id, choice.matched_bytes, now)
            for ticket in self._dispatcher.take_shed():
                self._queue.leave(ticket)
                self._refuse(ticket.item, now)

    def _answered(self, flight: Flight, now: float) -> None:
        flight.first_at = now
        self._table.responded(_booked(flight), now)
        self._let_in(now)

    def _ended(self, about: tuple[ServingEngine, Flight], now: float) -> None:
        engine, flight = about
        call = flight.call
        if self._reported is not None:
            self._reported.ended(call, engine.key.id, flight.cached_tokens, now)
        self._table.release(_booked(flight), now, len(call.answer))
        self._served.append(
            Served(
                call_id=call.id,
                engine=engine.index,
                arrived_at=flight.arrived_at,
                pushed_at=flight.pushed_at,
                first_at=flight.first_at,
                ended_at=now,
                prompt_tokens=len(call.prompt.tokens),
                cached_tokens=flight.cached_tokens,
                response_tokens=len(call.answer),
                prompt_bytes=len(call.prompt.text),
                matched_bytes=flight.matched_bytes,
                tenant=call.tenant,
                ttft_s=call.ttft_s,
            )
        )
        self._over(call, now)
        self._let_in(now)

    def _probe(self, engine: ServingEngine, now: float) -> None:
        """Ask an engine for its load if that is due, as `lb.engines.load_poller` does, and come back."""
        if not self._open:
            return
        busy = engine.items or len(self._queue)
        if busy or now - engine.polled_at >= IDLE_PROBE_S:
            engine.polled_at = now
            self.events.at(now + self._way_s, self._is_polled, (engine, now))
        self._let_in(now)  # looks go stale
        self.events.at(now + self._setting.pushing.probe_s, self._probe, engine)

    def _is_polled(self, polled: tuple[ServingEngine, float], now: float) -> None:
        engine, polled_at = polled
        self.events.at(now + self._way_s, self._reports, (engine, polled_at, engine.load()))

    def _reports(self, about: tuple[ServingEngine, float, EngineLoad], now: float) -> None:
        engine, polled_at, load = about
        if self._table.loaded(engine.key, load, polled_at, now):
            self._let_in(now)

    # --- engines

    def published(self, engine: ServingEngine, batch: bytes, now: float) -> None:
        self.events.at(now + self._way_s, self._reports_blocks, (engine.key.id, batch))

    def _reports_blocks(self, about: tuple[str, bytes], now: float) -> None:
        if self._reported is not None:
            self._reported.published(*about)

    def _cached(self, request: RequestView) -> dict[str, int]:
        """How many bytes of the prompt each engine really has."""
        text, tokens = self._calls[request.id].prompt
        keys = block_keys(tokens)
        held = {engine.key.id: engine.cache.cached_blocks(keys) for engine in self._engines}
        return {
            name: len(text) * blocks * BLOCK_TOKENS // len(tokens) for name, blocks in held.items() if blocks
        }

    def _reaches(self, sent: tuple[ServingEngine, Flight], now: float) -> None:
        engine, flight = sent
        engine.submit(flight.call.id, flight.call, flight, now)

    def first_token(self, flight: Flight, cached_tokens: int, now: float) -> None:
        flight.cached_tokens = cached_tokens
        self.events.at(now + self._way_s, self._answered, flight)

    def last_token(self, engine: ServingEngine, flight: Flight, now: float) -> None:
        self.events.at(now + self._way_s, self._ended, (engine, flight))


def _table(setting: Setting) -> Table:
    targets = tuple(
        # These addresses are never called.
        Target(id=f"engine-{index}", url=f"http://127.0.0.1:{index + 1}", region="here", zone="here")
        for index in range(len(setting.profiles))
    )
    return Table(
        "traffic",
        "1",
        targets,
        policy=setting.policy,
        limits=setting.limits,
        pushing=setting.pushing,
        slo=Slo(late=setting.late),
        cache_events=CacheEvents(enabled=setting.cache_events),
    )


def _booked(flight: Flight) -> Booking:
    if flight.booking is None:
        raise AssertionError(f"call {flight.call.id!r} was never pushed")
    return flight.booking
