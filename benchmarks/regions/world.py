"""Clients, agents and engines of several regions as a list of things to happen, in virtual time.

What is simulated is what lies between: half a round trip for every message between regions, the poller's period, the
period of reports. What decides is the production code: `lb.core.targets` with a routing policy, `lb.core.scheduler` over
`lb.core.queue`, `lb.core.peers` with a region policy. Engines keep their own time (`skyserve_cli.engine.model`).

A request enters at the agent of its client's region, and is forwarded at most once. If an agent dies, what it holds and what
runs through it is lost, and its clients try again every RETRY_S until they find another agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from benchmarks.regions import workloads
from benchmarks.regions.agent import Agent, Flight
from benchmarks.regions.rules import Rule
from benchmarks.regions.scenario import Death, Scenario
from benchmarks.traffic.virtual_time import Engine, Events
from benchmarks.traffic.workloads import Call
from skyserve_cli.engine.profiles import Profile, profile_named

CLIENT_RTT_S = 0.004  # between a client and the agent of its region
REPLICA_RTT_S = 0.001  # between an agent and a replica of its region
RETRY_S = 2.0
HEAD_BYTES = 600  # of a request beside its prompt
BYTES_PER_PROMPT_TOKEN = 4
BYTES_PER_RESPONSE_TOKEN = 250  # an event of a stream


class Response(NamedTuple):
    """One request that was served. Instants are the client's, in seconds from the start."""

    call_id: str
    region: str  # of the client
    engine: int
    engine_region: str
    arrived_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    response_tokens: int
    left: bool  # any byte of it crossed between regions


@dataclass(frozen=True, slots=True)
class Result:
    """What happened in one run."""

    scenario: Scenario
    responses: tuple[Response, ...]
    lost: int
    busy_s: tuple[float, ...]  # of each engine
    egress_bytes: dict[tuple[str, str], int]
    outside_bytes: int  # of requests that were sent to a region that may not serve them

    @property
    def digest(self) -> str:
        """Equal only if the same requests went to the same engines at the same instants."""
        summary = blake2b(digest_size=16)
        for one in self.responses:
            summary.update(repr(tuple(one)).encode())
        return summary.hexdigest()


class RegionalEngine(Engine[Flight]):
    """A replica of a region."""

    def __init__(self, index: int, region: str, profile: Profile, world: World) -> None:
        super().__init__(
            profile, world.events, partial(world.first_token, self), partial(world.last_token, self)
        )
        self.index = index
        self.id = f"{region}-{index}"
        self.region = region


class World:
    """One run of a scenario under a rule."""

    def __init__(self, scenario: Scenario, rule: Rule, seed: int) -> None:
        self.scenario = scenario
        self.rule = rule
        self.events = Events()
        self._open = 0
        self._lost = 0
        self._rtt_s = {pair: ms / 1000 for pair, ms in scenario.rtt_ms.items()}
        replicas = {region.name: region.replicas for region in scenario.regions}
        self.workload = workloads.make(scenario.clients.kind, replicas, seed, scenario.clients.options)
        self._opening = iter(self.workload.opening())
        names = [name for name, count in replicas.items() for _ in range(count)]
        profile = profile_named(scenario.profile)
        self.engines = [RegionalEngine(index, name, profile, self) for index, name in enumerate(names)]
        self.engine_by_id = {engine.id: engine for engine in self.engines}
        self._responses: list[Response] = []
        self.egress_bytes: dict[tuple[str, str], int] = {}
        self.outside_bytes = 0
        homes = [rule.central] if rule.central else list(replicas)
        self.agents = {name: Agent(self, name, homes) for name in homes}
        self._home = {name: rule.central or name for name in replicas}  # where clients of a region enter

    # --- what agents use

    def rtt_s(self, one: str, other: str) -> float:
        if one == other:
            return REPLICA_RTT_S
        return self._rtt_s.get((one, other)) or self._rtt_s[other, one]

    def passes(self, source: str, target: str, now: float) -> bool:
        """Whether a message from one region reaches another."""
        return not any(
            cut.source == source and cut.target == target and cut.at_s <= now < cut.until_s
            for cut in self.scenario.cuts
        )

    def allowed(self, client_region: str, region: str) -> bool:
        zone = self.scenario.stay.get(client_region)
        return zone is None or region in zone

    @property
    def under_way(self) -> bool:
        return bool(self._open)

    def crossed(self, flight: Flight, source: str, target: str, size: int) -> None:
        if not self.allowed(flight.region, target):
            self.outside_bytes += size
        if source != target:
            self.egress_bytes[source, target] = self.egress_bytes.get((source, target), 0) + size

    def request_bytes(self, call: Call) -> int:
        return HEAD_BYTES + BYTES_PER_PROMPT_TOKEN * len(call.prompt.tokens)

    def send_to_engine(self, flight: Flight, engine: RegionalEngine, agent: Agent, now: float) -> None:
        flight.engine = engine
        self.crossed(flight, agent.region, engine.region, self.request_bytes(flight.call))
        self.events.at(now + self.rtt_s(agent.region, engine.region) / 2, self._reaches_engine, flight)

    def abort(self, flight: Flight) -> None:
        """The connection to the engine is gone; the engine stops computing the response."""
        if flight.engine is not None:
            flight.engine.abort(f"{flight.call.id}#{flight.attempt}")

    # --- the run

    def play(self) -> Result:
        self._announce_next()
        for agent in self.agents.values():
            agent.start()
        for death in self.scenario.deaths:
            self._plan_death(death)
        for change in self.scenario.rtt_changes:
            self.events.at(change.at_s, self._change_rtt, change)
        self.events.play()
        for agent in self.agents.values():
            agent.check_balance()
        return Result(
            self.scenario,
            tuple(self._responses),
            self._lost,
            tuple(engine.busy_s for engine in self.engines),
            self.egress_bytes,
            self.outside_bytes,
        )

    def _announce_next(self) -> None:
        coming = next(self._opening, None)
        if coming is not None:
            self._open += 1
            self.events.at(coming.at_s, self._opens, coming.call)

    def _opens(self, call: Call, now: float) -> None:
        self._announce_next()
        self._issue(Flight(call, self.workload.region_of(call), now), now)

    def _issue(self, flight: Flight, now: float) -> None:
        agent = self.agents[self._home[flight.region]]
        way_s = CLIENT_RTT_S / 2
        if agent.region != flight.region:
            way_s += self.rtt_s(agent.region, flight.region) / 2
        flight.enter(agent)
        self.events.at(now + way_s, agent.arrives, flight)

    def lose(self, flight: Flight, now: float) -> None:
        """The client's attempt has failed; it tries again."""
        self._lost += 1
        flight.attempt += 1
        self.events.at(now + RETRY_S, self._issue, flight)

    # --- engines

    def _reaches_engine(self, flight: Flight, now: float) -> None:
        call, engine = flight.call, flight.engine
        if engine is None or flight.agent.down:
            return
        engine.submit(f"{call.id}#{flight.attempt}", call, flight, now)

    def first_token(self, engine: RegionalEngine, flight: Flight, cached_tokens: int, now: float) -> None:
        flight.cached_tokens = cached_tokens
        agent = flight.agent
        back_s = self.rtt_s(agent.region, engine.region) / 2
        self.events.at(now + back_s, agent.responded, (flight, flight.attempt))
        flight.first_at = now + back_s + self._way_to_client(flight)

    def last_token(self, engine: RegionalEngine, flight: Flight, now: float) -> None:
        agent, call = flight.agent, flight.call
        back_s = self.rtt_s(agent.region, engine.region) / 2
        size = HEAD_BYTES // 2 + BYTES_PER_RESPONSE_TOKEN * len(call.answer)
        self.crossed(flight, engine.region, agent.region, size)
        self.crossed(flight, agent.region, flight.origin.region, size)
        self.events.at(now + back_s, agent.ended, (flight, flight.attempt))
        self.events.at(
            now + back_s + self._way_to_client(flight), self._client_has_it, (flight, flight.attempt, engine)
        )

    def _way_to_client(self, flight: Flight) -> float:
        way_s = CLIENT_RTT_S / 2
        if flight.agent is not flight.origin:
            way_s += self.rtt_s(flight.agent.region, flight.origin.region) / 2
        if flight.origin.region != flight.region:
            way_s += self.rtt_s(flight.origin.region, flight.region) / 2
        return way_s

    def _client_has_it(self, about: tuple[Flight, int, RegionalEngine], now: float) -> None:
        flight, attempt, engine = about
        if attempt != flight.attempt:  # the agent died in between
            return
        call = flight.call
        self._responses.append(
            Response(
                call.id,
                flight.region,
                engine.index,
                engine.region,
                flight.issued_at,
                flight.first_at,
                now,
                len(call.prompt.tokens),
                flight.cached_tokens,
                len(call.answer),
                engine.region != flight.region,
            )
        )
        self._open -= 1
        for later in self.workload.ended(call, now):
            self._open += 1
            self.events.at(later.at_s, self._opens_later, later.call)

    def _opens_later(self, call: Call, now: float) -> None:
        self._issue(Flight(call, self.workload.region_of(call), now), now)

    # --- what goes wrong

    def _change_rtt(self, change: Any, now: float) -> None:
        pair = (change.one, change.other)
        self._rtt_s[pair if pair in self._rtt_s else pair[::-1]] = change.rtt_ms / 1000

    def _plan_death(self, death: Death) -> None:
        if self.rule.central:
            return
        agent = self.agents[death.region]
        nearest = min(
            (one for one in self.agents.values() if one is not agent),
            key=lambda one: self.rtt_s(one.region, agent.region),
        )
        own = [engine for engine in self.engines if engine.region == death.region]

        def moves(_: None, now: float) -> None:
            self._home[death.region] = nearest.region

        def returns(_: None, now: float) -> None:
            agent.returns(now)
            nearest.give_back(death.region, now)
            self._home[death.region] = death.region

        self.events.at(death.at_s, lambda _, now: agent.dies(now), None)
        self.events.at(death.at_s + death.clients_find_s, moves, None)
        if death.adopted_after_s is not None and not self.rule.all_view:
            self.events.at(death.at_s + death.adopted_after_s, lambda _, now: nearest.adopt(own, now), None)
        self.events.at(death.until_s, returns, None)
