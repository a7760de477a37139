"""The requests under way: those in the queue, those that wait for a first byte, relays and tunnels.

It launches queued requests when something has made room, and moves requests off targets that the table has lost.
Each request is called behind the fault barrier: a defect that one of them meets ends that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Protocol, TypeVar

from lb.core.forwarding import Forwarding
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler, Waiter
from lb.core.targets import Booking, Outlook, TargetTable
from lb.observe.explain import Explanation
from lb.proxy.runtime import Runtime
from policies.routing.base import Choice

# Queued requests launched in one turn of the loop, each of which takes a few tenths of a millisecond.
LET_IN_AT_ONCE = 8
RECONSIDERED = 8  # queued requests that are compared with other regions at each of their reports
RECONSIDERED_FOR_CREDIT = 2  # the same, each time that a peer takes another request

_NEVER = float("inf")


class Registered(Protocol):
    """A part of a request under way."""

    @property
    def booking(self) -> Booking | None:
        """The booking of the present attempt."""
        ...

    @property
    def explanation(self) -> Explanation: ...

    def keep_alive(self, now: float) -> None:
        """The client has got nothing for a while: send it a comment if that is due, and possible."""
        ...

    def crashed(self, entrance: str, error: Exception) -> None:
        """The code behind an entrance raised: end this request, and nothing else."""
        ...


class Waiting(Waiter, Registered, Protocol):
    """A request without a first byte: in the queue, or with an attempt under way."""

    def waits_until(self) -> float:
        """Return when the attempt under way has waited too long for its first byte."""
        ...

    def admitted(self, choice: Choice, now: float) -> None:
        """The queue has let it go."""
        ...

    def expired(self, now: float) -> None:
        """It has waited in the queue for too long."""
        ...

    def evicted(self, now: float) -> None:
        """The queue is full, and another tenant has a better right to the place."""
        ...

    def shed(self, now: float) -> None:
        """Refuse the request, since its deadline cannot be kept."""
        ...

    def stranded(self, now: float) -> None:
        """The target that alone can serve it has left the table."""
        ...

    def leaves(self, now: float) -> bool:
        """Forward the request if it is better off in another region. Returns whether it is on its way there."""
        ...

    def out_of_time(self, now: float) -> None:
        """The time to first byte is used up."""
        ...

    def call_back(self, why: str) -> None:
        """Its attempt waits in vain: on to another target."""
        ...

    def leave_doubtful(self, most: int) -> None:
        """Its target is in doubt and another is healthy: on to that, unless it has been started `most` times."""
        ...


class Running(Registered, Protocol):
    """A request whose response is under way: a relay or a tunnel."""

    def held_bytes(self) -> int:
        """Return about how many bytes of memory hold what has been sent of its response."""
        ...

    def check_relay(self, now: float, elapsed_s: float) -> None:
        """Find out whether anything has come since the last check, `elapsed_s` ago, and act if nothing has for too long."""
        ...

    def check_tunnel(self, now: float) -> None:
        """Close a tunnel that nothing has passed for too long."""
        ...

    def hand_over(self) -> bool:
        """Its target will be taken away soon: go on elsewhere if that is possible. Returns False if it is not."""
        ...

    def close_tunnel(self, why: str) -> None:
        """Close both ends with a close frame of code 1001 (going away)."""
        ...


R = TypeVar("R", bound=Registered)


class RequestRegistry:
    """All requests of one agent that are under way, by what they wait for."""

    def __init__(self, table: TargetTable, forwarding: Forwarding | None, runtime: Runtime) -> None:
        """`forwarding` is to other regions; None if the agent has no identity among them."""
        self.table = table
        self.forwarding = forwarding
        self.queue: RequestQueue[Waiting] = RequestQueue(
            lambda ticket: self.guard("queue", ticket.item, lambda one: one.evicted(runtime.clock()))
        )
        self.scheduler: Scheduler[Waiting] = Scheduler(table, self.queue)
        self.waiting: dict[Waiting, None] = {}  # with an attempt that has no first byte yet
        self.relays: dict[Running, None] = {}  # with a response under way
        self.tunnels: dict[Running, None] = {}
        self.queueing = True  # may a request wait for a target?
        self.runtime = runtime
        self._waiting_until = _NEVER  # none of `waiting` has to be checked before
        self._let_in_due = self._changed_due = self._credit_due = False

    @property
    def queued(self) -> int:
        """How many requests wait in the queue."""
        return len(self.queue)

    def stream_bytes(self) -> int:
        """Return about how many bytes of memory hold what has been sent of responses under way."""
        return sum(running.held_bytes() for running in self.relays)

    def table_of(self, booking: Booking) -> TargetTable:
        """Return the table that has the booking: that of replicas, or that of peers."""
        forwarding = self.forwarding
        return forwarding.peer_table if forwarding is not None and forwarding.owns(booking) else self.table

    def explanations(self) -> Iterator[Explanation]:
        """Yield the explanations of all requests under way, but for tunnels."""
        queued = (ticket.item for ticket in self.queue.walk())
        return (one.explanation for one in chain[Registered](self.relays, self.waiting, queued))

    # --- time

    def wait(self, request: Waiting, until: float) -> None:
        """An attempt of the request is under way, which has until then for its first byte."""
        self.waiting[request] = None
        if until < self._waiting_until:
            self._waiting_until = until

    def overdue(self, now: float) -> list[Waiting]:
        """Return the requests whose attempt has waited too long for its first byte. Costs nothing while there are none."""
        overdue: list[Waiting] = []
        if now < self._waiting_until:
            return overdue
        self._waiting_until = _NEVER
        for request in self.waiting:
            until = request.waits_until()
            if now >= until:
                overdue.append(request)
            elif until < self._waiting_until:
                self._waiting_until = until
        return overdue

    def unanswered(self) -> list[Waiting]:
        """Return the requests without a first byte: in the queue, or with an attempt under way."""
        return [*self.waiting, *(ticket.item for ticket in self.queue.walk())]

    # --- room

    def let_in_soon(self) -> None:
        """Let queued requests in once in this turn of the loop, however often it is called."""
        if not self._let_in_due:
            self._let_in_due = True
            self.runtime.loop.call_soon(self.let_in)

    def let_in(self) -> None:
        """Launch the queued requests that may go now; after some of them others of the loop have their turn first."""
        self._let_in_due = False
        try:
            now = self.runtime.clock()
            for count, (request, choice) in enumerate(self.scheduler.let_in(now), 1):
                try:
                    if self.forwarding is not None:
                        self.forwarding.pace.left(now)
                    request.admitted(choice, now)
                except Exception as error:  # noqa: BLE001 (the barrier)
                    request.crashed("queue", error)
                if count == LET_IN_AT_ONCE:
                    self.let_in_soon()
                    break
            for ticket in self.scheduler.take_shed():
                self.guard("queue", ticket.item, lambda one: one.shed(now))
        except Exception as error:  # noqa: BLE001 (the barrier)
            self.runtime.faults.report("queue", error)

    def stop_queueing(self) -> None:
        """Turn away the requests in the queue, and those that would have to wait from now on."""
        self.queueing = False
        for ticket in self.queue.clear():
            self.guard("queue", ticket.item, lambda one: one.expired(self.runtime.clock()))

    # --- the table

    def changed_soon(self) -> None:
        """Act on a change of the table once in this turn of the loop."""
        if not self._changed_due:
            self._changed_due = True
            self.runtime.loop.call_soon(self.changed)

    def changed(self) -> None:
        """The table has changed: requests that wait in vain move, queued ones that can go now go."""
        self._changed_due = False
        self._move_waiting()
        for request in self.scheduler.stranded():
            self.guard("changed", request, lambda one: one.stranded(self.runtime.clock()))
        if len(self.queue):
            self.let_in_soon()

    def _move_waiting(self) -> None:
        """Call back attempts that wait in vain, and close tunnels whose target is gone."""
        now = self.runtime.clock()
        for request in list(self.waiting):
            self.guard("changed", request, lambda one: self._move(one, now))
        for tunnel in list(self.tunnels):
            booking = tunnel.booking
            if booking is not None and booking.entry.departed:
                self.guard("changed", tunnel, lambda one: one.close_tunnel("its target is gone"))

    def _move(self, request: Waiting, now: float) -> None:
        booking = request.booking
        if booking is None:
            return
        outlook = self.table_of(booking).outlook(booking, now)
        if outlook is Outlook.LOST:
            request.call_back("its target is gone")
        elif outlook is Outlook.DOUBTFUL and self.table.candidates(now, request.tried)[0].is_good:
            request.leave_doubtful(self.table.table.retries.max_total_retries)

    # --- other regions

    def credit_came(self) -> None:
        """A peer takes another request: compare the first of the queue with it, once in this turn of the loop."""
        if not self._credit_due and len(self.queue):
            self._credit_due = True
            self.runtime.loop.call_soon(self._use_credit)

    def _use_credit(self) -> None:
        self._credit_due = False
        self.reconsider(RECONSIDERED_FOR_CREDIT)

    def reconsider(self, most: int = RECONSIDERED) -> None:
        """A peer has reported: compare the first of the queued requests with the other regions again."""
        now = self.runtime.clock()
        for ticket in list(islice(self.queue.walk(), most)):
            self.guard("regions", ticket.item, lambda one: one.leaves(now))

    def guard(self, entrance: str, request: R, act: Callable[[R], object]) -> None:
        """Act on a request behind the fault barrier."""
        try:
            act(request)
        except Exception as error:  # noqa: BLE001 (the barrier)
            request.crashed(entrance, error)
