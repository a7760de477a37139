"""The address and the port of an endpoint beside the controller."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

#: Addresses of documentation (RFC 5737, RFC 3849): they have a route where there is a default route.
_ELSEWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}  # noqa: S104 - compared, not bound
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound
_ANY_PORT = 9


def shown_host(host: str) -> str:
    """Return the address at which a load balancer that listens on `host` is reached.

    Of a wildcard, the address of this machine on its default route; the loopback address where there is no route.
    """
    if host not in _ELSEWHERE:
        return host
    family, far = _ELSEWHERE[host]
    with socket.socket(
        family, socket.SOCK_DGRAM
    ) as probe:  # sends nothing: a connect only looks up the route
        try:
            probe.connect((far, _ANY_PORT))
        except OSError:
            return _LOOPBACK[host]
        return str(probe.getsockname()[0])


def reach_of(endpoint: str) -> str | None:
    """Return who can reach this URL: "this_machine" or "network"; None where there is no URL yet."""
    host = urlsplit(endpoint).hostname
    if host is None:
        return None
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    return "this_machine" if is_loopback else "network"


def choose_port(
    ports: range,
    *,
    had: int | None,
    taken: Collection[int],
    remembered: Collection[int],
    is_free: Callable[[int], bool],
) -> int | None:
    """Return the port of a name that has no live endpoint: the one it `had`, else the first free one.

    Ports that names without a live endpoint had (`remembered`) come last, so that these names get them again.
    Returns None where no port is left.
    """
    first = [] if had is None else [had]
    fresh = [port for port in ports if port not in remembered]
    old = [port for port in ports if port in remembered]
    return next((port for port in (*first, *fresh, *old) if port not in taken and is_free(port)), None)


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
