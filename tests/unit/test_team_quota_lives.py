"""A team's quota holds at every tick of hostile lives, with a controller that is killed anywhere, and with two of one database."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from policies.goals import Quota, UpdateMode
from skyserve_cli.controller.reconcile.inputs import Budget
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.store import Store
from tests.kit.controller_pair import PairLife
from tests.kit.life import HOSTILE, Life

QUOTA = Quota(max_replicas=4, max_usd_hour=3.0)


class _Limited:
    """Every service is of the team. `most` are the most replicas and USD per hour there ever were."""

    store: Store
    most: tuple[int, float] = (0, 0.0)

    def put(self, spec: ServiceSpec, mode: UpdateMode | None = None) -> int:
        life: Any = self
        return self.store.put_service(
            spec.name,
            spec_to_json(spec),
            replica_hash=spec.replica_hash(),
            sealed_secrets=b"",
            lb_port=30001,
            target=spec.scaling.min_replicas,
            mode=mode,
            now=life.clock.now(),
            team="research",
        )

    def tick(self) -> None:
        super().tick()  # type: ignore[misc]
        rows = self.store.services()
        replicas = sum(len(row.replicas) for row in rows)
        usd = sum(one.offer.price_usd_hour for row in rows for one in row.replicas)
        self.most = max(self.most[0], replicas), max(self.most[1], usd)
        assert replicas <= 4
        assert usd <= 3.0 + 1e-6


class LimitedLife(_Limited, Life):
    pass


class LimitedPair(_Limited, PairLife):
    pass


@pytest.mark.long
@pytest.mark.parametrize("kind", [LimitedLife, LimitedPair])
def test_a_quota_holds_at_every_tick(kind: type[Any]) -> None:
    reached = set()
    for seed in range(3):
        life = kind(seed, HOSTILE, reconciler=partial(Reconciler, budget=Budget(quotas={"research": QUOTA})))
        user = life.make_user()
        end = life.clock.now() + 600.0
        while life.clock.now() < end:
            life.run_for(life.rng.uniform(5.0, 90.0), 2.0)
            user.act()
        reached.add(life.most[0])
        life.store.close()
    assert max(reached) == 4  # it is the quota that holds
