"""What links the load balancer agents of a service in several regions: their certificates, and whom each of them hears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson

from lb.config.schema import Table
from policies.regions.ownership import DEAD_AFTER_S
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

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []  # what it says of each peer
        self._reached: frozenset[str] = frozenset()  # regions of which it hears an agent

    def table(self, order: RegionalOrder) -> Table:
        """Return the table to push."""
        return reachable_table(order.table, order.elsewhere, self._reached)

    def shown(self, acked: Table | None) -> tuple[tuple[str, ...] | None, tuple[dict[str, Any], ...]]:
        """Return what a view has of them: the regions owned by the table that the agent has, and its peers."""
        owned = None if acked is None or acked.regions is None else acked.regions.owned
        return owned, tuple(self.rows)

    async def ask(self, session: aiohttp.ClientSession, url: str, authorization: Mapping[str, str]) -> bool:
        """Ask the agent. Returns whether it reaches other regions than before. Raises aiohttp.ClientError, KeyError, ValueError."""
        async with session.get(f"{url}/-/regions", headers=authorization) as response:
            response.raise_for_status()
            rows = orjson.loads(await response.read())["peers"]
        reached = frozenset(
            row["region"] for row in rows if row["silent_s"] is not None and row["silent_s"] < DEAD_AFTER_S
        )
        changed, self.rows, self._reached = reached != self._reached, rows, reached
        return changed
