"""The data plane over real sockets: IPv6, TLS on both sides, long bodies, slow and impatient peers, and curl."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import h11
import psutil
import pytest

from tests.integration.lb_harness import RunningAgent, Seen, World, self_signed, until, world

MIB = 1024 * 1024


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """For 127.0.0.1 and ::1, signed by itself: certificate and key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as one:
        one.bind(("::1", 0))
        return True
    return False


def resident(agent: RunningAgent) -> int:
    return int(psutil.Process(agent.pid).memory_info().rss)


async def until_it_stops(count: Callable[[], int]) -> None:
    """Until what is counted has not changed for a while."""
    last = -1

    async def stopped() -> bool:
        nonlocal last
        earlier, last = last, count()
        await asyncio.sleep(0.1)
        return earlier == last == count()

    await until(stopped)


@asynccontextmanager
async def digester(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A target that reads bodies of any length with h11, and returns their size, digest and a few headers; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        digest, size = hashlib.sha256(), 0
        request = h11.Request(method="GET", target="/", headers=[("Host", "x")])
        try:
            while True:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(MIB))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    digest.update(event.data)
                    size += len(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    headers = {name.decode(): value.decode("latin-1") for name, value in request.headers}
                    facts = {
                        "method": request.method.decode(),
                        "size": size,
                        "sha256": digest.hexdigest(),
                        "headers": headers,
                    }
                    body = json.dumps(facts).encode()
                    head = h11.Response(status_code=200, headers=[("Content-Length", str(len(body)))])
                    empty = request.method == b"HEAD"
                    parts = [head, *([] if empty else [h11.Data(data=body)]), h11.EndOfMessage()]
                    writer.write(b"".join(http.send(part) or b"" for part in parts))
                    http.start_next_cycle()
                    digest, size = hashlib.sha256(), 0
                else:
                    return
        except (ConnectionError, h11.RemoteProtocolError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if tls else 'http'}://{shown}:{port}"
    finally:
        server.close()


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")
async def test_clients_and_targets_speak_ipv6(w: World) -> None:
    async with digester("::1") as url:
        agent = await w.agent("--host", "::1", "--target", url)
        request = f"http://[::1]:{agent.port}/"
        async with agent.http.post(request, data=b"hello") as response:
            facts = await response.json(content_type=None)
    assert facts["size"] == 5
    assert facts["headers"]["x-forwarded-for"] == "[::1]"
    assert facts["headers"]["host"] == f"[::1]:{agent.port}"


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS on both sides"])
async def test_a_long_body_passes_without_being_kept(
    w: World, framing: str, tls: bool, certificate: tuple[Path, Path]
) -> None:
    total = 48 * MIB
    block = bytes(range(256)) * 256
    digest = hashlib.sha256()
    for _ in range(total // len(block)):
        digest.update(block)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(total // len(block)):
            yield block

    certfile, keyfile = certificate
    behind = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    behind.load_cert_chain(certfile, keyfile)
    flags = [
        "--tls-certfile",
        str(certfile),
        "--tls-keyfile",
        str(keyfile),
        "--targets-cafile",
        str(certfile),
    ]
    async with digester(tls=behind if tls else None) as url:
        agent = await w.agent(*(flags if tls else []))
        target = {"id": "t", "url": url, "health_path": None}
        await agent.push(target, limits={"buffer_bytes": MIB, "max_body_bytes": 2 * total})
        before = resident(agent)
        headers = {"Content-Length": str(total)} if framing == "length" else {}
        trust = ssl.create_default_context(cafile=str(certfile)) if tls else False
        front = f"{'https' if tls else 'http'}://127.0.0.1:{agent.port}/"
        async with agent.http.post(front, data=body(), headers=headers, ssl=trust) as response:
            assert response.status == 200
            facts = await response.json(content_type=None)
        assert (facts["size"], facts["sha256"]) == (total, digest.hexdigest())
        assert facts["headers"]["x-forwarded-proto"] == ("https" if tls else "http")
        assert ("content-length" in facts["headers"]) == (framing == "length")
        assert resident(agent) - before < total / 2


async def test_a_slow_target_slows_its_client_and_not_the_agents_memory(w: World) -> None:
    go = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go.wait()
        left = total
        while left and (data := await reader.read(min(left, MIB))):
            left -= len(data)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")

    total = 64 * MIB
    server = await asyncio.start_server(wait, "127.0.0.1", 0, limit=65536)
    agent = await w.agent()
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await agent.push(
        {"id": "t", "url": url, "health_path": None},
        limits={"buffer_bytes": MIB, "max_body_bytes": 2 * total},
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % total)
    before, sent = resident(agent), 0

    async def pour() -> None:
        nonlocal sent
        while sent < total:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    pouring = asyncio.create_task(pour())
    await until_it_stops(lambda: sent)
    assert sent < total / 2
    assert resident(agent) - before < total / 2
    go.set()
    await pouring
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(4) == b"done"
    writer.close()
    server.close()


async def test_bodies_in_tiny_chunks_do_not_multiply_in_memory(w: World) -> None:
    """Three bytes a chunk: the bytes are kept, not an object for each."""
    async with digester() as url:
        agent = await w.agent()
        await agent.push({"id": "t", "url": url, "health_path": None}, limits={"buffer_bytes": 8 * MIB})
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        before = resident(agent)
        for _ in range(60):
            writer.write(b"3\r\nabc\r\n" * 30_000)
            await writer.drain()
        assert resident(agent) - before < 40 * MIB
        writer.write(b"0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        facts = json.loads(
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        )
        assert facts["size"] == 60 * 90_000
        writer.close()


@pytest.mark.parametrize(
    ("begun", "told"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHo", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", b"HTTP/1.1 408 "),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK"),
    ],
    ids=["nothing", "half a head", "half a body", "a request, then nothing"],
)
async def test_who_falls_silent_is_let_go(w: World, begun: bytes, told: bytes) -> None:
    target = await w.target("target")
    agent = await w.agent()
    await agent.push(target.json, limits={"head_timeout_s": 0.5, "idle_timeout_s": 0.5, "keepalive_s": 0.5})
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(begun)
    answer = await asyncio.wait_for(reader.read(), 30)
    assert answer.startswith(told)
    assert answer.count(b"HTTP/1.1") == (1 if told else 0)
    writer.close()


async def test_drips_of_a_head_are_cut_off(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent()
    await agent.push(target.json, limits={"head_timeout_s": 0.5})
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    answer = asyncio.create_task(reader.read())
    writer.write(b"GET / HTTP/1.1\r\n")

    async def drip() -> bool:
        writer.write(b"X: y\r\n")
        return answer.done()

    with suppress(ConnectionError):
        await until(drip)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    assert target.seen == []
    writer.close()


async def test_a_plain_port_does_not_leave_tls_waiting(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection("127.0.0.1", agent.port, ssl=ssl.create_default_context())
    assert target.seen == []


async def test_websocket_frames_wait_for_a_slow_client(w: World) -> None:
    sent = 0
    total = 64 * MIB

    async def pour(seen: Seen) -> None:
        nonlocal sent
        accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # of the key in RFC 6455
        await seen.send(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\n\r\n"
        )
        while sent < total:
            await seen.send(b"x" * 65536)
            sent += 65536
        await seen.gone()

    agent = await w.agent("--target", (await w.target("target", pour)).url)
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port, limit=65536)
    writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    before = resident(agent)
    await until_it_stops(lambda: sent)
    assert sent < total / 2
    assert resident(agent) - before < total / 2
    left = total
    while left:
        left -= len(await reader.read(MIB))
    writer.close()


# --- curl

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")


async def curl(*arguments: str, given: bytes = b"") -> tuple[list[int], list[int], bytes]:
    """Statuses, numbers of new connections, and the first body, as curl sees them."""
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--show-error", "--max-time", "30", "--noproxy", "*",
        "--write-out", "\n%{http_code} %{num_connects}\n", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(given)
    assert process.returncode == 0, err
    ends = re.findall(rb"^(\d{3}) (\d+)$", out, re.MULTILINE)
    return [int(status) for status, _ in ends], [int(number) for _, number in ends], out.partition(b"\n")[0]


CURLS: dict[str, tuple[list[str], dict[str, object]]] = {
    "GET": ([], {"method": "GET", "size": 0}),
    "HTTP/1.0": (["--http1.0"], {"method": "GET", "size": 0}),
    "POST over HTTP/1.0": (["--http1.0", "--data", "hello"], {"method": "POST", "size": 5}),
    "POST": (["--data", "hello"], {"method": "POST", "size": 5}),
    "Expect": (["--data", "hello", "--header", "Expect: 100-continue"], {"method": "POST", "size": 5}),
    "chunks from standard input": (["--upload-file", "-"], {"method": "PUT", "size": 300_000}),
    "chunks and Expect": (
        ["--upload-file", "-", "--header", "Expect: 100-continue"],
        {"method": "PUT", "size": 300_000},
    ),
    "an absolute URL": (["--request-target", "http://other.example/x"], {"method": "GET", "size": 0}),
    "an upgrade to HTTP/2 that is not taken": (["--http2"], {"method": "GET", "size": 0}),
}


@needs_curl
@pytest.mark.parametrize(("arguments", "expected"), CURLS.values(), ids=CURLS.keys())
async def test_curl(w: World, arguments: list[str], expected: dict[str, object]) -> None:
    async with digester() as url:
        agent = await w.agent()
        await agent.push({"id": "t", "url": url, "health_path": None}, limits={"buffer_bytes": 65536})
        statuses, _, body = await curl(*arguments, agent.url + "/", given=b"x" * 300_000)
    assert statuses == [200]
    facts = json.loads(body)
    assert {name: facts[name] for name in expected} == expected
    assert facts["headers"]["host"] == ("other.example" if "--request-target" in arguments else agent.url[7:])


@needs_curl
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--head"], 200),
        (["--request", "OPTIONS", "--request-target", "*"], 400),
        (["--header", "Transfer-Encoding: gzip"], 400),
        (["--data", "x" * 2000], 413),
        (["--header", "X: " + "x" * 70_000], 431),
    ],
    ids=["HEAD", "an asterisk", "a strange coding", "a body over the bound", "a head over the bound"],
)
async def test_curl_is_told(w: World, arguments: list[str], status: int) -> None:
    async with digester() as url:
        agent = await w.agent()
        await agent.push({"id": "t", "url": url, "health_path": None}, limits={"max_body_bytes": 1000})
        assert (await curl(*arguments, agent.url + "/v1/completions"))[0] == [status]


@needs_curl
async def test_curl_keeps_its_connection_for_a_dozen_requests(w: World) -> None:
    async with digester() as url:
        agent = await w.agent("--target", url)
        many = [agent.url + f"/{number}" for number in range(12)]
        statuses, connects, _ = await curl(*many)
    assert statuses == [200] * 12
    assert sum(connects) == 1
