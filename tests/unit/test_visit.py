"""`serve exec` and `serve ssh`, the parts that decide: who may log in where, and how `ssh` is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Zone
from provisioners.local.cloud import LocalProvisioner
from provisioners.port.base import Instance, InstanceState
from provisioners.port.commands import Login
from provisioners.remote.ssh_keys import Keys
from skyserve_cli.controller.sessions.place import NoAccessError, Place
from tests.clouds.fake import FakeProvisioner

NOW = 1e9
KEYS = Keys(bytes(range(32)), "me")
LOGIN = Login("h1", "10.0.0.1", "u", KEYS.login("chat").private, (KEYS.host("t").public,), 2222)
INSTANCE = Instance(
    "i", "t", "me", "chat", 1, Zone("local", "r", "z"), CapacityType.SPOT, InstanceState.RUNNING
)


def test_a_local_replica_is_a_folder(tmp_path: Path) -> None:
    found = Place("chat", 1, 1, LocalProvisioner(tmp_path), INSTANCE).view()
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
        Place("chat", 1, 0, FakeProvisioner(lambda: 0.0), instance).view()
