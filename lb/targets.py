"""The table of targets: who may take a request, who has which, who is out of favour. Pure and synchronous.

*Bookings.* Every attempt on a target is one `Booking`, released exactly once; loads are counted from nothing
else. `audit` proves that counts and open bookings agree.

*Generations.* A target that leaves and comes back, or changes its address, is a new generation: late news about
the old one cannot touch it. A generation that left is remembered while it has bookings.

*Passive ejection.* A target that cannot be reached or dies early is left out for 1, 2, 4 ... 30 seconds; then
one request is its trial, and its first byte ends the ejection. Failures of requests that were under way when it
was ejected say nothing new and do not lengthen it.

*Last resorts.* If no target is in good standing, ejected ones are offered, then those the controller calls
unhealthy: a bad chance is better than none. A draining target is never offered.

*Lives.* A request must not try twice what failed it. It remembers `Booking.life`, which changes when a target
proves itself again, so that a request held meanwhile may use a target that has recovered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lb.window import WindowCounter
from lb.wire import Table, Target, TargetState, TargetStats
from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.registry import make_policy

FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 30.0
TROUBLE_HALF_LIFE_S = 10.0


class Key(NamedTuple):
    """A generation of a target: the id alone may mean another backend later."""

    id: str
    generation: int


class Standing(str, Enum):
    """What a target is offered as, best first."""

    GOOD = "good"
    EJECTED = "ejected"
    UNHEALTHY = "unhealthy"
    CLOSED = "closed"  # draining or gone: takes nothing new


class Outlook(str, Enum):
    """What an attempt without its first byte may hope for."""

    FINE = "fine"
    DOUBTFUL = "doubtful"  # ejected, or called unhealthy: better elsewhere, if there is an elsewhere
    LOST = "lost"  # the target is gone and had not been drained


class Blame(str, Enum):
    """What a failed attempt says about the target."""

    NONE = "none"  # a keep-alive connection that had gone stale; a request that was moved away
    TROUBLE = "trouble"  # it answers, but with a server error: less attractive for a while
    EJECT = "eject"  # it cannot be reached, or died on the request


class BookingError(RuntimeError):
    """A booking was released twice: the caller's accounting is broken."""


class Changes(NamedTuple):
    """What a push did. `lost`: generations that went without having been drained."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    lost: frozenset[Key]


class Booking:
    """One attempt of one request on one target. A context manager: leaving it releases it."""

    __slots__ = ("_table", "answered", "key", "life", "released", "since", "target")

    def __init__(self, table: TargetTable, key: Key, target: Target, life: int, since: float) -> None:
        self._table = table
        self.key = key
        self.target = target
        self.life = life
        self.since = since
        self.answered = False
        self.released = False

    def __enter__(self) -> Booking:
        return self

    def __exit__(self, *_: object) -> None:
        self._table.release(self)


@dataclass(slots=True)
class _Entry:
    key: Key
    target: Target
    life: int
    requests: WindowCounter
    errors: WindowCounter
    heard_at: float
    in_flight: int = 0
    failures: int = 0  # ejections in a row
    ejected_until: float | None = None  # past: a trial is due
    trial: Booking | None = None
    trouble: float = 0.0
    trouble_at: float = 0.0

    def standing(self, now: float) -> Standing:
        if self.target.state is TargetState.DRAINING:
            return Standing.CLOSED
        if self.target.state is TargetState.UNHEALTHY:
            return Standing.UNHEALTHY
        if self.ejected_until is not None and (now < self.ejected_until or self.trial is not None):
            return Standing.EJECTED
        return Standing.GOOD

    def trouble_now(self, now: float) -> float:
        if not self.trouble:
            return 0.0
        return float(self.trouble * 0.5 ** (max(0.0, now - self.trouble_at) / TROUBLE_HALF_LIFE_S))

    def view(self, now: float) -> TargetView:
        target = self.target
        return TargetView(
            target.id,
            self.in_flight,
            self.trouble_now(now),
            target.region,
            target.zone,
            target.capacity_type,
            target.accelerator,
        )


class TargetTable:
    """The live state behind a pushed `Table`, with the routing policy the table names."""

    def __init__(self, table: Table, now: float) -> None:
        self.table = table
        self._policy: RoutingPolicy = make_policy(table.policy)
        self._entries: dict[str, _Entry] = {}
        self._departed: dict[Key, _Entry] = {}
        self._open: set[Booking] = set()
        self._generation = 0
        self._life = 0
        self.apply(table, now)

    # --- what the controller says

    def apply(self, table: Table, now: float) -> Changes:
        """Replace the table. Idempotent. Raises UnknownPolicyError, before anything has changed."""
        if table.policy != self._policy.name:
            self._policy = make_policy(table.policy)
        wanted = {target.id: target for target in table.targets}
        added: list[str] = []
        removed: list[str] = []
        lost: set[Key] = set()
        for entry in list(self._entries.values()):
            target = wanted.get(entry.key.id)
            if target is not None and target.url == entry.target.url:
                continue
            del self._entries[entry.key.id]
            if entry.in_flight:
                self._departed[entry.key] = entry
            removed.append(entry.key.id)
            if entry.target.state is not TargetState.DRAINING:
                lost.add(entry.key)
            self._policy.forget(entry.key.id)
        for target in table.targets:
            known = self._entries.get(target.id)
            if known is None:
                self._entries[target.id] = self._new_entry(target, now)
                added.append(target.id)
                continue
            if known.target.state is TargetState.UNHEALTHY and target.state is TargetState.READY:
                known.life = self._next_life()
            known.target = target
        self.table = table
        return Changes(tuple(added), tuple(removed), frozenset(lost))

    # --- choosing and booking

    def candidates(self, now: float, exclude: Collection[int] = ()) -> tuple[Standing, list[TargetView]]:
        """The targets of the best standing that has any, without the lives in `exclude`; maybe none."""
        by_standing: dict[Standing, list[TargetView]] = {}
        for entry in self._entries.values():
            if entry.life not in exclude:
                by_standing.setdefault(entry.standing(now), []).append(entry.view(now))
        for standing in (Standing.GOOD, Standing.EJECTED, Standing.UNHEALTHY):
            if standing in by_standing:
                return standing, by_standing[standing]
        return Standing.CLOSED, []

    def choose(self, request: RequestView, now: float, exclude: Collection[int] = ()) -> Choice | None:
        """The policy's choice among the candidates; None if there are none. Changes nothing."""
        _, views = self.candidates(now, exclude)
        return self._policy.choose(request, views, now) if views else None

    @property
    def needs_prompt(self) -> bool:
        return self._policy.needs_prompt

    def book(self, request: RequestView, target_id: str, now: float) -> Booking:
        """Begin an attempt on a target of the table. Raises KeyError if there is none of that id."""
        entry = self._entries[target_id]
        booking = Booking(self, entry.key, entry.target, entry.life, now)
        entry.in_flight += 1
        entry.requests.add(now)
        if entry.ejected_until is not None and entry.trial is None and now >= entry.ejected_until:
            entry.trial = booking
        self._open.add(booking)
        self._policy.record(request, target_id, now)
        return booking

    def release(self, booking: Booking) -> None:
        """The attempt is over, however it ended. Raises BookingError the second time."""
        if booking.released:
            raise BookingError(f"booking on {booking.key} released twice")
        booking.released = True
        self._open.discard(booking)
        entry = self._entry(booking.key)
        if entry is None:
            raise BookingError(f"booking on unknown {booking.key}")
        entry.in_flight -= 1
        if entry.trial is booking:
            entry.trial = None
        if not entry.in_flight:
            self._departed.pop(booking.key, None)

    # --- what attempts and probes teach

    def answered(self, booking: Booking, now: float) -> bool:
        """The first byte of an answer has come; True if that ended an ejection."""
        booking.answered = True
        entry = self._entry(booking.key)
        if entry is None:
            return False
        entry.heard_at = now
        if entry.ejected_until is None:
            return False
        entry.ejected_until = None
        entry.failures = 0
        entry.life = self._next_life()
        return True

    def failed(self, booking: Booking, blame: Blame, now: float) -> bool:
        """The attempt failed; True if the target is ejected for it. Still needs its release."""
        entry = self._entry(booking.key)
        if entry is None or blame is Blame.NONE:
            return False
        entry.errors.add(now)
        entry.trouble, entry.trouble_at = entry.trouble_now(now) + 1.0, now
        if blame is not Blame.EJECT:
            return False
        if entry.ejected_until is not None and entry.trial is not booking:
            return False  # old news
        self._eject(entry, now, 0.0)
        return True

    def eject(self, key: Key, now: float, at_least_s: float = 0.0) -> bool:
        """Leave the target out although no request has failed (it is frozen); False if it has left the table."""
        entry = self._entries.get(key.id)
        if entry is None or entry.key != key:
            return False
        self._eject(entry, now, at_least_s)
        return True

    def heard(self, key: Key, now: float) -> None:
        """Some byte came from the target: it is not frozen."""
        entry = self._entry(key)
        if entry is not None:
            entry.heard_at = now

    def renew(self, key: Key) -> bool:
        """A probe of an ejected target was answered: requests that it has failed may try it again.

        The ejection stands, since answering a probe is easier than answering a request.
        """
        entry = self._entries.get(key.id)
        if entry is None or entry.key != key or entry.ejected_until is None:
            return False
        entry.life = self._next_life()
        return True

    # --- looking

    def standing(self, key: Key, now: float) -> Standing:
        entry = self._entries.get(key.id)
        return entry.standing(now) if entry is not None and entry.key == key else Standing.CLOSED

    def outlook(self, booking: Booking, now: float) -> Outlook:
        """Whether the booking's target can still be expected to answer."""
        entry = self._entry(booking.key)
        if entry is None or entry.target.state is TargetState.DRAINING:
            return Outlook.FINE
        if booking.key in self._departed:
            return Outlook.LOST
        out = entry.ejected_until is not None and now < entry.ejected_until
        return Outlook.DOUBTFUL if out or entry.target.state is TargetState.UNHEALTHY else Outlook.FINE

    def silent_since(self, booking: Booking) -> float:
        """Since when the booking's target has given no sign of life while owing it one."""
        entry = self._entry(booking.key)
        return max(booking.since, entry.heard_at) if entry is not None else booking.since

    def suspects(self, now: float, after_s: float) -> list[tuple[Key, Target]]:
        """Targets of the table that owe a first byte and have been silent for longer than `after_s`."""
        keys = {
            booking.key
            for booking in self._open
            if not booking.answered and now - self.silent_since(booking) > after_s
        }
        return [(entry.key, entry.target) for entry in self._entries.values() if entry.key in keys]

    def ejected(self, now: float) -> list[tuple[Key, Target, float]]:
        """Targets left out, and for how many seconds more; not above 0 if their trial is due and nobody's yet."""
        return [
            (entry.key, entry.target, entry.ejected_until - now)
            for entry in self._entries.values()
            if entry.ejected_until is not None and (now < entry.ejected_until or entry.trial is None)
        ]

    def rows(self, now: float) -> Iterator[tuple[Target, Standing, int]]:
        """Every target of the table with its standing and its requests in flight."""
        for entry in self._entries.values():
            yield entry.target, entry.standing(now), entry.in_flight

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def stats(self, now: float, window_s: float) -> tuple[TargetStats, ...]:
        """Per target id, the generations that left but still run included in their id's counts."""
        merged: dict[str, TargetStats] = {}
        for entry in (*self._entries.values(), *self._departed.values()):
            before = merged.get(entry.key.id, TargetStats(entry.key.id, 0, 0, 0, False))
            current = entry.key.id in self._entries and self._entries[entry.key.id] is entry
            merged[entry.key.id] = TargetStats(
                id=entry.key.id,
                in_flight=before.in_flight + entry.in_flight,
                requests=before.requests + entry.requests.count(now, window_s),
                errors=before.errors + entry.errors.count(now, window_s),
                ejected=before.ejected or (current and entry.standing(now) is Standing.EJECTED),
            )
        return tuple(merged.values())

    def audit(self) -> list[str]:
        """Every way in which the books do not balance, as sentences; empty when all is well."""
        problems = []
        open_by_key: dict[Key, int] = {}
        for booking in self._open:
            open_by_key[booking.key] = open_by_key.get(booking.key, 0) + 1
            if self._entry(booking.key) is None:
                problems.append(f"open booking on unknown {booking.key}")
        for entry in (*self._entries.values(), *self._departed.values()):
            expected = open_by_key.get(entry.key, 0)
            if entry.in_flight != expected:
                problems.append(
                    f"{entry.key} counts {entry.in_flight} in flight, {expected} bookings are open"
                )
            if entry.trial is not None and entry.trial not in self._open:
                problems.append(f"{entry.key} waits for a trial that is over")
        problems += [
            f"{key} left, idle, and is still remembered"
            for key, e in self._departed.items()
            if not e.in_flight
        ]
        return problems

    # --- inside

    def _entry(self, key: Key) -> _Entry | None:
        entry = self._entries.get(key.id)
        return entry if entry is not None and entry.key == key else self._departed.get(key)

    def _new_entry(self, target: Target, now: float) -> _Entry:
        self._generation += 1
        key = Key(target.id, self._generation)
        return _Entry(key, target, self._next_life(), WindowCounter(), WindowCounter(), heard_at=now)

    def _next_life(self) -> int:
        self._life += 1
        return self._life

    def _eject(self, entry: _Entry, now: float, at_least_s: float) -> None:
        backoff_s = min(LONGEST_EJECTION_S, FIRST_EJECTION_S * 2.0 ** min(entry.failures, 10))
        entry.failures += 1
        entry.ejected_until = now + max(backoff_s, at_least_s)
