"""Ways to a host's sshd, over real ones: bastions, programs in between, agents, certificates, passphrases."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from provisioners.port.commands import (
    Commands,
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
)
from provisioners.remote.async_ssh import connect_commands
from provisioners.remote.ssh import connect
from provisioners.ssh.machines import SshMachines
from provisioners.ssh.pool import load_pools
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_bench import KEYS, host_key, until
from tests.clouds.vms.vm_world import Vm, VmWorld

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

Dial = Callable[..., Commands]  # to a login, within the product's own time, or so many seconds
DIALS = pytest.mark.parametrize(
    "dial",
    [connect, connect_commands],
    ids=["bringing up", "following"],
)
RELAY = """
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def inward():
    while data := os.read(0, 65536):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=inward, daemon=True).start()
while data := link.recv(65536):
    os.write(1, data)
"""


@dataclass
class Site:
    """`inner` can be reached from `jump` alone."""

    jump: Vm
    inner: Vm
    logins: dict[str, Login]

    @property
    def through(self) -> Login:
        return replace(self.logins["inner"], bastion=self.logins["jump"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with VmWorld() as world:
        vms = {name: world.boot(name, logins={"me": KEYS.login("chat").public}) for name in ("jump", "inner")}
        logins = {}
        for name, vm in vms.items():
            key = host_key(vm)
            logins[name] = Login(name, vm.address, "me", KEYS.login("chat").private, (key,))
        vms["inner"].wall([(22, f"{vms['jump'].address}/32")])
        yield Site(vms["jump"], vms["inner"], logins)


def who(dial: Dial, login: Login) -> str:
    shell = dial(login)
    try:
        return shell.run("hostname; echo $SSH_CONNECTION").out.decode().split()[1]
    finally:
        shell.close()


def sessions(vm: Vm) -> int:
    """The connections that its sshd has."""
    return int(vm.run("pgrep -fc '^sshd: me' || true"))


@DIALS
def test_a_host_behind_a_bastion_is_reached_through_one_connection(site: Site, dial: Dial) -> None:
    with pytest.raises(UnreachableError):
        dial(site.logins["inner"], 3.0)
    assert who(dial, site.through) == site.jump.address
    before = sessions(site.jump)
    shells = [dial(site.through) for _ in range(5)]
    assert sessions(site.jump) == before
    assert {shell.run("id -un").out for shell in shells} == {b"me\n"}
    # Certificates are renewed every hour or so: that is no other bastion.
    renewed = replace(site.through, bastion=replace(site.logins["jump"], private_key="renewed"))
    dial(renewed).close()
    assert sessions(site.jump) == before
    for shell in shells:
        shell.close()


@DIALS
def test_a_bastion_that_was_away_is_connected_to_again(site: Site, dial: Dial) -> None:
    shell = dial(site.through)
    site.jump.run("touch /run/no-sshd; pkill sshd")
    try:
        until(lambda: not shell.is_open or _is_lost(shell))
        shell.close()
        until(lambda: site.jump.run("pgrep -xc sshd || true").strip() == "0", "the end of every sshd")
        with pytest.raises(UnreachableError, match="cannot be reached through the bastion: jump"):
            dial(site.through)
    finally:
        site.jump.run(
            "rm /run/no-sshd; (while [ ! -e /run/no-sshd ]; do /usr/sbin/sshd -D; sleep 0.2; done) >/dev/null 2>&1 &"
        )
    until(lambda: _can(dial, site.through))


def _is_lost(shell: Commands) -> bool:
    try:
        shell.run("true", timeout_s=2.0)
    except ShellError:
        return True
    return False


def _can(dial: Dial, login: Login) -> bool:
    try:
        dial(login).close()
    except UnreachableError:
        return False
    return True


@DIALS
def test_a_wrong_bastion_makes_the_host_behind_it_unreachable_and_no_more(site: Site, dial: Dial) -> None:
    """The host behind it is unreachable, and neither a stranger nor one that refuses us: those are given up."""
    stranger = replace(site.logins["jump"], host_keys=(KEYS.host("another").public,))
    with pytest.raises(UnreachableError, match=r"through the bastion: jump .* shows another host key"):
        dial(replace(site.through, bastion=stranger))
    refused = replace(site.logins["jump"], user="root")
    with pytest.raises(UnreachableError, match=r"through the bastion: jump .* refuses the login"):
        dial(replace(site.through, bastion=refused))
    with pytest.raises(HostKeyError, match="inner"):
        dial(replace(site.through, host_keys=(KEYS.host("another").public,)))
    closed = replace(site.through, port=23)
    with pytest.raises(UnreachableError, match=r"inner .* cannot be reached"):
        dial(closed, 3.0)


@DIALS
def test_a_program_brings_us_there_and_ends_with_the_connection(
    site: Site, dial: Dial, tmp_path: Path
) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    jump = site.logins["jump"]
    login = replace(
        jump, address="names.nothing.invalid", program=(sys.executable, str(relay), jump.address, "22")
    )
    shell = dial(login)
    assert shell.run("id -un").out == b"me\n"
    shell.close()
    # Bytes that no one has read make the end of its input a reset, on which the relay's reader ends and the relay does not.
    until(lambda: subprocess.run(["pgrep", "-f", str(relay)], capture_output=True).returncode == 1)
    broken = ("sh", "-c", "echo one >&2; echo 'the tunnel is closed' >&2; exit 3")
    with pytest.raises(UnreachableError, match="cannot be reached: the tunnel is closed"):
        dial(replace(login, program=broken))
    with pytest.raises(UnreachableError, match="No such file"):
        dial(replace(login, program=("/nowhere/tunnel",)))


@DIALS
def test_a_certificate_that_the_host_trusts_lets_us_in(site: Site, dial: Dial, tmp_path: Path) -> None:
    def keygen(*words: str) -> None:
        subprocess.run(["ssh-keygen", "-q", *words], check=True, cwd=tmp_path)

    keygen("-t", "ed25519", "-N", "", "-f", "authority")
    keygen("-t", "ed25519", "-N", "a secret", "-f", "user")
    keygen("-s", "authority", "-I", "me", "-n", "me", "-V", "+1h", "user.pub")
    login = replace(site.logins["jump"], private_key=(tmp_path / "user").read_text(), passphrase="a secret")
    with pytest.raises(LoginRefusedError, match="refuses the login"):
        dial(login)
    with pytest.raises(LoginRefusedError, match="passphrase_file"):
        dial(replace(login, passphrase="another"))
    authority = (tmp_path / "authority.pub").read_text()
    home = "/home/me/.ssh/authorized_keys"
    site.jump.run(f"cp {home} /run/keys; echo 'cert-authority {authority.strip()}' >>{home}")
    certified = replace(login, certificate=(tmp_path / "user-cert.pub").read_text())
    dial(certified).close()
    dial(replace(site.logins["inner"], bastion=certified)).close()
    site.jump.run(f"cp /run/keys {home}")


@DIALS
@pytest.mark.skipif(shutil.which("ssh-agent") is None, reason="there is no ssh-agent here")
def test_keys_of_an_agent_are_used_if_the_login_says_so(
    site: Site, dial: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    facts = dict(line.split(";")[0].split("=") for line in said.splitlines() if "=" in line)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", facts["SSH_AUTH_SOCK"])
        key = tmp_path / "id"
        key.touch(0o600)
        key.write_text(KEYS.login("chat").private)
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        without = replace(site.logins["jump"], private_key=KEYS.host("another").private)
        with pytest.raises(LoginRefusedError):
            dial(without)
        dial(replace(without, agent=True)).close()
        dial(replace(without, agent=True, private_key="")).close()
    finally:
        os.kill(int(facts["SSH_AGENT_PID"]), signal.SIGTERM)


def test_a_pool_behind_a_bastion(site: Site, tmp_path: Path) -> None:
    (tmp_path / "id").write_text(KEYS.login("chat").private)
    section = {
        "user": "me",
        "identity_file": str(tmp_path / "id"),
        "bastion": {"host": site.jump.address, "host_key": site.logins["jump"].host_keys[0]},
        "hosts": [
            {"name": "inner", "address": site.inner.address, "host_key": site.logins["inner"].host_keys[0]}
        ],
    }
    pools = load_pools({"rack": section})
    machines = SshMachines(pools, dial=lambda login: connect_commands(login, 3.0))
    (finding,) = machines.check()
    assert "of its disk are free" in finding.message  # the only thing wrong with it
    assert machines.machines("me") == []
