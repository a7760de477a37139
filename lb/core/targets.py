"""The table of targets: eligibility, requests in flight, ejection. Pure and synchronous.

The table holds facts. It reports them to the routing policies in use, and `lb.core.target_choice` chooses by them.

*Bookings.* Every attempt on a target is one `Booking`, released exactly once; loads are counted from nothing
else. Whether counts and open bookings agree can be checked by `books`.

*Generations.* A target that leaves and comes back, or changes its address, is a new generation: a late result of
the old one does not change it. A generation that left is remembered while it has bookings.

*Passive ejection and epochs* belong to one generation: see `lb.core.target_state`.

*Last resorts.* If no target is healthy, ejected ones are offered, then those the controller calls
unhealthy: a bad chance is better than none. A draining target is never offered.

*Admission.* Among the targets of the best health those are offered that may have one more request (see
`lb.core.admission`). If there are such targets but none has room, a request has to wait: it is not sent to a worse
one instead.

*Costs.* Who is offered is kept between requests (`lb.core.candidates`), so that choosing costs what the policy costs. Values
that are read several times a second (`ejected`, `suspects`, `handovers`, `newly_busy`) come from lists of the targets
concerned, which are updated where the state changes, so that targets with nothing to report cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from lb.config.schema import Readiness, Table, Target, TargetStats
from lb.core import accounting
from lb.core.active_policies import ActivePolicies
from lb.core.admission import EngineLoad
from lb.core.candidates import Candidates
from lb.core.models import ModelDirectory, ModelList
from lb.core.residency import Residency
from lb.core.target_state import Blame, Booking, Health, Key, Outlook, TargetState
from policies.routing.base import RequestView, RoutingPolicy, TargetView
from policies.routing.registry import make_policy

__all__ = ["Blame", "Booking", "BookingError", "Books", "Changes", "Health", "Key", "Outlook", "TargetTable"]

FADED_EACH_TIME: Final = 16
FADE_EVERY_S: Final = 0.1


class BookingError(Exception):
    """A booking was released twice: the caller's accounting is broken."""


class Changes(NamedTuple):
    """What a push did. `lost`: generations that went without having been drained."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    lost: frozenset[Key]


class Books(NamedTuple):
    """What a table counts from and the lists that it keeps up to date, to be read only: for checks of whether they agree."""

    present: Collection[TargetState]
    known: Collection[TargetState]  # with those that left and have bookings
    open: Collection[Booking]
    busy: Collection[TargetState]
    left_out: Collection[TargetState]
    draining: Collection[TargetState]


class TargetTable:
    """The live state behind a pushed `Table`, and the routing policies that are informed of it.

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
        self.table = table
        self._entries: dict[str, TargetState] = {}
        self._departed: dict[Key, TargetState] = {}
        self._open: set[Booking] = set()
        # Of the table, not of the generations that left. Dicts, since their order must be the same in every run.
        self._busy: dict[TargetState, None] = {}  # with requests in flight
        self._newly_busy: dict[TargetState, None] = {}  # since `newly_busy` was last called
        self._left_out: dict[TargetState, None] = {}  # with an `ejected_until`
        # With a deadline, and not handed over; also those that left.
        self._draining: dict[TargetState, None] = {}
        self._relieved: dict[str, None] = {}  # since `take_relieved` was last called
        self._troubled: set[TargetState] = set()  # whose failures are not forgotten yet
        self._fade_at = now
        self.warming: dict[str, None] = {}  # the targets whose caches are being filled
        self.replaced = 0  # how often the table has been
        self._candidates = Candidates(self._entries, self._open)
        self.policies = ActivePolicies(table.policy, make_policy, self._open)
        self.residency = Residency()  # by which requests may not have some of them
        self.models = ModelDirectory(self._entries)
        self._generation = 0
        self._last_epoch = first_epoch
        self.apply(table, now)

    # --- the controller's table

    def apply(self, table: Table, now: float) -> Changes:
        """Replace the table. Idempotent. Raises UnknownPolicyError, before anything has changed."""
        self.policies.adopt(table.policy)
        self.policies.follow(on=table.cache_events.enabled)
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
        for record in self.policies.on_record:
            record(request, target_id, now)
        return booking

    def responded(self, booking: Booking, now: float, status: int = 200) -> bool:
        """The first byte of a response has come; True if that lifted an ejection.

        For a response of 502, 503 or 504 that goes to no client call `refused` and `failed` with TROUBLE instead.
        """
        if booking.responded or booking.released:
            return False
        entry = booking.entry
        was_full = not entry.admits()
        readmitted = entry.responded(booking, now, status)
        if readmitted:
            entry.epoch = self._next_epoch()
            self._left_out.pop(entry, None)
            self._candidates.changed(entry)
        elif was_full and entry.admits():
            self._candidates.opened(entry)
        self._relieved[entry.key.id] = None
        for responded in self.policies.on_responded:
            responded(booking.request, entry.key.id, now)
        return readmitted

    def refused(self, booking: Booking, now: float) -> None:
        """The target responded with an error of its own, and another may have the request."""
        booking.entry.erred(now)

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
        for ended in self.policies.on_ended:
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

    def cached(self, key: Key, request: RequestView, now: float) -> None:
        """A target of the table has computed the prompt, for no client of this agent."""
        if self._current(key) is not None:
            for cached in self.policies.on_cached:
                cached(request, key.id, now)

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

    def received_from(self, key: Key, now: float, *, worked: bool = False) -> None:
        """Record that some byte came from the target: it is not frozen. If it `worked`, a byte for a client."""
        entry = self._current(key) or self._departed.get(key)
        if entry is not None:
            entry.received_at = now
            if worked:
                entry.worked(now)

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

    # --- who may take a request now

    def entry(self, target_id: str) -> TargetState | None:
        """Return the state of a target of the table; to be read only."""
        return self._entries.get(target_id)

    def offers(self, now: float, exclude: Collection[int] = (), gated: bool = True) -> Sequence[TargetView]:
        """Return the targets of the best health that admit one more request, without the epochs in `exclude`.

        If not `gated`, those without room are among them.
        """
        if exclude:
            views = self._candidates.without(exclude, now, gated)[1]
        else:
            views = self._candidates.views(now) if gated else self._candidates.best(now)
        if self._troubled and views:
            self._fade(now)
        return views

    def candidates(self, now: float, exclude: Collection[int] = ()) -> tuple[Health, Sequence[TargetView]]:
        """Return the best health of any target without the epochs in `exclude`, and who of that health admits.

        Those that are loaded count among those that are warming.
        """
        self._fade(now)
        return self._candidates.without(exclude, now)

    def admits(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether `choose` would choose."""
        return bool(self._candidates.without(exclude, now)[1] if exclude else self._candidates.views(now))

    def has_candidate(self, now: float, exclude: Collection[int] = ()) -> bool:
        """Return whether a target could take it, now or once it has room."""
        if exclude:
            return self._candidates.without(exclude, now)[0] is not Health.CLOSED
        return bool(self._candidates.best(now))

    def has_room_outside(self, target_ids: Collection[str], now: float) -> bool:
        """Return whether a target of the best health that is not one of those has nothing pending, and may soon run dry.

        Where those are the targets for which requests wait, having no room, the first that is looked at decides.
        """
        return any(view.id not in target_ids for view in self._candidates.views(now))

    def room(self, now: float) -> bool:
        """Return whether any target, of any health, admits one more request."""
        return self._candidates.room(now)

    def version(self, now: float) -> int:
        """Revision; changes whenever a target becomes eligible."""
        return self._candidates.version(now)

    @property
    def health_changes(self) -> int:
        """Changes when the health of a target does, and when one joins or leaves."""
        return self._candidates.health_changes

    def offered(self, target_id: str, now: float) -> bool:
        """Return whether the target is of the best health there is."""
        entry = self._entries.get(target_id)
        if entry is None:
            return False
        return entry.health(now).is_good or entry.view in self._candidates.best(now)

    def views(self, now: float) -> list[TargetView]:
        """Every target of the table as a policy would see it; to be read only."""
        self._candidates.views(now)  # looks that have gone stale are forgotten
        self._fade(now)
        return [entry.view for entry in self._entries.values()]

    # --- the state of targets and bookings

    def books(self) -> Books:
        """Return all of them as they are now."""
        present, known = self._entries.values(), self._known()
        return Books(present, known, self._open, self._busy, self._left_out, self._draining)

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

    def take_relieved(self) -> Collection[str]:
        """Return the targets that may be able to take more than when this was last called; time aside."""
        relieved, self._relieved = self._relieved, {}
        return relieved

    def relieve(self, target_ids: Iterable[str]) -> None:
        """Targets of `take_relieved` that have not been looked at."""
        self._relieved.update(dict.fromkeys(target_ids))

    def drop_unused_policies(self, now: float) -> None:
        """Forget policies that no request has named lately."""
        self.policies.drop_unused(now)

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
        self.policies.forget(entry.key.id)

    def _eject(self, entry: TargetState, now: float, at_least_s: float = 0.0, doubt: bool = True) -> None:
        entry.eject(now, self.table.breaker, at_least_s, doubt)
        self._left_out[entry] = None
        self._candidates.changed(entry)

    def _fade(self, now: float) -> None:
        """Where many have failed, a tenth of a second is soon enough for the next time."""
        if len(self._troubled) > FADED_EACH_TIME and now < self._fade_at:
            return
        self._fade_at = now + FADE_EVERY_S
        for entry in list(self._troubled):
            entry.view.trouble = entry.trouble_now(now)
            if not entry.view.trouble:
                self._troubled.discard(entry)

    def _known(self) -> list[TargetState]:
        return [*self._entries.values(), *self._departed.values()]

    def _current(self, key: Key) -> TargetState | None:
        entry = self._entries.get(key.id)
        return entry if entry is not None and entry.key == key else None


def _since(booking: Booking) -> float:
    return booking.since
