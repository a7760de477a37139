"""A load balancer agent on a host of the user's own pool, beside a replica. The host has nothing but a Python."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lb.agent.server_options import available_cores
from lb.config.workers import AUTO, mover_threads
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.controller.balancers.bundle import LIBRARIES
from skyserve_cli.controller.balancers.native_modules import (
    choose,
    look_script,
    native_sets,
    own_sources,
    pythons_of,
)
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import ssh_pool
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.clouds.vms.wheels import wheelhouse
from tests.e2e.conftest import Serve
from tests.e2e.regions_client import Client

WHY_NOT = vm_world.why_not() or vm_world.why_no_venv()
pytestmark = [pytest.mark.long, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

LOGIN = Keys(bytes(range(32)), "the user").login("chat")
SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
  load_balancers: {regions: ssh/rack}
resources:
  infra: ssh
  accelerators: L4:1
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@pytest.fixture
def host(serve: Serve, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Vm]:
    """One host with a GPU, and a config.yaml that names it. Its pip finds these libraries (all, without a parameter)."""
    with VmWorld() as world:
        wheels = wheelhouse(tmp_path / "wheels", getattr(request, "param", LIBRARIES))
        vm = world.boot("h1", logins={"me": LOGIN.public}, gpus=1, wheels=wheels)
        pool = ssh_pool(tmp_path, LOGIN.private, {"h1": vm})
        serve.configure(clouds={"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}})
        yield vm
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        assert running(vm) == []


def running(vm: Vm) -> list[str]:
    """What runs on the host for a service."""
    return vm.run("pgrep -fa '[h]ttp.server|[k]eeper.py|[-]m lb ' || true").splitlines()


def the_agent(serve: Serve) -> dict[str, Any]:
    found = serve.view("web")["load_balancers"]
    return found[0] if len(found) == 1 and found[0]["alive"] and found[0]["synced"] else {}


def broken_wheel(folder: Path, suffix: str) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "broken.whl", "w") as wheel:
        for path, content in own_sources().items():
            wheel.writestr(path, content)
        wheel.writestr(f"lb/core/api_keys{suffix}", b"not a library")


def test_an_agent_shares_a_host_with_a_replica_and_is_found_again(
    serve: Serve, host: Vm, tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]
    assert endpoint.startswith(f"http://{host.address}:")
    assert Client.asks(endpoint) == b"I am h1\n"
    assert len(running(host)) == 3
    assert "/venv/bin/python" in host.run("pgrep -fa '[-]m lb '")
    agent = the_agent(serve)
    choice = choose(native_sets(None), pythons_of(host.run(look_script())))
    assert choice is not None
    has_helper = choice.native is not None
    is_native = choice.native is not None and choice.native.has_modules
    kind = "native" if is_native else "interpreted"
    workers = max(1, mover_threads(AUTO, available_cores())) if has_helper else 1
    assert {"workers": 1, **agent["build"]} == {
        "kind": kind,
        "fast_path": has_helper,
        "not_compiled": choice.why,
        "workers": workers,
    }  # as this checkout
    assert f"{kind}{'' if has_helper else ', no C helper'}" in serve.ok("status", "web", "-o", "wide").out

    # A wheel in the home fits, by its names and its code. Its modules do not load: the agent serves without, and says so.
    if not is_native:
        broken_wheel(serve.home / "native", choice.python.suffix)

    # Every connection of ours breaks: it is made again, and the agent with its machine stays.
    host.run("pkill -f '^sshd: me' || true")
    pid = serve.ok("controller", "status", "-o", "json").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    serve.ok("controller", "start")
    serve.eventually(lambda: the_agent(serve).get("instance_id") == agent["instance_id"])
    if not is_native:
        serve.eventually(lambda: the_agent(serve)["newest"] and the_agent(serve)["build"]["not_compiled"])
        assert (
            "web: the load balancer is interpreted, which takes more CPU: " in serve.ok("status", "web").out
        )
        assert the_agent(serve)["build"]["not_compiled"].startswith(
            "the native modules cannot be loaded there: "
        )
    assert Client.asks(endpoint) == b"I am h1\n"
    host.run("pkill -f '^sshd: me' || true")

    # A new table arrives there: a second version of the service with a policy of another name.
    file.write_text(SERVICE.replace("replicas: 1", "replicas: 1\n  load_balancing_policy: round_robin"))
    serve.ok("update", "web", file, "-y")
    serve.eventually(lambda: the_agent(serve).get("instance_id") == agent["instance_id"])
    assert Client.asks(endpoint) == b"I am h1\n"

    serve.ok("down", "web", "-y")
    assert running(host) == []


@only_long  # half a minute for one sentence
@pytest.mark.parametrize("host", [("orjson",)], indirect=True)
def test_a_machine_where_an_agent_cannot_be_installed_is_told(serve: Serve, host: Vm, tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    assert serve("up", file, "-y", "--name", "web", "--timeout", "1").code != 0
    why = "h1: what a load balancer agent needs cannot be installed there: ERROR: No matching distribution"

    def is_told() -> bool:
        (agent,) = serve.view("web")["load_balancers"]
        return str(agent["message"]).startswith(why) and agent["trouble"] == agent["message"]

    serve.eventually(is_told)
    assert why in " ".join(serve.ok("status", "web").out.split())
