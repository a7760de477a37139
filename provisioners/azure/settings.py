"""The Azure section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from provisioners.offers.reservations import Reservations


@dataclass(frozen=True, slots=True)
class AzureSettings:
    """`subnet_ids` (by region) are the user's own subnets; elsewhere a network is set up.

    With `use_private_ip` no machine has a public address, and we reach it from inside. `arm_url` None is that of `cloud`.
    `regions` are those that `check` looks at. Images: publisher:offer:sku:version, or a resource id. `disk_encryption_set`
    is the id of one, or one for each region. `labels` are of what machines share, and of their records.
    """

    subscription_id: str
    regions: tuple[str, ...] = ()
    use_private_ip: bool = False
    subnet_ids: Mapping[str, str] = field(default_factory=dict)
    cloud: str = "public"  # of `sovereign.CLOUDS`
    arm_url: str | None = None
    identity: str | None = None
    dead_man_identity: str | None = None
    disk_encryption_set: str | Mapping[str, str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    reservations: Reservations = field(default_factory=dict)
    prices_url: str = "https://prices.azure.com/api/retail/prices"
    allocation_wait_s: float = 60.0
    forget_wait_s: float = 600.0
