"""A life with two controllers of one database: frozen, cut off from it, killed, and its clock set.

run_seed(17, life=PairLife)      one life; raises InvariantError
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import OperationalError

from skyserve_cli.controller.persistence.leadership import RENEW_EVERY_S, STANDBY_POLL_S, Leadership
from skyserve_cli.controller.reconcile.inputs import BalancerPorts, ReplicaPorts
from skyserve_cli.state.database import Database
from skyserve_cli.state.lease import NO_TERM, ControllerLease, LeaseLostError
from skyserve_cli.state.values import Commit
from tests.kit.clock import SimClock
from tests.kit.invariants import InvariantError
from tests.kit.life import Life, SimStore
from tests.kit.sim_ports import (
    Crash,
    SimFleet,
    SimInstancePoller,
    SimOffers,
    SimOperationRunner,
    SimProber,
    SimRegional,
)

#: The chance that something befalls a controller in a tick, as multiples of `Faults.crash`.
_FREEZE = 0.5
_CUT = 0.5
_CLOCK = 0.1
_CHECKED_BEFORE = 0.05  # of calls, that the lease ran out between the last look at it and the call


class ProcessClock(SimClock):
    """The world's clock for one process: what falls due while the process is frozen happens when it goes on."""

    def __init__(self, world: SimClock) -> None:
        super().__init__()
        self._world = world
        self.frozen_until = float("-inf")

    def now(self) -> float:
        return self._world.now()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        def due() -> None:
            left_s = self.frozen_until - self.now()
            if left_s > 0:
                self._world.after(left_s, due)
            else:
                action()

        self._world.after(delay_s, due)


class RemoteDatabase(Database):
    """The database as one controller reaches it. While `is_cut`, every query about leases fails."""

    def __init__(
        self, rng: random.Random, database_clock: Callable[[], float], shared_with: Database
    ) -> None:
        super().__init__(
            "sqlite://",
            draw=lambda size: rng.randbytes(size).hex(),
            database_clock=database_clock,
            shared_with=shared_with,
        )
        self.is_cut = False
        self.epoch = 0

    def fence(self, epoch: int) -> None:
        super().fence(epoch)
        self.epoch = epoch

    def renew_lease(self, epoch: int, *, ttl_s: float) -> ControllerLease | None:
        self.fail_if_cut()
        return super().renew_lease(epoch, ttl_s=ttl_s)

    def take_lease(
        self, holder: str, about: str, *, ttl_s: float, unrenewed: ControllerLease | None = None
    ) -> ControllerLease | None:
        self.fail_if_cut()
        return super().take_lease(holder, about, ttl_s=ttl_s, unrenewed=unrenewed)

    def fail_if_cut(self) -> None:
        if self.is_cut:
            raise OperationalError("SELECT", {}, Exception("the server is away"))


class SharedStore(SimStore):
    """One controller's view of the database. `commits` of both are counted in one place."""

    def __init__(self, rng: random.Random, remote: RemoteDatabase, counter: SimStore) -> None:
        super().__init__(rng, remote)
        self.remote = remote
        self._counter = counter
        self.epochs: list[int] = []  # of commits, in order

    def commit_all(self, commits: Sequence[Commit]) -> None:
        super().commit_all(commits)
        self._counter.commits += 1
        self.epochs.append(self.remote.epoch)

    def services(self, *, down: bool = False) -> Any:
        self.remote.fail_if_cut()
        return super().services(down=down)


class Controller:
    """One process: nothing in it but what the store and the world say."""

    def __init__(self, life: PairLife, name: str) -> None:
        self._life = life
        self.name = name
        self.is_dead = False
        self.clock = ProcessClock(life.clock)
        remote = RemoteDatabase(life.rng, life.database_clock, life.store.database)
        self.store = SharedStore(life.rng, remote, life.store)
        remote.fence(NO_TERM)
        self.leadership = Leadership(self.store, name, f"controller {name}", self.clock)
        self.runner = SimOperationRunner(
            life.cloud,
            self.clock,
            life.rng,
            life.owner,
            lambda call: life.specs.order(life.owner, call),
            allows=lambda kind: self.leadership.allows(kind) or life.rng.random() < _CHECKED_BEFORE,
        )
        self.instance_poller = SimInstancePoller(life.cloud, self.clock, life.owner)
        self.fleet = SimFleet(life.agents, self.clock)
        self.regional = SimRegional(life.agents, life.cloud, self.clock)
        self.reconciler = life.make_reconciler(
            self.clock,
            self.store,
            life.specs,
            ReplicaPorts(
                enabled=frozenset({"sim"}),
                offers=SimOffers(life.cloud),
                runner=self.runner,
                instance_poller=self.instance_poller,
                prober=SimProber(life.cloud, life.rng),
            ),
            BalancerPorts(self.fleet, "127.0.0.1", self.regional),
            epoch=lambda: self.leadership.epoch,
        )
        self.renew()

    @property
    def is_frozen(self) -> bool:
        return self.clock.frozen_until > self.clock.now()

    def renew(self) -> None:
        """Step, and again in a while."""
        if self.is_dead:
            return
        with suppress(OperationalError):
            self.leadership.step()
        if self.leadership.is_over:
            self.die()
            self._life.after_death(self.name, 0.1)
            return
        self.clock.after(RENEW_EVERY_S if self.leadership.leads else STANDBY_POLL_S, self.renew)

    def tick(self) -> None:
        """A turn, if this one leads as far as it knows and can run."""
        if self.is_dead or self.is_frozen or not self.leadership.leads:
            return
        try:
            self.reconciler.tick()
        except LeaseLostError:
            self.leadership.lost()

    def die(self) -> None:
        self.is_dead = True
        self.runner.dead = self.instance_poller.dead = self.fleet.dead = self.regional.dead = True


class PairLife(Life):
    """One simulated world with two production controllers in it."""

    def start_controller(self) -> None:
        """Both, at the beginning."""
        self.offset_s = 0.0  # of the database's clock
        self._epochs: list[int] = []
        self._last = 0
        self.pair = {name: Controller(self, name) for name in ("a", "b")}

    def database_clock(self) -> float:
        return self.clock.now() + self.offset_s

    def after_death(self, name: str, delay_s: float) -> None:
        """A supervisor starts the controller again."""

        def start() -> None:
            self.pair[name] = Controller(self, name)

        self.clock.after(delay_s, start)

    def tick(self) -> None:
        self.ticks += 1
        for name in self.rng.sample(sorted(self.pair), 2):
            controller = self.pair[name]
            self._strike(controller)
            self._turn(controller)
        rows = self.store.services(down=True)
        self.invariants.after_tick(rows, [*self.agents.tables.values(), *self.agents.regional.values()])
        self._no_commit_of_an_earlier_term()

    def _strike(self, controller: Controller) -> None:
        """Something befalls the controller, or the database's clock."""
        rng, crash = self.rng, self.cloud.faults.crash
        if controller.is_dead:
            return
        if rng.random() < crash * _FREEZE:
            controller.clock.frozen_until = self.clock.now() + rng.uniform(1.0, 60.0)
        if rng.random() < crash * _CUT and not controller.store.remote.is_cut:
            controller.store.remote.is_cut = True
            self.clock.after(
                rng.uniform(1.0, 60.0), lambda: setattr(controller.store.remote, "is_cut", False)
            )
        if rng.random() < crash * _CLOCK:
            self.offset_s += rng.choice([-8 * 3600.0, 8 * 3600.0, -3.0, 3.0])

    def _turn(self, controller: Controller) -> None:
        """A tick, during which the controller may be killed."""
        store, runner = controller.store, controller.runner
        where = ""
        if not controller.is_dead and self.rng.random() < self.cloud.faults.crash:
            where = self.rng.choice(["before commit", "after commit", "before calls", "between ticks"])
        store.crash_before_commit = where == "before commit"
        store.crash_after_commit = where == "after commit"
        runner.crash_before_calls = where == "before calls"
        is_killed = where == "between ticks"
        try:
            controller.tick()
        except Crash:
            is_killed = True
        store.crash_before_commit = store.crash_after_commit = runner.crash_before_calls = False
        self._epochs += store.epochs
        store.epochs.clear()
        if is_killed:
            self.crashes += 1
            controller.die()
            self.after_death(controller.name, self.rng.uniform(0.1, 20.0))

    def _no_commit_of_an_earlier_term(self) -> None:
        for epoch in self._epochs:
            if epoch < self._last:
                raise InvariantError(f"seed {self.seed}: a commit of epoch {epoch} after one of {self._last}")
            self._last = epoch
        self._epochs.clear()
