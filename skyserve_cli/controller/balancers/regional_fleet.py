"""Keeps the load balancer agents that stand on machines of their own: their release, their table, and what they say.

Each agent has one connection over SSH, through which files go there and, by a forward on loopback, HTTP to its admin port,
which only the controller can reach. Whether its machine runs is the reconciler's business; a keeper on the machine (`lb.agent.supervisor`)
sees to the process. Here all blocking is done on threads of our own, so that a machine that does not respond costs no other agent
else anything. When the controller is gone the agents go on with the table they have.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import aiohttp
import orjson

from lb.config.demand import Demand
from lb.config.schema import Readiness, Stats, Table, WireError
from policies.backoff import delay_s
from policies.history import Load
from policies.model import Event, ProbeFailed, ProbePassed
from provisioners.port.base import LoginSource, Provisioner
from provisioners.port.commands import HostConnection, ShellError
from provisioners.port.errors import ProvisionError
from provisioners.remote.ssh_tunnel import PortForward
from skyserve_cli.controller.balancers.agent_reader import AdminPort
from skyserve_cli.controller.balancers.bundle import Bundle, agent_bundle
from skyserve_cli.controller.balancers.demand_follower import DemandFollower
from skyserve_cli.controller.balancers.deploy import (
    Release,
    Serving,
    deploy,
    end_frozen,
    release_of,
    serving,
    tidy,
)
from skyserve_cli.controller.balancers.peer_links import PeerFiles, PeerLinks
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.balancers.totals_follower import TotalsFollower
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.demand import load_of, slowdown
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.region_tables import drained_elsewhere
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas, served_report
from skyserve_cli.controller.reconcile.traffic_book import TrafficBook

log = logging.getLogger(__name__)

POLL_S = 1.0
HURRY_S = 0.1  # while something drains, or a release is about to take over
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_INSTALL_PAUSE_S = (
    60.0  # where the libraries cannot be installed: each try costs that machine seconds of its CPU
)
CALL_TIMEOUT_S = 5.0
SILENT_AFTER_S = 10.0  # an agent that has said nothing for so long does not pass its probe
FROZEN_AFTER_SILENCES = 4
_THREADS = 16

Key = tuple[str, int]
T = TypeVar("T")


def admin_token(secret: bytes, token: str) -> str:
    """Of the agent on the machine of that launch token: it follows from the home's secret, and is stored nowhere."""
    return hmac.new(secret, f"skyserve admin port\0{token}".encode(), hashlib.sha256).hexdigest()


class RegionalFleet:
    """The daemon's. `secret` is the home's, from which admin tokens follow."""

    def __init__(
        self,
        clouds: Callable[[str], Provisioner],
        secret: bytes,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        bundle: Callable[[], Bundle] = agent_bundle,
        attention: Attention | None = None,
        served: ServedReplicas | None = None,
        traffic: TrafficBook | None = None,
    ) -> None:
        self.traffic = traffic
        self._attention = attention
        self.served = ServedReplicas() if served is None else served
        self._clouds = clouds
        self._secret = secret
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._bundle = bundle
        self.peer_files = PeerFiles(secret, clock.now)
        self._supervisors: dict[Key, _RegionalAgentSupervisor] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="regional")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

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
        events = (supervisor.news(self._clock.now()) for supervisor in list(self._supervisors.values()))
        return [(keeper_news[0], keeper_news[1]) for keeper_news in events if keeper_news is not None]

    def loads(self, service: str) -> list[Load]:
        return [
            supervisor.load for (name, _), supervisor in list(self._supervisors.items()) if name == service
        ]

    def demands(self, service: str) -> list[Demand | None]:
        """See `Regional`."""
        return [
            supervisor.minutes.demand
            for (name, _), supervisor in list(self._supervisors.items())
            if name == service
        ]

    def reached_at(self) -> float | None:
        """Return when any agent last responded; None without agents."""
        supervisors = list(self._supervisors.values())
        if not supervisors:
            return None
        return max((at for one in supervisors if (at := one.heard_at) is not None), default=float("-inf"))

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
                supervisor = _RegionalAgentSupervisor(self, self._session, order, self._clock.now())
                self._supervisors[key] = supervisor
                self._tasks[key] = self._loop.create_task(supervisor.run())
            supervisor.want(order)

    # --- what keepers need

    def login_source(self, cloud: str) -> LoginSource:
        """Raise ValueError for a cloud without machines that can be logged in to."""
        source = self._clouds(cloud)
        if not isinstance(source, LoginSource):
            raise ValueError(f"no agent can stand on {cloud}")
        return source

    def bundle(self) -> Bundle:
        return self._bundle()

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


class _RegionalAgentSupervisor:
    """Looks after one agent."""

    def __init__(
        self, fleet: RegionalFleet, session: aiohttp.ClientSession, order: RegionalOrder, now: float
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._order = order
        self._forward = PortForward()
        self._shell: HostConnection | None = None
        self._release: Release | None = None
        self._deployed: str | None = None  # the name of the release
        self._serving: Serving | None = None
        self._acked: Table | None = None
        self._heard_at = now
        self._has_passed = False
        self._failures = 0  # in a row
        self._silences = 0  # in a row, of an agent that can be reached
        self._installs = 0  # that failed, in a row
        self._trouble = ""
        self._elsewhere: frozenset[int] = frozenset()  # see `RegionalOrder`; of the table that was pushed
        self._links = PeerLinks()
        self._table = self._links.table(order)  # that it should have
        self._stirred = asyncio.Event()
        self.load = Load()
        self.minutes = DemandFollower(fleet.now)
        self._totals = TotalsFollower(*order.key, fleet.traffic, asyncio.get_running_loop().time)

    def want(self, order: RegionalOrder) -> None:
        if order.table.revision != self._order.table.revision:
            self._stirred.set()
        self._order = order
        self._table = self._links.table(order)

    def news(self, now: float) -> tuple[str, Event] | None:
        """Return whether it passes, where that is another thing than what the reconciler knows."""
        order = self._order
        if self._has_passed and not self._failures:
            return None if order.passing else (order.service, ProbePassed(order.replica_id))
        if order.passing and now - self._heard_at > SILENT_AFTER_S:
            return order.service, ProbeFailed(order.replica_id, self._trouble or "the agent does not answer")
        return None

    def view(self) -> RegionalView:
        acked, serving_now = self._acked, self._serving
        synced = acked is not None and acked.revision == self._table.revision
        ready = sum(t.state is Readiness.READY for t in acked.targets) if synced and acked else 0
        version = serving_now.version if serving_now else None
        newest = (
            serving_now is not None
            and self._release is not None
            and serving_now.release == self._release.name
        )
        starts = serving_now.starts if serving_now else 0
        return RegionalView(synced, version, newest, ready, starts, self._trouble, *self._links.shown(acked))

    def admin_port(self) -> AdminPort | None:
        if self._serving is None:
            return None
        return AdminPort(f"http://127.0.0.1:{self._forward.port}", self._authorization())

    def let_go(self) -> None:
        self._forward.close()
        if self._shell is not None:
            self._shell.close()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._stirred.clear()
            started = asyncio.get_running_loop().time()
            try:
                await self._turn()
            except (TimeoutError, aiohttp.ClientError, OSError, WireError, ValueError, KeyError) as error:
                why = (
                    str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                )  # ours says it all
                is_silent = isinstance(error, TimeoutError) and not self._fleet.was_lost(started)
                self._failed(why, is_silent=is_silent)
            except (ShellError, ProvisionError) as error:
                self._failed(error.message)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())

    @property
    def heard_at(self) -> float | None:
        """When the agent last responded."""
        return self._heard_at if self._has_passed else None

    def _failed(self, why: str, *, is_silent: bool = False) -> None:
        self.load = replace(self.load, heard=frozenset())  # as far as is known now
        self._fleet.served.silent(*self._order.key)
        if why != self._trouble:
            log.warning("load balancer agent %s/%d: %s", self._order.service, self._order.replica_id, why)
        self._trouble = why
        self._failures += 1
        if is_silent:
            self._silences += 1
        else:
            self._serving = None  # it may have been restarted, with other ports

    def _pause_s(self) -> float:
        if self._installs:
            return delay_s(self._installs, LONGEST_PAUSE_S, LONGEST_INSTALL_PAUSE_S)
        if self._failures:
            return delay_s(self._failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        draining = self._acked is not None and any(
            target.state is Readiness.DRAINING for target in self._acked.targets
        )
        awaits = self._serving is None or self._release is None or self._serving.release != self._release.name
        if awaits and not self._trouble:
            return HURRY_S
        targets = 0 if self._acked is None else len(self._acked.targets)
        return (HURRY_S if draining else POLL_S) * slowdown(targets)

    async def _turn(self) -> None:
        order, on_thread = self._order, self._fleet.on_thread
        source = self._fleet.login_source(order.instance.zone.cloud)
        if self._shell is None or not self._shell.is_open:
            self._forward.nowhere()
            self._shell = await on_thread(partial(source.log_in, order.instance))
            self._serving = None
        shell, folder = self._shell, source.work_folder(order.instance)
        release = self._release = release_of(order, self._fleet.bundle(), self._fleet.peer_files.of)
        if self._deployed != release.name:
            self._installs += 1
            await on_thread(partial(deploy, shell, folder, release, self._table.to_json()))
            self._installs = 0
            self._deployed = release.name
        serving_now = self._serving
        if serving_now is None or serving_now.release != release.name:
            serving_now = await on_thread(partial(serving, shell, folder))
            if serving_now is None or serving_now.admin_port is None:
                raise ValueError(f"release {release.name} does not serve yet")
            if serving_now.release == release.name:
                await on_thread(partial(tidy, shell, folder, release.bundle.version))
            self._serving = serving_now
            self._forward.lead(shell, serving_now.admin_port)
        if self._silences >= FROZEN_AFTER_SILENCES and serving_now.pid is not None:
            self._silences = 0
            await on_thread(partial(end_frozen, shell, serving_now))
            raise ValueError("the agent is silent; it is restarted if it is to its own machine, too")
        if self._acked is None or self._acked.revision != self._table.revision:
            await self._push(self._table)
        await self._ask(order.window_s)
        url = f"http://127.0.0.1:{self._forward.port}"
        asks = serving_now.release == release.name and order.peers_port is not None
        if asks and await self._links.ask(self._session, url, self._authorization()):
            self._table = self._links.table(self._order)
            self._stirred.set()
        await self._totals.follow(self._session, url, self._authorization())
        if order.counts_demand and await self.minutes.follow(self._session, url, self._authorization()):
            self._fleet.wake()
        self._heard_at = self._fleet.now()
        self._failures = self._silences = 0
        is_refused = serving_now.refused == release.name
        self._trouble = (
            "its newest code does not come up there; the code before goes on" if is_refused else ""
        )
        if not self._has_passed:
            self._has_passed = True
            self._fleet.wake()

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._fleet.admin_token(self._order.instance.token)}"}

    async def _push(self, table: Table) -> None:
        url = f"http://127.0.0.1:{self._forward.port}/-/targets"
        async with self._session.put(url, json=table.to_json(), headers=self._authorization()) as response:
            if response.status != 200:
                raise ValueError(f"push refused: {response.status} {(await response.text())[:200]}")
        self._acked = table
        self._fleet.wake()
        self._elsewhere = drained_elsewhere(self._order.elsewhere, table)

    async def _ask(self, window_s: float) -> None:
        url = f"http://127.0.0.1:{self._forward.port}/-/stats?window_s={window_s:g}"
        asked_at = asyncio.get_running_loop().time()
        async with self._session.get(url, headers=self._authorization()) as response:
            response.raise_for_status()
            stats = Stats.from_json(orjson.loads(await response.read()))
        table = self._acked
        if table is not None and stats.revision != table.revision:
            self._acked = None  # it began with an older one: push again
            self._stirred.set()
            return
        self._fleet.served.reported(*self._order.key, served_report(stats, asked_at))
        load = load_of(stats, table, self._elsewhere)
        stirring = load.empty - self.load.empty or (load.queued > 0) != (self.load.queued > 0)
        self.load = load
        if stirring:
            self._fleet.wake()
