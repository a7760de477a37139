"""The ends of the logs of replicas that failed: fetched once, found again, and few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from policies.model import CapacityType, EndReason, Offer, Replica, ReplicaState, Zone
from provisioners.port.base import Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import TransientError
from provisioners.remote.host_agent.log_times import offset_since
from skyserve_cli.controller.clouds.log_archive import KEPT_BYTES, KEPT_FILES, LogArchive

ZONE = Zone("sky", "r", "z")
INSTANCE = Instance("i-7", "t-7", "me", "chat", 7, ZONE, CapacityType.SPOT, InstanceState.RUNNING)


class Sky:
    """A cloud whose machines have printed something; `dropped` bytes of it are not kept any more."""

    name: ClassVar[str] = "sky"

    def __init__(self, *nodes: bytes, dropped: int = 0) -> None:
        self.nodes = nodes
        self.dropped = dropped
        self.is_away = False

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        if self.is_away:
            raise TransientError("no answer", cloud="sky")
        return self.dropped, len(self.nodes[node])

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        return self.nodes[node][max(offset, self.dropped) :][:max_bytes]

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        return b"".join(b"%d.0 %d\n" % (at, at) for at in range(offset, len(self.nodes[node])) if at > after)

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return []

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        return [INSTANCE]

    def launch(self, order: LaunchOrder) -> Instance:
        return INSTANCE

    def terminate(self, instance: Instance) -> None:
        pass


def failed(reason: EndReason | None = EndReason.SETUP_FAILED, replica_id: int = 7) -> Replica:
    offer = Offer(ZONE, "m", None, 0.0, CapacityType.SPOT, 0.3)
    return Replica(replica_id, 1, offer, ReplicaState.TERMINATING, 0.0, 0.0, "i-7", end_reason=reason)


@pytest.fixture
def kept(tmp_path: Path) -> LogArchive:
    return LogArchive(tmp_path / "replicas")


def read(kept: LogArchive, node: int = 0, replica_id: int = 7) -> tuple[int, bytes] | None:
    found = kept.find("chat", replica_id, node)
    return None if found is None else (found[1], found[0].read_bytes())


LONG = bytes(range(256)) * 512


@pytest.mark.parametrize(
    ("cloud", "expected"),
    [
        pytest.param(Sky(b"no wheel\n"), (0, b"no wheel\n"), id="all of a short one"),
        pytest.param(
            Sky(LONG),
            (len(LONG) - KEPT_BYTES, LONG[-KEPT_BYTES:]),
            id="the end of a long one, with its offset",
        ),
        pytest.param(Sky(b"0123456789", dropped=4), (4, b"456789"), id="what is still there"),
        pytest.param(Sky(b""), None, id="nothing of one that said nothing"),
    ],
)
def test_what_is_kept(kept: LogArchive, cloud: Sky, expected: tuple[int, bytes] | None) -> None:
    kept.keep("chat", failed(), INSTANCE, cloud)
    assert read(kept) == expected


@pytest.mark.parametrize("reason", list(EndReason), ids=lambda reason: reason.value)
def test_whose_words_are_kept(kept: LogArchive, reason: EndReason) -> None:
    kept.keep("chat", failed(reason), INSTANCE, Sky(b"x"))
    tells = {"SETUP_FAILED", "RUN_EXITED", "START_TIMEOUT", "PROBE_FAILED", "ONLY_ERRORS"}
    assert (read(kept) is not None) is (reason.value in tells)


def test_they_are_fetched_once_and_node_by_node(kept: LogArchive) -> None:
    kept.keep("chat", failed(), INSTANCE, Sky(b"head", b"tail"), num_nodes=2)
    kept.keep("chat", failed(), INSTANCE, Sky(b"later", b"later"), num_nodes=2)
    assert (read(kept), read(kept, node=1)) == ((0, b"head"), (0, b"tail"))
    assert kept.find("chat", 70) is None
    assert kept.find("chat-7", 0) is None


def test_a_machine_that_cannot_be_asked_is_let_go_of(kept: LogArchive, caplog: Any) -> None:
    cloud = Sky(b"x")
    cloud.is_away = True
    kept.keep("chat", failed(), INSTANCE, cloud)
    assert read(kept) is None
    assert "the log of chat replica 7 is not kept: no answer" in caplog.text


def test_the_oldest_make_room(kept: LogArchive, tmp_path: Path) -> None:
    for replica_id in range(KEPT_FILES + 3):
        kept.keep("chat", failed(replica_id=replica_id), INSTANCE, Sky(b"x"))
    assert len(list((tmp_path / "replicas").glob("*.log"))) == KEPT_FILES
    assert len(list((tmp_path / "replicas").iterdir())) == 2 * KEPT_FILES
    assert read(kept, replica_id=KEPT_FILES + 2) == (0, b"x")


def test_the_times_of_its_lines_are_kept_with_it(kept: LogArchive) -> None:
    kept.keep("chat", failed(), INSTANCE, Sky(b"0123456789", dropped=4))
    times = kept.times("chat", 7)
    assert offset_since(times, 6.0) == 6
    assert offset_since(times, 0.0) == 4
    assert offset_since(times, 99.0) == -1
    assert offset_since(kept.times("chat", 8), 0.0) is None
