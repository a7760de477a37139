"""The `azure` cloud: a provisioner over Azure's virtual machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from provisioners import assembly
from provisioners.azure.machines import AzureMachines
from provisioners.azure.settings import AzureSettings
from provisioners.azure.sovereign_clouds import CLOUDS
from provisioners.azure.termination import terminate_script
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.reservations import Reservations
from provisioners.own_address import OwnAddresses
from provisioners.port.vm import Finding, Level

_STAYS_BILLED = Finding(
    "dead-man switch",
    Level.NOTE,
    "a machine whose lease is over is only switched off, and Azure bills it until it is deleted; "
    "set clouds.azure.dead_man_identity (docs/leases.md)",
)


class AzureSection(assembly.VmSection, Protocol):
    """The `azure` section of config.yaml. `subnets` are ids of the user's own, by region."""

    subscription_id: str
    subnets: Mapping[str, str]
    cloud: str
    disk_encryption_set: str | Mapping[str, str] | None
    arm_url: str | None
    identity: str | None
    dead_man_identity: str | None
    reservations: Reservations


class AzureProvisioner(assembly.VmCloudProvisioner):
    """Credentials are found as azure-identity finds them: the environment, a managed identity, `az login`."""

    name: ClassVar[str] = "azure"
    # Lists are of the whole subscription, and count to limits that it shares with all other users of Compute there.
    steady_poll_s: ClassVar[float] = 30.0

    def __init__(
        self,
        section: AzureSection,
        catalog: Catalog,
        secret: bytes,
        own: OwnAddresses | None = None,
        folder: Path | None = None,
    ) -> None:
        self._is_billed_when_lost = section.dead_man_identity is None and section.dead_man_minutes != 0
        script = (
            ""
            if section.dead_man_identity is None
            else terminate_script(section.arm_url or CLOUDS[section.cloud].arm_url)
        )
        super().__init__(
            machines_of(section),
            section,
            catalog,
            secret,
            own=own,
            folder=folder,
            terminate_script=script,
            subnets=section.subnets,
        )

    def check(self) -> Sequence[Finding]:
        found = super().check()
        return [*found, _STAYS_BILLED] if self._is_billed_when_lost else found


def machines_of(section: AzureSection) -> AzureMachines:
    """Azure as the section describes it."""
    settings = AzureSettings(
        section.subscription_id,
        regions=section.regions or (),
        use_private_ip=section.use_private_ip,
        subnet_ids=section.subnets,
        disk_encryption_set=section.disk_encryption_set,
        labels=section.labels,
        cloud=section.cloud,
        arm_url=section.arm_url,
        identity=section.identity,
        dead_man_identity=section.dead_man_identity,
        reservations=section.reservations,
    )
    return AzureMachines(settings)
