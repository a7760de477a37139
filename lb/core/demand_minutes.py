"""Demand of a service by the minute: counts for the controller, which may be away for a day. Pure; `now` is given.

Minutes are those of the UNIX clock as it was when the agent started, so a clock that is set later moves none. The minute in
which the agent started is not reported: what came in it before is not known.

A request counts in the minute in which it arrives. Its tokens, and that it is late, count in the minute in which it ends, so a
minute that is over does not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from lb.config.demand import Demand
from lb.config.options import Slo
from lb.config.schema import Readiness, Table
from policies.routing.request_work import streamed

KEPT_MIN: Final = 1440
MINUTE_S: Final = 60.0


class DemandMinutes:
    """Counts of the last KEPT_MIN minutes.

    `unix_offset_s` makes UNIX time of the clock that `now` is of, and `ready` returns how many targets are ready.
    """

    def __init__(self, now: float, unix_offset_s: float, ready: Callable[[], int]) -> None:
        self._offset_s = unix_offset_s
        self._ready = ready
        self._first = self._minute(now) + 1
        # requests, tokens of prompts, tokens of responses, late requests, ready targets
        self._minutes: OrderedDict[int, list[int]] = OrderedDict()
        self._last = -1
        self._counts: list[int] = []

    def arrived(self, now: float) -> None:
        """A request was admitted."""
        self._at(now)[0] += 1

    def ended(self, now: float, prompt_tokens: int, response_tokens: int, late: bool) -> None:
        """A request that had arrived is over."""
        counts = self._at(now)
        counts[1] += prompt_tokens
        counts[2] += response_tokens
        if late:
            counts[3] += 1

    def report(self, now: float, since: int) -> Demand:
        """Return the minutes that are over, from minute `since` on."""
        end = self._minute(now)
        first = max(self._first, since, end - KEPT_MIN)
        nothing = [0, 0, 0, 0, 0]
        rows = [self._minutes.get(minute, nothing) for minute in range(first, end)]
        columns = [tuple(row[index] for row in rows) for index in range(5)]
        return Demand(now + self._offset_s, first, columns[0], columns[1], columns[2], columns[3], columns[4])

    def _at(self, now: float) -> list[int]:
        minute = self._minute(now)
        if minute != self._last:
            self._last = minute
            self._counts = self._minutes.setdefault(minute, [0, 0, 0, 0, self._ready()])
            while len(self._minutes) > KEPT_MIN + 1:
                self._minutes.popitem(last=False)
        return self._counts

    def _minute(self, now: float) -> int:
        return int((now + self._offset_s) // MINUTE_S)


def ready_targets(table: Table) -> int:
    """Return how many of them the controller knows to be ready."""
    return sum(target.state is Readiness.READY for target in table.targets)


def is_late(slo: Slo, arrived_at: float, first_at: float | None, now: float, tokens: int) -> bool:
    """Return whether a response of `tokens` tokens that is whole now missed the SLO.

    Of a stream the first byte and the mean time per further token count. A response in one piece shows neither: its time as a
    whole is compared with what the SLO allows for that many tokens.
    """
    if first_at is None:
        return bool(slo.ttft_s) and now - arrived_at > slo.ttft_s
    spread_s = now - first_at
    if tokens > 1 and streamed(spread_s, tokens):
        if slo.ttft_s and first_at - arrived_at > slo.ttft_s:
            return True
        return bool(slo.tpot_s) and spread_s > slo.tpot_s * (tokens - 1)
    if not slo.ttft_s:
        return bool(slo.tpot_s) and tokens > 1 and now - arrived_at > slo.tpot_s * tokens
    return first_at - arrived_at > slo.ttft_s + slo.tpot_s * max(0, tokens - 1)
