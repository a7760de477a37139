"""What a byte costs that leaves a region, and what it does to the choice of a region."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.forwarding import Forwarding
from lb.core.peers import RegionReport
from lb.core.targets import TargetTable
from policies.model import Zone
from policies.placement.continents import PREFIXES
from policies.routing.base import RequestView
from provisioners.offers.egress import RATES, egress_usd_per_gb
from skyserve_cli.config import Config, egress_rates


def zone(region: str) -> Zone:
    cloud, _, name = region.partition("/")
    return Zone(cloud, name, "a")


@pytest.mark.parametrize(
    ("source", "target", "usd"),
    [
        ("aws/us-east-1", "aws/us-east-1", 0.0),
        ("aws/us-east-1", "aws/eu-central-1", 0.02),
        ("aws/ap-northeast-1", "aws/us-east-1", 0.09),
        ("aws/us-east-1", "gcp/us-central1", 0.09),
        ("gcp/europe-west1", "gcp/europe-west4", 0.02),
        ("gcp/europe-west1", "gcp/us-central1", 0.05),
        ("gcp/us-central1", "ssh/rack", 0.12),
        ("azure/eastus", "azure/westeurope", 0.05),
        ("aws/moon-1", "aws/us-east-1", 0.02),
        ("local/us", "local/eu", 0.0),
        ("ssh/rack", "aws/us-east-1", 0.0),
    ],
)
def test_the_sender_pays_by_its_region_and_by_whether_the_bytes_stay_in_its_cloud(
    source: str, target: str, usd: float
) -> None:
    assert egress_usd_per_gb(zone(source), zone(target)) == usd


@pytest.mark.parametrize(
    ("source", "target", "usd"),
    [
        ("aws/us-east-1", "aws/us-east-1", 0.0),
        ("aws/us-east-1", "aws/us-west-2", 0.01),
        ("aws/ap-northeast-1", "aws/us-east-1", 0.02),
        ("aws/us-east-1", "gcp/us-central1", 0.05),
        ("local/here", "aws/us-east-1", 0.003),
        ("gcp/us-central1", "aws/us-east-1", 0.12),
    ],
)
def test_the_prices_of_an_account_go_before_list_prices(source: str, target: str, usd: float) -> None:
    own = egress_rates(
        Config(
            clouds={
                "aws": {"egress_usd_per_gb": {"near": 0.01, "far": 0.02, "internet": 0.05}},
                "local": {"egress_usd_per_gb": 0.003},
                "gcp": {},
            }  # type: ignore[dict-item]
        )
    )
    assert egress_usd_per_gb(zone(source), zone(target), own) == usd


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"near": 0.01}, "far"),
        ({"near": -1, "far": 0, "internet": 0}, "near"),
        ("free", "egress_usd_per_gb"),
        (True, "egress_usd_per_gb"),
    ],
)
def test_a_price_that_is_none_is_refused_with_its_key(given: object, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Config(clouds={"aws": {"egress_usd_per_gb": given}})  # type: ignore[dict-item]


@pytest.mark.parametrize("cloud", sorted(PREFIXES))
def test_every_continent_of_a_cloud_has_a_price(cloud: str) -> None:
    assert set(PREFIXES[cloud].values()) <= set(RATES[cloud])
    for rates in RATES[cloud].values():
        assert 0.0 < rates.near <= rates.far


def request(number: int, size: int = 1_000_000) -> RequestView:
    return RequestView(str(number), "POST", "/v1/chat/completions", body_bytes=size)


HERE = (Target("here", "http://here"),)


def forwarding(usd_per_second: float | None, targets: tuple[Target, ...] = HERE) -> Forwarding:
    """Of an agent whose replica takes 25 s for the prompt, with a peer that is 0.1 s away and fast."""
    peer = PeerAgent("eu#1", "aws/eu", "https://eu", "eu", egress_usd_per_gb=0.02, ingress_usd_per_gb=0.09)
    regions = Regions("us#1", "aws/us", peers=(peer,), usd_per_second=usd_per_second)
    assert Regions.from_json(regions.to_json()) == regions
    found = Forwarding(TargetTable(Table("s", "1", targets), 0.0), regions, 0.0)
    found.receive_report("eu#1", RegionReport(4, 40, 0, 0.0, 1e-9, 0.0), 0.1, 0.5, 0.0)
    return found


def money_s(of: Forwarding) -> float:
    choice = of.elsewhere(request(0), 0, 10.0, 0.1)
    assert choice is not None
    row = next(row for row in choice.scored if row[0] == "eu#1")
    return float(row[2 + choice.terms.index("money_s")])


def test_without_a_rate_money_does_not_count() -> None:
    assert money_s(forwarding(None)) == 0.0


def test_with_a_rate_the_body_and_a_usual_response_count() -> None:
    one = forwarding(0.0001)
    assert money_s(one) == pytest.approx(1_000_000 * 0.02 / 1e9 / 0.0001)  # 0.2 s
    booking = one.book(request(1), "eu#1", 0.1)
    one.peer_table.release(booking, 0.2)
    one.ended(booking, 2_000_000)
    after = 0.2 + 2_000_000 * 0.09 / 1e9 / 0.0001
    assert money_s(one) == pytest.approx(after)
    failed = one.book(request(2), "eu#1", 0.3)
    one.peer_table.release(failed, 0.4)
    one.ended(failed, 0)
    assert money_s(one) == pytest.approx(after), "what had no response says nothing of its length"


@pytest.mark.parametrize(
    ("usd_per_second", "targets", "region"),
    [
        pytest.param(0.001, HERE, "eu#1", id="cheap"),
        pytest.param(1e-7, HERE, "", id="dear"),
        pytest.param(1e-7, (), "eu#1", id="dear, and nothing here can serve it"),
    ],
)
def test_a_dear_way_is_not_taken(usd_per_second: float, targets: tuple[Target, ...], region: str) -> None:
    choice = forwarding(usd_per_second, targets).elsewhere(request(0), 0, 10.0, 0.1)
    assert choice is not None
    assert choice.region == region
