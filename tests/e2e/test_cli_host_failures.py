"""The messages and actions of `serve` when the user's own hosts fail it: the next host is asked, and the one at fault is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioners.remote.ssh_keys import Keys
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import host_key, ssh_pool
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.e2e.conftest import Said, Serve, living_in

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

LOGIN = Keys(bytes(range(32)), "the user").login("chat")
ANOTHER = Keys(bytes(32), "somebody else").login("chat")
SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
resources: {infra: ssh, accelerators: "L4:1"}
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""

SENTENCES = {
    "silent": r"silent \([\d.]+:22\) cannot be reached: .*Connection refused",
    "changed": r"changed \([\d.]+:22\) shows another host key than the one we know \(SHA256:\S+ instead of SHA256:\S+\): "
    "nothing was sent to it",
    "locked": r"locked \([\d.]+:22\) refuses the login of 'me'",
    "full": r"full: the disk is full",
}


@dataclass
class Rack:
    """The hosts, from the cheapest to the dearest: only the last one is in order."""

    serve: Serve
    vms: dict[str, Vm]
    folder: Path

    def up(self, name: str, *flags: str, **changes: Any) -> Said:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(SERVICE) | changes))
        return self.serve("up", path, "-y", "--name", name, *flags)


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    folder = tmp_path_factory.mktemp("host-failures")
    with VmWorld() as world:
        vms = {
            name: world.boot(
                name, logins={"me": LOGIN.public}, gpus=1, disk_mb=6000 if name == "fine" else 64
            )
            for name in (*SENTENCES, "fine")
        }
        pool = ssh_pool(folder, LOGIN.private, vms)
        for price, host in enumerate(pool["hosts"]):
            host["price_usd_hour"] = float(price)
        known, wrong = folder / "known_hosts", " ".join(ANOTHER.public.split()[:2])
        known.write_text(known.read_text().replace(host_key(vms["changed"]), wrong))
        program = living_in(folder)
        serve = next(program)
        serve.configure(clouds={"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}})
        vms["silent"].run("touch /run/no-sshd; pkill -x sshd; true")
        vms["locked"].run("rm /home/me/.ssh/authorized_keys")
        vms["full"].run("cat /dev/zero >/fill 2>/dev/null || true")
        yield Rack(serve, vms, folder)
        # A host that is released goes: only then can the hosts at fault be seen again.
        next(program, None)
        assert vms["fine"].run("pgrep -fa '[h]ttp.server' || true") == ""


@pytest.fixture(scope="module")
def told(rack: Rack) -> str:
    """The output of `serve up` on its way to the host that is in order."""
    said = rack.up("web")
    assert said.code == 0, said
    return said.err


@pytest.mark.parametrize("host", SENTENCES)
def test_a_host_that_cannot_be_used_is_named_and_the_next_one_asked(rack: Rack, told: str, host: str) -> None:
    assert len(re.findall(f"launch failed -> GONE: {SENTENCES[host]}", told)) == 1, told
    replicas = rack.serve.view("web", "--all")["replicas"]
    (met,) = [one for one in replicas if one["zone"] == host]
    assert (met["end_reason"], bool(re.match(SENTENCES[host], met["message"]))) == ("CAPACITY", True)
    (serving,) = [one for one in replicas if one["state"] != "GONE"]
    assert (serving["zone"], serving["state"]) == ("fine", "READY")


def test_nothing_is_sent_to_a_host_with_another_key(rack: Rack, told: str) -> None:
    assert "Accepted" not in rack.vms["changed"].console()


def test_check_says_the_same_of_each(rack: Rack, told: str) -> None:
    (found,) = rack.serve("check", "-o", "json").json()
    why = {each["what"].split()[0]: each["message"] for each in found["findings"]}
    assert why.pop("fine") == ""
    assert all(re.match(SENTENCES[host], sentence) for host, sentence in why.items()), why


@only_long  # test_hosts_pool has the same in one process
def test_a_controller_that_begins_with_a_silent_host_goes_on_with_the_others(rack: Rack, told: str) -> None:
    pid = rack.serve.ok("controller", "status", "-o", "json").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    rack.serve.ok("controller", "start")
    before = {one["id"] for one in rack.serve.view("web")["replicas"]}
    rack.vms["fine"].run("pkill -f '[h]ttp.server'")

    def is_back() -> bool:
        ready = [one for one in rack.serve.view("web")["replicas"] if one["state"] == "READY"]
        return bool(ready) and ready[0]["id"] not in before

    rack.serve.eventually(is_back)


@only_long  # test_cli_cloud_failures has the same on a rented machine
def test_a_failing_setup_on_a_host_leaves_its_last_lines(rack: Rack, told: str) -> None:
    rack.serve.ok("down", "web", "-y", "--purge")
    said = rack.up("setup", setup="echo reading the manual; exit 4", resources={"infra": "ssh/rack/fine"})
    assert said.code == 1
    assert said.err.count("`setup` failed with exit code 4: reading the manual\n") >= 3
    assert "  | reading the manual\n" in said.err
    (last,) = [one for one in rack.serve.view("setup", "--all")["replicas"] if one["id"] == 3]
    assert Path(last["kept_log"]).read_text() == "reading the manual\n"
    assert rack.serve.ok("logs", "setup", "3").out == "reading the manual\n"
    rack.serve.ok("down", "setup", "-y", "--purge")
