"""How many requests a replica can serve, by the accelerators it runs on, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from policies.goals import AcceleratorQps
from policies.model import Offer


def qps_of(offer: Offer, work: Sequence[AcceleratorQps]) -> float:
    """Requests per second of one replica on this offer.

    A value for the exact count goes before one for any, and an accelerator without a value counts with the smallest. Case
    does not matter. `work` must not be empty.
    """
    name = (offer.accelerator or "").lower()
    fitting = [entry for entry in work if entry.accelerator.lower() == name]
    for count in (offer.accelerator_count, None):
        for entry in fitting:
            if entry.count == count:
                return entry.qps
    return min(entry.qps for entry in work)


def usd_of_work(offer: Offer, work: Sequence[AcceleratorQps]) -> float:
    """Return the price by which offers are compared.

    USD per hour, for each request per second if it is known how many a replica serves. An A100 at three times the price of
    an L4 that does four times its work is the cheaper one.
    """
    return offer.price_usd_hour / qps_of(offer, work) if work else offer.price_usd_hour
