"""What load balancer agents have reported of the usage of API keys, until it is stored. Values in, values out, behind one lock."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lb.config.usage import UsageReport, UsageRow


class UsageKey(NamedTuple):
    """Of a stored row: one source counts it, and its numbers only grow."""

    service: str
    day: int
    key: str
    model: str
    source: str


class UsageBuffer:
    """One per daemon. Reports are added on the event loop, rows are taken on the thread that stores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[UsageKey, UsageRow] = {}

    def add(self, service: str, report: UsageReport) -> None:
        """Rows of later reports replace those of earlier ones: they have the sums of the day so far."""
        rows = {UsageKey(service, *row[:3], report.source): row for row in report.rows}
        with self._lock:
            self._rows.update(rows)

    def take(self, most: int) -> dict[UsageKey, UsageRow]:
        """Return at most this many rows that were added since the last call."""
        with self._lock:
            if len(self._rows) <= most:
                taken, self._rows = self._rows, {}
                return taken
            return {key: self._rows.pop(key) for key in self._first(most)}

    def put_back(self, rows: Mapping[UsageKey, UsageRow]) -> None:
        """These rows could not be stored. Those that have come meanwhile are newer."""
        with self._lock:
            self._rows = {**rows, **self._rows}

    def _first(self, most: int) -> Iterable[UsageKey]:
        return [key for key, _ in zip(self._rows, range(most), strict=False)]
