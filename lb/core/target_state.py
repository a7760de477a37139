"""One generation of a target: its requests in flight, its breaker, and what a policy sees of it. Pure.

*The breaker.* A target that cannot be reached, fails on a request, or returns nothing but server errors is left
out for `first_s`, doubling up to `longest_s` seconds; then one request is its trial (a single half-open probe).
The first byte of a response lifts the ejection. How long the next one would be is forgotten only when a request
has succeeded, so that a target which returns 503 for every trial is left out longer and longer.

*Doubt.* A request that waits for a target that cannot be reached, or is silent, is better off elsewhere. Not so if it died on
one request: had it died as a whole, the connections of the others would have closed as well, and to begin them again
elsewhere would cost their work a second time for nothing.

*Epochs.* A request must not try twice what failed it. It remembers `Booking.epoch`, which changes when a target
proves itself again, so that a request held meanwhile may use a target that has recovered.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from lb.config.options import Breaker, Pushing
from lb.config.schema import Readiness, Target
from lb.core.admission import EngineLoad, Gate
from lb.core.sliding_window import WindowCounter
from policies.backoff import delay_s
from policies.routing.base import RequestView, TargetView

_NEVER: Final = float("inf")
#: Errors of the target. 501 and 505 say what it does not support.
SERVER_ERRORS: Final = frozenset({500, 502, 503, 504, 507, 508})
TROUBLE_HALF_LIFE_S: Final = 10.0
TROUBLE_FORGOTTEN: Final = 0.01  # of one failure: older failures are ignored


class Key(NamedTuple):
    """A generation of a target: the id alone may mean another backend later."""

    id: str
    generation: int


class Health(str, Enum):
    """What a target is offered as, best first."""

    GOOD = "good"
    WARMING = "warming"  # good, and its cache is being filled: used where no other good one has room
    LOADED = "loaded"  # good, and its readiness probe waits behind requests: the same
    EJECTED = "ejected"
    UNHEALTHY = "unhealthy"
    CLOSED = "closed"  # draining or gone: takes nothing new

    @property
    def is_good(self) -> bool:
        """Return whether it is ready and not ejected."""
        return self in _GOOD


_GOOD: Final = (Health.GOOD, Health.WARMING, Health.LOADED)


class Outlook(str, Enum):
    """What an attempt without its first byte may hope for."""

    FINE = "fine"
    DOUBTFUL = (
        "doubtful"  # ejected and in doubt, or called unhealthy: better elsewhere, if there is an elsewhere
    )
    LOST = "lost"  # the target is gone and had not been drained


class Blame(str, Enum):
    """The blame that a failed attempt puts on the target."""

    NONE = "none"  # a keep-alive connection that had gone stale; a request that was moved away
    TROUBLE = "trouble"  # it responds, but with a server error: less attractive for a while
    DIED = "died"  # it died on the request: left out, though it may still serve others
    EJECT = "eject"  # it cannot be reached, or is silent: left out, and in doubt


class ErrorRow(NamedTuple):
    """Responses of SERVER_ERRORS with no other response in between."""

    errors: int
    first_at: float
    last_at: float


class Booking:
    """One attempt of one request on one target. Only its table changes it."""

    __slots__ = ("blamed", "entry", "epoch", "released", "request", "responded", "since")

    def __init__(self, entry: TargetState, request: RequestView, since: float) -> None:
        self.entry = entry
        self.request = request
        self.epoch = entry.epoch
        self.since = since
        self.responded = False
        self.blamed = False
        self.released = False

    @property
    def key(self) -> Key:
        return self.entry.key

    @property
    def target(self) -> Target:
        """As the controller describes it now."""
        return self.entry.target

    def __repr__(self) -> str:
        return f"Booking({self.request.id!r} on {self.entry.key.id!r} since {self.since:.3f})"


class TargetState:
    """The counts and the health of a target; the table decides what follows from them. Every change of `view` is made here."""

    __slots__ = (
        "departed",
        "doubted",
        "drain_at",
        "ejected_until",
        "ejections",
        "epoch",
        "error_row",
        "errors",
        "errors_in_row",
        "failures_in_row",
        "gate",
        "handed_over",
        "key",
        "load_good_until",
        "load_polled_at",
        "received_at",
        "requests",
        "served_at",
        "target",
        "trial",
        "trouble",
        "trouble_at",
        "view",
        "worked_at",
    )

    def __init__(self, key: Key, target: Target, epoch: int, pushing: Pushing, now: float) -> None:
        self.key = key
        self.target = target
        self.epoch = epoch
        self.view = TargetView(target.id)
        self.gate = Gate(pushing)
        self.requests = WindowCounter()
        self.errors = WindowCounter()
        self.received_at = now
        self.served_at: float | None = None  # the first byte of its last response of 2xx
        self.worked_at: float | None = None  # the last byte of a response that is no error of its own
        self.error_row: ErrorRow | None = None  # its responses of 5xx since `worked_at`
        self.load_polled_at = -_NEVER
        self.load_good_until = _NEVER  # there is none yet
        self.failures_in_row = 0  # not reached, or died on the request
        self.errors_in_row = 0  # that got a server error
        self.ejections = 0  # since a request has last ended well
        self.ejected_until: float | None = None  # past: a trial is due
        self.doubted = False  # while ejected: what waits for it waits in vain
        self.trial: Booking | None = None
        self.trouble = 0.0  # at `trouble_at`
        self.trouble_at = now
        self.drain_at: float | None = None
        self.handed_over = False
        self.departed = False
        self.describe(target, now)

    def describe(self, target: Target, now: float) -> None:
        """Apply the controller's description. The same description again does not put a drain's deadline off."""
        if target is not self.target and target == self.target:
            return
        draining = target.state is Readiness.DRAINING
        if not draining or target.drain_deadline_s is None:
            self.drain_at = None
        else:
            self.drain_at = now + target.drain_deadline_s
        if not draining:
            self.handed_over = False
        self.target = target
        view = self.view
        view.region, view.zone = target.region, target.zone
        view.capacity_type, view.accelerator = target.capacity_type, target.accelerator
        view.capacity, view.price_usd_hour = target.capacity, target.price_usd_hour

    # --- health

    def health(self, now: float) -> Health:
        state = self.target.state
        if state is Readiness.DRAINING or self.departed:
            return Health.CLOSED
        if state is Readiness.UNHEALTHY:
            return Health.UNHEALTHY
        if self.ejected_until is not None and (now < self.ejected_until or self.trial is not None):
            return Health.EJECTED
        if self.view.warming:
            return Health.WARMING
        return Health.LOADED if state is Readiness.LOADED else Health.GOOD

    def outlook(self, now: float) -> Outlook:
        """Of an attempt on it that waits for its first byte."""
        if self.target.state is Readiness.DRAINING:
            return Outlook.FINE
        if self.departed:
            return Outlook.LOST
        unwell = self.target.state is Readiness.UNHEALTHY
        return Outlook.DOUBTFUL if unwell or self.in_doubt(now) else Outlook.FINE

    def in_doubt(self, now: float) -> bool:
        """Return whether it cannot be reached, or does not respond."""
        return self.doubted and self.ejected_until is not None and now < self.ejected_until

    def admits(self) -> bool:
        return self.view.in_flight < self.gate.cap

    def eject(self, now: float, breaker: Breaker, at_least_s: float = 0.0, doubt: bool = True) -> None:
        self.ejections += 1
        backoff_s = delay_s(self.ejections, breaker.first_s, breaker.longest_s)
        self.doubted = doubt
        self.ejected_until = now + max(backoff_s, at_least_s)

    # --- attempts

    def book(self, request: RequestView, now: float) -> Booking:
        booking = Booking(self, request, now)
        view, gate = self.view, self.gate
        view.in_flight += 1
        view.waiting += 1
        if gate.reports:
            gate.sent(booking, view.in_flight)
            if view.pending is not None:
                view.pending += 1
        if self.ejected_until is not None and self.trial is None and now >= self.ejected_until:
            self.trial = booking
        self.requests.add(now)
        return booking

    def responded(self, booking: Booking, now: float, status: int) -> bool:
        """The first byte has come; True if that lifted an ejection."""
        booking.responded = True
        self.received_at = now
        if status in SERVER_ERRORS:
            self.erred(now)
        else:
            self.worked(now)
            if status < 300:
                self.served_at = now
        self.failures_in_row = 0
        view, gate = self.view, self.gate
        view.waiting -= 1
        if gate.reports and gate.responded(booking, view.in_flight):
            if view.pending:
                view.pending -= 1
            if view.running is not None:
                view.running += 1
        if self.ejected_until is None:
            return False
        self.ejected_until = None
        return True

    def worked(self, now: float) -> None:
        """A client got some of a response that is no error of the target."""
        self.worked_at = now
        self.error_row = None

    def erred(self, now: float) -> None:
        """It responded with a status of SERVER_ERRORS."""
        row = self.error_row
        self.error_row = ErrorRow(1, now, now) if row is None else ErrorRow(row.errors + 1, row.first_at, now)

    def release(self, booking: Booking) -> None:
        view, gate = self.view, self.gate
        view.in_flight -= 1
        if not booking.responded:
            view.waiting -= 1
        elif not booking.blamed and self.ejected_until is None:
            self.errors_in_row = self.ejections = 0
        if gate.reports:
            if gate.ended(booking):
                if view.pending:
                    view.pending -= 1
            elif view.running:
                view.running -= 1
        if self.trial is booking:
            self.trial = None

    def failed(self, booking: Booking, blame: Blame, now: float, breaker: Breaker) -> bool:
        """The attempt has failed; True if that is reason to leave the target out."""
        booking.blamed = True
        self.errors.add(now)
        self.trouble, self.trouble_at = self.trouble_now(now) + 1.0, now
        self.view.trouble = self.trouble
        on_trial = self.trial is booking
        if blame is Blame.TROUBLE and not booking.responded:  # an error is a response, too
            self.received_at = now
            self.failures_in_row = 0
        if self.ejected_until is not None and not on_trial:
            return False  # an old failure
        if blame is Blame.TROUBLE:
            self.errors_in_row += 1
            return on_trial or self.errors_in_row >= breaker.errors_in_row
        self.failures_in_row += 1
        return on_trial or self.failures_in_row >= breaker.failures

    def trouble_now(self, now: float) -> float:
        """Recent failures, each fading by half in TROUBLE_HALF_LIFE_S."""
        faded: float = self.trouble * 0.5 ** (max(0.0, now - self.trouble_at) / TROUBLE_HALF_LIFE_S)
        return faded if faded >= TROUBLE_FORGOTTEN else 0.0

    # --- the engine's reports

    def loaded(self, load: EngineLoad, polled_at: float, good_until: float) -> None:
        """The engine's account, with requests it cannot know of yet on top of the pending ones."""
        self.load_polled_at, self.load_good_until = polled_at, good_until
        view, gate = self.view, self.gate
        gate.loaded(load, polled_at, view.in_flight)
        view.running, view.kv_usage = load.running, load.kv_usage
        view.queued = load.pending or 0
        view.pending = None if load.pending is None else view.queued + len(gate.unproven)

    def load_too_old(self, waiting: list[Booking]) -> None:
        """The last account is too old. `waiting` is what it has without a first byte, oldest first."""
        self.gate.load_too_old(waiting, self.view.in_flight)
        self._drop_load()

    def load_not_reported(self, polled_at: float) -> None:
        """The engine has been polled and reported no load."""
        self.load_polled_at = polled_at
        self.gate.blind()
        self._drop_load()

    def use_pushing(self, pushing: Pushing) -> None:
        """Push by other rules from now on; requests under way are taken for proven."""
        self.gate = Gate(pushing)
        self._drop_load()

    def _drop_load(self) -> None:
        self.load_good_until = _NEVER
        self.view.running = self.view.pending = self.view.kv_usage = None
        self.view.queued = 0
