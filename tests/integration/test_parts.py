"""Parts from other packages: the example of CONTRIBUTING.md, installed as it stands there, and parts that are broken."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from skyserve_cli import part_plugins
from skyserve_cli.config import ConfigError, load_config
from skyserve_cli.controller.api.http import Api
from skyserve_cli.controller.api.routes import KernelRoutes
from skyserve_cli.controller.balancers.local_fleet import LocalFleet
from skyserve_cli.controller.part import Parts
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.export import tables_of
from tests.integration.test_controller_api import TOKEN, YAML, Controller, free_port
from tests.integration.test_controller_team import call, token

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
EXAMPLE = re.search(r"<!-- the part -->\n```python\n(.*?)```\n<!-- end of the part -->", GUIDE, re.DOTALL)
DAY_S = 86400.0

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs modules, by name, with a part each, as an installer leaves them: `module=("class", source)`."""
    folder, added = tmp_path / "site", set[str]()

    def put(**parts: tuple[str, str]) -> None:
        info = folder / "more_parts-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more_parts\nVersion: 0.1.0\n")
        lines = "".join(f"{name} = part_{name}:{kind}\n" for name, (kind, _) in parts.items())
        (info / "entry_points.txt").write_text(f"[{part_plugins.GROUP}]\n{lines}")
        for name, (_, source) in parts.items():
            (folder / f"part_{name}.py").write_text(source)
            added.add(f"part_{name}")
        monkeypatch.syspath_prepend(folder)

    part_plugins.installed.cache_clear()
    part_plugins.part_class.cache_clear()
    yield put
    part_plugins.installed.cache_clear()
    part_plugins.part_class.cache_clear()
    for name in added:
        sys.modules.pop(name, None)


async def controller_with(tmp_path: Path, config: str) -> Controller:
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "home")})
    home.create()
    home.config.write_text(config)
    fleet = LocalFleet(home.load_balancers, asyncio.get_running_loop(), lambda: None)
    first = free_port()
    controller = Controller(home, fleet, range(first, first + 20), home.config)
    await controller.server.start_server()
    assert (await controller.up(YAML))[0] == 200
    return controller


async def closed(controller: Controller) -> None:
    await controller.session.close()
    await controller.server.close()
    controller.store.close()


async def test_the_example_of_the_guide_runs(tmp_path: Path, install: Install) -> None:
    assert EXAMPLE is not None
    install(notes=("Notes", EXAMPLE[1]))
    controller = await controller_with(tmp_path, "parts: {notes: {keep_days: 7}}\n")
    ada = await token(controller, "ada", "operator", ["chat"])
    vic = await token(controller, "vic", "viewer", ["chat"])
    path = "/v1/services/chat/notes"
    status, note = await call(controller, ada, "POST", path, {"text": "zone a is noisy"})
    assert (status, note["author"]) == (200, "ada")
    assert (await call(controller, ada, "POST", path, {"text": " "}))[0] == 422
    assert (await call(controller, ada, "POST", path, {}))[0] == 400
    assert (await call(controller, vic, "POST", path, {"text": "x"}))[0] == 403
    assert (await call(controller, ada, "POST", "/v1/services/other/notes", {"text": "x"}))[0] == 403
    status, found = await call(controller, vic, "GET", path)
    assert [one["text"] for one in found["notes"]] == ["zone a is noisy"]
    assert controller.parts.rows()["notes"] == "1 of the last 7 days"
    with controller.store.database.reading() as c:
        assert "part_notes" not in tables_of(c)  # a program without the part restores the backup
    await closed(controller)

    again = await controller_with(tmp_path / "second", "parts: {notes: }")  # has notes of its own
    assert again.parts.rows()["notes"] == "0 of the last 30 days"
    await closed(again)


async def test_the_kernel_serves_its_api_without_any_part(tmp_path: Path) -> None:
    controller = await controller_with(tmp_path, "")
    parts = Parts()
    routes = KernelRoutes(
        controller.controller_service, controller.home, lambda: None, parts, controller.activity
    )
    parts.make(replace(controller.kernel, routes=routes, parts=parts), built_in=())
    server = TestServer(Api(TOKEN, [*routes.all(), *parts.routes], parts).app())
    await server.start_server()

    async def status(method: str, path: str, held: str = TOKEN, body: object = None) -> int:
        headers = {"Authorization": f"Bearer {held}"}
        async with controller.session.request(
            method, server.make_url(path), headers=headers, json=body
        ) as response:
            return response.status

    spec = {"spec": spec_to_json(load_text(YAML.replace("chat", "other")).spec)}
    assert await status("PUT", "/v1/services/other", body=spec) == 200
    for path in ("health", "services", "services/other", "events", "teams"):
        assert await status("GET", f"/v1/{path}") == 200
    assert await status("POST", "/v1/services/other/down", body={}) == 200
    for path in ("tokens", "fleet", "stream"):
        assert await status("GET", f"/v1/{path}") == 404
    assert await status("GET", "/v1/health", "sks_anything") == 401
    await server.close()
    await closed(controller)


async def test_old_notes_are_removed(tmp_path: Path, install: Install) -> None:
    assert EXAMPLE is not None
    install(notes=("Notes", EXAMPLE[1]))
    controller = await controller_with(tmp_path, "parts: {notes: {keep_days: 7}}\n")
    ada = await token(controller, "ada", "operator")
    await call(controller, ada, "POST", "/v1/services/chat/notes", {"text": "old"})
    controller.time += 8 * DAY_S
    await call(controller, ada, "POST", "/v1/services/chat/notes", {"text": "new"})
    controller.parts.tidy(controller.time)
    _, found = await call(controller, ada, "GET", "/v1/services/chat/notes")
    assert [one["text"] for one in found["notes"]] == ["new"]
    await closed(controller)


BASE = "from skyserve_cli.controller.part import Part\n"
BROKEN = {
    "module": ("Part", "import nowhere_at_all\n"),
    "making": (
        "Made",
        f"{BASE}class Made(Part):\n    name = 'making'\n    def __init__(self, kernel): 1 / 0\n",
    ),
    "living": (
        "Lives",
        f"{BASE}class Lives(Part):\n    name = 'living'\n    async def start(self): 1 / 0\n"
        "    def lead(self): 1 / 0\n    def row(self): 1 / 0\n    async def stop(self): 1 / 0\n",
    ),
}


async def test_the_kernel_goes_on_without_what_is_broken(
    tmp_path: Path, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(**BROKEN)
    controller = await controller_with(tmp_path, "parts: {making: , living: }")
    await controller.parts.start()
    controller.parts.lead()
    ada = await token(controller, "ada", "viewer")
    status, health = await call(controller, ada, "GET", "/v1/health")
    assert (status, health["backup"], health["notifications"]) == (200, None, {})
    await controller.parts.stop()
    assert "the part making is left out" in caplog.text
    for what in ("does not start", "does not begin", "has no row", "does not stop"):
        assert f"the part living {what}" in caplog.text
    await closed(controller)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("parts: {notes: {keep_days: 0}}", "parts.notes.keep_days: Input should be greater than 0"),
        ("parts: {notes: {keep_day: 1}}", "parts.notes.keep_day: notes has no such setting; did you mean \"keep_days\"?"),
        ("parts: {diary: {}}", "parts.diary: there is no part diary (installed: module, notes)"),
        ("parts: {module: {}}", "parts.module: the part module cannot be loaded: ModuleNotFoundError"),
        ("parts: 3", "parts: must be settings by the names of parts"),
    ],
)  # fmt: skip
def test_settings_of_parts_are_checked(tmp_path: Path, install: Install, config: str, message: str) -> None:
    assert EXAMPLE is not None
    install(notes=("Notes", EXAMPLE[1]), module=BROKEN["module"])
    file = tmp_path / "config.yaml"
    file.write_text(config)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert f"{file}: {message}" in str(error.value)


def test_settings_of_a_part_are_read(tmp_path: Path, install: Install) -> None:
    assert EXAMPLE is not None
    install(notes=("Notes", EXAMPLE[1]))
    file = tmp_path / "config.yaml"
    file.write_text("parts: {notes: }")
    settings: Any = load_config(file).parts["notes"]
    assert settings.keep_days == 30.0
