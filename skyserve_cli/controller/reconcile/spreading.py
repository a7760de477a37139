"""What it costs that replicas are spread over zones and not all in the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policies.goals import AcceleratorQps
from policies.model import Offer
from policies.placement import price_limits
from policies.throughput import usd_of_work

LEAST_USD_HOUR = 0.000_001


class Spreading(NamedTuple):
    """The rented replicas of a plan in USD per hour.

    `usd_per_hour` is what the spreading costs, `usd_per_hour_cheapest_only` what they cost without it. `zones` is how many
    they are spread over.
    """

    usd_per_hour: float
    usd_per_hour_cheapest_only: float
    zones: int

    def view(self) -> dict[str, Any]:
        return self._asdict()


def spreading(
    launched: Sequence[Offer], offers: Sequence[Offer], work: Sequence[AcceleratorQps] = ()
) -> Spreading | None:
    """Return what spreading costs where these are launched; None where it costs nothing.

    Each rented replica is compared with the cheapest offer of its capacity type that the user prefers as much, for the same
    `work`. Replicas on own hosts do not count.
    """
    rented = price_limits.without_own_hosts(offers)
    preferences = {replace(offer, preference=0): offer.preference for offer in rented}
    own = price_limits.own_zones(offers)
    paid, least, zones = 0.0, 0.0, set()
    for offer in launched:
        preference = preferences.get(offer)
        if preference is None or offer.zone in own:
            continue
        alike = (o for o in rented if (o.capacity_type, o.preference) == (offer.capacity_type, preference))
        share = min(usd_of_work(o, work) for o in alike) / (usd_of_work(offer, work) or 1.0)
        paid += offer.price_usd_hour
        least += offer.price_usd_hour * share
        zones.add(offer.zone)
    more = round(paid - least, 6)
    return Spreading(more, round(least, 6), len(zones)) if more >= LEAST_USD_HOUR else None
