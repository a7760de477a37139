"""What supervisors of load balancer agents need of the fleet that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from provisioners.port.agents import AgentSource
from provisioners.port.base import LoginSource
from provisioners.port.commands import HostConnection
from skyserve_cli.controller.balancers.bundle import Bundle
from skyserve_cli.controller.balancers.peer_links import PeerFiles
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer

T = TypeVar("T")


class FleetServices(Protocol):
    """`regional_fleet.RegionalFleet` has them."""

    traffic: TrafficBuffer | None
    served: ServedReplicas
    peer_files: PeerFiles

    def login_source(self, cloud: str) -> LoginSource:
        """Raise ValueError for a cloud without machines that can be logged in to."""
        ...

    def agent_source(self, cloud: str) -> AgentSource:
        """Raise ValueError for a cloud that does not run agents itself."""
        ...

    def bundle_for(self, shell: HostConnection) -> Bundle:
        """Return the code for a machine; blocks. Raises ShellError."""
        ...

    def admin_token(self, token: str) -> str: ...

    def now(self) -> float: ...

    def was_lost(self, started: float) -> bool: ...

    def wake(self) -> None: ...

    async def on_thread(self, call: Callable[[], T]) -> T: ...
