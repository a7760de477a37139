"""`serve` on a pool of the user's own hosts: machines with sshd, in network namespaces of their own."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import termios
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from provisioners.remote.host_agent import tls_relay
from provisioners.remote.ssh_keys import Keys
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import ssh_pool
from tests.clouds.vms.vm_world import Vm, VmWorld
from tests.e2e.conftest import Serve

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

LOGIN = Keys(bytes(range(32)), "the user").login("chat")
SERVICE = """
service:
  readiness_probe: {path: /, initial_delay_seconds: 120}
  replicas: 2
resources:
  infra: ssh
  accelerators: L4:1
setup: echo "I am $SKYSERVE_ZONE" >index.html
run: exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT
"""


@pytest.fixture
def rack(serve: Serve, tmp_path: Path) -> Iterator[dict[str, Vm]]:
    """Two hosts with a GPU each, and a config.yaml that names them."""
    with VmWorld() as world:
        vms = {
            name: world.boot(name, logins={"me": LOGIN.public}, gpus=1, disk_mb=64) for name in ("h1", "h2")
        }
        pool = ssh_pool(tmp_path, LOGIN.private, vms)
        serve.configure(clouds={"ssh": {"poll_seconds": 0.5, "pools": {"rack": pool}}})
        yield vms
        serve("down", "--all", "--purge", "-y", "--timeout", "60")
        assert running(vms) == []


def running(vms: dict[str, Vm]) -> list[str]:
    """What runs on the hosts."""
    return [line for vm in vms.values() for line in vm.run("pgrep -fa '[h]ttp.server' || true").splitlines()]


def test_a_service_on_two_hosts_from_up_to_down(serve: Serve, rack: dict[str, Vm], tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]

    def zones() -> set[str]:
        replicas = serve.view("web")["replicas"]
        return {one["zone"] for one in replicas if one["state"] == "READY"}

    serve.eventually(lambda: len(zones()) == 2)
    assert _get(endpoint) in {b"I am h1\n", b"I am h2\n"}
    assert len(running(rack)) == 2

    pid = serve.ok("controller", "status", "-o", "json").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    serve.ok("controller", "start")
    before = {one["id"] for one in serve.view("web")["replicas"]}

    # Someone attends them again: else no one would notice that one ends.
    rack["h1"].run("pkill -f '[h]ttp.server'")
    serve.eventually(
        lambda: {one["id"] for one in serve.view("web")["replicas"]} - before and len(zones()) == 2
    )
    assert _get(endpoint) in {b"I am h1\n", b"I am h2\n"}

    serve.ok("down", "web", "-y")
    assert running(rack) == []


@only_long  # test_cli_exec has the commands, in every run
def test_commands_and_a_shell_on_hosts(serve: Serve, rack: dict[str, Vm], tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    file.write_text("envs: {COLOUR: green}" + SERVICE)
    serve.ok("up", file, "-y", "--name", "web")
    serve.eventually(lambda: serve.view("web")["ready"] == 2)
    zones = {one["id"]: one["zone"] for one in serve.view("web")["replicas"]}
    first, second = sorted(zones)

    said = serve("exec", "web", "--replica", str(first), "--", "cat index.html; echo $COLOUR >&2; exit 7")
    assert (said.code, said.out, said.err) == (7, f"I am {zones[first]}\n", "green\n")
    both = serve.ok("exec", "web", "--all", "--", "printf", "%s", "a b")
    assert sorted(both.out.splitlines()) == [f"{first} | a b", f"{second} | a b"]
    assert serve("exec", "web", "--", "true").code == 2

    with subprocess.Popen(
        [*serve.command, "exec", "web", "--all", "--", "echo started; sleep 7654.5"],
        env=serve.environment,
        stdout=subprocess.PIPE,
    ) as program:
        assert program.stdout is not None
        assert {program.stdout.readline(), program.stdout.readline()} == {
            f"{one} | started\n".encode() for one in (first, second)
        }
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(60) == 130
    assert [vm.run("pgrep -fa '[7]654.5' || true") for vm in rack.values()] == ["", ""]

    code, screen = _on_a_terminal(
        serve, "ssh", "web", "--replica", str(first), keys="cat index.html; tty; exit 5\n"
    )
    assert code == 5, screen
    assert f"I am {zones[first]}" in screen
    assert "/dev/pts/" in screen

    code, screen = _on_a_terminal(
        serve,
        "ssh",
        "web",
        "--replica",
        str(first),
        keys="stty size; echo $((40+2)); sleep 7654.5\n",
        after_42="\x03stty size; exit 6\n",
    )
    assert (code, "24 80" in screen, "30 100" in screen) == (6, True, True), screen

    big = os.urandom(3 << 20)
    told = subprocess.run(
        [*serve.command, "exec", "web", "--replica", str(first), "--stdin", "--", "tee /dev/stderr"],
        env=serve.environment,
        input=big,
        capture_output=True,
        timeout=60,
    )
    assert (told.returncode, told.stdout == big, told.stderr == big) == (0, True, True)
    code, screen = _on_a_terminal(serve, "exec", "web", "--replica", str(first), "--", "wc -c", keys="")
    assert (code, screen.strip()) == (0, "0"), "there is no standard input"

    lines = serve.ok("events", "web", "-o", "json").out
    sessions = [one for one in map(json.loads, lines.splitlines()) if one["kind"] == "session"]
    assert {one["author"] for one in sessions} == {"owner"}
    said_of = [one["message"] for one in sessions if one["replica_id"] == first]
    assert {
        "a shell begins",
        "a command begins",
        "a shell ends: exit code 5",
        "a command ends: exit code 7",
    } <= set(said_of)
    assert "index.html" not in lines, "commands may have secrets"

    rule = ["to", f"{rack[zones[second]].address}/32", "unreachable"]
    subprocess.run(["ip", "rule", "add", *rule], check=True)
    try:
        lost = serve("exec", "web", "--replica", str(second), "--", "true")
    finally:
        subprocess.run(["ip", "rule", "del", *rule], check=True)
    assert (lost.code, "cannot be reached" in lost.err) == (255, True), lost


def _on_a_terminal(serve: Serve, *arguments: str, keys: str, after_42: str = "") -> tuple[int, str]:
    """The exit code of `serve` with a terminal on which `keys` are pressed, and what the terminal shows.

    Once it shows a line with 42 it gets another size, and the keys `after_42` are pressed.
    """
    terminal, side = pty.openpty()
    program = subprocess.Popen(
        [*serve.command, *arguments],
        env=serve.environment,
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    os.write(terminal, keys.encode())
    screen = b""
    with suppress(OSError):  # the terminal has no other side any more
        while content := os.read(terminal, 4096):
            screen += content
            if after_42 and b"\n42\r" in screen:
                termios.tcsetwinsize(terminal, (30, 100))
                time.sleep(1.0)
                os.write(terminal, after_42.encode())
                after_42 = ""
    os.close(terminal)
    return program.wait(60), screen.decode()


def test_prompts_cross_only_inside_tls_whoever_is_killed(
    serve: Serve, rack: dict[str, Vm], tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE)
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]

    def ready() -> int:
        return sum(one["state"] == "READY" for one in serve.view("web")["replicas"])

    def responds() -> bool:
        try:
            return all(_get(f"{endpoint}/?prompt=very-private").startswith(b"I am h") for _ in range(6))
        except OSError:
            return False

    serve.eventually(lambda: ready() == 2)
    assert all(one["endpoint"].startswith("https://") for one in serve.view("web")["replicas"])
    if Path(tls_relay.__file__).with_name(tls_relay.LIBRARY).exists():
        assert [one["message"] for one in serve.view("web")["replicas"]] == ["", ""], "TLS is native"
    before = {one["id"] for one in serve.view("web")["replicas"]}
    with rack["h1"].tapped() as first, rack["h2"].tapped() as second:
        assert responds()
        for vm in rack.values():
            vm.run("pkill -9 -f '[a]gent-.*pyz front'")
        serve.eventually(responds)
        for vm in rack.values():
            # What terminates TLS may not be back from the first time.
            vm.run("pkill -9 -f '[a]gent-.*pyz daemon'; pkill -9 -f '[a]gent-.*pyz front' || true")
        serve.eventually(responds)
        os.kill(serve.ok("controller", "status", "-o", "json").json()["pid"], signal.SIGKILL)
        assert responds()
        serve.ok("controller", "start")
        serve.eventually(lambda: ready() == 2)
        for vm in rack.values():  # plain text can be captured
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
                plain.sendto(b"spoken in clear", (vm.address, 9))
        serve.eventually(lambda: all(b"spoken in clear" in heard for heard in (first, second)))
    assert {one["id"] for one in serve.view("web")["replicas"]} == before, "nobody was replaced"
    for heard in (first, second):
        assert b"very-private" not in heard
        assert b"I am h" not in heard


@only_long
def test_without_tls_if_the_configuration_says_so(serve: Serve, rack: dict[str, Vm], tmp_path: Path) -> None:
    config = yaml.safe_load((serve.home / "config.yaml").read_text())
    config["clouds"]["ssh"]["tls"] = False
    (serve.home / "config.yaml").write_text(yaml.safe_dump(config))
    file = tmp_path / "web.yaml"
    file.write_text(SERVICE.replace("replicas: 2", "replicas: 1"))
    endpoint = serve.ok("up", file, "-y", "--name", "web").out.strip().splitlines()[-1]
    (replica,) = serve.view("web")["replicas"]
    assert replica["endpoint"].startswith("http://")
    assert _get(endpoint).startswith(b"I am h")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body


def test_what_a_replica_keeps_on_its_host_is_there_for_the_next_one(
    serve: Serve, rack: dict[str, Vm], tmp_path: Path
) -> None:
    file = tmp_path / "web.yaml"
    writes = 'setup: echo "$SKYSERVE_REPLICA_ID" >>"$HF_HOME/ids"; cp "$HF_HOME/ids" index.html'
    file.write_text("cache: node" + SERVICE.replace(SERVICE.splitlines()[7], writes))
    serve.ok("up", file, "-y", "--name", "web")
    serve.eventually(lambda: serve.view("web")["ready"] == 2)

    def kept(host: str) -> list[str]:
        return rack[host].run("cat ~me/.skyserve/cache/*/-/web/hf_home/ids || true").split()

    before = {one["zone"]: str(one["id"]) for one in serve.view("web")["replicas"]}
    assert {host: kept(host) for host in rack} == {host: [one] for host, one in before.items()}
    rack["h1"].run("pkill -f '[h]ttp.server'")
    serve.eventually(lambda: len(kept("h1")) == 2 and serve.view("web")["ready"] == 2)
    assert kept("h1")[0] == before["h1"]
    assert rack["h1"].run("stat -c %a ~me/.skyserve/cache/*/-/web").strip() == "700"

    gone = serve.ok("down", "web", "--purge", "-y")
    assert {f"removed the cache of web on ssh: {host}" for host in rack} <= set(gone.err.splitlines())
    assert [rack[host].run("ls ~me/.skyserve/cache/*/-") for host in rack] == ["", ""]
