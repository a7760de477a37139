"""What the rows of one service, as they stand after its turn, require of those who act on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from lb.config.schema import Table
from policies.model import Replica, ReplicaState, Role
from policies.regions.ownership import Ownership
from provisioners.port.base import Instance, InstanceState, peers_port
from skyserve_cli.controller.reconcile.inputs import BalancerPorts
from skyserve_cli.controller.reconcile.lb_config import KnownTargets, table_of, without_loopback
from skyserve_cli.controller.reconcile.listing_events import unattended
from skyserve_cli.controller.reconcile.mappers import (
    has_local_agent,
    name_orders_of,
    tls_name_of,
    token_of,
)
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    OperationKind,
    ProbeOrder,
    RegionalOrder,
    Specs,
)
from skyserve_cli.controller.reconcile.region_tables import (
    entered_table,
    is_linked,
    own_table,
    owners_of,
    region_of,
    unmeasured,
)
from skyserve_cli.controller.reconcile.served_replicas import counts_served, has_one_version
from skyserve_cli.controller.reconcile.tick_cache import (
    Orders,
)
from skyserve_cli.controller.reconcile.turn import Decided
from skyserve_cli.spec.infra import KUBERNETES
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.values import ServiceRow

_PROBED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
_CONNECTED = (*_PROBED, ReplicaState.DRAINING)
_MEASURED_WITHIN_S = 60.0
OUTSTANDING = {
    ReplicaState.REQUESTED: OperationKind.LAUNCH,
    ReplicaState.TERMINATING: OperationKind.TERMINATE,
}


class OrderMaker:
    """Makes the orders of one service at a time. `epoch` is the controller's term."""

    def __init__(self, specs: Specs, owner: str, balancers: BalancerPorts, epoch: Callable[[], int]) -> None:
        self._specs = specs
        self._owner = owner
        self._balancers = balancers
        self._epoch = epoch
        self._owners: dict[str, Ownership] = {}  # by service, as last decided
        self._targets: dict[tuple[str, str], KnownTargets] = {}  # by service and incarnation
        #: By service and replica, with what all orders of the service depend on.
        self._probes: dict[str, tuple[object, dict[int, tuple[Replica, ProbeOrder]]]] = {}
        self._linked_since: dict[str, float] = {}  # when a service with linked agents was first decided about

    def of(self, decided: Decided, listings: Sequence[InstanceListing], now: float) -> Orders:
        """Return what the rows, as they now stand, require."""
        row, spec, goal = decided.row, decided.spec, decided.goal
        live, agents = decided.change.live(), decided.agents.live()
        tls_name = partial(tls_name_of, self._owner, row)
        rollout = decided.plan.memory.rollout
        table = table_of(
            row.name,
            spec,
            live,
            goal,
            rollout,
            now,
            self._epoch(),
            self._balancers.targets_ca,
            tls_name,
            decided.load.loaded,
            self._targets.setdefault((row.name, row.incarnation), KnownTargets()),
        )
        window_s = spec.load_window_s
        counts_demand = goal.scaling.slo is not None
        tls = None if spec.tls is None else (spec.tls.certfile, spec.tls.keyfile)
        local_orders: dict[str, AgentOrder | None] = {}
        if (live or not goal.down) and has_local_agent(row, spec):
            host = spec.load_balancer.host or self._balancers.host
            local_orders[row.name] = AgentOrder(
                row.name, host, row.lb_port, table, tls, window_s, counts_demand, spec.load_balancer.workers
            )
        calls, probes = self._calls_and_probes(row, (*live, *agents), listings)
        if is_linked(spec):
            self._decide_owners(row.name, spec, live, agents, now)
        reached = [one for one in agents if one.state in _CONNECTED and one.endpoint is not None]
        pods = {str(one.id) for one in live if one.zone.cloud == KUBERNETES} if reached else ()
        remote = without_loopback(table, pods) if reached else table
        return Orders(
            calls=tuple(calls),
            probes=tuple(probes),
            agents=local_orders,
            regional=tuple(
                replace(
                    self._regional_order_of(decided, agent, remote, tls, now),
                    counts_demand=counts_demand,
                    workers=spec.load_balancer.workers,
                )
                for agent in reached
            ),
            names=tuple(name_orders_of(self._owner, row, agents, partial(self._specs.get, row.name))),
            clouds=frozenset(replica.zone.cloud for replica in (*live, *agents)),
        )

    def _decide_owners(
        self, service: str, spec: ServiceSpec, live: Sequence[Replica], agents: Sequence[Replica], now: float
    ) -> None:
        """Decide whose the replicas are, if anything is known of that: after a start agents have not reported yet."""
        waited_s = now - self._linked_since.setdefault(service, now)
        distances, before = self._balancers.regional.distances(service), self._owners.get(service)
        if before is not None or distances.rtts_s or waited_s >= _MEASURED_WITHIN_S:
            before = before or Ownership(0, distances.owners)
            self._owners[service] = owners_of(live, agents, distances.rtt_s, now, spec.residency, before)

    def awaits_distances(self, service: str, agents: Sequence[Replica], now: float) -> bool:
        """Return whether agents may be about to measure regions on which the owners of the service's replicas depend."""
        if now - self._linked_since.get(service, now) >= _MEASURED_WITHIN_S:
            return False
        owners = self._owners.get(service)
        living = {region_of(one.zone) for one in agents if one.state is ReplicaState.READY}
        return owners is None or unmeasured(owners, living, self._balancers.regional.distances(service).rtt_s)

    def forget(self, service: str) -> None:
        """The service is gone."""
        self._owners.pop(service, None)
        self._probes.pop(service, None)
        self._targets = {key: known for key, known in self._targets.items() if key[0] != service}
        self._linked_since.pop(service, None)

    def _regional_order_of(
        self, decided: Decided, agent: Replica, table: Table, tls: tuple[str, str] | None, now: float
    ) -> RegionalOrder:
        """Return the order for an agent on a machine of its own."""
        row, spec = decided.row, decided.spec
        table = entered_table(table, spec.residency, region_of(agent.zone))
        order = self._regional_order(row, agent, table, tls, spec.load_window_s)
        if not is_linked(spec):
            return order
        return self._linked(row, spec, order, decided.change.live(), decided.agents.live(), now)

    def _linked(
        self,
        row: ServiceRow,
        spec: ServiceSpec,
        order: RegionalOrder,
        replicas: Sequence[Replica],
        agents: Sequence[Replica],
        now: float,
    ) -> RegionalOrder:
        """Return the order for an agent that has peers in other regions."""

        def token(agent: Replica) -> str:
            return token_of(self._owner, row.name, row.incarnation, agent.id, agent.offer)

        distances, before = self._balancers.regional.distances(row.name), self._owners.get(row.name)
        agent = next(one for one in agents if one.id == order.replica_id)
        own, elsewhere = own_table(
            order.table,
            replicas,
            agents,
            agent,
            token,
            distances.rtt_s,
            now=now,
            zones=spec.residency,
            spill=spec.regional.spill,
            usd_per_second=spec.regional.usd_per_second,
            before=before,
            is_decided=before is not None,
            has_tls=spec.tls is not None,
            egress=self._balancers.egress,
        )
        return replace(order, table=own, peers_port=peers_port(order.port), elsewhere=elsewhere)

    def _regional_order(
        self, row: ServiceRow, agent: Replica, table: Table, tls: tuple[str, str] | None, window_s: float
    ) -> RegionalOrder:
        token = token_of(self._owner, row.name, row.incarnation, agent.id, agent.offer)
        return RegionalOrder(
            service=row.name,
            replica_id=agent.id,
            instance=Instance(
                id=agent.instance_id or "",
                token=token,
                owner=self._owner,
                service=row.name,
                replica_id=agent.id,
                zone=agent.zone,
                capacity_type=agent.offer.capacity_type,
                state=InstanceState.RUNNING,
            ),
            port=urlsplit(agent.endpoint or "").port or 0,
            table=table,
            tls=tls,
            window_s=window_s,
            passing=_passing(agent),
        )

    def _calls_and_probes(
        self, row: ServiceRow, live: Sequence[Replica], listings: Sequence[InstanceListing]
    ) -> tuple[list[CloudOperation], list[ProbeOrder]]:
        alone = unattended(listings)
        calls = []
        for replica in live:
            kind = OUTSTANDING.get(replica.state)
            if kind is None and replica.instance_id in alone:
                kind = OperationKind.ATTEND
            if kind is not None:
                calls.append(CloudOperation(row.name, row.incarnation, kind, replica, row.team))
        probed = [  # the state of others is known from bringing them their tables
            one
            for one in live
            if one.role is Role.REPLICA and one.state in _PROBED and one.endpoint is not None
        ]
        return calls, self._probe_orders(row, probed, [one for one in live if one.role is Role.REPLICA])

    def _probe_orders(
        self, row: ServiceRow, probed: Sequence[Replica], replicas: Sequence[Replica]
    ) -> list[ProbeOrder]:
        """Return the orders of those that are `probed`. A replica that is the same object has the same order as before."""
        by_version = {one.version: one for one in probed}
        probe_of = {
            version: self._specs.probe(row.name, _probed_as(row, one)) for version, one in by_version.items()
        }
        is_settled = has_one_version(row, replicas)

        def order(replica: Replica) -> ProbeOrder:
            probe = probe_of[replica.version]
            return ProbeOrder(
                row.name,
                replica.id,
                replica.endpoint or "",
                probe,
                _passing(replica),
                counts_served=is_settled and counts_served(replica, probe),
                tls_name=tls_name_of(self._owner, row, replica),
            )

        basis = (row.incarnation, is_settled, probe_of)
        was_basis, before = self._probes.get(row.name, (basis, {}))
        before = before if was_basis == basis else {}
        made = {
            one.id: was if (was := before.get(one.id)) is not None and was[0] is one else (one, order(one))
            for one in probed
        }
        self._probes[row.name] = basis, made
        return [order for _, order in made.values()]


def _probed_as(row: ServiceRow, replica: Replica) -> int:
    """Return the version whose readiness probe counts: the newest also for replicas that it keeps, unless it was given up."""
    is_kept = replica.version in row.same_replicas and row.version not in row.memory.rollout.get("failed", ())
    return row.version if is_kept else replica.version


def _passing(replica: Replica) -> bool | None:
    """Return what the last probe said; None: there was none."""
    return None if replica.state is ReplicaState.STARTING else replica.state is ReplicaState.READY
