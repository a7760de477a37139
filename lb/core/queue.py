"""The queue of requests that no target can take now. Fair between tenants, bounded in number and time. Pure.

*Order.* Within a tenant first come, first served. Between tenants start-time fair queueing (Goyal, Vin, Cheng 1996):
each tenant has a start tag, the queue a virtual time. The next to go is the oldest ticket of the tenant with the lowest
tag, the older one among equals; the virtual time becomes that tag, and the tenant's next tag is later by 1 / weight. A
tenant that comes again begins at the virtual time: having been away earns nothing. Tags belong to tenants
and not to tickets, so a request that leaves or cannot go now costs its tenant nothing. One tenant alone is plain FCFS.

*Priority.* A request that comes back, having lost its target, came before all others of its tenant: it goes first, its turn has
been charged already, and it finds a place in a full queue, which has as many again for such requests.

*Deadlines.* Within a tenant the ranks of `policies.routing.deadlines` come first. Between tenants a ticket with a deadline may go
out of turn, as if the tag of its tenant were lower by LEAD, and is charged like any other: borrowed virtual time (Duda,
Cheriton 1999). So a tenant gets its share sooner and no more of it: it is never ahead of another one that waits by more than LEAD
turns for its weight. In a full queue a ticket with a deadline takes the place of its tenant's last one without.

*Places.* One tenant may fill the whole queue. If another comes then, it takes the place of the youngest ticket of the
tenant that has the most for its weight (drop from the longest queue, McKenney 1990), until the places are shared
by weight. Any fixed limit per tenant would either refuse requests while places are free, or keep newcomers out. The
places of one tenant are shared in the same way between its groups (the models that its requests name): requests for a
model whose targets are gone do not keep those for another model out.

The proxy attaches a request to each ticket and drives the queue from its event loop, the simulator from its virtual
clock. A ticket leaves the queue exactly once: taken, expired, evicted or cancelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Final, Generic, TypeVar

from policies.routing.deadlines import LATE, URGENT, rank_of

T = TypeVar("T")

LEAD: Final = 8.0  # of the weight 1: requests
_SPARE_TIMERS: Final = 64


class Ticket(Generic[T]):
    """One waiting request: `item` is the owner's, `deadline` and `due_at` are instants on the owner's clock.

    It waits until its `deadline` at most. Its first byte is due at `due_at` (0: at no instant).
    """

    __slots__ = (
        "deadline",
        "due_at",
        "group",
        "has_priority",
        "item",
        "joined_at",
        "lane",
        "number",
        "rank",
        "tenant",
        "tried",
        "waits",
    )

    def __init__(
        self,
        item: T,
        joined_at: float,
        deadline: float,
        number: int,
        tenant: str,
        has_priority: bool,
        tried: frozenset[int],
        group: str = "",
        due_at: float = 0.0,
    ) -> None:
        self.item = item
        self.joined_at = joined_at
        self.deadline = deadline
        self.number = number  # in the order of joining
        self.tenant = tenant
        self.group = group
        self.has_priority = has_priority
        self.due_at = due_at
        self.rank = rank_of(due_at, joined_at, False, has_priority)
        self.tried = tried
        self.waits = True
        self.lane: str | None = None  # the target it waits for (see `lb.core.lanes`), if it is one alone


class _TenantQueue(Generic[T]):
    """The tickets of one tenant by their ranks, each in its order, and where it stands in virtual time."""

    __slots__ = ("by_group", "late_tickets", "priority_tickets", "tag", "tickets", "urgent_tickets", "weight")

    def __init__(self, tag: float, weight: float) -> None:
        self.tag = tag
        self.weight = weight
        self.priority_tickets: OrderedDict[Ticket[T], None] = (
            OrderedDict()
        )  # the first is found in constant time
        self.urgent_tickets: list[tuple[float, int, Ticket[T]]] = []  # in order
        self.tickets: OrderedDict[Ticket[T], None] = OrderedDict()
        self.late_tickets: OrderedDict[Ticket[T], None] = OrderedDict()
        self.by_group: dict[str, int] = {}  # how many tickets there are of each, without those with priority

    def add(self, ticket: Ticket[T]) -> None:
        if ticket.rank == URGENT:
            insort(self.urgent_tickets, (ticket.due_at, ticket.number, ticket))
        else:
            self._of(ticket)[ticket] = None
        if not ticket.has_priority:
            self.by_group[ticket.group] = self.by_group.get(ticket.group, 0) + 1

    def remove(self, ticket: Ticket[T]) -> None:
        if ticket.rank == URGENT:
            del self.urgent_tickets[bisect_left(self.urgent_tickets, (ticket.due_at, ticket.number, ticket))]
        else:
            del self._of(ticket)[ticket]
        if not ticket.has_priority:
            self.by_group[ticket.group] -= 1
            if not self.by_group[ticket.group]:
                del self.by_group[ticket.group]

    def last(self) -> Ticket[T] | None:
        """Return the ticket that would go last of those without priority."""
        return next(self._backwards(), None)

    def last_of_largest_group(self, group: str) -> Ticket[T] | None:
        """Return the last ticket of the group that has most, if that is more than this one would have with one more."""
        most = max(self.by_group, key=self.by_group.__getitem__, default=group)
        if self.by_group.get(most, 0) <= self.by_group.get(group, 0) + 1:
            return None
        return next(ticket for ticket in self._backwards() if ticket.group == most)

    @property
    def held(self) -> int:
        """How many tickets there are, without those with priority."""
        return len(self.urgent_tickets) + len(self.tickets) + len(self.late_tickets)

    def __len__(self) -> int:
        return len(self.priority_tickets) + self.held

    def __iter__(self) -> Iterator[Ticket[T]]:
        urgent = (ticket for _, _, ticket in self.urgent_tickets)
        return chain(self.priority_tickets, urgent, self.tickets, self.late_tickets)

    def _first(self) -> Ticket[T]:
        """Return the ticket that goes first; there must be one."""
        if not self.priority_tickets and self.urgent_tickets:
            return self.urgent_tickets[0][2]
        return next(iter(self.priority_tickets or self.tickets or self.late_tickets))

    def _backwards(self) -> Iterator[Ticket[T]]:
        urgent = (ticket for _, _, ticket in reversed(self.urgent_tickets))
        return chain(reversed(self.late_tickets), reversed(self.tickets), urgent)

    def _of(self, ticket: Ticket[T]) -> OrderedDict[Ticket[T], None]:
        if ticket.has_priority:
            return self.priority_tickets
        return self.late_tickets if ticket.rank == LATE else self.tickets

    def walk(self) -> Iterator[Ticket[T]]:
        """Yield each ticket once; the line may change under way."""
        while len(self):
            head = self._first()
            yield head
            if head.waits:  # it cannot go: on to those behind it
                yield from [ticket for ticket in self if ticket is not head]
                return


class RequestQueue(Generic[T]):
    """`limit` is the owner's at the time of joining, since it may change.

    `evicted` is called for each ticket that must make room for another tenant's; without it no ticket is evicted.
    Constant or logarithmic time throughout, but for a full queue (the number of tenants).
    """

    def __init__(self, evicted: Callable[[Ticket[T]], None] | None = None) -> None:
        self._evicted = evicted
        self._lines: dict[str, _TenantQueue[T]] = {}
        self._timers: list[tuple[float, int, Ticket[T]]] = []  # a heap; may hold tickets that have left
        self._with_tried: dict[frozenset[int], int] = {}  # how many tickets there are of each
        self._length = 0
        self._now = 0.0  # virtual
        self.on_drop: Callable[[Ticket[T]], None] | None = None  # is called for every ticket that has left
        self.joined = 0  # tickets ever given out

    def __len__(self) -> int:
        return self._length

    def join(
        self,
        item: T,
        now: float,
        hold_s: float,
        limit: int,
        tenant: str = "",
        weight: float = 1.0,
        has_priority: bool = False,
        tried: Collection[int] = (),
        group: str = "",
        due_at: float = 0.0,
    ) -> Ticket[T] | None:
        """Return a ticket at the end of the tenant's tickets of its rank.

        None if the queue is full or there is no time to wait. `tried` is what the ticket is counted under in `tried_sets`.
        """
        if hold_s <= 0:
            return None
        finds_a_place = has_priority and self._length < 2 * limit
        if self._length >= limit and not finds_a_place:
            is_urgent = rank_of(due_at, now, False, has_priority) == URGENT
            if not self._make_room(tenant, weight, limit, group, is_urgent):
                return None
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _TenantQueue(self._now, weight)
        elif not len(line):
            line.tag = max(line.tag, self._now)
        line.weight = weight
        self.joined += 1
        ticket = Ticket(
            item, now, now + hold_s, self.joined, tenant, has_priority, frozenset(tried), group, due_at
        )
        self._with_tried[ticket.tried] = self._with_tried.get(ticket.tried, 0) + 1
        line.add(ticket)
        self._length += 1
        heappush(self._timers, (ticket.deadline, ticket.number, ticket))
        return ticket

    def walk(self) -> Iterator[Ticket[T]]:
        """Yield every ticket once, in the order in which they are to go. Those met may be taken, any may leave."""
        heap = []
        for line in self._lines.values():
            tickets = line.walk()
            for head in tickets:
                heap.append((*_turn(line.tag, head), head, line, tickets))
                break
        heapify(heap)
        while heap:
            _, _, _, ticket, line, tickets = heappop(heap)
            if ticket.waits:
                yield ticket
            for following in tickets:
                heappush(heap, (*_turn(line.tag, following), following, line, tickets))
                break

    def take(self, ticket: Ticket[T]) -> bool:
        """Its turn has come; False if the ticket had already left."""
        line = self._lines[ticket.tenant] if ticket.waits else None
        if line is None:
            return False
        self._now = max(self._now, line.tag - LEAD if ticket.rank == URGENT else line.tag)
        if not ticket.has_priority:
            line.tag += 1.0 / line.weight
        self._drop(ticket)
        return True

    def is_late(self, ticket: Ticket[T]) -> None:
        """The deadline of an urgent ticket cannot be kept: it goes after all others of its tenant."""
        line = self._lines[ticket.tenant]
        line.remove(ticket)
        ticket.rank = LATE
        line.add(ticket)

    def leave(self, ticket: Ticket[T]) -> bool:
        """Return the owner gives up waiting; False if the ticket had already left."""
        if not ticket.waits:
            return False
        self._drop(ticket)
        return True

    def expire(self, now: float) -> list[Ticket[T]]:
        """Take out, oldest first, every ticket whose time is over."""
        expired = []
        while self._timers and self._timers[0][0] <= now:
            ticket = heappop(self._timers)[2]
            if ticket.waits:
                self._drop(ticket)
                expired.append(ticket)
        return sorted(expired, key=_number)

    def clear(self) -> list[Ticket[T]]:
        """Take out everybody, oldest first."""
        everybody = sorted((one for line in self._lines.values() for one in line), key=_number)
        for ticket in everybody:
            self._drop(ticket)
        return everybody

    def next_deadline(self) -> float | None:
        while self._timers and not self._timers[0][2].waits:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def tag(self, tenant: str) -> float:
        """Return where a tenant that has tickets stands: the lowest is next."""
        return self._lines[tenant].tag

    @property
    def tried_sets(self) -> Collection[frozenset[int]]:
        """What the tickets have tried, each set once: hardly ever as many as there are tickets."""
        return self._with_tried.keys()

    def recount(self, tried: Callable[[T], Collection[int]]) -> None:
        """Find out again what each ticket has tried."""
        self._with_tried.clear()
        for line in self._lines.values():
            for ticket in line:
                ticket.tried = frozenset(tried(ticket.item))
                self._with_tried[ticket.tried] = self._with_tried.get(ticket.tried, 0) + 1

    # --- inside

    def _make_room(self, tenant: str, weight: float, limit: int, group: str, is_urgent: bool) -> bool:
        """Push out a ticket of a tenant, or of a group of this one, that has more than its share; False if there is none."""
        if self._evicted is None or not self._lines or self._length > limit:
            return False
        greedy = max(self._lines.values(), key=_tickets_per_weight)
        own = self._lines.get(tenant)
        held = own.held if own is not None else 0
        last: Ticket[T] | None = None
        if greedy.held and _tickets_per_weight(greedy) > (held + 1) / weight:
            last = greedy.last()
        elif own is not None:
            last = own.last_of_largest_group(group)
            if last is None and is_urgent:
                last = own.last()
                last = None if last is None or last.rank == URGENT else last
        if last is None:
            return False
        self._drop(last)
        self._evicted(last)
        return True

    def _drop(self, ticket: Ticket[T]) -> None:
        ticket.waits = False
        line = self._lines[ticket.tenant]
        line.remove(ticket)
        self._length -= 1
        if self.on_drop is not None:
            self.on_drop(ticket)
        left = self._with_tried[ticket.tried] - 1
        if left:
            self._with_tried[ticket.tried] = left
        else:
            del self._with_tried[ticket.tried]
        if not self._length:  # a busy period is over, and with it the memory of who had how much
            self._lines.clear()
            self._timers.clear()
            self._now = 0.0
        elif len(self._timers) > 2 * self._length + _SPARE_TIMERS:
            self._timers = [timer for timer in self._timers if timer[2].waits]
            heapify(self._timers)


def _number(ticket: Ticket[T]) -> int:
    return ticket.number


def _tickets_per_weight(line: _TenantQueue[T]) -> float:
    return line.held / line.weight


def _turn(tag: float, ticket: Ticket[T]) -> tuple[float, bool, int]:
    """Return what orders the first tickets of tenants."""
    return tag - LEAD if ticket.rank == URGENT else tag, not ticket.has_priority, ticket.number
