"""`serve exec` and `serve ssh`, the parts that decide: who may log in where, and how `ssh` is called."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Zone
from provisioners.fake import FakeProvisioner
from provisioners.local.cloud import LocalProvisioner
from provisioners.port.base import Instance, InstanceState
from provisioners.port.commands import Login
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.commands.reach import OverSsh
from skyserve_cli.commands.ssh import remove_leftovers, ssh_command, write_private
from skyserve_cli.controller.api.shells import NoAccessError, access_to

NOW = 1e9
KEYS = Keys(bytes(range(32)), "me")
LOGIN = Login("h1", "10.0.0.1", "u", KEYS.login("chat").private, (KEYS.host("t").public,), 2222)
INSTANCE = Instance(
    "i", "t", "me", "chat", 1, Zone("local", "r", "z"), CapacityType.SPOT, InstanceState.RUNNING
)


def test_a_local_replica_is_a_folder(tmp_path: Path) -> None:
    found = access_to(LocalProvisioner(tmp_path), INSTANCE, 1)
    assert found == {"kind": "local", "token": "t", "node": 1}


@pytest.mark.parametrize(
    ("instance", "why"),
    [
        (None, "has no machine, or none any more"),
        (replace(INSTANCE, state=InstanceState.PREEMPTED), r"is gone \(preempted\)"),
        (INSTANCE, "is on fake, which has no shell to log in to"),
    ],
    ids=["never launched", "gone", "a cloud without a shell"],
)
def test_why_there_is_no_way_in(instance: Instance | None, why: str) -> None:
    with pytest.raises(NoAccessError, match=why):
        access_to(FakeProvisioner(lambda: 0.0), instance, 0)


def told_by_ssh(login: Login, folder: Path) -> list[str]:
    """What OpenSSH makes of our arguments."""
    program = shutil.which("ssh")
    if program is None:
        pytest.skip("there is no ssh here")
    command = ssh_command(program, OverSsh(login, ".skyserve/machines/t"), folder)
    assert login.private_key not in " ".join(command)
    told = subprocess.run([program, "-G", *command[1:]], check=True, capture_output=True, text=True).stdout
    return told.splitlines()


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "100% a b"
    folder.mkdir()
    return folder


def test_ssh_takes_the_pinned_key_and_the_private_files_as_they_are(odd_folder: Path) -> None:
    lines = told_by_ssh(LOGIN, odd_folder)
    assert {path.stat().st_mode & 0o777 for path in odd_folder.iterdir()} == {0o600}
    known_hosts = odd_folder / "host-known_hosts"
    assert known_hosts.read_text().startswith("[10.0.0.1]:2222 ssh-ed25519 ")
    assert "stricthostkeychecking true" in lines
    assert f"userknownhostsfile {known_hosts}" in lines
    assert {"hostname 10.0.0.1", "port 2222", "user u", "requesttty true"} <= set(lines)
    assert {"identityagent none", "identitiesonly yes"} <= set(lines)


def test_ssh_goes_by_the_way_of_the_login(odd_folder: Path) -> None:
    bastion = replace(LOGIN, name="b", address="192.0.2.9", port=22, user="jump")
    lines = told_by_ssh(replace(LOGIN, bastion=bastion, agent=True, certificate="cert"), odd_folder)
    (proxy,) = (line for line in lines if line.startswith("proxycommand "))
    words = shlex.split(proxy.removeprefix("proxycommand ").replace("%%", "%"))
    assert words[-4:] == ["-W", "[10.0.0.1]:2222", "--", "192.0.2.9"]
    assert f'UserKnownHostsFile="{str(odd_folder).replace("%", "%%")}/host-bastion-known_hosts"' in words
    assert (odd_folder / "host-bastion-known_hosts").read_text().startswith("192.0.2.9 ssh-ed25519 ")
    assert any(line.startswith("certificatefile ") and "host-CertificateFile" in line for line in lines)
    assert "identityagent SSH_AUTH_SOCK" in lines


def test_ssh_uses_the_program_of_the_login(odd_folder: Path) -> None:
    lines = told_by_ssh(replace(LOGIN, program=("tunnel", "a b", "100%")), odd_folder)
    (proxy,) = (line for line in lines if line.startswith("proxycommand "))
    assert shlex.split(proxy)[1:] == ["tunnel", "a b", "100%%"]


def test_a_login_survives_the_way_to_the_command_line() -> None:
    login = replace(LOGIN, bastion=replace(LOGIN, name="b"), program=("x",), certificate="c", agent=True)
    assert Login.of(json.loads(json.dumps(asdict(login)))) == login
    assert LOGIN.private_key not in repr(login)


def test_keys_of_calls_that_were_killed_are_removed_and_others_are_not(tmp_path: Path) -> None:
    for name, age_s in (("killed", 4000.0), ("running", 5.0)):
        folder = tmp_path / f".ssh-{name}"
        folder.mkdir()
        write_private(folder / "identity", "key")
        os.utime(folder, (NOW - age_s, NOW - age_s))
    (tmp_path / "controller.token").touch()
    remove_leftovers(tmp_path, NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ssh-running", "controller.token"]
