"""The fault barrier: an exception in the code of one request ends that request and nothing else.

Every entrance into the proxy (bytes and ends of clients and targets, connects, timers, the sweep of timeouts, the queue)
catches what its callee raises and reports it here: it is counted, and of each kind one traceback a minute is logged, so
that a client who has found a defect cannot fill the disk with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_EVERY_S = 60.0
_MAX_KINDS = 256

_log = logging.getLogger("lb.proxy.faults")


class Faults:
    """Internal errors of one agent. `total` counts all that were ever reported."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, str], float] = {}
        self._unlogged: dict[tuple[str, str], int] = {}
        self.total = 0

    def report(self, entrance: str, error: BaseException) -> None:
        """An exception left the code behind `entrance`. Never raises."""
        self.total += 1
        now = self._clock()
        kind = (entrance, _where(error))
        logged_at = self._logged_at.get(kind)
        if logged_at is not None and now - logged_at < _EVERY_S:
            self._unlogged[kind] = self._unlogged.get(kind, 0) + 1
            return
        if len(self._logged_at) >= _MAX_KINDS:
            self._logged_at.clear()
            self._unlogged.clear()
        self._logged_at[kind] = now
        more = self._unlogged.pop(kind, 0)
        _log.error(
            "internal error entrance=%s error=%s more_of_this_kind=%d",
            entrance,
            type(error).__name__,
            more,
            exc_info=(type(error), error, error.__traceback__),
        )


def _where(error: BaseException) -> str:
    """Return the type of an exception and the line that raised it, which together are its kind."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__} {line}"
