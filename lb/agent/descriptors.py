"""File descriptors: as many as the system grants, and how they are shared among connections."""

from __future__ import annotations

import logging
import resource
from typing import NamedTuple

from lb.http.tls_acceptor import MAX_HANDSHAKES

_RESERVE = 40  # listening sockets, the admin port, probes, logs, the event loop
_PER_CLIENT = 2  # its own, and that of a target
_UNLIMITED = 1 << 20

_log = logging.getLogger("lb.descriptors")


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            _log.warning(
                "cannot raise the limit of open files from=%d to=%d why=%r", soft, wanted, str(error)
            )
        else:
            _log.info("raised the limit of open files from=%d to=%d", soft, wanted)
            soft = wanted
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


class Shares(NamedTuple):
    """How many connections of clients there may be, and how many handshakes at a time on each port with TLS."""

    clients: int
    handshakes: int


def shares(limit: int, tls_ports: int) -> Shares:
    """Return how many connections `limit` descriptors are enough for.

    Those of targets, probes and the admin port must never lack one, or the agent would take its own want for the targets'
    fault. A connection needs one descriptor until its handshake is complete, and is a client's from then on.
    """
    spare = limit - _RESERVE
    handshakes = max(1, min(MAX_HANDSHAKES, spare // 4))
    return Shares(max(1, (spare - tls_ports * handshakes) // _PER_CLIENT), handshakes)
