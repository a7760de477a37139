"""Orders as Compute Engine's instances, without a cloud: names, labels, shapes, images, the request itself."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from google.cloud import compute_v1
from hypothesis import given
from hypothesis import strategies as st

from policies.model import CapacityType, Zone
from provisioners.gcp.network import outer_rules, prefix_of
from provisioners.gcp.translate import (
    CPU_IMAGE,
    GPU_IMAGE,
    decode_label,
    encode_label,
    image_of,
    instance_of,
    labels_of,
    name_of,
    request_id,
    shape_of,
)
from provisioners.port.errors import InvalidRequestError
from provisioners.port.firewall import FirewallAccess
from provisioners.port.vm import MachineOrder

ORDER = MachineOrder(
    token="own1-chat-1-0123456789",
    owner="own1",
    service="Chat",
    replica_id=1,
    rank=0,
    num_nodes=1,
    zone=Zone("gcp", "us-central1", "us-central1-a"),
    instance_type="g2-standard-8",
    capacity_type=CapacityType.SPOT,
    public_key="ssh-ed25519 AAAA controller",
    user_data="#!/bin/sh\ntrue\n",
    accelerator="L4",
    accelerator_count=1,
)


def body_of(order: MachineOrder, *, public: bool = True) -> Any:
    instance = instance_of(
        order, project="p", network="global/networks/n", network_tags=("t",), public=public
    )
    return compute_v1.Instance.to_dict(
        instance, use_integers_for_enums=False, always_print_fields_with_no_presence=False
    )


@pytest.mark.parametrize(
    ("token", "name"), [("own-1", "own-1"), ("0wn-1", "s0wn-1")], ids=["letter first", "digit first"]
)
def test_a_name_begins_with_a_letter(token: str, name: str) -> None:
    assert name_of(token) == name


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=15))
def test_any_value_survives_as_a_label(value: str) -> None:
    label = encode_label(value) if len(value.encode()) * 4 <= 63 else ""
    assert re.fullmatch(r"[a-z0-9_-]{0,63}", label)
    assert decode_label(label) == value or not label


@given(st.text(alphabet="a_A4-", max_size=15))
def test_underscores_are_not_confused_with_escapes(value: str) -> None:
    assert decode_label(encode_label(value)) == value


def test_ordinary_values_are_read_as_they_are() -> None:
    assert [encode_label(value) for value in ("chat", "on_demand", "a-1", "Chat")] == [
        "chat",
        "on_demand",
        "a-1",
        "__43hat",
    ]


def test_a_value_too_long_for_a_label_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="too long"):
        labels_of(replace(ORDER, service="S" * 40))


@pytest.mark.parametrize(
    "label", [("Team", "x"), ("team", "Blue"), ("1team", "x"), ("team", "x" * 64)], ids="=".join
)
def test_a_users_label_that_is_none_is_refused_by_name(label: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=f"label {label[0]}={label[1]}"):
        labels_of(replace(ORDER, labels=dict([label])))


def test_a_users_label_cannot_take_the_place_of_ours() -> None:
    labels = labels_of(replace(ORDER, labels={"skyserve-owner": "thief", "team": "blue"}))
    assert (labels["skyserve-owner"], labels["team"]) == ("own1", "blue")


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "count", "shape"),
    [
        pytest.param("g2-standard-8", "L4", 1, ("g2-standard-8", None, 0), id="built in"),
        pytest.param("n1-standard-8", "T4", 2, ("n1-standard-8", "nvidia-tesla-t4", 2), id="given to n1"),
        pytest.param(
            "n1-standard-8+4xnvidia-tesla-v100",
            None,
            0,
            ("n1-standard-8", "nvidia-tesla-v100", 4),
            id="spelled out",
        ),
        pytest.param("e2-small", None, 0, ("e2-small", None, 0), id="none"),
    ],
)
def test_the_shape_of_a_machine(
    instance_type: str, accelerator: str | None, count: float, shape: tuple[str, str | None, int]
) -> None:
    order = replace(ORDER, instance_type=instance_type, accelerator=accelerator, accelerator_count=count)
    assert shape_of(order) == shape


@pytest.mark.parametrize(
    ("instance_type", "accelerator", "count"),
    [
        pytest.param("e2-small", "T4", 1, id="not on this family"),
        pytest.param("n1-standard-8", "H100", 1, id="not an accelerator of n1"),
        pytest.param("n1-standard-8", "T4", 0.5, id="half of one"),
        pytest.param("n1-standard-8+T4", None, 0, id="spelled wrongly"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(instance_type: str, accelerator: str | None, count: float) -> None:
    with pytest.raises(InvalidRequestError):
        shape_of(
            replace(ORDER, instance_type=instance_type, accelerator=accelerator, accelerator_count=count)
        )


@pytest.mark.parametrize(
    ("image", "instance_type", "path"),
    [
        pytest.param(None, "g2-standard-8", GPU_IMAGE, id="default with accelerators"),
        pytest.param(None, "e2-small", CPU_IMAGE, id="default without"),
        pytest.param(
            "debian-cloud/debian-12",
            "e2-small",
            "projects/debian-cloud/global/images/family/debian-12",
            id="family",
        ),
        pytest.param("mine", "e2-small", "projects/p/global/images/mine", id="our own"),
        pytest.param(
            "https://www.googleapis.com/compute/v1/projects/q/global/images/x",
            "e2-small",
            "projects/q/global/images/x",
            id="URL",
        ),
    ],
)
def test_the_image(image: str | None, instance_type: str, path: str) -> None:
    order = replace(ORDER, image=image, instance_type=instance_type, accelerator=None, accelerator_count=0)
    assert image_of(order, "p") == path


def test_a_spot_machine_is_deleted_by_its_preemption() -> None:
    assert body_of(ORDER)["scheduling"] == {
        "provisioning_model": "SPOT",
        "instance_termination_action": "DELETE",
        "on_host_maintenance": "TERMINATE",
        "automatic_restart": False,
    }


def test_a_machine_on_demand_lives_until_it_is_deleted() -> None:
    order = replace(ORDER, capacity_type=CapacityType.ON_DEMAND, instance_type="e2-small", accelerator=None)
    assert body_of(order)["scheduling"] == {"on_host_maintenance": "MIGRATE", "automatic_restart": False}


def test_the_disk_goes_with_the_machine_and_can_be_attributed() -> None:
    (disk,) = body_of(ORDER)["disks"]
    assert disk["auto_delete"]
    assert disk["initialize_params"]["labels"] == body_of(ORDER)["labels"]


def test_only_our_key_opens_it_and_it_speaks_for_nobody() -> None:
    body = body_of(ORDER)
    metadata = {item["key"]: item["value"] for item in body["metadata"]["items"]}
    assert metadata["ssh-keys"] == "skyserve:ssh-ed25519 AAAA controller"
    assert (metadata["block-project-ssh-keys"], metadata["enable-oslogin"]) == ("TRUE", "FALSE")
    assert "service_accounts" not in body


@pytest.mark.parametrize(
    ("user_data", "key"),
    [("#!/bin/sh\n", "startup-script"), ("#cloud-config\n", "user-data")],
    ids=["script", "cloud-init"],
)
def test_user_data_goes_where_it_is_understood(user_data: str, key: str) -> None:
    items = body_of(replace(ORDER, user_data=user_data))["metadata"]["items"]
    assert {"key": key, "value": user_data} in items


def test_a_private_machine_has_no_public_address() -> None:
    assert "access_configs" not in body_of(ORDER, public=False)["network_interfaces"][0]


@pytest.mark.parametrize(
    "token",
    ["", "Upper", "a_b", "a-", "0" + "a" * 62 + "b"],
    ids=["empty", "case", "underscore", "hyphen", "long"],
)
def test_a_token_that_names_nothing_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequestError):
        body_of(replace(ORDER, token=token))


def test_an_idempotency_key_follows_from_the_order_and_its_failures() -> None:
    keys = [request_id("p", ORDER.zone, ORDER.token, failures) for failures in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


def rules(access: FirewallAccess, *public: int) -> list[compute_v1.Firewall]:
    return outer_rules("own1", "global/networks/n", access, "chat", (8080,), public)


def test_a_rule_without_addresses_names_a_tag_of_no_machine_and_so_admits_none() -> None:
    tags = {tag for rule in rules(FirewallAccess()) for tag in rule.target_tags}
    for rule in rules(FirewallAccess()):
        assert list(rule.source_ranges) == []
        (none,) = rule.source_tags
        assert none not in tags


def test_rules_open_what_was_asked_for_to_who_was_named() -> None:
    access = FirewallAccess(
        frozenset({"10.0.0.9/8"}), {"chat": frozenset({"198.51.100.7/32", "2001:db8::1/128"})}
    )
    ssh, ports, public = rules(access, 443)
    assert [list(rule.source_ranges) for rule in (ssh, ports, public)] == [
        ["10.0.0.0/8"],
        ["10.0.0.0/8", "198.51.100.7/32"],
        ["0.0.0.0/0"],
    ]
    assert [list(rule.allowed[0].ports) for rule in (ssh, ports, public)] == [["22"], ["8080"], ["443"]]
    assert [list(rule.target_tags) for rule in (ssh, ports, public)] == [
        [prefix_of("own1"), ssh.name],
        [ports.name],
        [public.name],
    ]


def test_a_rules_name_does_not_follow_from_its_sources() -> None:
    here, there = (rules(FirewallAccess(frozenset({block}))) for block in ("192.0.2.1/32", "192.0.2.2/32"))
    assert [rule.name for rule in here] == [rule.name for rule in there]


def test_sources_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="CIDR"):
        rules(FirewallAccess(frozenset({"everywhere"})))
