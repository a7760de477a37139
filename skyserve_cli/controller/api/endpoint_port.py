"""The port of the endpoint of a service that has its load balancer beside the controller."""

from __future__ import annotations

from skyserve_cli.config import LoadBalancerConfig
from skyserve_cli.controller.balancers.front_address import choose_port, is_free
from skyserve_cli.controller.rejected import RejectedError
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.state.store import Store


class NoFreePortError(RejectedError):
    """No port is left for another endpoint."""


def endpoint_port(name: str, spec: ServiceSpec, store: Store, settings: LoadBalancerConfig) -> int:
    """Return the endpoint's port: the one requested, the one the name had, or the first that is free. Raises NoFreePortError."""
    rows = {row.name: row for row in store.services(down=True)}
    taken = {row.lb_port for row in rows.values() if row.name != name and not row.down}
    had = rows[name].lb_port if name in rows else None
    host = spec.load_balancer.host or settings.host
    chosen = spec.load_balancer.port
    if chosen is not None:
        if chosen in taken:
            raise NoFreePortError(f"service.load_balancer.port: {chosen} belongs to another service")
        if chosen != had and not is_free(host, chosen):  # its own agent may still hold it
            raise NoFreePortError(f"service.load_balancer.port: {chosen} is in use on {host}")
        return chosen
    if had is not None and not rows[name].down:
        return had
    port = choose_port(
        range(settings.first_port, settings.last_port + 1),
        had=had,
        taken=taken,
        remembered={row.lb_port for row in rows.values() if row.name != name and row.down},
        is_free=lambda port: is_free(host, port),
    )
    if port is None:
        raise NoFreePortError(
            f"no free port from {settings.first_port} to {settings.last_port} for an endpoint"
        )
    return port
