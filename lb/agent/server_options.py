"""The options of the process, and the agent that is built by them: certificates, shared limits and the access log included."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lb.agent.agent import Agent, AgentOptions
from lb.agent.descriptors import raise_limit, shares
from lb.agent.limits_file import LimitsFile
from lb.config.schema import Table
from lb.config.workers import AUTO, mover_threads
from lb.core.limit_store import LimitStore
from lb.observe.access_log import AccessLog, RequestRecord
from lb.observe.tracing import Tracing

if TYPE_CHECKING:
    from lb.regions.identity import Identity

_log = logging.getLogger("lb.agent.server")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, unless the table sets it. The admin port is open only if there is an `admin_token`."""

    table: Table
    host: str = "127.0.0.1"
    port: int = 0
    region: str = ""
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    admin_token: str | None = None
    open_probes: bool = False
    table_file: Path | None = None
    ready_file: Path | None = None
    tls_certfile: Path | None = None
    tls_keyfile: Path | None = None
    shutdown_grace_s: float = 120.0
    reuse_port: bool = False
    access_log: bool = False
    targets_cafile: Path | None = None
    fast_path: bool = True
    workers: int = AUTO
    handover_socket: Path | None = None
    limits_file: Path | None = None
    traffic_file: Path | None = None
    usage_file: Path | None = None
    peers_host: str = "0.0.0.0"  # noqa: S104 (agents of other regions connect from anywhere, with certificates)
    peers_port: int = 0
    peers_certfile: Path | None = None
    peers_cafile: Path | None = None


def build_agent(options: ServerOptions, tracer: Tracing | None) -> Agent:
    """Return an agent for these options. Needs a running event loop.

    Raises OSError or ssl.SSLError if a certificate cannot be read.
    """
    identity = _identity(options)
    share = shares(raise_limit(), (options.tls_certfile is not None) + (identity is not None))
    return Agent(
        options.table,
        AgentOptions(
            region=options.region,
            table_file=options.table_file,
            id_prefix=secrets.token_hex(6),
            targets_tls=_targets_tls(options),
            fast_path=options.fast_path,
            mover_threads=mover_threads(options.workers, available_cores()),
            max_clients=share.clients,
            max_handshakes=share.handshakes,
            traffic_file=options.traffic_file,
            usage_file=options.usage_file,
            limits=_limits(options),
            identity=identity,
        ),
        clock=asyncio.get_running_loop().time,
        rng=random.Random(secrets.randbits(64)),
        tracing=tracer,
        access_log=_access_log() if options.access_log else None,
        unix_time_s=time.time,
    )


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.tls_certfile, options.tls_keyfile)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _targets_tls(options: ServerOptions) -> ssl.SSLContext | None:
    """For targets that are addressed by https, with a certificate authority of their own; None for the system's."""
    if options.targets_cafile is None:
        return None
    return ssl.create_default_context(cafile=str(options.targets_cafile))


def _identity(options: ServerOptions) -> Identity | None:
    if options.peers_certfile is None or options.peers_cafile is None:
        return None
    from lb.regions.identity import Identity

    return Identity(options.peers_cafile, options.peers_certfile, time.time)


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
    def write(lines: bytes) -> None:
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()

    return AccessLog(time.time, write, asyncio.get_running_loop().call_soon).add


_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # of a container: that of its own group


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        cores = min(cores, quota_of(_CGROUP.read_text()))
    return max(1, cores)


def quota_of(line: str) -> int:
    """Return the cores of a `cpu.max` of cgroups, rounded up. Raises ValueError if there is no quota."""
    quota, period = line.split()
    return math.ceil(int(quota) / int(period))
