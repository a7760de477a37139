"""What supervisors of load balancer agents share, wherever their agent runs: its order and table, and the calls to its admin port."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import aiohttp
import orjson

from lb.config.schema import Stats, Table
from policies.history import Load
from policies.model import Event, ProbeFailed, ProbePassed
from skyserve_cli.controller.balancers.demand_follower import DemandFollower
from skyserve_cli.controller.balancers.fleet_services import FleetServices
from skyserve_cli.controller.balancers.peer_links import PeerLinks
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.region_tables import region_of

log = logging.getLogger(__name__)

SILENT_AFTER_S = 10.0  # an agent that has not responded for so long does not pass its probe


class AgentSupervisor:
    """Supervises one agent."""

    def __init__(
        self, fleet: FleetServices, session: aiohttp.ClientSession, order: RegionalOrder, now: float
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._order = order
        self._responded_at = now
        self._has_passed = False
        self._failures = 0  # in a row
        self._trouble = ""
        self.region = region_of(order.instance.zone)
        self.links = PeerLinks(fleet.now)
        self._table = self.links.table(order)  # that it should have
        self._stirred = asyncio.Event()
        self.load = Load()
        self.minutes = DemandFollower(fleet.now)

    def set_order(self, order: RegionalOrder) -> None:
        if order.table.revision != self._order.table.revision:
            self._stirred.set()
        self._order = order
        self._table = self.links.table(order)

    def transition(self, now: float) -> tuple[str, Event] | None:
        """Return the result of the agent's probe if it differs from what the reconciler knows."""
        order = self._order
        if self._has_passed and not self._failures:
            return None if order.passing else (order.service, ProbePassed(order.replica_id))
        if order.passing and now - self._responded_at > SILENT_AFTER_S:
            return order.service, ProbeFailed(order.replica_id, self._trouble or "the agent does not respond")
        return None

    @property
    def responded_at(self) -> float | None:
        """When the agent last responded."""
        return self._responded_at if self._has_passed else None

    def _failed(self, why: str) -> None:
        self.load = replace(self.load, responsive=frozenset())  # as far as is known now
        self._fleet.served.silent(*self._order.key)
        if why != self._trouble:
            log.warning("load balancer agent %s/%d: %s", self._order.service, self._order.replica_id, why)
        self._trouble = why
        self._failures += 1

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._fleet.admin_token(self._order.instance.token)}"}

    async def _push(self, url: str, table: Table) -> None:
        """Send the table to the admin port at `url`. Raises ValueError if it is rejected."""
        target = f"{url}/-/targets"
        async with self._session.put(target, json=table.to_json(), headers=self._authorization()) as response:
            if response.status != 200:
                raise ValueError(f"push refused: {response.status} {(await response.text())[:200]}")

    async def _stats(self, url: str, window_s: float) -> tuple[Stats, float]:
        """Return the statistics of the admin port at `url`, and when the event loop's clock sent the request."""
        sent_at = asyncio.get_running_loop().time()
        stats_url = f"{url}/-/stats?window_s={window_s:g}&build=1&health=1"
        async with self._session.get(stats_url, headers=self._authorization()) as response:
            response.raise_for_status()
            return Stats.from_json(orjson.loads(await response.read())), sent_at


def trouble_of(error: Exception) -> str:
    """Return why a call to an agent failed. A ValueError of ours has the whole sentence."""
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
