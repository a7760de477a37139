"""Sizes where every accelerator carries its own rate."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.goals import AcceleratorQps, Goal, ScalingGoal
from policies.history import Load
from policies.model import CapacityType, Observation, Offer, Replica, ReplicaState, Zone
from policies.scaling.accelerator_rate import AcceleratorRate
from policies.throughput import qps_of

MAP = (AcceleratorQps("L4", None, 1.0), AcceleratorQps("A100", 1.0, 4.0), AcceleratorQps("h100", 8.0, 50.0))
GOAL = ScalingGoal(1, 40, 1.0, upscale_delay_s=300.0, downscale_delay_s=1200.0, target_qps_by_accelerator=MAP)
RATES = {"L": 1.0, "A": 4.0}
NAMES = {"L": "L4", "A": "A100"}


def an_offer(kind: str, count: float = 1.0) -> Offer:
    name = NAMES.get(kind, kind)
    return Offer(Zone("c", "r", f"r-{kind}"), "i", name, count, CapacityType.SPOT, 1.0)


def fleet(kinds: str, state: ReplicaState = ReplicaState.READY) -> tuple[Replica, ...]:
    return tuple(Replica(i, 1, an_offer(kind), state, 0.0, 0.0) for i, kind in enumerate(kinds, 1))


@dataclass
class Scaled:
    best: str = "A"  # the kind of the best offer
    goal: ScalingGoal = GOAL
    memory: dict[str, Any] = field(default_factory=dict)
    now: float = 1000.0

    def see(self, after_s: float, replicas: str | tuple[Replica, ...], qps: float | None) -> int:
        self.now += after_s
        live = fleet(replicas) if isinstance(replicas, str) else replicas
        load = Load() if qps is None else Load(60.0, round(qps * 60.0), known=True)
        offers = (an_offer(self.best),) if self.best else ()
        size = AcceleratorRate().target(
            Observation(self.now, Goal(1, self.goal), live, offers, load), self.memory
        )
        self.memory = json.loads(json.dumps(size.memory))
        return size.wanted

    def settled(self, replicas: str | tuple[Replica, ...], qps: float) -> int:
        """The target that a load of this long standing leads to, if the fleet does not change."""
        self.see(0.0, replicas, qps)
        return self.see(2000.0, replicas, qps)


@pytest.mark.parametrize(
    ("name", "count", "qps"),
    [
        ("L4", 1.0, 1.0),
        ("L4", 4.0, 1.0),
        ("l4", 1.0, 1.0),
        ("A100", 1.0, 4.0),
        ("A100", 2.0, 1.0),
        ("H100", 8.0, 50.0),
        ("T4", 1.0, 1.0),
        (None, 0.0, 1.0),
    ],
    ids=[
        "as written",
        "any count, where none is given",
        "in another case",
        "the count that is given",
        "another count: the smallest value",
        "written in another case",
        "unknown: the smallest value",
        "no accelerator: the smallest value",
    ],
)
def test_what_a_replica_carries(name: str | None, count: float, qps: float) -> None:
    assert qps_of(replace(an_offer("x", count), accelerator=name), GOAL.target_qps_by_accelerator) == qps


def test_the_exact_count_goes_before_any_count() -> None:
    both = (AcceleratorQps("L4", None, 1.0), AcceleratorQps("L4", 2.0, 1.5))
    goal = replace(GOAL, target_qps_by_accelerator=both)
    assert [qps_of(an_offer("L", count), goal.target_qps_by_accelerator) for count in (1.0, 2.0, 4.0)] == [
        1.0,
        1.5,
        1.0,
    ]


@pytest.mark.parametrize(
    ("live", "best", "qps", "size"),
    [
        pytest.param("", "A", 8.0, 2, id="nothing lives: at the rate of the best offer"),
        pytest.param("", "L", 8.0, 8, id="the best offer is a slow one"),
        pytest.param("", "", 8.0, 8, id="no offer: at the smallest rate"),
        pytest.param("LL", "A", 8.0, 4, id="what lives, and new ones"),
        pytest.param("A", "L", 8.0, 5, id="what lives, and slow new ones"),
        pytest.param("LA", "A", 5.0, 2, id="just enough"),
        pytest.param("LA", "A", 5.1, 3, id="a little more"),
        pytest.param("LLLLLLLLLLLL", "A", 3.0, 3, id="too many of one kind"),
        pytest.param("", "A", 1e6, 40, id="the maximum"),
        pytest.param("AAA", "A", 0.0, 1, id="the minimum"),
    ],
)
def test_a_lasting_rate_leads_to_the_smallest_number_that_carries_it(
    live: str, best: str, qps: float, size: int
) -> None:
    scaled = Scaled(best, memory={"target": len(live), "carries": qps})
    assert scaled.settled(live, qps) == size


@pytest.mark.parametrize(
    ("target", "qps", "size"),
    [
        pytest.param(3, 6.0, 3, id="three carry six only if fast ones stay: left as it is"),
        pytest.param(7, 6.0, 5, id="any five carry six"),
        pytest.param(7, 3.0, 3, id="any three carry three"),
        pytest.param(1, 6.0, 2, id="the fastest two carry six"),
        pytest.param(1, 12.0, 3, id="the fastest three carry twelve"),
        pytest.param(1, 13.0, 4, id="and no more"),
    ],
)
def test_among_many_it_rises_as_the_fastest_and_sinks_as_the_slowest_demand(
    target: int, qps: float, size: int
) -> None:
    """The fleet: four that carry 1, three that carry 4."""
    assert Scaled(memory={"target": target}).settled("LLLLAAA", qps) == size


def test_a_slow_stand_in_for_a_fast_replica_is_made_up_for_at_once() -> None:
    scaled = Scaled()
    assert scaled.settled("", 8.0) == 2
    assert scaled.see(1.0, "AA", 8.0) == 2
    assert scaled.see(1.0, "A", 8.0) == 2, "one is lost: a new one will be as fast"
    assert scaled.see(1.0, "AL", 8.0) == 3, "it is not"
    assert scaled.see(1.0, "ALL", 8.0) == 4
    scaled.best = "L"
    assert scaled.see(1.0, "ALL", 8.0) == 5
    assert scaled.see(1.0, "ALLLL", 8.0) == 5
    assert scaled.see(1.0, "ALLLL", None) == 5, "nor is it forgotten without a report"


def test_only_what_had_been_waited_for_is_made_up_for() -> None:
    scaled = Scaled()
    assert scaled.settled("", 8.0) == 2
    assert scaled.see(1.0, "AL", 40.0) == 3, "the debt is eight, not forty"


def test_without_a_report_it_holds() -> None:
    assert Scaled(memory={"target": 6, "carries": 0.0}).see(1.0, "AA", None) == 6


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.TERMINATING], ids=str)
def test_what_goes_carries_nothing(state: ReplicaState) -> None:
    assert Scaled().settled((*fleet("L"), *fleet("AA", state)), 5.0) == 2


def test_the_memory_of_plain_rates_is_a_start() -> None:
    scaled = Scaled(memory={"target": 3})
    assert scaled.see(0.0, "AAA", 12.0) == 3
    assert scaled.memory == {"target": 3, "carries": 12.0}


kinds = st.text(st.sampled_from("LA"), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    kinds,
    st.sampled_from("LA"),
    st.lists(st.sampled_from("LA"), min_size=1, max_size=9),
    st.integers(0, 20),
    st.randoms(),
)
def test_whatever_a_launch_gets_and_whoever_stays_the_load_is_carried_in_the_end(
    start: str, best: str, luck: list[str], qps: int, rng: Any
) -> None:
    """Launches get what there is, not what was best; of too many, any may be let go."""
    scaled, live, quiet = Scaled(best), start, 0
    for step in range(200):
        size = scaled.see(300.0, live, float(qps))
        if len(live) < size:
            live += luck[step % len(luck)]
        elif len(live) > size:
            gone = rng.randrange(len(live))
            live = live[:gone] + live[gone + 1 :]
        else:
            quiet += 1
    carried = sum(RATES[kind] for kind in live)
    assert carried >= qps
    assert quiet > 100, "and then the fleet rests"
    slowest = sorted(RATES[kind] for kind in live)
    assert len(live) == 1 or sum(slowest[:-1]) < qps, "none is too many"
