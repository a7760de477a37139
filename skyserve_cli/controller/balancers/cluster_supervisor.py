"""Supervises one load balancer agent that its cloud runs (`AgentSource`): its release, and the table of each of its processes.

Usually there is one process. In a roll-out there are two, and each has the table and reports its part of the load, until the one before
has served what it had. The admin port of a process is reached at its own address.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp

from lb.config.schema import Build, Readiness, Table, WireError
from lb.config.workers import workers_argument
from policies.backoff import delay_s
from policies.history import Load
from provisioners.port.agents import AgentProcess, AgentRelease
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.balancers.agent_reader import AdminPort
from skyserve_cli.controller.balancers.agent_supervisor import AgentSupervisor, trouble_of
from skyserve_cli.controller.balancers.fleet_services import FleetServices
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.balancers.totals_follower import TotalsFollower
from skyserve_cli.controller.balancers.usage_follower import UsageFollower
from skyserve_cli.controller.reconcile.demand import load_of, merged, slowdown
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.region_tables import drained_elsewhere
from skyserve_cli.controller.reconcile.served_replicas import ServedReport, merged_report, served_report

POLL_S = 1.0
HURRY_S = 0.2  # while something drains, or a process comes up
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_FIRST_FREE_PORT, _MOVED_UP = 1024, 8000
_TLS = ("tls-cert.pem", "tls-key.pem")
_PEERS = ("peers-ca.pem", "peers-own.pem")


def release_of(order: RegionalOrder, version: str, peers: tuple[bytes, bytes] | None) -> AgentRelease:
    """Return what the agent of the order should run. Certificates are read every time: they are renewed on the disk.

    Raises OSError.
    """
    files: dict[str, bytes] = {}
    ports = (order.port,) if order.peers_port is None else (order.port, order.peers_port)
    arguments = ["--service", order.service, "--region", order.instance.zone.region]
    arguments += ["--host", "0.0.0.0", "--port", str(_container_port(order.port))]  # noqa: S104
    arguments += workers_argument(order.workers)
    if order.tls is not None:
        files |= {name: Path(path).read_bytes() for name, path in zip(_TLS, order.tls, strict=True)}
        arguments += ["--tls-certfile", _TLS[0], "--tls-keyfile", _TLS[1]]
    if order.peers_port is not None and peers is not None:
        files |= dict(zip(_PEERS, peers, strict=True))
        arguments += ["--peers-port", str(_container_port(order.peers_port))]
        arguments += ["--peers-cafile", _PEERS[0], "--peers-certfile", _PEERS[1]]
    parts = [version.encode(), *(one.encode() for one in arguments), *files.values()]
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
    return AgentRelease(name, tuple(arguments), ports, files)


@dataclass(slots=True)
class _Known:
    """What the controller knows of one process."""

    totals: TotalsFollower
    usage: UsageFollower
    acked: Table | None = None
    load: Load = field(default_factory=Load)
    report: ServedReport | None = None
    keys_problem: str = ""
    build: Build | None = None


class ClusterAgentSupervisor(AgentSupervisor):
    """Supervises one agent, whose processes its cloud starts and replaces."""

    def __init__(
        self, fleet: FleetServices, session: aiohttp.ClientSession, order: RegionalOrder, now: float
    ) -> None:
        super().__init__(fleet, session, order, now)
        self._release: AgentRelease | None = None
        self._processes: Sequence[AgentProcess] = ()
        self._known: dict[str, _Known] = {}
        self._starts = 0

    def view(self) -> RegionalView:
        newest = self._newest()
        acked = None if newest is None else self._known[newest.id].acked
        is_newest = newest is not None and self._release is not None and newest.release == self._release.name
        synced = acked is not None and acked.revision == self._table.revision
        ready = sum(t.state is Readiness.READY for t in acked.targets) if synced and acked else 0
        version = self._version() if newest is not None else None
        links = self.links.shown(acked)
        known = None if newest is None else self._known[newest.id]
        ttft_s, build = ((None, None), None) if known is None else (known.totals.ttft_s, known.build)
        return RegionalView(
            synced, version, is_newest, ready, self._starts, self._trouble, *links, ttft_s, build
        )

    def admin_port(self) -> AdminPort | None:
        newest = self._newest()
        return None if newest is None else AdminPort(newest.admin or "", self._authorization())

    def let_go(self) -> None:
        """There is no connection that would have to be closed."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self._stirred.clear()
            try:
                await self._turn()
            except (TimeoutError, aiohttp.ClientError, OSError, WireError, ValueError, KeyError) as error:
                self._failed(trouble_of(error))
            except ProvisionError as error:
                self._failed(error.message)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())

    async def _turn(self) -> None:
        order, source = self._order, self._fleet.agent_source(self._order.instance.zone.cloud)
        peers = None if order.peers_port is None else self._fleet.peer_files.of(order)
        release = self._release = release_of(order, source.agent_version(), peers)
        run = partial(source.run_agent, order.instance, release)
        self._take(await self._fleet.on_thread(run))
        trouble = await self._visit()
        newest = self._newest()
        if newest is None:
            waiting = next((one.trouble for one in self._processes if one.trouble), "")
            raise ValueError(waiting or trouble or "its Pod has not started yet")
        await self._follow(newest, order)
        self._responded_at = self._fleet.now()
        self._failures = 0
        held = next((one.trouble for one in self._processes if one.trouble), "")
        keys_problem = self._known[newest.id].keys_problem
        self._trouble = f"its next Pod does not start: {held}" if held else keys_problem
        if not self._has_passed and newest.is_reachable:  # `up` ends with an address that serves
            self._has_passed = True
            self._fleet.wake()

    def _take(self, processes: Sequence[AgentProcess]) -> None:
        """The processes that there are now. What those that are gone reported is void."""
        self._processes = processes
        for one in processes:
            if one.admin is not None and one.id not in self._known:
                self._starts += 1
                now = asyncio.get_running_loop().time
                self._known[one.id] = _Known(
                    TotalsFollower(*self._order.key, self._fleet.traffic, now),
                    UsageFollower(self._order.service, self._fleet.traffic, now),
                )
        for gone in self._known.keys() - {one.id for one in processes}:
            del self._known[gone]

    async def _visit(self) -> str:
        """Bring each process the table, and read its load. Returns why one did not respond."""
        trouble = ""
        for one in self._processes:
            if one.admin is None:
                continue
            known = self._known[one.id]
            try:
                await self._visit_one(one.admin, known)
                await known.usage.follow(
                    self._session, one.admin, self._authorization(), is_leaving=one.is_leaving
                )
            except (TimeoutError, aiohttp.ClientError, OSError, WireError, ValueError, KeyError) as error:
                known.acked, known.report = None, None
                known.load = replace(known.load, responsive=frozenset())
                trouble = trouble_of(error)
        before, self.load = self.load, merged([one.load for one in self._known.values()])
        self._report()
        if self.load.empty - before.empty or (self.load.queued > 0) != (before.queued > 0):
            self._fleet.wake()
        return trouble

    async def _visit_one(self, url: str, known: _Known) -> None:
        order, table = self._order, self._table
        if known.acked is None or known.acked.revision != table.revision:
            await self._push(url, table)
            known.acked = table
            self._fleet.wake()
        stats, sent_at = await self._stats(url, order.window_s)
        if stats.revision != known.acked.revision:
            known.acked = None  # it was started again: push again
            self._stirred.set()
            return
        known.report, known.keys_problem = served_report(stats, sent_at), stats.keys_problem
        known.build = stats.build
        known.load = load_of(stats, known.acked, drained_elsewhere(order.elsewhere, known.acked))
        await known.totals.follow(self._session, url, self._authorization())

    async def _follow(self, newest: AgentProcess, order: RegionalOrder) -> None:
        url = newest.admin or ""
        if order.peers_port is not None and await self.links.poll(self._session, url, self._authorization()):
            self._table = self.links.table(self._order)
            self._stirred.set()
        if order.counts_demand and await self.minutes.follow(self._session, url, self._authorization()):
            self._fleet.wake()

    def _report(self) -> None:
        reports = [one.report for one in self._known.values() if one.report is not None]
        if not reports:
            self._fleet.served.silent(*self._order.key)
            return
        self._fleet.served.reported(*self._order.key, merged_report(reports))

    def _newest(self) -> AgentProcess | None:
        """Return the newest process that has a table."""
        has_table = [
            one for one in self._processes if one.id in self._known and self._known[one.id].acked is not None
        ]
        return next((one for one in reversed(has_table) if not one.is_leaving), None) or (
            has_table[-1] if has_table else None
        )

    def _pause_s(self) -> float:
        if self._failures:
            return delay_s(self._failures, FIRST_PAUSE_S, LONGEST_PAUSE_S if self._has_passed else POLL_S)
        draining = any(target.state is Readiness.DRAINING for target in self._table.targets)
        hurries = draining or len(self._processes) > 1
        return (HURRY_S if hurries else POLL_S) * slowdown(len(self._table.targets))

    def _version(self) -> str:
        return self._fleet.agent_source(self._order.instance.zone.cloud).agent_version()


def _container_port(port: int) -> int:
    return port if port >= _FIRST_FREE_PORT else port + _MOVED_UP
