"""What replicas that come up have printed last: read while they come up, the one that was read longest ago first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from provisioners.port.base import Instance, InstanceState, Provisioner, Requirements
from provisioners.port.errors import TransientError
from skyserve_cli.controller import output_part
from skyserve_cli.controller.output_part import OutputReader
from tests.unit.test_controller_view import a_row

S = ReplicaState
ZONE = Zone("sky", "r", "z")
INSTANCE = Instance("i-1", "t-1", "me", "chat", 1, ZONE, CapacityType.SPOT, InstanceState.SETUP)
NAME = a_row().name


class Sky:
    """A cloud with one log; `calls` counts how often it was read."""

    name: ClassVar[str] = "sky"

    def __init__(self) -> None:
        self.log = b""
        self.is_away = False
        self.calls = 0

    def log_window(self, instance: Instance, node: int = 0) -> tuple[int, int]:
        if self.is_away:
            raise TransientError("no route to it", cloud="sky")
        return 0, len(self.log)

    def read_log(self, instance: Instance, offset: int, max_bytes: int, node: int = 0) -> bytes:
        self.calls += 1
        return self.log[offset:][:max_bytes]

    def log_times(self, instance: Instance, after: float, offset: int, most: int, node: int = 0) -> bytes:
        return b""

    def offers(self, need: Requirements) -> Sequence[Offer]:
        return []

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        return [INSTANCE]

    def launch(self, order: Any) -> Instance:
        return INSTANCE

    def terminate(self, instance: Instance) -> None:
        pass


def replica(number: int, state: ReplicaState) -> Replica:
    offer = Offer(ZONE, "m", None, 0.0, CapacityType.SPOT, 0.3)
    return Replica(number, 1, offer, state, 0.0, 0.0, f"i-{number}")


class World:
    def __init__(self, *fleet: Replica) -> None:
        self.sky, self.fleet = Sky(), fleet
        self.printed: dict[tuple[str, int], str] = {}
        self.asked: list[int] = []
        self.reader = OutputReader(lambda: [a_row(*self.fleet)], self.find, self.printed)

    def find(self, replica: Replica) -> tuple[Provisioner, Instance | None]:
        self.asked.append(replica.id)
        return self.sky, INSTANCE


@pytest.mark.parametrize("state", S)
def test_only_replicas_that_come_up_are_read(state: ReplicaState) -> None:
    world = World(replica(1, state))
    world.sky.log = b"Downloading model-00003-of-00030.safetensors:  45%\r"
    world.reader.step()
    expected = {(NAME, 1): "Downloading model-00003-of-00030.safetensors: 45%"}
    assert world.printed == (expected if state in (S.PROVISIONING, S.STARTING) else {})


def test_a_log_is_read_when_it_has_grown_and_forgotten_when_its_replica_serves() -> None:
    world = World(replica(1, S.STARTING))
    for log, calls, shown in [(b"", 0, None), (b"a first\n", 1, "a first"), (b"a first\n", 1, "a first")]:
        world.sky.log = log
        world.reader.step()
        assert (world.sky.calls, world.printed.get((NAME, 1))) == (calls, shown)
    world.fleet = (replica(1, S.READY),)
    world.reader.step()
    assert world.printed == {}


def test_a_machine_that_does_not_respond_keeps_its_line_and_secrets_are_hidden() -> None:
    world = World(replica(1, S.PROVISIONING))
    world.sky.log = b"x" * 10_000 + b"\n\x1b[31mHF_TOKEN=hf_abcdefghijklmnop\x1b[0m loads\n----\n"
    world.reader.step()
    world.sky.is_away = True
    world.reader.step()
    assert world.printed == {(NAME, 1): "HF_TOKEN=*** loads"}


def test_a_round_reads_few_logs_and_every_log_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_part, "MOST_READ", 2)
    world = World(*(replica(number, S.STARTING) for number in (1, 2, 3)))
    for _ in range(3):
        world.reader.step()
    assert world.asked == [1, 2, 3, 1, 2, 3]
