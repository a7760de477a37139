"""The messages and actions of `serve` when AWS fails it: each failure has one sentence, and the controller the right next step.

One account, one home and one controller for all rows. Most rows need no machine that boots, and trouble us-east-1 alone;
what takes longer comes up in us-east-2 meanwhile, which no row troubles: a quota that is used up closes its region for
five minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.placement.zone_backoff import FIRST_AUTH_BLOCK_S
from provisioners.port.vm import SERVICE_TAG
from tests.clouds.aws.aws_account import Launched
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.schedules import only_long
from tests.clouds.vms import vm_world
from tests.clouds.vms.vm_world import VmWorld
from tests.e2e.conftest import Said, Serve, living_in

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(vm_world.why_not() is not None, reason=str(vm_world.why_not())),
]

EAST, WEST, CALM = "us-east-1", "us-west-2", "us-east-2"
SPOT_QUOTA = "L-3819A6DF"
FOREVER = 1_000_000
NOT_ALLOWED = "You are not authorized to perform this operation."
PATIENCE_S = 240
DISKS_MB = {"setup": 512, "full": 24, "moved": 512}  # of the services whose machines really boot

SERVER = "exec python3 -m http.server --bind 0.0.0.0 $SKYSERVE_REPLICA_PORT"
SERVICE: dict[str, Any] = {
    "service": {
        "readiness_probe": {"path": "/", "initial_delay_seconds": 120},
        "replica_policy": {"min_replicas": 1, "max_replicas": 1},
    },
    "resources": {
        "accelerators": "L4:1",
        "use_spot": True,
        "any_of": [{"infra": f"aws/{EAST}"}, {"infra": f"aws/{WEST}"}],
    },
    "run": SERVER,
}


def only_in(region: str) -> dict[str, Any]:
    return {"infra": f"aws/{region}", "accelerators": "L4:1", "use_spot": True}


STANDS_IN = {
    "min_replicas": 1,
    "max_replicas": 1,
    "spot_placer": "dynamic_fallback",
    "dynamic_ondemand_fallback": True,
}


@dataclass
class Ground:
    """The account, its machines, and the program."""

    serve: Serve
    aws: AwsWorld
    vms: VmWorld
    folder: Path
    named: list[str] = field(default_factory=list)  # services that are up

    def boot(self, launched: Launched) -> None:
        """The machines of other services are only on paper."""
        disk_mb = DISKS_MB.get(launched.tags[SERVICE_TAG])
        if disk_mb is not None:
            self.vms.boot(
                launched.id,
                addresses=[launched.private_ip],
                user_data=launched.user_data,
                gpus=1,
                disk_mb=disk_mb,
            )

    def end(self, instance_id: str) -> None:
        if instance_id in self.vms.vms:
            self.vms.vms[instance_id].kill()

    def file(self, name: str, **changes: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(SERVICE | changes))
        return path

    def up(self, name: str, *flags: str, **changes: Any) -> Said:
        self.named.append(name)
        return self.serve("up", self.file(name, **changes), "-y", "--name", name, *flags)

    def begin(self, name: str, **changes: Any) -> subprocess.Popen[str]:
        """`serve up` at work, to be read to its end."""
        command = [*self.serve.command, "up", str(self.file(name, **changes)), "-y", "--name", name]
        return subprocess.Popen(
            command,
            env=self.serve.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def replicas(self, name: str) -> list[dict[str, Any]]:
        """By id, ended ones included."""
        found: list[dict[str, Any]] = self.serve.view(name, "--all")["replicas"]
        return sorted(found, key=lambda replica: replica["id"])

    def launched(self, name: str) -> list[dict[str, Any]]:
        return [replica for replica in self.replicas(name) if replica["instance_id"] is not None]

    def down(self, *names: str) -> None:
        self.serve.ok("down", *names, "-y", "--purge")
        assert [self.aws.live(skyserve_service=name) for name in names] == [[] for _ in names]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("aws-failures")
    with ExitStack() as stack:
        vms = stack.enter_context(VmWorld("172.31.0.0/16"))
        aws = AwsWorld(time.time, regions=(EAST, WEST, CALM))
        stack.enter_context(aws.running())
        program = living_in(folder)
        serve = next(program)
        made = Ground(serve, aws, vms, folder)
        aws.boot_s, aws.on_launch, aws.on_gone = 0.3, made.boot, made.end
        serve.environment |= aws.environment
        serve.configure(
            clouds={"aws": {"poll_seconds": 0.5, "use_private_ip": True, "regions": [EAST, WEST, CALM]}}
        )
        serve.ok("controller", "start")
        yield made
        aws.calm()
        next(program, None)
        assert [name for name, vm in vms.vms.items() if vm.is_running] == []
        assert aws.live() == []
        assert aws.errors == []


@pytest.fixture(scope="module")
def slow(ground: Ground) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """What takes as long as machines take to boot three times, started before anything else."""
    place = {"resources": only_in(CALM)}
    (ground.folder / "weights").mkdir()
    (ground.folder / "weights" / "model.bin").write_bytes(os.urandom(40 << 20))
    begun = {
        "setup": ground.begin(
            "setup", setup="echo collecting; sleep 2; echo no wheel for this platform >&2; exit 3", **place
        ),
        "full": ground.begin("full", workdir=str(ground.folder / "weights"), **place),
        "moved": ground.begin("moved", **place),
    }
    yield begun
    for process in begun.values():
        process.kill()
        process.communicate()


@pytest.fixture
def world(ground: Ground, slow: dict[str, subprocess.Popen[str]]) -> Iterator[Ground]:
    """Without trouble, and afterwards without trouble and services again."""
    yield ground
    ground.aws.calm()
    if ground.named:
        ground.down(*ground.named)
        ground.named.clear()


@dataclass(frozen=True)
class Row:
    """`sentence` is a regular expression, `reason` the end of the replica that met the failure."""

    reason: str
    sentence: str
    trouble: Callable[[AwsWorld], None]
    next_step: Callable[[Ground, str], None]
    changes: dict[str, Any] = field(default_factory=dict)


def no_room_once(aws: AwsWorld) -> None:
    aws.fail("RunInstances", "InsufficientInstanceCapacity", region=EAST)


def no_room_in_the_east(aws: AwsWorld) -> None:
    aws.fail("RunInstances", "InsufficientInstanceCapacity", times=FOREVER, region=EAST)


def no_spot_at_all(aws: AwsWorld) -> None:
    no_quota_for_spot(aws)
    aws.quota_vcpus[WEST, SPOT_QUOTA] = 0


def no_quota_for_spot(aws: AwsWorld) -> None:
    aws.quota_vcpus[EAST, SPOT_QUOTA] = 0


def next_is_another_zone(ground: Ground, name: str) -> None:
    first, second = ground.replicas(name)
    assert (first["region"], second["region"]) == (EAST, EAST)
    assert first["zone"] != second["zone"]


def next_is_another_region(ground: Ground, name: str) -> None:
    *failed, last = ground.replicas(name)
    assert {one["region"] for one in failed} == {EAST}
    zones = [(one["zone"], one["instance_type"]) for one in failed]
    assert len(zones) == len(set(zones))
    assert last["region"] == WEST


def next_is_another_region_at_once(ground: Ground, name: str) -> None:
    assert [one["region"] for one in ground.replicas(name)] == [EAST, WEST]


def next_is_on_demand(ground: Ground, name: str) -> None:
    assert [one["capacity_type"] for one in ground.launched(name)] == ["on_demand"]


ROWS = {
    "a zone without room: another zone": Row(
        "CAPACITY",
        r"spot \S+ in aws/us-east-1/use1-az\d: there is no capacity for it now; another zone is next "
        r"\(InsufficientInstanceCapacity",
        no_room_once,
        next_is_another_zone,
    ),
    "a region without room: another region": Row(
        "CAPACITY",
        r"there is no capacity for it now",
        no_room_in_the_east,
        next_is_another_region,
    ),
    "a quota: its name, and another region": Row(
        "QUOTA",
        r"quota All G and VT Spot Instance Requests \(L-3819A6DF\) of us-east-1: the account's spot quota is used up",
        no_quota_for_spot,
        next_is_another_region_at_once,
    ),
    "the spot quota of all regions: on demand": Row(
        "QUOTA",
        r"quota All G and VT Spot Instance Requests \(L-3819A6DF\) of us-(east-1|west-2)",
        no_spot_at_all,
        next_is_on_demand,
        {"service": {**SERVICE["service"], "replica_policy": STANDS_IN}},
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_another_place_has_it(world: Ground, row: Row) -> None:
    name = f"row-{list(ROWS.values()).index(row)}"
    row.trouble(world.aws)
    world.up(name, "--no-wait", **row.changes)
    world.serve.eventually(lambda: world.launched(name))

    first = next(one for one in world.replicas(name) if one["end_reason"] is not None)
    assert first["end_reason"] == row.reason
    assert re.search(row.sentence, first["message"])
    row.next_step(world, name)
    assert re.search(row.sentence, " ".join(world.serve.ok("status", name).out.split()))


def test_a_permission_is_named_and_the_cloud_left_alone_until_it_is_there(world: Ground) -> None:
    world.aws.fail("RunInstances", "UnauthorizedOperation", times=FOREVER, region=EAST, message=NOT_ALLOWED)
    said = world.up("denied", "--timeout", "8", resources=only_in(EAST))
    sentence = "aws ec2:RunInstances in us-east-1: not allowed; add it to the policy of this user or role"
    assert sentence in said.err
    failure = world.serve.view("denied")["last_failure"]
    assert (failure["reason"], failure["message"][: len(sentence)]) == ("AUTH", sentence)
    (found,) = world.serve("check", "-o", "json").json()
    assert (found["usable"], "ec2:RunInstances" in found["why"]) == (False, True)
    world.aws.calm()
    world.serve.eventually(lambda: world.launched("denied"))
    asked = world.replicas("denied")
    waits_s = [later["created_at"] - earlier["ended_at"] for earlier, later in pairwise(asked)]
    assert min(waits_s) >= FIRST_AUTH_BLOCK_S


@only_long  # test_aws_refusals has the same against one process
def test_credentials_that_expire_are_told_of_and_nothing_is_lost(world: Ground) -> None:
    world.up("expires", "--no-wait", resources=only_in(EAST))
    world.serve.eventually(lambda: world.launched("expires"))
    world.aws.fail("*", "ExpiredToken", times=FOREVER, region=EAST)
    sentence = r"aws/us-east-1 cannot be listed: aws ec2:DescribeInstances in us-east-1: the credentials are not accepted; renew"
    world.serve.eventually(lambda: re.search(sentence, world.serve.view("expires")["notes"]))
    assert re.search(sentence, " ".join(world.serve.ok("status", "expires").out.split()))
    said = world.up("expired", "--timeout", "8", resources=only_in(EAST))
    assert "the credentials are not accepted; renew them (`aws sso login`, `aws configure`)" in said.err
    world.aws.calm()
    world.serve.eventually(lambda: "cannot be listed" not in world.serve.view("expires")["notes"])
    assert len(world.replicas("expires")) == 1


def test_a_wrong_image_fails_the_version_at_once(world: Ground) -> None:
    world.aws.fail("RunInstances", "InvalidAMIID.NotFound", times=FOREVER, region=EAST)
    before = len(world.aws.asked("RunInstances"))
    said = world.up("image", resources=only_in(EAST))
    assert said.code == 1
    assert "service image failed: replica 1 in aws/us-east-1/" in said.err
    assert "ended: REFUSED, spot" in said.err
    assert "(InvalidAMIID.NotFound" in said.err
    view = world.serve.view("image", "--all")
    assert (view["status"], view["failed_versions"]) == ("FAILED", [1])
    assert [one["end_reason"] for one in view["replicas"]] == ["REFUSED"]
    asked = [one for one in world.aws.asked("RunInstances")[before:] if one.region == EAST]
    assert len(asked) == 2  # once more after looking for the image again, and never again


def test_a_failing_setup_leaves_its_last_lines(
    ground: Ground, slow: dict[str, subprocess.Popen[str]]
) -> None:
    _, told = slow["setup"].communicate(timeout=PATIENCE_S)
    assert slow["setup"].returncode == 1, told
    assert told.count("replica 1  waiting for ssh (1/") == 1, told
    for replica in (1, 2, 3):  # on a busy machine a setup may be over before it is seen to run
        assert told.count(f"replica {replica}  running setup") <= 1, told
    sentence = "`setup` failed with exit code 3: no wheel for this platform"
    assert told.count(f"setup failed -> TERMINATING: {sentence}") == 3
    assert "  | collecting\n  | no wheel for this platform\n" in told
    replicas = ground.replicas("setup")
    assert [(one["end_reason"], one["message"]) for one in replicas] == [("SETUP_FAILED", sentence)] * 3
    assert f"service setup failed: replica 3 in aws/{CALM}/{replicas[-1]['zone']} ended: SETUP_FAILED" in told
    assert f"whole log: serve logs setup 3 (its end is kept in {replicas[-1]['kept_log']})" in told
    assert sentence in " ".join(ground.serve.ok("status", "setup").out.split())
    assert ground.aws.live(skyserve_service="setup") == []
    logged = ground.serve.ok("logs", "setup", "1").out
    assert logged == "collecting\nno wheel for this platform\n"
    ground.down("setup")


def test_a_full_disk_is_named(ground: Ground, slow: dict[str, subprocess.Popen[str]]) -> None:
    _, told = slow["full"].communicate(timeout=PATIENCE_S)
    assert slow["full"].returncode == 1, told
    sentence = r"step 'workdir' failed: i-[0-9a-f]+: the disk is full \(overlay on /, 0.0\d+ GB\)"
    replicas = ground.replicas("full")
    assert [one["end_reason"] for one in replicas] == ["SETUP_FAILED"] * 3
    assert all(re.fullmatch(sentence, one["message"]) for one in replicas), replicas
    assert len(re.findall(f"setup failed -> TERMINATING: {sentence}", told)) == 3
    assert re.search(r"replica \d  copying the work directory \S+weights \(\d/\d\)", told)
    assert ground.aws.live(skyserve_service="full") == []
    ground.down("full")


def test_a_machine_with_another_host_key_is_replaced(
    ground: Ground, slow: dict[str, subprocess.Popen[str]]
) -> None:
    slow["moved"].communicate(timeout=PATIENCE_S)
    assert slow["moved"].returncode == 0
    (first,) = ground.launched("moved")
    vm = ground.vms.vms[first["instance_id"]]
    vm.run(
        "rm /etc/ssh/ssh_host_ed25519_key*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key;"
        "pkill -x sshd; true"
    )
    ground.serve.eventually(
        lambda: ground.launched("moved")[-1]["state"] == "READY" and len(ground.launched("moved")) == 2
    )
    ended = ground.replicas("moved")[0]
    assert ended["end_reason"] == "PREEMPTED"
    assert re.search(
        r"shows another host key than the one we know .*: nothing was sent to it", ended["message"]
    )
    assert ground.aws.live(skyserve_service="moved") == [ground.launched("moved")[-1]["instance_id"]]
    ground.down("moved")
