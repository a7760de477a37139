"""Programs that crash again and again on machines that are rented: what they launch and cost within half an hour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from policies.goals import ScalingGoal, UpdateMode
from policies.model import ReplicaState
from policies.service_state import ServiceState, service_state
from provisioners.port.base import Instance, InstanceState, LaunchOrder
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.spec.model import Probe, ResourceChoice, ServiceSpec
from tests.kit.fault_cloud import NEVER, Faults, SimCloud, SimInstance
from tests.kit.life import HOSTILE, Life, run_seed

BOOT_S, SETUP_S, LOAD_S = 45.0, 30.0, 25.0  # until `run`, and from there until it is ready
HALF_HOUR_S = 1800.0
MOST_LAUNCHES = 8


class Crashing(NamedTuple):
    """A program of which each process ends `after_s` seconds after it was started, with a message of its host."""

    message: str
    after_s: float


BEFORE_S, AFTER_S = 5.0, LOAD_S + 20.0
TRACEBACK = "`run` ended with exit code 1: ModuleNotFoundError: No module named 'vllm'"
OOM = "`run` ended by signal SIGKILL (out of memory?): loading weights"
KINDS = {
    "exit 0 before it is ready": Crashing("`run` ended with exit code 0: started", BEFORE_S),
    "exit 0 when it is ready": Crashing("`run` ended with exit code 0: started", AFTER_S),
    "exit 1 before it is ready": Crashing("`run` ended with exit code 1: no weights", BEFORE_S),
    "exit 1 when it is ready": Crashing("`run` ended with exit code 1: no weights", AFTER_S),
    "exit 137 before it is ready": Crashing("`run` ended with exit code 137: Killed", BEFORE_S),
    "exit 137 when it is ready": Crashing("`run` ended with exit code 137: Killed", AFTER_S),
    "an import error": Crashing(TRACEBACK, 1.0),
    "out of memory": Crashing(OOM, AFTER_S),
}


@dataclass(slots=True)
class CrashingCloud(SimCloud):
    """Machines take the time of real ones, and the programs named in `crashes`, by their `run`, crash."""

    crashes: dict[str, Crashing] | None = None

    def _make(self, order: LaunchOrder) -> SimInstance:
        made = SimCloud._make(self, order)
        made.boot_at = self.clock.now() + BOOT_S
        made.run_at = made.boot_at + SETUP_S
        made.healthy_at = made.run_at + LOAD_S
        made.exits_at = NEVER
        crash = (self.crashes or {}).get(order.run)
        if crash is not None:
            made.exits_at = made.run_at + crash.after_s
        return made

    def _shown(self, one: SimInstance) -> Instance:
        shown = SimCloud._shown(self, one)
        crash = (self.crashes or {}).get(one.order.run)
        is_over = shown.state is InstanceState.RUN_EXITED and crash is not None
        return replace(shown, message=crash.message) if is_over and crash is not None else shown


def world(**crashes: Crashing) -> Life:
    """A calm cloud; programs crash by the name of their `run`."""
    life = Life(1, Faults(slow_call_s=1.0))
    for zone in life.cloud.zones:
        zone.spot_capacity = 50
    life.cloud = CrashingCloud(
        life.clock, life.rng, life.cloud.zones, Faults(slow_call_s=1.0), crashes=crashes
    )
    life.start_controller()
    life.invariants._cloud = life.cloud
    return life


def spec(run: str, replicas: int) -> ServiceSpec:
    return ServiceSpec(
        name="chat",
        run=run,
        probe=Probe(path="/health", initial_delay_s=300.0, failure_threshold_s=60.0),
        scaling=ScalingGoal(replicas, replicas),
        drain_timeout_s=30.0,
        resources=(ResourceChoice(cloud="sim", use_spot=False),),
    )


def state(life: Life) -> ServiceState:
    row = life.row("chat")
    goal = goal_of(row, life.specs.get(row.name, row.version))
    return service_state(goal, row.replicas, row.target, row.memory.rollout, life.clock.now())


def ready(life: Life) -> list[int]:
    return [r.version for r in life.row("chat").replicas if r.state is ReplicaState.READY]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_loop_is_short_and_named(kind: str, replicas: int) -> None:
    life = world(serve=KINDS[kind])
    life.put(spec("serve", replicas))
    life.run_for(HALF_HOUR_S, 1.0)
    row = life.row("chat")
    print(
        f"{kind}, {replicas} replicas: {len(life.cloud.made)} launches, {life.cloud.ledger_usd():.3f} USD: {row.notes}"
    )
    assert len(life.cloud.made) <= MOST_LAUNCHES
    assert state(life) is ServiceState.FAILED
    assert row.notes.startswith("version 1 has failed: ")
    assert KINDS[kind].message in row.notes
    assert row.notes.endswith("; update the service")
    assert not life.cloud.alive()


def test_an_update_that_crashes_goes_back_to_the_version_that_works() -> None:
    life = world(broken=KINDS["exit 1 when it is ready"])
    life.put(spec("serve", 3))
    life.run_for(400.0, 1.0)
    assert ready(life) == [1, 1, 1]
    life.put(spec("broken", 3), UpdateMode.ROLLING)
    least = 3
    for _ in range(180):
        life.run_for(10.0, 1.0)
        least = min(least, len(ready(life)))
    print(f"{len(life.cloud.made)} launches, {life.cloud.ledger_usd():.3f} USD")
    assert ready(life) == [1, 1, 1]
    assert least >= 2
    assert len(life.cloud.made) - 3 <= MOST_LAUNCHES


def test_a_crash_loop_beside_replicas_that_are_well_stays_in_trial() -> None:
    """Two of three replicas serve. The machines that come after them are of no use, until others are."""
    life = world(serve=KINDS["exit 137 when it is ready"])
    assert isinstance(life.cloud, CrashingCloud)
    crashes, life.cloud.crashes = life.cloud.crashes, {}
    life.put(spec("serve", 3))
    life.run_for(400.0, 1.0)
    victim = life.row("chat").replicas[0]
    assert victim.instance_id is not None
    life.cloud.crashes = crashes
    life.store.kill_replica("chat", victim.id, now=life.clock.now())
    life.run_for(HALF_HOUR_S, 1.0)
    row = life.row("chat")
    print(f"{len(life.cloud.made)} launches, {life.cloud.ledger_usd():.3f} USD: {row.notes}")
    assert len(life.cloud.made) - 3 <= MOST_LAUNCHES
    assert state(life) is ServiceState.READY
    assert ready(life).count(1) >= 2
    assert "lives in a row shorter than 100 s; the last: `run` ended with exit code 137" in row.notes
    assert row.notes.startswith("version 1 crashes: ")
    life.cloud.crashes = {}
    life.run_for(900.0, 1.0)
    assert ready(life) == [1, 1, 1]
    assert life.row("chat").notes == ""


def test_crashes_after_long_lives_end_after_ten() -> None:
    life = world(serve=Crashing("`run` ended with exit code 1: leak", LOAD_S + 110.0))
    life.put(spec("serve", 1))
    life.run_for(3600.0, 1.0)
    print(f"{len(life.cloud.made)} launches, {life.cloud.ledger_usd():.3f} USD: {life.row('chat').notes}")
    assert state(life) is ServiceState.FAILED
    assert len(life.cloud.made) == 10
    assert life.row("chat").notes.startswith("version 1 has failed: 10 crashes within an hour; the last: ")


@pytest.mark.parametrize("seed", range(4))
def test_every_invariant_holds_where_most_programs_crash(seed: int) -> None:
    outcome = run_seed(seed, replace(HOSTILE, run_exit=0.9))
    assert outcome.launches > 0
