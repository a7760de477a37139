"""TLS in front of a replica: the machine's program between a load balancer's own connections and a server on loopback.

All that need the program itself run with its part in C, and without.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from lb.config.schema import Target
from lb.core.failures import described
from lb.engines.http_get import HttpGetter
from lb.http.upstream import Pools
from provisioners.remote.certificates import Authority
from provisioners.remote.host_agent import tls_proxy as front_module
from provisioners.remote.host_agent.bundle import agent_bundle
from provisioners.remote.host_agent.files import is_locked
from provisioners.remote.host_agent.front_port import why_interpreted
from provisioners.remote.host_agent.tls_proxy import CERTIFICATE, LOCK, port_of
from provisioners.remote.host_agent.tls_relay import LIBRARY
from skyserve_cli.controller.readiness import ReplicaLine
from skyserve_cli.controller.reconcile.ports import ProbeOrder
from skyserve_cli.spec.model import Probe

AUTHORITY = Authority(bytes(32), "own")
OTHER = Authority(bytes([1]) * 32, "own")
TOKEN = "own-chat-1-0123456789"

Bundle = Callable[[], bytes]
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Front:
    folder: Path
    process: subprocess.Popen[bytes]
    port: int

    def connect(
        self, authority: Authority = AUTHORITY, name: str = TOKEN
    ) -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.certificate)
        return asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=name)

    def target(self, name: str = TOKEN) -> Target:
        return Target("1", f"https://127.0.0.1:{self.port}", tls_name=name, health_path="/health")


def started(folder: Path, agent: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(agent), "front", str(folder)], stderr=subprocess.PIPE)


@pytest.fixture(params=["native", "interpreted"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    native = request.param == "native"
    if native and not is_compiled():
        pytest.skip("the relay is not built: no C compiler at installation")
    return partial(agent_bundle, native=native)


def is_compiled() -> bool:
    return Path(front_module.__file__).with_name(LIBRARY).exists()


@asynccontextmanager
async def front_of(folder: Path, port: int, bundle: Bundle = agent_bundle) -> AsyncIterator[Front]:
    agent = folder / "agent.pyz"
    agent.write_bytes(bundle())
    machine = folder / "machine"
    machine.mkdir()
    (machine / CERTIFICATE).write_bytes(AUTHORITY.of_machine(TOKEN))
    order = {"front": {"port": None, "to": port}, "has_port": True, "claim_path": str(folder / "none")}
    (machine / "order.json").write_text(json.dumps(order))
    process = started(machine, agent)
    try:
        yield Front(machine, process, await listening(machine, process))
    finally:
        process.kill()
        process.wait()


async def listening(machine: Path, process: subprocess.Popen[bytes]) -> int:
    while True:
        assert process.poll() is None
        port = port_of(machine)
        if port is not None and is_locked(machine / LOCK):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return port
        await asyncio.sleep(0.02)


@asynccontextmanager
async def engine(handle: Server) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    writer.close()


async def test_bytes_pass_in_both_directions_however_many_and_in_whatever_pieces(
    tmp_path: Path, bundle: Bundle
) -> None:
    async with engine(echo) as port, front_of(tmp_path, port, bundle) as front:
        reader, writer = await front.connect()
        sent = os.urandom(3_000_000)

        async def send() -> None:
            for at in range(0, len(sent), 70_001):
                writer.write(sent[at : at + 70_001])
                await writer.drain()

        _, received = await asyncio.gather(send(), reader.readexactly(len(sent)))
        assert received == sent
        writer.close()


async def test_a_stream_comes_piece_by_piece_and_a_tunnel_speaks_first(
    tmp_path: Path, bundle: Bundle
) -> None:
    turn = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await turn.wait()
        writer.write(b"again")
        writer.close()

    async with engine(slow) as port, front_of(tmp_path, port, bundle) as front:
        reader, writer = await front.connect()
        assert await reader.readexactly(5) == b"hello"
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket, "a ticket takes memory, and nobody uses it"
        turn.set()
        assert await reader.read() == b"again"


async def test_a_client_that_leaves_ends_the_engines_connection(tmp_path: Path, bundle: Bundle) -> None:
    left = asyncio.Event()

    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        left.set()
        writer.close()

    for how in ("close", "abort"):
        async with engine(patient) as port, front_of_again(tmp_path, how, port, bundle) as front:
            _, writer = await front.connect()
            left.clear()
            writer.close() if how == "close" else writer.transport.abort()
            await asyncio.wait_for(left.wait(), 20)


@asynccontextmanager
async def front_of_again(folder: Path, name: str, port: int, bundle: Bundle) -> AsyncIterator[Front]:
    (folder / name).mkdir()
    async with front_of(folder / name, port, bundle) as front:
        yield front


async def test_a_reader_that_stops_stops_the_engine_and_memory_stays_small(
    tmp_path: Path, bundle: Bundle
) -> None:
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536

    async with engine(endless) as port, front_of(tmp_path, port, bundle) as front:
        _, writer = await front.connect()
        last = -1
        while sent != last:  # until nothing moves any more
            last = sent
            await asyncio.sleep(0.5)
        assert sent < 64 << 20
        assert rss_kb(front.process.pid) < 120_000
        writer.transport.abort()


def rss_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


async def test_where_the_engine_does_not_listen_there_is_no_connection(
    tmp_path: Path, bundle: Bundle
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async with front_of(tmp_path, reserved.getsockname()[1], bundle) as front:
            with pytest.raises(ConnectionError):
                await front.connect()


@pytest.mark.parametrize(
    ("authority", "name"),
    [(OTHER, TOKEN), (AUTHORITY, "own-chat-2-0123456789"), (AUTHORITY, "127.0.0.1")],
    ids=["another owner's", "another machine's", "an address"],
)
async def test_a_wrong_certificate_is_never_spoken_to(
    tmp_path: Path, bundle: Bundle, authority: Authority, name: str
) -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(1))
        writer.close()

    async with engine(listen) as port, front_of(tmp_path, port, bundle) as front:
        pools = Pools()
        pools.set_authority(base64.b64encode(authority.certificate).decode())
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            await pools.of(front.target(name)).dial(20.0)
        assert described(caught.value).startswith("wrong certificate")
    assert heard == b""


async def test_a_load_balancer_that_knows_no_authority_trusts_nobody(tmp_path: Path, bundle: Bundle) -> None:
    async with engine(http) as port, front_of(tmp_path, port, bundle) as front:
        with pytest.raises(ssl.SSLCertVerificationError):
            await Pools().of(front.target()).dial(20.0)


async def test_the_load_balancers_own_requests_and_kept_connections(tmp_path: Path, bundle: Bundle) -> None:
    pools = Pools()
    pools.set_authority(base64.b64encode(AUTHORITY.certificate).decode())
    async with engine(http) as port, front_of(tmp_path, port, bundle) as front:
        getter = HttpGetter(pools, lambda: 0.0)
        for _ in range(3):
            assert (await getter.fetch(front.target(), "/", 20.0)).status == 200
        connection = pools.of(front.target()).take()
        assert connection is not None
        assert pools.of(front.target()).take() is None, "one connection for all three"
        connection.drop()
        assert await getter.alive(front.target(), 20.0)
        getter.close()


async def test_the_controllers_probes(tmp_path: Path, bundle: Bundle) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=AUTHORITY.certificate)
    async with engine(http) as port, front_of(tmp_path, port, bundle) as front:
        for name, trouble in ((TOKEN, None), ("another", "certificate")):
            line = ReplicaLine(context)
            order = ProbeOrder("chat", 1, front.target().url, Probe(), None, tls_name=name)
            outcome = await line.probe(order)
            line.close()
            assert outcome.trouble is None if trouble is None else trouble in str(outcome.trouble)


async def test_only_requests_of_clients_are_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the controller and load balancers really send shows that the replica responds, and renews nothing."""
    notes: list[str] = []

    class Noted(front_module.TrafficWatch):
        def __init__(self) -> None:
            super().__init__(lambda: notes.append("traffic"), lambda: notes.append("served"))

    monkeypatch.setattr(front_module, "TrafficWatch", Noted)
    monkeypatch.setattr(Noted, "noted_at", float("-inf"))
    (tmp_path / CERTIFICATE).write_bytes(AUTHORITY.of_machine(TOKEN))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(str(tmp_path / CERTIFICATE))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=AUTHORITY.certificate)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    async with engine(http) as port:
        accepting = asyncio.create_task(front_module.accept(listener, server, port))
        line = ReplicaLine(client)
        await line.probe(ProbeOrder("chat", 1, url, Probe(), None, tls_name=TOKEN))
        line.close()
        assert notes == ["served"]
        pools = Pools()
        pools.set_authority(base64.b64encode(AUTHORITY.certificate).decode())
        getter = HttpGetter(pools, asyncio.get_running_loop().time)
        target = Target("1", url, tls_name=TOKEN, health_path="/health")
        await getter.fetch(target, "/metrics", 5.0)
        assert notes == ["served", "served"]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", listener.getsockname()[1], ssl=client, server_hostname=TOKEN
        )
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nUser-Agent: openai\r\n\r\n")
        await reader.readuntil(b"ok")
        assert notes == ["served", "served", "traffic"]
        writer.close()
        accepting.cancel()
    listener.close()


async def test_a_front_that_is_killed_comes_back_at_its_port(tmp_path: Path, bundle: Bundle) -> None:
    async with engine(echo) as port, front_of(tmp_path, port, bundle) as front:
        front.process.send_signal(signal.SIGKILL)
        front.process.wait()
        second = started(front.folder, tmp_path / "agent.pyz")
        try:
            assert await listening(front.folder, second) == front.port
            reader, writer = await front.connect()
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.close()
        finally:
            second.kill()
            second.wait()


async def test_a_second_front_of_a_machine_ends_at_once(tmp_path: Path, bundle: Bundle) -> None:
    async with engine(echo) as port, front_of(tmp_path, port, bundle) as front:
        second = started(front.folder, tmp_path / "agent.pyz")
        assert second.wait(30) == 0
        assert front.process.poll() is None


def test_a_certificate_is_the_same_whenever_it_is_made() -> None:
    again = Authority(bytes(32), "own")
    assert again.certificate == AUTHORITY.certificate
    assert again.of_machine(TOKEN) == AUTHORITY.of_machine(TOKEN) != OTHER.of_machine(TOKEN)
    assert len(base64.b64encode(AUTHORITY.certificate)) < 1000


NOTED = """
import socket, sys
from pathlib import Path
from provisioners.remote.host_agent import lease, tls_relay
lease.traffic = lambda: print("traffic", flush=True)
lease.served = lambda: print("served", flush=True)
listener = socket.create_server(("127.0.0.1", 0))
listener.setblocking(False)
print(listener.getsockname()[1], flush=True)
folder = Path(sys.argv[1])
tls_relay.TlsRelay(folder, folder / "front.pem").run(listener, int(sys.argv[2]), 2)
"""


@pytest.mark.skipif(not is_compiled(), reason="the relay is not built: no C compiler at installation")
async def test_the_native_relay_notes_traffic_and_takes_no_more_connections_than_it_may(
    tmp_path: Path,
) -> None:
    (tmp_path / CERTIFICATE).write_bytes(AUTHORITY.of_machine(TOKEN))
    async with engine(http) as port:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", NOTED, str(tmp_path), str(port), stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            front = Front(tmp_path, cast(Any, process), int(await process.stdout.readline()))
            readers, writers = zip(*[await front.connect() for _ in range(2)], strict=True)
            third = asyncio.ensure_future(front.connect())
            for at, agent, expected in ((0, "skyserve-lb", b"served"), (1, "openai", b"traffic")):
                writers[at].write(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nUser-Agent: %b\r\n\r\n" % agent.encode()
                )
                await readers[at].readuntil(b"ok")
                assert (await process.stdout.readline()).strip() == expected
            assert not third.done()
            writers[0].close()
            _, writer = await asyncio.wait_for(third, 20)
            writer.close()
            writers[1].close()
        finally:
            process.kill()
            await process.wait()


async def test_a_bundle_without_the_library_says_so(tmp_path: Path) -> None:
    async with engine(echo) as port, front_of(tmp_path, port, partial(agent_bundle, native=False)) as front:
        assert "not compiled" in why_interpreted(front.folder)


async def test_a_library_of_another_machine_is_not_used(tmp_path: Path) -> None:
    buffer = io.BytesIO(agent_bundle(native=False))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(f"provisioners/remote/host_agent/{LIBRARY}", b"\x7fELF of an aarch64")
    async with engine(echo) as port, front_of(tmp_path, port, buffer.getvalue) as front:
        reader, writer = await front.connect()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        assert LIBRARY in why_interpreted(front.folder)
        writer.close()
