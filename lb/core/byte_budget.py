"""One budget of bytes for everything that waits in memory: bodies that are kept, and the JSON parsed from them. Pure.

*Streams.* What is kept of running streams leaves less room for bodies: `ByteBudget.streams`, which is counted about once a second.
It is not refused, and belongs to no tenant.

*Room.* While there is room every tenant takes what it wants. A fixed limit per tenant would refuse bodies while memory is free.

*Shares.* When the budget is full, a tenant's share is the limit times its weight, over the weights of all tenants that
hold bytes. A request that leaves its tenant within its share gets room: the budget refuses bodies of tenants above
their shares, one after the other, each time of the tenant that holds most for its weight (as the queue does, see
`lb.core.queue`), until there is enough or all are within their shares. A tenant beyond its share gets no room.

*What can be refused.* Bodies with a `Holding`: those that are still arriving (`lb.proxy.upload`), and large ones of requests
in the queue that no target can have read. All other bytes are counted and not taken back. Nothing is refused unless that
makes enough room. The youngest body goes first, among those that hold at least half the mean of their tenant's: thousands of
clients that have sent a few bytes do not stand before those that hold the memory.

Clients without a key are one tenant, as in the queue. Their addresses would not tell them apart: a proxy or a company's
network is one address for many clients, and one client may have as many IPv6 addresses as it likes, each with a share.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

# What a value of parsed JSON costs in CPython: an empty dict and its place in a list, an empty list, a small object.
_OBJECT_BYTES: Final = 72
_LIST_BYTES: Final = 64
_ITEM_BYTES: Final = 16
_COSTS: Final = ((b"{", _OBJECT_BYTES), (b"[", _LIST_BYTES), (b",", _ITEM_BYTES))
_SLICE_BYTES: Final = 64 * 1024
SMALL_BYTES: Final = 16 * 1024
SMALL_FACTOR: Final = 4  # of a body that is not worth counting in
_SPARE_TENANTS: Final = 64  # are kept although they hold nothing, as they mostly come again at once


class Holding:
    """The bytes of one body that can be refused. `size` is how many it holds.

    `refuse` is called when the budget has taken them back for another tenant; it must not take any.
    """

    __slots__ = ("_budget", "_line", "_weight", "is_open", "refuse", "size")

    def __init__(
        self, budget: ByteBudget, line: _TenantBytes, weight: float, refuse: Callable[[], None]
    ) -> None:
        self._budget = budget
        self._line = line
        self._weight = weight
        self.refuse = refuse
        self.size = 0
        self.is_open = True

    def take(self, size: int) -> bool:
        """Hold `size` bytes more. Returns False, and takes nothing, if there is no room for them."""
        line = self._line
        if not self.is_open or not self._budget.take(size, line.tenant, self._weight):
            return False
        line.refusable += size
        self.size += size
        return True

    def release(self) -> None:
        """Give all bytes back. The second time nothing happens."""
        if self.is_open:
            self.keep()
            self._budget.give_back(self.size, self._line.tenant)

    def keep(self) -> None:
        """The body can no longer be refused, and its owner gives the bytes back. The second time nothing happens."""
        if self.is_open:
            self.is_open = False
            del self._line.bodies[self]
            self._line.refusable -= self.size


class _TenantBytes:
    """What one tenant holds: `held` bytes in all, `refusable` of them in bodies with a Holding, the oldest of which is first."""

    __slots__ = ("bodies", "held", "refusable", "tenant", "weight")

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.held = 0
        self.refusable = 0
        self.bodies: dict[Holding, None] = {}

    def in_order(self) -> list[Holding]:
        """Return the bodies that can be refused, in the order in which they are."""
        youngest_first = [one for one in reversed(self.bodies) if one.size]
        enough = self.refusable / (2 * max(1, len(youngest_first)))
        large = [one for one in youngest_first if one.size >= enough]
        return large + [one for one in youngest_first if one.size < enough]


class ByteBudget:
    """Counts bytes that are kept against a limit, by tenant.

    `taken` is the sum, `refused` how often there was no room, and `evicted` how many bodies had to make room for
    another tenant. `streams` are bytes that running streams keep beside what is taken. Constant time, but for a full budget: the
    number of tenants that hold bytes, and of their bodies.
    """

    __slots__ = ("_lines", "evicted", "limit", "refused", "streams", "taken")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.streams = 0
        self.refused = 0
        self.evicted = 0
        self._lines: dict[str, _TenantBytes] = {}

    def take(self, size: int, tenant: str = "", weight: float = 1.0) -> bool:
        """Take `size` bytes for a tenant.

        Returns False, and takes nothing, if there is no room for them; one taker may always have what it wants while
        nothing is taken.
        """
        room = self.limit - self.streams - self.taken
        if self.taken and size > room and not self._make_room(size - room, size, tenant, weight):
            self.refused += 1
            return False
        line = self._lines.get(tenant)
        if line is None:
            line = self._line(tenant, weight)
        line.weight = weight
        line.held += size
        self.taken += size
        return True

    def give_back(self, size: int, tenant: str = "") -> None:
        self.taken -= size
        line = self._lines[tenant]
        line.held -= size
        if not line.held and len(self._lines) > _SPARE_TENANTS and not line.bodies:
            del self._lines[tenant]

    def open(self, refuse: Callable[[], None], tenant: str = "", weight: float = 1.0) -> Holding:
        """Return the holding of a body that begins to arrive."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._line(tenant, weight)
        holding = Holding(self, line, weight, refuse)
        line.bodies[holding] = None
        return holding

    def offer(self, size: int, refuse: Callable[[], None], tenant: str = "", weight: float = 1.0) -> Holding:
        """Return a holding of bytes that the tenant has taken: until its owner keeps them, they can be refused."""
        holding = self.open(refuse, tenant, weight)
        holding.size = size
        self._lines[tenant].refusable += size
        return holding

    def held(self) -> dict[str, int]:
        """Return how much each tenant holds that holds anything."""
        return {tenant: line.held for tenant, line in self._lines.items() if line.held}

    # --- inside

    def _line(self, tenant: str, weight: float) -> _TenantBytes:
        line = self._lines[tenant] = _TenantBytes(tenant, weight)
        return line

    def _make_room(self, lacking: int, size: int, tenant: str, weight: float) -> bool:
        """Refuse bodies of tenants above their shares, if that makes room; False if it would not."""
        own = self._lines.get(tenant)
        others = [line for line in self._lines.values() if line.held and line is not own]
        per_weight = (self.limit - self.streams) / (weight + sum(line.weight for line in others))
        if size + (own.held if own is not None else 0) > per_weight * weight:
            return False
        refused = _to_refuse(others, per_weight, lacking)
        for holding in refused:
            holding.release()
        self.evicted += len(refused)
        for holding in refused:
            holding.refuse()
        return bool(refused)


def _to_refuse(lines: list[_TenantBytes], per_weight: float, lacking: int) -> list[Holding]:
    """Return bodies of tenants above their shares that hold `lacking` bytes; none if they hold less than that."""
    heap = [
        (-line.held / line.weight, number, line.held, line.in_order()[::-1])
        for number, line in enumerate(lines)
        if line.refusable and line.held > per_weight * line.weight
    ]
    heapify(heap)
    chosen: list[Holding] = []
    while lacking > 0:
        if not heap:
            return []
        _, number, held, bodies = heappop(heap)
        line, body = lines[number], bodies.pop()
        chosen.append(body)
        lacking -= body.size
        held -= body.size
        if bodies and held > per_weight * line.weight:
            heappush(heap, (-held / line.weight, number, held, bodies))
    return chosen


def parsed_bytes(body: bytes) -> int:
    """Return about how many bytes the objects need that a JSON parser makes of `body`, beyond the text itself."""
    if len(body) <= SMALL_BYTES:
        return SMALL_FACTOR * len(body)
    return len(body) + structure_bytes(body)


def structure_bytes(text: bytes) -> int:
    """Return about how many bytes the objects take whose beginnings are in `text`, a part of a body."""
    total = 0
    for at in range(0, len(text), _SLICE_BYTES):
        end = at + _SLICE_BYTES
        for mark, cost in _COSTS:
            # Where there is none, as in an image, `find` knows that in a tenth of the time.
            if text.find(mark, at, end) >= 0:
                total += cost * text.count(mark, at, end)
    return total
