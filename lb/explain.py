"""Why a request went where it went: the last requests with every choice, its candidates and their costs.

Nothing of the request itself is kept but its id, method and path without query.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from policies.routing.base import Choice

KEPT_REQUESTS = 1000


class Explanation:
    """The story of one request, in seconds since its arrival."""

    __slots__ = ("_arrived_at", "_steps", "method", "path", "request_id")

    def __init__(self, request_id: str, method: str, path: str, arrived_at: float) -> None:
        self.request_id = request_id
        self.method = method
        self.path = path
        self._arrived_at = arrived_at
        self._steps: list[tuple[float, str, str, str, Choice | None]] = []

    def note(
        self, now: float, event: str, target_id: str = "", why: str = "", choice: Choice | None = None
    ) -> None:
        self._steps.append((now - self._arrived_at, event, target_id, why, choice))

    def to_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "steps": [
                {
                    "after_s": round(after_s, 6),
                    "event": event,
                    "target": target_id or None,
                    "why": why,
                    "candidates": _candidates(choice),
                }
                for after_s, event, target_id, why, choice in self._steps
            ],
        }


class Explanations:
    """The last KEPT_REQUESTS stories, by request id; a repeated id shows its latest request."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._kept = kept
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()

    def begin(self, request_id: str, method: str, path: str, now: float) -> Explanation:
        story = Explanation(request_id, method, path, now)
        self._by_id.pop(request_id, None)
        self._by_id[request_id] = story
        if len(self._by_id) > self._kept:
            self._by_id.popitem(last=False)
        return story

    def find(self, request_id: str) -> Explanation | None:
        return self._by_id.get(request_id)


def _candidates(choice: Choice | None) -> list[dict[str, Any]]:
    if choice is None:
        return []
    return [
        {"target": one.target_id, "cost": one.cost, "terms": {term.name: term.value for term in one.terms}}
        for one in choice.scored
    ]
