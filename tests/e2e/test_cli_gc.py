"""`serve gc` on AWS: the official SDK against a strict EC2 on loopback, in which things were lost."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import boto3
import pytest
import yaml

from provisioners.aws.machines import AwsMachines, AwsSettings
from tests.clouds.aws.aws_bench import ORDER
from tests.clouds.aws.aws_world import AwsWorld
from tests.clouds.schedules import only_long
from tests.e2e.conftest import Serve

pytestmark = pytest.mark.long

REGIONS = ("us-east-1", "us-west-2")
PARTS = ["instance", "volume", "key-pair", "security-group"]


@dataclass
class Account:
    """The resources, and the means to lose something."""

    world: AwsWorld
    owner: str
    session: boto3.Session

    def lose_instance(self, owner: str | None = None) -> str:
        """A machine that no row knows."""
        machines = AwsMachines(AwsSettings(regions=REGIONS), session=self.session)
        owner = owner or self.owner
        return machines.create(replace(ORDER, owner=owner, token=f"{owner}-chat-7-0a1b2c3d4e")).id

    def lose_volume(self, owner: str | None = None) -> str:
        """A disk whose machine is long gone."""
        ec2: Any = self.session.client("ec2", region_name="us-east-1", endpoint_url=self.world.url)
        volume: str = ec2.create_volume(Size=100, AvailabilityZone="us-east-1b", VolumeType="gp3")["VolumeId"]
        tags = replace(ORDER, owner=owner or self.owner, token=f"{owner}-chat-6-0a1b2c3d4e").tags
        ec2.create_tags(
            Resources=[volume], Tags=[{"Key": key, "Value": value} for key, value in tags.items()]
        )
        self.world.backdate_volume("us-east-1", volume, 86_400.0)
        return volume


@pytest.fixture
def account(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """A home that knows its owner, and an account in which someone else has a machine and a disk, too."""
    with AwsWorld(time.time).running() as world:
        serve.environment |= world.environment
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        serve.configure(
            clouds={"aws": {"poll_seconds": 0.5, "regions": list(REGIONS), "sources": ["203.0.113.7/32"]}}
        )
        assert serve.ok("gc", "-o", "json").json()["found"] == []  # and from now on there is an owner
        with closing(sqlite3.connect(serve.home / "state.db")) as database:
            ((owner,),) = database.execute("SELECT owner FROM identity")
        made = Account(world, owner, boto3.Session(region_name="us-east-1"))
        theirs = {made.lose_instance("them"), made.lose_volume("them")}
        yield made
        assert theirs <= {*world.live(), *world.belongings("us-east-1")}
        assert world.errors == []


def test_everything_that_was_lost_is_shown_and_after_a_yes_removed(serve: Serve, account: Account) -> None:
    """Without a controller."""
    volume, instance = account.lose_volume(), account.lose_instance()
    found = serve.ok("gc", "--dry-run", "-o", "json").json()["found"]
    by_kind = {one["kind"]: one for one in found if one["id"] in (instance, volume)}
    assert [one["kind"] for one in found] == [*PARTS[:2], *PARTS[2:]]
    assert {one["region"] for one in found} == {"us-east-1"}
    assert by_kind["volume"]["usd_month"] == pytest.approx(8.0)
    assert by_kind["instance"]["usd_month"] > 100.0  # a GPU

    asked = serve("gc")
    assert (asked.code, volume in asked.out) == (2, True)
    assert "cannot ask for confirmation" in asked.err
    assert instance in account.world.live()

    done = serve.ok("gc", "-y")
    assert [line.split()[1] for line in done.err.splitlines() if line.startswith("removed")] == PARTS
    assert account.world.live(skyserve_owner=account.owner) == []
    assert volume not in account.world.belongings("us-east-1")
    assert serve.ok("gc").err.strip() == "nothing is left over"
    told = [(one["kind"], one["message"]) for one in _events(serve)]
    assert ("Removed", f"volume {volume} in aws/us-east-1, which belonged to nothing") in told


def test_a_region_that_cannot_be_listed_is_named_and_the_others_are_cleaned(
    serve: Serve, account: Account
) -> None:
    volume = account.lose_volume()
    account.world.fail("DescribeVolumes", "UnauthorizedOperation", times=99, region="us-west-2")
    said = serve("gc", "-y")
    assert said.code == 1
    assert "aws/us-west-2 cannot be listed" in said.err
    assert "ec2:DescribeVolumes" in said.err
    assert volume not in account.world.belongings("us-east-1")


@only_long  # the janitor is the same without a controller
def test_the_controller_does_it_where_one_runs_and_what_cannot_be_removed_is_told(
    serve: Serve, account: Account
) -> None:
    serve.ok("controller", "start")
    instance = account.lose_instance()
    serve.eventually(lambda: instance not in account.world.live())  # the tick ends orphans by itself
    volume = account.lose_volume()
    account.world.denied = {"DeleteVolume"}
    refused = serve("gc", "-y", "-o", "json")
    assert refused.code == 1
    (failed,) = refused.json()["failed"]
    assert (failed["id"], "ec2:DeleteVolume" in failed["why"]) == (volume, True)
    # the rest may be gone already: the controller sweeps as well
    assert {one["kind"] for one in refused.json()["removed"]} <= {"key-pair", "security-group"}
    account.world.denied = set()
    assert [one["id"] for one in serve.ok("gc", "-y", "-o", "json").json()["removed"]] == [volume]
    assert serve.ok("gc").err.strip() == "nothing is left over"


def test_a_cloud_that_is_not_enabled_is_refused(serve: Serve, account: Account) -> None:
    said = serve("gc", "--cloud", "gcp")
    assert (said.code, "no cloud gcp is enabled here" in said.err) == (2, True)
    assert serve.ok("gc", "--cloud", "aws").err.strip() == "nothing is left over"


def test_what_other_homes_have_is_shown_and_only_that_of_a_named_home_is_removed(
    serve: Serve, account: Account
) -> None:
    """Without their keys or database, by the tag alone."""
    own, lost = account.lose_instance(), {account.lose_instance("lost"), account.lose_volume("lost")}
    found = serve.ok("gc", "--any-owner", "--dry-run", "-o", "json").json()["found"]
    assert {one["owner"] for one in found} == {"them", "lost"}
    assert lost <= {one["id"] for one in found}
    assert own not in {one["id"] for one in found}
    shown = serve.ok("gc", "--any-owner", "--dry-run")
    assert "home lost, services chat" in shown.err

    refused = serve("gc", "--any-owner", "-y")
    assert (refused.code, "needs --owner ID" in refused.err) == (2, True)
    assert serve("gc", "--owner", "lost").code == 2
    assert serve("gc", "--any-owner").code == 2  # no terminal
    assert lost <= {*account.world.live(), *account.world.belongings("us-east-1")}

    removed = serve.ok("gc", "--any-owner", "--owner", "lost", "-y", "-o", "json").json()["removed"]
    assert lost <= {one["id"] for one in removed}
    assert {one["owner"] for one in removed} == {"lost"}
    assert account.world.live(skyserve_owner="lost") == []
    assert own in account.world.live()
    assert serve.ok("gc", "--any-owner", "--owner", "lost").err.strip() == "other homes have nothing here"


def test_a_region_whose_homes_cannot_be_listed_is_named(serve: Serve, account: Account) -> None:
    account.world.fail("DescribeVolumes", "UnauthorizedOperation", times=99, region="us-west-2")
    said = serve("gc", "--any-owner", "--dry-run", "-o", "json")
    assert said.code == 1
    assert {one["region"] for one in said.json()["unlisted"]} == {"us-west-2"}
    assert {one["owner"] for one in said.json()["found"]} == {"them"}


def _events(serve: Serve) -> list[dict[str, Any]]:
    serve.ok("controller", "start")
    lines = serve.ok("events", "-o", "json").out.splitlines()
    return [yaml.safe_load(line) for line in lines]
