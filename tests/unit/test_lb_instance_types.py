"""Machines for load balancers: which types there are, and that none looks as if it cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.model import Role, Zone
from provisioners.offers.lb_instance_types import small_offers, small_types
from provisioners.port.base import Candidate, Requirements
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.config import load_config
from skyserve_cli.controller.reconcile.region_places import insist_on_regions
from skyserve_cli.home import Home
from skyserve_cli.spec.load import load_text

ZONES = [Zone("aws", "us-east-1", "use1-az1"), Zone("aws", "us-east-1", "use1-az2")]


def need(instance_type: str | None) -> Requirements:
    return Requirements((Candidate(cloud="aws", instance_type=instance_type),), role=Role.LOAD_BALANCER)


@pytest.mark.parametrize(
    ("instance_type", "prices", "offered"),
    [
        pytest.param(None, None, [("c6i.large", 0.085)] * 2, id="the usual type"),
        pytest.param("c7g.large", None, [("c7g.large", 0.0725)] * 2, id="one that is known"),
        pytest.param("c9z.large", None, [], id="one without a price"),
        pytest.param("tiny", {"tiny": 0.01}, [("tiny", 0.01)] * 2, id="one of a plug-in"),
        pytest.param(None, {}, [], id="a plug-in without any"),
    ],
)
def test_what_is_offered_has_a_price(
    instance_type: str | None, prices: dict[str, float] | None, offered: list[tuple[str, float]]
) -> None:
    offers = small_offers(need(instance_type), "aws", ZONES, prices)
    assert [(offer.instance_type, offer.price_usd_hour) for offer in offers] == offered


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_every_known_type_has_a_price(cloud: str) -> None:
    for name in small_types(cloud):
        wanted = Requirements((Candidate(cloud=cloud, instance_type=name),), role=Role.LOAD_BALANCER)
        (offer,) = small_offers(wanted, cloud, [Zone(cloud, "here", "here-1")])
        assert 0.01 < offer.price_usd_hour < 0.5


@pytest.mark.parametrize(("instance_type", "is_known"), [("m7i.large", True), ("c9z.large", False)])
def test_a_service_file_with_a_type_without_a_price_is_rejected(
    tmp_path: Path, instance_type: str, is_known: bool
) -> None:
    (tmp_path / "config.yaml").write_text("clouds: {aws: {}}\n")
    home = Home(tmp_path, "sqlite://")
    clouds = Clouds(home, load_config(home.config))
    balancers = f"{{regions: [aws/us-east-1], instance_type: {instance_type}}}"
    text = f"service: {{replicas: 1, load_balancers: {balancers}}}\nresources: {{accelerators: L4}}\nrun: serve\n"
    spec = load_text(text, name="chat").spec
    if is_known:
        insist_on_regions(spec, clouds)
        return
    with pytest.raises(
        CloudNotEnabledError, match=r"the price of c9z\.large on aws is not known; take one of c6i"
    ):
        insist_on_regions(spec, clouds)
