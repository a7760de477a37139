"""Listening, until it is stopped: the data port, the admin port and the signals.

SIGHUP reads the certificate and the table file again: new connections get the certificate that is there now, no connection
is dropped, and what cannot be read leaves everything as it was.

SIGTERM and SIGINT stop the accepting, turn away queued requests, let running ones go on for at most `shutdown_grace_s`,
and end with exit code 0. Every response is marked as the last of its connection, and idle connections may send one more
request for `_GRACE_S`: closed at once, they would lose the one that is on its way. A second signal ends at once. An agent with a successor (`lb.agent.socket_handover`) retires first: it accepts
nothing either, but queued requests go on waiting for a target, and running ones have `_RETIRED_S`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable

from lb.agent import socket_handover
from lb.agent.agent import Agent
from lb.agent.open_ports import OpenPorts, bound_sockets
from lb.agent.server_options import ServerOptions, build_agent, tls_context
from lb.config.file import write_text
from lb.config.schema import Build
from lb.observe.tracing import Tracing, tracing

_log = logging.getLogger("lb.agent.server")
_CHECK_EVERY_S = 0.05
# With a successor: connections that were accepted here and have sent no request yet are served here. A busy
# connection has a request in this time, whose response is marked as the last one.
_GRACE_S = 2.0
_RETIRED_S = 3600.0  # longer than any response; queued requests have a limit of their own


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

    tls = tls_context(options)
    before = socket_handover.take(options.handover_socket) if options.handover_socket is not None else None
    sockets = bound_sockets(options, before)
    tracer = tracing(options.table.service, options.region, os.environ, time.time_ns)
    agent = build_agent(options, tracer)
    _log_build(agent.build)
    loop.add_signal_handler(signal.SIGHUP, _reload, agent, options, tls)
    ports = OpenPorts(agent, options, *sockets, tls)
    await ports.open()
    running = loop.create_task(agent.run())

    def taken() -> None:
        agent.retired = True
        succeeded.set()

    offer = None
    if options.handover_socket is not None:
        offer = socket_handover.SocketOffer(loop, options.handover_socket, ports.sockets, taken)
    if options.ready_file is not None:
        ready_file = options.ready_file
        write_text(ready_file, ports.line() + "\n")
        ports.data.moved = lambda: write_text(ready_file, ports.line() + "\n")
    announce(ports.line())
    if before is not None:
        await before.serving()
        if options.table_file is not None and options.table_file.exists():
            agent.reload()  # the predecessor may have taken another table since ours was read
    _freeze_objects()

    stopped, leaving = loop.create_task(stop.wait()), loop.create_task(succeeded.wait())
    await asyncio.wait((stopped, leaving, running), return_when=asyncio.FIRST_COMPLETED)
    if offer is not None:
        offer.close()
    await ports.close_to_clients(adopt=not succeeded.is_set())
    if succeeded.is_set():
        await _retired(agent, ports, stopped, running)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    leaving.cancel()
    stopped.cancel()
    await _stopped(agent, ports, running, options.shutdown_grace_s, tracer)


def _log_build(build: Build) -> None:
    if build.not_compiled:
        _log.warning(
            "build kind=%s fast_path=%s why=%r",
            build.kind.value,
            build.fast_path,
            build.not_compiled,
        )
    else:
        _log.info("build kind=%s fast_path=%s workers=%d", build.kind.value, build.fast_path, build.workers)
    if build.slow_tls:
        _log.warning("chunks of streams with TLS are moved by Python: why=%r", build.slow_tls)


def _freeze_objects() -> None:
    """Exempt the objects there now from garbage collection, and keep the pauses of later collections short.

    Requests leave little garbage in cycles, and a full collection over the tree of a prefix policy takes a tenth of a
    second. The first two generations are kept small: going through 100,000 objects takes up to 50 ms, in which nothing
    else is done.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 2, 1000)
    gc.enable()


async def _retired(
    agent: Agent, ports: OpenPorts, stopped: asyncio.Task[bool], running: asyncio.Task[None]
) -> None:
    """Serve what has come until it has gone, a signal comes, or the agent fails."""
    retired = asyncio.get_running_loop().create_task(_retire(agent))
    await ports.close_admin()  # requests to change the table must reach the successor
    await asyncio.wait((retired, stopped, running), return_when=asyncio.FIRST_COMPLETED)
    retired.cancel()
    await asyncio.gather(retired, return_exceptions=True)


async def _stopped(
    agent: Agent, ports: OpenPorts, running: asyncio.Task[None], grace_s: float, tracer: Tracing | None
) -> None:
    """Let running responses end within `grace_s`, then release everything. Raises what the agent's own task raised."""
    agent.intake.close(min(_GRACE_S, grace_s))
    await _drained(agent, grace_s)
    running.cancel()
    outcomes = await asyncio.gather(running, return_exceptions=True)
    await ports.close_admin()
    agent.close()
    if tracer is not None:
        tracer.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception):  # the agent could not watch over its targets: exit with an error
            raise outcome


async def _retire(agent: Agent) -> None:
    """Serve what has come, at most `_RETIRED_S`, by the tables that the successor gets."""
    following = asyncio.get_running_loop().create_task(agent.follow())
    try:
        agent.intake.retire(_GRACE_S)
        await asyncio.sleep(_GRACE_S)  # TLS handshakes are under way which the proxy does not know of yet
        await _wait_for_clients(agent, _RETIRED_S)
    finally:
        following.cancel()


async def _wait_for_clients(agent: Agent, timeout_s: float) -> None:
    """Wait until all clients have gone, at most `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        # First, for the proxy does not know yet of what has been accepted in this turn of the loop.
        await asyncio.sleep(_CHECK_EVERY_S)
        if not agent.runtime.clients or loop.time() >= deadline:
            return


async def _drained(agent: Agent, grace_s: float) -> None:
    """Wait for the running responses, at most `grace_s`; then break off the rest."""
    await _wait_for_clients(agent, grace_s)
    for client in list(agent.runtime.clients):
        client.transport.abort()
    await asyncio.sleep(0)


def _reload(agent: Agent, options: ServerOptions, tls: ssl.SSLContext | None) -> None:
    """Read certificate and table again."""
    if tls is not None and options.tls_certfile is not None:
        try:
            # Tried in another context first: one in which loading failed may have the new certificate with the old key.
            tls_context(options)
            tls.load_cert_chain(options.tls_certfile, options.tls_keyfile)
        except OSError as error:  # ssl.SSLError among them
            _log.warning("keep the certificate, cannot load %s why=%r", options.tls_certfile, str(error))
        else:
            _log.info("reload tls_certfile=%s", options.tls_certfile)
    agent.reload()
