"""What the rows of one service, as they stand after its turn, require of those who act on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from lb.config.schema import Table
from policies.model import Replica, ReplicaState, Role
from provisioners.port.base import Instance, InstanceState, peers_port
from skyserve_cli.controller.reconcile.lb_config import table_of, without_loopback
from skyserve_cli.controller.reconcile.listing_events import unattended
from skyserve_cli.controller.reconcile.mappers import (
    name_orders_of,
    stands_beside,
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
    is_linked,
    own_table,
)
from skyserve_cli.controller.reconcile.served_replicas import counts_served, has_one_version
from skyserve_cli.controller.reconcile.tick_cache import (
    Orders,
)
from skyserve_cli.controller.reconcile.turn import Decided
from skyserve_cli.state.values import ServiceRow

_PROBED = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.NOT_READY)
_CONNECTED = (*_PROBED, ReplicaState.DRAINING)
_OUTSTANDING = {
    ReplicaState.REQUESTED: OperationKind.LAUNCH,
    ReplicaState.TERMINATING: OperationKind.TERMINATE,
}


class OrderMaker:
    """Makes the orders of one service at a time.

    `epoch` is the controller's term, `targets_ca` the certificate by which load balancers know replicas.
    """

    def __init__(
        self, specs: Specs, owner: str, lb_host: str, epoch: Callable[[], int], targets_ca: str = ""
    ) -> None:
        self._targets_ca = targets_ca
        self._specs = specs
        self._owner = owner
        self._lb_host = lb_host
        self._epoch = epoch

    def of(self, decided: Decided, listings: Sequence[InstanceListing], now: float) -> Orders:
        """Return what the rows, as they now stand, require."""
        row, spec, goal = decided.row, decided.spec, decided.goal
        live, agents = decided.change.live(), decided.agents.live()
        tls_name = partial(tls_name_of, self._owner, row)
        rollout = decided.plan.memory.rollout
        table = table_of(row.name, spec, live, goal, rollout, now, self._epoch(), self._targets_ca, tls_name)
        window_s = spec.load_window_s
        counts_demand = goal.scaling.slo is not None
        tls = None if spec.tls is None else (spec.tls.certfile, spec.tls.keyfile)
        beside: dict[str, AgentOrder | None] = {}
        if (live or not goal.down) and stands_beside(row, spec):
            host = spec.load_balancer.host or self._lb_host
            beside[row.name] = AgentOrder(row.name, host, row.lb_port, table, tls, window_s, counts_demand)
        calls, probes = self._calls_and_probes(row, (*live, *agents), listings)
        remote = without_loopback(table)
        return Orders(
            calls=tuple(calls),
            probes=tuple(probes),
            agents=beside,
            regional=tuple(
                replace(
                    self._linked(row, self._regional_order(row, agent, remote, tls, window_s), live, agents)
                    if is_linked(spec)
                    else self._regional_order(row, agent, remote, tls, window_s),
                    counts_demand=counts_demand,
                )
                for agent in agents
                if agent.state in _CONNECTED and agent.endpoint is not None
            ),
            names=tuple(name_orders_of(row, agents, partial(self._specs.get, row.name))),
            clouds=frozenset(replica.zone.cloud for replica in (*live, *agents)),
        )

    def _linked(
        self, row: ServiceRow, order: RegionalOrder, replicas: Sequence[Replica], agents: Sequence[Replica]
    ) -> RegionalOrder:
        """Return the order for an agent that has peers in other regions."""

        def token(agent: Replica) -> str:
            return token_of(self._owner, row.name, row.incarnation, agent.id, agent.offer)

        agent = next(one for one in agents if one.id == order.replica_id)
        own, elsewhere = own_table(order.table, replicas, agents, agent, token)
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
        calls, probes = [], []
        is_settled = has_one_version(row, (one for one in live if one.role is Role.REPLICA))
        for replica in live:
            kind = _OUTSTANDING.get(replica.state)
            if kind is None and replica.instance_id in alone:
                kind = OperationKind.ATTEND
            if kind is not None:
                calls.append(CloudOperation(row.name, row.incarnation, kind, replica))
            if replica.role is not Role.REPLICA:
                continue  # its state is known from bringing it its table
            if replica.state in _PROBED and replica.endpoint is not None:
                probe = self._specs.probe(row.name, replica.version)
                counts = is_settled and counts_served(replica, probe)
                order = ProbeOrder(
                    row.name,
                    replica.id,
                    replica.endpoint,
                    probe,
                    _passing(replica),
                    counts_served=counts,
                    tls_name=tls_name_of(self._owner, row, replica),
                )
                probes.append(order)
        return calls, probes


def _passing(replica: Replica) -> bool | None:
    """Return what the last probe said; None: there was none."""
    return None if replica.state is ReplicaState.STARTING else replica.state is ReplicaState.READY
