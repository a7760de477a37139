"""The waiting room: requests that no target can take now, first come, first served, bounded in number and time.

Pure and synchronous: the proxy hangs a future on each ticket and drives the room from its event loop, the
simulator from its virtual clock. A ticket leaves the room exactly once: admitted, expired or given up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ticket(Generic[T]):
    """One waiting request: `item` is the owner's, `deadline` an instant on the owner's clock."""

    __slots__ = ("deadline", "item", "joined_at")

    def __init__(self, item: T, joined_at: float, deadline: float) -> None:
        self.item = item
        self.joined_at = joined_at
        self.deadline = deadline


class HoldQueue(Generic[T]):
    """FIFO of tickets with deadlines. `limit` is the owner's at the time of joining, since it may change."""

    def __init__(self) -> None:
        self._tickets: dict[Ticket[T], None] = {}  # a dict keeps the order and removes in constant time

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self, item: T, now: float, hold_s: float, limit: int) -> Ticket[T] | None:
        """A ticket at the end of the line; None if the room is full or there is no time to wait."""
        if len(self._tickets) >= limit or hold_s <= 0:
            return None
        ticket = Ticket(item, now, now + hold_s)
        self._tickets[ticket] = None
        return ticket

    def admit(self, admissible: Callable[[T], bool]) -> list[Ticket[T]]:
        """Take out, oldest first, every ticket whose item may go now."""
        admitted = [ticket for ticket in self._tickets if admissible(ticket.item)]
        for ticket in admitted:
            del self._tickets[ticket]
        return admitted

    def expire(self, now: float) -> list[Ticket[T]]:
        """Take out, oldest first, every ticket whose time is over."""
        expired = [ticket for ticket in self._tickets if ticket.deadline <= now]
        for ticket in expired:
            del self._tickets[ticket]
        return expired

    def leave(self, ticket: Ticket[T]) -> bool:
        """The owner gives up waiting; False if the ticket had already been taken out."""
        if ticket not in self._tickets:
            return False
        del self._tickets[ticket]
        return True

    def next_deadline(self) -> float | None:
        return min((ticket.deadline for ticket in self._tickets), default=None)
