"""Live state of the targets of a table, and what can be read off it. Pure. See `targets`.

Values read several times a second (`ejected`, `suspects`, `handovers`, `newly_busy`) comes from lists of the targets
concerned, which are updated where the state changes, so that it costs nothing for targets that have nothing to report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lb.config.schema import Table, Target, TargetStats
from lb.core import accounting
from lb.core.candidates import Candidates
from lb.core.models import ModelDirectory
from lb.core.residency import Residency
from lb.core.target_state import Booking, Health, Key, Outlook, TargetState


class TargetStatus:
    """The targets of a table, with their bookings."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._entries: dict[str, TargetState] = {}
        self._departed: dict[Key, TargetState] = {}
        self._open: set[Booking] = set()
        # Of the table, not of the generations that left. Dicts, since their order must be the same in every run.
        self._busy: dict[TargetState, None] = {}  # with requests in flight
        self._newly_busy: dict[TargetState, None] = {}  # since `newly_busy` was last called
        self._left_out: dict[TargetState, None] = {}  # with an `ejected_until`
        self._draining: dict[
            TargetState, None
        ] = {}  # with a deadline, and not handed over; also those that left
        self.warming: dict[str, None] = {}  # the targets whose caches are being filled
        self.replaced = 0  # how often the table has been
        self._candidates = Candidates(self._entries, self._open)
        self.residency = Residency()  # by which requests may not have some of them
        self.models = ModelDirectory(self._entries)

    def key(self, target_id: str) -> Key | None:
        """Return the present generation of a target."""
        entry = self._entries.get(target_id)
        return entry.key if entry is not None else None

    def health(self, key: Key, now: float) -> Health:
        entry = self._current(key)
        return entry.health(now) if entry is not None else Health.CLOSED

    def outlook(self, booking: Booking, now: float) -> Outlook:
        """Return whether the booking's target can still be expected to respond."""
        return booking.entry.outlook(now)

    def missing(self, booking: Booking, now: float) -> bool:
        """Return whether a stream that is silent had better go on elsewhere.

        Its target has left without having been drained, or does not respond. That the controller finds it unwell is
        not enough. An engine with too much to do is unwell and silent, too, and its streams would make the next one so.
        """
        return booking.entry.in_doubt(now) or booking.entry.outlook(now) is Outlook.LOST

    def handovers(self, now: float, handover_s: float) -> list[Booking]:
        """Return what runs on draining targets of which no more than `handover_s` seconds are left; each one once."""
        due = {
            entry
            for entry in self._draining
            if entry.drain_at is not None and now >= entry.drain_at - handover_s
        }
        if not due:
            return []
        for entry in due:
            entry.handed_over = True
            del self._draining[entry]
        return sorted((one for one in self._open if one.entry in due), key=_since)

    def silent_since(self, booking: Booking) -> float:
        """Since when the booking's target has sent nothing although it should."""
        return max(booking.since, booking.entry.received_at)

    def suspects(self, now: float, after_s: float) -> list[tuple[Key, Target]]:
        """Targets of the table that owe a response, or the rest of one, and have been silent for longer than `after_s`."""
        quiet = [entry for entry in self._busy if now - entry.received_at > after_s]
        if not quiet:
            return []
        silent = set(quiet)
        owing = {
            booking.entry
            for booking in self._open
            if booking.entry in silent and now - booking.since > after_s
        }
        return [(entry.key, entry.target) for entry in quiet if entry in owing]

    def ejected(self, now: float) -> list[tuple[Key, Target, float]]:
        """Targets left out, and for how many seconds more; not above 0 if their trial is due and not taken yet."""
        return [
            (entry.key, entry.target, entry.ejected_until - now)
            for entry in self._left_out
            if entry.ejected_until is not None and (now < entry.ejected_until or entry.trial is None)
        ]

    def rows(self, now: float) -> Iterator[tuple[Target, Health, int]]:
        """Yield every target of the table with its health and its requests in flight."""
        for entry in self._entries.values():
            yield entry.target, entry.health(now), entry.view.in_flight

    def healthy(self, now: float, exclude: Collection[int] = ()) -> set[str]:
        """Return the ids of the healthy targets, without those whose epoch is in `exclude`."""
        return {
            entry.key.id
            for entry in self._entries.values()
            if entry.epoch not in exclude and entry.health(now).is_good
        }

    def probe_list(self) -> list[tuple[Key, Target, int]]:
        """Return every target of the table with its requests in flight: whose load may be worth a look."""
        return [(entry.key, entry.target, entry.view.in_flight) for entry in self._entries.values()]

    def newly_busy(self) -> list[Key]:
        """Return the targets of the table that have been given a request while they had none, since this was last called."""
        keys = [entry.key for entry in self._newly_busy]
        self._newly_busy.clear()
        return keys

    def waiting(self, key: Key) -> int:
        """Return how many requests a target of the table has without a first byte."""
        entry = self._current(key)
        return 0 if entry is None else entry.view.waiting

    def is_busy(self, key: Key) -> bool:
        """Return whether a target of the table has requests in flight."""
        entry = self._current(key)
        return entry is not None and entry.view.in_flight > 0

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def stats(self, now: float, window_s: float) -> tuple[TargetStats, ...]:
        """Per target id, the generations that left but still run included in their id's counts."""
        return accounting.stats(self._known(), now, window_s)

    def audit(self) -> list[str]:
        """Return every difference between bookings and counts, as sentences; empty if there is none."""
        lists = {
            "busy": (self._busy, [one for one in self._entries.values() if one.view.in_flight]),
            "left out": (
                self._left_out,
                [one for one in self._entries.values() if one.ejected_until is not None],
            ),
            "draining": (
                self._draining,
                [one for one in self._known() if one.drain_at is not None and not one.handed_over],
            ),
        }
        return [
            *accounting.audit(self._known(), self._open),
            *(
                problem
                for name, (kept, right) in lists.items()
                for problem in accounting.differ(name, kept, right)
            ),
        ]

    def _known(self) -> list[TargetState]:
        return [*self._entries.values(), *self._departed.values()]

    def _current(self, key: Key) -> TargetState | None:
        entry = self._entries.get(key.id)
        return entry if entry is not None and entry.key == key else None


def _since(booking: Booking) -> float:
    return booking.since
