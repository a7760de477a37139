"""The controller's metrics: the documented metrics are exposed, over a real socket, with a token of their own."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from policies.model import ReplicaState
from scripts.boards import BOARDS, FOLDER, Board, names_in, text_of
from skyserve_cli.controller.backup.key_rotation import rotate
from skyserve_cli.controller.metrics.endpoint import MetricsEndpoint, exposition
from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE
from skyserve_cli.controller.persistence.opening import opened
from skyserve_cli.home import Home

TOKEN = "reads-numbers"
HEALTH = {
    "uptime_s": 12.5,
    "lease": {"leads": True, "epoch": 3, "leader": "me"},
    "backup": {"to": "s3://b", "newest_at": 900.0, "overdue": False, "why": ""},
    "store": {"ok": True, "since": 1000.0, "why": ""},
}


def replica(state: str, kind: str = "spot", zone: str = "eu-a") -> dict[str, Any]:
    return {"state": state, "capacity_type": kind, "cloud": "local", "region": "eu", "zone": zone}


def view(name: str = "chat") -> dict[str, Any]:
    return {
        "name": name,
        "version": 4,
        "serving_version": 3,
        "failed_versions": [4],
        "ready": 2,
        "wanted": 3,
        "target": 5,
        "load": {"requests_per_s": 1.5, "in_flight": 6, "queued": 7, "loaded": 1},
        "cost": {
            "usd_per_hour": 1.25,
            "usd_per_hour_on_demand": 4.0,
            "usd_per_hour_load_balancers": 0.5,
            "usd_total": 80.25,
            "usd_on_demand_equivalent": 240.5,
        },
        "slo": {
            "attainment": 0.9962,
            "attainment_asked": 0.995,
            "headroom": 1.12,
            "requests_per_min": 230.0,
            "work_per_min": 276.0,
            "work_per_request": 1.2,
            "forecast_per_min": 301.0,
            "forecast_most_per_min": 330.0,
        },
        "load_balancer": {"alive": True, "synced": False},
        "load_balancers": [{"alive": True, "synced": True}, {"alive": False, "synced": False}],
        "replicas": [
            replica("READY"),
            replica("READY", "on_demand", "eu-b"),
            replica("PROVISIONING", zone="eu-b"),
            replica("GONE"),
        ],
    }


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by the sample's name and the values of its labels, in order of the table."""
    labels = {one.name: one.labels for one in (*OF_CONTROLLER, *OF_SERVICE)}
    return {
        (sample.name, tuple(sample.labels[label] for label in labels[family.name])): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_family_of_the_table_is_exposed_and_nothing_else() -> None:
    families = list(text_string_to_metric_families(exposition(HEALTH, [view()]).decode()))
    table = (*OF_CONTROLLER, *OF_SERVICE)
    assert [(f.name, f.type, f.documentation) for f in families] == [(t.name, t.type, t.help) for t in table]
    for found, row in zip(families, table, strict=True):
        assert {frozenset(sample.labels) for sample in found.samples} == {frozenset(row.labels)}, row.name


def test_values_are_those_of_the_views() -> None:
    found = samples(exposition(HEALTH, [view(), view("other")]))
    expected = {
        "ready_replicas": 2, "wanted_replicas": 3, "target_replicas": 5, "version": 4, "serving_version": 3,
        "version_given_up": 1, "load_balancers_alive": 2, "load_balancers_behind": 1,
        "requests_per_second": 1.5, "in_flight_requests": 6, "queued_requests": 7, "usd_per_hour": 1.25,
        "on_demand_usd_per_hour": 4, "load_balancers_usd_per_hour": 0.5, "usd_total": 80.25,
        "on_demand_usd_total": 240.5,
    }  # fmt: skip
    for service in ("chat", "other"):
        for name, value in expected.items():
            assert found[f"skyserve_service_{name}", (service,)] == value, name
        states = {
            key[1:]: value for (name, key), value in found.items() if name == "skyserve_service_replicas"
        }
        assert {key for key, value in states.items() if value} == {
            ("READY", "spot"), ("READY", "on_demand"), ("PROVISIONING", "spot"),
        }  # fmt: skip
        assert len(states) == 2 * (len(ReplicaState) - 1)
        assert found["skyserve_service_ready_replicas_by_zone", (service, "local", "eu", "eu-b")] == 1
    assert found["skyserve_controller_leads", ()] == 1
    assert found["skyserve_controller_lease_epoch", ()] == 3
    assert found["skyserve_controller_uptime_seconds", ()] == 12.5
    assert found["skyserve_controller_store_ok", ()] == 1
    assert found["skyserve_controller_store_good_timestamp_seconds", ()] == 1000
    assert found["skyserve_controller_backup_timestamp_seconds", ()] == 900
    none = samples(exposition({**HEALTH, "backup": None}, []))
    assert "skyserve_controller_backup_timestamp_seconds" not in {name for name, _ in none}


def test_what_is_unknown_has_no_series_and_hostile_text_stays_a_label() -> None:
    one = copy.deepcopy(view('a"\n\\ 1\nskyserve_controller_leads 9'))
    one["load"]["requests_per_s"] = one["serving_version"] = one["load_balancer"] = None
    found = samples(exposition(HEALTH, [one]))
    names = {name for name, _ in found}
    assert "skyserve_service_requests_per_second" not in names
    assert "skyserve_service_serving_version" not in names
    assert found["skyserve_service_load_balancers_alive", (one["name"],)] == 1
    assert found["skyserve_controller_leads", ()] == 1


class World:
    """An endpoint whose views can be changed, and made unreadable."""

    def __init__(self) -> None:
        self.services: list[dict[str, Any]] = [view()]
        self.is_readable = True
        self.endpoint = MetricsEndpoint(TOKEN, lambda: HEALTH, self._read, try_again_s=0.01)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def _read(self) -> list[dict[str, Any]]:
        if not self.is_readable:
            raise OperationalError("SELECT", {}, Exception("disk I/O error"))
        return self.services

    async def get(self, path: str = "/metrics", authorization: str = f"Bearer {TOKEN}") -> tuple[int, bytes]:
        headers = {"Authorization": authorization} if authorization else {}
        async with aiohttp.ClientSession() as session:
            for _ in range(500):
                try:
                    async with session.get(
                        f"http://127.0.0.1:{self.port}{path}", headers=headers
                    ) as response:
                        return response.status, await response.read()
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.01)
        raise AssertionError("the port stays closed")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.endpoint.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_only_the_token_of_metrics_reads_them(world: World, host: str) -> None:
    world.endpoint.start(world.port, host)
    for given in ("", "Bearer", "Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x"):
        status, body = await world.get(authorization=given)
        assert (status, b"skyserve_" in body) == (401, False), given
    assert (await world.get())[0] == 200
    assert (await world.get("/v1/services"))[0] == 404


async def test_a_state_that_cannot_be_read_leaves_the_controllers_own_families(world: World) -> None:
    world.endpoint.start(world.port)
    world.is_readable = False
    status, body = await world.get()
    found = samples(body)
    assert (status, found["skyserve_controller_store_ok", ()]) == (200, 0)
    assert {name for name, _ in found} == {one.name for one in OF_CONTROLLER}
    world.is_readable = True
    found = samples((await world.get())[1])
    assert found["skyserve_controller_store_ok", ()] == 1
    assert found["skyserve_service_ready_replicas", ("chat",)] == 2


async def test_a_port_that_another_program_has_is_tried_again(world: World) -> None:
    with socket.create_server(("127.0.0.1", world.port)):
        world.endpoint.start(world.port)
        await asyncio.sleep(0.05)
    assert (await world.get())[0] == 200


def test_rotation_replaces_the_token(tmp_path: Path) -> None:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.create()
    before = home.metrics_token()
    assert home.metrics_token_file.stat().st_mode & 0o777 == 0o600
    store = opened(home)
    rotate(home, store)
    store.close()
    assert home.metrics_token() not in (before, home.token())


RULES = Path(__file__).parents[2] / "packaging" / "prometheus"


def test_alerts_use_the_names_of_the_table() -> None:
    rules = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    names = {one.name + ("_total" if one.type == "counter" else "") for one in (*OF_CONTROLLER, *OF_SERVICE)}
    for rule in rules:
        used = set(re.findall(r"skyserve_\w+", rule["expr"]))
        assert used, rule
        assert used <= names, rule
    tested = (RULES / "alerts_test.yml").read_text()
    assert {rule["alert"] for rule in rules} <= set(re.findall(r"alertname: (\w+)", tested))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_board_of_grafana_is_the_one_that_the_tables_make(board: Board) -> None:
    """A panel of an unknown family cannot be written (KeyError)."""
    assert (FOLDER / board.file).read_text() == text_of(board), "run `python -m scripts.boards`"


def test_there_are_no_other_boards_and_every_family_of_the_controller_is_shown() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {board.file for board in BOARDS}
    shown = {name for board in BOARDS for line in board.expressions for name in names_in(line)}
    names = {one.name + ("_total" if one.type == "counter" else "") for one in (*OF_CONTROLLER, *OF_SERVICE)}
    assert names <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_prometheus_parses_every_expression_of_the_boards(tmp_path: Path) -> None:
    rules = [
        {"record": f"board:{number}", "expr": expression}
        for number, expression in enumerate(line for board in BOARDS for line in board.expressions)
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "boards", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
@pytest.mark.parametrize("verb", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]])
def test_prometheus_accepts_the_alerts(verb: list[str]) -> None:
    done = subprocess.run(["promtool", *verb], cwd=RULES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)")
def test_prometheus_finds_nothing_to_lint() -> None:
    text = exposition(HEALTH, [view()])
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
