"""A controller is installed on a machine that has nothing but a Python, by a user who is not root, as a unit of systemd.

The machine has no systemd: programs of its names do what a unit says. pip finds what is installed here, as wheels.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from skyserve_cli.controller.balancers.native_modules import choose, look_script, native_sets, pythons_of
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import host_key
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.clouds.vms.wheels import wheelhouse
from tests.e2e.conftest import Serve
from tests.integration.sshd import LOGIN

WHY_NOT = vm_world.why_not() or vm_world.why_no_venv()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    only_long,  # two minutes: half a gigabyte of wheels
]

SYSTEMCTL = """#!/bin/sh
echo "$*" >>/tmp/systemctl.log
case "$*" in *restart*) ;; *) exit 0;; esac
for unit; do :; done
file="$HOME/.config/systemd/user/$unit.service"
if [ -f /tmp/unit.pid ]; then
  kill "$(cat /tmp/unit.pid)"
  while kill -0 "$(cat /tmp/unit.pid)" 2>/dev/null; do sleep 0.1; done
fi
home=$(sed -n 's/^Environment="\\(.*\\)"$/\\1/p' "$file")
run=$(sed -n 's/^ExecStart=//p' "$file")
setsid sh -c "export $home; exec $run" >/tmp/unit.log 2>&1 </dev/null &
echo $! >/tmp/unit.pid
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Vm]:
    needs = [Requirement(line) for line in requires("skyserve") or ()]
    names = [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    with VmWorld() as world:
        wheels = wheelhouse(tmp_path / "wheels", names)
        vm = world.boot("c1", logins={"me": LOGIN.public}, wheels=wheels, disk_mb=3000)
        host_key(vm)  # it has booted
        vm.run("mkdir -p /run/systemd/system; ln -s /bin/true /usr/local/bin/loginctl")
        vm.run(f"cat >/usr/local/bin/systemctl <<'END'\n{SYSTEMCTL}\nEND\nchmod +x /usr/local/bin/systemctl")
        yield vm


def test_it_is_installed_started_and_upgraded(serve: Serve, host: Vm, tmp_path: Path) -> None:
    (tmp_path / "id").write_text(LOGIN.private)
    (tmp_path / "known_hosts").write_text(f"{host.address} {host_key(host)}\n")
    words = [
        f"ssh/me@{host.address}",
        "--identity",
        tmp_path / "id",
        "--known-hosts",
        tmp_path / "known_hosts",
    ]
    words += ["--python", "/usr/bin/python3", "--context", "prod", "-o", "json"]
    first = serve.ok("controller", "deploy", *words).json()
    assert (first["started"], first["kept_by"], first["home"]) == (True, "systemd", "/home/me/.skyserve")
    assert first["serve"].startswith("/home/me/.local/share/skyserve/versions/")
    # The helper in C that this checkout has got was built for the interpreter of the tests.
    choice = choose(native_sets(None), pythons_of(host.run(look_script(["/usr/bin/python3"]))))
    assert choice is not None
    helpers = host.run(f"find {Path(first['serve']).parents[1]} -name '_fast_path*.so'").split()
    assert len(helpers) == (choice.native is not None)
    serve.ok("context", "use", "prod")
    assert serve.ok("controller", "status", "-o", "json").json()["pid"] == first["pid"]
    assert "--user enable skyserve-controller" in host.run("cat /tmp/systemctl.log")
    environment = host.run(f"tr '\\0' '\\n' </proc/{first['pid']}/environ")
    assert "SKYSERVE_HOME=/home/me/.skyserve\n" in environment

    assert serve.ok("controller", "deploy", *words).json()["pid"] == first["pid"]
    (serve.home / "config.yaml").write_text("controller: {tick_seconds: 2}\n")
    again = serve.ok("controller", "deploy", *words, "--replace-config").json()
    assert (again["started"], again["pid"] != first["pid"], again["serve"]) == (True, True, first["serve"])
