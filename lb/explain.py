"""Why a request went where it went: the last requests with every choice, its candidates and their costs.

Every request writes its story and hardly any is ever read, so writing is an append of what was at hand, and all
the work (searching, naming the terms, building JSON) is the reader's. Nothing of the request itself is kept but
its id, method and path without query.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
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
        self._steps.append((now, event, target_id, why, choice))

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
    """The last `kept` stories; of a repeated id the latest is found. A story is found while it goes on, too."""

    def __init__(self, kept: int = KEPT_REQUESTS) -> None:
        self._ring: deque[Explanation] = deque(maxlen=kept)

    def begin(self, request_id: str, method: str, path: str, now: float) -> Explanation:
        story = Explanation(request_id, method, path, now)
        self._ring.append(story)
        return story

    def find(self, request_id: str) -> Explanation | None:
        """A search through the ring: an index would cost every request what only a reader needs."""
        return next((story for story in reversed(self._ring) if story.request_id == request_id), None)

    def latest(self, limit: int) -> list[Explanation]:
        """At most `limit` stories, the latest first."""
        return list(islice(reversed(self._ring), limit))


def _candidates(choice: Choice | None) -> list[dict[str, Any]]:
    if choice is None:
        return []
    return [
        {"target": target, "cost": cost, "terms": dict(zip(choice.terms, values, strict=False))}
        for target, cost, *values in choice.scored
    ]
