"""The demand of services minute by minute: what agents report is added up, stored, and given to policies.

A minute is stored once every load balancer of the service has reported it; then it does not change. A controller that was down reads
what it missed from the agents, which remember a day. What no agent knows stays missing: it is not zero.

Where one of several agents is silent for long, the others' minutes are stored if they show more demand than there was, because a
service whose demand rises must not wait for a dead agent; otherwise the minute waits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from lb.config.demand import Demand
from policies.history import History
from skyserve_cli.state.values import DemandRow

KEPT_MIN = 14 * 1440
ROOM_MIN = 2880
PATIENCE_MIN = 3  # with an agent that does not report
MINUTE_S = 60.0


class DemandRows(Protocol):
    """The stored minutes of services: see `Store`."""

    def demand(self, name: str, *, since: int = 0) -> list[DemandRow]: ...

    def put_demand(self, name: str, rows: Sequence[DemandRow], *, drop_from: int | None = None) -> None: ...


class _Series:
    """The stored minutes of one service, `first` to before `end`: parallel series in room for some more.

    No place is written twice, so the history and earlier ones are views of them.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self._room: tuple[array[float], ...] = ()  # its first place is that of minute `_base`
        self._base = self._full = 0
        self.history: History | None = None

    def add(self, rows: Sequence[DemandRow]) -> None:
        for row in rows:
            if not self._room or row.minute >= self._full:
                kept = max(self.first, row.minute + 1 - KEPT_MIN) if self._room else row.minute
                self._move(kept, row.minute + 1)
            values = row.requests, row.requests - row.late, row.ready, row.prompt_tokens, row.response_tokens
            for series, value in zip(self._room, values, strict=True):
                series[row.minute - self._base] = value
            self.end = row.minute + 1
            self.first = max(self.first, self.end - KEPT_MIN)
        shown = slice(self.first - self._base, self.end - self._base)
        views = [memoryview(series)[shown].toreadonly() for series in self._room]
        self.history = History(self.first, *views) if self.first < self.end else None

    def cut(self, end: int) -> None:
        """Forget the minutes from `end` on."""
        self.end = max(self.first, end)
        self._move(self.first, self.end)
        self.add(())

    def _move(self, first: int, end: int) -> None:
        """Make new room for the minutes from `first` to before `end`, and for `ROOM_MIN` more."""
        known = [series[first - self._base : self.end - self._base] for series in self._room]
        missing = [math.nan] * (end - first + ROOM_MIN)
        self._room = tuple(array("d", missing) for _ in range(5))
        for series, before in zip(self._room, known, strict=False):
            series[: len(before)] = before
        self.first = self._base = first
        self.end, self._full = max(first, self.end), end + ROOM_MIN


class DemandCache:
    """One per controller, used by the thread of the tick. Rows are read once per service and process."""

    def __init__(self, store: DemandRows) -> None:
        self._store = store
        self._series: dict[str, _Series] = {}

    def history(self, name: str, now: float) -> History | None:
        """Return the minutes of the last two weeks; None where there is none."""
        return self._of(name, now).history

    def take(self, name: str, reports: Sequence[Demand | None], now: float) -> bool:
        """Store the minutes that are complete now. `reports` has an entry for each agent, None where it has not reported.

        Returns whether there were any. Raises SQLAlchemyError, LeaseLostError; then nothing is remembered.
        """
        series = self._of(name, now)
        end = int(now // MINUTE_S)
        drop_from = None
        if series.end > end + 1:
            drop_from = end  # the clock was set back: those minutes have yet to come
        known = [report for report in reports if report is not None]
        last = min(end, drop_from or series.end)
        rows = _rows(known, len(known) == len(reports), series, last, end)
        if not rows and drop_from is None:
            return False
        self._store.put_demand(name, rows, drop_from=drop_from)
        if drop_from is not None:
            series.cut(drop_from)
        series.add(rows)
        return True

    def _of(self, name: str, now: float) -> _Series:
        if name not in self._series:
            series = _Series()
            series.add(self._store.demand(name, since=int(now // MINUTE_S) - KEPT_MIN))
            self._series[name] = series
        return self._series[name]


def _rows(
    known: Sequence[Demand], is_complete: bool, series: _Series, last: int, end: int
) -> list[DemandRow]:
    """Return the minutes from `last` to before `end` that can be stored."""
    if not known:
        return []
    first = max(last, min(report.first for report in known))
    until = min(end, *(report.end for report in known))
    if not is_complete:
        until = min(until, end - PATIENCE_MIN)
    rows = [row for minute in range(first, until) if (row := _row(known, minute)) is not None]
    if is_complete:
        return rows
    before = series.history.requests[-1] if series.history is not None else 0.0
    return [row for row in rows if row.requests > before]


def _row(reports: Sequence[Demand], minute: int) -> DemandRow | None:
    """Return the sum of the agents that were there in this minute; None if none was."""
    at = [(one, minute - one.first) for one in reports if one.first <= minute < one.end]
    if not at:
        return None
    return DemandRow(
        minute,
        float(sum(one.requests[index] for one, index in at)),
        float(sum(one.prompt_tokens[index] for one, index in at)),
        float(sum(one.response_tokens[index] for one, index in at)),
        float(sum(one.late[index] for one, index in at)),
        float(max(one.ready[index] for one, index in at)),
    )
