"""The autoscaler over bursts, in virtual time: the production plan, a small fleet and the requests of a recording.

A request that finds no replica is held, as a load balancer holds it; nothing may be refused for want of one.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from policies.goals import AcceleratorQps, Goal, PlacementGoal, ScalingGoal
from policies.history import Load
from policies.model import (
    CapacityType,
    Drain,
    Launch,
    Memory,
    Observation,
    Offer,
    Replica,
    ReplicaState,
    Zone,
)
from policies.plan import plan
from policies.registry import PLACERS, policies_for
from skyserve_cli.sim.arrivals import Arrivals, load_arrivals

RECORDED = Path(
    os.environ.get("SKYSERVE_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"), "workload"
)
recorded = pytest.mark.skipif(
    not RECORDED.is_dir(), reason="no recorded requests: SKYSERVE_TRACES names no folder with them"
)
S = ReplicaState
WINDOW_S = 60.0
START_S = 180.0
GOAL = ScalingGoal(0, 12, 2.0, upscale_delay_s=120.0, downscale_delay_s=600.0)
OFFERS = tuple(
    Offer(Zone("c", region, f"{region}-{letter}"), "i", "L4", 1.0, capacity_type, price)
    for capacity_type, price in ((CapacityType.SPOT, 0.3), (CapacityType.ON_DEMAND, 1.0))
    for region in ("r1", "r2")
    for letter in "ab"
)


@dataclass
class World:
    """One service. Replicas are ready `START_S` after their launch and gone at once on request."""

    arrivals: Arrivals
    goal: Goal
    tick_s: float = 1.0
    now: float = 0.0
    replicas: tuple[Replica, ...] = ()
    memory: Memory = field(default_factory=Memory)
    held: int = 0
    served: int = 0
    longest_wait_s: float = 0.0
    targets: list[tuple[float, int]] = field(
        default_factory=list
    )  # (since, size), over-provisioning not counted
    short_s: dict[int, float] = field(
        default_factory=dict
    )  # by level, how long it has been asked for in vain
    worst_short_s: float = 0.0

    def tick(self) -> None:
        self.now += self.tick_s
        self._serve(self.arrivals.count(self.now - self.tick_s, self.now))
        load = self._load()
        wanted = self._plan(load)
        if not self.targets or self.targets[-1][1] != wanted:
            self.targets.append((self.now, wanted))
        self._measure(load)

    def run(self, until_s: float) -> World:
        while self.now < until_s:
            self.tick()
        return self

    @property
    def ready(self) -> int:
        return sum(replica.state is S.READY for replica in self.replicas)

    def _serve(self, came: int) -> None:
        up = tuple(
            replace(r, state=S.READY) if r.state is S.REQUESTED and self.now >= r.since + START_S else r
            for r in self.replicas
        )
        self.replicas = up
        self.held += came
        if self.ready:
            self.served, self.held, self._held_since = self.served + self.held, 0, self.now
        elif not self.held:
            self._held_since = self.now
        self.longest_wait_s = max(self.longest_wait_s, self.now - self._held_since)

    _held_since: float = 0.0

    def _load(self) -> Load:
        start = max(0.0, self.now - WINDOW_S)
        return Load(WINDOW_S, self.arrivals.count(start, self.now), queued=self.held, known=True)

    def _plan(self, load: Load) -> int:
        observation = Observation(self.now, self.goal, self.replicas, OFFERS, load)
        decided = plan(observation, self.memory, policies_for(self.goal))
        for action in decided.actions:
            if isinstance(action, Launch):
                born = Replica(
                    action.replica_id, action.version, action.offer, S.REQUESTED, self.now, self.now
                )
                self.replicas = (*self.replicas, born)
            else:
                assert not isinstance(action, Drain) or self.held == 0
                self.replicas = tuple(r for r in self.replicas if r.id != action.replica_id)
        again = plan(replace(observation, replicas=self.replicas), decided.memory, policies_for(self.goal))
        assert (again.actions, again.memory) == ((), decided.memory), "the second look changes nothing"
        scaling = json.loads(json.dumps(decided.memory.scaling))
        self.memory = replace(decided.memory, scaling=scaling)  # as after a restart
        return int(scaling["target"])

    def _measure(self, load: Load) -> None:
        """A level is short while the load needs it and fewer are ready."""
        qps = self.goal.scaling.target_qps_per_replica
        assert qps is not None
        asked = min(-(-load.requests // round(qps * WINDOW_S)), self.goal.scaling.max_replicas)
        for level in range(1, self.goal.scaling.max_replicas + 1):
            missing = asked >= level > self.ready
            self.short_s[level] = (
                self.short_s.get(level, -self.tick_s) + self.tick_s if missing else -self.tick_s
            )
            self.worst_short_s = max(self.worst_short_s, self.short_s[level])


def flaps(world: World) -> list[str]:
    """Every move that came too soon after one in the other direction."""
    goal, found = world.goal.scaling, []
    moves = [(at, after - before) for (_, before), (at, after) in pairwise(world.targets)]
    asleep = {at for (_, before), (at, _) in pairwise(world.targets) if before == 0}
    for (at, step), (then, next_step) in pairwise(moves):
        delay_s = goal.downscale_delay_s if next_step < 0 else goal.upscale_delay_s
        if step * next_step < 0 and then - at < delay_s and then not in asleep:
            found.append(f"{step:+d} at {at:g} s, {next_step:+d} at {then:g} s")
    return found


def burst(*phases: tuple[float, float], seed: int = 1) -> Arrivals:
    """Independent requests at (seconds, requests per second), in bins of two seconds."""
    rng = random.Random(seed)
    rates = [rate for seconds, rate in phases for _ in range(round(seconds / 2.0))]
    bins = [sum(rng.random() < rate * 2.0 / 200 for _ in range(200)) for rate in rates]
    return Arrivals(
        "burst", tuple(2.0 * i for i in range(len(bins) + 1)), tuple(accumulate(bins, initial=0.0))
    )


def jittery(arrivals: Arrivals, seed: int = 1, bin_s: float = 10.0) -> Arrivals:
    """Independent requests at the recorded rate: a recording of counts per ten minutes has lost its jitter."""
    rng, at_s, counts = random.Random(seed), [0.0], [0.0]
    while at_s[-1] < arrivals.length_s:
        mean = arrivals.rate(at_s[-1]) * bin_s
        at_s.append(at_s[-1] + bin_s)
        counts.append(counts[-1] + max(0, round(rng.gauss(mean, mean**0.5))))
    return Arrivals(arrivals.name, tuple(at_s), tuple(counts))


# --- a burst out of nothing, and back to it --------------------------------------------------------------------

BURST = burst((300, 0), (900, 5), (600, 15), (900, 5), (1800, 0))


def test_a_burst_out_of_nothing_is_served_whole_and_forgotten() -> None:
    world = World(BURST, Goal(1, GOAL)).run(BURST.length_s)
    assert (world.held, world.served) == (0, BURST.counts[-1]), "held, never refused"
    assert world.longest_wait_s <= START_S + 2 * world.tick_s
    assert flaps(world) == []
    assert world.worst_short_s <= GOAL.upscale_delay_s + START_S + 2 * world.tick_s
    sizes = [size for _, size in world.targets]
    assert (sizes[0], sizes[-1], max(sizes)) == (0, 0, 8)
    assert len(sizes) <= 9
    peak = sizes.index(8)
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)


@pytest.mark.long
def test_a_second_burst_finds_it_asleep_and_wakes_it_again() -> None:
    """The recording is played twice: it repeats after its end."""
    world = World(BURST, Goal(1, GOAL)).run(2 * BURST.length_s)
    assert (world.held, world.served) == (0, 2 * BURST.counts[-1])
    zeros = [at for at, size in world.targets if size == 0]
    assert len(zeros) == 3
    assert flaps(world) == []


@pytest.mark.parametrize("rate", [3.9, 4.0, 4.1], ids=str)
def test_a_load_on_the_brink_between_two_sizes_does_not_swing(rate: float) -> None:
    """At four a second, a minute's count is above two replicas' worth half of the time."""
    steady = burst((6 * 3600, rate), seed=7)
    world = World(steady, Goal(1, replace(GOAL, min_replicas=1)), tick_s=5.0).run(steady.length_s)
    assert flaps(world) == []
    assert len(world.targets) <= 6, "a move an hour"
    assert {size for at, size in world.targets if at > 1800} <= {2, 3}


PLACEMENTS = {
    "plain": PlacementGoal(),
    "one more than needed": PlacementGoal(num_overprovision=1),
    "with on-demand stand-ins": PlacementGoal(num_overprovision=1, dynamic_ondemand_fallback=True),
    "one always on demand": PlacementGoal(base_ondemand_fallback_replicas=1, dynamic_ondemand_fallback=True),
}


@pytest.mark.parametrize("placer", sorted(PLACERS))
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_placer_wakes_serves_and_sleeps(placer: str, placement: PlacementGoal) -> None:
    """One request, long ago, held until its replica is ready; then none, and nothing is left."""
    one = Arrivals("one", (0.0, 99.0, 100.0, 9000.0), (0.0, 0.0, 1.0, 1.0))
    world = World(one, Goal(1, GOAL, replace(placement, placer=placer)), tick_s=5.0)
    world.run(95.0)
    assert not world.replicas
    world.run(105.0)
    assert len(world.replicas) >= 1
    assert world.held == 1
    world.run(105.0 + START_S - 5.0)
    assert len(world.replicas) >= 1, "its request has left the window, and waits all the same"
    world.run(105.0 + START_S + 5.0)
    assert (world.held, world.served) == (0, 1)
    world.run(105.0 + START_S + WINDOW_S + GOAL.downscale_delay_s + START_S)
    assert not world.replicas


# --- recordings ------------------------------------------------------------------------------------------------


@pytest.mark.long
@recorded
@pytest.mark.parametrize(
    ("name", "noise", "hours", "tick_s", "moves"),
    [
        pytest.param("AzureLLMInferenceTrace_code.csv.gz", False, 1, 1.0, 12, id="Azure, code: an hour"),
        pytest.param(
            "aibrix_sharegpt_8min.jsonl.gz", False, 1, 1.0, 20, id="AIBrix: up and down in 8 minutes"
        ),
        pytest.param("servegen_deepseek-r1_10min.csv", True, 24, 5.0, 60, id="ServeGen, deepseek-r1: a day"),
        pytest.param("servegen_m-mid_10min.csv", True, 24, 5.0, 60, id="ServeGen, m-mid: a day"),
    ],
)
def test_a_recorded_load_is_followed_without_flapping(
    name: str, noise: bool, hours: int, tick_s: float, moves: int
) -> None:
    """Scaled so that four replicas carry the mean. The load may ask for as much as there is."""
    told = load_arrivals(RECORDED / name)
    told = told.scaled(8.0 / told.mean_rate)
    arrivals = jittery(told) if noise else told
    world = World(arrivals, Goal(1, replace(GOAL, max_replicas=40)), tick_s=tick_s).run(3600.0 * hours)
    assert world.served + world.held == arrivals.count(0.0, world.now)
    assert world.longest_wait_s <= START_S + 2 * world.tick_s
    assert flaps(world) == []
    assert world.worst_short_s <= GOAL.upscale_delay_s + START_S + 2 * world.tick_s
    assert 2 <= len(world.targets) - 1 <= moves


@recorded
def test_accelerators_of_different_rates_follow_a_recorded_load_too() -> None:
    """All offers are of one kind, so the sizes are those of a plain rate."""
    told = load_arrivals(RECORDED / "AzureLLMInferenceTrace_code.csv.gz")
    arrivals = told.scaled(8.0 / told.mean_rate)
    rates = (AcceleratorQps("L4", None, 2.0), AcceleratorQps("H100", None, 9.0))
    plain = World(arrivals, Goal(1, GOAL), tick_s=5.0).run(3300.0)
    mapped = World(arrivals, Goal(1, replace(GOAL, target_qps_by_accelerator=rates)), tick_s=5.0).run(3300.0)
    assert mapped.targets == plain.targets
    assert Counter(r.state for r in mapped.replicas) == Counter(r.state for r in plain.replicas)
