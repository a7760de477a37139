"""The controller's API over a real socket, a real database and the local cloud: every route and every refusal."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import sqlalchemy as sa
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from policies.model import Memory, Offer, Replica, ReplicaState
from provisioners.local.cloud import LocalProvisioner
from provisioners.port.base import Candidate, Instance, Requirements
from skyserve_cli.clouds import Clouds
from skyserve_cli.config import Config, LoadBalancerConfig, load_config
from skyserve_cli.controller.api import unix_socket
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.route import Route
from skyserve_cli.controller.api.routes import KernelRoutes
from skyserve_cli.controller.api.service import ControllerService, Running, Stored
from skyserve_cli.controller.balancers.agent_reader import AgentReader
from skyserve_cli.controller.balancers.dns import ThreadDns
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.balancers.regional_fleet import RegionalFleet
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.log_archive import LogArchive
from skyserve_cli.controller.part import Kernel, Parts
from skyserve_cli.controller.persistence.leadership import Leadership
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.usage import StoredUsage
from skyserve_cli.state.values import EventRecord

TOKEN = "the-token"
YAML = "name: chat\nresources: {cloud: local}\nservice: {readiness_probe: /, replicas: 2}\nrun: serve-it\n"
ROUTES = [
    ("GET", "/v1/health"),
    ("GET", "/v1/activity"),
    ("GET", "/v1/services"),
    ("PUT", "/v1/services/chat"),
    ("POST", "/v1/services/chat/down"),
    ("POST", "/v1/services/chat/replicas/1/down"),
    ("GET", "/v1/services/chat/replicas/1/access"),
    ("GET", "/v1/services/chat/replicas/1/session"),
    ("POST", "/v1/plan"),
    ("GET", "/v1/events"),
    ("GET", "/v1/logs/controller"),
    ("GET", "/v1/logs/load_balancer/chat"),
    ("GET", "/v1/logs/replica/chat/1"),
    ("POST", "/v1/tidy"),
    ("GET", "/v1/leaks/local"),
    ("POST", "/v1/leaks/local/remove"),
    ("POST", "/v1/leaks/local/forget"),
    ("POST", "/v1/stop"),
    ("GET", "/v1/nothing"),
]


class NothingListed:
    """Nothing has been listed yet."""

    def last(self, cloud: str) -> tuple[Instance, ...]:
        return ()

    def machines(self, cloud: str) -> dict[str, Instance]:
        return {}


class Controller:
    """The API with everything behind it but the reconciler."""

    def __init__(self, home: Home, fleet: LocalFleet, ports: range, config: Path | None = None) -> None:
        self.time = 1000.0
        self.home = home
        home.token_file.write_text(TOKEN)
        self.store = Store(Database(home.database_url))
        self.leadership = Leadership(self.store, "here", "this one", self)
        self.leadership.step()
        self.woken = self.stopped = 0
        seal = SecretBox(home.sealing_keys()[0])
        settings = LoadBalancerConfig(first_port=ports.start, last_port=ports.stop - 1)
        self.specs = SpecCache(self.store, seal)
        chosen = Config() if config is None else load_config(config)
        clouds = Clouds(home, chosen.model_copy(update={"load_balancer": settings}))
        loop = asyncio.get_running_loop()
        regional = RegionalFleet(clouds.get, home.machine_secret(), self, loop, self._wake)
        self.controller_service = ControllerService(
            Stored(self.store, self.specs, seal),
            Running(
                fleet,
                regional,
                ThreadDns(clouds.names, clouds.name_region, "own", self, self._wake),
                NothingListed(),
                LogArchive(home.log_archive),
            ),
            clouds,
            self,
            self.leadership,
            health := StoreHealth(0.0),
            self._wake,
        )
        self.activity = Activity(self.store.database, health, self.leadership, self)
        self.parts = Parts()
        self.kernel = Kernel(
            home,
            chosen,
            self.store,
            self,
            self.specs,
            self.controller_service,
            KernelRoutes(self.controller_service, home, self._stop, self.parts, self.activity),
            AgentReader(fleet.admin_ports, regional.admin_ports),
            self.parts,
        )
        self.parts.make(self.kernel)
        self.server = TestServer(self.api().app())
        self.session = aiohttp.ClientSession()

    def api(self) -> Api:
        return Api(TOKEN, self.routes(), self.parts)

    def routes(self) -> list[Route]:
        return [*self.kernel.routes.all(), *self.parts.routes]

    def now(self) -> float:
        return self.time

    def _wake(self) -> None:
        self.woken += 1

    def _stop(self) -> None:
        self.stopped += 1

    async def raw(self, method: str, path: str, **more: Any) -> tuple[int, bytes, dict[str, str]]:
        headers = {"Authorization": f"Bearer {TOKEN}"} | more.pop("headers", {})
        async with self.session.request(
            method, self.server.make_url(path), headers=headers, **more
        ) as answer:
            return answer.status, await answer.read(), dict(answer.headers)

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = self.server.make_url(path)
        async with self.session.request(method, url, json=body, headers=headers) as answer:
            content: dict[str, Any] = await answer.json()
            return answer.status, content

    async def up(
        self, yaml: str = YAML, *, name: str = "chat", mode: str | None = None, **more: Any
    ) -> tuple[int, Any]:
        spec = spec_to_json(load_text(yaml, name=name).spec)
        return await self.call("PUT", f"/v1/services/{name}", {"spec": spec, "mode": mode} | more)

    def has(self, *replicas: Replica) -> None:
        self.store.commit(
            "chat",
            now=1001.0,
            changed=replicas,
            memory=Memory(9),
            target=2,
            notes="",
            records=[EventRecord("note", "x")],
        )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Controller]:
    home = Home.from_environment({"SKYSERVE_HOME": str(folder)})
    home.create()
    first = free_port()
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    controller = Controller(home, fleet, range(first, first + 20))
    await controller.server.start_server()
    yield controller
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    async with running(tmp_path) as one:
        yield one


def free_port() -> int:
    """A port that no one has now, low enough that twenty more exist."""
    for _ in range(50):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 60_000:
            return port
    raise AssertionError("no low port is free")


def a_replica(controller: Controller, replica_id: int = 1) -> Replica:
    offer = an_offer(controller)
    return Replica(
        replica_id, 1, offer, ReplicaState.READY, 1000.0, 1000.0, "i-1", "http://h:1", 1000.0, 1000.0
    )


def an_offer(controller: Controller) -> Offer:
    return LocalProvisioner(controller.home.root).offers(Requirements((Candidate(cloud="local"),)))[0]


# --- the token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x", "Bearer \udcff\udcfe"],
    ids=["none", "empty", "no token", "wrong", "no scheme", "other case", "longer", "not text"],
)
async def test_no_route_answers_without_the_token(controller: Controller, given: str | None) -> None:
    """Over a plain socket: a client library would refuse to send some of these."""
    for method, path in ROUTES:
        reader, writer = await asyncio.open_connection(controller.server.host, controller.server.port)
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Length: 0"]
        lines += [] if given is None else [f"Authorization: {given}"]
        writer.write("\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape"))
        assert (await reader.readline()).split()[1] == b"401", (method, path)
        writer.close()
        await writer.wait_closed()
    assert (controller.stopped, controller.woken) == (0, 0)


# --- what API keys have used -----------------------------------------------------------------------------------


PRICED = YAML.replace(
    "replicas: 2",
    "replicas: 2, load_balancer: {prices: {m: {input: 2, output: 10}, '*': {input: 1, output: 1}}}",
)


async def test_usage_has_what_it_costs_at_the_prices_of_the_newest_version(controller: Controller) -> None:
    await controller.up()
    used = [StoredUsage("chat", 0, "ada", model, "s1", 1, 1_000_000, 100_000) for model in ("m", "other")]
    controller.store.put_usage(used)
    numbers = {"requests": 2, "tokens_in": 2_000_000, "tokens_out": 200_000}
    _, plain = await controller.call("GET", "/v1/services/chat/usage?by=key")
    assert (plain["rows"], plain["total"]) == ([{"key": "ada"} | numbers], numbers)
    await controller.up(PRICED, mode="rolling")
    for top in ("", "&top=1"):
        _, priced = await controller.call("GET", f"/v1/services/chat/usage?by=key{top}")
        assert priced["rows"] == [{"key": "ada", "usd": 4.1} | numbers]
        assert priced["total"] == {"usd": 4.1} | numbers
    _, models = await controller.call("GET", "/v1/services/chat/usage?by=model&top=1")
    assert [(row["model"], row["usd"]) for row in models["rows"]] == [("m", 3.0)]
    assert models["total"]["usd"] == 4.1
    assert (await controller.call("GET", "/v1/services/ghost/usage"))[0] == 404


# --- goals -----------------------------------------------------------------------------------------------------


async def test_up_update_kill_down(controller: Controller) -> None:
    assert await controller.up() == (200, {"name": "chat", "version": 1})
    assert await controller.up(mode="rolling") == (200, {"name": "chat", "version": 2})
    controller.has(a_replica(controller))
    assert await controller.call("POST", "/v1/services/chat/replicas/1/down") == (200, {})
    assert await controller.call("POST", "/v1/services/chat/down", {"purge": True}) == (200, {})
    (row,) = controller.store.services()
    assert (row.version, row.killed, row.down, row.purge) == (2, {1}, True, True)
    assert controller.woken == 4
    assert (await controller.up())[0] == 409


async def test_what_is_refused_changes_nothing(controller: Controller) -> None:
    status, answer = await controller.up(mode="rolling")
    assert (status, answer) == (404, {"error": "there is no service chat"})
    await controller.up()
    status, answer = await controller.up()
    assert status == 409
    assert "serve update" in answer["error"]
    for path in ("/v1/services/ghost/down", "/v1/services/ghost/replicas/1/down"):
        assert await controller.call("POST", path) == (404, {"error": "there is no service ghost"})
    controller.has(a_replica(controller))
    status, answer = await controller.call("POST", "/v1/services/chat/replicas/7/down")
    assert (status, answer) == (404, {"error": "service chat has no live replica 7"})
    status, _ = await controller.call("POST", f"/v1/services/chat/replicas/{10**30}/down")
    assert status == 404
    await controller.call("POST", "/v1/services/chat/down")
    status, answer = await controller.up()
    assert status == 409
    assert "going down" in answer["error"]
    assert controller.store.services()[0].version == 1


@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", b"[]", b"null", b"3", b"{}", b'{"spec": 1}', b'{"spec": {}}', b'{"spec": null}'],
    ids=lambda body: body.decode("latin-1"),
)
@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/services/chat"), ("POST", "/v1/plan")])
async def test_a_wrong_body_is_a_wrong_request(
    controller: Controller, method: str, path: str, body: bytes
) -> None:
    status, content, _ = await controller.raw(method, path, data=body)
    assert status == 400
    assert b"error" in content
    assert controller.store.services() == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"mode": "sideways"}, "sideways"),
        ({"mode": 3}, "3"),
        ({"secrets": None}, "secrets: must be a mapping"),
        ({"secrets": [1]}, "secrets: must be a mapping"),
        ({"secrets": {"A": 1}}, "secrets.A: must be text"),
    ],
    ids=[
        "an unknown mode",
        "a mode that is no word",
        "secrets: null",
        "secrets: a list",
        "a secret that is no text",
    ],
)
async def test_a_wrong_field_is_a_wrong_request(
    controller: Controller, more: dict[str, Any], says: str
) -> None:
    status, answer = await controller.up(**({"mode": None} | more))
    assert status == 400
    assert says in answer["error"]


@pytest.mark.parametrize("name", ["..%2Fx", "a%20b", "-x", "1x", "x" * 64, "%00", "ä"])
async def test_a_name_that_is_none(controller: Controller, name: str) -> None:
    url = URL(f"{controller.server.make_url('/')}v1/services/{name}", encoded=name.isascii())
    spec = spec_to_json(load_text(YAML).spec)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with controller.session.put(url, json={"spec": spec}, headers=headers) as answer:
        assert answer.status == 400
    assert controller.store.services() == []


async def test_secrets_are_sealed_and_must_be_there(controller: Controller) -> None:
    yaml = YAML + "secrets: {KEY: hunter2}\n"
    status, answer = await controller.up(yaml)
    assert (status, "KEY" in answer["error"]) == (400, True)
    assert (await controller.up(yaml, secrets={"KEY": "hunter2"}))[0] == 200
    assert b"hunter2" not in controller.store.version("chat", 1).sealed_secrets
    assert controller.specs.secrets("chat", 1) == {"KEY": "hunter2"}
    raw = b"".join(path.read_bytes() for path in controller.home.root.glob("state.db*"))
    assert b"hunter2" not in raw


async def test_a_changed_secret_is_another_replica_and_a_changed_size_is_not(controller: Controller) -> None:
    yaml = YAML + "secrets: {KEY: a}\n"
    await controller.up(yaml, secrets={"KEY": "a"})
    await controller.up(yaml.replace("replicas: 2", "replicas: 5"), secrets={"KEY": "a"}, mode="rolling")
    assert controller.store.services()[0].same_replicas == {1}
    await controller.up(yaml, secrets={"KEY": "b"}, mode="rolling")
    assert controller.store.services()[0].same_replicas == frozenset()


async def test_a_cloud_that_is_not_enabled(controller: Controller) -> None:
    status, answer = await controller.up(YAML.replace("local", "aws"))
    assert status == 422
    assert "only on aws, and none of them is enabled here" in answer["error"]
    assert controller.store.services() == []


# --- ports -----------------------------------------------------------------------------------------------------


async def test_a_region_where_no_load_balancer_can_stand(controller: Controller) -> None:
    yaml = YAML.replace("replicas: 2", "replicas: 2, load_balancers: {regions: aws/us-east-1}")
    status, answer = await controller.up(yaml)
    assert status == 422
    assert answer["error"].startswith(
        "service.load_balancers.regions: aws/us-east-1: aws is not enabled here"
    )
    assert controller.store.services() == []


async def test_every_service_has_a_port_of_its_own_and_keeps_it(controller: Controller) -> None:
    await asyncio.gather(*[controller.up(name=f"s{number}") for number in range(8)])
    ports = {row.name: row.lb_port for row in controller.store.services()}
    assert len(set(ports.values())) == 8
    await controller.up(name="s3", mode="rolling")
    assert {row.name: row.lb_port for row in controller.store.services()} == ports


async def test_a_name_that_comes_back_has_its_old_port(controller: Controller) -> None:
    for name in ("first", "second"):
        await controller.up(name=name)
    before = {row.name: row.lb_port for row in controller.store.services()}
    await controller.call("POST", "/v1/services/first/down")
    await controller.up(name="third")
    await controller.up(name="first")
    after = {row.name: row.lb_port for row in controller.store.services()}
    assert after == {**before, "third": after["third"]}
    assert after["third"] not in before.values()


async def test_no_port_is_left(controller: Controller) -> None:
    outcomes = [(await controller.up(name=f"s{number}"))[0] for number in range(21)]
    assert outcomes.count(422) >= 1
    assert outcomes[-1] == 422


async def test_a_port_that_is_asked_for(controller: Controller) -> None:
    port = free_port()
    yaml = YAML.replace("replicas: 2", f"replicas: 2, load_balancer: {{port: {port}}}")
    assert (await controller.up(name="mine"))[0] == 200
    assert (await controller.up(yaml, name="mine", mode="rolling"))[0] == 200
    assert controller.store.services()[0].lb_port == port
    status, answer = await controller.up(yaml, name="other")
    assert (status, "belongs to another service" in answer["error"]) == (422, True)
    await controller.call("POST", "/v1/services/mine/down")
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        status, answer = await controller.up(yaml, name="other")
    assert (status, "is in use" in answer["error"]) == (422, True)
    assert (await controller.up(yaml, name="other"))[0] == 200


# --- facts -----------------------------------------------------------------------------------------------------


async def test_health(controller: Controller) -> None:
    controller.time = 1012.5
    status, answer = await controller.call("GET", "/v1/health")
    assert status == 200
    assert (answer["uptime_s"], answer["clouds"]) == (12.5, ["local"])


async def test_services_show_every_promised_key(controller: Controller) -> None:
    await controller.up()
    status, answer = await controller.call("GET", "/v1/services")
    assert status == 200
    assert answer["services"][0]["status"] == "REPLICA_INIT"
    controller.has(a_replica(controller))
    controller.time = 1000.0 + 3600.0
    (service,) = (await controller.call("GET", "/v1/services"))[1]["services"]
    assert {
        "name",
        "version",
        "status",
        "endpoint",
        "endpoints",
        "replicas",
        "target",
        "cost",
    } <= service.keys()
    assert (service["status"], service["ready"], service["endpoints"]) == ("READY", 1, [service["endpoint"]])
    price = service["replicas"][0]["price_usd_hour"]
    cost = service["cost"]
    assert (cost["usd_per_hour"], cost["usd_total"]) == (price, pytest.approx(price))
    assert cost["usd_on_demand_equivalent"] >= cost["usd_total"]


async def test_one_service_is_listed_alone_if_it_is_up(controller: Controller) -> None:
    for name in ("one", "other"):
        await controller.up(name=name)

    async def listed(query: str) -> list[str]:
        return [
            each["name"] for each in (await controller.call("GET", f"/v1/services{query}"))[1]["services"]
        ]

    (both,) = [(await controller.call("GET", "/v1/services"))[1]["services"]]
    assert (await controller.call("GET", "/v1/services?name=other"))[1]["services"] == both[1:]
    assert await listed("?name=one&all=1&ended=1") == ["one"]
    assert await listed("?name=ghost") == ["one", "other"], "the caller says which there are"
    await controller.call("POST", "/v1/services/one/down")
    assert await listed("?name=one") == ["other"]
    assert await listed("?name=one&all=1") == ["one", "other"]


async def test_what_is_down_or_ended_is_shown_when_asked_for(controller: Controller) -> None:
    await controller.up()
    replica = a_replica(controller)
    controller.has(replica)
    await controller.call("POST", "/v1/services/chat/down")
    controller.has(replace(replica, state=ReplicaState.GONE, ended_at=1001.0))
    assert (await controller.call("GET", "/v1/services"))[1] == {"services": []}
    (service,) = (await controller.call("GET", "/v1/services?all=1&ended=1"))[1]["services"]
    assert (service["status"], [r["state"] for r in service["replicas"]]) == ("DOWN", ["GONE"])
    (service,) = (await controller.call("GET", "/v1/services?all=1"))[1]["services"]
    assert service["replicas"] == []


async def test_replicas_that_ended_cost_as_many_statements_for_many_services_as_for_one(
    controller: Controller,
) -> None:
    asked: list[str] = []
    sa.event.listen(
        controller.store.database.engine, "before_cursor_execute", lambda *args: asked.append(args[2])
    )
    counts = []
    for number in range(1, 5):
        assert (await controller.up(name=f"chat{number}"))[0] == 200
        controller.controller_service.services(
            down=True, ended=True
        )  # reads the spec of each new version once
        asked.clear()
        assert len(controller.controller_service.services(down=True, ended=True)) == number
        counts.append(len(asked))
    assert len(set(counts)) == 1, counts
    assert any("ended_at >" in statement for statement in asked)


async def test_the_command_line_reads_the_services_again_only_if_they_changed(
    controller: Controller,
) -> None:
    runner = web.AppRunner(controller.api().app())
    await runner.setup()
    listener = unix_socket.bound(controller.home.controller_socket)
    await web.SockSite(runner, listener).start()
    client = ControllerClient(controller.home)
    await controller.up()
    first, etag, _ = await asyncio.to_thread(client.services_since, "")
    assert first is not None
    assert [view["name"] for view in first] == ["chat"]
    assert (await asyncio.to_thread(client.services_since, etag))[:2] == (None, etag)
    await controller.call("POST", "/v1/services/chat/down")
    changed, newer, _ = await asyncio.to_thread(client.services_since, etag)
    assert changed != first
    assert newer != etag
    await runner.cleanup()


async def test_a_plan_says_where_and_for_how_much_and_leaves_nothing(controller: Controller) -> None:
    spec = spec_to_json(load_text(YAML).spec)
    status, answer = await controller.call("POST", "/v1/plan", {"spec": spec})
    assert (status, answer["target"], len(answer["launches"])) == (200, 2, 2)
    assert len({launch["zone"] for launch in answer["launches"]}) == 2
    assert answer["usd_per_hour"] == pytest.approx(
        sum(launch["price_usd_hour"] for launch in answer["launches"])
    )
    assert controller.store.services(down=True) == []
    assert controller.woken == 0


async def test_the_plan_of_an_update_is_in_the_mode_that_is_asked_for(controller: Controller) -> None:
    await controller.up()
    controller.has(a_replica(controller), a_replica(controller, 2))
    spec = spec_to_json(load_text(YAML.replace("serve-it", "serve-that")).spec)
    needs = {}
    for mode in (None, "rolling", "blue_green"):
        status, planned = await controller.call("POST", "/v1/plan", {"spec": spec, "mode": mode})
        assert status == 200
        needs[mode] = planned["update"]["mode"], planned["update"]["extra_replicas"]
    assert needs == {None: ("rolling", 1), "rolling": ("rolling", 1), "blue_green": ("blue_green", 2)}
    assert (await controller.call("POST", "/v1/plan", {"spec": spec, "mode": "sideways"}))[0] == 400


@pytest.mark.parametrize(
    ("query", "seqs"),
    [
        ("", [1, 2, 3]),
        ("?after=1", [2, 3]),
        ("?after=-5&limit=2", [1, 2]),
        ("?newest=1&limit=1", [3]),
        ("?service=chat", [1, 3]),
        ("?service=ghost", []),
        ("?limit=0", []),
        ("?limit=-1", []),
        (f"?after={10**40}", []),
    ],
    ids=lambda value: value if isinstance(value, str) and value else None,
)
async def test_events(controller: Controller, query: str, seqs: list[int]) -> None:
    await controller.up()
    await controller.up(name="other")
    controller.has()
    status, answer = await controller.call("GET", f"/v1/events{query}")
    assert status == 200
    assert [event["seq"] for event in answer["events"]] == seqs
    for event in answer["events"]:
        assert event.keys() == {"seq", "at", "service", "replica_id", "kind", "state", "message", "author"}


@pytest.mark.parametrize("query", ["after=x", "limit=1.5", "limit="])
async def test_numbers_that_are_none(controller: Controller, query: str) -> None:
    assert (await controller.call("GET", f"/v1/events?{query}"))[0] == 400


@pytest.mark.parametrize(
    ("query", "content", "next_offset"),
    [
        ("", b"0123456789", "10"),
        ("?offset=4", b"456789", "10"),
        ("?offset=4&max=3", b"456", "7"),
        ("?offset=99", b"0123456789", "10"),  # of a log that has been cut since
        ("?offset=-9&max=2", b"01", "2"),
        ("?max=-1", b"", "0"),
    ],
)
async def test_logs_are_read_in_pieces(
    controller: Controller, query: str, content: bytes, next_offset: str
) -> None:
    controller.home.controller_log.write_bytes(b"0123456789")
    folder = controller.home.load_balancers / "chat"
    folder.mkdir(parents=True)
    (folder / "agent.log").write_bytes(b"0123456789")
    for what in ("controller", "load_balancer/chat"):
        status, body, headers = await controller.raw("GET", f"/v1/logs/{what}{query}")
        assert (status, body, headers["X-Next-Offset"]) == (200, content, next_offset)


async def test_logs_that_are_not_there(controller: Controller) -> None:
    assert (await controller.raw("GET", "/v1/logs/load_balancer/ghost"))[:2] == (200, b"")
    assert (await controller.call("GET", "/v1/logs/replica/chat/1"))[0] == 404
    await controller.up()
    controller.has(
        a_replica(controller), replace(a_replica(controller, 2), state=ReplicaState.GONE, ended_at=2.0)
    )
    assert (await controller.raw("GET", "/v1/logs/replica/chat/1"))[:2] == (
        200,
        b"",
    )  # not yet: it still runs
    status, answer = await controller.call("GET", "/v1/logs/replica/chat/2")
    assert (status, "no log" in answer["error"]) == (404, True)


async def test_the_end_of_a_log_that_outlived_its_machine(controller: Controller) -> None:
    await controller.up()
    controller.has(replace(a_replica(controller), state=ReplicaState.GONE, ended_at=2.0))
    controller.home.log_archive.mkdir(parents=True)
    (controller.home.log_archive / "chat.1.0.100.log").write_bytes(b"no wheel\n")
    pieces = (("0", b"no wheel\n", "109"), ("103", b"wheel\n", "109"), ("109", b"", "109"))
    for asked, said, then in (*pieces, ("-6", b"wheel\n", "109"), ("-900", b"no wheel\n", "109")):
        status, content, headers = await controller.raw("GET", f"/v1/logs/replica/chat/1?offset={asked}")
        assert (status, content, headers["X-Next-Offset"]) == (200, said, then)


@pytest.mark.parametrize(
    ("query", "since", "ids"),
    [
        ("", 1000.0, [1, 2]),
        ("?since=5", 1000.0, [1, 2]),
        ("?since=1500.5", 1500.5, [1]),
        ("?most=1", 1000.0, [1]),
    ],
    ids=["its life", "not before it was up", "of late", "one at most"],
)
async def test_history(controller: Controller, query: str, since: float, ids: list[int]) -> None:
    await controller.up()
    gone = replace(a_replica(controller, 2), state=ReplicaState.GONE, ended_at=1400.0)
    controller.has(a_replica(controller), gone)
    status, history = await controller.call("GET", f"/v1/services/chat/history{query}")
    assert (status, history["since"], history["now"]) == (200, since, controller.time)
    assert [replica["id"] for replica in history["replicas"]] == ids
    assert history["replicas"][0]["launched_at"] == 1000.0
    assert history["complete_from"] == (1400.0 if query == "?most=1" else since)


async def test_history_of_nobody_and_of_no_time(controller: Controller) -> None:
    assert (await controller.call("GET", "/v1/services/ghost/history"))[0] == 404
    await controller.up()
    for query in ("since=x", "since=nan", "since=inf", "most=x"):
        assert (await controller.call("GET", f"/v1/services/chat/history?{query}"))[0] == 400


async def test_what_belongs_to_nothing(controller: Controller) -> None:
    nothing = {"orphans": [], "unlisted": []}
    assert await controller.call("GET", "/v1/leaks/local") == (200, nothing)
    key = {"kind": "instance", "id": "i-gone", "region": "us-east"}
    assert await controller.call("POST", "/v1/leaks/local/remove", key) == (200, {"why": "", "passes": False})
    assert await controller.call("POST", "/v1/leaks/local/forget") == (200, {"problems": []})
    assert (await controller.call("POST", "/v1/leaks/local/remove", {"kind": "instance"}))[0] == 400
    status, answer = await controller.call("GET", "/v1/leaks/loocal")
    assert (status, "did you mean 'local'" in answer["error"]) == (422, True)


async def test_tidying_after_a_service(controller: Controller) -> None:
    await controller.up()
    controller.has(replace(a_replica(controller), state=ReplicaState.GONE, ended_at=1400.0))
    nothing = {"removed": [], "waiting": [], "problems": []}
    for services in (["chat"], ["ghost"], []):
        assert await controller.call("POST", "/v1/tidy", {"services": services}) == (200, nothing)
    assert (await controller.call("POST", "/v1/tidy", {}))[0] == 400


async def test_stop(controller: Controller) -> None:
    assert await controller.call("POST", "/v1/stop") == (200, {"pid": os.getpid()})
    assert controller.stopped == 1


async def test_an_unknown_path(controller: Controller) -> None:
    assert (await controller.raw("GET", "/v1/nothing"))[0] == 404
    assert (await controller.raw("DELETE", "/v1/services/chat"))[0] == 405


async def test_a_controller_that_stands_by_reads_and_refuses_orders(controller: Controller) -> None:
    await controller.up()
    other = Store(Database(controller.home.database_url))
    controller.time += 60.0
    other.take_lease("elsewhere", "the controller on elsewhere", ttl_s=60.0, unrenewed=other.database.lease())
    controller.leadership.step()
    status, health = await controller.call("GET", "/v1/health")
    assert status == 200
    assert health["lease"]["leads"] is False
    status, body = await controller.call("GET", "/v1/services")
    assert [one["name"] for one in body["services"]] == ["chat"]
    for method, path, order in [
        ("POST", "/v1/services/chat/down", {"purge": False}),
        ("POST", "/v1/services/chat/replicas/1/down", {}),
    ]:
        status, body = await controller.call(method, path, order)
        assert (status, body["error"][:31]) == (409, "this controller stands by: the "), body
    status, body = await controller.up(mode="rolling")
    assert status == 409
    assert not controller.store.services()[0].down
    other.close()


async def test_an_order_on_the_way_to_a_controller_that_is_replaced_changes_nothing(
    controller: Controller,
) -> None:
    await controller.up()
    other = Store(Database(controller.home.database_url))
    other.take_lease("elsewhere", "", ttl_s=60.0, unrenewed=other.database.lease())
    status, body = await controller.call("POST", "/v1/services/chat/down", {"purge": False})
    assert (status, "leads" in body["error"]) == (503, True)
    assert not controller.store.services()[0].down
    other.close()
