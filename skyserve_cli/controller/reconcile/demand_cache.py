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
from dataclasses import dataclass, field

from lb.config.demand import Demand
from policies.history import History
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import DemandRow

KEPT_MIN = 14 * 1440
PATIENCE_MIN = 3  # with an agent that does not report
MINUTE_S = 60.0


@dataclass(slots=True)
class _Series:
    """The stored minutes of one service: parallel series, and the history made of them."""

    first: int = 0
    columns: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in range(5)))
    history: History | None = None

    @property
    def requests(self) -> array[float]:
        return self.columns[0]

    @property
    def end(self) -> int:
        return self.first + len(self.requests)

    def add(self, rows: Sequence[DemandRow]) -> None:
        for row in rows:
            if not self.requests:
                self.first = row.minute
            missing = [math.nan] * (row.minute - self.end)
            values = (
                row.requests,
                row.requests - row.late,
                row.ready,
                row.prompt_tokens,
                row.response_tokens,
            )
            for series, value in zip(self.columns, values, strict=True):
                series.extend(missing)
                series.append(value)
        surplus = len(self.requests) - KEPT_MIN
        if surplus > 0:
            self.first += surplus
            for series in self.columns:
                del series[:surplus]
        requests, within, ready, *tokens = self.columns
        self.history = (
            History.of(self.first, requests, within, ready, (tokens[0], tokens[1])) if requests else None
        )

    def cut(self, end: int) -> None:
        """Forget the minutes from `end` on."""
        for series in self.columns:
            del series[max(0, end - self.first) :]
        self.add(())


class DemandCache:
    """One per controller, used by the thread of the tick. Rows are read once per service and process."""

    def __init__(self, store: Store) -> None:
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
        if series.end > end + 1 and series.requests:
            drop_from = end  # the clock was set back: those minutes have yet to come
        known = [report for report in reports if report is not None]
        last = min(end, drop_from or series.end) if series.requests else 0
        rows = _rows(known, len(known) == len(reports), series, last, end)
        if not rows and drop_from is None:
            return False
        self._store.put_demand(name, rows, drop_from=drop_from)
        if drop_from is not None:
            series.cut(drop_from)
        series.add(rows)
        return True

    def forget(self) -> None:
        """Read everything again next time."""
        self._series.clear()

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
    before = series.requests[-1] if series.requests else 0.0
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
