"""Writes of one turn of the event loop are sent together at its end.

uvloop sends each write at once. The process that waits for it on another core is woken, has finished long before
the next request has been thought about, and sleeps again: every write costs a wake-up, which under a hypervisor is an
exit to it. At saturation a turn serves a dozen requests, and sending for all of them in one go wakes the others once.
On the load of `benchmarks.router` that is a tenth of all CPU time. Alone, a request waits for the end of its turn, which
is its own.

The owner of unsent bytes sends them before it writes anything else to the same socket, or closes it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

JOIN_BELOW_BYTES = 64 * 1024  # a body that is shorter is copied behind its head, to be one write with it


class Sender(Protocol):
    def flush(self) -> None:
        """Send unsent bytes, if any."""
        ...


class WriteBatcher:
    """Of one event loop."""

    __slots__ = ("_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """`flush` is called at the end of this turn."""
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due.append(sender)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            sender.flush()
