"""The port of the admin API: the listening, and what is logged of it."""

from __future__ import annotations

import logging
import socket
import traceback

from aiohttp import web
from aiohttp.http import HttpProcessingError

from lb.agent.admin_api import admin_app
from lb.agent.agent import Agent
from lb.core.log_limit import LogLimit


class AdminPort:
    """Serves the admin API of one agent on a bound socket."""

    def __init__(self, agent: Agent, token: str, *, open_probes: bool = False) -> None:
        app = admin_app(agent, token, open_probes=open_probes)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=_http_log())

    async def open(self, bound: socket.socket) -> None:
        """Listen. The port is open when this returns."""
        await self._runner.setup()
        await web.SockSite(self._runner, bound).start()

    async def close(self) -> None:
        """Close the port. Closing it again has no effect."""
        await self._runner.cleanup()


def _http_log() -> logging.Logger:
    log = logging.getLogger("lb.http")
    if not any(isinstance(one, _WithoutValues) for one in log.filters):
        log.addFilter(_WithoutValues())
    return log


class _WithoutValues(logging.Filter):
    """aiohttp logs errors with their text, which may quote what a client sent.

    Keep the kind and the place; a malformed request is the client's error, not one of ours, and is logged once in a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged = LogLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, place = record.exc_info
            record.exc_info = None
            if issubclass(kind, HttpProcessingError):
                left_out = self._logged.left_out(kind.__name__, record.created)
                if left_out is None:
                    return False
                record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
                record.msg, record.args = (
                    "refuse malformed request why=%r left_out=%d",
                    (kind.__name__, left_out),
                )
            else:
                record.exc_text = "".join(traceback.format_tb(place)) + kind.__name__
        return True
