"""The listening ports of an agent: for clients, for its admin API, and for agents of other regions."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING

from lb.agent.agent import Agent
from lb.agent.data_port import CannotListenError, DataPort, bound, resolved
from lb.agent.server_options import ServerOptions
from lb.agent.socket_handover import Taken
from lb.config.options import Listen
from lb.http.tls_acceptor import TlsAcceptor
from lb.proxy.downstream import ClientConnection

if TYPE_CHECKING:
    from lb.agent.admin_port import AdminPort

_log = logging.getLogger("lb.agent.server")


class OpenPorts:
    """The ports of one agent. They listen when `open` returns."""

    def __init__(
        self,
        agent: Agent,
        options: ServerOptions,
        data_socket: socket.socket,
        admin_socket: socket.socket | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._agent = agent
        self._options = options
        self._admin_socket = admin_socket
        intake = agent.intake
        acceptor = None
        if tls is not None:
            acceptor = TlsAcceptor(
                tls, lambda: ClientConnection(intake), intake.handshake_places, intake.handshake_failed
            )
        self.data = DataPort(
            data_socket,
            Listen(options.host, options.port),
            lambda: ClientConnection(intake),
            agent.runtime.clients,
            acceptor,
            shared=options.reuse_port,
        )
        self._admin: AdminPort | None = None
        self._peers_port: int | None = None

    async def open(self) -> None:
        """Listen on all of them. A port for peers that is in use is logged: clients can be served without it."""
        agent, options = self._agent, self._options
        with self.data.moving(options.table.listen):  # the predecessor's may be another address
            await self.data.open()
        agent.listening = self.data.moving
        if self._admin_socket is not None and options.admin_token:
            from lb.agent.admin_port import (
                AdminPort,
            )  # slow to import, and an agent without a token needs none

            self._admin = AdminPort(agent, options.admin_token, open_probes=options.open_probes)
            await self._admin.open(self._admin_socket)
        if agent.links is not None:
            try:
                self._peers_port = await agent.links.port.open(options.peers_host, options.peers_port)
            except OSError as error:
                _log.error(
                    "agents of other regions cannot connect: port=%d why=%r", options.peers_port, str(error)
                )

    def line(self) -> str:
        """Return the addresses and the process id, as a line of JSON."""
        host, port = self.data.address
        admin_port = self._admin_socket.getsockname()[1] if self._admin_socket else None
        ports = {"host": host, "port": port, "admin_port": admin_port}
        if self._peers_port is not None:
            ports["peers_port"] = self._peers_port
        return json.dumps({**ports, "pid": os.getpid()})

    def sockets(self) -> list[socket.socket]:
        """Return what a successor takes over."""
        return (
            [self.data.listening] if self._admin_socket is None else [self.data.listening, self._admin_socket]
        )

    async def close_to_clients(self, *, adopt: bool) -> None:
        """Accept no client and no peer any more. `adopt`: serve the connections that the kernel has accepted already."""
        await self.data.close(adopt=adopt)
        if self._agent.links is not None:
            await self._agent.links.close()

    async def close_admin(self) -> None:
        """Close the admin port. Closing it again has no effect."""
        if self._admin is not None:
            await self._admin.close()


def bound_sockets(options: ServerOptions, before: Taken | None) -> tuple[socket.socket, socket.socket | None]:
    """Return the sockets of the data port and of the admin port, from a predecessor or new.

    Raises OSError if a port is in use.
    """
    with_admin = bool(options.admin_token)
    if before is not None:
        if len(before.sockets) != 1 + with_admin:
            raise OSError("the predecessor has not the same ports: its admin port needs a token as well")
        return before.sockets[0], before.sockets[1] if with_admin else None
    data = options.table.listen or Listen(options.host, options.port)
    data_socket = _bound(data, shared=options.reuse_port)
    return data_socket, _bound(Listen(options.admin_host, options.admin_port)) if with_admin else None


def _bound(listen: Listen, *, shared: bool = False) -> socket.socket:
    try:
        return bound(*resolved(listen), shared=shared)
    except OSError as error:
        why = f"cannot listen on {listen.host}:{listen.port}: {error.strerror}"
        raise CannotListenError(error.errno, why) from error
