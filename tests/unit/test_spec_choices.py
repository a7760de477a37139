"""From alternatives to candidates, and what an order carries of the alternative that its offer belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from provisioners.assembly import DISK_GB, VmSettings, order_of
from provisioners.port.base import LaunchOrder
from skyserve_cli.controller.content_hash import folder_digest
from skyserve_cli.controller.reconcile import mappers as orders
from skyserve_cli.controller.reconcile.resource_match import candidates_of, copies_of, image_of
from skyserve_cli.spec import spec_from_json, spec_to_json
from skyserve_cli.spec.model import FileMount, ResourceChoice, ServiceSpec

EAST, WEST = Zone("aws", "us-east-1", "use1-az1"), Zone("gcp", "us-west1", "us-west1-a")
L4 = Offer(EAST, "g6.xlarge", "L4", 1.0, CapacityType.SPOT, 0.3)


def an_offer(**changes: object) -> Offer:
    return replace(L4, **changes)  # type: ignore[arg-type]


# --- candidates


@pytest.mark.parametrize(
    ("choice", "places"),
    [
        pytest.param({}, [(None, None)], id="anywhere"),
        pytest.param({"cloud": "aws", "region": "r"}, [("aws", "r")], id="a place"),
        pytest.param({"images": (("*", "docker:x"),)}, [(None, None)], id="a container runs anywhere"),
        pytest.param(
            {"images": (("aws", "a"), ("gcp", "b"))}, [("aws", None), ("gcp", None)], id="images by cloud"
        ),
        pytest.param(
            {"cloud": "aws", "images": (("us-east-1", "a"), ("eu-west-1", "b"))},
            [("aws", "us-east-1"), ("aws", "eu-west-1")],
            id="images by region",
        ),
        pytest.param(
            {"cloud": "gcp", "images": (("aws", "a"), ("gcp", "b"))}, [("gcp", None)], id="of one cloud"
        ),
        pytest.param({"region": "r", "images": (("r", "a"), ("s", "b"))}, [(None, "r")], id="of one region"),
        pytest.param({"cloud": "azure", "images": (("aws", "a"),)}, [], id="no image for this cloud"),
        pytest.param(
            {"images": (("*", "docker:x"), ("eu-west-1", "ami-1"))}, [(None, None)], id="one for all others"
        ),
    ],
)
def test_images_by_place_narrow_the_places(choice: dict[str, object], places: list[object]) -> None:
    made = candidates_of(ResourceChoice(**choice))  # type: ignore[arg-type]
    assert [(one.cloud, one.region) for one in made] == places


@pytest.mark.parametrize(
    ("images", "zone", "image"),
    [
        pytest.param((), EAST, None, id="none"),
        pytest.param((("*", "x"),), EAST, "x", id="for all"),
        pytest.param((("*", "x"), ("aws", "y")), EAST, "y", id="the cloud's goes before that for all"),
        pytest.param((("aws", "y"), ("us-east-1", "z")), EAST, "z", id="the region's before the cloud's"),
        pytest.param((("aws", "y"),), WEST, None, id="of another cloud"),
    ],
)
def test_an_image_is_found_by_place(
    images: tuple[tuple[str, str], ...], zone: Zone, image: str | None
) -> None:
    assert image_of(ResourceChoice(images=images), zone) == image


ON_L4 = {"accelerator": "L4", "accelerator_count": 1.0}


# --- copies


@pytest.mark.parametrize(
    ("mount", "copies"),
    [
        pytest.param(FileMount("/a", ("/x",)), {"/a": "/x"}, id="a path"),
        pytest.param(FileMount("/a", ("s3://b/p",)), {"/a": "s3://b/p"}, id="a bucket"),
        pytest.param(
            FileMount("/a/", ("/x/one", "/y/two")), {"/a/one": "/x/one", "/a/two": "/y/two"}, id="several"
        ),
        pytest.param(FileMount("/a", bucket="b"), {"/a": "s3://b"}, id="a bucket by name"),
        pytest.param(FileMount("/a", store="gcs", bucket="b"), {"/a": "gs://b"}, id="of Google"),
        pytest.param(
            FileMount("/a", ("/x",), store="s3", bucket="b"), {"/a": "/x"}, id="what would fill a bucket"
        ),
    ],
)
def test_mounts_are_copies(mount: FileMount, copies: dict[str, str]) -> None:
    assert copies_of([mount]) == copies


# --- all the way to a machine

SPEC = ServiceSpec(
    "chat",
    "serve",
    file_mounts=(FileMount("/models", ("s3://b/m",)),),
    resources=(
        ResourceChoice(**ON_L4, labels=(("team", "a"),), disk_size_gb=100, images=(("*", "docker:vllm"),)),  # type: ignore[arg-type]
        ResourceChoice(accelerator="A100", accelerator_count=1.0, images=(("aws", "ami-1"),)),
    ),
)


def the_order(offer: Offer, spec: ServiceSpec = SPEC) -> LaunchOrder:
    stored = spec_from_json(spec_to_json(spec))  # as a controller that was restarted has it
    replica = Replica(1, 1, offer, ReplicaState.REQUESTED, 0.0, 0.0)
    return orders.order_of("own", "chat", "abcd", replica, stored, {})


def test_a_machine_gets_what_its_alternative_says() -> None:
    order = the_order(L4)
    assert (order.docker_image, order.machine_image, order.disk_gb) == ("vllm", None, 100)
    assert (order.file_mounts, order.labels) == ({"/models": "s3://b/m"}, {"team": "a"})
    machine = order_of(
        order, 0, bytes(32), VmSettings("ami-of-config", 50, labels={"team": "b", "owner": "me"})
    )
    assert (machine.image, machine.disk_gb) == ("ami-of-config", 100)
    assert machine.labels == {"team": "a", "owner": "me"}
    other = order_of(
        the_order(an_offer(accelerator="A100", choice=1)), 0, bytes(32), VmSettings("ami-of-config", 50)
    )
    assert (other.image, other.disk_gb, other.labels) == ("ami-1", 50, {})
    assert (
        order_of(the_order(an_offer(accelerator="A100", choice=1)), 0, bytes(32), VmSettings()).disk_gb
        == DISK_GB
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"file_mounts": ()}, id="mounts"),
        *(
            pytest.param({"resources": (replace(SPEC.resources[0], **{key: value}), SPEC.resources[1])}, id=key)
            for key, value in {
                "images": (("*", "docker:sglang"),), "disk_size_gb": 101, "labels": (), "cpus": "4+", "memory": "16",
                "instance_type": "g6.xlarge", "max_usd_hour": 1.0,
            }.items()
        ),
    ],
)  # fmt: skip
def test_versions_that_differ_in_it_are_not_the_same_replicas(change: dict[str, object]) -> None:
    assert replace(SPEC, **change).replica_hash() != SPEC.replica_hash()  # type: ignore[arg-type]


def test_a_file_has_a_digest_of_its_bytes_and_its_executable_bit(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("one")
    one = folder_digest(file)
    file.write_text("two")
    two = folder_digest(file)
    file.chmod(0o755)
    assert len({one, two, folder_digest(file), folder_digest(tmp_path), ""}) == 5
    assert folder_digest(tmp_path / "none") == ""
