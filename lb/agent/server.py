"""Listening, until it is stopped: the data port, the admin port and the signals.

SIGHUP reads the certificate and the table file again: new connections get the certificate that is there now, no connection
is dropped, and what cannot be read leaves everything as it was.

SIGTERM and SIGINT stop the accepting, turn away who is held, let what runs go on for at most `shutdown_grace_s`,
and end with exit code 0. Every response says that it is the last of its connection, and idle connections may send one more
request for `_LAME_S`: closed at once, they would lose the one that is on its way. A second signal ends at once. An agent with a successor (`lb.agent.socket_handover`) retires first: it accepts
nothing either, but who is held goes on waiting for a target, and what runs has `_RETIRED_S`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import secrets
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

from lb.agent import socket_handover
from lb.agent.admin_api import admin_app
from lb.agent.agent import Agent
from lb.agent.data_port import CannotListenError, DataPort, bound, resolved
from lb.agent.descriptors import max_clients, raise_limit
from lb.agent.limits_file import LimitsFile
from lb.config.file import write_text
from lb.config.options import Listen
from lb.config.schema import Table
from lb.core.limit_store import LimitStore
from lb.observe.access_log import AccessLog, RequestRecord
from lb.observe.tracing import tracing
from lb.proxy.downstream import ClientConnection
from lb.regions.identity import Identity

_log = logging.getLogger("lb.agent.server")
_LOOK_EVERY_S = 0.05
# For whom a successor serves: what was accepted by us, but has not said what it wants yet, is ours to serve. A busy
# connection has a request in this time, whose response says that it is the last one.
_LAME_S = 2.0
_RETIRED_S = 3600.0  # longer than any response; held requests have a limit of their own


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, unless the table says otherwise. The admin port is open only if there is an `admin_token`."""

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
    reuse_port: bool = False
    access_log: bool = False
    targets_cafile: Path | None = None
    fast_path: bool = True
    handover_socket: Path | None = None
    limits_file: Path | None = None
    traffic_file: Path | None = None
    peers_host: str = "0.0.0.0"  # noqa: S104 (agents of other regions connect from anywhere, with certificates)
    peers_port: int = 0
    peers_certfile: Path | None = None
    peers_cafile: Path | None = None


async def serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal.

    `announce` gets one line of JSON when both ports listen. Raises OSError (a port is in use, a file cannot be read) or
    ssl.SSLError before it.
    """
    loop = asyncio.get_running_loop()
    stop, succeeded = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # nothing has been read yet that could be old

    tls = _tls(options)
    before = socket_handover.take(options.handover_socket) if options.handover_socket is not None else None
    data_socket, admin_socket = _sockets(options, before)
    tracer = tracing(options.table.service, options.region, os.environ, time.time_ns)
    agent = Agent(
        options.table,
        region=options.region,
        table_file=options.table_file,
        clock=loop.time,
        id_prefix=secrets.token_hex(6),
        rng=random.Random(secrets.randbits(64)),
        tracing=tracer,
        access_log=_access_log() if options.access_log else None,
        targets_tls=_targets_tls(options),
        fast_path=options.fast_path,
        max_clients=max_clients(raise_limit()),
        limits=_limits(options),
        traffic_file=options.traffic_file,
        unix_time_s=time.time,
        identity=_identity(options),
    )
    loop.add_signal_handler(signal.SIGHUP, _reload, agent, options, tls)
    data = DataPort(
        data_socket,
        Listen(options.host, options.port),
        lambda: ClientConnection(agent.proxy),
        agent.proxy.clients,
        tls,
        shared=options.reuse_port,
    )
    with data.moving(options.table.listen):  # the predecessor's may be another address
        await data.open()
    agent.listening = data.moving
    admin = None
    if admin_socket is not None and options.admin_token:
        app = admin_app(agent, options.admin_token)
        admin = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=_http_log())
        await admin.setup()
        await web.SockSite(admin, admin_socket).start()
    peers_port = None
    if agent.links is not None:
        try:
            peers_port = await agent.links.port.open(options.peers_host, options.peers_port)
        except OSError as error:  # clients can be served all the same
            _log.error(
                "agents of other regions cannot connect: port=%d why=%r", options.peers_port, str(error)
            )
    running = loop.create_task(agent.run())

    def line() -> str:
        host, port = data.address
        admin_port = admin_socket.getsockname()[1] if admin_socket else None
        ports = {"host": host, "port": port, "admin_port": admin_port}
        if peers_port is not None:
            ports["peers_port"] = peers_port
        return json.dumps({**ports, "pid": os.getpid()})

    def listening() -> list[socket.socket]:
        return [data.listening] if admin_socket is None else [data.listening, admin_socket]

    def taken() -> None:
        agent.retired = True
        succeeded.set()

    offer = None
    if options.handover_socket is not None:
        offer = socket_handover.SocketOffer(loop, options.handover_socket, listening, taken)
    if options.ready_file is not None:
        ready_file = options.ready_file
        write_text(ready_file, line() + "\n")
        data.moved = lambda: write_text(ready_file, line() + "\n")
    announce(line())
    if before is not None:
        await before.serving()
        if options.table_file is not None and options.table_file.exists():
            agent.reload()  # the predecessor may have taken another table since ours was read
    # The objects there now stay; requests leave little garbage in cycles, and a full collection over the tree of a prefix
    # policy takes a tenth of a second. The first two generations are kept small: going through 100,000 objects takes up to
    # 50 ms, in which nothing else is done.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 2, 1000)

    stopped, leaving = loop.create_task(stop.wait()), loop.create_task(succeeded.wait())
    await asyncio.wait((stopped, leaving, running), return_when=asyncio.FIRST_COMPLETED)
    if offer is not None:
        offer.close()
    await data.close(adopt=not succeeded.is_set())
    if agent.links is not None:
        await agent.links.close()
    if succeeded.is_set():
        retired = loop.create_task(_retire(agent))
        if admin is not None:  # requests to change the table must reach the successor
            await admin.cleanup()
        await asyncio.wait((retired, stopped, running), return_when=asyncio.FIRST_COMPLETED)
        retired.cancel()
        await asyncio.gather(retired, return_exceptions=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    agent.proxy.close(min(_LAME_S, options.shutdown_grace_s))
    await _drained(agent, options.shutdown_grace_s)
    for task in (stopped, leaving, running):
        task.cancel()
    outcomes = await asyncio.gather(running, return_exceptions=True)
    if admin is not None:
        await admin.cleanup()
    agent.close()
    if tracer is not None:
        tracer.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception):  # the agent could not watch over its targets: that is no clean end
            raise outcome


async def _retire(agent: Agent) -> None:
    """Serve what has come, at most `_RETIRED_S`, by the tables that the successor gets."""
    following = asyncio.get_running_loop().create_task(agent.follow())
    try:
        agent.proxy.retire(_LAME_S)
        await asyncio.sleep(_LAME_S)  # TLS handshakes are under way which the proxy does not know of yet
        await _nobody(agent, _RETIRED_S)
    finally:
        following.cancel()


async def _nobody(agent: Agent, patience_s: float) -> None:
    """Wait until all clients have gone, at most `patience_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        # First, for the proxy does not know yet of what has been accepted in this turn of the loop.
        await asyncio.sleep(_LOOK_EVERY_S)
        if not agent.proxy.clients or loop.time() >= deadline:
            return


async def _drained(agent: Agent, grace_s: float) -> None:
    """Wait for the running responses, at most `grace_s`; then break off the rest."""
    await _nobody(agent, grace_s)
    for client in list(agent.proxy.clients):
        client.transport.abort()
    await asyncio.sleep(0)


def _sockets(
    options: ServerOptions, before: socket_handover.Taken | None
) -> tuple[socket.socket, socket.socket | None]:
    """Return the data port's and the admin port's, from a predecessor or new."""
    wants_admin = bool(options.admin_token)
    if before is not None:
        if len(before.sockets) != 1 + wants_admin:
            raise OSError("the predecessor has not the same ports: its admin port needs a token as well")
        return before.sockets[0], before.sockets[1] if wants_admin else None
    data = options.table.listen or Listen(options.host, options.port)
    data_socket = _bound(data, shared=options.reuse_port)
    return data_socket, _bound(Listen(options.admin_host, options.admin_port)) if wants_admin else None


def _bound(listen: Listen, *, shared: bool = False) -> socket.socket:
    try:
        return bound(*resolved(listen), shared=shared)
    except OSError as error:
        why = f"cannot listen on {listen.host}:{listen.port}: {error.strerror}"
        raise CannotListenError(error.errno, why) from error


def _tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.tls_certfile, options.tls_keyfile)
    return context


def _reload(agent: Agent, options: ServerOptions, tls: ssl.SSLContext | None) -> None:
    """Read certificate and table again."""
    if tls is not None and options.tls_certfile is not None:
        try:
            _tls(
                options
            )  # a context in which loading has failed may have the new certificate with the old key
            tls.load_cert_chain(options.tls_certfile, options.tls_keyfile)
        except OSError as error:  # ssl.SSLError among them
            _log.warning("keep the certificate, cannot load %s why=%r", options.tls_certfile, str(error))
        else:
            _log.info("reload tls_certfile=%s", options.tls_certfile)
    agent.reload()


def _targets_tls(options: ServerOptions) -> ssl.SSLContext | None:
    """For targets that are addressed by https, with a certificate authority of their own; None for the system's."""
    if options.targets_cafile is None:
        return None
    return ssl.create_default_context(cafile=str(options.targets_cafile))


def _identity(options: ServerOptions) -> Identity | None:
    if options.peers_certfile is None or options.peers_cafile is None:
        return None
    return Identity(options.peers_cafile, options.peers_certfile)


def _limits(options: ServerOptions) -> LimitStore | None:
    """Shared with other agents of this host; None if there is no file for it.

    An agent that does not start helps no client, so one that cannot share limits serves with its own.
    """
    if options.limits_file is None:
        return None
    try:
        return LimitsFile(options.limits_file)
    except OSError as error:
        _log.error(
            "limits of API keys are per process: limits_file=%s why=%r", options.limits_file, str(error)
        )
        return None


def _access_log() -> Callable[[RequestRecord], None]:
    log = AccessLog(time.time)
    return lambda facts: print(log.line(facts), file=sys.stderr, flush=True)


def _http_log() -> logging.Logger:
    log = logging.getLogger("lb.http")
    if not any(isinstance(one, _WithoutValues) for one in log.filters):
        log.addFilter(_WithoutValues())
    return log


class _WithoutValues(logging.Filter):
    """aiohttp logs errors with their text, which may quote what a client sent.

    Keep the kind and the place; a malformed request is the client's error, not one of ours.
    """

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
