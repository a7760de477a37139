"""Local files over real HTTP: roles, limits, wrong digests, and an upload that is cut off."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from skyserve_cli.controller.api.client import ControllerClient, RefusedError
from skyserve_cli.controller.api.http import MAX_BODY_BYTES
from skyserve_cli.controller.api.remote import Remote
from skyserve_cli.controller.references import path_of, read_reference
from skyserve_cli.controller.uploads.content_store import encode_parts
from skyserve_cli.controller.uploads.folder import manifest_of
from skyserve_cli.controller.uploads.manifest import PART_BYTES
from skyserve_cli.home import Home
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from tests.integration import test_controller_team as team
from tests.integration.test_controller_api import YAML, Controller

call, controller, token = team.call, team.controller, team.token


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("print()")
    (folder / "sub" / "big").write_bytes(bytes(range(256)) * (PART_BYTES // 256) + b"end")
    return folder


def client_of(controller: Controller, held: str, tmp_path: Path) -> ControllerClient:
    """A client on another host."""
    home = Home.from_environment({"SKYSERVE_HOME": str(tmp_path / "person")})
    return ControllerClient(home, Remote(str(controller.server.make_url("")).rstrip("/"), held))


def spec_with(project: Path, **more: Any) -> dict[str, Any]:
    return {**spec_to_json(load_text(YAML).spec), "workdir": str(project), **more}


async def test_an_admin_of_another_host_sends_a_workdir(
    controller: Controller,
    project: Path,
    tmp_path: Path,
) -> None:
    client = client_of(controller, await token(controller, "ada", "admin"), tmp_path)
    seen: list[tuple[int, int]] = []
    client.on_upload = lambda path, sent, total: seen.append((sent, total))
    spec = spec_with(project, file_mounts=[])
    planned = await asyncio.to_thread(client.plan, spec, {})
    assert not planned["nothing_changes"]
    assert not (controller.home.uploads / "parts").exists(), "a plan sends nothing"
    assert await asyncio.to_thread(client.put, "chat", spec, {}, "rolling") == 2
    total = PART_BYTES + 3 + 7
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    stored = controller.store.version("chat", 2).spec
    reference = read_reference(stored["workdir"])
    assert reference is not None
    tree = controller.home.uploads / "trees" / reference.id / "workdir"
    assert (tree / "a.py").read_text() == "print()"

    seen.clear()
    planned = await asyncio.to_thread(client.plan, spec, {}, "rolling")
    assert planned["nothing_changes"]
    (project / "a.py").write_text("print(2)")
    planned = await asyncio.to_thread(client.plan, spec, {}, "rolling")
    assert (planned["nothing_changes"], planned["keeps_replicas"]) == (False, False)
    assert await asyncio.to_thread(client.put, "chat", spec, {}, "rolling") == 3
    assert seen[-1] == (8, 8)


async def test_roles_and_services(controller: Controller, project: Path, tmp_path: Path) -> None:
    manifest = manifest_of(project, "workdir", {}).to_json()
    viewer = await token(controller, "vic", "viewer", ["chat"])
    operator = await token(controller, "ada", "operator", ["chat"])
    announce = {"manifest": manifest}
    for held, path, status in (
        (viewer, "/v1/uploads?service=chat", 403),
        (operator, "/v1/uploads?service=other", 403),
        (operator, "/v1/uploads", 403),
        (operator, "/v1/uploads?service=chat", 200),
    ):
        assert (await call(controller, held, "POST", path, announce))[0] == status, path
    for path in ("/v1/uploads/parts?service=other", "/v1/uploads/parts"):
        assert (await call(controller, operator, "POST", path, {}))[0] == 403
    # An operator may use what was uploaded, and still no path of the controller's host.
    client = client_of(controller, operator, tmp_path)
    spec = await asyncio.to_thread(client.send_files, spec_with(project))
    assert spec["workdir"].startswith("upload://")
    # A path may contain "://", if what was uploaded has a folder of that name.
    hidden = f"{controller.home.uploads}/trees/x/workdir/a://../../../../.."
    for workdir, word in ((str(project), "workdir"), (hidden, "workdir"), (spec["workdir"], "")):
        body = {"spec": {**spec, "workdir": workdir}, "mode": "rolling"}
        status, found = await call(controller, operator, "PUT", "/v1/services/chat", body)
        assert status == 403
        assert ("workdir" in found["error"]) == bool(word), found  # the other reason is the local cloud


async def test_a_reference_without_its_files_makes_no_version(controller: Controller) -> None:
    spec = spec_with(Path("/nowhere")) | {"workdir": f"upload://{'a' * 64}/workdir"}
    status, found = await controller.call("PUT", "/v1/services/chat", {"spec": spec, "mode": "rolling"})
    assert (status, "are not at the controller" in found["error"]) == (409, True)
    spec["workdir"] = "upload://../../etc/passwd"
    status, found = await controller.call("PUT", "/v1/services/chat", {"spec": spec, "mode": "rolling"})
    assert (status, "is no reference" in found["error"]) == (422, True)


async def test_limits_and_wrong_content(controller: Controller, project: Path) -> None:
    manifest = manifest_of(project, "workdir", {})
    status, found = await controller.call("POST", "/v1/uploads", {"manifest": manifest.to_json()})
    assert status == 200
    part = next(part for part, size in manifest.parts().items() if size == 7)
    for body, code, word in (
        (encode_parts({part: b"print!!"}), 422, "is another one"),
        (encode_parts({hashlib.sha256(b"x").hexdigest(): b"x"}), 409, "was not announced"),
        (b"no json\nx", 422, "first line must be JSON"),
    ):
        status, text, _ = await controller.raw("POST", "/v1/uploads/parts", data=body)
        assert (status, word in text.decode()) == (code, True), text
    status, _, _ = await controller.raw("POST", "/v1/uploads/parts", data=b"x" * (MAX_BODY_BYTES + 1))
    assert status == 413
    for hostile in ("../x", "/etc/x", "workdir/../../x"):
        entries = [{**manifest.to_json()[0]}, {**manifest.to_json()[1], "path": hostile}]
        status, found = await controller.call("POST", "/v1/uploads", {"manifest": entries})
        assert (status, "is no path" in found["error"]) == (422, True)
    assert list((controller.home.uploads / "parts").iterdir()) == []
    assert not (controller.home.root.parent / "x").exists()


async def test_an_upload_that_is_cut_off_goes_on(
    controller: Controller,
    project: Path,
    tmp_path: Path,
) -> None:
    client = client_of(controller, await token(controller, "ada", "admin"), tmp_path)

    def interrupt(path: str, sent: int, total: int) -> None:
        if sent:
            raise KeyboardInterrupt

    client.on_upload = interrupt
    with pytest.raises(KeyboardInterrupt):
        await asyncio.to_thread(lambda: _keeping_interrupts(client, project))
    assert controller.store.services()[0].version == 1
    sent: list[int] = []
    client.on_upload = lambda path, now, total: sent.append(total)
    await asyncio.to_thread(client.put, "chat", spec_with(project), {}, "rolling")
    assert 0 < sent[-1] < PART_BYTES + 10
    assert len(list((controller.home.uploads / "trees").glob("*.json"))) == 1


def _keeping_interrupts(client: ControllerClient, project: Path) -> None:
    client.put("chat", spec_with(project), {}, "rolling")


async def test_a_link_out_of_the_folder_is_refused_before_anything_is_sent(
    controller: Controller,
    project: Path,
    tmp_path: Path,
) -> None:
    client = client_of(controller, await token(controller, "ada", "admin"), tmp_path)
    (project / "python").symlink_to("/usr/bin/python3")
    for do in (
        lambda: client.plan(spec_with(project), {}),
        lambda: client.put("chat", spec_with(project), {}, "rolling"),
    ):
        with pytest.raises(RefusedError, match=r"workdir: workdir/python is a link to /usr/bin/python3"):
            await asyncio.to_thread(do)
    assert not controller.home.uploads.exists()


async def test_a_launch_gets_the_files_where_they_are(
    controller: Controller, project: Path, tmp_path: Path
) -> None:
    client = client_of(controller, await token(controller, "ada", "admin"), tmp_path)
    spec = await asyncio.to_thread(client.send_files, spec_with(project))
    path = path_of(controller.home.uploads, str(spec["workdir"]))
    assert manifest_of(Path(path), "workdir", {}) == manifest_of(project, "workdir", {})
