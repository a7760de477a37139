"""Real sockets for the tests of the load balancer: toy targets with faults on demand, and the agent itself as a
process of its own."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.integration.warm_agents import AgentProcess, start_agent

TOKEN = "a-token-for-tests"
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Seen:
    """One request as a target saw it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"", status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode() + (b"" if self.method == "HEAD" else body))

    async def begin_stream(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.send(head)

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def gone(self) -> None:
        """Until the peer has closed its side."""
        await self.reader.read()

    def die(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Seen], Awaitable[None]]


class ToyTarget:
    """An HTTP/1.1 server that handles each request with `behave`; the health path responds unless frozen."""

    def __init__(self, name: str, behave: Behaviour | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.name = name
        self.tls = tls
        self.behave: Behaviour = behave or self.say_name
        self.list_models: Behaviour | None = None  # what it responds to the agent's poll of its models
        self.respond_to_poll: Behaviour | None = None  # to other polls
        self.frozen = False
        self.probes = 0
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def json(self) -> dict[str, Any]:
        return {"id": self.name, "url": self.url, "health_path": "/health"}

    async def say_name(self, seen: Seen) -> None:
        await seen.answer(self.name.encode())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a killed process: no new connection, the open ones reset. The port stays free to refuse."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (seen := await _read_request(reader, writer)) is not None:
                if self.frozen:
                    await reader.read()
                    return
                polled = seen.header("User-Agent") == "skyserve-lb"
                if polled and seen.path == "/v1/models" and self.list_models is not None:
                    await self.list_models(seen)
                    continue
                if polled and seen.method == "GET" and seen.path != "/health":
                    if self.respond_to_poll is not None:
                        await self.respond_to_poll(seen)
                    else:
                        await seen.answer(b"", "404 Not Found")  # the agent detects the engine
                    continue
                if seen.path == "/health":
                    self.probes += 1
                    await seen.answer(b"ok")
                    continue
                self.seen.append(seen)
                self.arrived.set()
                await self.behave(seen)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seen | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1")[:-4].split("\r\n")
    method, path, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    seen = Seen(method, path, headers, b"", reader, writer)
    length = int(seen.header("Content-Length") or 0)
    seen.body = await reader.readexactly(length)
    return seen


@dataclass
class RunningAgent:
    """`python -m lb` as a process, with its ports."""

    process: AgentProcess
    port: int
    admin_port: int | None
    http: aiohttp.ClientSession
    log: Path
    peers_port: int = 0  # for agents of other regions
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        self.pid = self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def request(self, method: str, path: str, **kwargs: Any) -> Any:
        """The JSON (or text) of an admin call that must succeed."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.http.request(method, self.admin + path, headers=headers, **kwargs) as response:
            text = await response.text()
            assert response.status == 200, (response.status, text)
            return json.loads(text) if response.content_type == "application/json" else text

    async def push(self, *targets: dict[str, Any], revision: str = "r1", **rest: Any) -> Any:
        table = {"service": "default", "revision": revision, "targets": list(targets), **rest}
        for _ in range(100):
            try:
                return await self.request("PUT", "/-/targets", json=table)
            except AssertionError as error:
                if '"retired"' not in str(error):
                    raise
            await asyncio.sleep(0.01)  # a predecessor accepted it while it handed its ports over
        raise AssertionError("no successor takes the table")

    async def stats(self) -> Any:
        return await self.request("GET", "/-/stats?window_s=60")

    async def text(self, path: str = "/", **kwargs: Any) -> tuple[int, str]:
        """Send a request that may be sent again, unless `headers` say otherwise."""
        kwargs.setdefault("headers", {"Idempotency-Key": "1"})
        async with self.http.request(kwargs.pop("method", "POST"), self.url + path, **kwargs) as response:
            return response.status, await response.text()


class World:
    """Starts targets and agents, and ends them all."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._agents = 0

    async def target(
        self, name: str, behave: Behaviour | None = None, tls: ssl.SSLContext | None = None
    ) -> ToyTarget:
        target = ToyTarget(name, behave, tls)
        await target.start()
        self._stack.push_async_callback(target.stop)
        return target

    async def targets(self, *names: str) -> list[ToyTarget]:
        return [await self.target(name) for name in names]

    async def agent(
        self, *arguments: str, token: str | None = TOKEN, clean_exit: bool = True
    ) -> RunningAgent:
        return await self._stack.enter_async_context(self._agent(arguments, token, clean_exit))

    @asynccontextmanager
    async def _agent(
        self, arguments: tuple[str, ...], token: str | None, clean_exit: bool
    ) -> AsyncIterator[RunningAgent]:
        self._agents += 1
        log = self._folder / f"lb-{self._agents}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("SKYSERVE_LB_TOKEN", None)
        if token is not None:
            environment["SKYSERVE_LB_TOKEN"] = token
        if "--port" not in arguments:
            arguments = (*arguments, "--port", "0")
        with log.open("wb") as stderr:
            process = await start_agent(
                ("--log-level", "debug", *arguments), environment, stderr.fileno(), Path.cwd()
            )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        assert line, log.read_text()
        ports = json.loads(line)
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            agent = RunningAgent(
                process, ports["port"], ports["admin_port"], http, log, ports.get("peers_port", 0)
            )
            try:
                yield agent
                if clean_exit and agent.admin_port is not None and process.returncode is None:
                    await until(lambda: idle(agent))
            finally:
                await http.close()  # for idle connections the agent would wait
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(process.wait(), 15)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if clean_exit:
            text = log.read_text()
            assert process.returncode == 0, text
            assert "Traceback" not in text, text
            assert " ERROR " not in text, text


async def idle(agent: RunningAgent) -> bool:
    """Every booking has been released."""
    stats = await agent.stats()
    return stats["in_flight"] == 0 and all(target["in_flight"] == 0 for target in stats["targets"])


async def until(condition: Callable[[], Awaitable[Any]], tries: int = 400) -> Any:
    """Poll, with a bound, until the condition is truthy; its value."""
    for _ in range(tries):
        value = await condition()
        if value:
            return value
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not become true")


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A new certificate for 127.0.0.1 and ::1, and its key, in files of the same names each time."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    addresses = [x509.IPAddress(ipaddress.ip_address(one)) for one in ("127.0.0.1", "::1")]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([*addresses, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certfile, keyfile


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack, folder)
