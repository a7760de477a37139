"""Why a request went where it went: the last requests with every choice, its candidates and their costs.

Every request records its steps and hardly any record is ever read, so writing is an append of what was at hand, and all
the work (searching, naming the terms, building JSON) is the reader's. Nothing of the request itself is kept but
its id, method and path without query.

An explanation has the ten best candidates of each choice. Policies compare hardly more where targets are many; a choice
that has a row for each of a thousand is cut down before it is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, Final

from policies.routing.base import Choice

KEPT_REQUESTS: Final = 1000
BEST: Final = 10  # candidates that are kept
_KEPT_ROWS: Final = 16  # of a choice: to find the best of that many is left to the reader


class Explanation:
    """The steps of one request, in seconds since its arrival."""

    __slots__ = ("_arrived_at", "_steps", "method", "number", "path", "request_id")

    def __init__(self, request_id: str, method: str, path: str, arrived_at: float) -> None:
        self.request_id = request_id
        self.method = method
        self.path = path
        self._arrived_at = arrived_at
        self.number = 0  # in the ring
        self._steps: list[tuple[float, str, str, str, Choice | None]] = []

    def note(
        self, now: float, event: str, target_id: str = "", why: str = "", choice: Choice | None = None
    ) -> None:
        if choice is not None and len(choice.scored) > _KEPT_ROWS:
            choice.scored = tuple(_best(choice))
        self._steps.append((now, event, target_id, why, choice))

    def targets_of(self, event: str) -> list[str]:
        """Return the targets of the steps of that kind, each once."""
        return list(dict.fromkeys(target_id for _, kind, target_id, _, _ in self._steps if kind == event))

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "steps": [
                {
                    "after_s": round(at - self._arrived_at, 6),
                    "event": event,
                    "target": target_id or None,
                    "why": why,
                    "matched_bytes": choice.matched_bytes if choice is not None else 0,
                    "candidates": _candidates(choice),
                }
                for at, event, target_id, why, choice in self._steps
            ],
        }


class Explanations:
    """The last `kept` explanations, by the start or by the end of the request; of a repeated id the latest is found.

    An explanation is found while its request runs, too: `running` are those, for the reader.
    """

    def __init__(
        self, kept: int = KEPT_REQUESTS, running: Callable[[], Iterable[Explanation]] = tuple
    ) -> None:
        self._ring: deque[Explanation] = deque(maxlen=kept)
        self._kept = kept
        self._count = 0  # that ever came into it
        self._running = running

    def begin(self, request_id: str, method: str, path: str, now: float) -> Explanation:
        explanation = Explanation(request_id, method, path, now)
        self._keep(explanation)
        return explanation

    def ended(self, explanation: Explanation) -> None:
        """A long one has been pushed out of the ring by those that came later, and belongs to the last ones again."""
        if explanation.number <= self._count - self._kept:
            self._keep(explanation)

    def _keep(self, explanation: Explanation) -> None:
        self._count += 1
        explanation.number = self._count
        self._ring.append(explanation)

    def find(self, request_id: str) -> Explanation | None:
        """A search through all there is: an index would cost every request what only a reader needs."""
        explanations = chain(reversed(self._ring), self._running())
        return next(
            (explanation for explanation in explanations if explanation.request_id == request_id), None
        )

    def latest(self, limit: int) -> list[Explanation]:
        """Return at most `limit` explanations, the latest first."""
        return list(islice(reversed(self._ring), limit))


def _candidates(choice: Choice | None) -> list[dict[str, Any]]:
    if choice is None:
        return []
    return [
        {"target": target, "cost": cost, "terms": dict(zip(choice.terms, values, strict=False))}
        for target, cost, *values in _best(choice)
    ]


def _best(choice: Choice) -> Iterable[tuple[str | float, ...]]:
    """Return the rows of the best candidates, among them that of the chosen one."""
    if len(choice.scored) <= BEST:
        return choice.scored
    return nsmallest(BEST, choice.scored, key=lambda row: (row[1], row[0] != choice.target_id))
