"""The targets that may take a request now: those of the best health that admit one more.

The targets are kept in one group per health, each with the list of those that admit, and every event changes the place
of one target only. Some changes come with time: an ejection expires, what an engine has reported goes stale. They wait
in a heap, and are made at the first choice after their instant. So a request pays for a comparison of two numbers,
and a change for a binary search, however many targets there are.

Targets that are loaded, or whose cache is being filled, are good ones, and offered only while no other good one admits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

from lb.core.target_state import Booking, Health, TargetState
from policies.routing.base import TargetView
from policies.routing.target_list import TargetList

_NEVER: Final = float("inf")
_BEST_FIRST: Final = (Health.GOOD, Health.WARMING, Health.EJECTED, Health.UNHEALTHY)


class _Group:
    """The targets of one health."""

    __slots__ = ("admitting", "health", "members")

    def __init__(self, health: Health, entries: Iterable[TargetState], fleet: Sequence[TargetView]) -> None:
        ranked = [(_rank(entry), entry) for entry in entries]
        self.health = health
        self.members = TargetList(((rank, entry.view) for rank, entry in ranked), fleet)
        self.admitting = TargetList(((rank, entry.view) for rank, entry in ranked if entry.admits()), fleet)


class _Membership:
    """Where a target is listed, its epoch as listed there, and the first of its timers in the heap."""

    __slots__ = ("epoch", "group", "timer_at")

    def __init__(self, group: _Group, epoch: int) -> None:
        self.group = group
        self.epoch = epoch
        self.timer_at = _NEVER


class Candidates:
    """A view of a table's entries. The table reports every change; `now` never runs backwards."""

    __slots__ = (
        "_best",
        "_by_epoch",
        "_changed",
        "_due_at",
        "_entries",
        "_groups",
        "_memberships",
        "_open",
        "_rebuild",
        "_spare",
        "_timers",
        "_timers_set",
        "_version",
        "health_changes",
    )

    def __init__(self, entries: Mapping[str, TargetState], open_bookings: Collection[Booking]) -> None:
        self._entries = entries
        self._open = open_bookings
        self._groups: dict[Health, _Group] = {}
        self._best = _NOTHING  # the first that has members
        self._spare: _Group | None = None  # those that are warming or loaded, if there are any beside others
        self._memberships: dict[TargetState, _Membership] = {}
        self._by_epoch: dict[int, TargetState] = {}
        self._timers: list[tuple[float, int, TargetState]] = []  # a heap
        self._timers_set = 0
        self._changed: dict[TargetState, None] = {}  # not in their places yet
        self._rebuild = True
        self._due_at = -_NEVER  # all of this is right until then
        self._version = 0
        self.health_changes = (
            0  # how often targets have been reported to change in health, or to join or leave
        )

    # --- queries

    def views(self, now: float) -> Sequence[TargetView]:
        if now >= self._due_at:
            self._settle(now)
        admitting = self._best.admitting
        return admitting if self._spare is None or admitting else self._spare.admitting

    def best(self, now: float) -> Sequence[TargetView]:
        """Return all of the best health, whether they admit or not."""
        if now >= self._due_at:
            self._settle(now)
        members = self._best.members
        if self._spare is None or self._best.admitting or not self._spare.admitting:
            return members
        return [*members, *self._spare.admitting]

    def room(self, now: float) -> bool:
        """Return whether any target admits one more request, of any health."""
        if self.views(now):
            return True
        return any(self._groups[health].admitting for health in _BEST_FIRST)

    def version(self, now: float) -> int:
        """Changes whenever a target may be offered that was not."""
        if now >= self._due_at:
            self._settle(now)
        return self._version

    def without(
        self, epochs: Collection[int], now: float, gated: bool = True
    ) -> tuple[Health, Sequence[TargetView]]:
        """Return the best health of any target without those epochs, and which of that health admit (or all of them)."""
        if now >= self._due_at:
            self._settle(now)
        gone: dict[_Group, list[int]] = {}
        for epoch in epochs:
            entry = self._by_epoch.get(epoch)
            if entry is not None:
                gone.setdefault(self._memberships[entry].group, []).append(_rank(entry))
        for health in _BEST_FIRST:
            group = self._groups[health]
            ranks = gone.get(group, ())
            if len(group.members) > len(ranks):
                listed = group.admitting if gated else group.members
                kept = listed.without(ranks) if ranks else listed
                if self._spare is not None and not group.admitting.without(ranks):
                    kept = [*kept, *self._spare.admitting.without(gone.get(self._spare, ()))]
                return health, kept
        return Health.CLOSED, []

    # --- changes

    def replaced(self) -> None:
        """The table has been replaced: every target may have changed."""
        self._rebuild = True
        self._due_at = -_NEVER
        self.health_changes += 1

    def changed(self, entry: TargetState) -> None:
        """The health or the epoch of the target has changed."""
        self._changed[entry] = None
        self._due_at = -_NEVER
        self.health_changes += 1

    def opened(self, entry: TargetState) -> None:
        """The target admits again."""
        membership = self._memberships.get(entry)
        if membership is not None and membership.group.admitting.add(_rank(entry), entry.view):
            self._version += 1

    def filled(self, entry: TargetState) -> None:
        """The target admits no longer."""
        membership = self._memberships.get(entry)
        if membership is not None:
            membership.group.admitting.drop(_rank(entry))

    def ends(self, entry: TargetState, at: float) -> None:
        """The state of the target is valid until then at most."""
        membership = self._memberships.get(entry)
        if membership is not None:
            self._set_timer(entry, membership, at)
            self._due_at = min(self._due_at, at)

    # --- inside

    def _settle(self, now: float) -> None:
        """Make all changes that are due."""
        due: dict[TargetState, None] = {}  # a dict, since it must be the same in every run
        while self._timers and self._timers[0][0] <= now:
            entry = heappop(self._timers)[2]
            if entry in self._memberships:
                self._memberships[entry].timer_at = _NEVER
                due[entry] = None
        if self._rebuild:
            self._drop_loads(self._entries.values(), now)
            self._build(now)
        else:
            self._drop_loads(due, now)
            has_more = bool(self._changed)
            for entry in (*self._changed, *due):
                has_more = self._put(entry, now) or has_more
            self._version += has_more
        self._changed.clear()
        self._best = next((self._groups[one] for one in _BEST_FIRST if self._groups[one].members), _NOTHING)
        spare = self._groups[Health.WARMING]
        self._spare = spare if spare.members and self._best is not spare else None
        self._due_at = self._timers[0][0] if self._timers else _NEVER

    def _build(self, now: float) -> None:
        entries = self._entries.values()
        fleet = [entry.view for entry in entries]
        by_health: dict[Health, list[TargetState]] = {health: [] for health in Health}
        for entry in entries:
            by_health[_listed(entry, now)].append(entry)
        self._groups = {health: _Group(health, those, fleet) for health, those in by_health.items()}
        self._memberships = {
            entry: _Membership(self._groups[_listed(entry, now)], entry.epoch) for entry in entries
        }
        self._by_epoch = {entry.epoch: entry for entry in entries}
        self._timers = []
        for entry, membership in self._memberships.items():
            self._set_timer(entry, membership, _next_change(entry, now))
        self._rebuild = False
        self._version += 1

    def _put(self, entry: TargetState, now: float) -> bool:
        """Put one target into its place; True if a target may be offered that was not."""
        membership = self._memberships.get(entry)
        if membership is None or entry.departed:
            return False
        if membership.epoch != entry.epoch:
            self._by_epoch.pop(membership.epoch, None)
            self._by_epoch[entry.epoch] = entry
            membership.epoch = entry.epoch
        rank, group = _rank(entry), self._groups[_listed(entry, now)]
        moved = group is not membership.group
        if moved:
            membership.group.members.drop(rank)
            membership.group.admitting.drop(rank)
            group.members.add(rank, entry.view)
            membership.group = group
        opened = group.admitting.add(rank, entry.view) if entry.admits() else False
        if not entry.admits():
            group.admitting.drop(rank)
        self._set_timer(entry, membership, _next_change(entry, now))
        return moved or opened

    def _set_timer(self, entry: TargetState, membership: _Membership, at: float) -> None:
        """Only the earliest counts: when it is due, the next one is set."""
        if at < membership.timer_at:
            membership.timer_at = at
            self._timers_set += 1
            heappush(self._timers, (at, self._timers_set, entry))

    def _drop_loads(self, entries: Iterable[TargetState], now: float) -> None:
        """Of engines that have not reported for too long: what counts then are the requests without a first byte."""
        stale: dict[TargetState, list[Booking]] = {
            entry: [] for entry in entries if now >= entry.load_good_until
        }
        if any(entry.view.waiting for entry in stale):
            for booking in self._open:
                if not booking.responded and booking.entry in stale:
                    stale[booking.entry].append(booking)
        for entry, waiting in stale.items():
            entry.load_too_old(sorted(waiting, key=_since))


_NOTHING: Final = _Group(Health.CLOSED, (), ())


def _listed(entry: TargetState, now: float) -> Health:
    """Return the health by which a target is listed: those that are loaded are with those that are warming."""
    health = entry.health(now)
    return Health.WARMING if health is Health.LOADED else health


def _rank(entry: TargetState) -> int:
    """Generations are counted as targets join: in the order of the table."""
    return entry.key.generation


def _next_change(entry: TargetState, now: float) -> float:
    """Return when time alone changes the state of the target."""
    ejected_until = entry.ejected_until
    if ejected_until is None or now >= ejected_until:
        return entry.load_good_until
    return min(ejected_until, entry.load_good_until)


def _since(booking: Booking) -> float:
    return booking.since
