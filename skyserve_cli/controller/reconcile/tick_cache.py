"""Which services a tick has to decide about again, and what it keeps for the others. Pure.

A decision about a service is a function of its row, its load, the offers, the events, what the clouds show and the time.
A service whose last turn wrote nothing is decided about again only when one of these differs, or the time has come at which
the outcome may differ although they do not. Otherwise its orders are those of the last turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.history import Load
from policies.model import Offer, Plan
from provisioners.port.base import Instance, Requirements
from skyserve_cli.controller.reconcile.listing_events import missing_from
from skyserve_cli.controller.reconcile.ports import (
    AgentOrder,
    CloudOperation,
    InstanceListing,
    NameOrder,
    ProbeOrder,
    RegionalOrder,
)
from skyserve_cli.state.values import ServiceRow

CHECKED_EVERY_S = 60.0  # a service is decided about at least this often, in case a trigger was missed
CHECKED_PER_TICK = 2  # and at most this number per tick for that reason alone

Demand = tuple[float, float, bool, float, bool]


class Orders(NamedTuple):
    """What the rows of one service require of those who act on them."""

    calls: tuple[CloudOperation, ...] = ()
    probes: tuple[ProbeOrder, ...] = ()
    agents: Mapping[str, AgentOrder | None] = {}  # by service: none or one
    regional: tuple[RegionalOrder, ...] = ()
    names: tuple[NameOrder, ...] = ()
    clouds: frozenset[str] = frozenset()


class Around(NamedTuple):
    """What all services depend on: the controller's term, the clouds listed so far, and those that cannot be listed."""

    epoch: int
    listed: frozenset[str]
    trouble: Mapping[str, str]


@dataclass(slots=True)
class Kept:
    """The last turn of one service.

    `demand` is None where no policy reads the load. `offers` are the responses to `needs`, in order. `until` is the instant
    from which time alone may change the outcome. `is_settled` is false while the turn may not be the last one: something was
    written, a call failed, a drain goes on or a deadline is held back.
    """

    row: ServiceRow
    around: Around
    demand: Demand | None
    needs: tuple[Requirements, ...]
    offers: tuple[tuple[Offer, ...] | None, ...]
    until: float
    decided_at: float
    is_settled: bool
    plan: Plan
    orders: Orders
    #: By cloud: the row for which the cloud's last listing had every instance and meant nothing new.
    listed: dict[str, ServiceRow] = field(default_factory=dict)


def why_again(
    kept: Kept | None,
    row: ServiceRow,
    *,
    has_events: bool,
    around: Around,
    demand: Demand | None,
    offers: Sequence[tuple[Offer, ...] | None],
    now: float,
) -> str:
    """Return why the service has to be decided about again; "" if the cached decision stands."""
    if kept is None:
        return "it has not been decided about yet"
    if has_events:
        return "something happened to it"
    if not kept.is_settled:
        return "its last turn was not at rest"
    if kept.row is not row:
        return "its row changed"
    if kept.around != around:
        return "the term, or what can be seen of the clouds, changed"
    if now >= kept.until:
        return "a deadline has come"
    if now < kept.decided_at:
        return "the clock was set back"
    if kept.demand != demand:
        return "its load changed"
    if any(mine is not theirs for mine, theirs in zip(kept.offers, offers, strict=True)):
        return "its offers changed"
    return ""


def demand_of(load: Load, history_end: int | None = None) -> Demand:
    """As much of the load as a scaler reads; one that reads a history decides when its `history_end` moves."""
    is_busy = load.in_flight + load.queued > 0
    if history_end is not None:
        return 0.0, history_end, is_busy, 0.0, True
    return load.window_s, load.requests, is_busy, load.ongoing, load.known


class Listings:
    """What each cloud showed last."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Instance, ...]] = {}

    def changed(self, listings: Iterable[InstanceListing]) -> set[str]:
        """Return the services whose instances differ from the last listing of their cloud, or that a report is about."""
        names: set[str] = set()
        for listing in listings:
            if not listing.is_listing:
                names |= {instance.service for instance in listing.instances}
                continue
            names |= {listing.by_id[id].service for id in listing.unattended}
            last = self._last.get(listing.cloud, ())
            if listing.instances != last:
                names |= _differing(last, listing.instances)
                self._last[listing.cloud] = listing.instances
        return names


def _differing(before: Sequence[Instance], after: Sequence[Instance]) -> set[str]:
    old = {instance.id: instance for instance in before}
    names = set()
    for instance in after:
        was = old.pop(instance.id, None)
        if was is not instance and was != instance:
            names.add(instance.service)
    return names | {instance.service for instance in old.values()}


def is_relevant(kept: Kept, listings: Iterable[InstanceListing], changed: Collection[str]) -> bool:
    """Return whether one of the sightings may mean something new for the service.

    `changed` as `Listings.changed` returned it.
    """
    if kept.row.name in changed:
        return True
    return any(
        listing.is_listing
        and listing.cloud in kept.orders.clouds
        and kept.listed.get(listing.cloud) is not kept.row
        for listing in listings
    )


def note_listings(kept: Kept, listings: Iterable[InstanceListing]) -> None:
    """Remember that the service, as it stands, was compared with these."""
    for listing in listings:
        if not listing.is_listing:
            continue
        if kept.is_settled and not missing_from(listing, kept.row.attempts):
            kept.listed[listing.cloud] = kept.row
        else:
            kept.listed.pop(listing.cloud, None)
