"""What the data port does for browsers, and for the load balancers and supervisors that stand before it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import signal
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lb.config.cors import Cors
from lb.config.options import Access, ApiKey, CookieMode, Limits, Session
from lb.config.schema import Table, Target
from lb.http import session_cookie
from lb.http.head_lines import WEBSOCKET_GUID
from tests.integration.lb_harness import RunningAgent, self_signed, until, world
from tests.integration.lb_wires import DIES, ENDS, Bench, Got, Seen, run, settle

KEYS = Access((ApiKey("page", hashlib.sha256(b"sk-page").hexdigest()),))
TARGET = Target("t", "http://192.0.2.9:8000")


def a_table(*targets: Target, **options: Any) -> Table:
    return Table("service", "r1", targets or (TARGET,), policy="round_robin", **options)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def ask(bench: Bench, method: str, path: str, *lines: str, body: bytes = b"") -> Got:
    """The response to one request on a connection of its own."""
    client = bench.client()
    length = (f"Content-Length: {len(body)}",) if body else ()
    client.send(head(method, path, *lines, *length) + body)
    await settle()
    (got,) = client.answers(method.encode())
    return got


# --- health


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_needs_no_key_and_is_no_demand(method: str) -> None:
    async def story() -> None:
        bench = Bench(table=a_table(access=KEYS))
        for path in ("/-/healthz", "/-/ready", "/-/ready?verbose=1"):
            got = await ask(bench, method, path)
            assert (got.status, got.body) == (200, b"ok\n" if method == "GET" else b"")
            assert got.values(b"content-length") == [b"3"]
        assert (await ask(bench, method, "/")).status == 401
        assert bench.account.metrics.counts.requests == 1
        assert bench.account.arrivals.count(bench.runtime.clock(), 60.0) == 1
        assert bench.seen == []
        bench.check()

    run(story())


def test_ready_is_that_a_target_would_take_a_request() -> None:
    async def story() -> None:
        bench = Bench(targets=0)
        assert [(await ask(bench, "GET", f"/-/{one}")).status for one in ("healthz", "ready")] == [200, 503]
        bench = Bench()
        assert (await ask(bench, "GET", "/-/ready")).status == 200
        bench.runtime.drain(on=True)
        assert [(await ask(bench, "GET", f"/-/{one}")).status for one in ("healthz", "ready")] == [200, 503]
        bench.check()

    run(story())


def test_health_over_a_kept_connection_goes_on_until_the_agent_closes() -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(head("GET", "/-/healthz") * 3)
        await settle()
        assert [got.status for got in client.answers(*[b"GET"] * 3)] == [200] * 3
        bench.runtime.close()
        client.send(head("GET", "/-/ready"))
        await settle()
        (got,) = client.answers(b"GET")
        assert (got.status, got.values(b"connection")) == (503, [b"close"])
        assert client.wire.closed
        bench.check()

    run(story())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/-/healthz", 405),
        ("GET", "/-/healthz/", 404),
        ("GET", "/-/metrics", 404),
        ("GET", "/-", 404),
    ],
)
def test_nothing_else_is_served_below_the_dash(method: str, path: str, status: int) -> None:
    async def story() -> None:
        bench = Bench()
        assert (await ask(bench, method, path)).status == status
        assert bench.seen == []
        bench.check()

    run(story())


# --- web pages

PAGE = "https://chat.example"
CORS = Cors((PAGE, "https://*.lab.example"), exposed_headers=("X-Request-Id",))
PREFLIGHT = (
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization,content-type",
)
EVENTS = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
ALLOWED = (b"access-control-allow-origin", PAGE.encode())


def with_cors_of_its_own(seen: Seen) -> list[bytes]:
    """A target that lets every page call."""
    lines = b"Access-Control-Allow-Origin: *\r\nAccess-Control-Max-Age: 9\r\n"
    if b'"stream"' in seen.body:
        return [b"HTTP/1.1 200 OK\r\n" + EVENTS + lines + b"\r\n", b"e\r\ndata: [DONE]\n\n\r\n", b"0\r\n\r\n"]
    return [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + lines + b"\r\nok"]


def test_a_preflight_needs_no_key_and_reaches_no_target() -> None:
    async def story() -> None:
        bench = Bench(table=a_table(access=KEYS, cors=CORS))
        for path in ("/v1/chat/completions", "/-/healthz", "/anything"):
            got = await ask(bench, "OPTIONS", path, f"Origin: {PAGE}", *PREFLIGHT)
            assert (got.status, got.body) == (204, b"")
            assert ALLOWED in got.headers
            assert got.values(b"access-control-allow-headers") == [b"authorization,content-type"]
        got = await ask(bench, "OPTIONS", "/", "Origin: https://evil.example", *PREFLIGHT)
        assert (got.status, got.values(b"access-control-allow-origin")) == (403, [])
        assert b"cors_rejected" in got.body
        assert (await ask(bench, "OPTIONS", "/", f"Origin: {PAGE}")).status == 401  # it is no preflight
        assert bench.seen == []
        bench.check()

    run(story())


@pytest.mark.parametrize("body", [b"{}", b'{"stream": true}'], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/other"])
def test_responses_have_our_headers_in_place_of_the_targets(path: str, body: bytes) -> None:
    async def story() -> None:
        bench = Bench(with_cors_of_its_own, table=a_table(cors=CORS))
        got = await ask(bench, "POST", path, f"Origin: {PAGE}", body=body)
        assert got.whole
        assert got.values(b"access-control-allow-origin") == [PAGE.encode()]
        assert got.values(b"access-control-expose-headers") == [b"X-Request-Id"]
        assert got.values(b"access-control-max-age") == []
        got = await ask(bench, "POST", path, "Origin: https://evil.example", body=body)
        assert (got.status, got.values(b"access-control-allow-origin")) == (200, [])
        assert got.values(b"vary") == [b"Origin"]
        bench.check()

    run(story())


def test_without_cors_those_of_the_target_pass() -> None:
    async def story() -> None:
        bench = Bench(with_cors_of_its_own)
        got = await ask(bench, "POST", "/", f"Origin: {PAGE}", body=b"{}")
        assert got.values(b"access-control-allow-origin") == [b"*"]
        got = await ask(bench, "OPTIONS", "/", f"Origin: {PAGE}", *PREFLIGHT)
        assert len(bench.seen) == 2
        bench.check()

    run(story())


def test_a_page_can_read_our_own_errors() -> None:
    async def story() -> None:
        access = replace(KEYS, overrides=True)
        bench = Bench(table=a_table(access=access, cors=CORS, limits=Limits(hold_s=0.0, max_body_bytes=100)))
        key = "Authorization: Bearer sk-page"
        origin = f"Origin: {PAGE}"
        refused = {
            401: await ask(bench, "GET", "/", origin),
            404: await ask(bench, "GET", "/-/x", origin),
            413: await ask(bench, "POST", "/v1/completions", origin, key, body=b"x" * 101),
            400: await ask(bench, "GET", "/", origin, key, "X-SkyServe-Policy: none"),
        }
        bench.table.apply(replace(bench.table.table, targets=()), 0.0)
        bench.intake.applied()
        refused[503] = await ask(bench, "GET", "/", origin, key)
        assert {status: got.status for status, got in refused.items()} == {one: one for one in refused}
        assert [status for status, got in refused.items() if ALLOWED not in got.headers] == []
        bench.check()

    run(story())


def test_other_rules_are_in_force_with_the_table() -> None:
    async def story() -> None:
        bench = Bench()
        for cors, allowed in ((Cors(("*",)), [b"*"]), (CORS, [PAGE.encode()]), (Cors(), [])):
            bench.table.apply(replace(bench.table.table, cors=cors), 0.0)
            bench.intake.applied()
            got = await ask(bench, "GET", "/", f"Origin: {PAGE}")
            assert got.values(b"access-control-allow-origin") == allowed
        bench.check()

    run(story())


# --- paths and bodies


@pytest.mark.parametrize(
    "path",
    [
        "/../admin",
        "/%2e%2E/admin",
        "/a/.%2e/b",
        "/a/./b",
        "/a/..",
        "/a/%2e",
        "/a%2f..%2fb",
        "/a/..;x/b",
        "/a\\..\\b",
    ],
)
def test_a_path_cannot_leave_the_base_path_of_a_target(path: str) -> None:
    async def story() -> None:
        below = replace(TARGET, url="http://192.0.2.9:8000/tenant")
        bench = Bench(table=a_table(below))
        got = await ask(bench, "GET", path)
        assert (got.status, b"dot_segments" in got.body) == (400, True)
        assert bench.seen == []
        bench.table.apply(a_table(replace(TARGET, id="plain")), 0.0)
        bench.intake.applied()
        assert (await ask(bench, "GET", path)).status == 200  # it has nothing to leave
        bench.check()

    run(story())


@pytest.mark.parametrize("path", ["/a..b/c", "/..a", "/a/...", "/.well-known/x", "/?next=/../x"])
def test_other_dots_pass_below_a_base_path(path: str) -> None:
    async def story() -> None:
        bench = Bench(table=a_table(replace(TARGET, url="http://192.0.2.9:8000/tenant/")))
        assert (await ask(bench, "GET", path)).status == 200
        assert [seen.target for seen in bench.seen] == [b"/tenant" + path.encode()]
        bench.check()

    run(story())


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("buffer_bytes", [10, 1000], ids=["passed on", "kept"])
def test_the_limit_of_bodies_is_for_those_that_are_parsed(chunked: bool, buffer_bytes: int) -> None:
    async def story() -> None:
        bench = Bench(max_body_bytes=100, buffer_bytes=buffer_bytes)
        body = b"x" * 101
        framed = b"65\r\n" + body + b"\r\n0\r\n\r\n" if chunked else body
        line = "Transfer-Encoding: chunked" if chunked else "Content-Length: 101"
        for path, status in (("/v1/audio/transcriptions", 200), ("/v1/chat/completions", 413)):
            client = bench.client()
            client.send(head("POST", path, line), framed)
            await settle()
            (got,) = client.answers(b"POST")
            assert got.status == status
        assert b"100 bytes (load_balancer.max_body_mb)" in got.body
        assert bench.seen[0].body == body
        bench.check()

    run(story())


# --- proxies before it


@pytest.mark.parametrize(
    ("networks", "trusted"),
    [
        ((), False),
        (("10.0.0.0/8",), False),
        (("10.0.0.0/8", "192.0.2.0/24"), True),
        (("192.0.2.1",), True),
        (("::/0",), False),
    ],
)
def test_the_word_of_a_trusted_proxy_is_passed_on(networks: tuple[str, ...], trusted: bool) -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        for table in (bench.table.table, replace(bench.table.table, trusted_proxies=networks)):
            bench.table.apply(table, 0.0)
            bench.intake.applied()  # also for connections that are there already
            client.send(head("GET", "/", "X-Forwarded-For: 203.0.113.7", "X-Forwarded-Proto: https"))
            await settle()
        seen = [(one.values(b"x-forwarded-for"), one.values(b"x-forwarded-proto")) for one in bench.seen]
        assert seen[0] == ([b"192.0.2.1"], [b"http"])
        passed = ([b"203.0.113.7, 192.0.2.1"], [b"https"])
        assert seen[1] == (passed if trusted else seen[0])
        assert [got.status for got in client.answers(b"GET", b"GET")] == [200, 200]
        bench.check()

    run(story())


def test_a_proxy_is_known_by_its_address_in_any_form() -> None:
    async def story() -> None:
        gate = Bench(table=a_table(trusted_proxies=("10.0.0.0/8", "fe80::/10"))).intake.gate
        peers = ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0", "11.0.0.1", "::1", "unknown"]
        assert [gate.is_trusted_proxy(peer) for peer in peers] == [True, True, True, False, False, False]

    run(story())


# --- SIGHUP


async def handshake(agent: RunningAgent) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A new connection, and the certificate that the agent showed."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port, ssl=context)
    return reader, writer, writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def hang_up(agent: RunningAgent, logs: str) -> None:
    """SIGHUP, until the agent has logged this."""
    before = agent.log.read_text().count(logs)
    agent.process.send_signal(signal.SIGHUP)

    async def logged() -> bool:
        return agent.log.read_text().count(logs) > before

    await until(logged)


async def test_a_hangup_brings_the_new_certificate_and_drops_no_connection(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        certfile, keyfile = self_signed(tmp_path)
        files = ("--tls-certfile", str(certfile), "--tls-keyfile", str(keyfile))
        agent = await w.agent(*files, "--target", (await w.target("target")).url)
        reader, writer, old = await handshake(agent)
        self_signed(tmp_path)
        await hang_up(agent, "reload tls_certfile=")
        _, second, new = await handshake(agent)
        assert new == ssl.PEM_cert_to_DER_cert(certfile.read_text()) != old
        certfile.write_text("no certificate")
        await hang_up(agent, "keep the certificate")
        _, third, kept = await handshake(agent)
        assert kept == new
        writer.write(head("GET", "/"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        for one in (writer, second, third):
            one.close()


async def test_a_hangup_brings_the_table_of_the_file(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        before, after = await w.targets("before", "after")
        file = tmp_path / "table.json"
        agent = await w.agent("--table-file", str(file))
        await agent.push(before.json, revision="r1")
        assert await agent.text() == (200, "before")
        table = {**json.loads(file.read_text()), "revision": "r2", "targets": [after.json]}
        file.write_text(json.dumps(table))
        await hang_up(agent, "revision=r2 changed=True")
        assert await agent.text() == (200, "after")
        await hang_up(agent, "revision=r2 changed=False")
        for wrong in (
            "{",
            json.dumps({**table, "service": "another"}),
            json.dumps({**table, "policy": "none"}),
        ):
            file.write_text(wrong)
            await hang_up(agent, "keep the table")
        assert await agent.text() == (200, "after")


async def test_a_hangup_of_an_agent_without_files_ends_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        agent = await w.agent("--target", (await w.target("target")).url)
        for _ in range(3):
            agent.process.send_signal(signal.SIGHUP)
            assert await agent.text() == (200, "target")


# --- sessions by cookie

STICKY = {"policy": "consistent_hash", "session": Session(CookieMode.AUTO)}
COOKIE = re.compile(rb"skyserve_session=([A-Za-z0-9_-]{22}); Path=/; HttpOnly; SameSite=Lax")
EIGHT = tuple(Target(f"t{number}", f"http://192.0.2.9:{8000 + number}") for number in range(8))


def sticky(**options: Any) -> Table:
    return Table("service", "r1", EIGHT, **{**STICKY, **options})


@pytest.mark.parametrize("others", ["", "theme=dark; ", "skyserve_session=short; "])
def test_a_browser_gets_a_cookie_once_and_stays_with_its_target(others: str) -> None:
    async def story() -> None:
        bench = Bench(table=sticky())
        sessions, lives = set(), set()
        for _ in range(8):
            got = await ask(bench, "GET", "/", f"Cookie: {others}app=1")
            (line,) = got.values(b"set-cookie")
            match = COOKIE.fullmatch(line)
            assert match is not None
            session = match[1].decode()
            sessions.add(session)
            visited = set()
            for path in ("/", "/page", "/page?x=1"):
                again = await ask(bench, "GET", path, f"Cookie: {others}skyserve_session={session}; app=1")
                assert again.values(b"set-cookie") == []
                visited.add(targets_of(bench)[-1])
            assert visited == {targets_of(bench)[-4]}, "the first request went elsewhere"
            lives |= visited
        assert len(sessions) == 8
        assert len(lives) > 1
        bench.check()

    run(story())


def targets_of(bench: Bench) -> list[str]:
    """To which target each request went, in order."""
    stories = [one.to_json() for one in reversed(bench.account.explanations.latest(1000))]
    return [str(story["steps"][0]["target"]) for story in stories]


@pytest.mark.parametrize(
    ("path", "line", "body"),
    [
        ("/", "X-Session-Id: mine", b""),
        ("/", "X-SkyServe-Session: mine", b""),
        ("/v1/completions", "X-Any: 1", b'{"user": "mine", "prompt": "x"}'),
    ],
)
def test_a_client_that_names_its_session_gets_no_cookie(path: str, line: str, body: bytes) -> None:
    async def story() -> None:
        bench = Bench(table=sticky())
        got = await ask(bench, "POST", path, line, body=body)
        assert (got.status, got.values(b"set-cookie")) == (200, [])
        bench.check()

    run(story())


def test_without_the_option_there_is_no_cookie() -> None:
    async def story() -> None:
        bench = Bench(table=sticky(session=Session()))
        assert (await ask(bench, "GET", "/")).values(b"set-cookie") == []
        bench.check()

    run(story())


def test_a_websocket_gets_a_cookie_and_goes_by_it() -> None:
    async def story() -> None:
        key = base64.b64encode(b"0123456789abcdef")
        digest = hashlib.sha1(key + WEBSOCKET_GUID, usedforsecurity=False).digest()
        lines = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + base64.b64encode(
            digest
        )
        bench = Bench(lambda seen: [], table=sticky())
        wanted = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        cookie: tuple[str, ...] = ()
        for _ in range(2):
            client = bench.client()
            client.send(head("GET", "/ws", *wanted, f"Sec-WebSocket-Key: {key.decode()}", *cookie))
            await settle()
            peer = bench.peers[-1]
            peer.took = lambda: None  # type: ignore[method-assign]  # from here on it is no HTTP
            peer.wire._took = None
            peer.say([b"HTTP/1.1 101 Switching Protocols\r\n" + lines + b"\r\n\r\n"])
            await settle()
            found = COOKIE.search(client.wire.take())
            assert (found is None) == bool(cookie)
            if found is not None:
                cookie = (f"Cookie: skyserve_session={found[1].decode()}",)
            client.wire.feed(ENDS)
            await settle()
        first, second = targets_of(bench)
        assert first == second
        bench.check()

    run(story())


def test_a_cookie_over_tls_is_for_tls_only() -> None:
    _, plain = session_cookie.read_or_make(b"", secure=False)
    _, secure = session_cookie.read_or_make(b"", secure=True)
    assert b"Secure" not in plain
    assert secure.endswith(b"; Secure\r\n")


def test_a_user_named_in_the_body_is_a_session_for_streams_and_others_alike() -> None:
    async def story() -> None:
        bench = Bench(table=sticky(session=Session()))
        bodies = [{"model": "m", "user": f"user {number}"} for number in range(8)]
        for body in bodies:
            for more in ({}, {"stream": False}, {"stream": True}):
                await ask(bench, "POST", "/v1/embeddings", body=json.dumps({**body, **more}).encode())
        went = targets_of(bench)
        assert [len(set(went[at : at + 3])) for at in range(0, 24, 3)] == [1] * 8
        assert len(set(went)) > 1
        bench.check()

    run(story())


# --- other formats of models


def event(data: dict[str, Any]) -> bytes:
    line = f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


STREAMS = {
    "/v1/responses": [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.output_text.delta", "delta": "A lake"},
        {"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 3}}},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "A lake"}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}},
    ],
}
BODY = b'{"model": "m", "stream": true, "input": "What is a lake?"}'


@pytest.mark.parametrize("path", STREAMS)
def test_streams_of_other_formats_are_counted(path: str) -> None:
    async def story() -> None:
        pieces = [b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n", *map(event, STREAMS[path]), b"0\r\n\r\n"]
        bench = Bench(lambda seen: pieces)
        got = await ask(bench, "POST", path, body=BODY)
        assert got.whole
        counts = bench.account.metrics.counts
        assert (counts.tokens_in, counts.tokens_out) == (7, 3)
        bench.check()

    run(story())


@pytest.mark.parametrize("path", STREAMS)
def test_streams_of_other_formats_that_cannot_go_on_end_with_their_own_error(path: str) -> None:
    async def story() -> None:
        pieces = [b"HTTP/1.1 200 OK\r\n" + EVENTS + b"\r\n", *map(event, STREAMS[path][:2]), DIES]
        bench = Bench(lambda seen: pieces, targets=2)
        got = await ask(bench, "POST", path, body=BODY)
        assert (got.status, got.whole, len(bench.seen)) == (200, True, 1)
        error = got.body.split(b"A lake")[1]
        assert (b"response.failed" if path == "/v1/responses" else b"event: error") in error
        bench.check()

    run(story())
