"""Tokens over a real socket and a real database: what each role may do, and what a revoked token may not."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from skyserve_cli.config import DashboardConfig
from skyserve_cli.controller.api.access import OWNER, AccessRole, Caller, authorize, set_caller
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.dashboard.endpoint import ACTION_HEADER, Dashboard, OfPage
from skyserve_cli.controller.dashboard.page_routes import PageRoutes
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.team import TeamTokens
from tests.integration.test_controller_api import TOKEN, YAML, Controller, free_port, running

AWAY = "clouds: {local: {}, ssh: {pools: {lab: {hosts: [{host: 192.0.2.7, user: me}]}}}}\n"
SAME = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    async with running(tmp_path) as one:
        for name in ("chat", "other"):
            assert (await one.up(YAML.replace("chat", name), name=name))[0] == 200
        yield one


async def token(controller: Controller, name: str, role: str, services: list[str] | None = None) -> str:
    status, found = await controller.call(
        "POST", "/v1/tokens", {"name": name, "role": role, "services": services}
    )
    assert status == 200, found
    return str(found["token"])


async def call(
    controller: Controller, token: str, method: str, path: str, body: object = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    url = controller.server.make_url(path)
    async with controller.session.request(method, url, json=body, headers=headers) as response:
        content = await response.read()
        return response.status, await response.json() if content[:1] in (b"{", b"[") else content


def page_of(
    controller: Controller, file: Path, draw: Callable[[], str], *, actions: bool = False
) -> Dashboard:
    kernel = controller.kernel
    pages = PageRoutes(kernel.service, kernel.agents, controller.parts.callers_revision)
    offered = OfPage([*kernel.routes.reads(), *pages.routes()], kernel.routes.acts())
    settings = DashboardConfig(actions=actions)
    return Dashboard(file, controller.now, draw, offered, settings, controller.parts.named)


def tokens_of(controller: Controller) -> TeamTokens:
    return TeamTokens(controller.store.database)


def paths_of(controller: Controller) -> list[tuple[str, str]]:
    """Every route of the API as a request about the service chat."""
    found = []
    for route in controller.api().app().router.routes():
        if route.resource is not None and route.method != "HEAD":
            path = route.resource.canonical.replace("{name}", "chat").replace("{cloud}", "local")
            for part in ("{id}", "{node}", "{token}"):
                path = path.replace(part, "1")
            found.append((route.method, path))
    return sorted(found)


def rights(controller: Controller) -> dict[tuple[str, str], AccessRole]:
    return {(one.method, re.sub(r":[^}]*", "", one.path)): one.role for one in controller.routes()}


async def test_roles_of_all_routes(controller: Controller) -> None:
    found = rights(controller)
    routes = {
        (route.method, route.resource.canonical)
        for route in controller.api().app().router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert set(found) == routes
    by_role = {
        role: {f"{method} {path}" for (method, path), needed in found.items() if needed is role}
        for role in AccessRole
    }
    assert by_role[AccessRole.VIEWER] == {
        *(
            f"GET /v1/{path}"
            for path in ("health", "activity", "services", "fleet", "teams", "stream", "events")
        ),
        "GET /v1/services/{name}",
        *(
            f"GET /v1/services/{{name}}/{path}"
            for path in ("history", "series", "usage", "report", "explain")
        ),
        "GET /v1/logs/load_balancer/{name}",
        "GET /v1/logs/replica/{name}/{id}",
        "GET /v1/logs/replica/{name}/{id}/{node}",
        "POST /v1/dashboard",
    }
    assert by_role[AccessRole.OPERATOR] == {
        "PUT /v1/services/{name}",
        "POST /v1/services/{name}/down",
        "POST /v1/services/{name}/chat",
        "POST /v1/services/{name}/replicas/{id}/down",
        "GET /v1/services/{name}/replicas/{id}/access",
        "GET /v1/services/{name}/replicas/{id}/session",
        *(f"POST /v1/{path}" for path in ("plan", "tidy", "uploads", "uploads/parts")),
    }


@pytest.mark.parametrize("role", [AccessRole.VIEWER, AccessRole.OPERATOR])
async def test_a_role_gets_403_wherever_it_may_not(controller: Controller, role: AccessRole) -> None:
    held = await token(controller, "ada", role.value)
    needs = {
        (method, path.replace("{name}", "chat").replace("{id}", "1").replace("{node}", "1")): needed
        for (method, path), needed in rights(controller).items()
    }
    before = controller.store.services()
    seen = set()
    for method, path in paths_of(controller):
        if role.includes(needs.get((method, path), AccessRole.ADMIN)):
            continue
        status, answer = await call(controller, held, method, path, {})
        assert status == 403, (method, path, answer)
        assert "ada" in answer["error"]
        seen.add(path)
    assert {"/v1/stop", "/v1/tokens", "/v1/tokens/1/revoke", "/v1/leaks/local"} <= seen
    assert controller.store.services() == before
    assert not controller.stopped


async def test_a_viewer_reads(controller: Controller) -> None:
    held = await token(controller, "ada", "viewer")
    for path in (
        "/v1/health",
        "/v1/activity",
        "/v1/services",
        "/v1/fleet",
        "/v1/services/chat",
        "/v1/events",
    ):
        assert (await call(controller, held, "GET", path))[0] == 200


async def test_a_token_of_some_services_sees_no_others(controller: Controller) -> None:
    held = await token(controller, "ada", "operator", ["chat"])
    for path in ("/v1/services", "/v1/fleet"):
        _, all_of_them = await call(controller, TOKEN, "GET", path)
        status, found = await call(controller, held, "GET", path)
        assert status == 200
        assert [one["name"] for one in found["services"]] == ["chat"]
        assert [one["name"] for one in all_of_them["services"]] == ["chat", "other"]
    _, events = await call(controller, held, "GET", "/v1/events")
    assert {event["service"] for event in events["events"]} == {"chat"}
    spec = spec_to_json(load_text(YAML.replace("chat", "other")).spec)
    for method, path, body in [
        ("GET", "/v1/services/other", None),
        ("GET", "/v1/services/other/history", None),
        ("GET", "/v1/events?service=other", None),
        ("GET", "/v1/logs/load_balancer/other", None),
        ("GET", "/v1/services/none", None),
        ("POST", "/v1/services/other/down", {}),
        ("PUT", "/v1/services/other", {"spec": spec, "mode": "rolling"}),
        ("POST", "/v1/plan", {"spec": spec}),
        ("POST", "/v1/tidy", {"services": ["chat", "other"]}),
    ]:
        status, answer = await call(controller, held, method, path, body)
        assert status == 403, (path, answer)
        assert "does not cover the service" in answer["error"]
    assert not any(row.down for row in controller.store.services())


async def test_the_author_of_a_goal_is_in_the_event_log(controller: Controller) -> None:
    held = await token(controller, "ada", "operator", ["chat"])
    assert (await call(controller, held, "POST", "/v1/services/chat/down", {}))[0] == 200
    _, found = await call(controller, TOKEN, "GET", "/v1/events?service=chat")
    goals = [(event["message"], event["author"]) for event in found["events"] if event["kind"] == "goal"]
    assert goals == [("up: version 1", "owner"), ("down", "ada")]


async def test_a_revoked_token_is_useless_at_once(controller: Controller) -> None:
    held = await token(controller, "ada", "operator")
    assert (await call(controller, held, "GET", "/v1/services"))[0] == 200
    assert (await controller.call("POST", "/v1/tokens/ada/revoke", {}))[0] == 200
    for method, path in paths_of(controller):
        assert (await call(controller, held, method, path, {}))[0] == 401, path
    assert (await controller.call("POST", "/v1/tokens/ada/revoke", {}))[0] == 404
    _, found = await controller.call("GET", "/v1/tokens")
    assert [(one["name"], one["revoked_at"]) for one in found["tokens"]] == [("ada", 1000.0)]
    again = await token(controller, "ada", "viewer")
    assert (await call(controller, again, "GET", "/v1/services"))[0] == 200
    assert (await call(controller, held, "GET", "/v1/services"))[0] == 401


async def test_only_the_digest_is_stored(controller: Controller) -> None:
    held = await token(controller, "ada", "admin")
    files = [path for path in controller.home.root.rglob("*") if path.is_file()]
    assert files
    assert not any(held.encode() in path.read_bytes() for path in files)
    found = tokens_of(controller).token_with(digest=hashlib.sha256(held.encode()).hexdigest())
    assert found is not None
    assert found.name == "ada"


async def test_an_admin_creates_tokens_in_their_own_name(controller: Controller) -> None:
    held = await token(controller, "ada", "admin")
    body = {"name": "bob", "role": "viewer"}
    assert (await call(controller, held, "POST", "/v1/tokens", body))[0] == 200
    assert {row.name: row.created_by for row in tokens_of(controller).tokens()} == {
        "ada": "owner",
        "bob": "ada",
    }


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"name": "ada", "role": "viewer"}, 409, "revoke it first"),
        ({"name": "owner", "role": "viewer"}, 400, "no name of a token"),
        ({"name": "a b", "role": "viewer"}, 400, "no name of a token"),
        ({"name": "bob", "role": "king"}, 400, "king"),
        ({"name": "bob", "role": "admin", "services": ["chat"]}, 400, "covers all services"),
        ({"name": "bob", "role": "viewer", "services": []}, 400, "1 to 1000"),
        ({"role": "viewer"}, 400, "name"),
    ],
)
async def test_what_is_no_token(controller: Controller, body: object, status: int, word: str) -> None:
    await token(controller, "ada", "viewer")
    found, answer = await controller.call("POST", "/v1/tokens", body)
    assert found == status
    assert word in answer["error"]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ("resources: {infra: local}", "resources.infra: local"),
        ("resources: {infra: ssh/lab}\nevent_callback: cat sealing.key", "event_callback"),
        (
            "resources: {infra: ssh/lab}\nload_balancer: {api_keys_file: /etc/shadow}",
            "load_balancer.api_keys_file",
        ),
        ("resources: {infra: ssh/lab}\nworkdir: WORKDIR", "workdir"),
        ("resources: {infra: ssh/lab}\nfile_mounts: {/tmp/x: WORKDIR}", "file_mounts"),
    ],
)
async def test_what_uses_the_host_of_the_controller_needs_an_admin(
    tmp_path: Path, more: str, word: str
) -> None:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    home.config.write_text(AWAY)
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    first = free_port()
    controller = Controller(home, fleet, range(first, first + 20), home.config)
    await controller.server.start_server()
    try:
        held = await token(controller, "ada", "operator")
        more = more.replace("WORKDIR", str(tmp_path))
        service = "readiness_probe: /, replicas: 1"
        if "\nload_balancer" in more:
            more, inner = more.split("\n")
            service += f", {inner}"
        text = f"name: x\nservice: {{{service}}}\nrun: serve-it\n{more}\n"
        spec = spec_to_json(load_text(text).spec)
        for method, path in (("PUT", "/v1/services/x"), ("POST", "/v1/plan")):
            status, answer = await call(controller, held, method, path, {"spec": spec})
            assert status == 403, answer
            assert f"{word}: uses the controller's host, which needs the role admin" in answer["error"]
        assert controller.store.services() == []
        admin = await token(controller, "eve", "admin")
        assert (await call(controller, admin, "PUT", "/v1/services/x", {"spec": spec}))[0] == 200
    finally:
        await controller.session.close()
        await controller.server.close()
        controller.store.close()


async def test_a_port_does_not_accept_the_token_of_the_owner(controller: Controller) -> None:
    server = TestServer(controller.api().app(is_remote=True))
    await server.start_server()
    held = await token(controller, "ada", "viewer")
    async with aiohttp.ClientSession() as session:
        for given, status in ((TOKEN, 401), ("", 401), ("\udcff", 401), (held, 200)):
            headers = {"Authorization": f"Bearer {given}"} if given.isascii() else {}
            async with session.get(server.make_url("/v1/services"), headers=headers) as response:
                assert response.status == status
    await server.close()


async def test_a_port_says_that_it_lives_without_a_token_and_nothing_else(controller: Controller) -> None:
    server = TestServer(controller.api().app(is_remote=True))
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        for path, status in (
            ("/livez", 200),
            ("/livez/", 401),
            ("/livez/v1/services", 401),
            ("/v1/health", 401),
        ):
            async with session.get(server.make_url(path)) as response:
                assert (response.status, await response.text() == "ok\n") == (status, status == 200)
        async with session.get(controller.server.make_url("/livez")) as response:
            assert response.status == 401  # the socket of the home has no probes
    await server.close()


async def test_a_session_of_the_page_has_the_role_of_its_token(
    controller: Controller, tmp_path: Path
) -> None:
    numbers = iter(range(100))
    page = page_of(
        controller, tmp_path / "page.json", lambda: f"drawn-{next(numbers)}-{'x' * 20}", actions=True
    )
    await token(controller, "ada", "operator", ["chat"])
    await token(controller, "vic", "viewer", ["chat"])
    may: dict[str, list[int]] = {}
    for name, role, services in (
        ("vic", AccessRole.VIEWER, frozenset({"chat"})),
        ("ada", AccessRole.OPERATOR, frozenset({"chat"})),
    ):
        set_caller(Caller(name, role, services))
        base, code = (await page.code(None))["url"].split("/#")
        set_caller(OWNER)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            await browser.post(f"{base}/session", json={"code": code}, headers=SAME)
            session = await (await browser.get(f"{base}/session")).json()
            assert (session["name"], session["role"]) == (name, role.value)
            assert session["actions"] == (role is AccessRole.OPERATOR)
            fleet = await (await browser.get(f"{base}/v1/fleet")).json()
            assert [one["name"] for one in fleet["services"]] == ["chat"]
            headers = {**SAME, ACTION_HEADER: session["token"] or ""}
            may[name] = [
                (await browser.post(f"{base}/v1/services/{service}/down", json={}, headers=headers)).status
                for service in ("other", "chat")
            ]
            tokens_of(controller).revoke_token(name, 1.0)
            assert (await browser.get(f"{base}/v1/fleet")).status == 401
            assert (await browser.get(f"{base}/session")).status == 401
    await page.close()
    assert may == {"vic": [403, 403], "ada": [403, 200]}
    goals = [event.record for event in controller.store.events("chat") if event.record.kind == "goal"]
    assert [(goal.message, goal.author) for goal in goals] == [("up: version 1", "owner"), ("down", "ada")]


def test_a_route_without_a_role_needs_an_admin() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    needed = Route("GET", "/v1/new", handler).role
    with pytest.raises(Exception, match="needs the role admin"):
        authorize(Caller("ada", AccessRole.OPERATOR), needed, None)
    authorize(Caller("ada", AccessRole.ADMIN), needed, None)


async def test_a_stream_ends_when_its_token_is_revoked_by_another_controller(controller: Controller) -> None:
    """Both controllers have one database. A second token, and a session of the page, go on and end with theirs."""
    held = {name: await token(controller, name, "viewer") for name in ("ada", "bob", "vic")}
    other = Controller(
        controller.home,
        LocalFleet(controller.home.load_balancers, asyncio.get_running_loop(), lambda: None),
        range(40000, 40001),
    )
    await other.server.start_server()
    page = page_of(controller, controller.home.dashboard, lambda: "drawn" * 9)
    set_caller(Caller("vic", AccessRole.VIEWER))
    base, code = (await page.code(None))["url"].split("/#")
    set_caller(OWNER)
    browser = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
    await browser.post(f"{base}/session", json={"code": code}, headers=SAME)

    async def follow(session: aiohttp.ClientSession, url: Any, **headers: str) -> float:
        async with session.get(url, headers=headers) as response:
            assert response.status == 200
            await response.content.readuntil(b"data: ")
            opened.release()
            await response.content.read()
        return asyncio.get_running_loop().time()

    opened = asyncio.Semaphore(0)
    url = controller.server.make_url("/v1/stream")
    streams = {
        name: asyncio.create_task(follow(controller.session, url, Authorization=f"Bearer {held[name]}"))
        for name in ("ada", "bob")
    }
    streams["vic"] = asyncio.create_task(follow(browser, f"{base}/v1/stream"))
    for _ in streams:
        await opened.acquire()
    for name in ("ada", "vic"):
        revoked_at = asyncio.get_running_loop().time()
        tokens_of(other).revoke_token(name, 1.0)
        ended_at = await asyncio.wait_for(streams.pop(name), 5.0)
        assert ended_at - revoked_at < 2.0
        assert not any(stream.done() for stream in streams.values())
    streams["bob"].cancel()
    await browser.close()
    await page.close()
    await other.session.close()
    await other.server.close()
    other.store.close()
