"""What must cross the proxy unchanged, and what must not cross it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.integration.lb_harness import RunningAgent, Seen, World, until, world


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


async def mirror(seen: Seen) -> None:
    """Responds with what was seen."""
    facts = {
        "method": seen.method,
        "path": seen.path,
        "headers": seen.headers,
        "body": seen.body.decode("latin-1"),
    }
    await seen.answer(json.dumps(facts).encode(), "200 OK", "Content-Type: application/json")


async def raw(agent: RunningAgent, request: bytes) -> bytes:
    """The bytes on the wire until the agent closes; the request must ask for that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def mirrored(w: World, request: bytes) -> dict[str, object]:
    agent = await w.agent("--target", (await w.target("mirror", mirror)).url)
    answer = await raw(agent, request)
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def values(facts: dict, name: str) -> list[str]:
    return [value for key, value in facts["headers"] if key.lower() == name.lower()]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"])
async def test_every_method_passes(w: World, method: str) -> None:
    agent = await w.agent("--target", (await w.target("mirror", mirror)).url)
    body = b"" if method in ("GET", "OPTIONS") else b"body"
    status, text = await agent.text("/p", method=method, data=body or None)
    facts = json.loads(text)
    assert (status, facts["method"], facts["path"], facts["body"]) == (200, method, "/p", body.decode())


async def test_head_keeps_the_length_and_has_no_body(w: World) -> None:
    agent = await w.agent("--target", (await w.target("mirror", mirror)).url)
    answer = await raw(agent, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > 0
    assert body == b""


@pytest.mark.parametrize(
    "status",
    [
        "204 No Content",
        "304 Not Modified",
        "301 Moved Permanently",
        "418 I'm a teapot",
        "429 Too Many Requests",
    ],
)
async def test_statuses_and_reasons_pass_and_redirects_are_not_followed(w: World, status: str) -> None:
    async def answer(seen: Seen) -> None:
        if status.startswith(("204", "304")):
            await seen.send(f"HTTP/1.1 {status}\r\nETag: e\r\n\r\n".encode())
        else:
            await seen.answer(b"b", status, "Location: /elsewhere", "Retry-After: 7")

    target = await w.target("target", answer)
    agent = await w.agent("--target", target.url)
    got = await raw(agent, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert got.startswith(f"HTTP/1.1 {status}\r\n".encode())
    assert len(target.seen) == 1
    if status.startswith("301"):
        assert b"\r\nLocation: /elsewhere\r\n" in got


@pytest.mark.parametrize("path", ["/a%2Fb?x=%20y&x=1", "/%C3%A4%zz", "//double//", "/a/../b?q=/-/"])
async def test_the_path_arrives_as_it_was_sent(w: World, path: str) -> None:
    facts = await mirrored(
        w, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode("latin-1")
    )
    assert facts["path"] == path


async def test_a_request_for_an_absolute_url_arrives_as_its_path(w: World) -> None:
    facts = await mirrored(w, b"GET http://x/a%2Fb?c=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert facts["path"] == "/a%2Fb?c=1"


@pytest.mark.parametrize("target", [b"OPTIONS *", b"CONNECT x:1"])
async def test_a_request_for_no_path_is_400(w: World, target: bytes) -> None:
    agent = await w.agent("--target", (await w.target("target")).url)
    answer = await raw(agent, target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"bad_request_target" in answer


async def test_a_path_in_the_target_url_goes_in_front(w: World) -> None:
    agent = await w.agent("--target", (await w.target("mirror", mirror)).url + "/base/")
    assert json.loads((await agent.text("/v1/x?y=1"))[1])["path"] == "/base/v1/x?y=1"


async def test_headers_pass_but_not_those_of_the_hop(w: World) -> None:
    facts = await mirrored(
        w,
        b"POST / HTTP/1.1\r\nHost: shop.example:8080\r\nContent-Length: 2\r\nAuthorization: Bearer secret\r\n"
        b"X-Twice: 1\r\nX-Twice: 2\r\nConnection: close, X-Private\r\nX-Private: p\r\nKeep-Alive: 5\r\n"
        b"TE: trailers\r\nProxy-Authorization: q\r\nX-Forwarded-For: 10.1.1.1\r\nX-Request-Id: mine-1\r\n\r\n{}",
    )
    assert values(facts, "Host") == ["shop.example:8080"]
    assert values(facts, "Authorization") == ["Bearer secret"]
    assert values(facts, "X-Twice") == ["1", "2"]
    assert values(facts, "X-Forwarded-For") == ["127.0.0.1"]
    assert values(facts, "X-Forwarded-Proto") == ["http"]
    assert values(facts, "X-Forwarded-Host") == ["shop.example:8080"]
    assert values(facts, "X-Request-Id") == ["mine-1"]
    assert values(facts, "Content-Length") == ["2"]
    for hop in (
        "X-Private",
        "Keep-Alive",
        "TE",
        "Proxy-Authorization",
        "User-Agent",
        "Accept",
        "Accept-Encoding",
    ):
        assert values(facts, hop) == [], hop


async def test_a_request_without_an_id_gets_one_and_is_told(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    ids = []
    for _ in range(2):
        async with agent.http.get(agent.url) as response:
            ids.append(response.headers["X-Request-Id"])
    assert [seen.header("X-Request-Id") for seen in target.seen] == ids
    assert len(set(ids)) == 2


async def test_response_headers_pass_repeated_ones_included(w: World) -> None:
    async def answer(seen: Seen) -> None:
        await seen.answer(
            b"x", "200 OK", "Set-Cookie: a=1; Path=/", "Set-Cookie: b=2", "Server: engine/1", "X-Hop: h",
            "Connection: X-Hop", "Date: Thu, 01 Jan 1970 00:00:00 GMT", "X-Request-Id: theirs",
        )  # fmt: skip

    agent = await w.agent("--target", (await w.target("target", answer)).url)
    async with agent.http.get(agent.url) as response:
        assert response.headers.getall("Set-Cookie") == ["a=1; Path=/", "b=2"]
        assert response.headers["Server"] == "engine/1"
        assert response.headers["Date"] == "Thu, 01 Jan 1970 00:00:00 GMT"
        assert response.headers["X-Request-Id"] == "theirs"
        assert "X-Hop" not in response.headers


async def test_compressed_bodies_stay_compressed_both_ways(w: World) -> None:
    packed = gzip.compress(b"hello")

    async def answer(seen: Seen) -> None:
        assert seen.body == packed
        assert seen.header("Content-Encoding") == "gzip"
        await seen.answer(packed, "200 OK", "Content-Encoding: gzip")

    agent = await w.agent("--target", (await w.target("target", answer)).url)
    async with agent.http.post(agent.url, data=packed, headers={"Content-Encoding": "gzip"}) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert await response.read() == packed


async def test_a_chunked_request_body_arrives_whole(w: World) -> None:
    facts = await mirrored(
        w,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    )
    assert facts["body"] == "abcde"
    assert values(facts, "Content-Length") == ["5"]
    assert values(facts, "Transfer-Encoding") == []


async def test_expect_100_continue_is_answered_here(w: World) -> None:
    agent = await w.agent("--target", (await w.target("mirror", mirror)).url)
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    facts = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (facts["body"], values(facts, "Expect")) == ("{}", [])


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_body_over_the_bound_is_413(w: World, framing: str) -> None:
    target = await w.target("target")
    agent = await w.agent()
    await agent.push(target.json, limits={"max_body_bytes": 1000})

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    url, body = f"{agent.url}/v1/completions", b"x" * 1001 if framing == "length" else chunks()
    async with agent.http.post(url, data=body) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"
    assert await agent.text("/v1/completions", data=b'{"prompt": "%b"}' % (b"x" * 986)) == (200, "target")
    assert len(target.seen) == 1


async def test_large_bodies_pass_both_ways(w: World) -> None:
    async def echo(seen: Seen) -> None:
        await seen.answer(seen.body)

    agent = await w.agent("--target", (await w.target("echo", echo)).url)
    body = bytes(range(256)) * 4096 * 8
    async with agent.http.post(agent.url, data=body) as response:
        assert await response.read() == body


async def test_a_stream_arrives_chunk_by_chunk(w: World) -> None:
    go = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"one")
        await go.wait()
        await seen.chunk(b"two")
        await seen.send(b"0\r\n\r\n")

    agent = await w.agent("--target", (await w.target("target", stream)).url)
    async with agent.http.get(agent.url) as response:
        assert await response.content.readany() == b"one"
        go.set()
        assert await response.content.read() == b"two"


async def test_a_slow_reader_slows_the_target_and_not_the_agents_memory(w: World) -> None:
    sent = 0
    total = 64 * 1024 * 1024

    async def pour(seen: Seen) -> None:
        nonlocal sent
        await seen.send(f"HTTP/1.1 200 OK\r\nContent-Length: {total}\r\n\r\n".encode())
        while sent < total:
            await seen.send(b"x" * 65536)
            sent += 65536

    agent = await w.agent("--target", (await w.target("target", pour)).url)
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port, limit=65536)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    last = -1

    async def stuck() -> bool:
        nonlocal last
        before, last = last, sent
        await asyncio.sleep(0.1)
        return before == last == sent

    await until(stuck)
    assert sent < total / 2  # what fits into the buffers of kernels, not the whole
    writer.close()


async def test_the_reserved_paths_do_not_exist_on_the_data_port(w: World) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    for path in ("/-/live", "/-/targets", "/-/", "/-"):
        async with agent.http.get(agent.url + path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not target.seen
    assert await agent.text("/-x") == (200, "target")


async def test_nothing_of_a_request_is_in_the_log(w: World) -> None:
    agent = await w.agent("--target", (await w.target("target")).url)
    await agent.text("/p?api_key=hush-1", data=b"hush-2", headers={"Authorization": "Bearer hush-3"})
    await raw(agent, b"GET / HTTP/1.1\r\nHost: x\r\nAuthor\x00ization: hush-4\r\n\r\n")
    await raw(agent, b"GET / HTTP/1.1\r\nX: " + b"hush-5" * 5000 + b"\r\n\r\n")
    assert "hush" not in agent.log.read_text()


async def test_a_page_may_send_its_key_as_a_subprotocol(w: World) -> None:
    key = "sk-of-a-page"
    seen: list[str] = []

    async def realtime(request: web.Request) -> web.WebSocketResponse:
        seen.extend(f"{name}: {value}" for name, value in request.headers.items())
        socket = web.WebSocketResponse(protocols=("openai-insecure-api-key." + key, "realtime"))
        await socket.prepare(request)
        await socket.send_str("hello")
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", realtime)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        agent = await w.agent("--access-log")
        access = {"keys": [{"name": "page", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}
        target = {"id": "a", "url": f"http://127.0.0.1:{runner.addresses[0][1]}", "health_path": None}
        await agent.push(target, access=access)
        offered = ["realtime", f"openai-insecure-api-key.{key}", "openai-beta.realtime-v1"]
        async with agent.http.ws_connect(agent.url + "/v1/realtime", protocols=offered) as socket:
            assert socket.protocol == "realtime"
            assert await socket.receive_str() == "hello"
        assert "Sec-WebSocket-Protocol: realtime, openai-beta.realtime-v1" in seen
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await agent.http.ws_connect(
                agent.url + "/v1/realtime", protocols=("realtime", "openai-insecure-api-key.sk-of-nobody")
            )
        assert refused.value.status == 401
        assert key not in agent.log.read_text()
        assert key not in "".join(seen)
    finally:
        await runner.cleanup()


async def test_a_key_in_the_query_is_shown_nowhere(w: World) -> None:
    key = "sk-in-a-query"
    target = await w.target("a")
    agent = await w.agent("--access-log")
    access = {"keys": [{"name": "page", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}
    for allowed in (False, True):
        await agent.push(target.json, revision=f"r{allowed}", access={**access, "keys_in_query": allowed})
        status, _ = await agent.text(f"/v1/x?a=1&api_key={key}")
        assert status == (200 if allowed else 401)
    assert [seen.path for seen in target.seen] == ["/v1/x?a=1"]
    shown = json.dumps(await agent.request("GET", "/-/explain?limit=20"))
    assert "/v1/x" in shown
    assert key not in shown + agent.log.read_text() + await agent.request("GET", "/-/metrics")


async def test_websockets_pass_both_ways_with_their_protocol(w: World) -> None:
    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("b",))
        await socket.prepare(request)
        await socket.send_str(request.path_qs + " " + request.headers["X-Forwarded-For"])
        async for message in socket:
            if message.data == "bye":
                await socket.close(code=4001, message=b"so long")
            elif message.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(message.data.upper())
            else:
                await socket.send_bytes(message.data[::-1])
        return socket

    app = web.Application()
    app.router.add_get("/ws", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        agent = await w.agent("--target", f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with agent.http.ws_connect(agent.url + "/ws?x=1", protocols=("a", "b")) as socket:
            assert socket.protocol == "b"
            assert await socket.receive_str() == "/ws?x=1 127.0.0.1"
            await socket.send_str("hello")
            assert await socket.receive_str() == "HELLO"
            await socket.send_bytes(b"abc")
            assert await socket.receive_bytes() == b"cba"
            assert (await agent.stats())["in_flight"] == 1
            await socket.send_str("bye")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
            assert socket.close_code == 4001
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await agent.http.ws_connect(agent.url + "/nothing")
        assert refused.value.status == 404
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "handshake",
    [
        pytest.param("Sec-WebSocket-Version: 13", id="no key"),
        pytest.param("Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: c2hvcnQ=", id="a short key"),
        pytest.param("Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ?", id="a key not in base64"),
        pytest.param(
            "Sec-WebSocket-Version: 99\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", id="another version"
        ),
    ],
)
async def test_a_malformed_websocket_handshake_is_400_and_bothers_no_target(w: World, handshake: str) -> None:
    target = await w.target("target")
    agent = await w.agent("--target", target.url)
    head = f"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n{handshake}"
    answer = await raw(agent, head.encode() + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"malformed_handshake"' in answer
    assert not target.seen


@pytest.mark.parametrize(("status", "told"), [("101 Switching Protocols", 502), ("200 OK", 200)])
async def test_a_websocket_the_target_did_not_open_is_not_opened(w: World, status: str, told: int) -> None:
    agent = await w.agent("--target", (await w.target("deaf", lambda seen: seen.answer(b"", status))).url)
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await agent.http.ws_connect(agent.url + "/ws")
    assert refused.value.status == told


async def test_the_official_openai_client_works(w: World) -> None:
    async def engine(seen: Seen) -> None:
        base = {"id": "c1", "created": 1, "model": "m"}
        if seen.path == "/v1/models":
            data = {
                "object": "list",
                "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "us"}],
            }
            return await seen.answer(json.dumps(data).encode(), "200 OK", "Content-Type: application/json")
        assert seen.header("Authorization") == "Bearer key"
        if not json.loads(seen.body).get("stream"):
            message = {"role": "assistant", "content": "hello"}
            data = {
                **base,
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            return await seen.answer(json.dumps(data).encode(), "200 OK", "Content-Type: application/json")
        await seen.begin_stream()
        for word in ("hel", "lo"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            event = {**base, "object": "chat.completion.chunk", "choices": [choice]}
            await seen.chunk(f"data: {json.dumps(event)}\n\n".encode())
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.send(b"0\r\n\r\n")
        return None

    agent = await w.agent("--hold", "0", "--target", (await w.target("engine", engine)).url)
    async with openai.AsyncOpenAI(base_url=agent.url + "/v1", api_key="key", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        assert "".join([part.choices[0].delta.content async for part in stream]) == "hello"
        await agent.push(revision="empty", limits={"hold_s": 0})
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="m", messages=messages)
        assert refused.value.code == "no_target_ready"


async def test_https_is_served_with_a_certificate(w: World, tmp_path: Path) -> None:
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    process = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certfile), "-keyout", str(keyfile),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    agent = await w.agent(
        "--tls-certfile", str(certfile), "--tls-keyfile", str(keyfile), "--target", (await w.target("mirror", mirror)).url
    )  # fmt: skip
    trust = ssl.create_default_context(cafile=str(certfile))
    async with agent.http.get(f"https://127.0.0.1:{agent.port}/", ssl=trust) as response:
        facts = await response.json()
    assert values(facts, "X-Forwarded-Proto") == ["https"]
