"""Keeps the load balancer agents that do not stand beside the controller: their release, their table, and what they say.

Each has a supervisor: of a machine (`machine_supervisor`), or of a cloud that runs agents itself (`cluster_supervisor`). Whether the machine
runs is the reconciler's business. Here all blocking is done on threads of our own, so that a machine that does not respond costs no other agent
else anything. When the controller is gone the agents go on with the table they have.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import aiohttp

from lb.config.demand import Demand
from policies.history import Load
from policies.model import Event
from policies.regions.ownership import Distances
from provisioners.port.agents import AgentSource
from provisioners.port.base import LoginSource, Provisioner
from provisioners.port.commands import HostConnection
from skyserve_cli.controller.balancers.agent_reader import AdminPort, admin_session
from skyserve_cli.controller.balancers.bundle import Bundle, bundle_for
from skyserve_cli.controller.balancers.cluster_supervisor import ClusterAgentSupervisor
from skyserve_cli.controller.balancers.machine_supervisor import MachineAgentSupervisor
from skyserve_cli.controller.balancers.peer_links import PeerFiles, measured
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
_THREADS = 16

Key = tuple[str, int]
T = TypeVar("T")


def admin_token(secret: bytes, token: str) -> str:
    """Of the agent on the machine of that launch token: it follows from the home's secret, and is stored nowhere."""
    return hmac.new(secret, f"skyserve admin port\0{token}".encode(), hashlib.sha256).hexdigest()


class RegionalFleet:
    """The daemon's. `secret` is the home's, from which admin tokens follow; `native_wheels` is the folder in it."""

    def __init__(
        self,
        clouds: Callable[[str], Provisioner],
        secret: bytes,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        native_wheels: Path | None = None,
        attention: Attention | None = None,
        served: ServedReplicas | None = None,
        traffic: TrafficBuffer | None = None,
    ) -> None:
        self.traffic = traffic
        self._attention = attention
        self.served = ServedReplicas() if served is None else served
        self._clouds = clouds
        self._secret = secret
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._native_wheels = native_wheels
        self.peer_files = PeerFiles(secret, clock.now)
        self._supervisors: dict[Key, MachineAgentSupervisor | ClusterAgentSupervisor] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="regional")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = admin_session(CALL_TIMEOUT_S)

    async def close(self) -> None:
        """Let go of the agents; they go on serving."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    # --- called by the tick's thread

    def ensure(self, orders: Sequence[RegionalOrder]) -> None:
        self._loop.call_soon_threadsafe(self._apply, {order.key: order for order in orders})

    def drain(self) -> list[tuple[str, Event]]:
        events = (supervisor.transition(self._clock.now()) for supervisor in list(self._supervisors.values()))
        return [(event[0], event[1]) for event in events if event is not None]

    def loads(self, service: str) -> list[Load]:
        return [supervisor.load for supervisor in self._of(service)]

    def demands(self, service: str) -> list[Demand | None]:
        """See `Regional`."""
        return [supervisor.minutes.demand for supervisor in self._of(service)]

    def distances(self, service: str) -> Distances:
        """See `Regional`."""
        return measured((supervisor.region, supervisor.links) for supervisor in self._of(service))

    def _of(self, service: str) -> list[MachineAgentSupervisor | ClusterAgentSupervisor]:
        return [one for (name, _), one in list(self._supervisors.items()) if name == service]

    def reached_at(self) -> float | None:
        """Return when any agent last responded; None without agents."""
        supervisors = list(self._supervisors.values())
        if not supervisors:
            return None
        return max((at for one in supervisors if (at := one.responded_at) is not None), default=float("-inf"))

    def admin_ports(self, service: str) -> dict[int, AdminPort]:
        """Return the admin ports of the service's agents that can be reached, by their numbers."""
        found = ((id_, one.admin_port()) for (name, id_), one in self._supervisors.items() if name == service)
        return {id_: port for id_, port in found if port is not None}

    def view(self, service: str, replica_id: int) -> RegionalView:
        supervisor = self._supervisors.get((service, replica_id))
        return RegionalView() if supervisor is None else supervisor.view()

    # --- on the loop

    def _apply(self, orders: dict[Key, RegionalOrder]) -> None:
        for key in self._supervisors.keys() - orders.keys():
            self._tasks.pop(key).cancel()
            self.served.silent(*key)
            self._threads.submit(self._supervisors.pop(key).let_go)  # to hang up may take a while
        for key, order in orders.items():
            supervisor = self._supervisors.get(key)
            if supervisor is None:
                assert self._session is not None  # noqa: S101 - start() comes first
                cloud = order.instance.zone.cloud
                kind = ClusterAgentSupervisor if self._runs_agents(cloud) else MachineAgentSupervisor
                supervisor = kind(self, self._session, order, self._clock.now())
                self._supervisors[key] = supervisor
                self._tasks[key] = self._loop.create_task(supervisor.run())
            supervisor.set_order(order)

    # --- for supervisors

    def login_source(self, cloud: str) -> LoginSource:
        """Raise ValueError for a cloud without machines that can be logged in to."""
        source = self._clouds(cloud)
        if not isinstance(source, LoginSource):
            raise ValueError(f"no agent can stand on {cloud}")
        return source

    def agent_source(self, cloud: str) -> AgentSource:
        """Raise ValueError for a cloud that does not run agents itself."""
        source = self._clouds(cloud)
        if not isinstance(source, AgentSource):
            raise ValueError(f"{cloud} runs no load balancer agents")
        return source

    def _runs_agents(self, cloud: str) -> bool:
        try:
            return isinstance(self._clouds(cloud), AgentSource)
        except Exception:  # noqa: BLE001 - a cloud without its SDK, say; the other kind of supervisor says why
            return False

    def bundle_for(self, shell: HostConnection) -> Bundle:
        return bundle_for(shell, self._native_wheels)

    def admin_token(self, token: str) -> str:
        return admin_token(self._secret, token)

    def now(self) -> float:
        return self._clock.now()

    def was_lost(self, started: float) -> bool:
        """Return True if this process was late since `started`: then it cannot say that an agent is silent."""
        return self._attention is not None and self._attention.was_lost(started)

    def wake(self) -> None:
        self._wake()

    async def on_thread(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, call)
