"""Round trips to the replicas of other regions: the time of a TCP connect to one replica of each.

A connect takes one round trip and no work of an engine. Every region is measured some times when it joins, and every EVERY_S from then
on; the shortest connect of the last ones is its distance (`lb.core.distances`), which all its replicas of the table have. Regions of
which the agent has no replica are measured as well if the table names an address there (`Regions.places`): by these distances a
controller decides whose they are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from lb.core.distances import Distance
from lb.core.targets import TargetTable

EVERY_S = 10.0
FIRST_EVERY_S = 1.0
FIRST_CONNECTS = 3
LOOK_S = 0.5
TIMEOUT_S = 3.0
_PORTS = {"http": 80, "https": 443}

_log = logging.getLogger("lb.engines.distance_prober")


class Address(NamedTuple):
    """Where a replica listens."""

    host: str
    port: int


class _Measured:
    """What is known of one address."""

    __slots__ = ("connects", "distance", "due_at", "rtt_s")

    def __init__(self) -> None:
        self.distance = Distance()
        self.rtt_s: float | None = None
        self.connects = 0
        self.due_at = float("-inf")


async def connect_s(address: Address) -> float:
    """Return how long a TCP connect takes, in seconds. Raises OSError or asyncio.TimeoutError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, resolved = found[0]
    with socket.socket(family, kind, protocol) as connecting:
        connecting.setblocking(False)
        since = loop.time()
        await asyncio.wait_for(loop.sock_connect(connecting, resolved), TIMEOUT_S)
        return loop.time() - since


class DistanceProber:
    """Measures for the agent of `region`; without one, for places of the table only."""

    def __init__(
        self,
        table: TargetTable,
        region: str,
        clock: Callable[[], float],
        connect: Callable[[Address], Awaitable[float]] = connect_s,
    ) -> None:
        self._table = table
        self._region = region
        self._clock = clock
        self._connect = connect
        self._replaced = -1
        self._measured: dict[Address, _Measured] = {}
        self._targets: dict[Address, list[str]] = {}  # whose distance it is
        self._places: dict[str, Address] = {}
        self._measuring: asyncio.Task[None] | None = None

    def rtts_ms(self) -> dict[str, float]:
        """Return the round trips to the places of the table that have been measured, by region."""
        found = ((region, self._measured[address].rtt_s) for region, address in self._places.items())
        return {region: round(1000 * rtt_s, 3) for region, rtt_s in found if rtt_s is not None}

    def tick(self) -> None:
        """Begin to time the connects that are due, unless some are under way. Called every LOOK_S."""
        if self._measuring is not None:
            return
        due = self._due()
        if due:
            self._measuring = asyncio.get_running_loop().create_task(self._measure_all(due))
            self._measuring.add_done_callback(self._measured_all)

    async def close(self) -> None:
        """Stop the connects that are under way."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)

    def _due(self) -> list[Address]:
        if self._replaced != self._table.replaced:
            self._replaced = self._table.replaced
            self._use_table()
        now = self._clock()
        return [address for address, one in self._measured.items() if now >= one.due_at]

    async def _measure_all(self, due: list[Address]) -> None:
        await asyncio.gather(*(self._measure(address) for address in due))

    def _measured_all(self, task: asyncio.Task[None]) -> None:
        self._measuring = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("cannot measure distances", exc_info=error)

    def _use_table(self) -> None:
        table = self._table.table
        places = () if table.regions is None else table.regions.places
        self._places = {place.region: _address(place.url) for place in places}
        preferred = set(self._places.values())
        by_region: dict[str, dict[Address, None]] = {}
        targets: dict[str, list[str]] = {}
        for target in table.targets:
            if self._region and target.region and target.region != self._region:
                by_region.setdefault(target.region, {})[_address(target.url)] = None
                targets.setdefault(target.region, []).append(target.id)
        self._targets = {}
        for region, addresses in by_region.items():
            known = [one for one in addresses if one in preferred or one in self._measured]
            self._targets.setdefault((known or list(addresses))[0], []).extend(targets[region])
        wanted = dict.fromkeys((*self._places.values(), *self._targets))
        self._measured = {address: self._measured.get(address) or _Measured() for address in wanted}
        for address in self._targets:
            self._tell(address)

    async def _measure(self, address: Address) -> None:
        one = self._measured[address]
        is_first = one.connects < FIRST_CONNECTS
        one.connects += 1
        one.due_at = self._clock() + (FIRST_EVERY_S if is_first else EVERY_S)
        try:
            took_s = await self._connect(address)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 (not the same in 3.10)
            return  # whether it lives is for others to find out
        one.rtt_s = one.distance.observe(took_s, self._clock(), EVERY_S)
        if self._measured.get(address) is one:
            self._tell(address)

    def _tell(self, address: Address) -> None:
        """The targets of that region have the distance of the address."""
        rtt_s = self._measured[address].rtt_s
        if rtt_s is None:
            return
        for target_id in self._targets.get(address, ()):
            key = self._table.key(target_id)
            if key is not None:
                self._table.measured(key, rtt_s)


def _address(url: str) -> Address:
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80))
