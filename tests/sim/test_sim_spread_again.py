"""A fleet that was launched while one zone had room: it is spread later, and serves throughout. By the production
reconciler."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.goals import PlacementGoal, ScalingGoal
from policies.model import CapacityType, ReplicaState, Zone
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.kit.fault_cloud import Faults
from tests.kit.life import Life

pytestmark = pytest.mark.long

WANTED = 3
AFTER_S, TICK_S = 300.0, 5.0


@pytest.mark.parametrize("seed", range(10))
def test_a_fleet_in_one_zone_is_spread_without_a_gap(seed: int) -> None:
    life, full = gathered(seed, AFTER_S)
    most, surged_s = WANTED, 0.0
    for _ in range(int(4 * AFTER_S / TICK_S)):
        life.run_for(TICK_S, TICK_S)
        assert ready(life) >= WANTED
        alive = where(life).total()
        most, surged_s = max(most, alive), surged_s + TICK_S * (alive > WANTED)
    assert most == WANTED + 1, "one at a time"
    assert surged_s < 120.0, "the surge costs one replica for one start and one drain"
    assert sorted(where(life).values()) == [1, 2]
    assert where(life)[full] == 2

    settled = {replica.id for replica in life.row("chat").replicas}
    life.run_for(4 * AFTER_S, TICK_S)
    assert {replica.id for replica in life.row("chat").replicas} == settled, "no replica is moved back"


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_stays_where_it_is_if_it_is_turned_off(seed: int) -> None:
    life, full = gathered(seed, 0.0)
    life.run_for(4 * AFTER_S, TICK_S)
    assert where(life) == {full: WANTED}


def gathered(seed: int, after_s: float) -> tuple[Life, Zone]:
    """A service whose replicas are all in one zone, and this zone. The others have opened since."""
    life = Life(seed, Faults(slow_call_s=1.0), zones=4)
    chosen, *others = life.rng.sample(life.cloud.zones, 4)
    for place in life.cloud.zones:
        place.spot_usd_hour, place.spot_capacity = 0.3, 0
    chosen.spot_capacity = 9
    life.put(
        ServiceSpec(
            name="chat",
            run="serve",
            probe=Probe(path="/health", initial_delay_s=60.0, failure_threshold_s=30.0),
            scaling=ScalingGoal(WANTED, WANTED),
            placement=PlacementGoal(spread_again_after_s=after_s),
            resources=(ResourceChoice(cloud="sim", use_spot=True),),
        )
    )
    for _ in range(60):
        life.run_for(TICK_S, TICK_S)
        if ready(life) == WANTED:
            break
    (full,) = where(life)
    assert ready(life) == WANTED
    for place in others:
        place.spot_capacity = 9
    return life, full


def ready(life: Life) -> int:
    return sum(replica.state is ReplicaState.READY for replica in life.row("chat").replicas)


def where(life: Life) -> Counter[Zone]:
    offers = (one.order.offer for one in life.cloud.alive())
    return Counter(offer.zone for offer in offers if offer.capacity_type is CapacityType.SPOT)
