"""Keeps the load balancer agents: one process per service, beside the controller.

An agent outlives the controller (it is the start of a session of its own) and goes on serving with its last
table; a new controller finds it by its address file and takes it back. An agent that fails is seen at once (its
pidfd becomes readable) and started again on the same port, with the table it had.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import aiohttp
import orjson

from lb.config.demand import Demand
from lb.config.options import Listen
from lb.config.schema import Build, Readiness, Stats, Table, WireError
from policies.backoff import delay_s
from policies.history import Load
from skyserve_cli.controller.balancers.agent_process import (
    AgentFolder,
    LocalAgent,
    Shape,
    shape_of,
    table_for,
)
from skyserve_cli.controller.balancers.agent_reader import AdminPort, admin_session
from skyserve_cli.controller.balancers.demand_follower import DemandFollower
from skyserve_cli.controller.balancers.totals_follower import TotalsFollower
from skyserve_cli.controller.balancers.usage_follower import UsageFollower
from skyserve_cli.controller.reconcile.attention import Attention
from skyserve_cli.controller.reconcile.demand import MANY_TARGETS, load_of, slowdown
from skyserve_cli.controller.reconcile.ports import AgentOrder
from skyserve_cli.controller.reconcile.served_replicas import ServedReplicas, ServedReport, served_report
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer

log = logging.getLogger(__name__)

POLL_S = 1.0
DRAIN_POLL_S = 0.1
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
FIRST_RESTART_S = 0.1
LONGEST_RESTART_S = 5.0
CALL_TIMEOUT_S = 3.0
FROZEN_AFTER_SILENCES = 4
LARGE_BYTES = 64 << 10
BESIDE = 0  # the number of the agent beside the controller; replicas and other agents are numbered from 1


@dataclass(frozen=True, slots=True)
class AgentView:
    """What `serve status` shows of an agent.

    `alive`: there is a process of it, be it one that starts. `acked`: it has the newest table. `trouble`: why it does not listen where it should, or cannot use its file of API keys.
    `build`: how it runs; None: not known, or an older agent.
    """

    alive: bool
    acked: bool
    ready_targets: int
    restarts: int
    trouble: str = ""
    build: Build | None = None


class LocalFleet:
    """The daemon's fleet."""

    def __init__(
        self,
        folder: Path,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        attention: Attention | None = None,
        served: ServedReplicas | None = None,
        now: Callable[[], float] | None = None,
        traffic: TrafficBuffer | None = None,
    ) -> None:
        """`now` is the clock by which minutes of demand are numbered; `traffic` gets what agents have counted. None: not read."""
        self._traffic = traffic
        self._folder = folder
        self._now = now
        self._attention = attention
        self._served = ServedReplicas() if served is None else served
        self._loop = loop
        self._wake = wake
        self._supervisors: dict[str, _LocalAgentSupervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._session = admin_session(CALL_TIMEOUT_S)

    async def close(self) -> None:
        """Let go of the agents; they go on serving."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def ensure(self, orders: Mapping[str, AgentOrder | None]) -> None:
        self._loop.call_soon_threadsafe(self._apply, dict(orders))

    def load(self, service: str) -> Load:
        supervisor = self._supervisors.get(service)
        return Load() if supervisor is None else supervisor.load

    def demand(self, service: str) -> Demand | None:
        supervisor = self._supervisors.get(service)
        return None if supervisor is None or supervisor.minutes is None else supervisor.minutes.demand

    def admin_ports(self, service: str) -> dict[int, AdminPort]:
        """Return the admin port of the service's agent, by its number."""
        supervisor = self._supervisors.get(service)
        agent = None if supervisor is None else supervisor.agent
        return {} if agent is None else {BESIDE: AdminPort(agent.admin_url, agent.authorization)}

    def view(self, service: str) -> AgentView:
        supervisor = self._supervisors.get(service)
        return AgentView(False, False, 0, 0) if supervisor is None else supervisor.view()

    def _apply(self, orders: Mapping[str, AgentOrder | None]) -> None:
        """Also finds agents that an earlier controller left for services that have gone down since."""
        left = {path.parent.name for path in self._folder.glob("*/agent.json")}
        for service in self._supervisors.keys() | left | orders.keys():
            if service in orders and orders[service] is None:
                continue
            supervisor = self._supervisors.get(service)
            if supervisor is None:
                assert self._session is not None  # noqa: S101 - start() comes first
                supervisor = self._supervisors[service] = _LocalAgentSupervisor(
                    self._folder / service,
                    self._session,
                    self._wake,
                    self._attention,
                    self._served,
                    self._now,
                    TotalsFollower(service, BESIDE, self._traffic, self._loop.time),
                    UsageFollower(service, self._traffic, self._loop.time),
                )
            supervisor.set_order(orders.get(service))
            task = self._tasks.get(service)
            if task is None or task.done():
                if supervisor.finished:
                    del self._supervisors[service]
                    self._tasks.pop(service, None)
                else:
                    self._tasks[service] = self._loop.create_task(supervisor.run())


class _LocalAgentSupervisor:
    """Looks after the agent of one service."""

    def __init__(
        self,
        folder: Path,
        session: aiohttp.ClientSession,
        wake: Callable[[], None],
        attention: Attention | None,
        served: ServedReplicas,
        now: Callable[[], float] | None,
        totals: TotalsFollower,
        usage: UsageFollower,
    ) -> None:
        self._totals = totals
        self._usage = usage
        self.minutes = None if now is None else DemandFollower(now)
        self._name = folder.name
        self._attention = attention
        self._served = served
        self._folder = AgentFolder(folder)
        self._session = session
        self._wake = wake
        self._order: AgentOrder | None = None
        self.agent: LocalAgent | None = None
        self._starting = False  # its process runs, and does not listen yet
        self._stirred = asyncio.Event()
        self._acked: Table | None = None
        self._restarts = -1
        self._failures = 0  # in a row
        self._silences = 0  # in a row, of a living agent
        self._trouble = ""
        self._keys_problem = ""
        self._build: Build | None = None
        self.load = Load()
        self.finished = False

    def set_order(self, order: AgentOrder | None) -> None:
        if order != self._order or order is None:
            self._order = order
            self.finished = self.finished and order is None
            self._stirred.set()

    def view(self) -> AgentView:
        wanted = self._order.table.revision if self._order is not None else None
        acked = self._acked is not None and self._acked.revision == wanted
        ready = 0
        if acked and self._acked is not None:
            ready = sum(target.state is Readiness.READY for target in self._acked.targets)
        alive = self._starting or self.agent is not None
        trouble = self._trouble or self._keys_problem
        return AgentView(alive, acked, ready, max(0, self._restarts), trouble, self._build)

    async def run(self) -> None:
        """Until the agent is not wanted any more and is gone."""
        while True:
            self._stirred.clear()
            started = asyncio.get_running_loop().time()
            try:
                await self._turn()
            except (TimeoutError, aiohttp.ClientError, OSError, WireError, ValueError) as error:
                log.warning("load balancer %s: %s: %s", self._name, type(error).__name__, error)
                self._failures += 1
                # A controller that is late itself cannot say that its agent is silent.
                was_late = self._attention is not None and self._attention.was_lost(started)
                self._silences += isinstance(error, TimeoutError) and not was_late
                self.load = replace(self.load, responsive=frozenset())  # as far as is known now
                self._served.silent(self._name, BESIDE)
            self._starting = False
            if self.finished:
                return
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())

    def _pause_s(self) -> float:
        if self._failures:
            return delay_s(self._failures, FIRST_RESTART_S, LONGEST_RESTART_S)
        table = self._acked
        targets = () if table is None else table.targets
        draining = any(target.state is Readiness.DRAINING for target in targets)
        return (DRAIN_POLL_S if draining else POLL_S) * slowdown(len(targets))

    async def _turn(self) -> None:
        order = self._order
        if order is None:
            await self._end()
            return
        shape = shape_of(order)
        if self.agent is not None and self._is_lost(self.agent, shape):
            await self._discard(self.agent)
        if self.agent is None:
            self.agent = await self._adopt(shape) or await self._spawn(order)
            self._restarts = max(0, self._restarts)
            self._watch(self.agent)
        agent = self.agent
        acked = self._acked
        if (
            acked is None
            or acked.revision != order.table.revision
            or acked.listen != Listen(order.host, order.port)
        ):
            await self._push(agent, order)
        await self._poll(agent, order.window_s)
        if order.counts_demand:
            await self._count(agent)
        await self._totals.follow(self._session, agent.admin_url, agent.authorization)
        await self._usage.follow(self._session, agent.admin_url, agent.authorization)
        self._failures = self._silences = 0

    def _is_lost(self, agent: LocalAgent, shape: Shape) -> bool:
        """Dead, of the wrong shape, or frozen.

        An agent that repeatedly does not respond to its controller does not serve its clients either.
        """
        return not agent.alive() or agent.shape != shape or self._silences >= FROZEN_AFTER_SILENCES

    async def _push(self, agent: LocalAgent, order: AgentOrder) -> None:
        """Give the agent its table.

        If it cannot listen on the address of the order, it gets the rest, goes on listening where it does, and receives the order to
        move again at each turn.
        """
        table = table_for(order)
        trouble = await self._put(agent, table)
        if trouble:
            if trouble != self._trouble:
                log.warning("load balancer %s: %s", self._name, trouble)
            table = replace(table, listen=await self._listening(agent))
            acked = self._acked
            if acked is None or acked.revision != table.revision:
                await self._put(agent, table)
        if table != self._acked or trouble != self._trouble:
            self._acked, self._trouble = table, trouble
            self._wake()

    async def _put(self, agent: LocalAgent, table: Table) -> str:
        """Push a table. Returns why the agent cannot listen on its address, empty if it does. Raises ValueError."""
        body = (
            await asyncio.to_thread(table.to_json) if len(table.targets) > MANY_TARGETS else table.to_json()
        )
        async with self._session.put(
            f"{agent.admin_url}/-/targets", json=body, headers=agent.authorization
        ) as response:
            if response.status == 409:
                error = (await response.json())["error"]
                if error["code"] == "cannot_listen":
                    return str(error["message"])
            if response.status != 200:
                raise ValueError(f"push refused: {response.status} {(await response.text())[:200]}")
        return ""

    async def _listening(self, agent: LocalAgent) -> Listen | None:
        """Return the address in the agent's own table."""
        url = f"{agent.admin_url}/-/targets"
        async with self._session.get(url, headers=agent.authorization) as response:
            response.raise_for_status()
            return Table.from_json(await response.json()).listen

    async def _poll(self, agent: LocalAgent, window_s: float) -> None:
        url = f"{agent.admin_url}/-/stats?window_s={window_s:g}&build=1&health=1"
        asked_at = asyncio.get_running_loop().time()
        async with self._session.get(url, headers=agent.authorization) as response:
            response.raise_for_status()
            content = await response.read()
        table = self._acked
        read = partial(_read, content, asked_at, table)
        # The report of an agent with many targets takes long to read, and the event loop has others to serve.
        stats, report, load = await asyncio.to_thread(read) if len(content) > LARGE_BYTES else read()
        if table is not None and stats.revision != table.revision:
            self._acked = None  # it was restarted by another process: push again
            self._stirred.set()
            return
        self._served.reported(self._name, BESIDE, report)
        if (stats.keys_problem, stats.build) != (self._keys_problem, self._build):
            self._keys_problem, self._build = stats.keys_problem, stats.build
            self._wake()
        stirring = load.empty - self.load.empty or (load.queued > 0) != (self.load.queued > 0)
        self.load = load
        if stirring:
            self._wake()

    async def _count(self, agent: LocalAgent) -> None:
        if self.minutes is not None and await self.minutes.follow(
            self._session, agent.admin_url, agent.authorization
        ):
            self._wake()

    async def _adopt(self, shape: Shape | None) -> LocalAgent | None:
        """The agent an earlier controller left, if it has the wanted shape (None: any)."""
        found = self._folder.left()
        if found is not None and shape is not None and found.shape != shape:
            await self._discard(found)
            return None
        return found

    async def _spawn(self, order: AgentOrder) -> LocalAgent:
        process = self._folder.start(order)
        self._restarts += 1  # from -1: the first start is none
        log.info("start load balancer service=%s pid=%d port=%d", order.service, process.pid, order.port)
        self._starting = True
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            agent = self._folder.started(process, order)
            if agent is not None:
                return agent
            await asyncio.sleep(0.02)
        process.kill()
        raise OSError(f"the agent did not listen within {START_TIMEOUT_S:g} s")

    def _watch(self, agent: LocalAgent) -> None:
        """Call back at once when the process ends."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(agent.pid)
        except ProcessLookupError:
            self._stirred.set()
            return

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self._stirred.set()

        loop.add_reader(fd, ended)

    async def _discard(self, agent: LocalAgent) -> None:
        """End the agent, if it is not dead already, and forget what it knew."""
        await self._stop(agent)
        self.agent = None
        self._acked = None
        self._trouble = self._keys_problem = ""
        self._build = None
        self._silences = 0
        self.load = Load()
        if self.minutes is not None:
            self.minutes.forget()
        self._served.silent(self._name, BESIDE)

    async def _stop(self, agent: LocalAgent) -> None:
        """Send SIGTERM, then SIGKILL; a stopped process acts on the second only."""
        frozen = self._silences >= FROZEN_AFTER_SILENCES
        for sign in (signal.SIGKILL,) if frozen else (signal.SIGTERM, signal.SIGKILL):
            if agent.alive():
                agent.send(sign)
            for _ in range(int(STOP_TIMEOUT_S / 0.05)):
                if not agent.alive():
                    return
                await asyncio.sleep(0.05)

    async def _end(self) -> None:
        if self.agent is None:
            self.agent = await self._adopt(None)
        if self.agent is not None:
            await self._discard(self.agent)
        if self._folder.is_held():
            raise OSError("an agent runs that does not respond; trying again")
        await self._usage.read_left(self._folder.usage)
        self._folder.clear()
        self.finished = True
        self._wake()


def _read(content: bytes, asked_at: float, table: Table | None) -> tuple[Stats, ServedReport, Load]:
    """Return what an agent that has the table reports. Raises WireError, ValueError."""
    stats = Stats.from_json(orjson.loads(content))
    return stats, served_report(stats, asked_at), load_of(stats, table)
