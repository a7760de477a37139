"""What a rented machine costs beside its own price: its disk, and its public address. About, and for people to know.

List prices of the vendors' cheapest American regions in 2025, to be confirmed (docs/unconfirmed.md): gp3 0.08, pd-balanced 0.10 and
Standard SSD (E15) 0.075 USD per GB and month; a public IPv4 address 0.005 USD per hour on all three. Traffic out of a cloud, about
0.09 USD per GB, is left out: it depends on the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_USD_GB_MONTH: Mapping[str, float] = MappingProxyType({"aws": 0.08, "gcp": 0.10, "azure": 0.075})
_USD_ADDRESS_HOUR = 0.005
_HOURS_A_MONTH = 730.0


def extra_usd_hour(cloud: str, disk_gb: float, *, has_address: bool) -> float:
    """Of one machine; 0.0 on clouds whose price has all of it, or that are not known."""
    if cloud not in _USD_GB_MONTH:
        return 0.0
    disk = _USD_GB_MONTH[cloud] * disk_gb / _HOURS_A_MONTH
    return disk + (_USD_ADDRESS_HOUR if has_address else 0.0)
