"""A service's life under a hostile cloud, a restless user and a controller that keeps being killed, by seed.

run_seed(17)            one life; raises InvariantError
python -m tests.kit.life 0 2000
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from policies.goals import AgentRegion, PlacementGoal, ScalingGoal, UpdateMode
from policies.model import Zone
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.reconcile.inputs import BalancerPorts, ReplicaPorts
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import (
    Probe,
    RegionalAgents,
    ResourceChoice,
    ServiceSpec,
    UpdateSpec,
)
from skyserve_cli.spec.placement import placement_of
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import Commit, ServiceExistsError, ServiceRow
from tests.kit.clock import SimClock
from tests.kit.fault_cloud import Faults, SimCloud, SimZone
from tests.kit.invariants import InvariantError, Invariants
from tests.kit.sim_ports import (
    Crash,
    SimAgents,
    SimFleet,
    SimInstancePoller,
    SimOffers,
    SimOperationRunner,
    SimProber,
    SimRegional,
)

_BASELINES = ("even_spread", "round_robin", "asg", "spothedge_literal")
_KEY = b"c2ltdWxhdGVkLXNpbXVsYXRlZC1zaW11bGF0ZWQtLSE="

HOSTILE = Faults(
    transient=0.1,
    lost_answer=0.05,
    quota=0.02,
    auth=0.005,
    setup_failure=0.05,
    run_exit=0.05,
    spot_life_s=400.0,
    notice=0.5,
    notice_s=30.0,
    one_node=0.6,
    dry_s=60.0,
    slow_call_s=2.0,
    crash=0.02,
    probe_flap=0.01,
)


class SimStore(Store):
    """The production store in memory, able to die around a commit, and counting its commits."""

    def __init__(self, rng: random.Random, database: Database | None = None) -> None:
        super().__init__(database or Database("sqlite://", draw=lambda size: rng.randbytes(size).hex()))
        self.commits = 0
        self.crash_before_commit = False
        self.crash_after_commit = False

    def commit_all(self, commits: Sequence[Commit]) -> None:
        if self.crash_before_commit:
            raise Crash
        super().commit_all(commits)
        self.commits += 1
        if self.crash_after_commit:
            raise Crash


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to. `digest` is over every line of the story."""

    seed: int
    ticks: int
    crashes: int
    launches: int
    digest: str
    story: tuple[str, ...] = field(repr=False)


class Life:
    """One simulated world with the production controller in it."""

    reconciler: Reconciler
    make_prober = SimProber
    make_store = SimStore
    deaths: Sequence[str] = ("before commit", "after commit", "before calls", "between ticks")

    def __init__(
        self, seed: int, faults: Faults, *, zones: int = 4, reconciler: Callable[..., Reconciler] = Reconciler
    ) -> None:
        self.make_reconciler = reconciler
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = SimClock()
        places = [
            SimZone(
                Zone("sim", f"r{index // 2}", f"r{index // 2}-{'ab'[index % 2]}"),
                spot_usd_hour=round(self.rng.uniform(0.2, 0.5), 3),
                on_demand_usd_hour=round(self.rng.uniform(0.9, 1.3), 3),
                spot_capacity=self.rng.randint(1, 6),
            )
            for index in range(zones)
        ]
        self.cloud = SimCloud(self.clock, self.rng, places, faults)
        self.store = self.make_store(self.rng)
        self.specs = SpecCache(self.store, SecretBox(_KEY))
        self.agents = SimAgents(self.clock, self.rng)
        self.owner = self.store.database.owner()
        self.invariants = Invariants(self.store, self.cloud, self.owner, f"seed {seed}")
        self.ticks = self.crashes = 0
        self.start_controller()

    def start_controller(self) -> None:
        """A new process: nothing in it but what the store and the world say."""
        self.store.forget()
        self.runner = SimOperationRunner(
            self.cloud, self.clock, self.rng, self.owner, lambda call: self.specs.order(self.owner, call)
        )
        self.instance_poller = SimInstancePoller(self.cloud, self.clock, self.owner)
        self.fleet = SimFleet(self.agents, self.clock)
        self.regional = SimRegional(self.agents, self.cloud, self.clock)
        self.reconciler = self.make_reconciler(
            self.clock,
            self.store,
            self.specs,
            ReplicaPorts(
                enabled=frozenset({"sim"}),
                offers=SimOffers(self.cloud),
                runner=self.runner,
                instance_poller=self.instance_poller,
                prober=self.make_prober(self.cloud, self.rng),
            ),
            BalancerPorts(self.fleet, "127.0.0.1", self.regional),
        )

    def tick(self) -> None:
        """One tick, during which the controller may be killed; invariants afterwards."""
        self.ticks += 1
        if self.rng.random() < self.cloud.faults.crash:
            where = self.rng.choice(self.deaths)
            self.prepare_death(where)
            try:
                self.reconciler.tick()
                crashed = where == "between ticks"
            except Crash:
                crashed = True
            self.prepare_death("")
            if crashed:
                self._die()
        else:
            self.reconciler.tick()
        rows = self.store.services(down=True)
        self.invariants.after_tick(rows, [*self.agents.tables.values(), *self.agents.regional.values()])
        self.invariants.read_cache(self.store.services(), rows)

    def make_user(self) -> User:
        return User(self)

    def prepare_death(self, where: str) -> None:
        """Let the controller die at one of `deaths` within the next tick, or at none."""
        self.store.crash_before_commit = where == "before commit"
        self.store.crash_after_commit = where == "after commit"
        self.runner.crash_before_calls = where == "before calls"

    def at_rest(self) -> None:
        """The fleets are what the goals say. Raises InvariantError."""
        self.invariants.at_rest(self.store.services(down=True), self.specs)

    def run_for(self, seconds: float, tick_s: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(self.clock.now() + tick_s)
            self.tick()

    def put(self, spec: ServiceSpec, mode: UpdateMode | None = None) -> int:
        """What `serve up` and `serve update` write."""
        return self.store.put_service(
            spec.name,
            spec_to_json(spec),
            replica_hash=spec.replica_hash(),
            sealed_secrets=SecretBox(_KEY).close({}),
            lb_port=30001,
            target=spec.scaling.min_replicas,
            mode=mode,
            now=self.clock.now(),
        )

    def row(self, name: str) -> ServiceRow:
        return next(row for row in self.store.services(down=True) if row.name == name)

    def outcome(self) -> Outcome:
        story = tuple(
            f"{line.at:.3f} {line.service} {line.record.replica_id} {line.record.kind} {line.record.state} "
            f"{line.record.message}"
            for line in self.store.events(None, limit=1_000_000)
        )
        digest = hashlib.sha256("\n".join(story).encode()).hexdigest()[:16]
        return Outcome(self.seed, self.ticks, self.crashes, len(self.cloud.made), digest, story)

    def _die(self) -> None:
        self.crashes += 1
        self.runner.dead = self.instance_poller.dead = self.fleet.dead = self.regional.dead = True
        self.clock.advance(self.clock.now() + self.rng.uniform(0.0, 20.0))
        self.start_controller()


def run_seed(
    seed: int,
    faults: Faults = HOSTILE,
    *,
    busy_s: float = 500.0,
    life: type[Life] = Life,
    reconciler: Callable[..., Reconciler] = Reconciler,
) -> Outcome:
    """A life: `busy_s` seconds of trouble, then peace until everything should have come to rest.

    Raises InvariantError, which names the seed.
    """
    return _lived(life(seed, faults, reconciler=reconciler), busy_s)


def _lived(life: Life, busy_s: float) -> Outcome:
    seed = life.seed
    user = life.make_user()
    end = life.clock.now() + busy_s
    tick_s = life.rng.choice([0.5, 1.0, 2.0, 5.0])
    while life.clock.now() < end:
        life.run_for(life.rng.uniform(5.0, 90.0), tick_s)
        user.act()
    life.cloud.calm()
    life.run_for(1500.0, 5.0)
    _rest(life, user)
    life.invariants.bill()
    before = life.store.commits
    life.run_for(60.0, 5.0)
    if life.store.commits != before and not user.weighs_risks():
        raise InvariantError(f"seed {seed}: a world at rest was written to")
    outcome = life.outcome()
    life.store.close()
    return outcome


def _rest(life: Life, user: User) -> None:
    """RiskHedge moves a replica whenever another zone has become worth it: it is let finish."""
    moves = 5 if user.weighs_risks() else 0
    for left in range(moves, -1, -1):
        try:
            life.at_rest()
            return
        except InvariantError:
            if not left:
                raise
            life.run_for(60.0, 5.0)


class User:
    """A user who changes a service all the time."""

    NAMES = ("chat", "embed")

    def __init__(self, life: Life) -> None:
        self._life = life
        self._specs: dict[str, ServiceSpec] = {}
        self._serial = 0
        self._places = random.Random(f"{life.seed} places")
        for name in self.NAMES[: life.rng.randint(1, 2)]:
            self._up(name)

    def act(self) -> None:
        rng, life = self._life.rng, self._life
        name = rng.choice(sorted(self._specs))
        row = life.row(name)
        match rng.choice(["nothing", "update", "same", "scale", "kill", "down", "load", "preempt"]):
            case _ if row.down:
                self._up(name)
            case "update":
                self._serial += 1
                build = replace(
                    self._specs[name], run=f"serve --build {self._serial}", num_nodes=self._nodes()
                )
                self._update(name, build)
            case "same":
                spec = self._specs[name]
                spec = replace(spec, probe=replace(spec.probe, interval_s=rng.uniform(1.0, 20.0)))
                if spec.resources[0].use_spot:  # another placer takes over what this one has placed
                    spec = self._placed(spec, self._placer())
                spec = replace(spec, regional=self._regional())
                self._update(name, spec)
            case "scale":
                size = rng.randint(0, 5)
                scaling = replace(
                    self._specs[name].scaling,
                    min_replicas=size,
                    max_replicas=size,
                    target_qps_per_replica=None,
                )
                self._update(name, replace(self._specs[name], scaling=scaling))
            case "kill" if row.replicas:
                life.store.kill_replica(name, rng.choice(row.replicas).id, now=life.clock.now())
            case "down":
                life.store.set_down(name, purge=rng.random() < 0.3, now=life.clock.now())
            case "load":
                life.agents.requests_per_s[name] = rng.uniform(0.0, 6.0)
            case "preempt" if row.replicas:
                victim = rng.choice(row.replicas)
                if victim.instance_id is not None:
                    notice_s = rng.choice([0.0, 10.0, 120.0])
                    life.cloud.preempt(victim.instance_id, notice_s, one_node=rng.random() < 0.5)
            case _:
                pass

    def weighs_risks(self) -> bool:
        """Whether a service decides again as time goes by, even in peace."""
        return any(spec.placement.placer == "risk_hedge" for spec in self._specs.values())

    def _up(self, name: str) -> None:
        rng = self._life.rng
        scaling, extra = self._size()
        placer = self._placer()
        spec = ServiceSpec(
            name=name,
            run="serve",
            probe=Probe(path="/health", initial_delay_s=60.0, failure_threshold_s=30.0),
            scaling=scaling,
            update=UpdateSpec(max_surge=rng.randint(1, 2), max_unavailable=0),
            drain_timeout_s=rng.choice([5.0, 30.0, 120.0]),
            resources=(ResourceChoice(cloud="sim", use_spot=placer is not None or rng.random() < 0.8),),
            num_nodes=self._nodes(),
            regional=self._regional(),
        )
        spec = self._placed(replace(spec, placement=PlacementGoal(num_overprovision=extra)), placer)
        try:
            self._life.put(spec)
        except ServiceExistsError:
            return  # its old replicas are not gone yet; the user comes back later
        self._specs[name] = spec

    def _nodes(self) -> int:
        return self._life.rng.choice([1, 1, 2, 3])

    def _regional(self) -> RegionalAgents:
        """Agents on machines of their own, in one region, in two, or in none."""
        rng = self._places
        places = rng.choice([(), (), ("r0",), ("r1",), ("r0", "r1")])
        return RegionalAgents(tuple(AgentRegion("sim", region) for region in places), rng.randint(1, 2))

    def _size(self) -> tuple[ScalingGoal, int]:
        """How many replicas, and how many beyond them."""
        rng = self._life.rng
        low = rng.randint(1, 4)
        if rng.random() < 0.6:
            return ScalingGoal(low, low), rng.randint(0, 1)
        low, high = rng.randint(0, low), low + 2
        return ScalingGoal(low, high, 1.0, upscale_delay_s=20.0, downscale_delay_s=60.0), 0

    def _placer(self) -> str | None:
        return self._life.rng.choice(
            [None, None, "dynamic_fallback", "dynamic_fallback", "risk_hedge", *_BASELINES]
        )

    def _placed(self, spec: ServiceSpec, placer: str | None) -> ServiceSpec:
        """With this placer, and knobs of it."""
        rng, knobs = self._life.rng, spec.placement
        base, falls_back = 0, None
        if placer == "risk_hedge":
            knobs, base = replace(knobs, num_overprovision=0), knobs.base_ondemand_fallback_replicas
        if placer == "dynamic_fallback":
            base, falls_back = rng.randint(0, 1), rng.random() < 0.8
        knobs = replace(
            knobs,
            base_ondemand_fallback_replicas=base,
            availability_target=0.99 if placer == "risk_hedge" else None,
        )
        placement = placement_of(
            knobs, spec.resources, spot_placer=placer, dynamic_ondemand_fallback=falls_back
        )
        return replace(spec, placement=placement)

    def _update(self, name: str, spec: ServiceSpec) -> None:
        self._life.put(spec, self._life.rng.choice([UpdateMode.ROLLING, UpdateMode.BLUE_GREEN]))
        self._specs[name] = spec
