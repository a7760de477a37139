"""The production controller under a hostile simulated cloud. `benchmarks/torture.py` runs thousands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lb.config.schema import Readiness
from policies.goals import ScalingGoal, UpdateMode
from policies.model import ReplicaState
from skyserve_cli.controller.reconcile import reconciler
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.clouds.schedules import is_long, seeds
from tests.kit.fault_cloud import Faults
from tests.kit.life import Life, run_seed
from tests.kit.sim_ports import Crash

CALM = Faults(slow_call_s=1.0)


def spec(*, replicas: int = 4, run: str = "serve", name: str = "chat") -> ServiceSpec:
    return ServiceSpec(
        name=name,
        run=run,
        probe=Probe(path="/health", initial_delay_s=120.0, failure_threshold_s=30.0),
        scaling=ScalingGoal(replicas, replicas),
        drain_timeout_s=30.0,
        resources=(ResourceChoice(cloud="sim", use_spot=True),),
    )


def ready(life: Life, name: str = "chat") -> int:
    return sum(replica.state is ReplicaState.READY for replica in life.row(name).replicas)


def tick_until_it_dies(life: Life) -> None:
    for _ in range(10):
        life.reconciler.tick()
        life.clock.advance(life.clock.now() + 1.0)


def settle(life: Life, count: int) -> None:
    for _ in range(400):
        if ready(life) == count and len(life.row("chat").replicas) == count:
            return
        life.run_for(2.0, 2.0)
    pytest.fail(f"{ready(life)} of {count} ready: {life.row('chat').replicas}")


@seeds(20 if is_long else 10)
def test_every_invariant_holds_through_a_life_of_trouble(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.launches > 0


@pytest.mark.long
def test_the_same_seed_tells_the_same_story_under_any_hash_seed() -> None:
    def digest(hash_seed: str) -> str:
        code = "from tests.kit.life import run_seed; print(run_seed(7, busy_s=200.0).digest)"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert digest("1") == digest("1") == digest("2") != ""


@pytest.mark.long
def test_different_seeds_tell_different_stories() -> None:
    assert run_seed(7, busy_s=100.0).digest != run_seed(8, busy_s=100.0).digest


class TestCrashes:
    """A controller that keeps being killed makes exactly the launches of one that is left alone."""

    def scripted(self, crash: float) -> Life:
        life = Life(3, Faults(slow_call_s=3.0, crash=crash))
        for place in life.cloud.zones:
            place.spot_capacity = 10
        life.put(spec())
        settle(life, 4)
        life.put(spec(run="serve --new"), UpdateMode.ROLLING)
        life.run_for(20.0, 1.0)
        settle(life, 4)
        life.put(spec(run="serve --newer"), UpdateMode.BLUE_GREEN)
        life.run_for(20.0, 1.0)
        settle(life, 4)
        life.store.set_down("chat", purge=False, now=life.clock.now())
        life.run_for(200.0, 2.0)
        return life

    def test_with_and_without_crashes_the_same_machines_are_made(self) -> None:
        undisturbed, disturbed = self.scripted(0.0), self.scripted(0.3)
        assert disturbed.crashes > 20
        assert len(undisturbed.cloud.made) == len(disturbed.cloud.made) == 12
        assert not undisturbed.cloud.alive()
        assert not disturbed.cloud.alive()

    @pytest.mark.parametrize("where", ["before commit", "after commit", "before calls"])
    def test_a_crash_at_the_first_launch_makes_no_second_machine(self, where: str) -> None:
        life = Life(5, CALM)
        life.put(spec(replicas=1))
        life.store.crash_before_commit = where == "before commit"
        life.store.crash_after_commit = where == "after commit"
        life.runner.crash_before_calls = where == "before calls"
        with pytest.raises(Crash):
            tick_until_it_dies(life)
        life.store.crash_before_commit = life.store.crash_after_commit = False
        life.start_controller()
        settle(life, 1)
        assert len(life.cloud.made) == 1
        assert [replica.id for replica in life.row("chat").replicas] == [1]

    def test_an_answer_lost_with_the_controller_is_not_asked_for_twice(self) -> None:
        life = Life(5, CALM)
        life.put(spec(replicas=2))
        life.tick()
        life.clock.advance(
            life.clock.now() + 60.0
        )  # both calls reached the cloud, and their responses were lost
        life.runner.dead = life.instance_poller.dead = life.fleet.dead = True
        assert len(life.cloud.made) == 2
        life.start_controller()
        settle(life, 2)
        assert len(life.cloud.made) == 2


class TestPreemption:
    def test_a_notice_starts_the_replacement_before_the_end(self) -> None:
        life = Life(11, CALM)
        life.put(spec(replicas=2))
        settle(life, 2)
        victim = life.row("chat").replicas[0]
        assert victim.instance_id is not None
        life.cloud.preempt(victim.instance_id, notice_s=120.0)
        life.run_for(10.0, 1.0)
        states = {replica.id: replica.state for replica in life.row("chat").replicas}
        assert states[victim.id] is ReplicaState.READY, "it serves on"
        assert max(states) == 3
        life.run_for(85.0, 1.0)
        states = {replica.id: replica.state for replica in life.row("chat").replicas}
        assert states.get(victim.id) in (ReplicaState.DRAINING, ReplicaState.TERMINATING, None)
        settle(life, 2)

    def test_the_replacement_avoids_the_zone_that_was_lost(self) -> None:
        life = Life(12, CALM)
        for place in life.cloud.zones:
            place.spot_capacity = 10
        life.put(spec(replicas=1))
        settle(life, 1)
        lost = life.row("chat").replicas[0]
        assert lost.instance_id is not None
        life.cloud.preempt(lost.instance_id)
        life.run_for(8.0, 1.0)
        assert [r.zone for r in life.row("chat").replicas if r.id == 2] != [lost.zone]


def test_updates_never_leave_fewer_ready_than_wanted() -> None:
    for mode in UpdateMode:
        life = Life(21, CALM)
        for place in life.cloud.zones:
            place.spot_capacity = 20
        life.put(spec(replicas=4))
        settle(life, 4)
        life.put(spec(replicas=4, run="serve --new"), mode)
        seen = []
        for _ in range(300):
            life.run_for(1.0, 1.0)
            seen.append(ready(life))
            if all(r.version == 2 for r in life.row("chat").replicas):
                break
        assert min(seen) >= 4, (mode, seen)
        assert all(replica.version == 2 for replica in life.row("chat").replicas)


def test_a_blue_green_update_that_is_overtaken_never_mixes_fleets() -> None:
    life = Life(22, CALM)
    for place in life.cloud.zones:
        place.spot_capacity = 20
    life.put(spec(replicas=3))
    settle(life, 3)
    life.put(spec(replicas=3, run="serve --second"), UpdateMode.BLUE_GREEN)
    while not any(r.version == 2 and r.state is ReplicaState.READY for r in life.row("chat").replicas):
        life.run_for(0.5, 0.5)
    life.put(spec(replicas=3, run="serve --third"), UpdateMode.BLUE_GREEN)
    for _ in range(300):
        life.run_for(1.0, 1.0)
        versions = {replica.id: replica.version for replica in life.row("chat").replicas}
        targets = life.agents.tables["chat"].targets
        serving = {
            versions[int(t.id)] for t in targets if t.state is Readiness.READY and int(t.id) in versions
        }
        assert serving in ({1}, {3}, set()), serving
        if set(versions.values()) == {3}:
            return
    pytest.fail("the third version never took over")


def test_a_version_that_cannot_start_leaves_the_old_one_serving_and_says_so() -> None:
    life = Life(31, CALM)
    for place in life.cloud.zones:
        place.spot_capacity = 20
    life.put(spec(replicas=3))
    settle(life, 3)
    life.cloud.faults = Faults(setup_failure=1.0)
    life.put(spec(replicas=3, run="serve --broken"), UpdateMode.ROLLING)
    life.run_for(400.0, 2.0)
    row = life.row("chat")
    assert row.memory.rollout["failed"] == [2]
    assert [replica.version for replica in row.replicas if replica.state is ReplicaState.READY] == [1, 1, 1]
    # And what is lost afterwards is replaced by the version that works.
    life.cloud.faults = CALM
    victim = row.replicas[0]
    assert victim.instance_id is not None
    life.cloud.preempt(victim.instance_id)
    settle(life, 3)
    life.run_for(200.0, 2.0)
    assert {replica.version for replica in life.row("chat").replicas} == {1}


def test_an_instance_without_a_row_is_ended() -> None:
    life = Life(41, CALM)
    life.put(spec(replicas=1))
    settle(life, 1)
    order = next(iter(life.cloud.made.values())).order
    orphan = type(order)(
        **{**{f: getattr(order, f) for f in order.__slots__}, "token": "left-behind", "replica_id": 99}
    )
    life.cloud.launch(orphan)
    life.run_for(60.0, 2.0)
    assert [one.order.token for one in life.cloud.alive()] == [order.token]


@pytest.mark.parametrize("seed", range(100, 104))
def test_every_invariant_holds_where_each_service_is_decided_about_for_itself(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large ones are."""
    monkeypatch.setattr(reconciler, "LARGE", 1)
    assert run_seed(seed).launches > 0
