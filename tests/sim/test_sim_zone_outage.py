"""All zones shut, then open again: a spread fleet is never left in a single zone, by the production reconciler."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.model import ReplicaState, Zone
from skyserve_cli.sim.torture import Life
from skyserve_cli.sim.world import Faults
from skyserve_cli.spec.model import Probe, ReplicaPolicy, ResourceChoice, ServiceSpec

WANTED = 3


@pytest.mark.parametrize("seed", range(20))
def test_a_fleet_is_in_several_zones_a_minute_after_the_market_is_back(seed: int) -> None:
    life = Life(seed, Faults(slow_call_s=1.0), zones=6)
    for place in life.cloud.zones:
        place.spot_capacity = 0
    life.put(
        ServiceSpec(
            name="chat",
            run="serve",
            probe=Probe(path="/health", initial_delay_s=60.0, failure_threshold_s=30.0),
            replica_policy=ReplicaPolicy(WANTED, WANTED),
            resources=(ResourceChoice(cloud="sim", use_spot=True),),
        )
    )
    life.run_for(life.rng.uniform(60.0, 600.0), 2.0)
    assert not zones(life)
    for place in life.cloud.zones:
        place.spot_usd_hour = 0.3
        place.spot_capacity = 4
    life.run_for(60.0, 2.0)
    for _ in range(200):
        life.run_for(2.0, 2.0)
        where = zones(life)
        assert where.total() < WANTED or len(where) > 1, where
    assert zones(life).total() == WANTED
    assert all(replica.state is ReplicaState.READY for replica in life.row("chat").replicas)
    settled = life.store.commits
    life.run_for(60.0, 2.0)
    assert life.store.commits == settled, "a fleet in an unchanged market comes to rest"


def zones(life: Life) -> Counter[Zone]:
    return Counter(one.order.offer.zone for one in life.cloud.alive())
