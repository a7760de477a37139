"""A tiny market for tests of placement: the production plan over zones whose capacity is a function of the tick.

Every tick checks what must hold of any placement, so a test only checks what is special about its case.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies import rollout
from policies.goals import Goal, PlacementGoal, ScalingGoal
from policies.lifecycle import apply, request
from policies.model import (
    Bootstrapped,
    CapacityType,
    Drained,
    Event,
    FailureKind,
    Launch,
    Launched,
    LaunchFailed,
    Memory,
    Observation,
    Offer,
    Plan,
    Preempted,
    ProbePassed,
    Replica,
    ReplicaState,
    Terminated,
    Zone,
)
from policies.placement.risk_budget import WRITE_EVERY_S
from policies.plan import learn, plan
from policies.registry import policies_for
from policies.retiring import is_announced

S = ReplicaState
SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
PLENTY = 1_000_000


def an_offer(zone: str, price_usd_hour: float = 1.0, capacity_type: CapacityType = SPOT) -> Offer:
    """`zone` is cloud/region/zone."""
    return Offer(Zone(*zone.split("/")), "m", "L4", 1.0, capacity_type, price_usd_hour, 3.0)


def both(*zones: str) -> tuple[Offer, ...]:
    """Every zone on spot for 1 and on demand for 3 USD/h."""
    return tuple(an_offer(zone) for zone in zones) + tuple(an_offer(zone, 3.0, ON_DEMAND) for zone in zones)


def a_goal(wanted: int, *, version: int = 1, **placement: object) -> Goal:
    return Goal(version, ScalingGoal(wanted, wanted), PlacementGoal(**placement), drain_timeout_s=60.0)  # type: ignore[arg-type]


def of_kind(replicas: Sequence[Replica], kind: CapacityType) -> list[Replica]:
    return [r for r in replicas if r.offer.capacity_type is kind]


class World:
    """`capacity` is how many spot instances a zone holds at a tick; on-demand ones are always available."""

    def __init__(
        self,
        goal: Goal,
        offers: Sequence[Offer],
        capacity: Callable[[Zone, int], int],
        *,
        tick_s: float = 30.0,
    ) -> None:
        self.goal = goal
        self.offers = tuple(offers)
        self.capacity = capacity
        self.tick_s = tick_s
        self.ticks = 0
        self.memory = Memory()
        self.fleet: dict[int, Replica] = {}
        self.failed_launches = 0
        self._events: list[Event] = []

    @property
    def counted(self) -> list[Replica]:
        """The replicas of the wanted version that are live and are not being ended, nor replaced, nor about to be preempted."""
        new, _ = rollout.split(tuple(self.fleet.values()), self.goal, self.memory.rollout)
        return [replica for replica in new if not is_announced(replica) and replica.preempt_at is None]

    def zones(self, kind: CapacityType = SPOT) -> dict[str, int]:
        """How many replicas of the wanted version each zone has, by its last name."""
        return dict(sorted(Counter(r.zone.name for r in of_kind(self.counted, kind)).items()))

    def run(self, ticks: int) -> World:
        for _ in range(ticks):
            self.tick()
        return self

    def tick(self) -> Plan:
        now, policies = self.ticks * self.tick_s, policies_for(self.goal)
        before, events = dict(self.fleet), self._events
        for event in events:
            self._apply(event, now)
        observation = Observation(
            now, self.goal, tuple(self.fleet.values()), self.offers, events=tuple(events)
        )
        learned = learn(observation, before, self.memory, policies)
        decided = plan(observation, learned, policies)
        for action in decided.actions:
            if isinstance(action, Launch):
                self.fleet[action.replica_id] = request(action, now)
            else:
                self._apply(action, now)
        self._check(observation, decided)
        stored = json.loads(json.dumps(decided.memory.placement))  # a controller may be killed at any tick
        assert stored == decided.memory.placement
        self.memory = replace(decided.memory, placement=stored)
        self._events = list(self._market())
        self.ticks += 1
        return decided

    def _apply(self, cause: object, now: float) -> None:
        replica = self.fleet[cause.replica_id]  # type: ignore[attr-defined]
        after = apply(replica, cause, now, self.goal.drain_timeout_s)  # type: ignore[arg-type]
        self.fleet[after.id] = after
        if after.state is S.GONE:
            del self.fleet[after.id]

    def _market(self) -> list[Event]:
        """What happens to every replica before the next tick: it moves on by one step, or its zone drops it."""
        events: list[Event] = []
        held: Counter[Zone] = Counter()
        for replica in self.fleet.values():
            number, spot = replica.id, replica.offer.capacity_type is SPOT
            if replica.state is S.TERMINATING:
                events.append(Terminated(number))
                continue
            if spot and held[replica.zone] >= self.capacity(replica.zone, self.ticks):
                asked = replica.state is S.REQUESTED
                self.failed_launches += asked
                events.append(LaunchFailed(number, FailureKind.CAPACITY) if asked else Preempted(number))
                continue
            held[replica.zone] += spot
            match replica.state:
                case S.REQUESTED:
                    events.append(Launched(number, f"i-{number}"))
                case S.PROVISIONING:
                    events.append(Bootstrapped(number, "http://h"))
                case S.STARTING:
                    events.append(ProbePassed(number))
                case S.DRAINING:
                    events.append(Drained(number))
        return events

    def _check(self, seen: Observation, decided: Plan) -> None:
        """What holds of every tick of every policy."""
        goal, policies = self.goal.placement, policies_for(self.goal)
        wanted = self.goal.scaling.min_replicas
        launched = [a.offer.capacity_type for a in decided.actions if isinstance(a, Launch)]
        ended = [seen_by_id(seen)[a.replica_id] for a in decided.actions if not isinstance(a, Launch)]
        counted = of_kind(self.counted, SPOT), of_kind(self.counted, ON_DEMAND)
        surge = int(goal.placer == "spread" and launched == [SPOT] and not ended)  # one may be moved
        assert len(counted[0]) <= wanted + goal.num_overprovision + surge or SPOT not in launched
        steps = decided.memory.placement.get("growth", {}).get(
            "steps", ()
        )  # RiskHedge hedges the next step up
        assert (
            len(counted[1]) <= wanted + max((step[1] for step in steps), default=0)
            or ON_DEMAND not in launched
        )
        for kind in launched:
            staying = [r for r in of_kind(ended, kind) if not is_announced(r) and r.preempt_at is None]
            assert not [r for r in staying if r.version == self.goal.version], (
                "one is ended and one like it launched"
            )
        assert all(action.why for action in decided.actions)
        again = plan(replace(seen, replicas=tuple(self.fleet.values()), events=()), decided.memory, policies)
        if goal.placer != "risk_hedge" or not any(is_announced(replica) for replica in ended):
            assert again.actions == (), "a second look finds more to do"
            assert again.memory == decided.memory
        if not seen.events and not decided.actions:
            before, after = self.memory.placement, dict(decided.memory.placement)
            if "budget" in before and seen.now - before["budget"]["at"] >= WRITE_EVERY_S:
                after["budget"] = before["budget"]  # RiskHedge's is also written hourly
            assert after == before, "a quiet tick writes to the database"


def seen_by_id(seen: Observation) -> dict[int, Replica]:
    return {replica.id: replica for replica in seen.replicas}
