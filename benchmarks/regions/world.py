"""Clients, agents and engines of several regions as a list of things to happen, in virtual time.

What is simulated is what lies between: half a round trip for every message between regions, the poller's period, the
period of reports. What decides is the production code: `lb.core.targets` with a routing policy, `lb.core.scheduler` over
`lb.core.queue`, `lb.core.forwarding` with a region policy. Engines keep their own time (`skyserve_cli.engine.model`).

A request enters at the agent of its client's region, and is forwarded at most once. If an agent dies, what it holds and what
runs through it is lost, and its clients try again every RETRY_S until they find another agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from benchmarks.regions import workloads
from benchmarks.regions.agent import Agent, Flight
from benchmarks.regions.rules import Rule
from benchmarks.regions.scenario import Death, Pause, Scenario
from benchmarks.traffic.virtual_time import Engine, Events
from benchmarks.traffic.workloads import Call
from skyserve_cli.engine.profiles import Profile, profile_named

CLIENT_RTT_S = 0.004  # between a client and the agent of its region
REPLICA_RTT_S = 0.001  # between an agent and a replica of its region
RETRY_S = 2.0
RETURNS_AFTER_S = 1.0  # after a pause, replicas are their own agents' again
HEAD_BYTES = 600  # of a request beside its prompt
BYTES_PER_PROMPT_TOKEN = 4
BYTES_PER_RESPONSE_TOKEN = 250  # an event of a stream
_NEVER = (0.0, 0.0)
_IN_ORDER = 1e-6  # seconds between two events after a pause, for each second between them


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
    digest_bytes: tuple[int, ...] = ()  # that each agent has sent to the others

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
        self.profile = profile.name


class World:
    """One run of a scenario under a rule."""

    def __init__(self, scenario: Scenario, rule: Rule, seed: int) -> None:
        self.scenario = scenario
        self.rule = rule
        self.events = AgentEvents()
        self._open = 0
        self._lost = 0
        self._rtt_s = {pair: ms / 1000 for pair, ms in scenario.rtt_ms.items()}
        self._chance = Random(f"{seed}/jitter")
        sizes = {region.name: region.size for region in scenario.regions}
        self.workload = workloads.make(scenario.clients.kind, sizes, seed, scenario.clients.options)
        self._opening = iter(self.workload.opening())
        places = [
            (region.name, profile_named(profile))
            for region in scenario.regions
            for profile in region.profiles(scenario.profile)
        ]
        self.engines = [RegionalEngine(index, *place, self) for index, place in enumerate(places)]
        self.engine_by_id = {engine.id: engine for engine in self.engines}
        self._responses: list[Response] = []
        self.egress_bytes: dict[tuple[str, str], int] = {}
        self.outside_bytes = 0
        self.events.pauses = {pause.region: (pause.at_s, pause.until_s) for pause in scenario.pauses}
        homes = self._entrances()
        names = {
            name: region
            for region in dict.fromkeys(homes.values())
            for name in agent_names(region, scenario.region(region).agents)
        }
        self.agents = {
            name: Agent(self, name, region, [one for one in names.items() if one[0] != name])
            for name, region in names.items()
        }
        self._home = homes

    def _entrances(self) -> dict[str, str]:
        """Return the region whose agents the clients of each region enter.

        Where no region helps another one, there are agents in those with replicas only.
        """
        names, central = self.scenario.region_names, self.rule.central
        if central:
            return dict.fromkeys(names, central if central in names else names[0])
        if self.rule.outer != "local" or self.rule.all_view:
            return {name: name for name in names}
        staffed = [region.name for region in self.scenario.regions if region.size]

        def distance(name: str) -> Callable[[str], tuple[bool, float]]:
            return lambda other: (not self.allowed(name, other), other != name and self.rtt_s(name, other))

        return {name: min(staffed, key=distance(name)) for name in names}

    # --- what agents use

    def rtt_s(self, one: str, other: str) -> float:
        if one == other:
            return REPLICA_RTT_S
        return self._rtt_s.get((one, other)) or self._rtt_s[other, one]

    def way_s(self, one: str, other: str, flight: Flight | None = None) -> float:
        """Return how long a message takes. Those of one request do not overtake each other."""
        half_s = self.rtt_s(one, other) / 2
        if one == other:
            return half_s
        return half_s * (self._draw() if flight is None else flight.way)

    def _draw(self) -> float:
        jitter = self.scenario.jitter
        return 1.0 + jitter * (2.0 * self._chance.random() - 1.0) if jitter else 1.0

    def zones_of(self, region: str) -> tuple[str, ...]:
        """Return the zones that a region serves; each has the name of the region whose clients stay in it."""
        return tuple(zone for zone, regions in self.scenario.stay.items() if region in regions)

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

    def response_bytes(self, call: Call) -> int:
        return HEAD_BYTES // 2 + BYTES_PER_RESPONSE_TOKEN * len(call.answer)

    def send_to_engine(self, flight: Flight, engine: RegionalEngine, agent: Agent, now: float) -> None:
        flight.engine = engine
        self.crossed(flight, agent.region, engine.region, self.request_bytes(flight.call))
        way_s = self.way_s(agent.region, engine.region, flight)
        self.events.at(now + way_s, self._reaches_engine, flight)

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
        for pause in self.scenario.pauses:
            self._plan_pause(pause)
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
            tuple(agent.digest_bytes for agent in self.agents.values()),
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
        agent = self._entrance(flight)
        flight.way = self._draw()
        way_s = CLIENT_RTT_S / 2
        if agent.region != flight.region:
            way_s += self.way_s(agent.region, flight.region, flight)
            if not self.allowed(flight.region, agent.region):
                self.outside_bytes += self.request_bytes(flight.call)
        flight.enter(agent)
        self.events.at(now + way_s, agent.arrives, flight)

    def _entrance(self, flight: Flight) -> Agent:
        """Return the agent that a client uses: a session stays with one of its region, unless requests are spread."""
        region = self._home[flight.region]
        names = agent_names(region, self.scenario.region(region).agents)
        key = flight.call.id if self.scenario.spread else flight.call.session
        return self.agents[names[crc32(key.encode()) % len(names)]]

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
        back_s = self.way_s(agent.region, engine.region, flight)
        self.events.at(now + back_s, agent.responded, (flight, flight.attempt))
        flight.first_at = now + back_s + self._way_to_client(flight)

    def last_token(self, engine: RegionalEngine, flight: Flight, now: float) -> None:
        agent, call = flight.agent, flight.call
        back_s = self.way_s(agent.region, engine.region, flight)
        size = self.response_bytes(call)
        self.crossed(flight, engine.region, agent.region, size)
        self.crossed(flight, agent.region, flight.origin.region, size)
        self.events.at(now + back_s, agent.ended, (flight, flight.attempt))
        self.events.at(
            now + back_s + self._way_to_client(flight), self._client_has_it, (flight, flight.attempt, engine)
        )

    def _way_to_client(self, flight: Flight) -> float:
        way_s = CLIENT_RTT_S / 2
        if flight.agent is not flight.origin:
            way_s += self.way_s(flight.agent.region, flight.origin.region, flight)
        if flight.origin.region != flight.region:
            way_s += self.way_s(flight.origin.region, flight.region, flight)
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
        ends_at_s = self.scenario.ends_at_s
        for later in self.workload.ended(call, now):
            if ends_at_s is not None and later.at_s >= ends_at_s:
                continue
            self._open += 1
            self.events.at(later.at_s, self._opens_later, later.call)

    def _opens_later(self, call: Call, now: float) -> None:
        self._issue(Flight(call, self.workload.region_of(call), now), now)

    # --- what goes wrong

    def _change_rtt(self, change: Any, now: float) -> None:
        pair = (change.one, change.other)
        self._rtt_s[pair if pair in self._rtt_s else pair[::-1]] = change.rtt_ms / 1000

    def _agents_of(self, region: str) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.region == region]

    def _nearest(self, region: str) -> list[Agent]:
        """Return the agents of the region that is nearest to one."""
        others = {agent.region for agent in self.agents.values()} - {region}
        return self._agents_of(min(sorted(others), key=lambda one: self.rtt_s(one, region)))

    def _plan_death(self, death: Death) -> None:
        gone = self._agents_of(death.region)
        if self.rule.central or not gone or len(gone) == len(self.agents):
            return
        nearest = self._nearest(death.region)

        def dies(_: None, now: float) -> None:
            for agent in gone:
                agent.dies(now)

        def moves(_: None, now: float) -> None:
            self._home[death.region] = nearest[0].region

        def returns(_: None, now: float) -> None:
            for agent in gone:
                agent.returns(now)
            self._give_back(death.region, now)
            self._home[death.region] = death.region

        self.events.at(death.at_s, dies, None)
        self.events.at(death.at_s + death.clients_find_s, moves, None)
        if death.adopted_after_s is not None and not self.rule.all_view:
            self.events.at(death.at_s + death.adopted_after_s, self._adopt, death.region)
        self.events.at(death.until_s, returns, None)

    def _plan_pause(self, pause: Pause) -> None:
        if self.rule.central or self.rule.all_view or pause.adopted_after_s is None:
            return
        adopted_at = pause.at_s + pause.adopted_after_s
        if adopted_at < pause.until_s and len(self.scenario.regions) > 1:
            self.events.at(adopted_at, self._adopt, pause.region)
            self.events.at(pause.until_s + RETURNS_AFTER_S, self._give_back, pause.region)

    def _adopt(self, region: str, now: float) -> None:
        own = [engine for engine in self.engines if engine.region == region]
        for agent in self._nearest(region):
            agent.adopt(own, now)

    def _give_back(self, region: str, now: float) -> None:
        for agent in self._nearest(region):
            agent.give_back(region, now)


class AgentEvents(Events):
    """Events of which an agent that is stopped finds those of its pause at the end, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: Mapping[str, tuple[float, float]] = {}

    def at(self, at_s: float, happen: Callable[[Any, float], None], what: Any) -> None:
        if self.pauses:
            owner = getattr(happen, "__self__", None)
            since_s, until_s = self.pauses.get(owner.region, _NEVER) if isinstance(owner, Agent) else _NEVER
            if since_s <= at_s < until_s:
                at_s = until_s + _IN_ORDER * (at_s - since_s)
        super().at(at_s, happen, what)


def agent_names(region: str, count: int) -> list[str]:
    """Return the names of the agents of a region: its own, and with numbers if there are several."""
    return [region, *(f"{region}/{number}" for number in range(2, count + 1))]
