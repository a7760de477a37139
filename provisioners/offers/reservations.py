"""Capacity that the user has reserved with a cloud.

EC2's capacity reservations and blocks, Compute Engine's reservations, Azure's capacity reservation groups.

It is paid for whether it is used or not, so placement treats it as it treats the user's own hosts: it comes first, and only
what does not fit is rented. In the catalog each reservation is a listing of its own, in a zone of its own (`Zone.reservation`),
so that neither a refusal nor a price of the market is evidence about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Protocol

from policies.model import Scope
from provisioners.offers.catalog.model import Catalog, Listing, Origin, Price, Quality, Reserved
from provisioners.port.accelerator_names import close_to
from provisioners.port.errors import RefusedError
from provisioners.port.vm import MachineOrder

#: A capacity block's machines are terminated 30 minutes before its end (EC2's guide, "Capacity Blocks for ML"). One that could
#: not load a model and serve for a while before that is not launched.
LAST_LAUNCH_S = 3600.0


class Reservation(Protocol):
    """One of `clouds.CLOUD.reservations`.

    `id` is what the cloud calls it; `kind` how it is requested; `count` machines of `instance_type` in `zone`; `until` is
    when it stops.
    """

    id: str
    zone: str
    instance_type: str
    count: int
    usd_hour: float
    until: datetime | None

    @property
    def kind(self) -> str: ...


Reservations = Mapping[str, Reservation]


def open_at(reservations: Reservations, now: float) -> dict[str, Reservation]:
    """Return those that are still worth launching into."""
    return {
        name: each
        for name, each in reservations.items()
        if each.until is None or each.until.timestamp() - now >= LAST_LAUNCH_S
    }


def reserved_listings(reservations: Reservations, catalog: Catalog, cloud: str) -> Iterator[Listing]:
    """Yield reserved capacity, as the catalog's rows.

    ValueError for a zone or an instance type that the catalog of the cloud does not know.
    """
    regions = {row.zone.name: row.zone.region for row in catalog.rows if row.zone.cloud == cloud}
    shapes = {each.shape.name.lower(): each.shape for each in catalog.listings if each.shape.cloud == cloud}
    for name, each in reservations.items():
        at = f"clouds.{cloud}.reservations.{name}"
        if each.zone not in regions:
            raise ValueError(
                f"{at}.zone: the catalog has no zone {each.zone!r} on {cloud}{_meant(each.zone, regions)}"
            )
        shape = shapes.get(each.instance_type.lower())
        if shape is None:
            known = (one.name for one in shapes.values())
            raise ValueError(
                f"{at}.instance_type: the catalog has no {each.instance_type!r} on {cloud}"
                f"{_meant(each.instance_type, known)} (one that exists is added by `serve catalog discover`)"
            )
        origin = Origin("config.yaml", None, Quality.EXACT)
        yield Listing(
            shape,
            regions[each.zone],
            Price(each.usd_hour, origin),
            {each.zone: None},
            Reserved(name, each.count),
        )


def reserved_for(order: MachineOrder, reservations: Reservations) -> Reservation | None:
    """Return the reservation that the machine is to be launched into, None without one.

    RefusedError if it is not configured any more.
    """
    if not order.reservation:
        return None
    if order.reservation not in reservations:
        cloud = order.zone.cloud
        raise RefusedError(
            f"clouds.{cloud}.reservations has no {order.reservation!r} any more",
            cloud=cloud,
            code="NoReservation",
            zone=order.zone,
            scope=Scope.OFFER,
        )
    return reservations[order.reservation]


def _meant(word: str, known: Iterable[str]) -> str:
    close = close_to(word, known)
    return f"; did you mean {close!r}?" if close else ""
