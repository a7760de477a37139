"""What one load balancer agent has reported of its minutes, put together from its reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import aiohttp
import orjson

from lb.config.demand import Demand

MINUTE_S = 60.0
AGAIN_S = 3.0  # before an agent that was too early is polled again
KEPT_MIN = 1440


class DemandFollower:
    """Reads an agent's minutes as they come. An agent of an earlier release, which has none, reports nothing.

    `now` is the controller's clock; where the agent's differs, its minutes are moved.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tried_at: float | None = None
        self._moved_by = 0  # minutes
        self.demand: Demand | None = None

    def forget(self) -> None:
        """The agent is gone, and what it counted with it."""
        self.demand, self._tried_at, self._moved_by = None, None, 0

    async def follow(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> bool:
        """Poll the agent if a minute is over that it has not reported. Returns whether it reported one.

        Raises aiohttp.ClientError, TimeoutError, WireError and ValueError.
        """
        now = self._now()
        if self.demand is not None and self.demand.end >= int(now // MINUTE_S):
            return False
        if self._tried_at is not None and 0.0 <= now - self._tried_at < AGAIN_S:
            return False
        self._tried_at = now
        since = 0 if self.demand is None else self.demand.end - self._moved_by
        async with session.get(f"{url}/-/demand?since={since}", headers=headers) as response:
            if response.status == 404:
                return False
            response.raise_for_status()
            report = Demand.from_json(orjson.loads(await response.read()))
        return self._add(report, now)

    def _add(self, report: Demand, now: float) -> bool:
        moved_by = round((now - report.now) / MINUTE_S)
        moved = replace(report, first=report.first + moved_by)
        before = self.demand
        if before is None or moved_by != self._moved_by or moved.first != before.end:
            self.demand, self._moved_by = moved, moved_by
            return bool(moved.requests)
        keep = slice(-KEPT_MIN, None)
        self.demand = Demand(
            report.now,
            max(before.first, moved.end - KEPT_MIN),
            (before.requests + moved.requests)[keep],
            (before.prompt_tokens + moved.prompt_tokens)[keep],
            (before.response_tokens + moved.response_tokens)[keep],
            (before.late + moved.late)[keep],
            (before.ready + moved.ready)[keep],
        )
        return bool(moved.requests)
