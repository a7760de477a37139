"""Fifty machines after a rotation: all get the new keys, none runs anything but the exchange, and no older key opens any."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from policies.model import CapacityType, Zone
from provisioners.assembly import VmSettings, login_by, login_of, older_logins, order_of
from provisioners.port.commands import CommandOutput, HostKeyError, Login, LoginRefusedError, UnreachableError
from provisioners.port.vm import Machine, MachineState
from provisioners.remote.first_login import FirstLogins
from provisioners.remote.ssh_config import SshRoute
from provisioners.remote.ssh_keys import Keys, lasting_keys_script
from tests.unit.test_vm_cloud_provisioner import an_order

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
WAY = SshRoute()


@dataclass
class Host:
    """The keys of one machine, and how many programs it was given."""

    host_key: str
    login_keys: set[str]
    ran: int = 0


@dataclass
class Network:
    """Connections to hosts by their address. `breaks_at` is the number of the program during which the controller dies."""

    hosts: dict[str, Host] = field(default_factory=dict)
    logins: dict[str, str] = field(default_factory=dict)  # private keys by public ones
    breaks_at: int = 0
    ran: int = 0

    def host_key(self, login: Login) -> str:
        return self.hosts[login.address].host_key

    def dial(self, login: Login) -> Any:
        host = self.hosts[login.address]
        if host.host_key.split()[1] not in {line.split()[1] for line in login.host_keys}:
            raise HostKeyError("another key")
        if login.private_key not in {self.logins[key] for key in host.login_keys}:
            raise LoginRefusedError("refused")
        return Connection(self, host, login)


@dataclass
class Connection:
    network: Network
    host: Host
    login: Login

    def run(self, command: str, *, stdin: bytes, timeout_s: float) -> CommandOutput:
        """What the script does, up to where it is cut."""
        text = stdin.decode()
        self.network.ran += 1
        self.host.ran += 1
        (login,) = re.findall(r"echo '(ssh-ed25519 [^']+)' >\$d/", text)
        (host,) = re.findall(r"echo '(ssh-ed25519 [^']+)' >\$k.pub", text)
        self.host.login_keys = {login}
        if self.network.ran == self.network.breaks_at:
            raise UnreachableError("cut")
        self.host.host_key = host
        return CommandOutput(0, b"", b"")

    def close(self) -> None: ...

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None: ...


def machine(number: int) -> Machine:
    return Machine(
        f"i-{number}", f"own-chat-{number}-0123456789", "own", f"chat-{number % 5}", number, 0, 1,
        Zone("aws", "r", "z"), CapacityType.SPOT, MachineState.RUNNING, f"10.0.0.{number}",
    )  # fmt: skip


@pytest.mark.parametrize("breaks_at", [0, 1, 25])
def test_fifty_machines_get_new_keys(breaks_at: int) -> None:
    network = Network(breaks_at=breaks_at)
    machines = [machine(number) for number in range(50)]
    for one in machines:
        for secret in (OLD, NEW):
            key = Keys(secret, "own").login(one.service)
            network.logins[key.public] = key.private
        keys = Keys(OLD, "own")
        network.hosts[one.address or ""] = Host(keys.host(one.token).public, {keys.login(one.service).public})

    def logins() -> FirstLogins:
        def script(one: Machine) -> str:
            keys = Keys(NEW, "own")
            return lasting_keys_script("skyserve", keys.login(one.service), keys.host(one.token))

        return FirstLogins(
            "skyserve",
            lambda one: login_by(WAY, one, NEW + OLD),
            script,
            boot_keys=lambda one: [],
            older=lambda one: older_logins(WAY, one, NEW + OLD),
            dial=network.dial,
            host_key=network.host_key,
        )

    first = logins()
    for one in machines:
        try:
            first.prepare(one)
        except HostKeyError:  # cut in the middle: neither all old nor all new
            assert not first.has_present_keys(one.token)
            logins().prepare(one)
            first.prepare(one)
    assert all(first.has_present_keys(one.token) for one in machines)
    for one in machines:
        network.dial(login_of(one, NEW + OLD)).close()
        for old in older_logins(WAY, one, NEW + OLD):
            with pytest.raises((HostKeyError, LoginRefusedError)):
                network.dial(old)
            with pytest.raises(LoginRefusedError):
                network.dial(replace(old, host_keys=login_of(one, NEW).host_keys))
    assert {host.ran for host in network.hosts.values()} <= {1, 2}
    assert network.ran == 50 + (breaks_at > 0)
    first.prepare(machines[0])
    assert network.ran == 50 + (breaks_at > 0), "again is nothing new"


def test_an_order_after_a_rotation_has_the_new_login_key() -> None:
    before, after = (order_of(an_order(), 0, secret, VmSettings()) for secret in (OLD, NEW + OLD))
    assert before.public_key != after.public_key
    assert replace(before, public_key="", user_data="") == replace(after, public_key="", user_data="")
