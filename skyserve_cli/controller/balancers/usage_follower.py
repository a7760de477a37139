"""Reads from one load balancer agent what the requests of API keys have used, and puts the rows into the buffer."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
import orjson

from lb.agent.usage_file import left_in
from lb.config.usage import UsageReport
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.reconcile.usage_buffer import UsageBuffer

EVERY_S = 5.0
AGAIN_S = 300.0  # before an agent of an earlier release, which has no rows, is polled again
MOST_PARTS = 10  # of a long report in one turn; the next turn goes on

log = logging.getLogger(__name__)


class UsageFollower:
    """`now` is a clock that is not set; `book` None: nothing is read.

    It remembers how far it has read only while this process runs. A later one reads everything again, which changes no sum.
    """

    def __init__(self, service: str, book: TrafficBuffer | None, now: Callable[[], float]) -> None:
        self._service = service
        self._buffer = None if book is None else book.usage
        self._now = now
        self._next_at = 0.0
        self._source = ""
        self._mark = 0

    async def follow(
        self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], *, is_leaving: bool = False
    ) -> None:
        """Poll the agent if it is time, or if it may end soon.

        Raises aiohttp.ClientError, TimeoutError, WireError and ValueError.
        """
        now = self._now()
        if self._buffer is None or (now < self._next_at and not is_leaving):
            return
        self._next_at = now + EVERY_S
        for _ in range(MOST_PARTS):
            path = f"{url}/-/usage?source={quote(self._source)}&since={self._mark}"
            async with session.get(path, headers=headers) as response:
                if response.status == 404:
                    self._next_at = now + AGAIN_S
                    return
                response.raise_for_status()
                report = UsageReport.from_json(orjson.loads(await response.read()))
            self._take(report, self._buffer)
            if not report.more:
                return
        self._next_at = now

    async def read_left(self, file: Path) -> None:
        """Read the file of an agent on this host that has ended: it has what came after the last report."""
        if self._buffer is None:
            return
        try:
            report = await asyncio.to_thread(partial(left_in, file, self._source, self._mark))
        except (OSError, sqlite3.Error) as error:
            log.warning(
                "usage of service %s since the last report is lost: %s: %s", self._service, file, error
            )
            return
        if report is not None:
            self._take(report, self._buffer)

    def _take(self, report: UsageReport, buffer: UsageBuffer) -> None:
        buffer.add(self._service, report)
        self._source, self._mark = report.source, report.mark
