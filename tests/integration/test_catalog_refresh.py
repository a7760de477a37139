"""The price APIs are asked over real sockets, and what they say is taken over or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provisioners.offers.catalog import Listing, Origin, Price, Quality, Shape, load, packaged
from provisioners.offers.catalog.fetch import Sources, fetch_json
from provisioners.offers.catalog.refresh import Refreshed, refresh
from provisioners.offers.catalog.store import save
from provisioners.port.errors import AuthError, InvalidRequestError, ProvisionError, TransientError
from tests.clouds.price_apis import GCP_KEY, PriceWorld, meter, price_world, product, sku

OLD = Origin("a list of last year", 1_700_000_000.0, Quality.EXACT)
NOW = 1_800_000_000.0


@pytest.fixture
def world() -> Iterator[PriceWorld]:
    with price_world() as found:
        yield found


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def sources(world: PriceWorld, naps: list[float], monkeypatch: pytest.MonkeyPatch) -> Sources:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for key, value in {
        "AWS_ENDPOINT_URL": world.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(key, value)
    return Sources(azure_url=world.url, gcp_url=world.url, gcp_api_key=GCP_KEY, sleep=naps.append)


def listing(shape: Shape, region: str, on_demand: float, **spot: float | None) -> Listing:
    zones = {zone.replace("_", "-"): price for zone, price in spot.items()}
    return Listing(
        shape,
        region,
        Price(on_demand, OLD),
        {zone: None if price is None else Price(price, OLD) for zone, price in zones.items()},
    )


def prices(done: Refreshed) -> list[tuple[str, float, dict[str, float | None]]]:
    return [
        (each.region, each.on_demand.usd_hour, {zone: p and p.usd_hour for zone, p in each.spot.items()})
        for each in done.listings
    ]


T4 = Shape("azure", "Standard_NC4as_T4_v3", "T4", 1, 4, 28)
G6 = Shape("aws", "g6.xlarge", "L4", 1, 4, 16)
A2 = Shape("gcp", "a2-highgpu-1g", "A100", 1, 12, 85)


def test_azure_prices_are_those_of_linux_machines_by_the_hour(world: PriceWorld, sources: Sources) -> None:
    name = T4.name
    world.meters = [
        meter(name, "eastus", 0.55),
        meter(name, "eastus", 0.21, spot=True),
        meter(name, "eastus", 0.73, productName="Virtual Machines NCasT4 v3 Series Windows"),
        meter(name, "eastus", 0.9, skuName="NC4as T4 v3 Low Priority"),
        meter(name, "eastus", 3.0, type="Reservation"),
        meter(name, "eastus", 9.0, productName="NCasT4 v3 Dedicated Host"),
        meter(name, "eastus", 9.0, unitOfMeasure="1/Month"),
        meter(name, "westus", 0.60),
        meter("Standard_NC8as_T4_v3", "eastus", 0.11),
    ]
    known = [
        listing(T4, "eastus", 0.526, eastus_1=0.06, eastus_2=None),
        listing(T4, "westus", 0.6, westus=None),
        listing(T4, "uksouth", 0.7, uksouth_1=0.3),
    ]
    done = refresh("azure", known, sources, NOW, accept=True)
    assert prices(done) == [
        ("eastus", 0.55, {"eastus-1": 0.21, "eastus-2": 0.21}),
        ("westus", 0.6, {"westus": None}),
        ("uksouth", 0.7, {"uksouth-1": 0.3}),
    ]
    assert done.taken == 4
    assert done.listings[0].on_demand.origin == Origin("Azure Retail Prices API", NOW, Quality.EXACT)
    assert done.listings[2].on_demand.origin == OLD
    assert len(world.calls) == 4, "eight meters of the type, two on a page"


def test_google_prices_are_put_together_from_parts(world: PriceWorld, sources: Sources) -> None:
    both = ["us-central1", "europe-west4"]
    world.skus = [
        sku("A2 Instance Core running in Americas", 0.03, both),
        sku("A2 Instance Ram running in Americas", 0.004, both, unit="GiBy.h"),
        sku("Nvidia Tesla A100 GPU running in Americas", 3.0, both),
        sku("Spot Preemptible A2 Instance Core running in Americas", 0.01, both, spot=True),
        sku("Spot Preemptible A2 Instance Ram running in Americas", 0.001, both, unit="GiBy.h", spot=True),
        sku(
            "Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas",
            1.0,
            ["us-central1"],
            spot=True,
        ),
        sku("Nvidia Tesla A100 80GB GPU running in Americas", 5.0, both),
        sku(
            "Commitment v1: A2 Instance Core running in Americas for 1 Year",
            0.02,
            both,
            usageType="Commit1Yr",
        ),
        sku("Commitment v1: Nvidia Tesla A100 GPU running in Americas", 0.5, both),
        sku("DWS Defined Duration Nvidia Tesla A100 GPU running in Americas", 0.7, both),
    ]
    known = [
        listing(A2, "us-central1", 3.7, us_central1_a=1.8),
        listing(A2, "europe-west4", 4.0, europe_west4_a=1.5),
    ]
    done = refresh("gcp", known, sources, NOW)
    on_demand, spot = 12 * 0.03 + 85 * 0.004 + 3.0, 12 * 0.01 + 85 * 0.001 + 1.0
    assert prices(done) == [
        ("us-central1", pytest.approx(on_demand), {"us-central1-a": pytest.approx(spot)}),
        ("europe-west4", pytest.approx(on_demand), {"europe-west4-a": 1.5}),
    ]
    assert len(world.calls) == 5


@pytest.mark.parametrize(
    ("wrong", "price"),
    [
        pytest.param(sku("Nvidia Tesla A100 GPU running in Belgium", 3.5, ["europe-west1"]), None, id="two prices for one part"),
        pytest.param(sku("Nvidia L4 GPU running in Belgium", 0.1, ["europe-west1"]), 3.0, id="a part of another machine"),
    ],
)  # fmt: skip
def test_google_parts_that_are_in_doubt_make_no_price(
    world: PriceWorld, sources: Sources, wrong: dict[str, object], price: float | None
) -> None:
    there = ["europe-west1"]
    world.skus = [
        sku("A2 Instance Core running in Belgium", 0.03, there),
        sku("A2 Instance Ram running in Belgium", 0.004, there, unit="GiBy.h"),
        sku("Nvidia Tesla A100 GPU running in Belgium", 2.3, there),
        wrong,
    ]
    (found,) = refresh("gcp", [listing(A2, "europe-west1", 4.0)], sources, NOW).listings
    assert found.on_demand.usd_hour == pytest.approx(4.0 if price is None else price)


def test_a_google_part_at_half_the_price_of_home_is_a_wrong_sku(world: PriceWorld, sources: Sources) -> None:
    world.skus = [
        sku("A2 Instance Core running in x", 0.03, ["us-central1", "asia-east1"]),
        sku("A2 Instance Ram running in x", 0.004, ["us-central1", "asia-east1"], unit="GiBy.h"),
        sku("Nvidia Tesla A100 GPU running in Iowa", 2.93, ["us-central1"]),
        sku("Nvidia Tesla A100 GPU running in Taiwan", 1.40, ["asia-east1"]),
    ]
    done = refresh("gcp", [listing(A2, "asia-east1", 4.7), listing(A2, "us-central1", 3.7)], sources, NOW)
    assert [each.on_demand.origin == OLD for each in done.listings] == [True, False]


@pytest.mark.parametrize("says_zone_ids", [True, False], ids=["with zone ids", "with zone names only"])
def test_aws_prices_come_by_type_and_by_zone_id(
    world: PriceWorld, sources: Sources, says_zone_ids: bool
) -> None:
    world.says_zone_ids = says_zone_ids
    world.open_regions = ["us-east-1"]
    world.products = [
        product("g6.xlarge", "us-east-1", 0.85),
        product("g6.xlarge", "us-east-1", 0.0),
        product("g6.xlarge", "us-east-1", 500.0, unit="Quantity"),
        product("g6.xlarge", "eu-west-1", 0.95),
        product("g5.xlarge", "us-east-1", 1.0),
    ]
    world.spot = {
        ("us-east-1", "us-east-1a", "use1-az4", "g6.xlarge"): [
            ("2026-11-20T10:00:00Z", 0.31),
            ("2026-11-20T09:00:00Z", 0.29),
        ],
        ("us-east-1", "us-east-1b", "use1-az6", "g6.xlarge"): [("2026-11-20T10:00:00Z", 0.4)],
    }
    known = [
        listing(G6, "us-east-1", 0.8, use1_az4=0.3, use1_az6=None, use1_az1=0.33),
        listing(G6, "eu-west-1", 0.9, euw1_az1=0.3),
    ]
    done = refresh("aws", known, sources, NOW)
    assert prices(done) == [
        ("us-east-1", 0.85, {"use1-az4": 0.31, "use1-az6": 0.4, "use1-az1": 0.33}),
        ("eu-west-1", 0.95, {"euw1-az1": 0.3}),
    ]
    asked = [call for call in world.calls if "Spot" in call]
    assert asked == ["DescribeSpotPriceHistory us-east-1"], "a region that is not open is not asked"


def test_google_without_a_key_says_which_to_set(sources: Sources) -> None:
    with pytest.raises(AuthError, match="SKYSERVE_GCP_API_KEY"):
        refresh("gcp", [], replace(sources, gcp_api_key=None), NOW)


def test_a_refused_key_is_not_repeated_and_not_told(world: PriceWorld, sources: Sources) -> None:
    with pytest.raises(AuthError) as refused:
        refresh("gcp", [], replace(sources, gcp_api_key="a-wrong-key"), NOW)
    assert len(world.calls) == 1
    assert "a-wrong-key" not in str(refused.value)


@pytest.mark.parametrize(
    ("trouble", "naps_s"),
    [
        pytest.param([(429, {})], [1.0], id="throttled"),
        pytest.param([(429, {"Retry-After": "7"})], [7.0], id="throttled, with a time"),
        pytest.param([(503, {}), (500, {})], [1.0, 2.0], id="down for a moment"),
        pytest.param([(429, {"Retry-After": "86400"})], [30.0], id="throttled for a day"),
    ],
)
def test_passing_trouble_is_waited_out(
    world: PriceWorld, sources: Sources, naps: list[float], trouble: list[tuple[int, dict[str, str]]], naps_s: list[float]
) -> None:  # fmt: skip
    world.trouble = trouble
    world.meters = [meter(T4.name, "eastus", 0.5)]
    done = refresh("azure", [listing(T4, "eastus", 0.526)], sources, NOW)
    assert (done.taken, naps) == (1, naps_s)


@pytest.mark.parametrize(
    ("trouble", "kind", "calls"),
    [
        pytest.param((500, {}), TransientError, 4, id="down"),
        pytest.param((429, {}), TransientError, 4, id="throttled for good"),
        pytest.param((403, {}), AuthError, 1, id="forbidden"),
        pytest.param((404, {}), InvalidRequestError, 1, id="not there"),
    ],
)
def test_lasting_trouble_is_a_typed_error(
    world: PriceWorld, sources: Sources, trouble: tuple[int, dict[str, str]], kind: type[ProvisionError], calls: int
) -> None:  # fmt: skip
    world.trouble = [trouble] * 9
    with pytest.raises(kind):
        refresh("azure", [listing(T4, "eastus", 0.526)], sources, NOW)
    assert len(world.calls) == calls


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        pytest.param(b"<html>a proxy's page</html>", "not JSON", id="no JSON"),
        pytest.param(b"[]", "no object", id="no object"),
        pytest.param(b"x" * 3000, "more than 2000 bytes", id="too much"),
    ],
)
def test_an_answer_that_is_none(world: PriceWorld, sources: Sources, garbage: bytes, said: str) -> None:
    world.garbage = garbage
    with pytest.raises(TransientError, match=said):
        fetch_json(f"{world.url}/api/retail/prices", "azure", replace(sources, max_bytes=2000))


def test_nobody_there(sources: Sources, naps: list[float]) -> None:
    with pytest.raises(TransientError, match="does not respond"):
        fetch_json("http://127.0.0.1:1/prices", "azure", sources)
    assert naps == [1.0, 2.0, 4.0]


def test_only_http_is_spoken(sources: Sources) -> None:
    with pytest.raises(InvalidRequestError, match="not the address"):
        fetch_json("file:///etc/hostname", "azure", sources)


def test_refreshed_prices_are_kept_and_found_again(
    world: PriceWorld, sources: Sources, tmp_path: Path
) -> None:
    known = [each for each in packaged().of("azure").listings if each.shape.name == T4.name]
    world.meters = [meter(T4.name, "eastus", 0.5), meter(T4.name, "eastus", 0.1, spot=True)]
    path = save(tmp_path, "azure", refresh("azure", known, sources, NOW).listings)
    assert [each.name for each in path.parent.iterdir()] == ["azure.json"]
    loaded = {each.id: each for each in load(tmp_path).listings}
    here = loaded["azure", T4.name, "eastus"]
    assert here.on_demand == Price(0.5, Origin("Azure Retail Prices API", NOW, Quality.EXACT))
    assert {price and price.usd_hour for price in here.spot.values()} == {0.1}
    untouched = {each.id: each for each in packaged().listings}
    assert [key for key in untouched if loaded[key] != untouched[key]] == [here.id]
