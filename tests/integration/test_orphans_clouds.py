"""The janitor over AWS, Google Cloud and Azure by their own SDKs: whatever is lost is found by its tag and removed, whichever process
crashes in the middle, and nothing of anybody else's is touched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from provisioners.aws.machines import AwsMachines
from provisioners.azure.machines import AzureMachines
from provisioners.gcp.machines import GcpMachines
from provisioners.port.errors import TransientError
from provisioners.port.vm import OWNER_TAG, TOKEN_TAG, MachineOrder, Machines
from skyserve_cli.controller.clouds.garbage_collector import AGAIN_S
from skyserve_cli.controller.clouds.orphans import Part
from tests.clouds.aws.aws_bench import ORDER as AWS_ORDER
from tests.clouds.aws.aws_bench import Killed, aws_bench
from tests.clouds.azure.azure_harness import OWNER as AZURE_OWNER
from tests.clouds.azure.azure_harness import Crash, Killer, azure
from tests.clouds.azure.azure_harness import order as azure_order
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_controller import OWNER as GCP_OWNER
from tests.clouds.gcp.gcp_controller import controller
from tests.clouds.gcp.gcp_controller import order_of as gcp_order
from tests.clouds.orphan_bench import LeakBench
from tests.clouds.schedules import CALL_STEP

pytestmark = pytest.mark.long

ORPHAN = "own-chat-1-0a1b2c3d4e"
LOST = "own-chat-2-0a1b2c3d4e"  # of which only parts are left
MOST_CALLS = 60


class Ground(ABC):
    """A cloud in which something was lost: a machine without a row, and parts of a machine that is gone; and in which
    someone else has a machine, too."""

    owner: str
    now: Callable[[], float]
    sleep: Callable[[float], object]

    def __init__(self) -> None:
        self.cleanup = ExitStack()

    @abstractmethod
    def fresh(self) -> Machines:
        """As after a start."""

    @abstractmethod
    def arm(self, at: int, is_after: bool) -> None:
        """The process ends at that call, counted from now and from 0."""

    @abstractmethod
    def lose(self) -> None: ...

    @abstractmethod
    def everything(self) -> list[str]:
        """All that there is of our owner's, machines and parts and what they share, as the cloud itself has it."""

    @abstractmethod
    def theirs(self) -> list[str]:
        """The same of another owner's."""

    def dies(self, act: Callable[[], object]) -> bool:
        """Whether the process ends in it."""
        try:
            act()
        except (Killed, Crash):
            return True
        return False

    def bench(self) -> LeakBench:
        return LeakBench(self.fresh(), self.owner, self.now)


class Aws(Ground):
    owner = AWS_ORDER.owner

    def __init__(self) -> None:
        super().__init__()
        self.aws = self.cleanup.enter_context(
            aws_bench(self.cleanup.enter_context(pytest.MonkeyPatch.context()))
        )
        self.aws.settings = replace(self.aws.settings, regions=("us-east-1",))
        self.now, self.sleep = self.aws.time.now, self.aws.time.sleep

    def fresh(self) -> AwsMachines:
        self.aws.tripwire.disarm()
        return self.aws.fresh()

    def arm(self, at: int, is_after: bool) -> None:
        self.aws.tripwire.arm(at, is_after)

    def lose(self) -> None:
        machines = self.fresh()
        machines.create(replace(AWS_ORDER, token=ORPHAN))
        machines.create(replace(AWS_ORDER, owner="them", token="them-chat-1"))
        ec2 = self.aws.onlooker()
        tags = [{"Key": key, "Value": value} for key, value in replace(AWS_ORDER, token=LOST).tags.items()]
        foreign = [{"Key": OWNER_TAG, "Value": "them"}]
        for labels in (tags, foreign):
            volume = ec2.create_volume(Size=100, AvailabilityZone="us-east-1b", VolumeType="gp3")["VolumeId"]
            subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
            card = ec2.create_network_interface(SubnetId=subnet)["NetworkInterface"]["NetworkInterfaceId"]
            ec2.create_tags(Resources=[volume, card], Tags=labels)
        self.sleep(3600.0)

    def everything(self) -> list[str]:
        return self._of(self.owner)

    def theirs(self) -> list[str]:
        return self._of("them")

    def _of(self, owner: str) -> list[str]:
        ec2 = self.aws.onlooker()
        found = [
            *((one["VolumeId"], one) for one in ec2.describe_volumes()["Volumes"]),
            *(
                (one["NetworkInterfaceId"], one | {"Tags": one["TagSet"]})
                for one in ec2.describe_network_interfaces()["NetworkInterfaces"]
            ),
            *((one["GroupId"], one) for one in ec2.describe_security_groups()["SecurityGroups"]),
            *((one["KeyName"], one) for one in ec2.describe_key_pairs()["KeyPairs"]),
        ]
        mark = {"Key": OWNER_TAG, "Value": owner}
        parts = [name for name, one in found if mark in one.get("Tags", [])]
        return sorted([*self.aws.world.live(skyserve_owner=owner), *parts])


class Gcp(Ground):
    owner = GCP_OWNER

    def __init__(self) -> None:
        super().__init__()
        self.gcp = self.cleanup.enter_context(controller())
        self.now, self.sleep = self.gcp.world.clock.now, self.gcp.world.advance

    def fresh(self) -> GcpMachines:
        self.gcp.restart()
        return self.gcp.machines

    def arm(self, at: int, is_after: bool) -> None:
        self.gcp.world.crash = at, is_after

    def lose(self) -> None:
        machines = self.fresh()
        machines.create(gcp_order(ORPHAN))
        machines.create(gcp_order("them-chat-1", owner="them"))
        world = self.gcp.world
        world.make_disk("us-east1-b", "lost", {OWNER_TAG: GCP_OWNER, TOKEN_TAG: LOST}, users=[])
        world.make_disk("us-east1-b", "theirs", {OWNER_TAG: "them"}, users=[])
        world.make_address("us-east1", "lost", {OWNER_TAG: GCP_OWNER, TOKEN_TAG: LOST})
        world.advance(3600.0)

    def everything(self) -> list[str]:
        return [name for name in self._all() if "them" not in name and "theirs" not in name]

    def theirs(self) -> list[str]:
        return [name for name in self._all() if "them" in name or "theirs" in name]

    def _all(self) -> list[str]:
        world = self.gcp.world
        shared: list[dict[str, Any]] = [*world.networks.values(), *world.firewalls.values()]
        described = [f"{one['name']} {one.get('description', '')}" for one in shared]
        disks = [name for _, name in world.disks]
        addresses = [name for _, name in world.addresses]
        return sorted([*world.alive(), *disks, *addresses, *described])

    def dies(self, act: Callable[[], object]) -> bool:
        """Here the cloud hears nothing from the process any more, and it nothing from the cloud."""
        try:
            act()
        except TransientError:
            assert self.gcp.world.is_down
        return self.gcp.world.is_down


class Azure(Ground):
    owner = AZURE_OWNER

    def __init__(self) -> None:
        super().__init__()
        self.world = AzureWorld()
        self.server = self.cleanup.enter_context(AzureServer(self.world).running())
        self.now, self.sleep = self.world.clock.now, self.world.pass_time
        self.killer = Killer()

    def fresh(self) -> AzureMachines:
        self.killer = Killer()
        return azure(self.server, self.killer)

    def arm(self, at: int, is_after: bool) -> None:
        self.killer.at, self.killer.is_after = self.killer.seen + 1 + at, is_after

    def lose(self) -> None:
        machines = self.fresh()
        machines.create(azure_order(ORPHAN))
        machines.create(azure_order(LOST))
        machines.create(azure_order("them-chat-1", owner="them"))
        self.world.strip(LOST)
        self.sleep(3600.0)

    def everything(self) -> list[str]:
        return sorted(name for name in self.world.resources if not self._is_theirs(name))

    def theirs(self) -> list[str]:
        return sorted(name for name in self.world.resources if self._is_theirs(name))

    def _is_theirs(self, name: str) -> bool:
        machine = azure_order("them-chat-1", owner="them")
        group = next(key for key in self.world.resources if key.endswith(f"/{machine.token}")).split("/")[4]
        return name.split("/")[4] == group

    def dies(self, act: Callable[[], object]) -> bool:
        died = super().dies(act)
        assert self.world.violations == []
        return died


GROUNDS: dict[str, type[Ground]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


@pytest.fixture(params=GROUNDS)
def kind(request: pytest.FixtureRequest) -> type[Ground]:
    return GROUNDS[request.param]


@pytest.fixture
def ground(kind: type[Ground]) -> Iterator[Ground]:
    made = kind()
    with made.cleanup:
        made.lose()
        yield made


def clean(bench: LeakBench, ground: Ground) -> None:
    """What the tick does and what the sweeps do, until there is nothing left to wait for."""
    bench.end_strays()
    assert bench.settle(ground.sleep).problems == ()
    assert bench.orphans() == []


def test_everything_that_was_lost_is_found_with_what_is_known_of_it(ground: Ground) -> None:
    look = ground.bench().garbage_collector.inspect(ground.fresh().name)
    assert look.unlisted == ()
    assert look.orphans[0].part is Part.INSTANCE
    assert {orphan.part for orphan in look.orphans} == set(Part)
    (orphan,) = look.of(Part.INSTANCE)
    assert orphan.created_at is not None
    assert 0.0 < ground.now() - orphan.created_at <= 2 * 3600.0
    assert all(orphan.region for orphan in look.orphans)
    costs = [orphan.usd_month for orphan in look.of(Part.LEFTOVER)]
    assert any(cost is not None and cost > 0.0 for cost in costs)
    assert {orphan.usd_month for orphan in look.of(Part.SHARED)} == {0.0}


def test_all_of_it_is_removed_and_nothing_of_anybody_else(ground: Ground) -> None:
    theirs = ground.theirs()
    assert theirs
    assert ground.everything()
    clean(ground.bench(), ground)
    assert ground.everything() == []
    assert ground.theirs() == theirs


def test_what_a_replica_that_lives_has_is_left_alone(ground: Ground) -> None:
    before = ground.everything()
    bench = ground.bench()
    bench.tokens, bench.clouds = {ORPHAN, LOST}, {bench.cloud}
    assert bench.orphans() == []
    assert bench.settle(ground.sleep).removed == ()
    assert list(bench.garbage_collector.forget(bench.cloud)) != []
    assert ground.everything() == before


def test_a_launch_after_everything_was_removed_makes_anew_what_it_needs(ground: Ground) -> None:
    bench = ground.bench()
    clean(bench, ground)
    order: MachineOrder = {"aws": AWS_ORDER, "gcp": gcp_order(), "azure": azure_order()}[bench.cloud]
    order = replace(order, token="own-chat-3-0a1b2c3d4e")
    for _ in range(20):
        try:
            machine = bench.machines.create(order)
            break
        except TransientError as error:
            ground.sleep(error.retry_after_s)
    assert not machine.state.is_gone
    assert machine.token == order.token
    assert ground.everything() != []


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_a_controller_that_dies_at_any_call_leaves_the_rest_to_the_next(
    kind: type[Ground], is_after: bool
) -> None:
    deaths = 0
    for at in range(0, MOST_CALLS, CALL_STEP):
        ground = kind()
        with ground.cleanup:
            ground.lose()
            theirs = ground.theirs()
            doomed = ground.bench()
            doomed.end_strays()
            ground.sleep(100.0)
            doomed.tidy()
            ground.sleep(AGAIN_S)
            ground.arm(at, is_after)
            died = ground.dies(doomed.tidy)  # looks, removes what it has seen twice, and what machines share
            clean(ground.bench(), ground)
            assert ground.everything() == []
            assert ground.theirs() == theirs
        if not died:
            break
        deaths += 1
    assert 10 // CALL_STEP <= deaths < MOST_CALLS // CALL_STEP  # and the last round had no call left to hit
