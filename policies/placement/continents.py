"""The continent of a cloud region, by the beginning of its name.

The prefixes are the clouds' own, from their public lists of regions: AWS "Regions and Availability Zones", Google Cloud
"Regions and zones", Azure "List of Azure regions". Regions of other clouds, and of the user's own hosts, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.model import Zone

NORTH_AMERICA, SOUTH_AMERICA = "North America", "South America"
EUROPE, ASIA, AFRICA, OCEANIA = "Europe", "Asia", "Africa", "Oceania"

_AWS = {
    "us-": NORTH_AMERICA, "ca-": NORTH_AMERICA, "mx-": NORTH_AMERICA, "sa-": SOUTH_AMERICA, "eu-": EUROPE,
    "ap-southeast-2": OCEANIA, "ap-southeast-4": OCEANIA, "ap-southeast-6": OCEANIA,
    "ap-": ASIA, "me-": ASIA, "il-": ASIA, "cn-": ASIA, "af-": AFRICA,
}  # fmt: skip
_GCP = {
    "us-": NORTH_AMERICA, "northamerica-": NORTH_AMERICA, "southamerica-": SOUTH_AMERICA, "europe-": EUROPE,
    "asia-": ASIA, "me-": ASIA, "africa-": AFRICA, "australia-": OCEANIA,
}  # fmt: skip
_AZURE = {
    **dict.fromkeys(
        ("centralus", "eastus", "northcentralus", "southcentralus", "westcentralus", "westus", "canada", "mexico"),
        NORTH_AMERICA,
    ),
    **dict.fromkeys(("brazil", "chile"), SOUTH_AMERICA),
    **dict.fromkeys(
        (
            "northeurope", "westeurope", "uk", "france", "germany", "switzerland", "norway", "sweden", "italy",
            "poland", "spain", "austria", "belgium", "denmark", "finland", "greece",
        ),
        EUROPE,
    ),
    **dict.fromkeys(
        (
            "eastasia", "southeastasia", "japan", "korea", "centralindia", "southindia", "westindia", "jioindia",
            "uae", "qatar", "israel", "indonesia", "malaysia", "taiwan", "china", "saudi",
        ),
        ASIA,
    ),
    "southafrica": AFRICA, "australia": OCEANIA, "newzealand": OCEANIA,
}  # fmt: skip

#: Prefixes of the regions of each cloud. The longest that fits counts.
PREFIXES: Mapping[str, Mapping[str, str]] = MappingProxyType({"aws": _AWS, "gcp": _GCP, "azure": _AZURE})


def continent_of(zone: Zone) -> str | None:
    """Return the continent of the zone's region; None where the table does not know it."""
    known = PREFIXES.get(zone.cloud, {})
    fitting = [prefix for prefix in known if zone.region.startswith(prefix)]
    return known[max(fitting, key=len)] if fitting else None
