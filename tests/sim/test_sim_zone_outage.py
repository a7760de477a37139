"""All zones shut, then open again: no placer leaves the fleet in a single zone. By the production reconciler."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.goals import PlacementGoal, ScalingGoal
from policies.model import CapacityType, ReplicaState, Zone
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.clouds.schedules import is_long
from tests.kit.fault_cloud import Faults
from tests.kit.life import Life

pytestmark = pytest.mark.long

WANTED = 3
SEEDS = range(20 if is_long else 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fleet_is_in_several_zones_a_minute_after_the_market_is_back(seed: int) -> None:
    life = after_an_outage(seed, "spread")
    for _ in range(200):
        life.run_for(2.0, 2.0)
        where = spot_zones(life)
        assert where.total() < WANTED or len(where) > 1, where
    assert spot_zones(life).total() == WANTED
    assert all(replica.state is ReplicaState.READY for replica in life.row("chat").replicas)
    settled = life.store.commits
    life.run_for(60.0, 2.0)
    assert life.store.commits == settled, "a fleet in an unchanged market comes to rest"


@pytest.mark.parametrize("placer", ["spothedge", "risk_hedge"])
@pytest.mark.parametrize("seed", SEEDS)
def test_hedged_fleets_return_to_several_zones(seed: int, placer: str) -> None:
    """On-demand replicas stand in until then, so there is time to look for a second zone."""
    life = after_an_outage(seed, placer)
    for _ in range(450):
        life.run_for(2.0, 2.0)
        where = spot_zones(life)
        assert where.total() < WANTED or len(where) > 1, where
    assert spot_zones(life).total() >= WANTED, "and all of them return"


def after_an_outage(seed: int, placer: str) -> Life:
    """A service that was brought up while all zones were shut, a minute after all have opened."""
    life = Life(seed, Faults(slow_call_s=1.0), zones=6)
    for place in life.cloud.zones:
        place.spot_capacity = 0
    life.put(
        ServiceSpec(
            name="chat",
            run="serve",
            probe=Probe(path="/health", initial_delay_s=60.0, failure_threshold_s=30.0),
            scaling=ScalingGoal(WANTED, WANTED),
            placement=PlacementGoal(placer),
            resources=(ResourceChoice(cloud="sim", use_spot=True),),
        )
    )
    life.run_for(life.rng.uniform(60.0, 600.0), 2.0)
    assert not spot_zones(life)
    for place in life.cloud.zones:
        place.spot_usd_hour = 0.3
        place.spot_capacity = 4
    life.run_for(60.0, 2.0)
    return life


def spot_zones(life: Life) -> Counter[Zone]:
    offers = (one.order.offer for one in life.cloud.alive())
    return Counter(offer.zone for offer in offers if offer.capacity_type is CapacityType.SPOT)
