"""Simulations of services with an SLO: the size follows the demand that agents report, and the controller may die between storing a
minute and deciding by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policies.goals import ScalingGoal
from skyserve_cli.spec.model import ServiceSpec, SloSpec
from skyserve_cli.state.values import DemandRow
from tests.kit.invariants import InvariantError
from tests.kit.life import Life, SimStore, User
from tests.kit.sim_ports import Crash

CAPACITY_QPS = 2.0  # of a simulated replica: see `SimAgents.demand`
MOST = 8


class DemandStore(SimStore):
    """Able to die once a minute is stored, too."""

    crash_after_demand = False

    def put_demand(self, name: str, rows: Sequence[DemandRow], **more: Any) -> None:
        super().put_demand(name, rows, **more)
        if self.crash_after_demand:
            raise Crash


class SloUser(User):
    """Gives every service an SLO and keeps changing what its clients ask for."""

    def act(self) -> None:
        super().act()
        rng, rates = self._life.rng, self._life.agents.requests_per_s
        name = rng.choice(sorted(self._specs))
        match rng.choice(["level", "doubles", "stops", "same"]):
            case "level":
                rates[name] = rng.uniform(0.0, 12.0)
            case "doubles":
                rates[name] = min(14.0, 2.0 * rates.get(name, 1.0))
            case "stops":
                rates[name] = 0.0

    def weighs_risks(self) -> bool:
        """Its budget decides again every minute."""
        return True

    def demanding(self) -> dict[str, tuple[float, ServiceSpec]]:
        """The requests to each service, in requests per second."""
        return {
            name: (self._life.agents.requests_per_s.get(name, 0.0), spec)
            for name, spec in self._specs.items()
        }

    def _size(self) -> tuple[ScalingGoal, int]:
        return ScalingGoal(self._life.rng.randint(0, 2), MOST), 0

    def _placed(self, spec: ServiceSpec, placer: str | None) -> ServiceSpec:
        spec = super()._placed(spec, placer)
        rng = self._life.rng
        capacity_qps = CAPACITY_QPS if rng.random() < 0.7 else None
        autoscaler = rng.choice(["predictive", "predictive", "forecast_only", "reactive"])
        slo = SloSpec(2000.0, None, rng.choice([0.95, 0.99, 0.999]), capacity_qps, autoscaler)
        return replace(spec, slo=slo, placement=replace(spec.placement, availability_target=None))


class SloLife(Life):
    """A world in which services have an SLO. Its trouble lasts for minutes that count."""

    make_store = DemandStore
    deaths = (*Life.deaths, "after demand")

    def make_user(self) -> User:
        self.user = SloUser(self)
        return self.user

    def prepare_death(self, where: str) -> None:
        super().prepare_death(where)
        assert isinstance(self.store, DemandStore)
        self.store.crash_after_demand = where == "after demand"

    def at_rest(self) -> None:
        """Every service that is up carries its requests, if it may."""
        super().at_rest()
        for name, (qps, spec) in self.user.demanding().items():
            row = self.row(name)
            if row.down or spec.slo is None or spec.slo.capacity_qps is None:
                continue
            needed = min(math.ceil(qps / CAPACITY_QPS), spec.scaling.max_replicas)
            if row.target < needed:
                raise InvariantError(
                    f"seed {self.seed}: {name} wants {row.target} replicas for {qps:.2f} requests per second"
                )
