"""Reads from one load balancer agent what the requests of API keys have used, and puts the rows into the buffer.

An agent with limits of days or months gets in return what all agents have counted (`UsageTotals`): those keys whose totals have changed.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import aiohttp
import orjson

from lb.config.usage import KeyTotal, UsageReport, UsageTotals
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer
from skyserve_cli.controller.reconcile.usage_buffer import MOST_MODELS, ServiceTotals, UsageBuffer

EVERY_S = 5.0
AGAIN_S = 300.0  # before an agent of an earlier release, which has no rows, is polled again
MOST_PARTS = 10  # of a long report in one turn; the next turn goes on
#: Totals in one message. Fewer than an agent takes: it serves no request while it reads one.
SENT_ROWS = MOST_MODELS
MOST_MESSAGES = 10  # of totals in one turn
SEND_TIMEOUT_S = 2.0  # of all messages of one turn
#: Time after which totals are sent again that have not changed: an agent that was started again may not have them.
ALL_AGAIN_S = 300.0

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
        self._sent: dict[str, tuple[KeyTotal, ...]] = {}  # by key
        self._sent_to = ("", "", 0)  # URL and source of the agent, and the day of the totals
        self._complete: ServiceTotals | None = None  # all of these are sent
        self._all_at = self._send_at = 0.0
        self._trouble = ""

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
                totals = self._buffer.totals(self._service) if report.totals and not is_leaving else None
                if totals is not None and now >= self._send_at:
                    await self._send(session, url, headers, totals, now)
                return
        self._next_at = now

    async def read_left(self, file: Path) -> None:
        """Read the file of an agent on this host that has ended: it has what came after the last report."""
        if self._buffer is None:
            return
        try:
            from lb.agent.usage_file import left_in  # the writer of the file, needed where one has ended

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

    async def _send(
        self,
        session: aiohttp.ClientSession,
        url: str,
        headers: dict[str, str],
        totals: ServiceTotals,
        now: float,
    ) -> None:
        """Send the totals that have changed since they were sent to this agent. What fails is sent at the next turn."""
        to = url, self._source, totals.day
        if to != self._sent_to or now >= self._all_at:
            self._sent, self._sent_to, self._all_at = {}, to, now + ALL_AGAIN_S
        elif totals is self._complete:
            return
        self._complete = None
        changed = (rows for key, rows in totals.keys.items() if self._sent.get(key) != rows)
        messages = list(islice(_messages(changed), MOST_MESSAGES + 1))
        headers = headers | {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                for keys in messages[:MOST_MESSAGES]:
                    message = UsageTotals(totals.day, tuple(row for rows in keys for row in rows))
                    body = orjson.dumps(message.to_json())
                    async with session.post(f"{url}/-/usage/totals", data=body, headers=headers) as response:
                        if response.status == 404:
                            self._send_at = now + AGAIN_S
                            return
                        response.raise_for_status()
                    self._sent |= {rows[0].key: rows for rows in keys}
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The next poll shows whether the agent responds at all: totals that it does not take are no failure of it.
            trouble = str(error) or type(error).__name__
            if trouble != self._trouble:
                log.warning("agent of service %s takes no totals of API keys: %s", self._service, trouble)
            self._trouble = trouble
        else:
            self._trouble = ""
            if len(messages) <= MOST_MESSAGES:
                self._complete = totals


def _messages(keys: Iterable[tuple[KeyTotal, ...]]) -> Iterator[list[tuple[KeyTotal, ...]]]:
    """Yield keys for messages of at most SENT_ROWS rows; a key has no more."""
    message: list[tuple[KeyTotal, ...]] = []
    size = 0
    for rows in keys:
        if message and size + len(rows) > SENT_ROWS:
            yield message
            message, size = [], 0
        message.append(rows)
        size += len(rows)
    if message:
        yield message
