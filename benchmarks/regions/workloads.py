"""Clients of several regions.

    day     conversations whose rate follows the sun: (1 + swing sin), a third of a day apart, 24 hours in `length_s`, and flash
            `crowds`
    closed  a fixed number of clients per region who talk without pause, for `length_s`
    trees   trees of thought (`benchmarks.traffic.trees`) with a number of clients per region
    recorded  conversations of a file (`benchmarks.regions.recorded`) with a number of clients per region

Lengths are those of `benchmarks.traffic.chat` unless a scenario names others. Three of a region's twelve tenants are
global: their system prompts are the same in all regions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import Any, NamedTuple, Protocol

from benchmarks.regions.recorded import Recorded
from benchmarks.traffic.chat import Habits, Session
from benchmarks.traffic.trees import Clients as TreeClients
from benchmarks.traffic.trees import TreesOfThought, made_up
from benchmarks.traffic.workloads import (
    Arrival,
    Call,
    Passage,
    Prose,
    Spread,
    exponential,
    geometric,
    message,
)


class RegionalWorkload(Protocol):
    """As `benchmarks.traffic.workloads.Workload`, and every call has a region that it enters."""

    def opening(self) -> Iterator[Arrival]: ...

    def ended(self, call: Call, now: float) -> Iterable[Arrival]: ...

    def region_of(self, call: Call) -> str: ...


HABITS = Habits(
    tenants=12,
    message_tokens=Spread(40, 160, 3, 2000),
    response_tokens=Spread(129, 400, 2, 1200),
    think_s=Spread(14, 71, 1, 600),
    longest_tokens=6000,
)
LONG_HABITS = replace(
    HABITS,
    turns_mean=4.0,
    message_tokens=Spread(80, 400, 3, 2000),
    response_tokens=Spread(250, 700, 2, 1200),
)
GLOBAL_TENANTS = 3


@dataclass(slots=True, eq=False)
class _RegionalSession(Session):
    region: str = ""


class Conversations:
    """What day and closed share: tenants, sessions, turns. What a session says depends on the seed and its number alone.

    `roam` is the chance that a turn enters in the next region after the one of the turn before. Without `pauses` a turn
    follows at once.
    """

    def __init__(
        self, regions: Sequence[str], seed: int, habits: Habits, *, pauses: bool = True, roam: float = 0.0
    ) -> None:
        self._regions = list(regions)
        self._seed = seed
        self._habits = habits
        self._pauses = pauses
        self._roam = roam
        self._open: dict[str, _RegionalSession] = {}
        self._numbers = 0
        self._systems: dict[str, list[tuple[str, Passage]]] = {}
        shared = [(f"global-{n}", self._system(f"global/{n}")) for n in range(GLOBAL_TENANTS)]
        for region in regions:
            own = [
                (f"{region}-{n}", self._system(f"{region}/{n}"))
                for n in range(habits.tenants - GLOBAL_TENANTS)
            ]
            self._systems[region] = random.Random(f"{seed}/{region}/ranks").sample(
                [*shared, *own], habits.tenants
            )
        self._weights = [1 / (rank + 1) for rank in range(habits.tenants)]

    def region_of(self, call: Call) -> str:
        return self._open[call.id].region

    def _system(self, name: str) -> Passage:
        prose = Prose(random.Random(f"{self._seed}/{name}"))
        return message("system", prose.passage(self._habits.system_tokens))

    def _begin(self, region: str) -> Call:
        number, self._numbers = self._numbers, self._numbers + 1
        rng = random.Random(f"{self._seed}/{region}/{number}")
        tenant, system = rng.choices(self._systems[region], self._weights)[0]
        turns = geometric(rng, self._habits.turns_mean)
        return self._turn(_RegionalSession(tenant, f"u{number}", turns, system, rng, region=region))

    def _turn(self, session: _RegionalSession) -> Call:
        call = session.next_turn(self._habits)
        self._open[call.id] = session
        return call

    def _next_turn(self, call: Call, now: float) -> Arrival | None:
        session = self._open.pop(call.id)
        if not session.goes_on(self._habits):
            return None
        pause_s = self._habits.think_s.draw(session.rng) if self._pauses else 0.0
        if self._roam and session.rng.random() < self._roam:
            place = self._regions.index(session.region)
            session.region = self._regions[(place + 1) % len(self._regions)]
        return Arrival(now + pause_s, self._turn(session))


class Crowd(NamedTuple):
    """From `at_s` until `until_s` a region has `times` as many new conversations as on the mean."""

    region: str
    at_s: float
    until_s: float
    times: float


class Day(Conversations):
    """Open loop: at load 1 each of `demand_replicas` replicas has `per_replica_s` new conversations a second."""

    def __init__(
        self,
        regions: Mapping[str, int],
        seed: int,
        *,
        load: float = 0.85,
        length_s: float = 600.0,
        swing: float = 0.8,
        per_replica_s: float = 0.55,
        demand_replicas: int = 12,
        roam: float = 0.0,
        shares: Mapping[str, float] | None = None,
        crowds: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(list(regions), seed, HABITS, roam=roam)
        self._crowds = [Crowd(**one) for one in crowds]
        self._length_s = length_s
        self._swing = swing
        count = len(regions)
        self._phase = {region: index / count for index, region in enumerate(regions)}
        mean = per_replica_s * load * demand_replicas
        self._mean = {region: mean * (shares[region] if shares else 1 / count) for region in regions}

    def opening(self) -> Iterator[Arrival]:
        starts = merge(
            *(self._starts(region) for region in self._mean),
            *(self._crowd(number, crowd) for number, crowd in enumerate(self._crowds)),
        )
        for at_s, region in starts:
            yield Arrival(at_s, self._begin(region))

    def _starts(self, region: str) -> Iterator[tuple[float, str]]:
        """A Poisson process of changing rate, by thinning one of the highest rate."""
        rng = random.Random(f"{self._seed}/{region}/starts")
        highest = self._mean[region] * (1 + self._swing)
        now = 0.0
        while True:
            now += exponential(rng, 1 / highest)
            if now >= self._length_s:
                return
            angle = 2 * math.pi * (now / self._length_s - self._phase[region])
            if rng.random() * (1 + self._swing) < 1 + self._swing * math.sin(angle):
                yield now, region

    def _crowd(self, number: int, crowd: Crowd) -> Iterator[tuple[float, str]]:
        """The conversations that a crowd adds."""
        rng = random.Random(f"{self._seed}/crowds/{number}")
        mean = 1 / (self._mean[crowd.region] * (crowd.times - 1))
        now = crowd.at_s + exponential(rng, mean)
        while now < min(crowd.until_s, self._length_s):
            yield now, crowd.region
            now += exponential(rng, mean)

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        following = self._next_turn(call, now)
        return () if following is None else (following,)


class Closed(Conversations):
    """Closed loop: a client starts its next conversation when the last one has ended."""

    def __init__(
        self,
        regions: Mapping[str, int],
        seed: int,
        *,
        clients: Mapping[str, int],
        length_s: float = 300.0,
    ) -> None:
        super().__init__(list(regions), seed, LONG_HABITS, pauses=False)
        self._clients = clients
        self._length_s = length_s

    def opening(self) -> Iterator[Arrival]:
        rng = random.Random(f"{self._seed}/starts")
        starts = sorted((rng.random() * 5, region) for region, n in self._clients.items() for _ in range(n))
        for at_s, region in starts:
            yield Arrival(at_s, self._begin(region))

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        region = self._open[call.id].region
        following = self._next_turn(call, now)
        if following is not None:
            return (following,)
        return (Arrival(now, self._begin(region)),) if now < self._length_s else ()


class Trees:
    """Trees of thought of several regions, over the same instructions."""

    def __init__(
        self,
        regions: Mapping[str, int],
        seed: int,
        *,
        clients: Mapping[str, int],
        four_branches: Mapping[str, int] | None = None,
        trees: int = 4,
        musing_tokens: Spread | None = None,
    ) -> None:
        problems = made_up(seed, 400)
        muse = musing_tokens or Spread(60, 200, 1, 256)
        self._by_region = {}
        for index, region in enumerate(regions):
            groups = [
                TreeClients(clients.get(region, 0), 2, trees),
                TreeClients((four_branches or {}).get(region, 0), 4, trees),
            ]
            # Every region has problems of its own; the shared instructions are drawn by the first seed.
            part = problems[index * 100 : (index + 1) * 100] or problems
            self._by_region[region] = TreesOfThought(part, groups, seed, musing_tokens=muse)
        self._region_of: dict[str, str] = {}

    def opening(self) -> Iterator[Arrival]:
        streams = [self._named(region, workload) for region, workload in self._by_region.items()]
        for _, arrival in merge(*streams, key=lambda pair: pair[0]):
            yield arrival

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        region = self._region_of.pop(call.id)
        original = Call(call.id.partition("/")[2], call.prompt, call.answer, call.scope, call.session)
        return [
            Arrival(one.at_s, self._enter(region, one.call))
            for one in self._by_region[region].ended(original, now)
        ]

    def region_of(self, call: Call) -> str:
        return self._region_of[call.id]

    def _named(self, region: str, workload: TreesOfThought) -> Iterator[tuple[float, Arrival]]:
        for one in workload.opening():
            yield one.at_s, Arrival(one.at_s, self._enter(region, one.call))

    def _enter(self, region: str, call: Call) -> Call:
        name = f"{region}/{call.id}"
        self._region_of[name] = region
        return Call(name, call.prompt, call.answer, call.scope, f"{region}/{call.session}")


def make(kind: str, regions: Mapping[str, int], seed: int, options: Mapping[str, Any]) -> RegionalWorkload:
    """Returns the workload of that kind. Raises ValueError for an unknown kind, TypeError for an unknown option, OSError."""
    kinds: Mapping[str, Any] = {"day": Day, "closed": Closed, "trees": Trees, "recorded": Recorded}
    if kind not in kinds:
        raise ValueError(f"clients.kind: unknown workload {kind!r}; known: {', '.join(kinds)}")
    made: RegionalWorkload = kinds[kind](regions, seed, **options)
    return made
