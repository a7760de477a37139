"""The prober over real sockets: servers that respond as the engines do, and our engine as a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from lb.agent.ticker import Ticker
from lb.config.options import Pushing
from lb.config.schema import Table, Target
from lb.core.admission import EngineLoad
from lb.core.target_choice import choose
from lb.core.targets import Key, TargetTable
from lb.engines.kinds import EngineKind, Fetched
from lb.engines.load_poller import LoadPoller
from policies.routing.base import RequestView

LABELS = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def vllm_page(running: int, capacity: int, deferred: int = 0) -> bytes:
    """About as long as vLLM's own: most of it histograms."""
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{LABELS}}} {running}.0",
        f"vllm:num_requests_waiting{{{LABELS}}} {capacity + deferred}.0",
        f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="capacity"}} {capacity}.0',
        f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="deferred"}} {deferred}.0',
        f"vllm:kv_cache_usage_perc{{{LABELS}}} 0.5",
    ]
    for stage in range(20):
        lines.append(f"# TYPE vllm:stage_{stage}_seconds histogram")
        lines += [f'vllm:stage_{stage}_seconds_bucket{{{LABELS},le="{bound}.5"}} 9.0' for bound in range(30)]
    return ("\n".join(lines) + "\n").encode()


def sglang_loads(running: int, waiting: int) -> bytes:
    rank = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.25}
    return json.dumps({"version": "0.5.23", "loads": [rank | {"max_running_requests": 256}]}).encode()


def triton_page(waiting: int) -> bytes:
    return (
        f'# TYPE x gauge\nnv_trt_llm_request_metrics{{model="m",request_type="waiting"}} {waiting}\n'.encode()
    )


SLOTS = b'[{"id":0,"is_processing":true},{"id":1,"is_processing":false}]'
NO_METRICS = b'{"error":{"code":501,"message":"This server does not support metrics endpoint."}}'


class Engine:
    """An HTTP/1.1 server with a few pages; it may fall silent: take requests and never respond."""

    def __init__(self, pages: dict[str, bytes | tuple[int, bytes]]) -> None:
        self.pages = pages
        self.silent = False
        self.asked: list[str] = []
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            self.asked.append(path)
            if self.silent:
                await reader.read()
                return
            said = self.pages.get(path, (404, b'{"detail":"Not Found"}'))
            status, body = (200, said) if isinstance(said, bytes) else said
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the prober had enough
        finally:
            self._writers.discard(writer)
            writer.close()


async def fetch(target: Target, path: str, timeout_s: float) -> Fetched:
    """GET on a connection of its own."""

    async def get() -> Fetched:
        parts = urlsplit(target.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?i)\ncontent-length: (\d+)", head)
            body = await (reader.readexactly(int(length[1])) if length else reader.read())
            return Fetched(int(head.split(" ")[1]), body)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("cut short") from error
        finally:
            writer.close()

    return await asyncio.wait_for(get(), timeout_s)


class NotedTable:
    """A table, as the poller uses it, that remembers what it last received."""

    def __init__(self, table: TargetTable) -> None:
        self._table = table
        self.told: dict[str, EngineLoad | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def loaded(
        self, key: Key, load: EngineLoad | None, polled_at: float, now: float, every_s: float = 0.0
    ) -> bool:
        self.told[key.id] = load
        return self._table.loaded(key, load, polled_at, now, every_s)


class Balancer:
    """A table and its prober, running."""

    def __init__(self, targets: dict[str, str]) -> None:
        rows = tuple(Target(name, url) for name, url in targets.items())
        table = Table("default", "r1", rows, pushing=Pushing(probe_s=0.02))
        self.table = TargetTable(table, time.monotonic())
        self._noted = NotedTable(self.table)
        self.changes = 0
        self.prober = LoadPoller(cast(TargetTable, self._noted), fetch, time.monotonic, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def kind(self, name: str) -> EngineKind:
        key = next(key for key, _, _ in self.table.probe_list() if key.id == name)
        return self.prober.kind(key)

    def load(self, name: str) -> EngineLoad | None:
        return self._noted.told.get(name)


@asynccontextmanager
async def balancer(**targets: str) -> AsyncIterator[Balancer]:
    it = Balancer(targets)
    ticker = Ticker(time.monotonic, _raised)
    ticker.add("load poller", it.prober.poll_due)
    running = asyncio.get_running_loop().create_task(ticker.run())
    try:
        yield it
    finally:
        running.cancel()
        await asyncio.gather(running, it.prober.close(), return_exceptions=True)


def _raised(name: str, error: Exception) -> None:
    raise AssertionError(name) from error


@pytest.fixture
async def engine() -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    async with AsyncExitStack() as stack:

        async def start(pages: dict[str, bytes | tuple[int, bytes]], *where: object) -> Engine:
            it = Engine(pages)
            await it.start(*where)  # type: ignore[arg-type]
            stack.push_async_callback(it.stop)
            return it

        yield start


StartEngine = Callable[..., Awaitable[Engine]]


async def until(condition: Callable[[], bool], tries: int = 1500) -> None:
    for _ in range(tries):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")


REQUEST = RequestView("r", "POST", "/v1/completions")


@pytest.mark.parametrize(
    ("pages", "kind", "load"),
    [
        pytest.param(
            {"/metrics": vllm_page(4, 2, 1), "/version": b'{"version":"0.33.0"}'},
            EngineKind.VLLM,
            EngineLoad(4, 2, 0.5),
            id="vllm",
        ),
        pytest.param(
            {"/v1/loads?include=core": sglang_loads(3, 1), "/metrics": b"sglang:num_running_reqs 99\n"},
            EngineKind.SGLANG,
            EngineLoad(3, 1, 0.25, 256),
            id="sglang",
        ),
        pytest.param(
            {"/get_load": b'[{"dp_rank":0,"num_reqs":4,"num_waiting_reqs":1}]'},
            EngineKind.SGLANG,
            EngineLoad(3, 1, None),
            id="older sglang",
        ),
        pytest.param(
            {"/metrics": b"# TYPE tgi_queue_size gauge\ntgi_queue_size 5\ntgi_batch_current_size 8\n"},
            EngineKind.TGI,
            EngineLoad(8, 5, None),
            id="tgi",
        ),
        pytest.param(
            {"/metrics": b"[]", "/prometheus/metrics": b"trtllm_num_requests_running 3\n"},
            EngineKind.TRTLLM,
            EngineLoad(3, None, None),
            id="trtllm-serve",
        ),
        pytest.param({"/metrics": triton_page(6)}, EngineKind.TRITON, EngineLoad(None, 6, None), id="triton's frontend"),
        pytest.param(
            {"/metrics": b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 7\n"},
            EngineKind.LLAMACPP,
            EngineLoad(2, 7, None),
            id="llama.cpp",
        ),
        pytest.param(
            {"/metrics": (501, NO_METRICS), "/slots": SLOTS},
            EngineKind.LLAMACPP,
            EngineLoad(1, None, None, 2),
            id="llama.cpp without metrics",
        ),
    ],
)  # fmt: skip
async def test_each_engine_is_known_and_its_load_is_read(
    engine: StartEngine,
    pages: dict[str, bytes | tuple[int, bytes]],
    kind: EngineKind,
    load: EngineLoad,
) -> None:
    server = await engine(pages)
    async with balancer(a=f"http://127.0.0.1:{server.port}") as it:
        await until(lambda: it.load("a") == load)
        assert it.kind("a") is kind


async def test_triton_with_its_metrics_on_a_port_of_their_own(engine: StartEngine) -> None:
    host = "127.0.82.2"  # all of 127/8 is loopback: no one else has port 8002 here
    server = await engine({"/v2": b'{"name":"triton"}'}, host)
    await engine({"/metrics": triton_page(6)}, host, 8002)
    async with balancer(a=f"http://{host}:{server.port}") as it:
        await until(lambda: it.kind("a") is EngineKind.TRITON)
        await until(lambda: it.load("a") == EngineLoad(None, 6))
        assert "/metrics" in server.asked


async def test_room_in_an_engine_is_told_at_once(engine: StartEngine) -> None:
    server = await engine({"/v1/loads?include=core": sglang_loads(4, 3)})
    async with balancer(a=f"http://127.0.0.1:{server.port}") as it:
        bookings = [it.table.book(REQUEST, "a", time.monotonic()) for _ in range(4)]
        for booking in bookings:
            it.table.responded(booking, time.monotonic())
        await until(lambda: choose(it.table, REQUEST, time.monotonic()) is None)
        before = it.changes
        server.pages = {"/v1/loads?include=core": sglang_loads(4, 0)}
        await until(lambda: it.changes > before)
        assert choose(it.table, REQUEST, time.monotonic()) is not None
        for booking in bookings:
            it.table.release(booking, time.monotonic())


async def test_a_silent_a_dead_and_a_strange_server_do_not_hold_up_the_others(engine: StartEngine) -> None:
    good = await engine({"/v1/loads?include=core": sglang_loads(3, 0)})
    silent = await engine({})
    silent.silent = True
    strange = await engine({"/metrics": b"<html>\xff</html>", "/v1/loads?include=core": b"[" * 5000})
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        urls = {
            "good": f"http://127.0.0.1:{good.port}",
            "silent": f"http://127.0.0.1:{silent.port}",
            "strange": f"http://127.0.0.1:{strange.port}",
            "dead": f"http://127.0.0.1:{nobody.getsockname()[1]}",
        }
        async with balancer(**urls) as it:
            bookings = [it.table.book(REQUEST, name, time.monotonic()) for name in urls]
            await until(lambda: len(good.asked) > 5 and bool(silent.asked) and "/slots" in strange.asked)
            assert it.kind("good") is EngineKind.SGLANG
            assert {it.kind(name) for name in ("strange", "dead")} == {EngineKind.UNKNOWN}
            assert it.kind("silent") is EngineKind.SGLANG  # taken for what the others are, until it is known
            assert len(silent.asked) <= 2
            for booking in bookings:
                it.table.release(booking, time.monotonic())


def runs(load: EngineLoad | None, running: int) -> bool:
    """Return whether an engine reports these requests in its batch, none in its queue, and how full its cache is."""
    if load is None or (load.running, load.pending, load.max_running) != (running, 0, None):
        return False
    return load.kv_usage is not None and 0.0 <= load.kv_usage <= 1.0


async def test_our_engine_as_a_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "skyserve_cli.engine", "--port", "0",
        stderr=asyncio.subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        found = re.search(r"http://[^:]+:(\d+)", said)
        assert found, said
        async with balancer(a=found.group()) as it:
            await until(lambda: it.kind("a") is EngineKind.SKYSERVE)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
            body = json.dumps(
                {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            ).encode()
            booking = it.table.book(REQUEST, "a", time.monotonic())
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await reader.readuntil(b"\r\n\r\n")
            it.table.responded(booking, time.monotonic())
            await until(lambda: runs(it.load("a"), 1))
            writer.close()  # the engine notices and ends it
            await until(lambda: runs(it.load("a"), 0))
            it.table.release(booking, time.monotonic())
    finally:
        process.kill()
        await process.wait()
