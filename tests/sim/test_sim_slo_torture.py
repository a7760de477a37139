"""Services with an SLO under a hostile simulated cloud. `benchmarks/torture.py --slo` runs more."""

from __future__ import annotations

from functools import partial

import pytest

from policies.goals import ScalingGoal
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec, SloSpec
from tests.clouds.schedules import seeds
from tests.kit.fault_cloud import Faults
from tests.kit.invariants import InvariantError
from tests.kit.life import run_seed
from tests.kit.slo_life import CAPACITY_QPS, SloLife

SPEC = ServiceSpec(
    name="chat",
    run="serve",
    probe=Probe(path="/health", initial_delay_s=120.0, failure_threshold_s=30.0),
    scaling=ScalingGoal(1, 8),
    drain_timeout_s=5.0,
    resources=(ResourceChoice(cloud="sim", use_spot=True),),
    slo=SloSpec(2000.0, None, 0.99, CAPACITY_QPS),
)
lived = partial(run_seed, life=SloLife, busy_s=900.0)


@seeds(4)
def test_every_invariant_holds_through_a_life_of_trouble(seed: int) -> None:
    outcome = lived(seed)
    assert outcome.launches > 0
    assert outcome.crashes > 0


@pytest.mark.long
def test_the_same_seed_tells_the_same_story() -> None:
    assert lived(7).digest == lived(7).digest


def scripted(crash: float, deaths: tuple[str, ...]) -> SloLife:
    """Demand of 5 requests per second, a doubling, and an end, each for as long as it takes to follow."""
    life = SloLife(3, Faults(slow_call_s=3.0, crash=crash))
    life.deaths = deaths
    for place in life.cloud.zones:
        place.spot_capacity = 10
    life.put(SPEC)
    for qps in (5.0, 10.0, 0.0):
        life.agents.requests_per_s["chat"] = qps
        life.run_for(900.0, 2.0)
    return life


@pytest.mark.long
def test_a_controller_that_dies_at_every_point_launches_what_one_left_alone_does() -> None:
    undisturbed = scripted(0.0, SloLife.deaths)
    assert undisturbed.crashes == 0
    for death in ("between ticks", "after demand", "before commit", "after commit"):
        disturbed = scripted(0.3, (death,))
        assert disturbed.crashes > 10
        assert len(disturbed.cloud.made) == len(undisturbed.cloud.made), death
        assert disturbed.row("chat").target == undisturbed.row("chat").target == 1


def test_a_fleet_too_small_for_its_demand_is_not_at_rest() -> None:
    life = SloLife(3, Faults())
    life.make_user()  # brings a service up
    life.run_for(600.0, 5.0)
    life.agents.requests_per_s["chat"] = 0.5
    life.run_for(600.0, 5.0)
    life.at_rest()
    life.agents.requests_per_s["chat"] = 9.0
    with pytest.raises(InvariantError, match=r"for 9\.00 requests per second"):
        life.at_rest()
