"""Names and addresses of Pods. Pure.

There is no firewall to set: a Pod is reached where the cluster's network lets one reach it, and NetworkPolicies are the
user's. A Pod has no name in DNS of its own, so the nodes of a replica have a Service each of two kinds that has no address:
one lists all of them, the other those that are set up.
"""

from __future__ import annotations

from collections.abc import Sequence

from provisioners.port.vm import machine_token


def service_of(token: str, *, started: bool = False) -> str:
    """Return the name of a Service of a replica. It begins with a letter, as such names must."""
    return f"s{'s' if started else 'p'}-{token}"


def host_names(token: str, num_nodes: int) -> Sequence[str]:
    """Return the host names of the nodes of a replica, by rank."""
    return [machine_token(token, rank) for rank in range(num_nodes)]


def endpoint_of(address: str | None, port: int) -> str | None:
    """Return the base URL of what listens in a Pod."""
    if not address:
        return None
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
