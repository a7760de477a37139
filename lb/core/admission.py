"""Whether a target may be given one more request: blind, fixed cap, or selective pushing. Pure.

Pushing by work is selective here; a routing policy that measures work may allow more (see `lb.core.targets`). All three are one
number, the *cap*: how many requests of ours the target may have in flight. It is open while
`in_flight < cap`. Blind pushing has no cap, SP-O a fixed one, SP-P one that every look at the engine moves.

SP-P (SkyWalker §3.3) gives a target more only while its engine has no *pending* request, one that its batch had
no room for, and looks every 100 ms. A look alone is not enough: between two of them a balancer of a hundred
requests a second would push ten of them through one "nothing is pending". So what has been sent since counts:

    unproven   requests of ours, without a first byte and not over, of which nothing shows that the engine has found room
               for them: sent after the look was requested, or still on their way to its scheduler then (it
               counted fewer requests than we have there), which ends after TRANSIT_S
    carried  = in_flight - unproven - pending       what it carries without complaint
    cap      = carried + allowance                  and never below 1: one of ours is always worth a try
    cap     <= carried + max_running - running      if the engine reports both

A request that ends makes room for another at once, since `in_flight` falls and the cap does not: what the engine
could carry it can carry. A first byte proves a request, so `carried` and the cap grow by one. The clock of the
pushing is thus the engine's own pace, as acknowledgements are the clock of TCP's window (Jacobson 1988), and short
requests are not limited to a fixed number per poll.

The allowance is how much more than it is known to carry the engine is trusted with until something is proven:

    at first                                            FIRST_ALLOWANCE
    nothing pending, the cap was hit, and some proven   twice as much as before
    pending > 0                                         1; once that is over, half as much as before

An engine of many slots thus fills up within a few looks, and once it is full it has a few requests pending, not
ten for each look. Where reports stop coming, every request without its first byte is unproven, and the allowance stays.
Where an engine has never reported its load, or reports nothing, pushing is blind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from lb.config.options import Pushing, PushMode

NO_CAP: Final = sys.maxsize
FIRST_ALLOWANCE: Final = 4  # so that a handful of requests to an idle target need not wait for the next look
MAX_ALLOWANCE: Final = 64
TRANSIT_S: Final = (
    2.0  # a scheduler takes notice of what has come after each iteration, or should have by then
)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reports of itself; None is what it does not report. `kv_usage` is 0 to 1.

    `running` requests are in its batch, at most `max_running` of them; `pending` ones wait for room in it.
    """

    running: int | None
    pending: int | None
    kv_usage: float | None = None
    max_running: int | None = None


class Sent(Protocol):
    """A request of ours on the target, sent at `since`. Hashed by identity."""

    since: float


class Gate:
    """The cap of one target. The owner counts `in_flight` itself, and hands it in as it is after the event.

    `reports`: the engine's report is in use; only then does the gate need every request.
    """

    __slots__ = (
        "_ceiling",
        "_hit",
        "_pending",
        "_proved",
        "_selective",
        "_step",
        "allowance",
        "cap",
        "reports",
        "unproven",
    )

    def __init__(self, pushing: Pushing) -> None:
        self._selective = pushing.is_polled
        self.cap = pushing.cap if pushing.mode is PushMode.FIXED_CAP else NO_CAP
        self.reports = False
        self.allowance = FIRST_ALLOWANCE
        self.unproven: dict[Sent, None] = {}  # oldest first
        self._pending = 0
        self._step = self.allowance  # or 1, while something is pending
        self._ceiling = NO_CAP
        self._hit = False  # the cap, since the last look
        self._proved = False  # something, since the last look

    def sent(self, request: Sent, in_flight: int) -> None:
        self.unproven[request] = None
        if in_flight >= self.cap:
            self._hit = True

    def responded(self, request: Sent, in_flight: int) -> bool:
        """Its first byte has come; True if it was unproven until now."""
        if request not in self.unproven:
            return False
        del self.unproven[request]
        self._proved = True
        if self._selective:
            carried = in_flight - len(self.unproven) - self._pending
            self.cap = max(self.cap, min(carried + self._step, self._ceiling))
        return True

    def ended(self, request: Sent) -> bool:
        """It is over; True if it was unproven until now."""
        if request not in self.unproven:
            return False
        del self.unproven[request]
        return True

    def loaded(self, load: EngineLoad, polled_at: float, in_flight: int) -> None:
        """The engine has reported its load, as of `polled_at`."""
        self.reports = True
        self._see(load, polled_at, in_flight)
        if not self._selective:
            return
        if load.pending is None and (load.running is None or load.max_running is None):
            self.cap = NO_CAP
            return
        self._pending = load.pending or 0
        self._adapt()
        carried = in_flight - len(self.unproven) - self._pending
        self._ceiling = NO_CAP
        if load.max_running is not None and load.running is not None:
            self._ceiling = max(1, carried + load.max_running - load.running)
        self.cap = min(max(1, carried + self._step), self._ceiling)
        self._hit = in_flight >= self.cap
        self._proved = False

    def load_too_old(self, waiting: Iterable[Sent], in_flight: int) -> None:
        """No look has succeeded for long: only requests without a first byte are known, oldest first."""
        self.unproven = dict.fromkeys(waiting)
        self._pending = 0
        self._step = self.allowance
        self._ceiling = NO_CAP
        if self._selective:
            self.cap = max(1, in_flight - len(self.unproven) + self._step)

    def blind(self) -> None:
        """The engine reports nothing (any more)."""
        self.reports = False
        self.unproven.clear()
        if self._selective:
            self.cap = NO_CAP

    def _see(self, load: EngineLoad, polled_at: float, in_flight: int) -> None:
        """Take for proven what the engine counts."""
        before = old = 0
        for request in self.unproven:
            if request.since >= polled_at:
                break
            before += 1
            old += request.since <= polled_at - TRANSIT_S
        there = in_flight - (len(self.unproven) - before)
        unseen = min(before, max(0, there - (load.running or 0) - (load.pending or 0)))
        self._proved = self._proved or before > unseen
        for request in list(islice(self.unproven, max(old, before - unseen))):
            del self.unproven[request]

    def _adapt(self) -> None:
        if self._pending:
            self.allowance = max(1, self.allowance // 2)
            self._step = 1
            return
        if self._hit and self._proved:
            self.allowance = min(MAX_ALLOWANCE, 2 * self.allowance)
        self._step = self.allowance
