"""Load balancer agents as real processes: started, given their table, taken back, restarted, stopped."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lb.config.options import Access, ApiKey
from lb.config.schema import Limits, Readiness, Table, Target
from policies.history import Load
from skyserve_cli.controller.balancers import local_fleet
from skyserve_cli.controller.balancers.agent_process import AgentFolder
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.reconcile.ports import AgentOrder
from skyserve_cli.controller.reconcile.traffic_buffer import TrafficBuffer

pytestmark = pytest.mark.long

WAIT = aiohttp.ClientTimeout(total=10.0)


@dataclass
class World:
    """Fleets over one folder, a backend, and every agent they ever started."""

    folder: Path
    backend: str
    fleets: list[LocalFleet] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    woken: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.woken += 1

    async def fleet(self) -> LocalFleet:
        fleet = LocalFleet(self.folder, asyncio.get_running_loop(), self.wake)
        await fleet.start()
        self.fleets.append(fleet)
        return fleet

    def order(self, *states: Readiness, port: int, service: str = "chat", revision: str = "1") -> AgentOrder:
        targets = tuple(Target(str(i), self.backend, state=state) for i, state in enumerate(states, 1))
        table = Table(service, revision, targets, "least_load", Limits(hold_s=0.0))
        return AgentOrder(service, "127.0.0.1", port, table)

    def agents(self) -> list[psutil.Process]:
        """The living agents of this folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            if str(self.folder) in " ".join(line) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
                self.pids.add(process.pid)
        return found

    async def eventually(self, holds: Callable[[], bool]) -> None:
        for _ in range(1500):
            if holds():
                return
            await asyncio.sleep(0.02)
        log = "".join(path.read_text() for path in self.folder.glob("*/agent.log"))
        raise AssertionError(f"it did not come to be; the agents said: {log[-2000:]}")

    async def until_status(self, port: int, status: int) -> None:
        for _ in range(1500):
            if await self.get(port) == status:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"port {port} never had the status {status}")

    async def get(self, port: int, path: str = "/") -> int:
        """The status of a request, 0 where no one listens."""
        try:
            async with (
                aiohttp.ClientSession(timeout=WAIT) as session,
                session.get(f"http://127.0.0.1:{port}{path}") as answer,
            ):
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "lb", "")

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await world.release.wait()
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    world.backend = str(server.make_url("/")).rstrip("/")
    yield world
    world.release.set()
    for fleet in world.fleets:
        await fleet.close()
    for process in world.agents():
        process.kill()
    await server.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    return found


def synced(fleet: LocalFleet, service: str = "chat") -> Callable[[], bool]:
    return lambda: fleet.view(service).acked


@pytest.mark.parametrize("is_large", [False, True])
async def test_an_agent_is_started_serves_its_table_and_is_stopped(
    world: World, port: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(local_fleet, "LARGE_BYTES", 0)
        monkeypatch.setattr(local_fleet, "MANY_TARGETS", 0)
    fleet = await world.fleet()
    assert fleet.load("chat") == Load()
    assert not fleet.view("chat").alive
    fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(fleet))
    view = fleet.view("chat")
    assert (view.alive, view.ready_targets, view.restarts) == (True, 1, 0)
    await world.eventually(lambda: fleet.view("chat").build is not None)
    assert [await world.get(port) for _ in range(3)] == [200] * 3
    await world.eventually(lambda: fleet.load("chat").requests == 3)
    assert fleet.load("chat").known
    assert 10.0 <= fleet.load("chat").window_s < 60.0  # it cannot tell of a minute it has not seen
    assert len(world.agents()) == 1
    fleet.ensure({})
    await world.eventually(lambda: not world.agents())
    await world.eventually(lambda: not list(world.folder.glob("*/agent.json")))
    assert await world.get(port) == 0
    assert {path.name for path in (world.folder / "chat").iterdir()} <= {"agent.log"}


async def test_an_agent_that_starts_is_there_until_it_is_gone(world: World, port: int) -> None:
    """`serve down` waits for it: it would run on if the controller stopped while it starts."""
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(lambda: bool(world.agents()))
    assert not fleet.view("chat").acked
    fleet.ensure({})
    while world.agents():
        assert fleet.view("chat").alive
        await asyncio.sleep(0.01)
    await world.eventually(lambda: not fleet.view("chat").alive)


async def test_secrets_of_an_agent_are_not_on_its_command_line(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(port=port)})
    await world.eventually(synced(fleet))
    token = (world.folder / "chat" / "token").read_text()
    assert (world.folder / "chat" / "token").stat().st_mode & 0o777 == 0o600
    assert (world.folder / "chat").stat().st_mode & 0o777 == 0o700
    (process,) = world.agents()
    assert token not in " ".join(process.cmdline())


async def test_an_agent_knows_its_keys_before_anybody_can_call(world: World, port: int) -> None:
    order = world.order(Readiness.READY, port=port)
    key = ApiKey("a", hashlib.sha256(b"of the house").hexdigest())
    order = replace(order, table=replace(order.table, access=Access((key,))))
    folder = AgentFolder(world.folder / "chat")
    world.folder.mkdir()
    process = folder.start(order)  # and no table is pushed to it
    await world.eventually(lambda: folder.started(process, order) is not None)
    assert await world.get(port) == 401
    assert [agent.pid for agent in world.agents()] == [process.pid]
    process.kill()
    process.wait()


async def test_a_new_table_is_pushed_to_the_same_process(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(port=port)})
    await world.eventually(synced(fleet))
    before = [process.pid for process in world.agents()]
    assert await world.get(port) == 503
    fleet.ensure({"chat": world.order(Readiness.READY, port=port, revision="2")})
    await world.eventually(lambda: fleet.view("chat").ready_targets == 1)
    assert await world.get(port) == 200
    assert [process.pid for process in world.agents()] == before


async def test_the_load_is_told_over_the_window_that_is_ordered(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": replace(world.order(Readiness.READY, port=port), window_s=1.0)})
    await world.eventually(synced(fleet))
    slow = [asyncio.create_task(world.get(port, "/slow")) for _ in range(2)]
    await world.eventually(lambda: fleet.load("chat").ongoing > 1.9)
    assert (fleet.load("chat").window_s, fleet.load("chat").in_flight) == (1.0, 2)
    await world.eventually(lambda: fleet.load("chat").requests == 0)
    world.release.set()
    assert [await one for one in slow] == [200, 200]
    await world.eventually(lambda: fleet.load("chat").ongoing < 0.1)
    fleet.ensure({"chat": replace(world.order(Readiness.READY, port=port), window_s=5.0)})
    await world.eventually(lambda: fleet.load("chat").window_s == 5.0)


async def test_a_drained_target_is_empty_when_its_last_request_has_ended(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(Readiness.READY, Readiness.UNHEALTHY, port=port)})
    await world.eventually(synced(fleet))
    slow = asyncio.create_task(world.get(port, "/slow"))
    await world.eventually(lambda: fleet.load("chat").in_flight == 1)
    fleet.ensure({"chat": world.order(Readiness.DRAINING, Readiness.DRAINING, port=port, revision="2")})
    await world.eventually(lambda: fleet.load("chat").empty == {2})
    woken = world.woken
    world.release.set()
    assert await slow == 200
    await world.eventually(lambda: fleet.load("chat").empty == {1, 2})
    assert world.woken > woken


@pytest.mark.parametrize("parting", ["closed", "dropped"])
async def test_the_next_controller_takes_the_agent_back(world: World, port: int, parting: str) -> None:
    """Dropped: as after a SIGKILL, nothing was said to anybody."""
    first = await world.fleet()
    first.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(first))
    before = [process.pid for process in world.agents()]
    await first.close()
    if parting == "dropped":
        first._supervisors.clear()
    assert await world.get(port) == 200
    second = await world.fleet()
    second.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(second))
    assert [process.pid for process in world.agents()] == before
    assert second.view("chat").restarts == 0
    await world.eventually(lambda: second.load("chat").requests == 1)
    second.ensure({})
    await world.eventually(lambda: not world.agents())


async def test_an_agent_left_for_a_service_that_has_gone_down_is_ended(world: World, port: int) -> None:
    first = await world.fleet()
    first.ensure({"chat": world.order(port=port)})
    await world.eventually(synced(first))
    await first.close()
    second = await world.fleet()
    second.ensure({})
    await world.eventually(lambda: not world.agents())


async def test_an_order_that_cannot_be_given_leaves_the_agent_as_it_is(world: World, port: int) -> None:
    first = await world.fleet()
    first.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(first))
    await first.close()
    second = await world.fleet()
    for fleet in (first, second):
        fleet.ensure({"chat": None})
    second.ensure({"chat": None, "other": world.order(port=_another(port), service="other")})
    await world.eventually(synced(second, "other"))
    assert len(world.agents()) == 2
    assert await world.get(port) == 200


def _another(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    assert found != port
    return found


@pytest.mark.parametrize("adopted", [False, True], ids=["its own", "taken over"])
async def test_a_killed_agent_is_back_with_its_table_on_the_same_port(
    world: World, port: int, adopted: bool
) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(fleet))
    if adopted:
        await fleet.close()
        fleet = await world.fleet()
        fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
        await world.eventually(synced(fleet))
    (process,) = world.agents()
    os.kill(process.pid, signal.SIGKILL)
    await world.eventually(lambda: [one.pid for one in world.agents()] not in ([], [process.pid]))
    await world.eventually(lambda: fleet.view("chat").acked and fleet.view("chat").restarts == 1)
    assert await world.get(port) == 200
    assert len(world.agents()) == 1


async def test_an_agent_killed_while_nobody_looked_is_started_by_the_next_controller(
    world: World, port: int
) -> None:
    first = await world.fleet()
    first.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(first))
    await first.close()
    (process,) = world.agents()
    os.kill(process.pid, signal.SIGKILL)
    await world.eventually(lambda: not world.agents())
    second = await world.fleet()
    second.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(second))
    assert await world.get(port) == 200


async def test_another_port_is_opened_by_the_same_process(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(fleet))
    before = [process.pid for process in world.agents()]
    slow = asyncio.create_task(world.get(port, "/slow"))
    await world.eventually(lambda: fleet.load("chat").in_flight == 1)
    moved = _another(port)
    fleet.ensure({"chat": world.order(Readiness.READY, port=moved)})  # the table itself is the same
    await world.until_status(moved, 200)
    await world.until_status(port, 0)
    assert not slow.done()
    world.release.set()
    assert await slow == 200
    assert [process.pid for process in world.agents()] == before
    os.kill(before[0], signal.SIGKILL)
    await world.eventually(lambda: fleet.view("chat").acked and fleet.view("chat").restarts == 1)
    assert [await world.get(moved), await world.get(port)] == [200, 0]


async def test_a_port_that_is_taken_leaves_the_agent_where_it_listens_with_its_newest_targets(
    world: World, port: int
) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(port=port)})
    await world.eventually(synced(fleet))
    assert await world.get(port) == 503
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        fleet.ensure({"chat": world.order(Readiness.READY, port=taken, revision="2")})
        await world.eventually(lambda: fleet.view("chat").ready_targets == 1)
        assert await world.get(port) == 200
        assert fleet.view("chat").trouble == (
            f"cannot listen on 127.0.0.1:{taken}: Address already in use; still listening on 127.0.0.1:{port}"
        )
    await world.eventually(lambda: not fleet.view("chat").trouble)
    assert await world.get(taken) == 200


async def test_a_port_in_use_is_tried_again_until_it_is_free(world: World, port: int) -> None:
    fleet = await world.fleet()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
        log = world.folder / "chat" / "agent.log"
        await world.eventually(lambda: log.exists() and log.read_text().count("\n") >= 2)
        assert not fleet.view("chat").acked
    await world.eventually(synced(fleet))
    assert await world.get(port) == 200


async def test_two_controllers_never_start_two_agents(world: World, port: int) -> None:
    fleets = [await world.fleet() for _ in range(3)]
    for fleet in fleets:
        fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    for fleet in fleets:
        await world.eventually(synced(fleet))
    assert len(world.agents()) == 1
    for fleet in fleets[1:]:
        await fleet.close()
    fleets[0].ensure({})
    await world.eventually(lambda: not world.agents())


async def test_a_frozen_agent_is_replaced_by_one_that_serves(world: World, port: int) -> None:
    fleet = await world.fleet()
    fleet.ensure({"chat": world.order(Readiness.READY, port=port)})
    await world.eventually(synced(fleet))
    (frozen,) = world.agents()
    frozen.send_signal(signal.SIGSTOP)
    await world.eventually(lambda: fleet.view("chat").restarts == 1 and fleet.view("chat").acked)
    assert [agent.pid for agent in world.agents()] != [frozen.pid]
    assert await world.get(port) == 200


async def test_what_keys_have_used_is_read_from_an_agent_and_once_more_when_it_has_ended(
    world: World, port: int
) -> None:
    traffic = TrafficBuffer()
    fleet = LocalFleet(world.folder, asyncio.get_running_loop(), world.wake, traffic=traffic)
    await fleet.start()
    world.fleets.append(fleet)
    order = world.order(Readiness.READY, port=port)
    fleet.ensure({"chat": order})
    await world.until_status(port, 200)
    found: list[int] = []

    def counted() -> bool:
        found.extend(row.requests for row in traffic.usage.take(10).values())
        return bool(found)

    await world.eventually(counted)
    before = found[-1]
    assert await world.get(port) == 200  # not reported yet: the next poll is 5 s away
    fleet.ensure({})
    await world.eventually(lambda: not world.agents())
    await world.eventually(lambda: counted() and found[-1] > before)
    assert not list((world.folder / "chat").glob("*.usage*"))
