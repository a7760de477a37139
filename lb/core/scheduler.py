"""Decides which requests go to a target now and which wait, on sockets and in virtual time alike. Pure.

*No overtaking.* A request that comes goes at once only if no queued request could go: first come, first served,
fair between tenants (see `lb.core.queue`). Queued ones that cannot go, since they have tried every target with room, keep
no other request waiting.

*Waiting for one target.* Where pushing is by work and the policy measures it, a request may be best off with a target that
has enough to do. It is queued for that target alone, in its lane (see `lb.core.lanes`), and the targets without a lane are free
for those that are best off there. Each pass sends what its target can take from each lane whose target has reported since,
and ten times a second from all. If a target without a lane has nothing pending, and otherwise ten times a second, the last
ones of the longest lane choose again: another target may have become the better one for them.

*Deadlines* (`policies.routing.deadlines`). A queued request that is due is looked at again when the first of its lane might go,
ten times a second, and at its deadline. Once no target is expected to keep it, it goes after all others of its tenant, or, where
late requests are shed, is one of those that `take_shed` returns: their owner refuses them.

*Waiting for its own target.* A request with a `pin` may be served by that target alone, whatever the policy and the health of
the target: what it names is stored there (see `lb.core.homes`). It is sent when the target can take work, and waits in a lane
of pinned requests until then; those go before others that wait for the same target. A pinned request whose target has left
the table waits for nothing: `stranded` returns it.

*The drive.* Nothing happens here by itself. The owner of the scheduler calls `let_in` when something may have made
room (see `lb.core.targets.TargetTable`) and when time may have (an ejection runs out, a look at an engine goes stale: a few
times a second). That is cheap: no request is tried twice while nothing has changed, and none at all while there is no
room. Whether any of them can go depends only on what each has tried. So that is computed once for each set of epochs that
some have tried, however many are queued.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush, nsmallest
from typing import Final, Generic, Protocol, TypeVar

from lb.core.lanes import Lanes
from lb.core.queue import RequestQueue, Ticket
from lb.core.target_choice import choose, choose_only, ready, waits
from lb.core.targets import TargetTable
from policies.routing.base import Choice, RequestView
from policies.routing.deadlines import URGENT, Fate, fate_of


class Waiter(Protocol):
    """A request that looks for a target.

    `tried` are the epochs (see `lb.core.target_state`) that have failed it, `policy` the name of the policy it requests,
    None for the table's own, `has_priority` whether it comes back, having lost its target. `pin` is the target that alone can
    serve it; empty: any can. `started`: an engine may have worked on it.
    """

    @property
    def view(self) -> RequestView: ...

    @property
    def tried(self) -> Collection[int]: ...

    @property
    def has_priority(self) -> bool: ...

    @property
    def queue_left_s(self) -> float: ...

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def policy(self) -> str | None: ...

    @property
    def pin(self) -> str: ...

    @property
    def started(self) -> bool: ...


W = TypeVar("W", bound=Waiter)

MOVES: Final = 2  # out of one lane, at most, each time
_PINNED: Final = "it has what the request names"
REVIEW_S: Final = 0.1  # how often all lanes are looked at, with or without reports


class Scheduler(Generic[W]):
    def __init__(self, table: TargetTable, queue: RequestQueue[W]) -> None:
        self._table = table
        self._queue = queue
        self._lanes: Lanes[W] = Lanes()
        self._pinned: Lanes[W] = Lanes()
        self._reviewed_at = -REVIEW_S
        self._health_changes_seen = -1
        self._none_could_go = (-1, -1)  # while the table's version and the queue's last ticket are these
        self._models_seen = 0  # the version of the table's models for which the tickets are counted
        self._due: list[tuple[float, int, Ticket[W]]] = []  # a heap of urgent tickets; may hold others
        self._shed: list[Ticket[W]] = []
        queue.on_drop = self._dropped

    def place(self, waiter: W, now: float) -> Choice | None:
        """Return where it may go now; None if it may not, because no target admits it or a queued request comes before it.

        The caller books at once. Raises UnknownPolicyError, as the others do.
        """
        if waiter.pin:
            others = waiter.pin in self._pinned.targets()
            return None if others else self._choose_pinned(waiter, now)
        choice = self._place_anywhere(waiter, now)
        if choice is not None and choice.target_id in self._pinned.targets():
            return None
        return choice

    def _place_anywhere(self, waiter: W, now: float) -> Choice | None:
        if waits(self._table, waiter.policy):
            choice = self._choose(waiter, now)
            if choice is None or choice.wait or choice.target_id in self._lanes.targets():
                return None
            return choice
        if len(self._queue):
            self._recount(now)
            if self._any_could_go(now):
                return None
        return self._choose(waiter, now)

    def enqueue(self, waiter: W, now: float) -> Ticket[W] | None:
        """Return a place in the queue; None if there is none, or no time left to wait."""
        limit = self._table.table.limits.max_held
        model = waiter.view.scope if self._table.models.mixed else ""
        ticket = self._queue.join(
            waiter,
            now,
            waiter.queue_left_s,
            limit,
            waiter.tenant,
            waiter.weight,
            waiter.has_priority,
            waiter.tried,
            model,
            waiter.view.due_at,
        )
        if ticket is None:
            return None
        if ticket.rank == URGENT:
            heappush(self._due, (ticket.due_at, ticket.number, ticket))
        if waiter.pin:
            self._pinned.join(ticket, waiter.pin, 0.0)
        else:
            self._enter_lane(ticket, now)
        return ticket

    def let_in(self, now: float) -> Iterator[tuple[W, Choice]]:
        """Yield the requests that may go now, one at a time and out of the queue: book each before the next."""
        if len(self._queue):
            self._recount(now)
        while self._due and (self._due[0][0] <= now or not self._due[0][2].waits):
            self._is_late(heappop(self._due)[2], now)
        for target_id in list(self._pinned.targets()):
            yield from self._serve_pinned(target_id, now)
        relieved = self._table.take_relieved()
        if len(self._lanes):
            if self._due and relieved:
                yield from self._serve_urgent(now)
            review = now >= self._reviewed_at + REVIEW_S
            if review:
                self._reviewed_at = now
            if review or self._health_changes_seen != self._table.health_changes:
                self._health_changes_seen = self._table.health_changes
                self._reassign(now)
                relieved = list(self._lanes.targets())
            left = dict.fromkeys(relieved)
            try:
                for target_id in relieved:
                    yield from self._serve(target_id, now)
                    del left[target_id]
            finally:  # the caller may stop before the end, and goes on in the next pass
                self._table.relieve(left)
            yield from self._share(now, review)
        if self._any_waits_for_any():
            yield from self._serve_others(now)

    # --- requests with a deadline

    def expected_late_s(self, waiter: W, now: float) -> float | None:
        """Return how much too late the first byte of a request that comes is expected; None if its deadline may be kept."""
        choice = self._choose(waiter, now)
        return now + choice.first_s - waiter.view.due_at if choice is not None and choice.late else None

    def take_shed(self) -> list[Ticket[W]]:
        """Return the tickets of queued requests that are to be refused, since their deadline cannot be kept."""
        shed, self._shed = self._shed, []
        return [ticket for ticket in shed if ticket.waits]

    def _is_late(self, ticket: Ticket[W], now: float) -> None:
        """The deadline of a ticket cannot be kept, if it is urgent still."""
        if not ticket.waits or ticket.rank != URGENT:
            return
        target_id, waiter = ticket.lane, ticket.item
        if target_id is not None:
            self._dropped(ticket)
        self._queue.is_late(ticket)
        if fate_of(ticket.rank, self._table.table.slo.late, waiter.started) is Fate.REFUSED:
            self._shed.append(ticket)
        if target_id is not None and waiter.pin:
            self._pinned.join(ticket, waiter.pin, 0.0)
        elif target_id is not None:
            self._enter_lane(ticket, now)

    def _serve_urgent(self, now: float) -> Iterator[tuple[W, Choice]]:
        """Let those that are due first choose again: a target that has got room may keep their deadlines."""
        for _, _, ticket in nsmallest(MOVES, self._due):
            if ticket.waits and ticket.rank == URGENT and ticket.lane is not None and not ticket.item.pin:
                yield from self._move_urgent(ticket, ticket.lane, now)

    def _move_urgent(self, ticket: Ticket[W], target_id: str, now: float) -> Iterator[tuple[W, Choice]]:
        """Let an urgent request go, or wait, where its deadline can be kept; it stays where that is its own lane."""
        choice = self._choose(ticket.item, now)
        if choice is None or choice.late:
            self._is_late(ticket, now)
        elif not choice.wait:
            self._queue.take(ticket)
            yield ticket.item, choice
        elif choice.target_id != target_id:
            self._wait_for(ticket, choice, now)

    # --- pinned requests

    def stranded(self) -> list[W]:
        """Return the queued requests whose own target has left the table."""
        gone = [target_id for target_id in self._pinned.targets() if self._table.key(target_id) is None]
        return [ticket.item for target_id in gone for ticket in self._pinned.all(target_id)]

    def _serve_pinned(self, target_id: str, now: float) -> Iterator[tuple[W, Choice]]:
        while (ticket := self._pinned.first(target_id, self._queue.tag)) is not None:
            choice = self._choose_pinned(ticket.item, now)
            if choice is None:
                return
            self._queue.take(ticket)
            yield ticket.item, choice

    def _choose_pinned(self, waiter: W, now: float) -> Choice | None:
        """Return the choice of its own target; None if that has left the table, or can take no work now."""
        target_id = waiter.pin
        if not ready(self._table, target_id, now, waiter.policy):
            return None
        choice = choose_only(self._table, waiter.view, target_id, now, waiter.policy)
        if choice is not None:
            choice.because, choice.wait = _PINNED, False
        return choice

    # --- requests for one target

    def _reassign(self, now: float) -> None:
        """Let requests for a target that is no longer offered wait for another one, or for any."""
        for target_id in list(self._lanes.targets()):
            if not self._table.offered(target_id, now):
                self._leave_lane(target_id, now)

    def _leave_lane(self, target_id: str, now: float) -> None:
        for ticket in self._lanes.all(target_id):
            self._forget(ticket)
            self._enter_lane(ticket, now)

    def _serve(self, target_id: str, now: float) -> Iterator[tuple[W, Choice]]:
        """Yield the requests that wait for that target, as long as it can take work."""
        while (ticket := self._lanes.first(target_id, self._queue.tag)) is not None:
            waiter = ticket.item
            if not waits(self._table, waiter.policy):  # other rules are in force by now
                self._forget(ticket)
                continue
            if not ready(self._table, target_id, now, waiter.policy, ticket.rank == URGENT):
                return
            choice = choose_only(self._table, waiter.view, target_id, now, waiter.policy)
            if choice is None:
                return
            if choice.late and ticket.rank == URGENT:
                yield from self._move_urgent(ticket, target_id, now)
                if ticket.waits and ticket.rank == URGENT and ticket.lane == target_id:
                    return
                continue
            self._queue.take(ticket)
            yield waiter, choice

    def _share(self, now: float, review: bool) -> Iterator[tuple[W, Choice]]:
        """Those at the end of the longest lane may be better off elsewhere by now, above all where a target has room."""
        for _ in range(MOVES):
            longest = self._lanes.longest()
            if longest is None or not (review or self._table.has_room_outside(self._lanes.targets(), now)):
                return
            ticket = self._lanes.last(longest)
            choice = self._choose(ticket.item, now)
            if choice is None or choice.target_id == longest:
                return
            if choice.wait:
                self._wait_for(ticket, choice, now)
            else:
                self._queue.take(ticket)
                yield ticket.item, choice

    def _enter_lane(self, ticket: Ticket[W], now: float) -> None:
        waiter = ticket.item
        choice = self._choose(waiter, now) if waits(self._table, waiter.policy) else None
        if choice is not None:
            self._wait_for(ticket, choice, now)

    def _choose(self, waiter: W, now: float) -> Choice | None:
        return choose(self._table, waiter.view, now, waiter.tried, waiter.policy)

    def _wait_for(self, ticket: Ticket[W], choice: Choice, now: float) -> None:
        if choice.late and ticket.rank == URGENT:
            self._is_late(ticket, now)
        self._lanes.join(ticket, choice.target_id, choice.put_off_s)
        self._table.policies.named(ticket.item.policy).queued(ticket.item.view, choice, now)

    def _forget(self, ticket: Ticket[W]) -> None:
        self._lanes.leave(ticket)
        self._table.policies.named(ticket.item.policy).dequeued(ticket.item.view)

    def _dropped(self, ticket: Ticket[W]) -> None:
        if ticket.lane is None:
            return
        if ticket.item.pin:
            self._pinned.leave(ticket)
        else:
            self._forget(ticket)

    # --- requests for any target

    def _serve_others(self, now: float) -> Iterator[tuple[W, Choice]]:
        if self._settled(now):
            return
        stuck: set[frozenset[int]] = set()
        for ticket in self._queue.walk():
            if ticket.lane is not None or ticket.tried in stuck:
                continue
            if not self._any_could_go(now):
                return
            waiter = ticket.item
            choice = self._choose(waiter, now)
            if choice is None:
                stuck.add(ticket.tried)
            elif choice.wait:
                self._wait_for(ticket, choice, now)
            else:
                self._queue.take(ticket)
                yield waiter, choice

    def _recount(self, now: float) -> None:
        """The targets that queued requests may not use include those of other models and zones, which change meanwhile."""
        if self._models_seen == self._table.models.version:
            return
        self._models_seen = self._table.models.version
        self._queue.recount(lambda waiter: waiter.tried)
        if self._table.models.mixed or self._table.models.pinned:
            for target_id in list(self._lanes.targets()):
                self._leave_lane(target_id, now)

    def _any_could_go(self, now: float) -> bool:
        if self._settled(now):
            return False
        if self._any_waits_for_any() and any(
            self._table.admits(now, tried) for tried in self._queue.tried_sets
        ):
            return True
        self._none_could_go = self._state(now)
        return False

    def _any_waits_for_any(self) -> bool:
        """Return whether a queued request waits for no target of its own."""
        return len(self._lanes) + len(self._pinned) < len(self._queue)

    def _settled(self, now: float) -> bool:
        """Return whether it is known that no queued request can go."""
        return not self._table.room(now) or self._none_could_go == self._state(now)

    def _state(self, now: float) -> tuple[int, int]:
        return self._table.version(now), self._queue.joined
