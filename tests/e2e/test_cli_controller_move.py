"""A controller that is moved to another host while its service answers: machines with sshd, in namespaces of their own."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyserve_cli.controller.balancers.bundle import LIBRARIES
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import ssh_pool
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.clouds.vms.wheels import wheelhouse
from tests.e2e.conftest import ROOT, Serve
from tests.e2e.regions_client import Client
from tests.integration.sshd import LOGIN

WHY_NOT = vm_world.why_not() or vm_world.why_no_venv()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

THERE = "/srv/skyserve"
SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
  load_balancers: {regions: ssh/rack}
resources:
  infra: ssh
  accelerators: L4:1
secrets: {TOKEN: hunter2-of-chat}
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@pytest.fixture
def rack(serve: Serve, tmp_path: Path) -> Iterator[dict[str, Vm]]:
    """A host with a GPU, of the pool, and one for the controller, which is of no pool."""
    with VmWorld() as world:
        wheels = wheelhouse(tmp_path / "wheels", LIBRARIES)
        vms = {
            "h1": world.boot("h1", logins={"me": LOGIN.public}, gpus=1, wheels=wheels),
            "c1": world.boot("c1", logins={"root": LOGIN.public}),
        }
        vms["c1"].run(
            "rm -f /root/.bashrc /root/.bash_profile /root/.profile"
        )  # of the user who runs the tests
        program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m skyserve_cli "$@"\n'
        vms["c1"].run(
            f"printf %s {shlex.quote(program)} >/usr/local/bin/serve; chmod +x /usr/local/bin/serve"
        )
        pool = ssh_pool(tmp_path, LOGIN.private, vms)
        pool["hosts"] = [one for one in pool["hosts"] if one["name"] == "h1"]
        serve.configure(clouds={"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}})
        yield vms
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        vms["c1"].run(f"SKYSERVE_HOME={THERE} serve controller stop")
        serve("controller", "stop")  # where the test has failed before the move
        for name in ("contexts.json", "state.db"):  # the services are no longer those of this home
            (serve.home / name).unlink(missing_ok=True)
        assert vms["h1"].run("pgrep -fa '[h]ttp.server|[-]m lb ' || true") == ""


class Caller(threading.Thread):
    """Requests one after another, until it is stopped: how many were answered, and what went wrong."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._stopping = threading.Event()
        self.answered = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._stopping.wait(0.02):
            try:
                assert Client.asks(self._endpoint) == b"I am h1\n"
                self.answered += 1
            except (OSError, AssertionError) as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)


class CommandLines(threading.Thread):
    """Every command line that runs on this machine and in its namespaces, as often as can be."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopping = threading.Event()
        self.seen: set[str] = set()

    def run(self) -> None:
        while not self._stopping.wait(0.01):
            for process in psutil.process_iter(["cmdline"]):
                self.seen.add(" ".join(process.info["cmdline"] or []))

    def stop(self) -> str:
        self._stopping.set()
        self.join(30)
        return "\n".join(self.seen)


def identities(view: dict[str, Any]) -> list[tuple[str, int, str]]:
    return sorted(
        (kind, one["id"], one["instance_id"]) for kind in ("replicas", "load_balancers") for one in view[kind]
    )


def test_a_service_answers_every_request_while_its_controller_is_moved(
    serve: Serve, rack: dict[str, Vm], tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]
    before = serve.view("web")
    last = serve.ok("events", "web", "-o", "json").out
    caller, lines = Caller(endpoint), CommandLines()
    caller.start()
    lines.start()
    target = f"ssh/root@{rack['c1'].address}"
    options = ["--home", THERE, "--serve", "/usr/local/bin/serve", "--identity", str(tmp_path / "id")]
    options += ["--known-hosts", str(tmp_path / "known_hosts"), "--context", "prod"]
    moved = serve.ok("controller", "move", target, *options, "-y", "-o", "json").json()
    assert (moved["services"], moved["replicas"], moved["kept_by"]) == (["web"], 1, "keeper")
    (now,) = serve.ok("status", "web", "-o", "json").json()
    assert identities(now) == identities(before)
    serve.eventually(lambda: _synced(serve))
    caller.stop()
    seen = lines.stop()
    assert caller.failures == []
    assert caller.answered > 20
    kinds = [one["kind"] for one in _events(serve, last)]
    assert not {"Launch", "Terminate", "Terminated", "Drain", "LaunchFailed"} & set(kinds), kinds

    # None starts here any more, and the reason names the place.
    assert (serve.home / "moved.json").is_file()
    refused = serve("controller", "start")
    assert (refused.code, f"was moved to {target}" in refused.err) == (2, True), refused.err
    refused = serve("controller", "start", "--force")
    assert (refused.code, "stop it there" in refused.err) == (2, True), refused.err

    # Nothing secret in command lines and logs; the keys are there, for the owner alone.
    secrets = [
        (serve.home / name).read_text(errors="replace") for name in ("controller.token", "sealing.key")
    ]
    secrets += [
        rack["c1"].run(f"cat {THERE}/controller.token"),
        "hunter2-of-chat",
        LOGIN.private.splitlines()[1],
    ]
    logs = rack["c1"].run(f"cat {THERE}/logs/*.log") + (serve.home / "logs" / "controller.log").read_text()
    assert "skyserve-bridge" in seen, "the command lines of the other host were seen"
    assert [one for one in secrets if one.strip() in seen or one.strip() in logs] == []
    assert rack["c1"].run(f"find {THERE} -perm /077 ! -type l ! -type s") == ""
    assert rack["c1"].run(f"ls -a {THERE} | grep -i backup$ || true").strip() == ""

    # The same command again has nothing to do, and the controller there takes goals.
    again = serve.ok("controller", "move", target, *options, "-y", "-o", "json").json()
    assert again["health"]["pid"] == moved["health"]["pid"]
    serve.ok("down", "web", "-y")
    assert rack["h1"].run("pgrep -fa '[h]ttp.server|[-]m lb ' || true") == ""


def _synced(serve: Serve) -> bool:
    (view,) = serve.ok("status", "web", "-o", "json").json()
    return view["ready"] == 1 and all(one["alive"] and one["synced"] for one in view["load_balancers"])


def _events(serve: Serve, before: str) -> list[dict[str, Any]]:
    def read(text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    seen = {one["seq"] for one in read(before)}
    return [one for one in read(serve.ok("events", "web", "-o", "json").out) if one["seq"] not in seen]
