"""Listening, until told to stop: the data port, the admin port and the signals.

SIGTERM and SIGINT stop the accepting, turn away who is held, let what runs go on for at most `shutdown_grace_s`,
and end with exit code 0. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import ssl
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

from lb.agent import Agent
from lb.control import admin_app
from lb.upstream import MAX_LINE_BYTES
from lb.wire import Table

MAX_HEADERS = 128
KEEPALIVE_S = 75.0
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen. The admin port is open only if there is an `admin_token`."""

    table: Table
    host: str = "127.0.0.1"
    port: int = 0
    region: str = ""
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    admin_token: str | None = None
    table_file: Path | None = None
    ready_file: Path | None = None
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    shutdown_grace_s: float = 120.0


async def serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal. `announce` gets one line of JSON when both ports listen. Raises OSError (a port
    cannot be had, a file cannot be read) or ssl.SSLError before it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    tls = _tls(options)
    data_socket = _listen(options.host, options.port)
    admin_socket = _listen(options.admin_host, options.admin_port) if options.admin_token else None
    agent = Agent(
        options.table,
        region=options.region,
        table_file=options.table_file,
        clock=loop.time,
        id_prefix=secrets.token_hex(6),
    )
    data = web.ServerRunner(_data_server(agent), shutdown_timeout=options.shutdown_grace_s)
    await data.setup()
    await web.SockSite(data, data_socket, ssl_context=tls, backlog=_BACKLOG).start()
    admin = None
    if admin_socket is not None and options.admin_token:
        app = admin_app(agent, options.admin_token)
        admin = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=_http_log())
        await admin.setup()
        await web.SockSite(admin, admin_socket).start()
    checking = loop.create_task(agent.checker.run())

    line = json.dumps(
        {
            "host": data_socket.getsockname()[0],
            "port": data_socket.getsockname()[1],
            "admin_port": admin_socket.getsockname()[1] if admin_socket else None,
            "pid": os.getpid(),
        }
    )
    if options.ready_file is not None:
        _write_ready(options.ready_file, line)
    announce(line)

    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    agent.closing = True
    agent.proxy.close()
    await data.cleanup()
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)
    if admin is not None:
        await admin.cleanup()
    await agent.upstream.close()


def _data_server(agent: Agent) -> web.Server:
    return web.Server(
        agent.proxy.handle,
        handler_cancellation=True,  # a client that leaves ends its request, and with it the target's
        auto_decompress=False,
        access_log=None,
        logger=_http_log(),
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
        max_headers=MAX_HEADERS,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket that a successor may bind at once after we are gone."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.tls_certfile, options.tls_keyfile)
    return context


def _write_ready(path: Path, line: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    scratch.write_text(line + "\n", encoding="utf-8")
    scratch.replace(path)


def _http_log() -> logging.Logger:
    log = logging.getLogger("lb.http")
    if not any(isinstance(one, _WithoutValues) for one in log.filters):
        log.addFilter(_WithoutValues())
    return log


class _WithoutValues(logging.Filter):
    """aiohttp logs errors with their text, which may quote what a client sent. Keep the kind and the place; a
    malformed request is the client's error, not one of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, place = record.exc_info
            record.exc_info = None
            if issubclass(kind, HttpProcessingError):
                record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
                record.msg, record.args = "refuse malformed request why=%r", (kind.__name__,)
            else:
                record.exc_text = "".join(traceback.format_tb(place)) + kind.__name__
        return True
