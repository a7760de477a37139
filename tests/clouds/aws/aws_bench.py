"""An AWS account to test with: a world, a clock, and the official SDK pointed at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import boto3
import pytest

from policies.model import CapacityType, Zone
from provisioners.aws.machines import AwsMachines, AwsSettings
from provisioners.port.vm import MachineOrder
from tests.clouds.aws.aws_world import AwsWorld, VirtualTime

EAST = Zone("aws", "us-east-1", "use1-az1")
WEST = Zone("aws", "us-west-2", "usw2-az2")
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9q4tZ0c1m2o3n4p5q6r7s8t9uAvBwCxDyEzF0G1H2I serve"

ORDER = MachineOrder(
    token="own-chat-1",
    owner="own",
    service="chat",
    replica_id=1,
    rank=0,
    num_nodes=1,
    zone=EAST,
    instance_type="g6.xlarge",
    capacity_type=CapacityType.SPOT,
    public_key=PUBLIC_KEY,
    user_data="#!/bin/sh\necho up\n",
    accelerator="L4",
    accelerator_count=1.0,
    ports=(8080,),
    sources=("203.0.113.7/32",),
)


class Killed(BaseException):
    """The process ends here; nothing may catch it."""


@dataclass(slots=True)
class Tripwire:
    """Ends the process at one of the SDK's calls: `at` counts from 0, before the request is sent or after the response
    has come."""

    at: int | None = None
    after: bool = False
    _seen: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    def arm(self, at: int, after: bool) -> None:
        self.at, self.after, self._seen = at, after, {False: 0, True: 0}

    def disarm(self) -> None:
        self.at = None

    def before_send(self, **_: Any) -> None:
        self._step(False)

    def after_call(self, **_: Any) -> None:
        self._step(True)

    def _step(self, after: bool) -> None:
        number = self._seen[after]
        self._seen[after] += 1
        if self.at == number and self.after == after:
            self.at = None
            raise Killed


class Session(boto3.Session):
    """Makes each client once per endpoint: a new process would take half a second to read the SDK's models."""

    def __init__(self) -> None:
        super().__init__(
            aws_access_key_id="AKIATEST", aws_secret_access_key="secret", region_name="us-east-1"
        )
        self.tripwire = Tripwire()
        self.events.register("before-send", self.tripwire.before_send)
        self.events.register("after-call", self.tripwire.after_call)
        self._made: dict[tuple[str, str], Any] = {}

    def client(self, service: str, region_name: str, config: Any) -> Any:  # type: ignore[override]
        if (service, region_name) not in self._made:
            self._made[service, region_name] = super().client(service, region_name=region_name, config=config)  # type: ignore[call-overload]
        return self._made[service, region_name]

    def onlooker(self, region: str) -> Any:
        """A client of the test's own, as the SDK makes them."""
        key = ("onlooker", region)
        if key not in self._made:
            self._made[key] = super().client("ec2", region_name=region)
        return self._made[key]

    def forget_clients(self) -> None:
        self._made.clear()


@cache
def session() -> Session:
    return Session()


@dataclass(slots=True)
class AwsBench:
    time: VirtualTime
    world: AwsWorld
    settings: AwsSettings = field(default_factory=AwsSettings)
    tripwire: Tripwire = field(default_factory=lambda: session().tripwire)

    def fresh(self, **settings: Any) -> AwsMachines:
        """As after a restart: nothing is remembered."""
        return AwsMachines(
            replace(self.settings, **settings),
            now=self.time.now,
            sleep=self.time.sleep,
            rng=Random(1),
            session=session(),
        )

    def onlooker(self, region: str = "us-east-1") -> Any:
        """The SDK, to look at what there is."""
        return session().onlooker(region)

    def groups(self, region: str = "us-east-1") -> list[dict[str, Any]]:
        """The security groups that we have made."""
        found = self.onlooker(region).describe_security_groups()["SecurityGroups"]
        return [group for group in found if group["GroupName"].startswith("skyserve-")]

    def onlooker_volume(self, tags: Mapping[str, str], region: str = "us-east-1") -> str:
        """A disk that a dead machine has left behind, an hour ago; its id. The policy does not count for us."""
        policy, self.world.policy = self.world.policy, None
        labels = [
            {"Key": key, "Value": value} for key, value in {**tags, "skyserve-token": "own-gone-9"}.items()
        ]
        made = self.onlooker(region).create_volume(
            AvailabilityZone=f"{region}a",
            Size=8,
            TagSpecifications=[{"ResourceType": "volume", "Tags": labels}],
        )
        self.world.backdate_volume(region, made["VolumeId"], 3600.0)
        self.world.policy = policy
        return str(made["VolumeId"])

    def states(self, machines: AwsMachines, owner: str = "own") -> dict[str, str]:
        return {machine.token: machine.state.value for machine in machines.machines(owner)}


@contextmanager
def aws_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsBench]:
    time = VirtualTime()
    with AwsWorld(time.now).running() as world:
        monkeypatch.setenv("AWS_ENDPOINT_URL", world.url)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        session().forget_clients()
        session().tripwire.disarm()
        yield AwsBench(time, world)
        assert world.errors == []
