"""Selective pushing against the engine model, in virtual time: full batches, and next to nothing pending."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from benchmarks.table_audit import audit
from lb.config.options import Limits, Pushing, PushMode
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.targets import Booking, Key, TargetTable
from policies.routing.base import Choice, RequestView
from skyserve_cli.engine.model import EngineModel, Request
from skyserve_cli.engine.profiles import A100_7B, L4_8B, Profile
from skyserve_cli.engine.text import Language

WAY_S = 0.001  # from the balancer to an engine, or back


@dataclass(eq=False)
class Flight:
    """A request on its way; a waiter to the dispatcher."""

    view: RequestView
    prompt: tuple[int, ...]
    tokens: int
    arrived_at: float
    booking: Booking | None = None
    responded: bool = False
    has_priority: bool = False
    queue_left_s: float = 1e6
    tenant: str = ""
    weight: float = 1.0
    policy: str | None = None
    pin: str = ""
    tried: tuple[int, ...] = ()


@dataclass
class Seen:
    """What the engines looked like while requests were held, weighted by time; and when all was done."""

    running_s: float = 0.0
    pending_s: float = 0.0
    held_s: float = 0.0
    most_pending: int = 0
    between_looks: list[int] = field(default_factory=list)  # requests sent to the first engine
    ended_at: float = 0.0
    waits_s: list[float] = field(default_factory=list)  # from the arrival to the first byte

    @property
    def wait_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s)

    @property
    def running(self) -> float:
        return self.running_s / self.held_s

    @property
    def pending(self) -> float:
        return self.pending_s / self.held_s


class World:
    """Engines, one balancer and its prober. `tells` is the load that an engine reports."""

    def __init__(
        self,
        profile: Profile,
        engines: int,
        pushing: Pushing,
        tells: Callable[[EngineModel], EngineLoad | None],
    ) -> None:
        self.engines = {f"e{number}": EngineModel(profile, Language()) for number in range(engines)}
        targets = tuple(Target(name, f"http://{name}:1") for name in self.engines)
        limits = Limits(hold_s=86_400.0, max_held=100_000)
        self.table = TargetTable(Table("s", "1", targets, pushing=pushing, limits=limits), 0.0)
        self.queue: RequestQueue[Flight] = RequestQueue()
        self.dispatcher: Scheduler[Flight] = Scheduler(self.table, self.queue)
        self.tells = tells
        self.seen = Seen()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = 0
        self.left = 0
        self.busy: set[str] = set()
        self.flights: dict[str, Flight] = {}
        self.sent = dict.fromkeys(self.engines, 0)  # since the last look
        self.measured_at = 0.0

    def at(self, when: float, what: Callable[[float], None]) -> None:
        self.number += 1
        heappush(self.events, (when, self.number, what))

    def arrive(self, when: float, prompt_tokens: int, tokens: int) -> None:
        self.left += 1
        name = f"r{self.left}"
        prompt = tuple(1000 + (self.left * 7919 + i) % 5000 for i in range(prompt_tokens))
        flight = Flight(RequestView(name, "POST", "/"), prompt, tokens, when)
        self.flights[name] = flight
        self.at(when, lambda now: self.place(flight, now))

    def play(self) -> Seen:
        for position, (key, _, _) in enumerate(self.table.probe_list()):
            self.at(position * self.table.table.pushing.probe_s / len(self.engines), self.prober(key))
        now = 0.0
        while self.left:
            now, _, what = heappop(self.events)
            self.measure(now)
            what(now)
            assert audit(self.table) == []
        assert self.table.in_flight == 0
        self.seen.ended_at = now
        return self.seen

    def measure(self, now: float) -> None:
        lasted, self.measured_at = now - self.measured_at, now
        if len(self.queue):
            self.seen.held_s += lasted
            self.seen.running_s += lasted * sum(e.running for e in self.engines.values()) / len(self.engines)
            self.seen.pending_s += lasted * sum(e.waiting for e in self.engines.values()) / len(self.engines)
        self.seen.most_pending = max(self.seen.most_pending, *(e.waiting for e in self.engines.values()))

    # --- the balancer

    def place(self, flight: Flight, now: float) -> None:
        choice = self.dispatcher.place(flight, now)
        if choice is not None:
            self.push(flight, choice, now)
        else:
            assert self.dispatcher.enqueue(flight, now) is not None

    def push(self, flight: Flight, choice: Choice, now: float) -> None:
        name = choice.target_id
        flight.booking = self.table.book(flight.view, name, now)
        self.sent[name] += 1
        self.at(now + WAY_S, lambda then: self.reach(name, flight, then))

    def let_in(self, now: float) -> None:
        for flight, choice in self.dispatcher.let_in(now):
            self.push(flight, choice, now)

    def prober(self, key: Key) -> Callable[[float], None]:
        def ask(now: float) -> None:
            if key.id == "e0":
                self.seen.between_looks.append(self.sent[key.id])
            self.sent[key.id] = 0
            self.at(now + WAY_S, lambda then: tell(self.tells(self.engines[key.id]), now, then))
            self.at(now + self.table.table.pushing.probe_s, ask)

        def tell(load: EngineLoad | None, asked_at: float, now: float) -> None:
            self.at(now + WAY_S, lambda then: hear(load, asked_at, then))

        def hear(load: EngineLoad | None, asked_at: float, now: float) -> None:
            self.table.loaded(key, load, asked_at, now)
            self.let_in(now)

        return ask

    # --- the engines

    def reach(self, name: str, flight: Flight, now: float) -> None:
        request = Request(flight.view.id, flight.prompt, flight.tokens, ignore_eos=True)
        self.engines[name].submit(request, now)
        self.wake(name, now)

    def wake(self, name: str, now: float) -> None:
        wakes_at = self.engines[name].wakes_at(now)
        if name in self.busy or wakes_at is None:
            return
        if wakes_at > now:
            self.at(wakes_at, lambda then: self.wake(name, then))
            return
        self.busy.add(name)
        self.at(now + self.engines[name].begin(now), lambda then: self.finish(name, then))

    def finish(self, name: str, now: float) -> None:
        self.busy.discard(name)
        for output in self.engines[name].finish():
            flight = self.flights[output.request_id]
            if not flight.responded:
                flight.responded = True
                self.at(now + WAY_S, lambda then, flight=flight: self.first_byte(flight, then))
            if output.finish is not None:
                self.at(now + WAY_S, lambda then, flight=flight: self.end(flight, then))
        self.wake(name, now)

    def first_byte(self, flight: Flight, now: float) -> None:
        assert flight.booking is not None
        self.table.responded(flight.booking, now)
        self.seen.waits_s.append(now - flight.arrived_at)
        self.let_in(now)

    def end(self, flight: Flight, now: float) -> None:
        assert flight.booking is not None
        self.left -= 1
        self.table.release(flight.booking, now, flight.tokens)
        self.let_in(now)


def counts(engine: EngineModel) -> EngineLoad:
    return EngineLoad(engine.running, engine.waiting, engine.kv_usage)


def slots(engine: EngineModel) -> EngineLoad:
    return EngineLoad(engine.running, engine.waiting, engine.kv_usage, int(engine.profile.max_num_seqs.value))


def queue_only(engine: EngineModel) -> EngineLoad:
    return EngineLoad(None, engine.waiting)


def play(
    profile: Profile,
    engines: int,
    requests: int,
    prompt_tokens: float,
    tokens: float,
    *,
    mode: PushMode = PushMode.SELECTIVE,
    gap_s: float = 0.0,
    tells: Callable[[EngineModel], EngineLoad | None] = counts,
) -> Seen:
    """Requests of exponential sizes; all at once, or with exponential gaps. The same ones for the same numbers."""
    rng = random.Random(1)
    world = World(profile, engines, Pushing(mode), tells)
    at = 1.0  # when every engine has been looked at
    for _ in range(requests):
        world.arrive(at, 1 + int(rng.expovariate(1 / prompt_tokens)), 2 + int(rng.expovariate(1 / tokens)))
        at += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return world.play()


@pytest.mark.long
@pytest.mark.parametrize(
    ("profile", "engines", "requests", "prompt_tokens", "tokens", "pending", "slower"),
    [
        pytest.param(L4_8B, 1, 150, 300, 150, 2.0, 1.03, id="one L4"),
        pytest.param(L4_8B, 2, 300, 300, 150, 2.0, 1.03, id="two L4"),
        pytest.param(A100_7B, 1, 300, 500, 200, 6.0, 1.06, id="one A100"),
    ],
)
def test_under_a_backlog_batches_are_full_and_next_to_nothing_is_pending(
    profile: Profile,
    engines: int,
    requests: int,
    prompt_tokens: float,
    tokens: float,
    pending: float,
    slower: float,
) -> None:
    blind = play(profile, engines, requests, prompt_tokens, tokens, mode=PushMode.BLIND)
    selective = play(profile, engines, requests, prompt_tokens, tokens)
    assert selective.held_s > 0.4 * selective.ended_at
    assert selective.pending < pending
    assert selective.most_pending < blind.most_pending / 5
    assert selective.ended_at < slower * blind.ended_at


def test_one_look_does_not_let_everybody_in() -> None:
    seen = play(L4_8B, 1, 150, 300, 150)
    first = next(number for number, sent in enumerate(seen.between_looks) if sent)
    growth = seen.between_looks[first : first + 5]
    assert all(sent <= 4 * 2**number for number, sent in enumerate(growth))


def test_slots_that_are_told_are_filled_and_never_overfilled() -> None:
    seen = play(L4_8B, 2, 300, 60, 60, tells=slots)
    assert seen.most_pending == 0
    assert seen.running > 0.9 * L4_8B.max_num_seqs.value


@pytest.mark.parametrize(
    "tells",
    [
        pytest.param(queue_only, id="tells its queue only"),
        pytest.param(
            lambda engine: EngineLoad(0, engine.waiting), id="its count of running requests is stuck"
        ),
    ],
)
def test_an_engine_that_tells_little_is_not_flooded(tells: Callable[[EngineModel], EngineLoad]) -> None:
    blind = play(L4_8B, 2, 300, 300, 150, mode=PushMode.BLIND)
    seen = play(L4_8B, 2, 300, 300, 150, tells=tells)
    assert seen.pending < 6.0
    assert seen.ended_at < 1.05 * blind.ended_at


def test_an_engine_that_tells_nothing_is_pushed_blindly() -> None:
    blind = play(L4_8B, 2, 100, 300, 150, mode=PushMode.BLIND)
    assert play(L4_8B, 2, 100, 300, 150, tells=lambda engine: None) == blind


@pytest.mark.parametrize(
    ("profile", "requests", "prompt_tokens", "tokens", "gap_s"),
    [
        pytest.param(L4_8B, 100, 100, 20, 0.3, id="short requests on L4"),
        pytest.param(L4_8B, 100, 300, 60, 0.3, id="requests on L4"),
        pytest.param(A100_7B, 300, 200, 50, 0.03, id="many requests on A100"),
    ],
)
def test_where_there_is_room_nobody_waits(
    profile: Profile, requests: int, prompt_tokens: float, tokens: float, gap_s: float
) -> None:
    blind = play(profile, 2, requests, prompt_tokens, tokens, mode=PushMode.BLIND, gap_s=gap_s)
    selective = play(profile, 2, requests, prompt_tokens, tokens, gap_s=gap_s)
    assert selective.wait_s < 1.03 * blind.wait_s
    assert selective.ended_at < 1.02 * blind.ended_at
