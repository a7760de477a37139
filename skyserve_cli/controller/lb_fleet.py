"""Keeps the load balancer agents: one process per service, beside the controller.

An agent outlives the controller (it is the start of a session of its own) and goes on serving with its last
table; a new controller finds it by its address file and takes it back. An agent that dies is seen at once (its
pidfd becomes readable) and started again on the same port, with the table it had.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from lb.wire import Stats, Table, TargetState, WireError
from policies.model import Load
from skyserve_cli.controller.ports import AgentOrder

log = logging.getLogger(__name__)

POLL_S = 1.0
DRAIN_POLL_S = 0.1
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
LONGEST_RESTART_S = 5.0
WINDOW_S = 60.0
SHORTEST_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class AgentView:
    """What `serve status` tells about an agent. `acked`: it has the newest table."""

    alive: bool
    acked: bool
    ready_targets: int
    restarts: int


@dataclass(slots=True)
class _Agent:
    """A running agent process. `process` is None for one that an earlier controller started."""

    pid: int
    admin_url: str
    token: str
    shape: tuple[object, ...]
    process: subprocess.Popen[bytes] | None


class ProcessFleet:
    """The daemon's fleet."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._folder = folder
        self._loop = loop
        self._wake = wake
        self._keepers: dict[str, _Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        timeout = aiohttp.ClientTimeout(total=5.0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

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
        keeper = self._keepers.get(service)
        return Load() if keeper is None else keeper.load

    def view(self, service: str) -> AgentView:
        keeper = self._keepers.get(service)
        return AgentView(False, False, 0, 0) if keeper is None else keeper.view()

    def _apply(self, orders: Mapping[str, AgentOrder | None]) -> None:
        """Also finds agents that an earlier controller left for services that have gone down since."""
        left = {path.parent.name for path in self._folder.glob("*/agent.json")}
        for service in self._keepers.keys() | left | orders.keys():
            if service in orders and orders[service] is None:
                continue
            keeper = self._keepers.get(service)
            if keeper is None:
                assert self._session is not None  # noqa: S101 - start() comes first
                keeper = self._keepers[service] = _Keeper(self._folder / service, self._session, self._wake)
            keeper.want(orders.get(service))
            task = self._tasks.get(service)
            if task is None or task.done():
                if keeper.finished:
                    del self._keepers[service]
                    self._tasks.pop(service, None)
                else:
                    self._tasks[service] = self._loop.create_task(keeper.run())


class _Keeper:
    """Looks after the agent of one service."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, wake: Callable[[], None]) -> None:
        self._folder = folder
        self._session = session
        self._wake = wake
        self._order: AgentOrder | None = None
        self._agent: _Agent | None = None
        self._stirred = asyncio.Event()
        self._acked: Table | None = None
        self._restarts = -1
        self._failures = 0
        self.load = Load()
        self.finished = False

    def want(self, order: AgentOrder | None) -> None:
        if order != self._order or order is None:
            self._order = order
            self.finished = self.finished and order is None
            self._stirred.set()

    def view(self) -> AgentView:
        wanted = self._order.table.revision if self._order is not None else None
        acked = self._acked is not None and self._acked.revision == wanted
        ready = 0
        if acked and self._acked is not None:
            ready = sum(target.state is TargetState.READY for target in self._acked.targets)
        return AgentView(self._agent is not None, acked, ready, max(0, self._restarts))

    async def run(self) -> None:
        """Until the agent is not wanted any more and is gone."""
        while True:
            self._stirred.clear()
            try:
                await self._turn()
            except (TimeoutError, aiohttp.ClientError, OSError, WireError, ValueError) as error:
                log.warning("load balancer %s: %s: %s", self._folder.name, type(error).__name__, error)
                self._failures += 1
            if self.finished:
                return
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), self._pause_s())

    def _pause_s(self) -> float:
        if self._failures:
            return float(min(LONGEST_RESTART_S, 0.05 * 2 ** min(self._failures, 10)))
        table = self._acked
        draining = table is not None and any(t.state is TargetState.DRAINING for t in table.targets)
        return DRAIN_POLL_S if draining else POLL_S

    async def _turn(self) -> None:
        order = self._order
        if order is None:
            await self._end()
            return
        shape = _shape(order)
        if self._agent is not None and (self._agent.shape != shape or not _alive(self._agent)):
            await self._lose(self._agent)
        if self._agent is None:
            self._agent = await self._adopt(shape) or await self._spawn(order)
            self._restarts = max(0, self._restarts)
            self._watch(self._agent)
        agent = self._agent
        if self._acked is None or self._acked.revision != order.table.revision:
            await self._push(agent, order.table)
        await self._ask(agent)
        self._failures = 0

    async def _push(self, agent: _Agent, table: Table) -> None:
        async with self._session.put(
            f"{agent.admin_url}/-/targets", json=table.to_json(), headers=_bearer(agent)
        ) as response:
            if response.status != 200:
                raise ValueError(f"push refused: {response.status} {(await response.text())[:200]}")
        self._acked = table
        self._wake()

    async def _ask(self, agent: _Agent) -> None:
        url = f"{agent.admin_url}/-/stats?window_s={WINDOW_S:g}"
        async with self._session.get(url, headers=_bearer(agent)) as response:
            response.raise_for_status()
            stats = Stats.from_json(await response.json())
        table = self._acked
        if table is not None and stats.revision != table.revision:
            self._acked = None  # somebody restarted it behind our back: push again
            self._stirred.set()
            return
        load = _load(stats, table)
        stirring = load.empty - self.load.empty or (load.queued > 0) != (self.load.queued > 0)
        self.load = load
        if stirring:
            self._wake()

    async def _adopt(self, shape: tuple[object, ...] | None) -> _Agent | None:
        """The agent an earlier controller left, if it lives and has the wanted shape (None: any)."""
        try:
            told = self._told()
            if told is None:
                return None
            url = f"http://127.0.0.1:{told['admin_port']}"
            found = _Agent(int(told["pid"]), url, self._token(), self._saved_shape(), None)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not _alive(found) or not await self._is_ours(found):
            return None
        if shape is not None and found.shape != shape:
            await self._lose(found)
            return None
        return found

    async def _is_ours(self, agent: _Agent) -> bool:
        """A pid may have been given to a stranger, but a stranger does not know the token."""
        try:
            async with self._session.get(f"{agent.admin_url}/-/live", headers=_bearer(agent)) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def _spawn(self, order: AgentOrder) -> _Agent:
        process = self._start_process(order)
        self._restarts += 1  # from -1: the first start is none
        log.info("start load balancer service=%s pid=%d port=%d", order.service, process.pid, order.port)
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            told = self._told()
            if told is not None:
                url = f"http://127.0.0.1:{told['admin_port']}"
                return _Agent(process.pid, url, self._token(), _shape(order), process)
            if process.poll() is not None:
                raise OSError(f"the agent exited with {process.returncode}: {self._last_words()}")
            await asyncio.sleep(0.02)
        process.kill()
        raise OSError(f"the agent did not listen within {START_TIMEOUT_S:g} s")

    def _start_process(self, order: AgentOrder) -> subprocess.Popen[bytes]:
        """The agent inherits a lock that it holds for as long as it lives: a controller that was killed while
        it started one cannot be followed by one that starts a second."""
        self._folder.mkdir(exist_ok=True, mode=0o700)
        lock = os.open(self._folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shape = json.dumps(_shape(order))
            (self._folder / "shape.json").write_text(shape)
            _write_secret(self._folder / "token", secrets.token_urlsafe(32))
            command = agent_command(order, self._folder / "token", self._folder / "table.json")
            with (
                (self._folder / "agent.json").open("wb") as out,
                (self._folder / "agent.log").open("ab") as err,
            ):
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)

    def _told(self) -> dict[str, int] | None:
        """What the agent prints once it listens: its addresses and its pid."""
        text = (self._folder / "agent.json").read_text()
        if not text.endswith("\n"):
            return None
        told: dict[str, int] = json.loads(text)
        return told

    def _token(self) -> str:
        return (self._folder / "token").read_text()

    def _saved_shape(self) -> tuple[object, ...]:
        return tuple(json.loads((self._folder / "shape.json").read_text()))

    def _last_words(self) -> str:
        lines = (self._folder / "agent.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"

    def _watch(self, agent: _Agent) -> None:
        """Be told at once when the process ends."""
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

    async def _lose(self, agent: _Agent) -> None:
        """End the agent, if it is not dead already, and forget what it knew."""
        await _stop(agent)
        self._agent = None
        self._acked = None
        self.load = Load()

    async def _end(self) -> None:
        if self._agent is None:
            self._agent = await self._adopt(None)
        if self._agent is not None:
            await self._lose(self._agent)
        if self._is_held():
            raise OSError("an agent lives that does not answer; trying again")
        self._clear()
        self.finished = True
        self._wake()

    def _is_held(self) -> bool:
        """Whether some agent holds the lock of this folder: one that is starting, or has stopped answering."""
        try:
            lock = os.open(self._folder / "agent.lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _clear(self) -> None:
        for name in ("agent.json", "table.json", "token", "shape.json", "agent.lock"):
            (self._folder / name).unlink(missing_ok=True)


def agent_command(order: AgentOrder, token_file: Path, table_file: Path) -> list[str]:
    """How an agent is started. Nothing in it is a secret."""
    command = [sys.executable, "-m", "lb", "--service", order.service, "--host", order.host]
    command += ["--port", str(order.port), "--admin-host", "127.0.0.1", "--admin-port", "0"]
    command += ["--admin-token-file", str(token_file), "--table-file", str(table_file)]
    command += ["--policy", order.table.policy]
    if order.tls is not None:
        command += ["--tls-certfile", order.tls[0], "--tls-keyfile", order.tls[1]]
    return command


def _shape(order: AgentOrder) -> tuple[object, ...]:
    """What cannot be changed without starting the agent anew."""
    return (order.host, order.port, *(order.tls or ()))


def _load(stats: Stats, table: Table | None) -> Load:
    draining = {t.id for t in table.targets if t.state is TargetState.DRAINING} if table else set()
    busy = {target.id for target in stats.targets if target.in_flight > 0}
    return Load(
        # An agent that has just been started cannot tell of more than it has seen.
        window_s=min(stats.window_s, max(SHORTEST_WINDOW_S, stats.uptime_s)),
        requests=stats.requests,
        in_flight=stats.in_flight,
        queued=stats.queued,
        empty=frozenset(int(name) for name in draining - busy),
        known=True,
    )


def _bearer(agent: _Agent) -> dict[str, str]:
    return {"Authorization": f"Bearer {agent.token}"}


def _alive(agent: _Agent) -> bool:
    """Asks the pidfd: a dead process whose parent has not buried it still has a pid that takes signals."""
    if agent.process is not None:
        return agent.process.poll() is None
    try:
        fd = os.pidfd_open(agent.pid)
    except ProcessLookupError:
        return False
    try:
        watch = select.poll()
        watch.register(fd, select.POLLIN)
        return not watch.poll(0)
    finally:
        os.close(fd)


async def _stop(agent: _Agent) -> None:
    """Ask, then insist."""
    for sign, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
        if not _alive(agent):
            return
        with suppress(ProcessLookupError):
            os.kill(agent.pid, sign)
        for _ in range(int(patience_s / 0.05)):
            if not _alive(agent):
                return
            await asyncio.sleep(0.05)


def _write_secret(path: Path, content: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(content)
