"""Sends the notifications of one destination, one after the other, on a thread of its own.

What fails is tried again with growing pauses for as long as it is in the outbox; among those that wait, one that has failed less often
comes first, so one that a receiver rejects does not hold up the others.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from policies.backoff import delay_s
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.outbox import Outbox

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0
LOOK_EVERY_S = 30.0  # nothing depends on it: who stores a notification wakes the courier
MOST_UNSTORED = 100


class Courier(threading.Thread):
    """`deliver` sends a message and returns why it has not arrived, or ""."""

    def __init__(
        self,
        name: str,
        outbox: Outbox,
        deliver: Callable[[Mapping[str, Any]], str],
        jitter: random.Random,
    ) -> None:
        super().__init__(name=f"notify {name}", daemon=True)
        self.destination = name
        self.trouble = ""
        self._outbox = outbox
        self._deliver = deliver
        self._jitter = jitter
        self._unstored: deque[Mapping[str, Any]] = deque(maxlen=MOST_UNSTORED)
        self._confirmed: set[int] = set()  # and still in the outbox, because the store could not be written
        self._failures = 0
        self._woken = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            pause_s = self.step()
            # While the destination does not respond, new notifications are no reason to try earlier.
            (self._stopping if self._failures else self._woken).wait(pause_s)

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Send no more. Does not wait: unconfirmed messages are sent again by the next controller."""
        self._stopping.set()
        self._woken.set()

    def send_unstored(self, message: Mapping[str, Any]) -> None:
        """Send a message that cannot be stored. It is lost if this process ends before it arrives."""
        self._unstored.append(message)
        self.wake()

    def step(self) -> float:
        """Send at most one message. Returns the seconds until the next step."""
        try:
            return self._step()
        except (SQLAlchemyError, LeaseLostError) as error:
            return self._retry_later(f"the outbox cannot be read or written ({type(error).__name__})")
        except Exception as error:
            log.exception("notifications to %s", self.destination)
            return self._retry_later(type(error).__name__)

    def _step(self) -> float:
        if self._unstored:
            why = self._deliver(self._unstored[0])
            if why:
                return self._retry_later(why)
            self._unstored.popleft()
            return self._sent()
        for seq in sorted(self._confirmed):
            self._outbox.notification_received(seq)
            self._confirmed.discard(seq)
        waiting = self._outbox.next_notification(self.destination)
        if waiting is None:
            return LOOK_EVERY_S
        why = self._deliver(waiting.message)
        if why:
            self._outbox.notification_failed(waiting.seq)
            return self._retry_later(why)
        self._confirmed.add(waiting.seq)
        self._outbox.notification_received(waiting.seq)
        self._confirmed.discard(waiting.seq)
        return self._sent()

    def _sent(self) -> float:
        if self.trouble:
            log.info("notifications to %s arrive again", self.destination)
        self._failures, self.trouble = 0, ""
        return 0.0

    def _retry_later(self, why: str) -> float:
        if why != self.trouble:  # once, not with every try
            log.warning("notifications to %s wait: %s", self.destination, why)
        self.trouble = why
        self._failures += 1
        return delay_s(self._failures, FIRST_RETRY_S, LONGEST_RETRY_S) * self._jitter.uniform(0.5, 1.0)
