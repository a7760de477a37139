"""Reads what one load balancer agent has counted, and adds the difference to the buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import aiohttp
import orjson

from lb.config.totals import Totals
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer, increase, without_idle
from skyserve_cli.state.samples import WHOLE, Sample, added, quantile

EVERY_S = 5.0
RECENT_S = 60.0
AGAIN_S = 300.0  # before an agent of an earlier release, which counts nothing for us, is polled again


class TotalsFollower:
    """`now` is a clock that is not set; `book` None: nothing is read."""

    def __init__(
        self, service: str, agent: int, book: TrafficBuffer | None, now: Callable[[], float]
    ) -> None:
        self._service = service
        self._agent = agent
        self._book = book
        self._now = now
        self._next_at = 0.0
        self._last: Totals | None = None
        self._recent: deque[tuple[float, Sample]] = deque()

    async def follow(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        """Poll the agent if it is time. Raises aiohttp.ClientError, TimeoutError, WireError and ValueError."""
        now = self._now()
        if self._book is None or now < self._next_at:
            return
        self._next_at = now + EVERY_S
        async with session.get(f"{url}/-/totals", headers=headers) as response:
            if response.status == 404:
                self._next_at = now + AGAIN_S
                return
            response.raise_for_status()
            totals = Totals.from_json(orjson.loads(await response.read()))
        new = increase(self._last, totals)
        self._last = totals
        while self._recent and now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        if new is not None:
            self._recent.append((now, new[WHOLE]))
            self._book.add(self._service, self._agent, without_idle(new))

    @property
    def ttft_s(self) -> tuple[float | None, float | None]:
        """Return the median and the 90th percentile of the times to first token of the last minute; None without a stream."""
        counts = added(sample for _, sample in self._recent).ttft
        return quantile(counts, 0.5), quantile(counts, 0.9)
