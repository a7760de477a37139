"""Newer prices, if they can be believed.

A price API is requested the types and regions that the catalog has, and its quotes (`Quote`) take the place of the
catalog's prices. Which SKU is meant is often only in a description, so that a wrong one comes up sooner or later:
a price three times the known price, or a third of it, is refused unless the user accepts it, and a spot price above
on-demand always is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast

from policies.model import CapacityType
from provisioners.offers.catalog.fetch import Sources
from provisioners.offers.catalog.model import Listing, Origin, Price, Quality

JUMP = 3.0  # times the known price, either way

Progress = Callable[[int, int, str], None]  # requests made, requests in all, and what the next one is about


@dataclass(frozen=True, slots=True)
class Quote:
    """A price as the cloud's API gave it, of one machine. `zone` None: of all zones of the region."""

    instance_type: str
    region: str
    capacity_type: CapacityType
    usd_hour: float
    zone: str | None = None


class PriceApi(Protocol):
    """The module `prices_<cloud>`."""

    SOURCE: str

    def quotes(self, listings: Sequence[Listing], sources: Sources, progress: Progress) -> Sequence[Quote]:
        """Return the API's prices of these types and regions; what it does not say is left out.

        Raises the classes of `provisioners.port.errors`.
        """
        ...


#: A cloud's module, and with it its SDK, is imported when it is needed.
PRICE_APIS: Mapping[str, str] = MappingProxyType(
    {cloud: f"provisioners.{cloud}.price_list" for cloud in ("aws", "azure", "gcp")}
)


@dataclass(frozen=True, slots=True)
class RejectedQuote:
    """A price that was not taken over, in one sentence. `can_be_accepted`: by the user's word."""

    instance_type: str
    region: str
    why: str
    can_be_accepted: bool = True

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.region}: {self.why}"


@dataclass(frozen=True, slots=True)
class Refreshed:
    """`listings` are all that were given, with the prices that were taken over; `taken` is how many those are."""

    listings: tuple[Listing, ...]
    taken: int
    refused: tuple[RejectedQuote, ...]


def refresh(
    cloud: str,
    listings: Sequence[Listing],
    sources: Sources,
    now: float,
    *,
    accept: bool = False,
    progress: Progress = lambda done, of, what: None,
) -> Refreshed:
    """Read from the cloud's price API the prices of its listings."""
    api = cast(PriceApi, import_module(PRICE_APIS[cloud]))
    quotes = api.quotes(listings, sources, progress)
    return taken_over(listings, quotes, Origin(api.SOURCE, now, Quality.EXACT), accept=accept)


def taken_over(
    listings: Sequence[Listing], quotes: Sequence[Quote], origin: Origin, *, accept: bool = False
) -> Refreshed:
    """Return the listings with the quotes that can be believed, or that the user has said to accept."""
    asked = {(q.instance_type, q.region, q.capacity_type, q.zone): q.usd_hour for q in quotes}
    refused: list[RejectedQuote] = []
    taken = 0

    def checked(listing: Listing, known: Price | None, usd_hour: float | None, most: float) -> Price | None:
        nonlocal taken
        if usd_hour is None:
            return known
        refusal = _refusal(listing, known, usd_hour, most)
        if refusal is not None and not (accept and refusal.can_be_accepted):
            refused.append(refusal)
            return known
        taken += 1
        return Price(usd_hour, origin)

    result = []
    for listing in listings:
        place = listing.shape.name, listing.region
        usd_hour = asked.get((*place, CapacityType.ON_DEMAND, None))
        on_demand = checked(listing, listing.on_demand, usd_hour, float("inf")) or listing.on_demand
        of_region = asked.get((*place, CapacityType.SPOT, None))
        spot = {
            zone: checked(
                listing,
                known,
                asked.get((*place, CapacityType.SPOT, zone), of_region),
                on_demand.usd_hour,
            )
            for zone, known in listing.spot.items()
        }
        result.append(replace(listing, on_demand=on_demand, spot=spot))
    return Refreshed(tuple(result), taken, tuple(dict.fromkeys(refused)))


def _refusal(listing: Listing, known: Price | None, usd_hour: float, most: float) -> RejectedQuote | None:
    name, region = listing.shape.name, listing.region
    if not 0 < usd_hour < float("inf"):
        return RejectedQuote(name, region, f"{usd_hour:g} USD per hour is no price", can_be_accepted=False)
    if usd_hour > most:
        why = f"spot for {usd_hour:g} USD per hour is above on-demand ({most:g})"
        return RejectedQuote(name, region, why, can_be_accepted=False)
    is_estimate = known is not None and known.origin.quality is Quality.ESTIMATED
    if (
        known is not None
        and not is_estimate
        and not known.usd_hour / JUMP <= usd_hour <= known.usd_hour * JUMP
    ):
        return RejectedQuote(name, region, f"{usd_hour:g} USD per hour, and was {known.usd_hour:g}")
    return None
