"""What load balancer agents have reported of the usage of API keys, until it is stored, and the totals that they get in return.

Values in, values out, behind one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from lb.config.usage import MOST_COUNT, KeyTotal, UsageReport, UsageRow

#: Models of one key in totals, so that they fit into one message. What the others have used counts for the model "".
MOST_MODELS = 1_000


class UsageKey(NamedTuple):
    """Of a stored row: one source counts it, and its numbers only grow."""

    service: str
    day: int
    key: str
    model: str
    source: str


@dataclass(frozen=True, slots=True)
class ServiceTotals:
    """What all agents of a service have counted on `day` and in its month: the totals of each key, by its name and in order of names."""

    day: int
    keys: Mapping[str, tuple[KeyTotal, ...]]


def service_totals(day: int, rows: Iterable[KeyTotal]) -> ServiceTotals:
    """Group the rows by key, and order them. The rows of a key must follow each other."""
    found = {key: _bounded(key, list(models)) for key, models in groupby(rows, attrgetter("key"))}
    return ServiceTotals(day, dict(sorted(found.items())))


class UsageBuffer:
    """One per daemon. Reports are added on the event loop, rows are taken on the thread that stores them.

    The same thread reads totals for the services whose agents want them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[UsageKey, UsageRow] = {}
        self._wanting: set[str] = set()
        self._totals: dict[str, ServiceTotals] = {}

    def add(self, service: str, report: UsageReport) -> None:
        """Rows of later reports replace those of earlier ones: they have the sums of the day so far."""
        rows = {UsageKey(service, *row[:3], report.source): row for row in report.rows}
        with self._lock:
            self._rows.update(rows)
            if report.totals:
                self._wanting.add(service)

    def take_wanting(self) -> set[str]:
        """Return the services of which a report since the last call wants totals."""
        with self._lock:
            taken, self._wanting = self._wanting, set()
        return taken

    def put_totals(self, service: str, totals: ServiceTotals | None) -> None:
        """Hold these totals in place of earlier ones; None: hold none."""
        with self._lock:
            if totals is None:
                self._totals.pop(service, None)
            else:
                self._totals[service] = totals

    def totals(self, service: str) -> ServiceTotals | None:
        """Return the newest totals of the service."""
        with self._lock:
            return self._totals.get(service)

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


def _bounded(key: str, models: Sequence[KeyTotal]) -> tuple[KeyTotal, ...]:
    """Return the totals of a key in order of models, those that have used the least as one."""
    if len(models) > MOST_MODELS:
        by_use = sorted(
            models, key=lambda row: (row.model != "", -(row.tokens_in_month + row.tokens_out_month))
        )
        shown, rest = by_use[: MOST_MODELS - 1], by_use[MOST_MODELS - 1 :]
        if shown[0].model == "":
            rest.append(shown.pop(0))
        sums = (min(MOST_COUNT, sum(numbers)) for numbers in zip(*(row[2:] for row in rest), strict=True))
        models = [*shown, KeyTotal(key, "", *sums)]
    return tuple(sorted(models))
