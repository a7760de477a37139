"""The table of targets: who may take a request, who has which, who is out of favour. Pure and synchronous.

*Bookings.* Every attempt on a target is one `Booking`, released exactly once; loads are counted from nothing
else. `audit` proves that counts and open bookings agree.

*Generations.* A target that leaves and comes back, or changes its address, is a new generation: late news about
the old one cannot touch it. A generation that left is remembered while it has bookings.

*Passive ejection and lives* are one generation's own affair: see `lb.core.target_state`.

*Last resorts.* If no target is in good standing, ejected ones are offered, then those the controller calls
unhealthy: a bad chance is better than none. A draining target is never offered.

*Admission.* Among the targets of the best standing those are offered that may have one more request (see
`lb.core.admission`). If there are such targets but none has room, a request has to wait: it is not sent to a worse
one instead.

Who is offered is kept between requests (`lb.core.candidates`), so that choosing costs what the policy costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from lb.config.schema import Readiness, Table, Target, TargetStats
from lb.core import accounting
from lb.core.active_policies import ActivePolicies
from lb.core.admission import EngineLoad
from lb.core.candidates import Candidates
from lb.core.models import ModelDirectory, ModelList
from lb.core.target_state import Blame, Booking, Health, Key, Outlook, TargetState
from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.registry import make_policy

__all__ = ["Blame", "Booking", "BookingError", "Changes", "Health", "Key", "Outlook", "TargetTable"]


FADED_EACH_TIME = 16
FADE_EVERY_S = 0.1


class BookingError(RuntimeError):
    """A booking was released twice: the caller's accounting is broken."""


class Changes(NamedTuple):
    """What a push did. `lost`: generations that went without having been drained."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    lost: frozenset[Key]


class TargetTable:
    """The live state behind a pushed `Table`, with the routing policy the table names.

    `now` never runs backwards. While requests are held, let them in (see `lb.core.scheduler`) after whatever may have
    made room: a push, a first byte, a release, a look at an engine, a renewal.
    """

    def __init__(
        self, table: Table, now: float, make_policy: Callable[[str], RoutingPolicy] = make_policy
    ) -> None:
        self.table = table
        self._advisers = ActivePolicies(table.policy, make_policy)
        self._entries: dict[str, TargetState] = {}
        self._departed: dict[Key, TargetState] = {}
        self._open: set[Booking] = set()
        self._troubled: set[TargetState] = set()
        self._fade_at = now
        self._generation = 0
        self._life = 0
        self._offers = Candidates(self._entries, self._open)
        self.models = ModelDirectory(self._entries)
        self.apply(table, now)

    # --- what the controller says

    def apply(self, table: Table, now: float) -> Changes:
        """Replace the table. Idempotent. Raises UnknownPolicyError, before anything has changed."""
        self._advisers.adopt(table.policy, self._open)
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
                self._entries[target.id] = TargetState(key, target, self._next_life(), table.pushing, now)
                added.append(target.id)
                continue
            if known.target.state is Readiness.UNHEALTHY and target.state is Readiness.READY:
                known.life = self._next_life()
            known.describe(target, now)
            if table.pushing != self.table.pushing:
                known.use_pushing(table.pushing)
        self.table = table
        self._offers.replaced()
        self.models.table_changed()
        return Changes(tuple(added), tuple(removed), frozenset(lost))

    def use(self, policy: str) -> None:
        """Get ready for requests that ask for `policy` by name. Raises UnknownPolicyError."""
        self._advisers.named(policy, self._open)

    @property
    def needs_prompt(self) -> bool:
        """Whether any of the policies in use wants to see prompts."""
        return self._advisers.needs_prompt

    def gauges(self) -> Mapping[str, float]:
        """The routing policy's own: how large its tree is, and the like."""
        return self._advisers.own.gauges()

    # --- choosing

    def choose(
        self, request: RequestView, now: float, exclude: Collection[int] = (), policy: str | None = None
    ) -> Choice | None:
        """The choice among those who may take it now, without the lives in `exclude`; None if there are none.

        `policy` is asked instead of the table's own. Raises UnknownPolicyError. Changes nothing.
        """
        views = self._offers.without(exclude, now)[1] if exclude else self._offers.views(now)
        if not views:
            return None
        if self._troubled:
            self._fade(now)
        advisers = self._advisers
        adviser = advisers.own if policy is None else advisers.named(policy, self._open)
        return adviser.choose(request, views, now)

    def candidates(self, now: float, exclude: Collection[int] = ()) -> tuple[Health, Sequence[TargetView]]:
        """The best standing of any target without the lives in `exclude`, and who of that standing admits."""
        self._fade(now)
        return self._offers.without(exclude, now)

    def admits(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Would `choose` choose?"""
        return bool(self._offers.without(exclude, now)[1] if exclude else self._offers.views(now))

    def anybody(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Is there a target that could take it, now or once it has room?"""
        if exclude:
            return self._offers.without(exclude, now)[0] is not Health.CLOSED
        return bool(self._offers.best(now))

    def room(self, now: float) -> bool:
        """Is there any target, of whatever standing, that admits one more request?"""
        return self._offers.room(now)

    def version(self, now: float) -> int:
        """Changes whenever somebody may be offered who was not."""
        return self._offers.version(now)

    # --- the life of an attempt

    def book(self, request: RequestView, target_id: str, now: float) -> Booking:
        """Begin an attempt on a target of the table. Raises KeyError if there is none of that id."""
        entry = self._entries[target_id]
        booking = entry.book(request, now)
        self._open.add(booking)
        if entry.trial is booking:
            self._offers.changed(entry)
        elif entry.view.in_flight >= entry.gate.cap:
            self._offers.filled(entry)
        for record in self._advisers.on_record:
            record(request, target_id, now)
        return booking

    def answered(self, booking: Booking, now: float) -> bool:
        """The first byte of an answer has come; True if that ended an ejection.

        For an answer of 502, 503 or 504 call `failed` with TROUBLE instead.
        """
        if booking.answered or booking.released:
            return False
        entry = booking.entry
        was_full = not entry.admits()
        readmitted = entry.answered(booking, now)
        if readmitted:
            entry.life = self._next_life()
            self._offers.changed(entry)
        elif was_full and entry.admits():
            self._offers.opened(entry)
        for answered in self._advisers.on_answered:
            answered(booking.request, entry.key.id, now)
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
        """The attempt is over, however it ended; `tokens` if its answer is whole and their number is known.

        Raises BookingError the second time.
        """
        if booking.released:
            raise BookingError(f"{booking} was released twice")
        booking.released = True
        self._open.discard(booking)
        entry = booking.entry
        was_full = not entry.admits()
        if entry.trial is booking:
            self._offers.changed(entry)
        entry.release(booking)
        if was_full and entry.admits():
            self._offers.opened(entry)
        if entry.departed and not entry.view.in_flight:
            self._departed.pop(entry.key, None)
        for ended in self._advisers.on_ended:
            ended(booking.request, entry.key.id, now, tokens)

    # --- what probes teach

    def loaded(
        self, key: Key, load: EngineLoad | None, asked_at: float, now: float, every_s: float = 0.0
    ) -> bool:
        """An engine's account of itself, when asked at `asked_at`; None if it tells nothing. True if the target
        admits a request now and did not before. What arrives out of order, or too late, is passed over. It is good for
        some time, and for three times `every_s`, where engines are so many that they are polled less often."""
        entry = self._current(key)
        good_until = asked_at + max(10.0 * self.table.pushing.probe_s, 1.0, 3.0 * every_s)
        if entry is None or asked_at < entry.load_asked_at or now >= good_until:
            return False
        before = entry.admits()
        if load is None:
            entry.tells_nothing(asked_at)
        else:
            entry.loaded(load, asked_at, good_until)
            self._offers.ends(entry, good_until)
        after = entry.admits()
        if before and not after:
            self._offers.filled(entry)
        elif after and not before:
            self._offers.opened(entry)
        return after and not before

    def listed(self, key: Key, models: ModelList | None) -> bool:
        """A target lists these models (None: it lists none). True if it may take a request now that it could not take."""
        entry = self._current(key)
        if entry is None or not self.models.learned(entry, models):
            return False
        entry.life = self._next_life()  # what has been held because of its old list may try it
        self._offers.changed(entry)
        return True

    def eject(self, key: Key, now: float, at_least_s: float = 0.0) -> bool:
        """Leave the target out although no request has failed (it is frozen); False if it has left the table."""
        entry = self._current(key)
        if entry is not None:
            self._eject(entry, now, at_least_s)
        return entry is not None

    def heard(self, key: Key, now: float) -> None:
        """Some byte came from the target: it is not frozen."""
        entry = self._current(key) or self._departed.get(key)
        if entry is not None:
            entry.heard_at = now

    def renew(self, key: Key) -> bool:
        """A probe of an ejected target was answered: requests that it has failed may try it again.

        The ejection stands, since answering a probe is easier than answering a request; but what it has of requests is
        no longer in doubt.
        """
        entry = self._current(key)
        if entry is None or entry.ejected_until is None:
            return False
        entry.life = self._next_life()
        entry.doubted = False
        self._offers.changed(entry)
        return True

    # --- looking

    def key(self, target_id: str) -> Key | None:
        """The present generation of a target."""
        entry = self._entries.get(target_id)
        return entry.key if entry is not None else None

    def standing(self, key: Key, now: float) -> Health:
        entry = self._current(key)
        return entry.standing(now) if entry is not None else Health.CLOSED

    def outlook(self, booking: Booking, now: float) -> Outlook:
        """Whether the booking's target can still be expected to answer."""
        return booking.entry.outlook(now)

    def missing(self, booking: Booking, now: float) -> bool:
        """Whether a stream that is silent had better go on elsewhere: its target has left without having been drained, or
        gives no sign of life. That the controller finds it unwell is not enough. An engine with too much to do is unwell
        and silent, too, and its streams would make the next one so."""
        return booking.entry.in_doubt(now) or booking.entry.outlook(now) is Outlook.LOST

    def handovers(self, now: float, handover_s: float) -> list[Booking]:
        """What runs on draining targets of which no more than `handover_s` seconds are left; each one once."""
        due = {
            entry
            for entry in self._known()
            if entry.drain_at is not None and now >= entry.drain_at - handover_s and not entry.handed_over
        }
        if not due:
            return []
        for entry in due:
            entry.handed_over = True
        return sorted((one for one in self._open if one.entry in due), key=_since)

    def silent_since(self, booking: Booking) -> float:
        """Since when the booking's target has given no sign of life while owing it one."""
        return max(booking.since, booking.entry.heard_at)

    def suspects(self, now: float, after_s: float) -> list[tuple[Key, Target]]:
        """Targets of the table that have something to answer, or to go on answering, and have been silent for longer than
        `after_s`."""
        quiet = {
            entry
            for entry in self._entries.values()
            if entry.view.in_flight and now - entry.heard_at > after_s
        }
        owing = {
            booking.entry
            for booking in (self._open if quiet else ())
            if booking.entry in quiet and now - booking.since > after_s
        }
        return [(entry.key, entry.target) for entry in self._entries.values() if entry in owing]

    def ejected(self, now: float) -> list[tuple[Key, Target, float]]:
        """Targets left out, and for how many seconds more; not above 0 if their trial is due and nobody's yet."""
        return [
            (entry.key, entry.target, entry.ejected_until - now)
            for entry in self._entries.values()
            if entry.ejected_until is not None and (now < entry.ejected_until or entry.trial is None)
        ]

    def rows(self, now: float) -> Iterator[tuple[Target, Health, int]]:
        """Every target of the table with its standing and its requests in flight."""
        for entry in self._entries.values():
            yield entry.target, entry.standing(now), entry.view.in_flight

    def views(self, now: float) -> list[TargetView]:
        """Every target of the table as a policy would see it; to be read only."""
        self._offers.views(now)  # looks that have gone stale are forgotten
        self._fade(now)
        return [entry.view for entry in self._entries.values()]

    def probe_list(self) -> list[tuple[Key, Target, int]]:
        """Every target of the table with its requests in flight: whose load may be worth a look."""
        return [(entry.key, entry.target, entry.view.in_flight) for entry in self._entries.values()]

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def stats(self, now: float, window_s: float) -> tuple[TargetStats, ...]:
        """Per target id, the generations that left but still run included in their id's counts."""
        return accounting.stats(self._known(), now, window_s)

    def audit(self) -> list[str]:
        """Every way in which the books do not balance, as sentences; empty when all is well."""
        return accounting.audit(self._known(), self._open)

    # --- inside

    def _known(self) -> list[TargetState]:
        return [*self._entries.values(), *self._departed.values()]

    def _current(self, key: Key) -> TargetState | None:
        entry = self._entries.get(key.id)
        return entry if entry is not None and entry.key == key else None

    def _next_life(self) -> int:
        self._life += 1
        self.models.renewed()
        return self._life

    def _remove(self, entry: TargetState) -> None:
        del self._entries[entry.key.id]
        entry.departed = True
        self._troubled.discard(entry)
        if entry.view.in_flight:
            self._departed[entry.key] = entry
        self._advisers.forget(entry.key.id)

    def _eject(self, entry: TargetState, now: float, at_least_s: float = 0.0, doubt: bool = True) -> None:
        entry.eject(now, self.table.breaker, at_least_s, doubt)
        self._offers.changed(entry)

    def _fade(self, now: float) -> None:
        """Where many have failed, a tenth of a second is soon enough for the next time."""
        if len(self._troubled) > FADED_EACH_TIME and now < self._fade_at:
            return
        self._fade_at = now + FADE_EVERY_S
        for entry in list(self._troubled):
            entry.view.trouble = entry.trouble_now(now)
            if not entry.view.trouble:
                self._troubled.discard(entry)


def _since(booking: Booking) -> float:
    return booking.since
