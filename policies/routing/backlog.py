"""What one target has to do before a newcomer's first byte, in seconds.

Two things are needed before a first byte, and the longer wait for either counts:

- *The prefill ahead*: residual bytes of the prompts that were sent before and have no first byte, without what the head
  of the queue must have had computed since it became the head. Requests the engine reports as pending beyond our own
  (those of other load balancers) count as the usual residual.
- *A seat in the batch*. An engine whose batch or memory is full makes each request ahead wait until a stream ends, which
  happens every stream_s / streams seconds (Little's law). Engines report how many sequences run and how many requests are
  pending, but rarely how many seats there are. So the most that have run while something was pending, and later than its
  prefill takes, are taken for all, and count less with the time. Pending requests beside free seats wait for the prefill of
  others, which is the work above. Reports are some 100 ms old, so a few free seats count as none: SEATS_SLACK of them in the
  cost, by which requests leave the holders of their prompts, HOLD_SLACK in the choice between waiting here and there.

A first byte that waited for a seat is no evidence of how fast the target computes, so the speed does not learn from it: the
less a request has to compute, the more it would be misled.

Requests that are held for the target by the load balancer are ahead of a newcomer as far as they would go before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf

from policies.routing.base import TargetView
from policies.routing.prefill_rate import PrefillRate
from policies.routing.request_work import BYTES_PER_TOKEN

DEFAULT_S_PER_BYTE = 0.0938e-3 / BYTES_PER_TOKEN
FIRST_USUAL_BYTES = (
    500 * BYTES_PER_TOKEN
)  # as the authors' code of GORGO assumes of requests it does not know
USUAL_SHARE = 0.02  # of the newest request in the usual residual
STREAM_SHARE = 0.05  # of the newest stream in the usual duration
TOKEN_SHARE = 0.2  # of the newest stream in the pace of its tokens
DOUBT = 3.0  # standard errors by which a target must differ from the fleet
SPEED_HOLDS_S = 0.25  # as long a speed is used before it is computed again
SEATS_FADE_S = 60.0  # what was seen of the seats of a batch counts less by e after this time
SEATS_KEPT = 1  # for urgent requests, of those of a batch, while such requests come
SEATS_SEEN_S = 5.0  # as long what was seen of them is taken as it is where room is kept
# What an engine has pending waits for prefill until the first of it is as late as this.
LATE_S = 0.1
# As few free seats are none: streams end between two reports, and those pending have not come in yet. And as few seats are
# none that were seen: this number of sequences runs beside requests that wait for prefill.
SEATS_SLACK = 3
HOLD_SLACK = 6  # the same where only the place to wait is chosen: a seat too few costs less there than a full engine's queue
# An engine whose pending requests need that long to have a seat does not run dry until its next report.
SEAT_AHEAD_S = 0.5
FULL_KV_USAGE = 0.95  # from here an engine has no memory for a newcomer
_NEVER = float("-inf")


class FleetMeans:
    """Means over all targets."""

    __slots__ = ("_known_until", "_s_per_byte", "rate", "stream_s", "usual_bytes")

    def __init__(self) -> None:
        self.rate = PrefillRate()
        self._s_per_byte = DEFAULT_S_PER_BYTE
        self._known_until = _NEVER
        self.usual_bytes = float(FIRST_USUAL_BYTES)
        self.stream_s = 0.0  # from the first byte to the end

    def s_per_byte(self, now: float) -> float:
        if now >= self._known_until:
            self._known_until = now + SPEED_HOLDS_S
            self._s_per_byte = self.rate.s_per_byte(DEFAULT_S_PER_BYTE, now)
        return self._s_per_byte


class Backlog:
    """The requests on one target that have no first byte, oldest first, those held for it, and how fast it works.

    Our own keep it busy until `free_at`, unless their head is late, and for `least_s` in any case: a subtraction and a
    comparison say for how long. Both are as good as `s_per_byte`, which is to be computed again at `known_until`.
    """

    __slots__ = (
        "_bytes",
        "_fleet",
        "_head",
        "_head_since",
        "_rate",
        "_seats",
        "_seats_seen_at",
        "_stream_s",
        "busy_from",
        "free_at",
        "held",
        "known_until",
        "least_s",
        "s_per_byte",
        "sent",
        "target",
        "token_s",
    )

    def __init__(self, fleet: FleetMeans) -> None:
        self.sent: dict[str, int] = {}  # residual bytes by request
        self.held = QueuedBytes()
        self.s_per_byte = 0.0
        self.known_until = _NEVER
        self.free_at = _NEVER
        self.least_s = 0.0
        self._fleet = fleet
        self._rate = PrefillRate(DOUBT)
        self._stream_s: float | None = None
        self._bytes = self._head = 0
        self._head_since = 0.0
        self._seats = 0.0
        self._seats_seen_at = _NEVER
        self.busy_from = inf  # this number of sequences in the batch leaves no seat
        self.token_s = 0.0  # from one token of a stream to the next, of late; 0: not known
        self.target: TargetView | None = None  # as its owner keeps it, once it has been chosen

    # --- asked

    def speed(self, now: float) -> float:
        """Return seconds per byte."""
        return self.s_per_byte if now < self.known_until else self.compute_speed(now)

    def compute_speed(self, now: float) -> float:
        self.known_until = now + SPEED_HOLDS_S
        self.s_per_byte = self._rate.s_per_byte(self._fleet.s_per_byte(now), now)
        self._changed()
        return self.s_per_byte

    def sent_s(self, now: float) -> float:
        """Return until all of our own have their first byte; the speed must be up to date."""
        return max(self.free_at - now, self.least_s)

    def wait_s(
        self, target: TargetView, now: float, place: float | None = None, is_one: bool = False
    ) -> float:
        """Return until a newcomer's turn comes; with a `place` also held requests that go before that place count.

        `is_one`: the request of that place is one of those that are held here. The speed must be up to date.
        """
        ahead_s = self.sent_s(now)
        pending, before = target.pending or 0, 0
        strangers = pending - len(self.sent)
        if strangers > 0:
            ahead_s += strangers * self._fleet.usual_bytes * self.s_per_byte
        if place is not None:
            before, held_bytes = self.held.before(place, is_one)
            ahead_s += held_bytes * self.s_per_byte
        if target.queued and now > self._head_since + self._head * self.s_per_byte + LATE_S:
            self._see_seats(target, now)
        streams_ahead = self.streams_ahead(target, SEATS_SLACK)
        if not streams_ahead:
            return ahead_s
        return max(ahead_s, (streams_ahead + before) * self._seat_s(target))

    def needs_seat(self) -> bool:
        """Return whether the target, as it was when it was chosen, has no seat for another request."""
        return self.streams_ahead(self.target, SEATS_SLACK) > 0

    def streams_ahead(self, target: TargetView | None, slack: int) -> int:
        """Return how many streams must end before a newcomer has a seat in the batch; 0 if it is free, or not known.

        Fewer than `slack` free seats are none.
        """
        if target is None:
            return 0
        pending = target.pending or 0
        if target.running is None:
            return pending if target.queued else 0
        if target.queued and target.kv_usage is not None and target.kv_usage >= FULL_KV_USAGE:
            return pending + 1
        seats = round(self._seats)
        if seats < slack or target.running <= seats - slack:
            return 0
        return max(0, pending + 1 - max(0, seats - target.running))

    def seats_are_ready(self, target: TargetView) -> bool:
        """Return whether the engine could run dry of requests that wait for a seat before its next report."""
        streams_ahead = self.streams_ahead(target, HOLD_SLACK)
        return streams_ahead <= 1 or streams_ahead * self._seat_s(target) < SEAT_AHEAD_S

    def has_seat(self, target: TargetView, urgent: bool, now: float) -> bool:
        """Return whether a newcomer has a seat at once, and one that is not `urgent` leaves SEATS_KEPT.

        Now and then it may go although it has only the next one, to find out how many there are.
        """
        pending, seats = target.pending or 0, round(self._seats)
        if not pending and (target.running is None or not seats):
            return True
        free = seats - (target.running or 0) - pending
        if target.queued and target.kv_usage is not None and target.kv_usage >= FULL_KV_USAGE:
            free = -pending
        return free > (0 if urgent else SEATS_KEPT) or (
            not urgent and not pending and now > self._seats_seen_at + SEATS_SEEN_S
        )

    # --- changes

    def join(self, request_id: str, residual: int, now: float) -> None:
        if not self.sent:
            self._head, self._head_since = residual, now
        self.sent[request_id] = residual
        self._bytes += residual
        self._changed()

    def leave(self, request_id: str, now: float) -> None:
        sent = self.sent
        was_head = request_id == next(iter(sent))
        self._bytes -= sent.pop(request_id)
        if was_head:
            self._head, self._head_since = next(iter(sent.values()), 0), now
        self._changed()

    def served(self, work_bytes: float, first_byte_s: float, stream_s: float, now: float) -> None:
        """A response has been streamed whose first byte came after `first_byte_s`, with `work_bytes` before it."""
        fleet = self._fleet
        self._rate.learn(work_bytes, first_byte_s, fleet.s_per_byte(now), now)
        fleet.rate.learn(work_bytes, first_byte_s, DEFAULT_S_PER_BYTE, now)
        self.streamed(stream_s)

    def streamed(self, stream_s: float) -> None:
        """A response has been streamed whose first byte is no evidence of the speed."""
        fleet = self._fleet
        fleet.stream_s += (STREAM_SHARE if fleet.stream_s else 1.0) * (stream_s - fleet.stream_s)
        known = fleet.stream_s if self._stream_s is None else self._stream_s
        self._stream_s = known + STREAM_SHARE * (stream_s - known)

    def paced(self, token_s: float) -> None:
        """A response has been streamed with so many seconds between two tokens."""
        self.token_s += (TOKEN_SHARE if self.token_s else 1.0) * (token_s - self.token_s)

    # --- inside

    def _changed(self) -> None:
        """The head works from the instant it became the head, and is no longer at work than its own bytes take."""
        self.free_at = self._head_since + self._bytes * self.s_per_byte if self.sent else _NEVER
        self.least_s = (self._bytes - self._head) * self.s_per_byte

    def _see_seats(self, target: TargetView, now: float) -> None:
        """Learn from a target that reports requests as pending how many sequences its batch holds."""
        running = float(target.running or 0)
        if self._seats:
            self._seats *= exp((self._seats_seen_at - now) / SEATS_FADE_S)
        if running > self._seats:
            self._seats = running
        self._seats_seen_at = now
        seats = round(self._seats)
        self.busy_from = float(seats - SEATS_SLACK + 1) if seats >= SEATS_SLACK else inf

    def _seat_s(self, target: TargetView) -> float:
        """Return seconds from the end of one stream to that of the next."""
        stream_s = self._fleet.stream_s if self._stream_s is None else self._stream_s
        return stream_s / max(1, target.running or 0, target.in_flight - target.waiting)


class QueuedBytes:
    """Residual bytes of the requests that are held for one target, in the order of their places."""

    __slots__ = ("_bytes", "_sums", "places")

    def __init__(self) -> None:
        self.places: list[float] = []  # in order
        self._bytes: list[int] = []
        self._sums: Sequence[int] | None = (
            None  # sums over the first 1, 2, ... entries; None if they have changed
        )

    def join(self, place: float, residual: int) -> None:
        index = bisect_right(self.places, place)
        self.places.insert(index, place)
        self._bytes.insert(index, residual)
        self._sums = None

    def leave(self, place: float, residual: int) -> None:
        index = self._bytes.index(residual, bisect_left(self.places, place))
        del self.places[index], self._bytes[index]
        self._sums = None

    def before(self, place: float, is_one: bool) -> tuple[int, int]:
        """Return how many go before a request of that place, which `is_one` of them or comes after its equals; their bytes."""
        count = (bisect_left if is_one else bisect_right)(self.places, place)
        if not count:
            return 0, 0
        sums = self._sums
        if sums is None:
            sums = self._sums = list(accumulate(self._bytes))
        return count, sums[count - 1]
