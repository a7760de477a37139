"""A region that goes silent and comes back: what runs there is kept, nothing is launched twice, and the rest goes on."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from policies.goals import ScalingGoal
from policies.model import ReplicaState
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.clouds.schedules import seeds
from tests.kit.fault_cloud import Faults
from tests.kit.life import HOSTILE, Life

SPEC = ServiceSpec(
    name="chat",
    run="serve",
    probe=Probe(path="/health", initial_delay_s=120.0, failure_threshold_s=30.0),
    scaling=ScalingGoal(4, 4),
    drain_timeout_s=30.0,
    resources=(ResourceChoice(cloud="sim", use_spot=False),),
)


def running(faults: Faults, seed: int, *, spot: bool = False) -> Life:
    life = Life(seed, faults)
    life.put(replace(SPEC, resources=(replace(SPEC.resources[0], use_spot=spot),)))
    life.run_for(400.0, 2.0)
    return life


@seeds(5)
def test_what_runs_in_a_silent_region_is_kept_and_not_doubled(seed: int) -> None:
    life = running(Faults(slow_call_s=1.0), seed)
    before = {one.order.token for one in life.cloud.alive()}
    there = {one.order.offer.zone.region for one in life.cloud.alive()}
    assert len(before) == 4
    life.cloud.mute = {min(there)}
    life.run_for(900.0, 2.0)
    assert {one.order.token for one in life.cloud.alive()} == before
    life.cloud.mute = set()
    life.run_for(300.0, 2.0)
    assert {one.order.token for one in life.cloud.alive()} == before
    assert len(life.cloud.made) == 4
    assert all(one.state is ReplicaState.READY for one in life.row("chat").replicas)


def test_losses_in_the_other_regions_are_seen_meanwhile() -> None:
    life = running(Faults(slow_call_s=1.0), 3, spot=True)
    alive = life.cloud.alive()
    mute = min(one.order.offer.zone.region for one in alive)
    life.cloud.mute = {mute}
    victim = next(one for one in alive if one.order.offer.zone.region != mute)
    victim.terminated_at = life.clock.now()
    life.run_for(300.0, 2.0)
    living = life.cloud.alive()
    assert len(living) == 4
    assert victim not in living
    assert {one.order.token for one in alive if one is not victim} <= {one.order.token for one in living}


@seeds(10)
def test_every_invariant_holds_while_regions_come_and_go(seed: int) -> None:
    """The hostile cloud and the controller that crashes, and on top of it a region that is silent for a while."""
    life = running(HOSTILE, seed)
    rng = Random(f"{seed} silence")
    for _ in range(8):
        life.cloud.mute = {rng.choice(["r0", "r1"])} if rng.random() < 0.7 else set()
        life.run_for(rng.uniform(20.0, 120.0), 2.0)
    life.cloud.mute = set()
    life.cloud.calm()
    life.run_for(1500.0, 5.0)
    life.invariants.at_rest(life.store.services(down=True), life.specs)
    life.invariants.bill()
