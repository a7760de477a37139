"""`serve exec` and `serve ssh`, the parts that decide: who may log in where, and how `ssh` is called."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Zone
from provisioners.base import Instance, InstanceState
from provisioners.fake import FakeProvisioner
from provisioners.keys import Keys
from provisioners.local.cloud import LocalProvisioner
from provisioners.shell import Login
from skyserve_cli.commands.reach import OverSsh
from skyserve_cli.commands.ssh import known_hosts_of, ssh_command, write_private
from skyserve_cli.controller.access import NoAccessError, access_to

KEYS = Keys(bytes(range(32)), "me")
LOGIN = Login("h1", "10.0.0.1", "u", KEYS.login().private, (KEYS.host("t").public,), 2222)
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


def test_ssh_takes_the_pinned_key_and_the_private_files_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "100% a b"
    folder.mkdir()
    identity, known_hosts = folder / "identity", folder / "known_hosts"
    write_private(identity, LOGIN.private_key)
    write_private(known_hosts, known_hosts_of(LOGIN))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert known_hosts.read_text().startswith("[10.0.0.1]:2222 ssh-ed25519 ")
    program = shutil.which("ssh")
    if program is None:
        pytest.skip("there is no ssh here")
    command = ssh_command(program, OverSsh(LOGIN, ".skyserve/machines/t"), identity, known_hosts)
    assert LOGIN.private_key not in " ".join(command)
    told = subprocess.run([program, "-G", *command[1:]], check=True, capture_output=True, text=True).stdout
    lines = told.splitlines()
    assert "stricthostkeychecking true" in lines
    assert f"userknownhostsfile {known_hosts}" in lines
    assert {"hostname 10.0.0.1", "port 2222", "user u", "requesttty true"} <= set(lines)
