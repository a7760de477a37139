"""What a byte costs that leaves a region, in USD per GB: to another region of the same cloud, and to anywhere else.

List prices of 2025 of the first volume tier, by the continent of the region that sends, to be confirmed (docs/unconfirmed.md): AWS
"EC2 data transfer", Google Cloud "VM-VM egress" and premium tier, Azure "Bandwidth". Own hosts, the local cloud and clouds that
are not known cost nothing here. An account's own prices take the place of a cloud's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from policies.model import Zone
from policies.placement.continents import (
    AFRICA,
    ASIA,
    EUROPE,
    NORTH_AMERICA,
    OCEANIA,
    SOUTH_AMERICA,
    continent_of,
)


class Rates(NamedTuple):
    """USD per GB to a region of the same cloud on the same continent and on another one, and to the internet."""

    near: float
    far: float
    internet: float


FREE = Rates(0.0, 0.0, 0.0)
NO_RATES: Mapping[str, Rates] = MappingProxyType({})
RATES: Mapping[str, Mapping[str, Rates]] = MappingProxyType(
    {
        "aws": {
            NORTH_AMERICA: Rates(0.02, 0.02, 0.09),
            EUROPE: Rates(0.02, 0.02, 0.09),
            ASIA: Rates(0.09, 0.09, 0.114),
            OCEANIA: Rates(0.098, 0.098, 0.114),
            SOUTH_AMERICA: Rates(0.138, 0.138, 0.15),
            AFRICA: Rates(0.147, 0.147, 0.154),
        },
        "gcp": {
            NORTH_AMERICA: Rates(0.02, 0.05, 0.12),
            EUROPE: Rates(0.02, 0.05, 0.12),
            ASIA: Rates(0.08, 0.08, 0.12),
            OCEANIA: Rates(0.08, 0.1, 0.19),
            SOUTH_AMERICA: Rates(0.08, 0.14, 0.12),
            AFRICA: Rates(0.08, 0.14, 0.12),
        },
        "azure": {
            NORTH_AMERICA: Rates(0.02, 0.05, 0.087),
            EUROPE: Rates(0.02, 0.05, 0.087),
            ASIA: Rates(0.08, 0.08, 0.12),
            OCEANIA: Rates(0.08, 0.08, 0.12),
            SOUTH_AMERICA: Rates(0.16, 0.16, 0.181),
            AFRICA: Rates(0.08, 0.08, 0.181),
        },
    }
)


def egress_usd_per_gb(source: Zone, target: Zone, own: Mapping[str, Rates] = NO_RATES) -> float:
    """Return the price of a GB from one region to another, 0.0 within one; a region that is not known counts as North American.

    `own` are the prices of an account, by cloud, wherever the sender is.
    """
    if (source.cloud, source.region) == (target.cloud, target.region):
        return 0.0
    continent = continent_of(source) or NORTH_AMERICA
    rates = RATES.get(source.cloud)
    found = own.get(source.cloud) or (FREE if rates is None else rates[continent])
    if source.cloud != target.cloud:
        return found.internet
    return found.near if (continent_of(target) or NORTH_AMERICA) == continent else found.far
