"""Who may be offered a request now: the targets of the best standing that admit one more.

Found anew only when something has changed, or when time changes it: an ejection ends, a look at an engine goes
stale. Between two such moments a request pays for a comparison of two numbers. A target that fills up or has room
again, which at saturation is every request, costs a pass over the best ones and not a new comparison of all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lb.core.target_state import Booking, Health, TargetState
from policies.routing.base import TargetView

_NEVER = float("inf")
_BEST_FIRST = (Health.GOOD, Health.EJECTED, Health.UNHEALTHY)


class Candidates:
    """A view of a table's entries. The table says when something has changed; `now` never runs backwards."""

    __slots__ = ("_best", "_end_at", "_entries", "_open", "_standings_end_at", "_version", "_views", "_worse")

    def __init__(self, entries: Mapping[str, TargetState], open_bookings: Collection[Booking]) -> None:
        self._entries = entries
        self._open = open_bookings
        self._standings_end_at = -_NEVER  # the next two are right until then
        self._best: list[TargetState] = []  # of the best standing there is
        self._worse: list[TargetState] = []  # of others that are not closed
        self._end_at = -_NEVER  # and this one until then
        self._views: list[TargetView] = []  # of the best that admit
        self._version = 0

    # --- asked

    def views(self, now: float) -> list[TargetView]:
        if now >= self._end_at:
            self._look_around(now)
        return self._views

    def best(self, now: float) -> list[TargetState]:
        """All of the best standing, whether they admit or not."""
        if now >= self._end_at:
            self._look_around(now)
        return self._best

    def room(self, now: float) -> bool:
        """Does any target admit one more request, of whatever standing?"""
        return bool(self.views(now)) or any(entry.admits() for entry in self._worse)

    def version(self, now: float) -> int:
        """Changes whenever somebody may be offered who was not."""
        if now >= self._end_at:
            self._look_around(now)
        return self._version

    def without(
        self, lives: Collection[int], now: float, gated: bool = True
    ) -> tuple[Health, list[TargetView]]:
        """The best standing of any target without those lives, and who of that standing admits (or everyone of it)."""
        if now >= self._end_at:
            self._look_around(now)
        by_standing: dict[Health, list[TargetState]] = {}
        for entry in self._entries.values():
            if entry.life not in lives:
                by_standing.setdefault(entry.standing(now), []).append(entry)
        for standing in _BEST_FIRST:
            if standing in by_standing:
                return standing, [
                    entry.view for entry in by_standing[standing] if not gated or entry.admits()
                ]
        return Health.CLOSED, []

    # --- told

    def changed(self) -> None:
        """A standing or a life has: nothing that is kept holds any longer."""
        self._standings_end_at = self._end_at = -_NEVER

    def opened(self) -> None:
        """A target admits again."""
        self._end_at = -_NEVER

    def filled(self, entry: TargetState) -> None:
        """The target admits no longer."""
        if entry.view in self._views:
            self._views.remove(entry.view)

    def ends(self, at: float) -> None:
        """What is kept holds no longer than until then."""
        self._standings_end_at = min(self._standings_end_at, at)
        self._end_at = min(self._end_at, at)

    # --- inside

    def _look_around(self, now: float) -> None:
        if now >= self._standings_end_at:
            self._compare(now)
        self._views = [entry.view for entry in self._best if entry.admits()]
        self._end_at = self._standings_end_at
        self._version += 1

    def _compare(self, now: float) -> None:
        end_at = _NEVER
        by_standing: dict[Health, list[TargetState]] = {standing: [] for standing in Health}
        for entry in self._entries.values():
            if now >= entry.load_good_until:
                unanswered = [one for one in self._open if one.entry is entry and not one.answered]
                entry.unheard(sorted(unanswered, key=_since))
            end_at = min(end_at, entry.load_good_until)
            if entry.ejected_until is not None and now < entry.ejected_until:
                end_at = min(end_at, entry.ejected_until)
            by_standing[entry.standing(now)].append(entry)
        ranks = [by_standing[standing] for standing in _BEST_FIRST if by_standing[standing]]
        self._best = ranks[0] if ranks else []
        self._worse = [entry for rank in ranks[1:] for entry in rank]
        self._standings_end_at = end_at


def _since(booking: Booking) -> float:
    return booking.since
