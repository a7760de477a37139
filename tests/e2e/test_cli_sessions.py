"""An operator who may use one service has no way into the machines of another, and none at all once the token was revoked."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

import pytest

from provisioners.port.commands import Login, LoginRefusedError
from provisioners.remote.ssh import connect
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.home import Home
from skyserve_cli.state.database import Database
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.e2e.conftest import Serve
from tests.e2e.test_cli_aws import amazon
from tests.e2e.test_cli_rented import Cloud, google, microsoft
from tests.integration.test_controller_api import free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
resources: {infra: PLACE, accelerators: "GPU:1", use_spot: true}
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


class Rented(NamedTuple):
    place: str
    gpu: str
    left: Callable[[], list[str]]


def aws(serve: Serve, _folder: Path, stack: ExitStack) -> Rented:
    return Rented("aws/us-east-1", "L4", amazon(serve, stack).live)


@pytest.fixture(
    params=[google, pytest.param(microsoft, marks=only_long), pytest.param(aws, marks=only_long)],
    ids=["gcp", "azure", "aws"],
)
def rented(request: pytest.FixtureRequest, serve: Serve, tmp_path: Path) -> Iterator[Cloud | Rented]:
    with ExitStack() as stack:
        made: Cloud | Rented = request.param(serve, tmp_path, stack)
        yield made
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        assert made.left() == []


def test_a_token_of_one_service(serve: Serve, rented: Cloud | Rented, tmp_path: Path) -> None:
    port = free_port()
    serve.configure(controller={"listen": {"port": port}})
    for name in ("alpha", "beta"):
        text = SERVICE.replace("PLACE", rented.place).replace("GPU", rented.gpu)
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\n" + text)
        serve.ok("up", tmp_path / f"{name}.yaml", "-y", "--no-wait")
    serve.eventually(lambda: all(serve.view(name)["ready"] for name in ("alpha", "beta")))
    _attack(serve, port)
    _rotate(serve)


def _attack(serve: Serve, port: int) -> None:
    token = serve.ok(
        "token", "create", "oa", "--role", "operator", "--service", "alpha", "-o", "json"
    ).json()["token"]
    away = {"SKYSERVE_CONTROLLER": f"http://127.0.0.1:{port}", "SKYSERVE_TOKEN": token}

    # What the API gives away is no key, and nothing at all of the other service.
    found = _get(port, token, "/v1/services/alpha/replicas/1/access")
    assert json.loads(found) == {"kind": "session"}
    for path in (
        "/v1/services",
        "/v1/events",
        "/v1/services/alpha",
        "/v1/services/alpha/history",
        "/v1/health",
    ):
        assert b"PRIVATE KEY" not in _get(port, token, path)
    assert serve("exec", "alpha", "--", "hostname", env=away).code == 0
    refused = serve("exec", "beta", "--", "hostname", env=away)
    assert (refused.code, refused.out) == (1, "")

    # The login of one service does not open the machine of the other, nor does the key that once opened all.
    home = Home.from_environment({"SKYSERVE_HOME": str(serve.home)})
    owner = Database(home.database_url).owner()
    keys = Keys(home.machine_secret(), owner)
    logins = {name: _login(serve, keys, name) for name in ("alpha", "beta")}
    for name, login in logins.items():
        connect(login).close()
        other = "beta" if name == "alpha" else "alpha"
        for key in (keys.login(other), keys.owner_login()):
            with pytest.raises(LoginRefusedError):
                connect(replace(login, private_key=key.private))

    # A revoked token has no session a moment later: it is looked up once a second.
    with subprocess.Popen(
        [*serve.command, "exec", "alpha", "--", "echo started; exec sleep 7654.75"],
        env=serve.environment | away,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == b"started\n"
        serve.ok("token", "revoke", "oa")
        revoked = time.monotonic()
        assert program.wait(60) == 1
        print(f"the session of the revoked token ended after {time.monotonic() - revoked:.2f} s")
        assert b"the token was revoked" in program.stderr.read()
    with connect(logins["alpha"]) as shell:
        serve.eventually(lambda: shell.run("pgrep -f '[7]654.75' || true").out == b"")
    assert serve("exec", "alpha", "--", "hostname", env=away).code == 1
    events = [json.loads(line) for line in serve.ok("events", "alpha", "-o", "json").out.splitlines()]
    ended = [one for one in events if one["kind"] == "session"][-1]
    assert (ended["author"], ended["replica_id"]) == ("oa", 1)
    assert "a command ends: the token was revoked" in ended["message"]


def _rotate(serve: Serve) -> None:
    """All keys are replaced while machines run: no request fails, and the old keys open nothing afterwards."""
    home = Home.from_environment({"SKYSERVE_HOME": str(serve.home)})
    owner = Database(home.database_url).owner()
    before = {name: _login(serve, Keys(home.machine_secrets()[0], owner), name) for name in ("alpha", "beta")}
    ids = {name: [one["id"] for one in serve.view(name)["replicas"]] for name in before}
    endpoint, failed, served, over = serve.view("beta")["endpoint"], list[str](), list[int](), Event()

    def request() -> None:
        while not over.is_set():
            try:
                with urllib.request.urlopen(endpoint, timeout=10) as response:
                    served.append(response.status)
            except OSError as error:
                failed.append(str(error))
            time.sleep(0.02)

    client = Thread(target=request)
    client.start()
    try:
        told = serve.ok("controller", "rotate")
        assert "2 machines made with the old key (alpha/1, beta/1)" in told.err
        serve.eventually(lambda: "machine keys" not in serve.ok("controller", "status").out)
        serve.eventually(lambda: serve("exec", "beta", "--", "echo", "in").out == "in\n")  # sshd starts again
    finally:
        over.set()
        client.join(30)
    assert (failed, len(served) > 50) == ([], True)
    assert {name: [one["id"] for one in serve.view(name)["replicas"]] for name in before} == ids
    keys = Keys(home.machine_secrets()[0], owner)
    for name, old in before.items():
        serve.eventually(lambda name=name, old=old: _login(serve, keys, name).host_keys != old.host_keys)  # type: ignore[misc]
        new = _login(serve, keys, name)
        connect(new).close()
        with pytest.raises(LoginRefusedError):
            connect(replace(new, private_key=old.private_key))


def _login(serve: Serve, keys: Keys, service: str) -> Login:
    (replica,) = serve.view(service)["replicas"]
    address = replica["endpoint"].split("//")[1].split(":")[0]
    shown = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", address], capture_output=True, text=True, check=True
    ).stdout
    host_key = " ".join(shown.split()[1:3])
    return Login(service, address, "skyserve", keys.login(service).private, (host_key,))


def _get(port: int, token: str, path: str) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        body: bytes = response.read()
        return body
