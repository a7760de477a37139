"""Candidates x catalog -> offers, and why there are none."""

from __future__ import annotations

import pytest

from policies.goals import AcceleratorQps
from policies.model import CapacityType, Offer, Zone
from provisioners.assembly import cheapest_trials
from provisioners.offers.catalog import Catalog, Listing, Origin, Price, Quality, Shape, packaged
from provisioners.offers.explain_no_offer import explain_no_offer
from provisioners.offers.matching import ANY_ACCOUNT, Account, offers_of
from provisioners.port.base import Candidate, Requirements

ORIGIN = Origin("a list", 0.0, Quality.EXACT)


def _listing(shape: Shape, region: str, on_demand: float, **spot: float | None) -> Listing:
    zones = {
        zone.replace("_", "-"): None if price is None else Price(price, ORIGIN)
        for zone, price in spot.items()
    }
    return Listing(shape, region, Price(on_demand, ORIGIN), zones)


def _n1(count: int, vcpus: int, price: float) -> Listing:
    shape = Shape("gcp", f"n1-standard-{vcpus}+{count}xnvidia-tesla-t4", "T4", count, vcpus, vcpus * 3.75)
    return _listing(shape, "us-central1", price, us_central1_a=price / 3)


CATALOG = Catalog(
    (
        _listing(Shape("aws", "g6.xlarge", "L4", 1, 4, 16), "us-east-1", 0.8, use1_az1=0.3, use1_az2=None),
        _listing(Shape("aws", "g6.xlarge", "L4", 1, 4, 16), "eu-west-1", 0.9, euw1_az1=0.25),
        _listing(Shape("aws", "g6.4xlarge", "L4", 1, 16, 64), "us-east-1", 1.3, use1_az1=0.5, use1_az2=0.5),
        _listing(Shape("aws", "g6.12xlarge", "L4", 4, 48, 192), "us-east-1", 4.6, use1_az1=2.0),
        _listing(Shape("aws", "g5.48xlarge", "A10G", 8, 192, 768), "us-east-1", 16.3, use1_az1=6.0),
        _listing(Shape("aws", "m5.large", None, 0, 2, 8), "us-east-1", 0.096, use1_az1=None),
        _listing(Shape("aws", "m5.xlarge", None, 0, 4, 16), "us-east-1", 0.192, use1_az1=None),
        _listing(
            Shape("azure", "Standard_NC4as_T4_v3", "T4", 1, 4, 28),
            "eastus",
            0.53,
            **{"eastus_1": 0.2, "eastus_2": 0.2},
        ),
        _listing(Shape("azure", "Standard_NV6ads_A10_v5", "A10", 0.167, 6, 55), "westus", 0.45, westus=None),
        _listing(
            Shape("gcp", "a2-highgpu-1g", "A100", 1, 12, 85),
            "us-central1",
            3.6,
            us_central1_a=1.8,
            us_central1_b=1.8,
        ),
        _n1(1, 4, 0.54),
        _n1(1, 8, 0.73),
        _n1(2, 16, 1.46),
    )
)


def _offers(*candidates: Candidate, account: Account = ANY_ACCOUNT, **need: object) -> list[Offer]:
    return offers_of(Requirements(candidates, **need), CATALOG, account)  # type: ignore[arg-type]


def _told(offers: list[Offer]) -> list[tuple[str, str, float]]:
    return [(offer.zone.name, offer.instance_type, offer.price_usd_hour) for offer in offers]


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        pytest.param(
            Candidate(accelerator="L4", use_spot=True),
            [("euw1-az1", "g6.xlarge", 0.25), ("use1-az1", "g6.xlarge", 0.3), ("use1-az2", "g6.4xlarge", 0.5)],
            id="the cheapest size of each zone, cheapest first",
        ),
        pytest.param(
            Candidate(accelerator="nvidia-l4"),
            [("use1-az1", "g6.xlarge", 0.8), ("use1-az2", "g6.xlarge", 0.8), ("euw1-az1", "g6.xlarge", 0.9)],
            id="on demand, by any name of the accelerator",
        ),
        pytest.param(
            Candidate(accelerator="L4", accelerator_count=4), [("use1-az1", "g6.12xlarge", 4.6)], id="four in one machine"
        ),
        pytest.param(Candidate(accelerator="A10G"), [], id="one is not eight"),
        pytest.param(Candidate(accelerator="L4", accelerator_count=2), [], id="two are not four"),
        pytest.param(
            Candidate(accelerator="A10", accelerator_count=0.17), [("westus", "Standard_NV6ads_A10_v5", 0.45)], id="a sixth of one"
        ),
        pytest.param(
            Candidate(accelerator="L4", region="us-east-1", memory="64+"),
            [("use1-az1", "g6.4xlarge", 1.3), ("use1-az2", "g6.4xlarge", 1.3)],
            id="at least so much memory",
        ),
        pytest.param(
            Candidate(accelerator="L4", cpus="16", region="*", zone="use1-az2"), [("use1-az2", "g6.4xlarge", 1.3)], id="exactly so many CPUs, in a zone"
        ),
        pytest.param(Candidate(accelerator="L4", memory="100x"), [], id="so much memory per CPU"),
        pytest.param(
            Candidate(accelerator="T4", memory="5x"),
            [("eastus-1", "Standard_NC4as_T4_v3", 0.53), ("eastus-2", "Standard_NC4as_T4_v3", 0.53)],
            id="memory per CPU",
        ),
        pytest.param(Candidate(), [("use1-az1", "m5.large", 0.096)], id="nothing asked: no accelerator"),
        pytest.param(Candidate(cpus="4+", memory="16+"), [("use1-az1", "m5.xlarge", 0.192)], id="a machine by its size"),
        pytest.param(
            Candidate(cloud="azure", region="eastus", zone="1", accelerator="T4"),
            [("eastus-1", "Standard_NC4as_T4_v3", 0.53)],
            id="Azure's own word for a zone",
        ),
        pytest.param(
            Candidate(cloud="azure", zone="eastus-2", accelerator="T4"), [("eastus-2", "Standard_NC4as_T4_v3", 0.53)], id="our word for it"
        ),
        pytest.param(
            Candidate(instance_type="G6.4XLARGE", zone="use1-az1"), [("use1-az1", "g6.4xlarge", 1.3)], id="by type, accelerator and all"
        ),
        pytest.param(
            Candidate(instance_type="n1-standard-4", accelerator="T4"),
            [("us-central1-a", "n1-standard-4+1xnvidia-tesla-t4", 0.54)],
            id="by machine type, with what is attached",
        ),
        pytest.param(
            Candidate(accelerator="L4", max_hourly_cost=0.85),
            [("use1-az1", "g6.xlarge", 0.8), ("use1-az2", "g6.xlarge", 0.8)],
            id="not above the limit",
        ),
    ],
)  # fmt: skip
def test_what_fits_a_candidate(candidate: Candidate, told: list[tuple[str, str, float]]) -> None:
    assert _told(_offers(candidate)) == told
    assert (explain_no_offer(candidate, CATALOG) is None) == bool(told)


def test_an_offer_says_what_it_is() -> None:
    offer = _offers(Candidate(accelerator="l4", accelerator_count=4, use_spot=True), num_nodes=2)[0]
    assert offer == Offer(
        zone=Zone("aws", "us-east-1", "use1-az1"),
        instance_type="g6.12xlarge",
        accelerator="L4",
        accelerator_count=4,
        capacity_type=CapacityType.SPOT,
        price_usd_hour=4.0,
        on_demand_usd_hour=9.2,
    )


def test_any_of_is_by_price_and_ordered_by_preference() -> None:
    dear, cheap = (
        Candidate(accelerator="A100", zone="us-central1-a"),
        Candidate(accelerator="T4", cloud="gcp"),
    )
    assert [offer.accelerator for offer in _offers(dear, cheap)] == ["T4", "A100"]
    assert [offer.accelerator for offer in _offers(dear, cheap, ordered=True)] == ["A100", "T4"]


def test_an_offer_of_two_candidates_is_one_offer() -> None:
    offers = _offers(Candidate(accelerator="A100"), Candidate(accelerator="A100", cloud="gcp"), ordered=True)
    assert [offer.zone.name for offer in offers] == ["us-central1-a", "us-central1-b"]


@pytest.mark.parametrize(
    ("qps", "first"),
    [
        pytest.param({}, "T4", id="by price"),
        pytest.param({"A100": 10.0, "T4": 1.0}, "A100", id="ten times the work for seven times the price"),
        pytest.param({"A100": 5.0, "T4": 1.0}, "T4", id="five times the work is too little for it"),
    ],
)
def test_accelerators_are_weighed_by_their_work(qps: dict[str, float], first: str) -> None:
    work = tuple(AcceleratorQps(name, None, rate) for name, rate in qps.items())
    need = Requirements((Candidate(accelerator="A100"), Candidate(accelerator="T4", cloud="gcp")), work=work)
    assert offers_of(need, CATALOG)[0].accelerator == first


def test_live_prices_go_before_the_catalogs() -> None:
    live = {("g6.xlarge", "use1-az2"): 0.1, ("g6.4xlarge", "use1-az1"): 0.2}
    account = Account(spot_price=lambda name, zone: live.get((name, zone.name)))
    offers = _offers(Candidate(accelerator="L4", use_spot=True), account=account)
    assert _told(offers) == [
        ("use1-az2", "g6.xlarge", 0.1),
        ("use1-az1", "g6.4xlarge", 0.2),
        ("euw1-az1", "g6.xlarge", 0.25),
    ]


def test_the_limit_is_held_against_live_prices() -> None:
    account = Account(spot_price=lambda name, zone: 0.7)
    candidate = Candidate(accelerator="L4", use_spot=True, max_hourly_cost=0.6)
    assert _offers(candidate, account=account) == []
    assert str(explain_no_offer(candidate, CATALOG, account)) == (
        "L4:1 costs 0.7 USD per hour or more (g6.xlarge in aws/euw1-az1); max_hourly_cost is 0.6"
    )


def test_what_the_account_cannot_have_is_not_offered() -> None:
    account = Account(
        reason=lambda shape, zone, market: (
            "closed" if (shape.name, zone.name) == ("g6.xlarge", "use1-az1") else ""
        )
    )
    offers = _offers(Candidate(accelerator="L4", zone="use1-az1"), account=account)
    assert _told(offers) == [("use1-az1", "g6.4xlarge", 1.3)]


@pytest.mark.parametrize(
    ("use_spot", "told"),
    [
        pytest.param(True, [("us-central1-a", "a3-highgpu-1g", 3.35)], id="as spot"),
        pytest.param(False, [], id="never on demand, though its price is known"),
    ],
)
def test_what_is_sold_by_reservation_is_offered_as_spot_alone(
    use_spot: bool, told: list[tuple[str, str, float]]
) -> None:
    shape = Shape("gcp", "a3-highgpu-1g", "H100", 1, 26, 234, no_on_demand=True)
    catalog = Catalog((_listing(shape, "us-central1", 10.98, us_central1_a=3.35),))
    candidate = Candidate(accelerator="H100", use_spot=use_spot)
    assert _told(offers_of(Requirements((candidate,)), catalog)) == told
    trials = [trial.capacity_type for trial in cheapest_trials(catalog.rows)]
    assert trials == [CapacityType.SPOT], "`serve check` tries no launch that no service makes"
    found = explain_no_offer(candidate, catalog)
    assert str(found) == (
        "None"
        if use_spot
        else "H100:1 is not sold on demand, but as spot or by reservation (a3-highgpu-1g); set use_spot: true"
    )


def test_a_card_of_another_name_is_pointed_out() -> None:
    catalog = Catalog(tuple(one for one in CATALOG.listings if one.shape.accelerator != "A10"))
    assert str(explain_no_offer(Candidate(accelerator="A10"), catalog)) == (
        "the catalog has no accelerator 'A10'; A10G is the card nearest to it, on aws"
    )


def test_the_accounts_own_names_of_zones_are_understood() -> None:
    account = Account(zone_ids={"us-east-1a": "use1-az2"})
    candidate = Candidate(accelerator="L4", cloud="aws", zone="us-east-1a")
    assert [offer.zone.name for offer in _offers(candidate, account=account)] == ["use1-az2"]
    assert _offers(candidate) == []


@pytest.mark.parametrize(
    ("candidate", "field", "sentence"),
    [
        pytest.param(Candidate(accelerator="A1000"), "accelerator", "the catalog has no accelerator 'A1000'; did you mean 'A100'?", id="a slip"),
        pytest.param(Candidate(accelerator="MI300X"), "accelerator", "the catalog has no accelerator 'MI300X'; it has A10, A100, A10G, L4, T4", id="something else"),
        pytest.param(Candidate(cloud="azure", accelerator="L4"), "accelerator", "azure has no L4; the catalog has it on aws", id="not on that cloud"),
        pytest.param(Candidate(accelerator="L4", accelerator_count=3), "accelerator_count", "no machine has 3 of L4; there are machines with 1, 4", id="not that many"),
        pytest.param(Candidate(instance_type="g6.12xlrge"), "instance_type", "the catalog has no instance type 'g6.12xlrge' on aws or azure or gcp; did you mean 'g6.12xlarge'?", id="a type that is none"),
        pytest.param(Candidate(instance_type="m5.large", accelerator="L4"), "accelerator", "m5.large has no accelerator, not L4", id="a type without the accelerator"),
        pytest.param(Candidate(cloud="awz"), "cloud", "the catalog has no cloud 'awz'; did you mean 'aws'?", id="a cloud that is none"),
        pytest.param(Candidate(cloud="aws", region="us-esat-1", accelerator="L4"), "region", "the catalog has no region 'us-esat-1' on aws; did you mean 'us-east-1'?", id="a region that is none"),
        pytest.param(Candidate(region="eu-west-1", accelerator="A10G", accelerator_count=8), "region", "A10G:8 is not in eu-west-1; the catalog has it in us-east-1", id="not in that region"),
        pytest.param(Candidate(cloud="aws", zone="us-east-1a", accelerator="L4"), "zone", "which zone 'us-east-1a' is, only the account knows; name its id, which is the same in every account: euw1-az1, use1-az1, use1-az2", id="an account's own zone name"),
        pytest.param(Candidate(zone="us-central1-f", accelerator="A100"), "zone", "A100:1 is not in zone 'us-central1-f'; the catalog has it in us-central1-a, us-central1-b", id="a zone that has none"),
        pytest.param(Candidate(accelerator="L4", cpus="5"), "cpus", "L4:1 does not come with 5 CPUs; it comes with 4, 16", id="not with so many CPUs"),
        pytest.param(Candidate(memory="512+"), "memory", "a machine without accelerators does not come with 512+ GB of memory; it comes with 8, 16", id="not with so much memory"),
        pytest.param(Candidate(accelerator="L4", max_hourly_cost=0.1), "max_hourly_cost", "L4:1 costs 0.8 USD per hour or more (g6.xlarge in aws/use1-az1); max_hourly_cost is 0.1", id="too dear"),
    ],
)  # fmt: skip
def test_why_there_is_nothing(candidate: Candidate, field: str, sentence: str) -> None:
    assert _offers(candidate) == []
    found = explain_no_offer(candidate, CATALOG)
    assert found is not None
    assert found.field == field
    assert str(found) == sentence


def test_an_account_that_may_have_nothing_is_told_so() -> None:
    account = Account(reason=lambda shape, zone, market: "the quota is 0")
    found = explain_no_offer(Candidate(accelerator="L4"), CATALOG, account)
    assert found is not None
    assert found.field == "usable"
    assert found.message.endswith("in the zones that were asked for: the quota is 0")


def test_an_empty_catalog_is_the_reason_itself() -> None:
    assert str(explain_no_offer(Candidate(), Catalog())) == "the catalog is empty"


@pytest.mark.parametrize("use_spot", [True, False], ids=["spot", "on demand"])
@pytest.mark.parametrize("accelerator", packaged().accelerators)
def test_every_offer_of_the_packaged_catalog_is_as_asked(accelerator: str, use_spot: bool) -> None:
    counts = {row.shape.accelerator_count for row in packaged().by_accelerator[accelerator]}
    for count in counts:
        candidate = Candidate(accelerator=accelerator, accelerator_count=count, use_spot=use_spot)
        offers = offers_of(Requirements((candidate,)), packaged())
        assert {(offer.accelerator, offer.accelerator_count) for offer in offers} <= {(accelerator, count)}
        assert len({offer.zone for offer in offers}) == len(offers)
        assert offers == sorted(offers, key=lambda offer: offer.price_usd_hour)
        assert (offers == []) == (explain_no_offer(candidate, packaged()) is not None)


def test_three_clouds_are_looked_through_by_index() -> None:
    """What it costs is the number of rows looked at, not the time of a busy machine: those of the accelerators only."""
    seen = []
    account = Account(reason=lambda shape, zone, market: seen.append(zone) or "")
    need = Requirements(tuple(Candidate(accelerator=name, use_spot=True) for name in ("A100", "L4", "H100")))
    offers = offers_of(need, packaged(), account)
    assert {offer.zone.cloud for offer in offers} == {"aws", "gcp", "azure"}
    assert len(seen) < len(packaged().rows) / 3


def test_a_spot_price_that_is_not_known_is_at_most_the_one_on_demand_and_comes_last() -> None:
    need = Requirements((Candidate(accelerator="H100", accelerator_count=8, use_spot=True),))
    offers = offers_of(need, packaged())
    unknown = [
        row for row in packaged().by_accelerator["H100"] if row.spot is None and row.zone.cloud == "azure"
    ]
    assert unknown
    by_zone = {offer.zone: offer for offer in offers}
    for row in unknown:
        if row.shape.accelerator_count == 8:
            assert (
                by_zone[row.zone].price_usd_hour
                == by_zone[row.zone].on_demand_usd_hour
                == row.on_demand.usd_hour
            )


def test_no_packaged_spot_price_is_without_a_date() -> None:
    spot = [row.spot for row in packaged().rows if row.spot is not None]
    assert [price for price in spot if price.origin.as_of is None] == []


@pytest.mark.parametrize(
    "size",
    [
        "Standard_NC6s_v3",
        "Standard_ND40rs_v2",
        "Standard_NC8ads_A10_v4",
        "Standard_NCC40ads_H100_v5",
        "Standard_NV36ads_A10_v5",
    ],
)
def test_sizes_that_are_retired_or_do_not_boot_with_our_image_are_not_sold(size: str) -> None:
    assert size.lower() not in packaged().by_instance_type
