"""What links the load balancer agents of a service in several regions: their certificates, and whom each of them hears."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson

from lb.config.schema import Table
from policies.regions.ownership import BACK_AFTER_S, DEAD_AFTER_S, Distances
from provisioners.remote.certificates import Authority
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.region_tables import reachable_table

_SAME_FILES_S = 3600.0  # within which an agent's certificate is not made again


class PeerFiles:
    """Certificates of agents. `secret` is the home's, from which they follow; `now` is UNIX time."""

    def __init__(self, secret: bytes, now: Callable[[], float]) -> None:
        self._secret = secret
        self._now = now
        self._made: dict[str, tuple[float, tuple[bytes, bytes]]] = {}  # by token, with their time

    def of(self, order: RegionalOrder) -> tuple[bytes, bytes]:
        """Return the authority of the service's agents, and the key and certificate of this one, in PEM."""
        now, token = self._now(), order.instance.token
        made = self._made.get(token)
        if made is None or not made[0] <= now < made[0] + _SAME_FILES_S:
            authority = Authority(self._secret, order.instance.owner, order.service)
            own = authority.of_agent(token, datetime.fromtimestamp(now, UTC))
            made = self._made[token] = now, (authority.pem, own)
        return made[1]


class PeerLinks:
    """Whom one agent hears, and the table that it should have for it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.rows: list[dict[str, Any]] = []  # what it says of each peer
        self._taken_over: tuple[str, ...] = ()
        self.rtts_s: dict[str, float] = {}  # to other regions, as it measures them
        self.owned: tuple[str, ...] = ()  # regions, by the table that it has
        self._now = now
        self._reached: frozenset[str] = frozenset()  # regions of which it hears an agent
        self._lost: set[str] = set()  # regions of which it has not heard one, after it had
        self._back_since: dict[str, float] = {}  # of those among them that it hears again

    def table(self, order: RegionalOrder) -> Table:
        """Return the table to push."""
        return reachable_table(order.table, order.elsewhere, self._reached)

    def shown(
        self, acked: Table | None
    ) -> tuple[tuple[str, ...] | None, tuple[dict[str, Any], ...], tuple[str, ...]]:
        """Return what a view has of them: the regions owned by the table that the agent has, its peers, and whom it has taken over."""
        owned = None if acked is None or acked.regions is None else acked.regions.owned
        return owned, tuple(self.rows), self._taken_over

    async def poll(self, session: aiohttp.ClientSession, url: str, authorization: Mapping[str, str]) -> bool:
        """Ask the agent. Returns whether it reaches other regions than before. Raises aiohttp.ClientError, KeyError, ValueError."""
        async with session.get(f"{url}/-/regions", headers=authorization) as response:
            response.raise_for_status()
            found = orjson.loads(await response.read())
        rows = found["peers"]
        self._taken_over = tuple(found.get("taken_over", ()))
        self.owned = tuple(found.get("owned", ()))
        rtts_ms = found.get("distances_ms", {}) | {row["region"]: row.get("rtt_ms") for row in rows}
        self.rtts_s = {region: rtt_ms / 1000 for region, rtt_ms in rtts_ms.items() if rtt_ms is not None}
        reached = frozenset(
            row["region"] for row in rows if row["silent_s"] is not None and row["silent_s"] < DEAD_AFTER_S
        )
        reached = self._settled(reached)
        changed, self.rows, self._reached = reached != self._reached, rows, reached
        return changed

    def _settled(self, reached: frozenset[str]) -> frozenset[str]:
        """Return the regions that are heard, without those that were lost and have not been heard for BACK_AFTER_S since."""
        now = self._now()
        self._lost |= self._reached - reached
        for region in list(self._back_since):
            if region not in reached:
                del self._back_since[region]
        for region in self._lost & reached:
            if now - self._back_since.setdefault(region, now) >= BACK_AFTER_S:
                self._lost.discard(region)
                del self._back_since[region]
        return reached - self._lost


def measured(agents: Iterable[tuple[str, PeerLinks]]) -> Distances:
    """Return what agents report that stand in these regions."""
    rtts_s: dict[tuple[str, str], float] = {}
    owners: dict[str, set[str]] = {}
    for here, links in agents:
        for region, rtt_s in links.rtts_s.items():
            rtts_s[here, region] = min(rtt_s, rtts_s.get((here, region), rtt_s))
        for region in links.owned:
            owners.setdefault(region, set()).add(here)
    return Distances(rtts_s, {region: min(those) for region, those in owners.items() if len(those) == 1})
