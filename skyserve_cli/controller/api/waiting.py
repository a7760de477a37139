"""How long a command waits for the controller, and what it says meanwhile.

A command says what it waits for before NOTICE_AFTER_S and the time of one cheap request have passed, once for each reason. At the
deadline it ends with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyserve_cli.controller.api.reasons import Reason
from skyserve_cli.controller.reconcile.clock import SteadyClock

#: Together, and with the start of the program, less than two seconds.
NOTICE_AFTER_S = 1.1
ASK_TIMEOUT_S = 0.5
LOOK_AGAIN_S = 5.0
POLL_GRACE_S = 1.0


class DeadlineError(TimeoutError):
    """The controller has not done in time what a command requested; the text gives the reason and the next step."""


class Waiting:
    """Of one client. `notice` gets the sentences; None: none are made."""

    def __init__(self, notice: Callable[[str], object] | None = None) -> None:
        self.notice = notice
        self._clock = SteadyClock()
        self._until = float("inf")
        self._in_all_s: float | None = None
        self._call_s: float | None = None
        self._is_in_all = False  # whether it is the limit of all calls that ends the present one
        self._kind = ""  # of the reason that was last given

    def now(self) -> float:
        """Return seconds since some instant."""
        return self._clock.now()

    def limit(self, seconds: float | None) -> None:
        """From now on wait for this long in all; None: without a limit."""
        self._until, self._in_all_s = float("inf") if seconds is None else self.now() + seconds, seconds

    @contextmanager
    def within(self, seconds: float | None, call_s: float) -> Iterator[None]:
        """Wait in this context for this long in all, and for each call up to `call_s`.

        A loop that polls ends by itself between two calls, so a call may take POLL_GRACE_S longer.
        """
        kept = self._until, self._in_all_s, self._call_s
        if seconds is not None and self.now() + seconds + POLL_GRACE_S < self._until:
            self._until, self._in_all_s = self.now() + seconds + POLL_GRACE_S, seconds
        self._call_s = call_s
        try:
            yield
        finally:
            self._until, self._in_all_s, self._call_s = kept

    def allowance(self, call_s: float) -> float:
        """Return how long a call may take that takes `call_s` at most by itself."""
        most_s = call_s if self._call_s is None else max(call_s, self._call_s)
        left_s = self._until - self.now()
        self._is_in_all = left_s < most_s
        return max(0.0, min(most_s, left_s))

    @contextmanager
    def noticed(self, why: Callable[[], Reason]) -> Iterator[None]:
        """Say what this context waits for, if it takes long."""
        if self.notice is None:
            yield
            return
        over = threading.Event()
        threading.Thread(target=self._watch, args=(why, over), name="notice", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, why: Callable[[], Reason], over: threading.Event) -> None:
        pause_s = NOTICE_AFTER_S
        while not over.wait(pause_s):
            pause_s = LOOK_AGAIN_S
            reason = why()
            if self.notice is not None and reason.kind != self._kind and not over.is_set():
                self._kind = reason.kind
                self.notice(f"waiting for the controller: {reason.sentence}")

    def overdue(self, allowed_s: float, outcome: str, reason: Reason) -> DeadlineError:
        """Return the error of a call that was not done in time. `outcome`: what is known of what was requested."""
        seconds = self._in_all_s if self._is_in_all and self._in_all_s is not None else allowed_s
        said = f"{outcome}; " if outcome else ""
        return DeadlineError(
            f"the controller has not done this within {seconds:g} s: {reason.sentence}; {said}{reason.next_step}"
        )
