"""How far a cloud's clock is from ours, by the `Date` header of its responses.

Clouds announce when they take a machine by their own clock. On a host whose clock is a minute off such a notice would be
over before it came, or last for ever. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Protocol, runtime_checkable

WARN_S = 5.0
_NOISE_S = 3.0  # a header has whole seconds, and is as old as its response was long on its way
_MOST_S = 86_400.0  # beyond that, TLS would have failed: not the cloud's clock, but a cache's


class CloudClock:
    """`offset_s` is added to our time to get the cloud's; 0 until it is known to differ.

    It is kept until the clocks have moved against each other, so that a notice does not seem to be another one with each
    response.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self.offset_s = 0.0

    def set_from_header(self, date: str | None) -> None:
        """A response has just come, with that header."""
        if not date:
            return
        try:
            cloud = parsedate_to_datetime(date).timestamp() + 0.5
        except (TypeError, ValueError):
            return
        measured = cloud - self._now()
        with self._lock:
            if abs(measured - self.offset_s) > _NOISE_S and abs(measured) < _MOST_S:
                self.offset_s = 0.0 if abs(measured) <= _NOISE_S else round(measured)

    def ours(self, instant: float) -> float:
        """Return an instant of the cloud's, by our clock."""
        return instant - self.offset_s

    def warning(self) -> str:
        """Return a sentence if the clocks differ by more than a few seconds; else ""."""
        if abs(self.offset_s) <= WARN_S:
            return ""
        order = "behind" if self.offset_s > 0 else "ahead of"
        return (
            f"this host's clock is {abs(self.offset_s):.0f} s {order} the cloud's; set it by NTP "
            "(`timedatectl set-ntp true`): until then times of preemption notices are corrected by as much"
        )


@runtime_checkable
class ClockSource(Protocol):
    """`Machines` whose cloud has a clock."""

    cloud_clock: CloudClock
