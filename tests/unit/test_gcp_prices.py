"""Prices of parts out of entries of the billing catalog, which are shaped as Google's (checked by its description)."""

from __future__ import annotations

from typing import Any

import pytest

from provisioners.gcp.prices import part_prices
from tests.clouds.gcp.gcp_discovery import Discovery
from tests.clouds.gcp.gcp_ground import sku

HERE = ["us-central1"]
T4 = "Nvidia Tesla T4 GPU attached to Spot Preemptible VMs running in Americas"

UNDERSTOOD = {
    "core": (sku("Spot Preemptible G2 Instance Core running in Americas", HERE, 0.01, "h"), ("core", "g2")),
    "memory": (
        sku("Spot Preemptible A2 Instance Ram running in Americas", HERE, 0.01, "GiBy.h"),
        ("ram", "a2"),
    ),
    "n1": (
        sku("Spot Preemptible N1 Predefined Instance Core running in Americas", HERE, 0.01, "h"),
        ("core", "n1"),
    ),
    "T4": (sku(T4, HERE, 0.01, "h"), ("gpu", "nvidia-tesla-t4")),
    "L4": (
        sku("Nvidia L4 GPU attached to Spot Preemptible VMs running in Iowa", HERE, 0.01, "h"),
        ("gpu", "nvidia-l4"),
    ),
    "A100 of 80 GB": (
        sku("Nvidia Tesla A100 80GB GPU attached to Spot Preemptible VMs running in Iowa", HERE, 0.01, "h"),
        ("gpu", "nvidia-a100-80gb"),
    ),
    "H100": (
        sku("Nvidia H100 80GB GPU attached to Spot Preemptible VMs running in Iowa", HERE, 0.01, "h"),
        ("gpu", "nvidia-h100-80gb"),
    ),
}

NOT_UNDERSTOOD = {
    "on demand": sku("Nvidia Tesla T4 GPU running in Americas", HERE, 0.35, "h", usage="OnDemand"),
    "a price of spot for those on demand": sku(T4, HERE, 0.35, "h", usage="OnDemand"),
    "an unknown unit": sku(T4, HERE, 0.35, "mo"),
    "an unknown accelerator": sku(
        "Nvidia Z9 GPU attached to Spot Preemptible VMs running in Iowa", HERE, 0.1, "h"
    ),
    "custom machines": sku("Spot Preemptible N1 Custom Instance Core running in Americas", HERE, 0.1, "h"),
    "a commitment": sku("Commitment v1: G2 Cpu in Americas for 1 Year", HERE, 0.1, "h", usage="Commit1Yr"),
}


@pytest.mark.parametrize(("entry", "part"), UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
def test_a_part_has_its_price(entry: Any, part: tuple[str, str]) -> None:
    assert part_prices([entry]) == {(part, "us-central1"): 0.01}


@pytest.mark.parametrize("entry", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_what_is_in_doubt_is_left_out(entry: Any) -> None:
    assert part_prices([entry]) == {}


def test_two_prices_for_one_part_are_none() -> None:
    assert part_prices([sku(T4, HERE, 0.11, "h"), sku(T4, [*HERE, "us-east1"], 0.12, "h")]) == {
        (("gpu", "nvidia-tesla-t4"), "us-east1"): 0.12
    }


def test_local_disks_are_priced_by_the_month() -> None:
    entry = sku("SSD backed Local Storage attached to Spot Preemptible VMs", HERE, 0.073, "GiBy.mo")
    assert part_prices([entry]) == {(("ssd", ""), "us-central1"): pytest.approx(0.0001)}


def test_these_entries_are_shaped_as_googles() -> None:
    api = Discovery("cloudbilling.v1")
    entries = [*(entry for entry, _ in UNDERSTOOD.values()), *NOT_UNDERSTOOD.values()]
    answer = {"skus": entries, "nextPageToken": ""}
    assert list(api.problems({"$ref": "ListSkusResponse"}, answer, "$", is_request=False)) == []
