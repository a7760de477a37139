"""The table of targets: eligibility, requests in flight, ejection. Pure and synchronous.

*Bookings.* Every attempt on a target is one `Booking`, released exactly once; loads are counted from nothing
else. `audit` proves that counts and open bookings agree.

*Generations.* A target that leaves and comes back, or changes its address, is a new generation: a late result of
the old one does not change it. A generation that left is remembered while it has bookings.

*Passive ejection and epochs* belong to one generation: see `lb.core.target_state`.

*Last resorts.* If no target is healthy, ejected ones are offered, then those the controller calls
unhealthy: a bad chance is better than none. A draining target is never offered.

*Admission.* Among the targets of the best health those are offered that may have one more request (see
`lb.core.admission`). If there are such targets but none has room, a request has to wait: it is not sent to a worse
one instead.

Who is offered is kept between requests (`lb.core.candidates`), so that choosing costs what the policy costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lb.config.schema import Readiness, Table
from lb.core.admission import EngineLoad
from lb.core.models import ModelList
from lb.core.target_choice import TargetChoice
from lb.core.target_state import Blame, Booking, Health, Key, Outlook, TargetState
from policies.routing.base import RequestView, RoutingPolicy
from policies.routing.registry import make_policy

__all__ = ["Blame", "Booking", "BookingError", "Changes", "Health", "Key", "Outlook", "TargetTable"]


class BookingError(Exception):
    """A booking was released twice: the caller's accounting is broken."""


class Changes(NamedTuple):
    """What a push did. `lost`: generations that went without having been drained."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    lost: frozenset[Key]


class TargetTable(TargetChoice):
    """The live state behind a pushed `Table`, with the routing policy the table names.

    `now` never runs backwards. While requests are queued, let them in (see `lb.core.scheduler`) after anything that may have
    made room: a push, a first byte, a release, a look at an engine, a renewal.
    """

    def __init__(
        self,
        table: Table,
        now: float,
        make_policy: Callable[[str], RoutingPolicy] = make_policy,
        first_epoch: int = 0,
    ) -> None:
        """Count the epochs of targets from `first_epoch`, so that tables of one agent have none in common."""
        super().__init__(table, now, make_policy)
        self._generation = 0
        self._last_epoch = first_epoch
        self.apply(table, now)

    # --- the controller's table

    def apply(self, table: Table, now: float) -> Changes:
        """Replace the table. Idempotent. Raises UnknownPolicyError, before anything has changed."""
        self._active_policies.adopt(table.policy, self._open)
        wanted = {target.id: target for target in table.targets}
        removed: list[str] = []
        lost: set[Key] = set()
        for entry in list(self._entries.values()):
            target = wanted.get(entry.key.id)
            if target is not None and target.url == entry.target.url:
                continue
            self._remove(entry)
            removed.append(entry.key.id)
            if entry.target.state is not Readiness.DRAINING:
                lost.add(entry.key)
        added: list[str] = []
        for target in table.targets:
            known = self._entries.get(target.id)
            if known is None:
                self._generation += 1
                key = Key(target.id, self._generation)
                self._entries[target.id] = TargetState(key, target, self._next_epoch(), table.pushing, now)
                added.append(target.id)
                continue
            if known.target.state is Readiness.UNHEALTHY and target.state is Readiness.READY:
                known.epoch = self._next_epoch()
            known.describe(target, now)
            if table.pushing != self.table.pushing:
                known.use_pushing(table.pushing)
        self.table = table
        self.replaced += 1
        undone = [one for one in self._known() if one.drain_at is not None and not one.handed_over]
        self._draining = dict.fromkeys(undone)
        self._candidates.replaced()
        self.models.pinned = table.has_residency
        self.models.table_changed()
        self.residency.changed(self._entries.values())
        return Changes(tuple(added), tuple(removed), frozenset(lost))

    # --- attempts

    def book(self, request: RequestView, target_id: str, now: float) -> Booking:
        """Begin an attempt on a target of the table. Raises KeyError if there is none of that id."""
        entry = self._entries[target_id]
        booking = entry.book(request, now)
        self._open.add(booking)
        if entry.view.in_flight == 1:
            self._busy[entry] = self._newly_busy[entry] = None
        if entry.trial is booking:
            self._candidates.changed(entry)
        elif entry.view.in_flight >= entry.gate.cap:
            self._candidates.filled(entry)
        for record in self._active_policies.on_record:
            record(request, target_id, now)
        return booking

    def responded(self, booking: Booking, now: float, succeeded: bool = False) -> bool:
        """The first byte of a response has come, of 2xx if it `succeeded`; True if that lifted an ejection.

        For a response of 502, 503 or 504 call `failed` with TROUBLE instead.
        """
        if booking.responded or booking.released:
            return False
        entry = booking.entry
        was_full = not entry.admits()
        readmitted = entry.responded(booking, now, succeeded)
        if readmitted:
            entry.epoch = self._next_epoch()
            self._left_out.pop(entry, None)
            self._candidates.changed(entry)
        elif was_full and entry.admits():
            self._candidates.opened(entry)
        self._relieved[entry.key.id] = None
        for responded in self._active_policies.on_responded:
            responded(booking.request, entry.key.id, now)
        return readmitted

    def failed(self, booking: Booking, blame: Blame, now: float) -> bool:
        """The attempt failed; True if the target is ejected for it. Still needs its release."""
        if blame is Blame.NONE:
            return False
        entry = booking.entry
        eject = entry.failed(booking, blame, now, self.table.breaker)
        if entry.departed:
            return False
        self._troubled.add(entry)
        if eject:
            self._eject(entry, now, doubt=blame is Blame.EJECT)
        return eject

    def release(self, booking: Booking, now: float, tokens: int | None = None) -> None:
        """The attempt is over, however it ended; `tokens` if its response is whole and their number is known.

        Raises BookingError the second time.
        """
        if booking.released:
            raise BookingError(f"{booking} was released twice")
        booking.released = True
        self._open.discard(booking)
        entry = booking.entry
        was_full = not entry.admits()
        if entry.trial is booking:
            self._candidates.changed(entry)
        entry.release(booking)
        if was_full and entry.admits():
            self._candidates.opened(entry)
        self._relieved[entry.key.id] = None
        if not entry.view.in_flight:
            self._busy.pop(entry, None)
            if entry.departed:
                self._departed.pop(entry.key, None)
                self._draining.pop(entry, None)
        for ended in self._active_policies.on_ended:
            ended(booking.request, entry.key.id, now, tokens)

    # --- results of polls

    def loaded(
        self, key: Key, load: EngineLoad | None, polled_at: float, now: float, every_s: float = 0.0
    ) -> bool:
        """Record an engine's report, requested at `polled_at`; None if it reports nothing.

        True if the target admits a request now and did not before. What arrives out of order, or too late, is passed over.
        It is good for some time, and for three times `every_s`, where there are too many engines to poll each of them that often.
        """
        entry = self._current(key)
        good_until = polled_at + max(10.0 * self.table.pushing.probe_s, 1.0, 3.0 * every_s)
        if entry is None or polled_at < entry.load_polled_at or now >= good_until:
            return False
        before = entry.admits()
        if load is None:
            entry.load_not_reported(polled_at)
        else:
            entry.loaded(load, polled_at, good_until)
            self._candidates.ends(entry, good_until)
        after = entry.admits()
        self._relieved[key.id] = None
        if before and not after:
            self._candidates.filled(entry)
        elif after and not before:
            self._candidates.opened(entry)
        return after and not before

    def measured(self, key: Key, rtt_s: float) -> None:
        """The round trip to a target has been measured."""
        entry = self._current(key)
        if entry is not None:
            entry.view.rtt_s = rtt_s

    def warm(self, key: Key, warming: bool) -> None:
        """The cache of a target is being filled, or not any longer (see `lb.core.warming`)."""
        entry = self._current(key)
        if entry is not None and entry.view.warming is not warming:
            entry.view.warming = warming
            if warming:
                self.warming[key.id] = None
            else:
                del self.warming[key.id]
            self._candidates.changed(entry)
            self._relieved[key.id] = None

    def cached(self, key: Key, request: RequestView) -> None:
        """A target of the table has computed the prompt for no client."""
        if self._current(key) is not None:
            for cached in self._active_policies.on_cached:
                cached(request, key.id)

    def listed(self, key: Key, models: ModelList | None) -> bool:
        """Record that a target lists these models (None: it lists none).

        True if it may take a request now that it could not take.
        """
        entry = self._current(key)
        if entry is None or not self.models.learned(entry, models):
            return False
        entry.epoch = self._next_epoch()  # requests that were queued because of its old list may try it
        self._candidates.changed(entry)
        return True

    def eject(self, key: Key, now: float, at_least_s: float = 0.0) -> bool:
        """Leave the target out although no request has failed (it is frozen); False if it has left the table."""
        entry = self._current(key)
        if entry is not None:
            self._eject(entry, now, at_least_s)
        return entry is not None

    def received_from(self, key: Key, now: float) -> None:
        """Record that some byte came from the target: it is not frozen."""
        entry = self._current(key) or self._departed.get(key)
        if entry is not None:
            entry.received_at = now

    def renew(self, key: Key) -> bool:
        """A probe of an ejected target succeeded: requests that it has failed may try it again.

        The ejection stands, since responding to a probe is easier than serving a request; but what it has of requests is
        no longer in doubt.
        """
        entry = self._current(key)
        if entry is None or entry.ejected_until is None:
            return False
        entry.epoch = self._next_epoch()
        entry.doubted = False
        self._candidates.changed(entry)
        return True

    # --- inside

    def _next_epoch(self) -> int:
        self._last_epoch += 1
        self.models.renewed()
        self.residency.changed()
        return self._last_epoch

    def _remove(self, entry: TargetState) -> None:
        del self._entries[entry.key.id]
        entry.departed = True
        self._troubled.discard(entry)
        self.warming.pop(entry.key.id, None)
        for those in (self._busy, self._newly_busy, self._left_out):
            those.pop(entry, None)
        if entry.view.in_flight:
            self._departed[entry.key] = entry
        self._active_policies.forget(entry.key.id)

    def _eject(self, entry: TargetState, now: float, at_least_s: float = 0.0, doubt: bool = True) -> None:
        entry.eject(now, self.table.breaker, at_least_s, doubt)
        self._left_out[entry] = None
        self._candidates.changed(entry)
