"""Login through a proxy over real sockets: whose header is believed, what is rejected, and what users and groups may do."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from multidict import CIMultiDict

from skyserve_cli.config import Config, ConfigError, load_config
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.daemon import _certificate
from skyserve_cli.controller.teams.proxy_login import login_of
from skyserve_cli.home import Home
from tests.integration.lb_harness import self_signed
from tests.integration.test_controller_api import TOKEN, YAML, Controller, free_port

SECRET = "a secret of the proxy, long enough"
CONFIG = """
clouds: {{local: {{}}}}
dashboard: {{actions: true}}
teams: {{research: {{max_replicas: 9}}}}
users:
  - {{name: ada@example.com, role: operator, services: [chat], team: research}}
  - {{name: root@example.com, role: admin}}
groups:
  - {{name: ops, role: operator}}
  - {{name: staff, role: viewer}}
controller:
  listen:
    port: 9443
    {tls}
    trusted_proxy: {{from: [127.0.0.1/32], groups_header: X-Forwarded-Groups, {proof}}}
"""
USER, GROUPS, PROOF = "X-Forwarded-User", "X-Forwarded-Groups", "X-Skyserve-Proxy-Secret"
Headers = list[tuple[str, str]]


def by_proxy(user: str = "ada@example.com", *more: tuple[str, str]) -> Headers:
    return [(USER, user), (PROOF, SECRET), *more]


class Port:
    """The API on a port, as the daemon opens it."""

    def __init__(self, controller: Controller, config: Config) -> None:
        self.controller = controller
        app = controller.api().app(is_remote=True)
        listen = config.controller.listen
        assert listen is not None
        self.server = TestServer(app)
        self.context = _certificate(listen)

    async def call(
        self,
        headers: Headers,
        method: str = "GET",
        path: str = "/v1/services",
        body: object = None,
        *,
        source: str = "127.0.0.1",
        context: ssl.SSLContext | None = None,
    ) -> tuple[int, Any, Mapping[str, str]]:
        connector = aiohttp.TCPConnector(local_addr=(source, 0), ssl=context or True)
        async with aiohttp.ClientSession(connector=connector) as session:
            url = self.server.make_url(path)
            async with session.request(method, url, json=body, headers=CIMultiDict(headers)) as response:
                content = await response.read()
                found = await response.json() if response.content_type == "application/json" else content
                return response.status, found, response.headers


@asynccontextmanager
async def opened(tmp_path: Path, *, proof: str = "", tls: str = "") -> AsyncIterator[Port]:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    home.config.write_text(CONFIG.format(proof=proof or f"secret_file: {secret}", tls=tls))
    first = free_port()
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    controller = Controller(home, fleet, range(first, first + 20), home.config)
    await controller.server.start_server()
    for name in ("chat", "other"):
        assert (await controller.up(YAML.replace("chat", name), name=name))[0] == 200
    port = Port(controller, load_config(home.config))
    await port.server.start_server(ssl=port.context) if port.context else await port.server.start_server()
    yield port
    await port.server.close()
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with opened(tmp_path) as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "source", "status", "word"),
    [
        (by_proxy(), "127.0.0.1", 200, ""),
        (by_proxy(), "127.0.0.2", 401, "the token is missing"),
        (
            [(USER, "ada@example.com")],
            "127.0.0.1",
            401,
            "the secret of the proxy, X-Skyserve-Proxy-Secret, is missing",
        ),
        ([(USER, "ada@example.com"), (PROOF, "wrong")], "127.0.0.1", 401, "missing or wrong"),
        ([(USER, "ada@example.com"), (PROOF, SECRET), (PROOF, SECRET)], "127.0.0.1", 401, "missing or wrong"),
        ([(USER, "ada@example.com"), (PROOF, SECRET), (PROOF, "x")], "127.0.0.1", 401, "missing or wrong"),
        ([(PROOF, SECRET)], "127.0.0.1", 401, "the token is missing"),
        (
            [*by_proxy(), (USER, "root@example.com")],
            "127.0.0.1",
            400,
            "X-Forwarded-User is there more than once",
        ),
        (
            by_proxy("eve@example.com", (GROUPS, "ops"), (GROUPS, "staff")),
            "127.0.0.1",
            400,
            "X-Forwarded-Groups is",
        ),
        (by_proxy("ada@example.com,root@example.com"), "127.0.0.1", 403, "no name of a user"),
        (by_proxy("owner"), "127.0.0.1", 403, "no name of a user"),
        (by_proxy("owner", (GROUPS, "ops")), "127.0.0.1", 403, "no name of a user"),
        (by_proxy(""), "127.0.0.1", 403, "no name of a user"),
        (by_proxy("eve@example.com"), "127.0.0.1", 403, "the user eve@example.com is not in users"),
        (by_proxy("eve@example.com", (GROUPS, "guests")), "127.0.0.1", 403, "in no group"),
        (by_proxy("eve@example.com", (GROUPS, "guests, staff")), "127.0.0.1", 200, ""),
        (by_proxy("ada@example.com", ("Authorization", "Bearer sks_x")), "127.0.0.1", 400, "both a token"),
        (by_proxy("ada@example.com", ("Authorization", "Bearer of.another.kind")), "127.0.0.1", 200, ""),
        (by_proxy("ada@example.com", ("Authorization", f"Bearer {TOKEN}")), "127.0.0.1", 200, ""),
    ],
)
async def test_whose_word_is_accepted(
    port: Port, headers: Headers, source: str, status: int, word: str
) -> None:
    found, content, _ = await port.call(headers, source=source)
    assert (found, word in str(content)) == (status, True), content
    assert SECRET not in str(content)
    if status == 200:
        assert next(one["name"] for one in content["services"]) == "chat"


async def test_a_header_in_two_spellings_is_there_twice(port: Port) -> None:
    url = port.server.make_url("/")
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"GET /v1/services HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"X-Forwarded-User: ada@example.com\r\nx-forwarded-USER: root@example.com\r\n"
        b"X-Skyserve-Proxy-Secret: " + SECRET.encode() + b"\r\n\r\n"
    )
    response = await reader.read()
    writer.close()
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"X-Forwarded-User is there more than once" in response


async def test_a_header_from_elsewhere_is_dropped_beside_a_token(port: Port) -> None:
    _, made = await port.controller.call("POST", "/v1/tokens", {"name": "vic", "role": "viewer"})
    headers = [("Authorization", f"Bearer {made['token']}"), (USER, "root@example.com"), (PROOF, SECRET)]
    assert (await port.call(headers, source="127.0.0.2"))[0] == 200
    status, content, _ = await port.call(headers, "POST", "/v1/services/chat/down", {}, source="127.0.0.2")
    assert (status, content["error"]) == (
        403, "the token vic has the role viewer; this needs the role operator",
    )  # fmt: skip
    assert (await port.call([("Authorization", f"Bearer {made['token']}")]))[
        0
    ] == 200  # tokens pass the proxy


async def test_the_socket_of_the_home_believes_no_header(port: Port) -> None:
    async with aiohttp.ClientSession() as session:
        url = port.controller.server.make_url("/v1/services")
        async with session.get(url, headers=CIMultiDict(by_proxy())) as response:
            assert response.status == 401


async def test_users_and_groups_have_their_roles_services_and_team(port: Port) -> None:
    staff = by_proxy("vic@example.com", (GROUPS, "staff"))
    for path in ("/v1/services/chat/down", "/v1/services/chat/replicas/1/down"):
        status, content, _ = await port.call(staff, "POST", path, {})
        assert (status, content["error"]) == (
            403, "the user vic@example.com has the role viewer; this needs the role operator",
        )  # fmt: skip
    both = by_proxy("vic@example.com", (GROUPS, "staff,ops"))
    assert (await port.call(both, "POST", "/v1/services/other/down", {}))[
        0
    ] == 200  # ops is the first in groups
    assert (await port.call(by_proxy(), "POST", "/v1/stop", {}))[0] == 403
    status, content, _ = await port.call(by_proxy(), "GET", "/v1/services/other")
    assert (status, "does not cover the service other" in content["error"]) == (403, True)
    assert [one["name"] for one in (await port.call(by_proxy()))[1]["services"]] == ["chat"]
    assert [one["name"] for one in (await port.call(by_proxy(), path="/v1/teams"))[1]["teams"]] == [
        "research"
    ]
    assert (await port.call(by_proxy(), "POST", "/v1/services/chat/down", {}))[0] == 200
    goals = [event.record for event in port.controller.store.events(None) if event.record.message == "down"]
    assert [goal.author for goal in goals] == ["vic@example.com", "ada@example.com"]


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ([("Sec-Fetch-Site", "same-origin")], 200),
        ([("Sec-Fetch-Site", "cross-site")], 403),
        ([("Sec-Fetch-Site", "same-site")], 403),
        ([("Sec-Fetch-Site", "none")], 403),
        ([("Origin", "https://evil.example")], 403),
        ([("Origin", "null")], 403),
        ([("Origin", "https://serve.example"), ("Host", "serve.example")], 200),
    ],
)
async def test_a_page_of_another_site_cannot_use_the_login_at_the_proxy(
    port: Port, more: Headers, status: int
) -> None:
    found, _, _ = await port.call([*by_proxy(), *more], "POST", "/v1/services/chat/down", {})
    assert found == status
    assert (await port.call([*by_proxy(), *more]))[0] == 200  # reading it is what browsers prevent


async def test_the_page_is_served_to_users_of_the_proxy(port: Port) -> None:
    status, content, headers = await port.call(by_proxy(), path="/")
    assert (status, b"<script" in content) == (200, True)
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert (await port.call(by_proxy(), path="/api.js"))[0] == 200
    assert (await port.call(by_proxy(), path="/../endpoint.py"))[0] == 404
    _, session, _ = await port.call(by_proxy(), path="/session")
    assert session == {
        "name": "ada@example.com",
        "role": "operator",
        "chat": True,
        "actions": True,
        "token": None,
    }
    _, session, _ = await port.call(by_proxy("vic@example.com", (GROUPS, "staff")), path="/session")
    assert (session["role"], session["chat"], session["actions"]) == ("viewer", False, False)
    assert (await port.call(by_proxy(), path="/v1/fleet"))[0] == 200
    for path in ("/", "/session", "/api.js"):
        assert (await port.call([], path=path))[0] == 401
        assert (await port.call(by_proxy("eve@example.com"), path=path))[0] == 403
    status, content, _ = await port.call(by_proxy("root@example.com"), "POST", "/v1/dashboard", {})
    assert (status, "address of the proxy" in content["error"]) == (
        403,
        True,
    )  # a code would outlive the login


async def test_a_stream_ends_so_that_the_proxy_is_called_again(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyserve_cli.controller.dashboard import change_stream
    from skyserve_cli.controller.teams import part

    monkeypatch.setattr(part, "LOGIN_S", 0.2)
    monkeypatch.setattr(change_stream, "CHECK_EVERY_S", 0.1)
    reading = asyncio.create_task(port.call(by_proxy(), path="/v1/stream"))
    while not reading.done():
        port.controller.store.set_down("chat", purge=False, now=1.0)  # something to report
        await asyncio.sleep(0.05)
    assert reading.result()[0] == 200


def issued(folder: Path, name: str, ca: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """A certificate with its key: of an authority, or issued by one for a client."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .sign(key if ca is None else ca[1], hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made, key


async def test_a_client_certificate_takes_the_place_of_the_secret(tmp_path: Path) -> None:
    authority = issued(tmp_path, "ca")
    issued(tmp_path, "proxy", authority)
    issued(tmp_path, "other", issued(tmp_path, "other-ca"))
    certfile, keyfile = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certfile))
    trusting.check_hostname = False

    def showing(name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(certfile))
        context.check_hostname = False
        context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        return context

    tls = f"certfile: {certfile}\n    keyfile: {keyfile}"
    proof = f"client_ca_file: {tmp_path / 'ca.pem'}"
    async with opened(tmp_path, proof=proof, tls=tls) as port:
        user = [(USER, "ada@example.com")]
        assert (await port.call(user, context=showing("proxy")))[0] == 200
        status, content, _ = await port.call(user, context=trusting)
        assert (status, content["error"]) == (401, "the client certificate of the proxy is missing")
        _, made = await port.controller.call("POST", "/v1/tokens", {"name": "vic", "role": "viewer"})
        held = [("Authorization", f"Bearer {made['token']}")]
        assert (await port.call(held, context=trusting))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await port.call(user, context=showing("other"))


@pytest.mark.parametrize(
    ("listen", "rest", "sentence"),
    [
        (
            "{from: [10.0.0.1]}",
            "",
            "controller.listen.trusted_proxy: secret_file or client_ca_file is needed",
        ),
        ("{secret_file: x}", "", "controller.listen.trusted_proxy.from: is missing"),
        ("{from: [], secret_file: x}", "", "controller.listen.trusted_proxy.from"),
        ("{from: [everywhere], secret_file: x}", "", "'everywhere' is no block like 10.0.0.7/32"),
        ("{from: [10.0.0.1/8], secret_file: x}", "", "has host bits set"),
        (
            "{from: [10.0.0.1], client_ca_file: x}",
            "",
            "trusted_proxy.client_ca_file needs certfile and keyfile",
        ),
        ("{from: [10.0.0.1], secret_file: x, header: Authorization}", "", "none may be Authorization"),
        ("{from: [10.0.0.1], secret_file: x, groups_header: x-forwarded-user}", "", "must differ"),
        ("{from: [10.0.0.1], secret_file: x, heder: y}", "", "trusted_proxy.heder: there is no such setting"),
        ("null", "users: [{name: owner}]", "users[0].name: 'owner' is no name of a user"),
        ("null", "users: [{name: a b}]", "users[0].name: 'a b' is no name of a user"),
        ("null", "users: [{name: a}, {name: a}]", "users: a is there twice"),
        ("null", "groups: [{name: a, team: b}]", "groups: a: there is no team b (teams: none)"),
        (
            "null",
            "groups: [{name: a, role: admin, services: [x]}]",
            "groups[0]: an admin covers all services",
        ),
        ("null", "groups: [{name: a, role: king}]", "groups[0].role"),
        ("null", "groups: [{role: viewer}]", "groups[0].name: is missing"),
    ],
)
def test_what_is_no_configuration(tmp_path: Path, listen: str, rest: str, sentence: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"controller: {{listen: {{port: 9443, trusted_proxy: {listen}}}}}\n{rest}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "cannot be read: No such file"),
        (b"short", "at least 16 characters"),
        (b"\xff" * 20, "must be ASCII"),
        (b"one line\nand another one", "must be one line"),
    ],
)
def test_what_is_no_secret(tmp_path: Path, content: bytes | None, word: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"controller: {{listen: {{port: 9443, trusted_proxy: {{from: [10.0.0.1], secret_file: {file}}}}}}}\n"
    )
    with pytest.raises(ConfigError, match=word) as error:
        login_of(load_config(path))
    assert str(error.value).startswith("controller.listen.trusted_proxy.secret_file: ")
