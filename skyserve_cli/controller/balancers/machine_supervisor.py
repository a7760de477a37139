"""Supervises one load balancer agent on a machine of its own, over SSH: its release, its table, and what it reports.

The agent has one connection, through which files go there and, by a forward on loopback, HTTP to its admin port, which only the controller
can reach. A supervisor on the machine (`lb.agent.supervisor`) sees to the process.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import aiohttp

from lb.config.schema import Build, Readiness, Table, WireError
from policies.backoff import delay_s
from provisioners.port.commands import HostConnection, ShellError
from provisioners.port.errors import ProvisionError
from provisioners.remote.ssh_tunnel import PortForward
from skyserve_cli.controller.balancers.agent_reader import AdminPort
from skyserve_cli.controller.balancers.agent_supervisor import AgentSupervisor, trouble_of
from skyserve_cli.controller.balancers.bundle import Bundle
from skyserve_cli.controller.balancers.deploy import (
    Release,
    Serving,
    deploy,
    end_frozen,
    release_of,
    serving,
    tidy,
)
from skyserve_cli.controller.balancers.fleet_services import FleetServices
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.balancers.totals_follower import TotalsFollower
from skyserve_cli.controller.balancers.usage_follower import UsageFollower
from skyserve_cli.controller.reconcile.demand import load_of, slowdown
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from skyserve_cli.controller.reconcile.region_tables import drained_elsewhere
from skyserve_cli.controller.reconcile.served_replicas import served_report

POLL_S = 1.0
HURRY_S = 0.1  # while something drains, or a release is about to take over
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LONGEST_INSTALL_PAUSE_S = (
    60.0  # where the libraries cannot be installed: each try costs that machine seconds of its CPU
)
FROZEN_AFTER_SILENCES = 4


class MachineAgentSupervisor(AgentSupervisor):
    """Supervises one agent on a machine of its own."""

    def __init__(
        self, fleet: FleetServices, session: aiohttp.ClientSession, order: RegionalOrder, now: float
    ) -> None:
        super().__init__(fleet, session, order, now)
        self._forward = PortForward()
        self._shell: HostConnection | None = None
        self._bundle: Bundle | None = None  # for the machine that is connected
        self._release: Release | None = None
        self._deployed: str | None = None  # the name of the release
        self._serving: Serving | None = None
        self._acked: Table | None = None
        self._silences = 0  # in a row, of an agent that can be reached
        self._installs = 0  # that failed, in a row
        self._keys_problem = ""
        self._build: Build | None = None
        self._elsewhere: frozenset[int] = frozenset()  # see `RegionalOrder`; of the table that was pushed
        clock = asyncio.get_running_loop().time
        self._totals = TotalsFollower(*order.key, fleet.traffic, clock)
        self._usage = UsageFollower(order.service, fleet.traffic, clock)

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
        links, ttft_s = self.links.shown(acked), self._totals.ttft_s
        build = self._build if serving_now else None
        return RegionalView(synced, version, newest, ready, starts, self._trouble, *links, ttft_s, build)

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
                is_silent = isinstance(error, TimeoutError) and not self._fleet.was_lost(started)
                self._failed_turn(trouble_of(error), is_silent=is_silent)
            except (ShellError, ProvisionError) as error:
                self._failed_turn(error.message)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())

    def _failed_turn(self, why: str, *, is_silent: bool = False) -> None:
        self._failed(why)
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
            self._serving = self._bundle = None
        shell, folder = self._shell, source.work_folder(order.instance)
        if self._bundle is None:
            self._bundle = await on_thread(partial(self._fleet.bundle_for, shell))
        release = self._release = release_of(order, self._bundle, self._fleet.peer_files.of)
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
        url = f"http://127.0.0.1:{self._forward.port}"
        if self._acked is None or self._acked.revision != self._table.revision:
            await self._take_table(url, self._table)
        await self._poll(url, order.window_s)
        asks = serving_now.release == release.name and order.peers_port is not None
        if asks and await self.links.poll(self._session, url, self._authorization()):
            self._table = self.links.table(self._order)
            self._stirred.set()
        await self._totals.follow(self._session, url, self._authorization())
        await self._usage.follow(self._session, url, self._authorization())
        if order.counts_demand and await self.minutes.follow(self._session, url, self._authorization()):
            self._fleet.wake()
        self._responded_at = self._fleet.now()
        self._failures = self._silences = 0
        is_refused = serving_now.refused == release.name
        self._trouble = (
            "its newest code does not come up there; the code before goes on"
            if is_refused
            else self._keys_problem
        )
        if not self._has_passed:
            self._has_passed = True
            self._fleet.wake()

    async def _take_table(self, url: str, table: Table) -> None:
        await self._push(url, table)
        self._acked = table
        self._fleet.wake()
        self._elsewhere = drained_elsewhere(self._order.elsewhere, table)

    async def _poll(self, url: str, window_s: float) -> None:
        stats, sent_at = await self._stats(url, window_s)
        table = self._acked
        if table is not None and stats.revision != table.revision:
            self._acked = None  # it began with an older one: push again
            self._stirred.set()
            return
        self._fleet.served.reported(*self._order.key, served_report(stats, sent_at))
        self._keys_problem, self._build = stats.keys_problem, stats.build
        load = load_of(stats, table, self._elsewhere)
        stirring = load.empty - self.load.empty or (load.queued > 0) != (self.load.queued > 0)
        self.load = load
        if stirring:
            self._fleet.wake()
