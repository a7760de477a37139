"""Who may go now, who has to wait. The only place that decides it, on sockets and in virtual time alike. Pure.

*No overtaking.* A request that comes goes at once only if nobody who is held could go: first come, first served,
fair between tenants (see `lb.core.queue`). Held ones that cannot go, since they have tried everybody who has room, keep
nobody else waiting.

*The drive.* Nothing happens here by itself. Whoever owns the dispatcher calls `let_in` when something may have made
room (see `lb.core.targets.TargetTable`) and when time may have (an ejection runs out, a look at an engine goes stale: a few
times a second). That is cheap: nobody is asked twice while nothing has changed, and nobody at all while there is no
room. Whether any of them can go depends only on what each has tried. So that is asked once for each set of lives that
some have tried, however many are held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from lb.core.queue import RequestQueue, Ticket
from lb.core.targets import TargetTable
from policies.routing.base import Choice, RequestView


class Waiter(Protocol):
    """A request that looks for a target. `tried` are the lives (see `lb.core.target_state`) that have failed it, `policy` the name
    of the policy it asks for, None for the table's own, `senior` whether it comes back, having lost its target."""

    @property
    def view(self) -> RequestView: ...

    @property
    def tried(self) -> Collection[int]: ...

    @property
    def senior(self) -> bool: ...

    @property
    def hold_left_s(self) -> float: ...

    @property
    def tenant(self) -> str: ...

    @property
    def weight(self) -> float: ...

    @property
    def policy(self) -> str | None: ...


W = TypeVar("W", bound=Waiter)


class Scheduler(Generic[W]):
    def __init__(self, table: TargetTable, queue: RequestQueue[W]) -> None:
        self._table = table
        self._queue = queue
        self._nobody_goes = (-1, -1)  # while the table's version and the queue's last ticket are these
        self._models_seen = 0  # the version of the table's models for which the tickets are counted

    def place(self, waiter: W, now: float) -> Choice | None:
        """Where it may go now; None if it may not, because nobody admits it or somebody held has a better right.

        The caller books at once. Raises UnknownPolicyError, as the others do.
        """
        if len(self._queue):
            self._recount()
            if self._somebody_could_go(now):
                return None
        return self._table.choose(waiter.view, now, waiter.tried, waiter.policy)

    def hold(self, waiter: W, now: float) -> Ticket[W] | None:
        """A place in the queue; None if there is none, or no time left to wait."""
        limit = self._table.table.limits.max_held
        return self._queue.join(
            waiter, now, waiter.hold_left_s, limit, waiter.tenant, waiter.weight, waiter.senior, waiter.tried
        )

    def let_in(self, now: float) -> Iterator[tuple[W, Choice]]:
        """Whoever may go now, one at a time and out of the queue: book it before you ask for the next."""
        if not len(self._queue):
            return
        self._recount()
        if self._settled(now):
            return
        stuck: set[frozenset[int]] = set()
        for ticket in self._queue.walk():
            if ticket.tried in stuck:
                continue
            if not self._somebody_could_go(now):
                return
            waiter = ticket.item
            choice = self._table.choose(waiter.view, now, waiter.tried, waiter.policy)
            if choice is None:
                stuck.add(ticket.tried)
            else:
                self._queue.take(ticket)
                yield waiter, choice

    def _recount(self) -> None:
        """What held requests may not use includes targets of other models, which change while they are held."""
        if self._models_seen != self._table.models.version:
            self._models_seen = self._table.models.version
            self._queue.recount(lambda waiter: waiter.tried)

    def _somebody_could_go(self, now: float) -> bool:
        if self._settled(now):
            return False
        if any(self._table.admits(now, tried) for tried in self._queue.tried_sets):
            return True
        self._nobody_goes = self._state(now)
        return False

    def _settled(self, now: float) -> bool:
        """Whether it is known that nobody who is held can go."""
        return not self._table.room(now) or self._nobody_goes == self._state(now)

    def _state(self, now: float) -> tuple[int, int]:
        return self._table.version(now), self._queue.joined
