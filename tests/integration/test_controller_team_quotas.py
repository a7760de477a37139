"""Teams over a real socket: who may choose one, what is rejected with which figures, and what is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from tests.integration.test_controller_api import Controller, free_port
from tests.integration.test_controller_team import call

CONFIG = """
clouds: {local: {}}
teams:
  research: {max_gpus: 8, max_replicas: 20, max_usd_hour: 40, max_usd_month: 5000}
  sales: {max_replicas: 2}
  free: {}
"""
FILE = (
    "name: {name}\nresources: {{cloud: local, accelerators: 'L4:{gpus}'}}\nrun: serve-it\n"
    "service: {{readiness_probe: /, replicas: {size}{more}}}\n"
)


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    home.create()
    home.config.write_text(CONFIG)
    first = free_port()
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    controller = Controller(home, fleet, range(first, first + 20), home.config)
    await controller.server.start_server()
    yield controller
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


async def token(controller: Controller, name: str, role: str, team: str = "") -> str:
    status, found = await controller.call("POST", "/v1/tokens", {"name": name, "role": role, "team": team})
    assert status == 200, found
    return str(found["token"])


def body(
    name: str = "chat", *, gpus: int = 1, size: int = 1, team: str = "", mode: str | None = None
) -> dict[str, Any]:
    more = f", team: {team}" if team else ""
    text = FILE.format(name=name, gpus=gpus, size=size, more=more)
    return {"spec": spec_to_json(load_text(text).spec), "mode": mode}


def team_of(controller: Controller, name: str = "chat") -> str:
    return next(row.team for row in controller.store.services() if row.name == name)


async def test_a_service_belongs_to_the_team_of_who_starts_it(controller: Controller) -> None:
    ada = await token(controller, "ada", "admin", "research")
    eve = await token(controller, "eve", "admin", "sales")
    assert (await call(controller, ada, "PUT", "/v1/services/chat", body()))[0] == 200
    assert (await controller.call("PUT", "/v1/services/own", body("own")))[0] == 200
    assert [team_of(controller, name) for name in ("chat", "own")] == ["research", ""]
    update = body(size=2, mode="rolling")
    assert (await call(controller, eve, "PUT", "/v1/services/chat", update))[0] == 200
    assert team_of(controller) == "research"  # an update keeps it
    moved = body(team="sales", mode="rolling")
    assert (await call(controller, eve, "PUT", "/v1/services/chat", moved))[0] == 200
    assert team_of(controller) == "sales"
    _, shown = await controller.call("GET", "/v1/services")
    assert [(one["name"], one["team"]) for one in shown["services"]] == [("chat", "sales"), ("own", None)]


async def test_only_admins_choose_another_team_than_their_own(controller: Controller) -> None:
    held = await token(controller, "bob", "operator", "research")
    none = await token(controller, "joe", "operator")
    for method, path in (("PUT", "/v1/services/chat"), ("POST", "/v1/plan")):
        for who, own in ((held, "the team research"), (none, "no team")):
            status, found = await call(controller, who, method, path, body(team="sales"))
            assert status == 403, found
            # A local replica needs an admin for another reason.
            assert f"belongs to {own}" in found["error"] or "controller's host" in found["error"]
    assert controller.store.services() == []


@pytest.mark.parametrize(
    ("more", "figures"),
    [
        (
            {"gpus": 4, "size": 3, "team": "research"},
            "3 replicas, exceeds the quota of the team research (max_gpus: 12 of 8)",
        ),
        ({"size": 3, "team": "sales"}, "(max_replicas: 3 of 2)"),
        ({"team": "nobody"}, "there is no team nobody in config.yaml (teams: free, research, sales)"),
        ({"gpus": 8, "size": 1, "team": "research"}, ""),
        ({"size": 50, "team": "free"}, ""),
        ({"size": 50}, ""),
    ],
)
async def test_a_least_size_beyond_the_quota_is_rejected_with_the_figures(
    controller: Controller, more: dict[str, Any], figures: str
) -> None:
    for method, path in (("POST", "/v1/plan"), ("PUT", "/v1/services/chat")):
        status, found = await controller.call(method, path, body(**more))
        assert status == (422 if figures else 200), found
        assert figures in found.get("error", "")
    if not figures:
        return
    assert controller.store.services() == []
    team = "research" if "team" not in more or more["team"] == "nobody" else more["team"]
    assert (await controller.call("PUT", "/v1/services/chat", body(team=team)))[0] == 200
    update = {**more, "team": ""} if more["team"] != "nobody" else more
    status, found = await controller.call("PUT", "/v1/services/chat", body(**update, mode="rolling"))
    assert (status, figures in found["error"]) == (422, True), found
    assert [row.version for row in controller.store.services()] == [1]


async def test_what_a_team_uses_is_shown_to_its_members_and_to_admins(controller: Controller) -> None:
    held = await token(controller, "bob", "viewer", "research")
    none = await token(controller, "joe", "viewer")
    assert (await controller.call("PUT", "/v1/services/chat", body(gpus=2, team="research")))[0] == 200
    _, planned = await controller.call("POST", "/v1/plan", body(gpus=2))
    assert planned["launches"]
    from tests.integration.test_controller_api import a_replica

    controller.has(a_replica(controller))
    controller.time += 3600.0
    status, found = await controller.call("GET", "/v1/teams")
    assert status == 200
    assert [one["name"] for one in found["teams"]] == ["free", "research", "sales"]
    research = found["teams"][1]
    price = controller.store.services()[0].replicas[0].offer.price_usd_hour
    assert research == {
        "name": "research",
        "limits": {"max_gpus": 8, "max_replicas": 20, "max_usd_hour": 40.0, "max_usd_month": 5000.0},
        "used": {
            "gpus": controller.store.services()[0].replicas[0].offer.accelerator_count,
            "replicas": 1,
            "usd_hour": pytest.approx(price),
            "usd_month": pytest.approx(price),
        },
        "services": ["chat"],
        "waiting": [],
    }
    assert (await call(controller, held, "GET", "/v1/teams"))[1]["teams"] == [research]
    assert (await call(controller, none, "GET", "/v1/teams"))[1]["teams"] == []


async def test_a_token_of_a_team_that_is_not_configured_is_not_created(controller: Controller) -> None:
    status, found = await controller.call(
        "POST", "/v1/tokens", {"name": "ada", "role": "viewer", "team": "nobody"}
    )
    assert status == 400
    assert "there is no team 'nobody' in config.yaml (teams: free, research, sales)" in found["error"]
    await token(controller, "ada", "viewer", "sales")
    _, listed = await controller.call("GET", "/v1/tokens")
    assert [(one["name"], one["team"]) for one in listed["tokens"]] == [("ada", "sales")]
