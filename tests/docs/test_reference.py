"""The generated pages are up to date, and the tables of routes are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from lb.agent.admin_api import Administered, admin_app
from scripts.reference.__main__ import FOLDER, pages
from scripts.reference.operations import ADMIN, CONTROLLER, Operation
from skyserve_cli.config import Config
from skyserve_cli.controller.api.activity import Activity
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.routes import KernelRoutes
from skyserve_cli.controller.api.service import ControllerService
from skyserve_cli.controller.part import Kernel, Parts
from skyserve_cli.controller.reconcile.clock import SteadyClock
from skyserve_cli.home import Home
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return pages()


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_a_page_is_up_to_date(name: str, generated: dict[str, str]) -> None:
    assert (FOLDER / name).read_text() == generated.get(name), "run python -m scripts.reference"


def test_there_are_all_pages(generated: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(generated)


def found_in(app: object) -> set[tuple[str, str]]:
    found = set()
    for route in app.router.routes():  # type: ignore[attr-defined]
        if route.method != "HEAD":
            found.add((route.method, route.resource.canonical))
    return found


def listed(operations: tuple[Operation, ...]) -> set[tuple[str, str]]:
    return {(one.method, one.path) for one in operations}


class _Service:
    changes = refuse_unless_leading = None


async def test_every_route_of_the_controller_is_described(tmp_path: Path) -> None:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path)})
    service, parts, store = cast("ControllerService", _Service()), Parts(), Store(Database("sqlite://"))
    nothing = cast("Any", None)
    routes = KernelRoutes(service, home, lambda: None, parts, Activity(*[nothing] * 4))
    parts.make(Kernel(home, Config(), store, SteadyClock(), nothing, service, routes, nothing, parts))
    api = Api("token", [*routes.all(), *parts.routes], parts)
    assert found_in(api.app()) == listed(CONTROLLER)
    store.close()


async def test_every_route_of_the_agent_is_described() -> None:
    assert found_in(admin_app(cast("Administered", None), "token")) == listed(ADMIN)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.json")))
def test_an_openapi_document_names_every_parameter_of_its_paths(name: str, generated: dict[str, str]) -> None:
    document = json.loads(generated[name])
    assert document["openapi"] == "3.1.0"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            named = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert all(f"{{{name}}}" in path for name in named)
            assert len(named) == path.count("{")
