"""The invariants: what must hold after every tick, whatever the world does.

* no tagged instance without a live row, but for a short while after a crash or a lost response;
* at most one instance was ever made for a replica;
* GONE is final, and ids only grow;
* no table names a target that is not a live, reachable replica;
* the store's cache equals the database;
* the cost in the store is the cloud's bill;
* a world that is left in peace comes to what the goals say, and then to rest: ticks write nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lb.config.schema import Table
from policies import crashes, rollout
from policies.model import Replica, ReplicaState
from skyserve_cli.controller.reconcile.mappers import goal_of, token_of
from skyserve_cli.controller.reconcile.ports import Specs
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import ServiceRow
from tests.kit.fault_cloud import SimCloud

#: How long an instance may live without a row: the sweep needs two listings and a call, each of which may fail.
ORPHAN_GRACE_S = 180.0
#: How much the two bills may differ per instance: the controller learns of beginnings and ends late.
LEDGER_SLACK_S = 240.0


class InvariantError(AssertionError):
    """An invariant does not hold. The text names the seed, the time and what was seen."""


class Invariants:
    def __init__(self, store: Store, cloud: SimCloud, owner: str, label: str) -> None:
        self._store = store
        self._cloud = cloud
        self._owner = owner
        self._label = label
        self._unowned_since: dict[str, float] = {}
        self._highest: dict[str, int] = {}
        self._alive: dict[str, frozenset[int]] = {}

    def after_tick(self, rows: Sequence[ServiceRow], tables: Sequence[Table]) -> None:
        """`rows` as the tick left them, `tables` as the load balancers have them."""
        self._no_orphan(rows)
        self._one_instance_per_replica()
        for row in rows:
            self._gone_is_final(row)
        for table in tables:
            self._targets_live(table.service, table, rows)

    def read_cache(self, kept: Sequence[ServiceRow], read: Sequence[ServiceRow]) -> None:
        """The store's cache equals the database."""
        true = [row for row in read if row.attempts or not row.down]
        self._require(list(kept) == true, f"the store remembers {kept} and holds {true}")

    def at_rest(self, rows: Sequence[ServiceRow], specs: Specs) -> None:
        """After the world has been calm for long: the fleet is what the goals say."""
        owned = 0
        for row in rows:
            goal = goal_of(row, specs.get(row.name, row.version))
            ready = [r for r in row.replicas if r.state is ReplicaState.READY]
            owned += len(row.attempts)
            if row.down:
                self._require(not row.attempts, f"{row.name} is down but has {row.attempts}")
                continue
            regional = specs.get(row.name, row.version).regional
            stand = Counter(
                f"{a.zone.cloud}/{a.zone.region}" for a in row.balancers if a.state is ReplicaState.READY
            )
            self._require(
                stand == Counter({str(place): regional.count for place in regional.places})
                and len(row.balancers) == stand.total(),
                f"{row.name}: agents {_short(row.balancers)} for {regional}",
            )
            hopeless, _ = rollout.may_launch(goal, row.memory.rollout, self._cloud.clock.now())
            if rollout.has_failed(goal, row.memory.rollout) and hopeless:
                left = row.replicas
                if crashes.of(
                    row.memory.rollout, row.version
                ):  # what is ready of a version that crashes may serve on
                    left = tuple(one for one in left if one.state is not ReplicaState.READY)
                self._require(not left, f"{row.name} has failed but has {left}")
                continue
            version = rollout.wanted_version(goal, row.memory.rollout)
            wanted = [r for r in ready if rollout.is_wanted(r, goal, version)]
            # RiskHedge keeps as many beyond the target as the market's past makes it worth while.
            size = max(row.target, len(wanted)) if goal.placement.placer == "risk_hedge" else row.target
            self._require(
                len(wanted) == len(row.replicas) == size,
                f"{row.name}: {row.target} wanted of version {version}, has {_short(row.replicas)}; {row.notes}",
            )
        self._require(
            len(self._cloud.alive()) == owned,
            f"{len(self._cloud.alive())} instances for {owned} replicas",
        )

    def bill(self) -> None:
        """The store's account against the cloud's."""
        now = self._cloud.clock.now()
        ours = sum(spent.usd for spent in self._store.spent(now).values())
        theirs = self._cloud.ledger_usd()
        slack = sum(
            one.order.offer.price_usd_hour * LEDGER_SLACK_S / 3600.0 for one in self._cloud.made.values()
        )
        self._require(abs(ours - theirs) <= slack, f"the store says {ours:.4f} USD, the cloud {theirs:.4f}")

    def _no_orphan(self, rows: Sequence[ServiceRow]) -> None:
        owned = {
            token_of(self._owner, row.name, row.incarnation, r.id, r.offer)
            for row in rows
            for r in row.attempts
        }
        now = self._cloud.clock.now()
        unowned = {one.order.token for one in self._cloud.alive()} - owned
        self._unowned_since = {token: self._unowned_since.get(token, now) for token in unowned}
        for token, since in self._unowned_since.items():
            self._require(now - since <= ORPHAN_GRACE_S, f"{token} has had no row for {now - since:.0f} s")

    def _one_instance_per_replica(self) -> None:
        made = Counter((one.order.service, one.order.replica_id) for one in self._cloud.made.values())
        twice = [key for key, count in made.items() if count > 1]
        self._require(not twice, f"more than one instance was made for {twice}")

    def _gone_is_final(self, row: ServiceRow) -> None:
        live = frozenset(one.id for one in row.attempts)
        before, highest = self._alive.get(row.name, frozenset()), self._highest.get(row.name, 0)
        risen = [one for one in live - before if one <= highest]
        self._require(not risen, f"{row.name}: replicas {risen} came back")
        self._alive[row.name] = live
        self._highest[row.name] = max(highest, row.memory.next_replica_id - 1)

    def _targets_live(self, service: str, table: Table, rows: Sequence[ServiceRow]) -> None:
        """A table may lag by a push, so only what was never a replica's endpoint is wrong."""
        known = {str(r.id) for row in rows if row.name == service for r in row.replicas}
        highest = self._highest.get(service, 0)
        strange = [t.id for t in table.targets if t.id not in known and int(t.id) > highest]
        self._require(not strange, f"{service}: the load balancer knows {strange}")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantError(f"{self._label} t={self._cloud.clock.now():.1f}: {what}")


def _short(replicas: Sequence[Replica]) -> str:
    return ", ".join(f"{r.id}:{r.state.value}:v{r.version}" for r in replicas)
