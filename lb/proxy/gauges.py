"""The gauges of one agent's data plane, by name as in `lb.observe.families.AGENT_HELP`."""

from __future__ import annotations

from lb.proxy.context import Proxy


def agent_gauges(proxy: Proxy) -> dict[str, float]:
    """Return what an agent has of connections and buffers, and its faults."""
    gauges: dict[str, float] = {
        "client_connections": len(proxy.clients),
        "buffered_bytes": proxy.buffers.taken,
        "buffer_limit_bytes": proxy.buffers.limit,
        "internal_errors": proxy.faults.total,
        "retries_refused": proxy.retries.refused,
    }
    if proxy.max_clients is not None:
        gauges["max_client_connections"] = proxy.max_clients
    return gauges
