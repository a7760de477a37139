"""Who waits for which target, in the order in which they are to go. Pure.

A request that waits for the holder of its prompt waits in the holder's *lane*. The lanes lie across the queue (see
`lb.core.queue`), which bounds how many wait and for how long, and which knows whose turn it is between tenants.

*Order.* In a lane the tenant goes first that is next in the queue. Within a tenant the ranks of `policies.routing.deadlines`
go first, those with a deadline by it, all others by the instant of joining, later by what the policy has put the request off
(see `policies.routing.gorgo`). Age bounds the delay: it is LONGEST_PUT_OFF_S at most; where a request may wait for less than that / SHARE, it is less in proportion.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from lb.core.queue import LEAD, Ticket
from policies.routing.base import LONGEST_PUT_OFF_S
from policies.routing.deadlines import URGENT

T = TypeVar("T")

SHARE = 0.5
_SPARE = 64

_Place = tuple[int, float, int]  # its rank, an instant, its number


class Lanes(Generic[T]):
    """Every ticket is in one lane at most. Logarithmic time, but for moving the rest of a list."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # of the lanes
        self._by_size: list[
            tuple[int, int, str]
        ] = []  # a heap, the longest first; has sizes that are over, too
        self._resized = 0
        self._by_target: dict[str, dict[str, list[tuple[_Place, Ticket[T]]]]] = {}
        self._places: dict[Ticket[T], _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def join(self, ticket: Ticket[T], target_id: str, put_off_s: float) -> None:
        """The ticket waits for this target from now on, and goes as if it had joined `put_off_s` later."""
        self.leave(ticket)
        longest_s = min(LONGEST_PUT_OFF_S, SHARE * (ticket.deadline - ticket.joined_at))
        late_s = longest_s * (put_off_s / LONGEST_PUT_OFF_S)
        at = ticket.due_at if ticket.rank == URGENT else ticket.joined_at + late_s
        place = (ticket.rank, at, ticket.number)
        ticket.lane = target_id
        self._places[ticket] = place
        insort(self._by_target.setdefault(target_id, {}).setdefault(ticket.tenant, []), (place, ticket))
        self._resize(target_id, 1)

    def leave(self, ticket: Ticket[T]) -> None:
        """The ticket waits for no target of its own; one that did not is fine."""
        place = self._places.pop(ticket, None)
        if place is None or ticket.lane is None:
            return
        tenants = self._by_target[ticket.lane]
        line = tenants[ticket.tenant]
        del line[bisect_left(line, place, key=_place)]
        if not line:
            del tenants[ticket.tenant]
            if not tenants:
                del self._by_target[ticket.lane]
        self._resize(ticket.lane, -1)
        ticket.lane = None

    def targets(self) -> Collection[str]:
        """Return the targets for which requests wait."""
        return self._by_target.keys()

    def first(self, target_id: str, tag: Callable[[str], float]) -> Ticket[T] | None:
        """Return the next ticket of that target; `tag` gives the order of a tenant in the queue."""
        tenants = self._by_target.get(target_id)
        if not tenants:
            return None
        if len(tenants) == 1:
            return next(iter(tenants.values()))[0][1]
        tenant = min(tenants, key=lambda name: _turn(tag(name), tenants[name][0][0]))
        return tenants[tenant][0][1]

    def last(self, target_id: str) -> Ticket[T]:
        """Return the request that would go last to that target, for which requests wait."""
        return max((line[-1] for line in self._by_target[target_id].values()), key=_place)[1]

    def longest(self) -> str | None:
        """Return the target for which most are waiting; None if no request waits."""
        heap = self._by_size
        while heap and self._sizes.get(heap[0][2]) != -heap[0][0]:
            heappop(heap)
        return heap[0][2] if heap else None

    def all(self, target_id: str) -> list[Ticket[T]]:
        """Everyone who waits for that target."""
        return [ticket for line in self._by_target.get(target_id, {}).values() for _, ticket in line]

    def _resize(self, target_id: str, by: int) -> None:
        size = self._sizes.get(target_id, 0) + by
        if size:
            self._sizes[target_id] = size
        else:
            del self._sizes[target_id]
        if len(self._by_size) > 2 * len(self._sizes) + _SPARE:
            self._by_size = [(-size, 0, name) for name, size in self._sizes.items()]
            heapify(self._by_size)
        elif size:
            self._resized += 1
            heappush(self._by_size, (-size, self._resized, target_id))


def _place(entry: tuple[_Place, Ticket[T]]) -> _Place:
    return entry[0]


def _turn(tag: float, place: _Place) -> tuple[float, _Place]:
    """Return what orders the first tickets of tenants (see `lb.core.queue`)."""
    return tag - LEAD if place[0] == URGENT else tag, place
