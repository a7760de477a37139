"""Keys are rotated under two controllers of one PostgreSQL: nothing becomes unreadable, and each refusal is a sentence."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.controller.secret_box import seal_of
from skyserve_cli.home import Home
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.e2e.conftest import Serve
from tests.integration.postgres_server import postgres_server

pytestmark = pytest.mark.long

KEYS = ("sealing.key", "digest.key", "machines.key")
SERVICE = """
name: chat
service: {readiness_probe: /, replicas: 0}
resources: {infra: local}
secrets: {TOKEN: hunter2}
run: sleep 1000
"""


@pytest.fixture
def pair(serve: Serve, tmp_path: Path) -> Iterator[tuple[Serve, Serve, str]]:
    """Two homes with the same keys, and the URL of their database."""
    folder = Path(tempfile.mkdtemp(prefix="skyserve-postgres-"))
    folder.chmod(0o755)
    (folder / "server").mkdir()
    with postgres_server(folder / "server") as server:
        other = Serve(tmp_path / "other")
        for one in (serve, other):
            one.environment["SKYSERVE_DB"] = server.url
        yield serve, other, server.url
        for one in (serve, other):
            one("controller", "stop")
            for left in one.processes():  # load balancers: the service is still up
                left.kill()
    shutil.rmtree(folder, ignore_errors=True)


def copy_keys(here: Serve, there: Serve) -> None:
    there.home.mkdir(mode=0o700, exist_ok=True)
    for name in KEYS:
        if (here.home / name).exists():
            shutil.copy2(here.home / name, there.home / name)


def lease(serve: Serve) -> dict[str, object]:
    found: dict[str, object] = ControllerClient(Home.from_environment(serve.environment)).health()["lease"]
    return found


def opens(serve: Serve, url: str) -> bool:
    """Whether the keys of the home open the secrets in the database."""
    store = Store(Database(url))
    sealed = store.version("chat", 1).sealed_secrets
    store.close()
    return seal_of(Home.from_environment(serve.environment)).open(sealed) == {"TOKEN": "hunter2"}


def daemon_of(serve: Serve) -> psutil.Process:
    (found,) = [one for one in serve.processes() if "skyserve_cli.controller.daemon" in one.cmdline()]
    return found


def test_the_other_controller_refuses_until_it_has_the_new_keys(
    pair: tuple[Serve, Serve, str], tmp_path: Path
) -> None:
    here, there, url = pair
    file = tmp_path / "chat.yaml"
    file.write_text(SERVICE)
    here.ok("up", file, "-y", "--no-wait")
    copy_keys(here, there)
    there.ok("controller", "start")
    assert not lease(there)["leads"]

    # While the other one leads, no key is replaced.
    here.ok("controller", "stop")
    there.eventually(lambda: lease(there)["leads"])
    refused = here("controller", "rotate")
    assert (refused.code, "another controller of this database is running" in refused.err) == (1, True)
    assert "stop it first: it has the old keys" in refused.err
    assert opens(here, url)

    # One that cannot be seen, because it is frozen, must not lead with the old keys afterwards.
    here.ok("controller", "start")
    there.ok("controller", "stop")
    here.eventually(lambda: lease(here)["leads"])
    there.ok("controller", "start")
    frozen = daemon_of(there)
    frozen.send_signal(signal.SIGSTOP)
    rotated = here.ok("controller", "rotate")
    assert "1 version sealed again" in rotated.err
    assert "copy sealing.key, machines.key, digest.key from" in rotated.err
    here.eventually(lambda: lease(here)["leads"])
    assert opens(here, url)
    frozen.send_signal(signal.SIGCONT)
    there.eventually(lambda: there("controller", "status").code == 0 and not lease(there)["leads"])
    here.ok("controller", "stop")
    there.eventually(lambda: lease(there).get("unfit"))
    for command in (["status"], ["controller", "status"]):
        assert "must not lead: " in there.ok(*command).err
    refused = there("down", "chat", "-y")
    assert (refused.code, "sealing.key is not the key that the database was written with" in refused.err) == (
        1,
        True,
    )

    # With the new keys it leads, without being started.
    copy_keys(here, there)
    there.eventually(lambda: lease(there)["leads"])
    assert opens(there, url)
    there.ok("update", "chat", file, "-y", "--no-wait")  # the same secrets: nothing changes
    assert there.view("chat")["version"] == 1
