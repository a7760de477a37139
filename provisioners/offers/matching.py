"""From what a service requests to offers: candidates x rows of the catalog x prices of the moment x zones one may use.

A row fits a candidate if all of `tests_of` hold; `explain_no_offer` takes the same tests one by one to say which of them
left nothing. Pure, and quick: a few milliseconds for three clouds.

*Counts are exact*, as in SkyPilot: ``A10G:1`` never becomes a machine of eight that costs eight times as much, and
``L4:4`` is one machine with four. *One offer per zone and candidate*, the cheapest shape that fits: placement leaves a
zone that refused an accelerator alone for all machines with as many, so that a dearer one would never be requested. A candidate without accelerator
and without instance type means machines without accelerators. Where no spot price is known, the one on demand stands for it.
What a cloud does not sell on demand is offered as spot alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from policies.goals import AcceleratorQps
from policies.model import CapacityType, Offer, Zone
from policies.throughput import usd_of_work
from provisioners.offers.catalog.model import Catalog, Row, Shape
from provisioners.port.accelerator_names import canonical
from provisioners.port.base import Candidate, Requirements
from provisioners.port.vm import SpotPrice

NO_RESERVATION = "none"  # of a candidate without reservations
_SAME_COUNT = 0.005  # a third of an accelerator is written 0.333 or 0.33

Test = Callable[[Row], bool]
Reason = Callable[[Shape, Zone, CapacityType], str]


@dataclass(frozen=True, slots=True)
class Account:
    """What an account knows better than the catalog.

    `spot_price` takes a shape's name and a zone; None leaves the catalog's price. `reason` is why the account cannot have a
    shape in a zone and market ("" if it can, as far as is known). `zone_ids` maps names that are the account's own
    (``us-east-1a``) to those of the catalog (``use1-az4``).
    """

    spot_price: SpotPrice | None = None
    reason: Reason | None = None
    zone_ids: Mapping[str, str] = field(default_factory=dict)


ANY_ACCOUNT = Account()


@runtime_checkable
class Customer(Protocol):
    """A provisioner that knows its account."""

    account: Account


@runtime_checkable
class Stocked(Protocol):
    """A provisioner whose offers come from a catalog, which may change while it is used."""

    def restock(self, catalog: Catalog, reason: Reason | None = None) -> None:
        """Offer from another catalog of the same cloud from now on; `reason` as in `Account`."""
        ...


def offers_of(
    need: Requirements,
    catalog: Catalog,
    account: Account = ANY_ACCOUNT,
) -> list[Offer]:
    """Return what could be launched for `need`, cheapest first; with `need.ordered`, in the order of the candidates."""
    groups = [
        sorted(_offers(candidate, catalog, account, need.num_nodes), key=ranked_by(need.work))
        for candidate in need.candidates
    ]
    offers = each_once(offer for group in groups for offer in group)
    return offers if need.ordered else sorted(offers, key=ranked_by(need.work))


def each_once(offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers without repetitions: of those that differ in nothing but the alternative, the first is kept."""
    first: dict[Offer, Offer] = {}
    for offer in offers:
        first.setdefault(replace(offer, choice=0), offer)
    return list(first.values())


def ranked_by(work: Sequence[AcceleratorQps]) -> Callable[[Offer], tuple[float, Zone, str, float]]:
    """Return a key that sorts offers from the best to the worst, the same way on every cloud."""
    return lambda offer: (usd_of_work(offer, work), offer.zone, offer.instance_type, offer.accelerator_count)


def in_order(need: Requirements, query: Callable[[Requirements], Iterable[Offer]]) -> tuple[Offer, ...]:
    """Return all offers, best first: the cheapest, or with `need.ordered` the cheapest of the best preference.

    `ask` returns offers for any number of clouds, in any order.
    """
    preferences = sorted({candidate.preference for candidate in need.candidates}) if need.ordered else [0]
    found: list[Offer] = []
    for preference in preferences:
        alike = tuple(c for c in need.candidates if not need.ordered or c.preference == preference)
        part = replace(need, candidates=alike, ordered=False)
        best_first = sorted(query(part), key=ranked_by(need.work))
        found += [replace(offer, preference=preference) for offer in best_first] if preference else best_first
    return tuple(each_once(found))


def price_of(row: Row, candidate: Candidate, account: Account = ANY_ACCOUNT) -> float:
    """Return USD per hour of one machine as the candidate buys it: what the account pays now, else what the catalog has.

    A spot price that is not known is taken to be that on demand, which it cannot exceed: such a zone is offered, and
    only after those whose price is known to be lower.
    """
    if not candidate.use_spot:
        return row.on_demand.usd_hour
    live = None if account.spot_price is None else account.spot_price(row.shape.name, row.zone)
    if live is not None:
        return live
    return row.on_demand.usd_hour if row.spot is None else row.spot.usd_hour


def tests_of(candidate: Candidate, account: Account) -> Iterator[tuple[str, Test]]:
    """Yield what the candidate requires of a row, each by the field that requires it, in the order in which a person would look."""
    cloud, instance_type = given(candidate.cloud), given(candidate.instance_type)
    region, zone = given(candidate.region), given(candidate.zone)
    if cloud is not None:
        yield "cloud", lambda row: row.zone.cloud == cloud
    if instance_type is not None:
        yield (
            "instance_type",
            lambda row: instance_type in (row.shape.name.lower(), row.shape.machine_type.lower()),
        )
    if candidate.accelerator is not None:
        name, count = canonical(candidate.accelerator), candidate.accelerator_count
        yield "accelerator", lambda row: row.shape.accelerator == name
        yield "accelerator_count", lambda row: abs(row.shape.accelerator_count - count) < _SAME_COUNT
    elif instance_type is None:
        yield "accelerator", lambda row: row.shape.accelerator is None
    if (cpus := _size(candidate.cpus)) is not None:
        yield "cpus", lambda row: cpus(row.shape.vcpus, row)
    if (memory := _size(candidate.memory)) is not None:
        yield "memory", lambda row: memory(row.shape.memory_gib, row)
    reservation = candidate.reservation
    if reservation is not None:
        only = "" if reservation == NO_RESERVATION else reservation
        yield "reservation", lambda row: row.zone.reservation == only
    if candidate.use_spot:
        yield "use_spot", lambda row: row.places is None
    else:
        yield "on_demand", lambda row: row.is_on_demand
    if region is not None:
        yield "region", lambda row: row.zone.region == region
    if zone is not None:
        # Zone 1 of Azure's eastus is `1` in Azure's own words; ours have the region before it.
        named = account.zone_ids.get(zone, zone)
        yield "zone", lambda row: row.zone.name in (named, f"{row.zone.region}-{named}")
    reason = account.reason
    if reason is not None:
        yield (
            "usable",  # reservations count to no quota again
            lambda row: row.places is not None or not reason(row.shape, row.zone, market_of(candidate)),
        )
    most = candidate.max_hourly_cost
    if most is not None:
        yield "max_hourly_cost", lambda row: price_of(row, candidate, account) <= most


def market_of(candidate: Candidate) -> CapacityType:
    return CapacityType.SPOT if candidate.use_spot else CapacityType.ON_DEMAND


def given(wish: str | None) -> str | None:
    """Return a name in lower case; None for none, and for ``*``."""
    return None if wish is None or wish == "*" else wish.lower()


def _offers(candidate: Candidate, catalog: Catalog, account: Account, num_nodes: int) -> Iterator[Offer]:
    tests = [test for _, test in tests_of(candidate, account)]
    cheapest: dict[Zone, tuple[float, str, Row]] = {}
    for row in _rows(candidate, catalog):
        if not all(test(row) for test in tests):
            continue
        price = price_of(row, candidate, account)
        known = cheapest.get(row.zone)
        if known is None or (price, row.shape.name) < known[:2]:
            cheapest[row.zone] = (price, row.shape.name, row)
    for zone, (price, _, row) in cheapest.items():
        yield Offer(
            zone=zone,
            instance_type=row.shape.name,
            accelerator=row.shape.accelerator,
            accelerator_count=row.shape.accelerator_count,
            capacity_type=market_of(candidate),
            price_usd_hour=round(price * num_nodes, 6),
            on_demand_usd_hour=round(row.on_demand.usd_hour * num_nodes, 6),
            choice=candidate.choice,
            places=None if row.places is None else row.places // num_nodes,
        )


def _rows(candidate: Candidate, catalog: Catalog) -> Sequence[Row]:
    """Return those that can fit at all, by the catalog's indices."""
    instance_type = given(candidate.instance_type)
    if instance_type is not None:
        return catalog.by_instance_type.get(instance_type, ())
    name = None if candidate.accelerator is None else canonical(candidate.accelerator)
    return catalog.by_accelerator.get(name, ())


def _size(wish: str | None) -> Callable[[float, Row], bool] | None:
    """`4` is exactly four, `4+` at least, `4x` (of memory) at least so much per virtual CPU.

    None for no wish, and for one that cannot be read: the reader of service files lets none pass.
    """
    try:
        asked = float((wish or "").rstrip("+x"))
    except ValueError:
        return None
    if wish is not None and wish.endswith("x"):
        return lambda has, row: has >= asked * row.shape.vcpus
    if wish is not None and wish.endswith("+"):
        return lambda has, row: has >= asked
    return lambda has, row: has == asked
