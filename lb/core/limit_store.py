"""The numbers behind the limits of tenants: where they are kept, and who shares them. Pure.

`lb.core.api_keys` decides; a `LimitStore` holds what it decides on. Several agents of one host that serve one port, and
an agent and its successor, must count as one, so their store is a file (`lb.agent.limits_file`). An agent that is alone
keeps the numbers in memory.
"""

from __future__ import annotations

import math
from typing import Protocol
from weakref import WeakValueDictionary

FULL = math.inf  # the level of a bucket that has never been used, of any size


class LimitRow(Protocol):
    """The numbers of one tenant.

    Levels are shared, and are read and written between `lock` and `unlock` only; the `own_` numbers are written by this
    process alone.
    """

    requests: float  # in the bucket of requests; FULL where there has been no limit
    tokens: float  # in the bucket of tokens, less reservations; below zero is a debt
    filled_at: float  # the instant for which both levels hold
    own_in_flight: float
    own_reserved: float  # tokens taken from `tokens` for requests that are not settled

    def in_flight(self) -> int:
        """Requests under way in all processes."""
        ...

    def reserved(self) -> int:
        """Tokens reserved by all processes."""
        ...


class LimitStore(Protocol):
    """Rows by the name of their tenant."""

    def row(self, tenant: str) -> LimitRow:
        """Return the row of this tenant; a new one has full buckets.

        Two calls return the same numbers for as long as one of the rows is in use.
        """
        ...

    def lock(self, now: float) -> None:
        """No other process changes levels until `unlock`. Takes microseconds; does not nest."""
        ...

    def unlock(self) -> None: ...

    def reap(self, now: float) -> bool:
        """Forget the requests of processes that died, and return their reserved tokens to the buckets.

        Returns whether there were any. Must be called without the lock; cheap enough for each refused request.
        """
        ...


class MemoryRow:
    """The row of a process that shares with no other."""

    __slots__ = ("__weakref__", "filled_at", "own_in_flight", "own_reserved", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = FULL
        self.tokens = FULL
        self.filled_at = 0.0
        self.own_in_flight = 0.0
        self.own_reserved = 0.0

    def in_flight(self) -> int:
        return int(self.own_in_flight)

    def reserved(self) -> int:
        return int(self.own_reserved)


class MemoryLimits:
    """A `LimitStore` that shares with no other process. A row is kept for as long as a tenant or a request uses it."""

    def __init__(self) -> None:
        self._rows: WeakValueDictionary[str, MemoryRow] = WeakValueDictionary()

    def row(self, tenant: str) -> MemoryRow:
        row = self._rows.get(tenant)
        if row is None:
            row = self._rows[tenant] = MemoryRow()
        return row

    def lock(self, now: float) -> None:
        """Nothing: no other process has these numbers."""

    def unlock(self) -> None:
        """As `lock`."""

    def reap(self, now: float) -> bool:
        return False
