"""`serve` on a host whose sshd lets in no one but by way of a bastion."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from provisioners.remote.ssh_keys import Keys
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import host_key
from tests.clouds.vms.vm_world import VmWorld
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not()))

LOGIN = Keys(bytes(range(32)), "the user").login("chat")
SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 1
resources:
  infra: ssh
run: echo inside >index.html; exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@only_long  # test_ssh_ways has the ways themselves, in every run
def test_a_replica_outlives_its_bastion(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "id").write_text(LOGIN.private)
    with VmWorld() as world:
        jump, inner = (world.boot(name, logins={"me": LOGIN.public}) for name in ("jump", "inner"))
        keys = [host_key(vm) for vm in (jump, inner)]
        inner.run(
            f"echo 'AllowUsers me@{jump.address}' >>/etc/ssh/sshd_config; kill -HUP $(cat /run/sshd.pid)"
        )
        pool = {
            "user": "me",
            "identity_file": str(tmp_path / "id"),
            "bastion": {"host": jump.address, "host_key": keys[0]},
            "hosts": [{"name": "inner", "address": inner.address, "host_key": keys[1]}],
        }
        serve.configure(clouds={"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}})
        file = tmp_path / "web.yaml"
        file.write_text(SERVICE)

        endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]
        serve.eventually(lambda: serve.view("web")["ready"] == 1)
        assert _get(endpoint) == b"inside\n"
        (replica,) = serve.view("web")["replicas"]
        assert serve.ok("exec", "web", "--", "cat", "index.html").out == "inside\n"

        jump.run("touch /run/no-sshd; pkill sshd")
        for _ in range(5):  # the host is listed twice a second, and misses some listings meanwhile
            away = serve("exec", "web", "--", "true")
            assert (away.code, "through the bastion" in away.err) == (255, True)
            assert _get(endpoint) == b"inside\n"
        (still,) = serve.view("web")["replicas"]
        assert (still["id"], still["state"]) == (replica["id"], "READY")

        jump.run("rm /run/no-sshd; setsid /usr/sbin/sshd -D >/dev/null 2>&1 </dev/null &")
        serve.eventually(lambda: serve("exec", "web", "--", "true").code == 0)
        assert [one["id"] for one in serve.view("web")["replicas"]] == [replica["id"]]
        assert _get(endpoint) == b"inside\n"
        serve.ok("down", "web", "-y")
        assert inner.run("pgrep -fa '[h]ttp.server' || true") == ""


def _get(endpoint: str) -> bytes:
    with urllib.request.urlopen(endpoint, timeout=30) as response:
        body: bytes = response.read()
        return body
