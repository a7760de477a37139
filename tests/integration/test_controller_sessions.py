"""Sessions on a real sshd, over each way that leads to a controller, and what ends them."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from policies.model import CapacityType, Zone
from provisioners.port.base import Instance, InstanceState
from provisioners.port.commands import HostConnection, Login, ShellError
from provisioners.remote.ssh import connect
from skyserve_cli.commands.sessions import relay
from skyserve_cli.controller.api.access import AccessRole
from skyserve_cli.controller.api.client import ControllerClient, RefusedError
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.remote import Remote
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.sessions.place import Place
from skyserve_cli.controller.sessions.relay import CHUNK, MOST_PER_CALLER, WINDOW, Sessions
from skyserve_cli.deployment.cluster import certificate
from skyserve_cli.home import Home
from skyserve_cli.output import CommandFailed
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import boot, login, until
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.integration import sshd
from tests.integration.sshd import Sshd
from tests.integration.test_controller_api import TOKEN, Controller, free_port

WHY_NOT = vm_world.why_not() or sshd.why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

FOLDER = ".skyserve/machines/t"
PATH = "/v1/services/chat/replicas/1/session"
INSTANCE = Instance(
    "i-1", "t", "own", "chat", 1, Zone("aws", "r", "z"), CapacityType.SPOT, InstanceState.RUNNING
)


class OneMachine:
    """A cloud with one machine."""

    name = "aws"

    def __init__(self, vm: Vm) -> None:
        self._vm = vm

    def login(self, instance: Instance, node: int = 0) -> Login:
        return login(self._vm)

    def log_in(self, instance: Instance) -> HostConnection:
        return connect(login(self._vm))

    def work_folder(self, instance: Instance, node: int = 0) -> str:
        return f"{FOLDER}/work"


class World:
    """A controller with one machine. `said` is what it wrote into the event log."""

    def __init__(self, controller: Controller, vm: Vm, host: Sshd, folder: Path) -> None:
        self.controller = controller
        self.vm = vm
        self.host = host
        self.folder = folder
        self.said: list[str] = []
        order = {"image": "", "env": {"COLOUR": "green"}, "token": "t", "gpus": 0, "has_port": True}
        order |= {"secrets_path": "/none", "claim_path": "/none"}
        vm.run(
            f"cd ~skyserve && mkdir -p {FOLDER}/work && chown -R skyserve .skyserve && "
            f"echo {shlex.quote(json.dumps(order))} >{FOLDER}/order.json; rm -f {FOLDER}/work/*"
        )
        place = Place("chat", 1, 0, OneMachine(vm), INSTANCE)  # type: ignore[arg-type]
        sessions = Sessions(lambda place, sentence: self.said.append(sentence))

        async def serve(request: web.Request) -> web.StreamResponse:
            return await sessions.serve(request, place)

        path = "/v1/services/{name}/replicas/{id}/session"
        self.api = Api(TOKEN, [Route("GET", path, serve, AccessRole.OPERATOR)], controller.parts)

    async def token(self, name: str) -> str:
        body = {"name": name, "role": "operator", "services": ["chat"]}
        return str((await self.controller.call("POST", "/v1/tokens", body))[1]["token"])

    def processes(self, mark: str) -> str:
        return self.vm.run(f"pgrep -f {shlex.quote(mark)} || true")


@pytest.fixture(scope="module")
def vm() -> Iterator[Vm]:
    with VmWorld() as vms:
        made = boot(vms, "t")

        def lets_us_in() -> bool:
            try:
                connect(login(made)).close()
            except ShellError:
                return False
            return True

        until(lets_us_in)
        yield made


@pytest.fixture
async def world(tmp_path: Path, vm: Vm) -> AsyncIterator[World]:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    first = free_port()
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    controller = Controller(home, fleet, range(first, first + 20))
    await controller.server.start_server()
    host = Sshd(tmp_path / "sshd")
    host.start()
    yield World(controller, vm, host, tmp_path)
    host.stop()
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


async def by_port(world: World, token: str) -> ControllerClient:
    server = TestServer(world.api.app(is_remote=True))
    await server.start_server()
    return ControllerClient(world.controller.home, Remote(f"http://127.0.0.1:{server.port}", token))


async def by_tls(world: World) -> ControllerClient:
    for name, content in certificate("ns", time.time()).items():
        (world.folder / name).write_bytes(content)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(world.folder / "tls.crt", world.folder / "tls.key")
    server = TestServer(world.api.app(is_remote=True), scheme="https")
    await server.start_server(ssl=context)
    remote = Remote(
        f"https://localhost:{server.port}", await world.token("ada"), str(world.folder / "tls.crt")
    )
    return ControllerClient(world.controller.home, remote)


async def by_socket(world: World) -> ControllerClient:
    runner = web.AppRunner(world.api.app())
    await runner.setup()
    await web.UnixSite(runner, str(world.controller.home.controller_socket)).start()
    return ControllerClient(world.controller.home)


async def by_ssh(world: World) -> ControllerClient:
    await by_socket(world)
    at, host = world.controller.home, world.host
    remote = Remote(host.url, "", "", str(at.root), str(host.identity), str(host.known_hosts))
    return ControllerClient(at, remote)


WAYS = {"the socket": by_socket, "TLS": by_tls, "SSH": by_ssh}


@pytest.mark.parametrize("way", WAYS)
async def test_streams_and_the_exit_code_cross_every_way(world: World, way: str) -> None:
    client = await WAYS[way](world)
    sent = os.urandom(2 << 20)
    out, err = bytearray(), bytearray()

    def run() -> int:
        (world.folder / "input").write_bytes(sent)
        with (world.folder / "input").open("rb") as file:
            link = client.session("chat", 1)
            script = "cat; echo $COLOUR $(pwd) >&2; exit 7"
            return relay(link, script, out=out.extend, err=err.extend, stdin=file.fileno())

    assert await asyncio.to_thread(run) == 7
    assert bytes(out) == sent
    assert err.decode() == f"green /home/skyserve/{FOLDER}/work\n"

    def again() -> int:
        return relay(client.session("chat", 1), "exit 3", out=out.extend, err=err.extend)

    assert await asyncio.to_thread(again) == 3
    assert world.said == [
        "a command begins",
        "a command ends: exit code 7",
        "a command begins",
        "a command ends: exit code 3",
    ]


async def test_a_revoked_token_has_no_session_two_seconds_later(world: World) -> None:
    client = await by_port(world, await world.token("ada"))
    out = bytearray()

    def run() -> str:
        script = "echo started; exec sleep 7654.25"
        try:
            return str(relay(client.session("chat", 1), script, out=out.extend, err=out.extend))
        except CommandFailed as error:
            return str(error)

    running = asyncio.create_task(asyncio.to_thread(run))
    await eventually(lambda: b"started" in out)
    assert world.processes("[7]654.25")
    await world.controller.call("POST", "/v1/tokens/ada/revoke", {})
    revoked_at = time.monotonic()
    assert await running == "the token was revoked, or the login is over"
    print(f"ended after {time.monotonic() - revoked_at:.2f} s")
    await eventually(lambda: not world.processes("[7]654.25"))
    assert world.said[-1] == "a command ends: the token was revoked, or the login is over"
    with pytest.raises(RefusedError, match="missing, wrong or revoked"):
        await asyncio.to_thread(client.session, "chat", 1)


async def test_a_caller_who_does_not_read_slows_the_program_down(world: World) -> None:
    def progress() -> str:
        return world.vm.run(f"cat ~skyserve/{FOLDER}/work/progress 2>/dev/null || true")

    script = "n=0; while head -c 65536 /dev/zero; do n=$((n+1)); echo $n >progress.new; mv progress.new progress; done"
    async with raw(world) as link:
        await link.send_json({"script": script})
        await eventually(progress)
        before = ""
        async with asyncio.timeout(20):
            while before != (before := progress()):  # noqa: ASYNC110 (it is of a machine)
                await asyncio.sleep(1.5)
        assert int(before) < 20 * 16  # 20 MB: what all sockets between hold
    await eventually(lambda: "the caller has gone" in world.said[-1])
    await eventually(lambda: not world.processes("[h]ead -c 65536"))


async def test_what_no_client_of_ours_does_is_refused(world: World) -> None:
    server = TestServer(world.api.app(is_remote=True))
    await server.start_server()
    headers = {"Authorization": f"Bearer {await world.token('ada')}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(server.make_url(PATH)) as plain:
            assert plain.status == 426
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect(server.make_url(PATH), origin="https://elsewhere.example")
        for first in ("{", "[]", '{"script": 3}', '{"script": null, "term": ["xterm", 0, 24]}'):
            async with session.ws_connect(server.make_url(PATH)) as link:
                await link.send_str(first)
                assert (await link.receive_json())["error"].startswith("the first message is wrong")
        assert world.said == []
        async with session.ws_connect(server.make_url(PATH)) as link:
            await link.send_json({"script": "sleep 7654.75", "stdin": True})
            for _ in range(WINDOW // CHUNK + 1):
                await link.send_bytes(bytes(CHUNK))
            await eventually(lambda: "more input came" in "".join(world.said[-1:]))
        open_links = [await session.ws_connect(server.make_url(PATH)) for _ in range(MOST_PER_CALLER)]
        with pytest.raises(aiohttp.WSServerHandshakeError, match="429"):
            await session.ws_connect(server.make_url(PATH))
        for link in open_links:
            await link.close()
        await (await session.ws_connect(server.make_url(PATH))).close()
    await server.close()


def raw(world: World) -> Any:
    """A WebSocket that nothing reads."""

    class Raw:
        async def __aenter__(self) -> aiohttp.ClientWebSocketResponse:
            self._server = TestServer(world.api.app())
            await self._server.start_server()
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"})
            self._link = await self._session.ws_connect(self._server.make_url(PATH), max_msg_size=1 << 20)
            return self._link

        async def __aexit__(self, *_: object) -> None:
            self._link._response.close()
            await self._session.close()

    return Raw()


async def eventually(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 (it is of other processes)
            await asyncio.sleep(0.02)
