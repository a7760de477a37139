"""What protects instances of Google Cloud and their disks, as far as the user sets it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.model import Scope, Zone
from provisioners.gcp.errors import CLOUD
from provisioners.port.errors import RefusedError
from provisioners.port.vm import in_region


@dataclass(frozen=True, slots=True)
class Protection:
    """What the user has set for the security of instances.

    `shielded`: Secure Boot, a virtual TPM and integrity monitoring. `kms_key` encrypts disks: one for all regions, or one
    for each. `leaves_os_login`: whether OS Login is on, the project decides; otherwise it is off on our instances.
    """

    shielded: bool = False
    leaves_os_login: bool = False
    kms_key: str | Mapping[str, str] | None = None

    def key_in(self, zone: Zone) -> str | None:
        """RefusedError where keys are set and the region has none: its disks would not be encrypted by them."""
        key = in_region(self.kms_key, zone.region)
        if key is None and self.kms_key is not None:
            raise RefusedError(
                f"clouds.gcp.kms_key has no key for {zone.region}",
                cloud=CLOUD,
                code="NoKey",
                zone=zone,
                scope=Scope.REGION,
            )
        return key


PLAIN = Protection()
