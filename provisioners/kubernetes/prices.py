"""What a Pod costs per hour: what config.yaml says of its accelerator, else nothing. Pure.

The nodes are paid for by those who run the cluster. At 0 they come before every cloud that rents, which is meant: one's own
hardware first.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.model import CapacityType
from provisioners.kubernetes.settings import NodePrice
from provisioners.port.accelerator_names import canonical

WITHOUT_ACCELERATOR = "cpu"


def usd_hour(
    prices: Mapping[str, NodePrice], accelerator: str | None, count: float, capacity_type: CapacityType
) -> float:
    """Return the price of a Pod with `count` accelerators. Spot without a price of its own costs the same."""
    if accelerator is None:
        found = prices.get(WITHOUT_ACCELERATOR, NodePrice())
        count = 1.0
    else:
        by_name = {canonical(name): price for name, price in prices.items()}
        found = by_name.get(canonical(accelerator), NodePrice())
    each = found.usd_hour
    if capacity_type is CapacityType.SPOT and found.spot_usd_hour is not None:
        each = min(each, found.spot_usd_hour) if each else found.spot_usd_hour
    return round(each * count, 6)
